"""Ranks and sizes while a model is traced: what is the same however many samples come."""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from marvin.integer.nodes import asks_dtype, asks_shape
from marvin.kinds import called

__all__ = ["CUTS", "SampleSizes"]

CUTS = "chunk", "split", "tensor_split", "unbind"
"""What gives several parts of a tensor."""

_MODULES = operator.add.__module__, math.__name__
_EQUALITIES: Mapping[object, bool] = {operator.eq: True, operator.ne: False}
_COUNTS = 2, 3  # of samples; of one, squeeze() would take the batch away


class SampleSizes:
    """What a trace knows of shapes: it is run on the shape of the samples, as far as it has come.

    Args:
        model: That is traced, in eval mode.
        graph: The trace, which grows.
        sample: What the model takes, shape ``(n, ...)``.
    """

    def __init__(self, model: nn.Module, graph: fx.Graph, sample: Tensor) -> None:
        self._runs = [_Run(model, graph, sample[:1].expand(n, *sample.shape[1:])) for n in _COUNTS]

    def rank(self, node: fx.Node) -> int | None:
        """Return the number of dimensions of a tensor; None where it is none, or not known."""
        return self._asked(node, lambda x: x.ndim if isinstance(x, Tensor) else None)

    def length(self, node: fx.Node) -> int | None:
        """Return how many sizes a shape has; None where it is none, or not known."""
        if not _is_of_shapes(node):
            return None
        return self._asked(node, lambda x: len(x) if isinstance(x, tuple) else None)

    def parts(self, node: fx.Node) -> int | None:
        """Return into how many parts a call cuts a tensor; None where it cuts none, or that depends on the number of samples or on values."""
        numbers = node.all_input_nodes[1:]
        if called(node) not in CUTS or any(self.known(own) is None for own in numbers):
            return None
        return self._asked(node, lambda x: len(x) if isinstance(x, tuple) else None)

    def known(self, node: fx.Node) -> Any:
        """Return a size, or what is computed of sizes; None where that depends on the number of samples or on values."""
        if not _is_of_shapes(node):
            is_equal = self._compared(node) if node.target in _EQUALITIES else None
            if is_equal is not None:
                return is_equal is _EQUALITIES[node.target]
            is_computed = getattr(node.target, "__module__", "") in _MODULES
            if not is_computed or any(self.known(own) is None for own in node.all_input_nodes):
                return None
        return self._asked(node, lambda x: x)

    def _compared(self, node: fx.Node) -> bool | None:
        """Return whether shapes, or sizes, are equal however many samples come; None where nobody can know."""
        sources = node.all_input_nodes
        if not all(_is_of_shapes(own) or self.known(own) is not None for own in sources):
            return None
        if any(run.value(own) is None for own in sources for run in self._runs):
            return None
        first, again = (_shapes(map_arg(node.args, run.value)) for run in self._runs)
        if not first or len(first[0]) != len(first[1]):
            return False if first else None
        if first[0] == first[1] and again[0] == again[1]:
            return True
        pairs = zip(zip(*first, strict=True), zip(*again, strict=True), strict=True)
        return False if any(a == b and a[0] != a[1] for a, b in pairs) else None

    def _asked(self, node: fx.Node, ask: Callable[[Any], Any]) -> Any:
        found = [ask(run.value(node)) for run in self._runs]
        return found[0] if not isinstance(found[0], Tensor) and found[0] == found[1] else None


def _shapes(values: Any) -> list[tuple[Any, ...]]:
    """Return two shapes, or two sizes as shapes of one; nothing where these are none."""
    if all(isinstance(x, tuple) for x in values):
        return [*values]
    return [(x,) for x in values] if all(isinstance(x, int) for x in values) else []


def _is_of_shapes(node: fx.Node) -> bool:
    """Say whether a node is a shape, a size or a dtype of a tensor, or a part of a shape that is named by numbers."""
    if node.target is operator.getitem:
        return node.all_input_nodes == [node.args[0]] and _is_of_shapes(node.all_input_nodes[0])
    return asks_shape(node) or asks_dtype(node)


class _Run(fx.Interpreter):
    def __init__(self, model: nn.Module, graph: fx.Graph, sample: Tensor) -> None:
        super().__init__(model, garbage_collect_values=False, graph=graph)
        self.extra_traceback = False
        self._sample, self._traced = sample.clone(), graph

    def value(self, node: fx.Node) -> Any:
        """Return what a node gives; None where it cannot be computed."""
        try:
            with torch.no_grad():
                for own in self._traced.nodes:
                    if own not in self.env:
                        self.env[own] = self.run_node(own)
        except Exception:  # of the model's own code: the trace, when run, raises it again
            return None
        return self.env.get(node)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return the samples."""
        return self._sample
