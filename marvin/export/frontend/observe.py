"""What each call of a traced model gives on samples: shapes, plain numbers, and ranges."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from marvin.export.errors import NO_MEMORY, ExportError
from marvin.export.execute.verify import evaluating

__all__ = ["Observed", "has_tensors", "observe"]

_Range = tuple[float, float]


@dataclass(frozen=True)
class Observed:
    """What the calls of a trace gave.

    Args:
        shapes: Of each tensor, batch included, by the name of its node.
        plain: What is no tensor, such as a size, by the name of its node.
        ranges: Smallest and largest value of each floating tensor, by the name of its node.
        constants: Tensors that are the same whatever comes in, by the name of their nodes.
    """

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    ranges: dict[str, _Range] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)

    def range_of(self, node: str) -> _Range:
        """Return the range of a node's values.

        Raises:
            ExportError: They were not all finite.
        """
        low, high = self.ranges[node]
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ExportError(f"{node} must be finite to get a format, got {low} to {high}")
        return low, high


@torch.no_grad()
def observe(model: nn.Module, graph: fx.Graph, samples: Tensor) -> Observed:
    """Run a trace in eval mode, call by call.

    Args:
        model: What was traced; hooks on its layers run.
        graph: Its trace.
        samples: What it takes, shape ``(n, ...)``.

    Raises:
        ExportError: The model does not take the samples.
    """
    watcher = _Watcher(model, graph)
    with evaluating(model):
        try:
            watcher.run(samples.clone())
        except NO_MEMORY:
            raise
        except Exception as error:  # whatever the model's own code raises
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
            got, instead = f"shape {tuple(samples.shape)}", ""
            if samples.dtype is not torch.float32:
                got = f"{samples.dtype} and {got}"
                instead = ": write samples.float(), scaled as in training, unless they are indices"
            raise ExportError(
                f"the model must take samples of {got}, got {reason}{instead}"
            ) from error
    return watcher.observed


class _Watcher(fx.Interpreter):
    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        super().__init__(model, graph=graph)
        self.extra_traceback = False
        self.observed = Observed()

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a layer; the model itself where it is one."""
        return self.module.get_submodule(str(target))(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        """Run one call and remember what it gave."""
        result = super().run_node(n)
        found = self.observed
        if not isinstance(result, Tensor):
            found.plain[n.name] = result
            return result
        found.shapes[n.name] = tuple(result.shape)
        known = all(self._is_known(source) for source in n.all_input_nodes)
        if n.op != "placeholder" and known:
            found.constants[n.name] = result.detach().clone()
        if result.is_floating_point() and result.numel():
            found.ranges[n.name] = float(result.min()), float(result.max())
        return result

    def _is_known(self, node: fx.Node) -> bool:
        """Say whether a node gives the same whatever comes in."""
        found = self.observed
        if node.name in found.constants:
            return True
        return node.name in found.plain and not has_tensors(found.plain[node.name])


def has_tensors(plain: object) -> bool:
    """Say whether something is a tensor, or a tuple or list with one inside."""
    if isinstance(plain, tuple | list):
        return any(has_tensors(x) for x in plain)
    return isinstance(plain, Tensor)
