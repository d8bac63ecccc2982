"""Formats of activations that training left in floats: those that fit what a model sees."""

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fixedpoint_kernels import FixedPoint
from marvin.export.errors import ExportError
from marvin.export.execute.verify import evaluating
from marvin.export.graph.formats import Formats, fitting

__all__ = ["POOLS", "calibrate"]

# what marvin.quantize_activations rounds, as far as it can be exported
POOLS = nn.AvgPool2d, nn.AdaptiveAvgPool2d
_ROUNDED = nn.Conv2d, nn.Linear, nn.BatchNorm1d, nn.BatchNorm2d, *POOLS


def calibrate(model: nn.Module, loader: Iterable[Any], wl: int = 8) -> dict[str, Formats]:
    """Return formats of ``wl`` bits that hold every activation of some samples.

    For a network trained without quantised activations: inputs and outputs of the layers that
    ``marvin.quantize_activations`` would round get the largest fractional length at which
    nothing saturates, unsigned where nothing is below 0: as ``marvin.calibrate`` does with
    ``estimator="max"``, which takes a model and gives one that rounds what layers take.

    Args:
        model: Run in eval mode, without gradients.
        loader: Batches: tensors, or tuples that begin with one.
        wl: Word length of every activation, bits.

    Returns:
        Formats by the name of the module.

    Raises:
        ExportError: There is no batch, or an activation is not finite.
    """
    ranges: dict[str, _Range] = {}
    kinds = {name: module for name, module in model.named_modules() if isinstance(module, _ROUNDED)}

    def see(name: str, inputs: tuple[Any, ...], output: Any) -> None:
        if name in kinds:
            ranges.setdefault(name, _Range()).add(name, inputs[0], output)

    _watch(model, (b if isinstance(b, Tensor) else b[0] for b in loader), see)
    if not ranges:
        raise ExportError("calibration needs a layer to round and at least one batch, got none")
    return {
        name: Formats(_format(r.input, wl), _format(r.output, wl), is_calibrated=True)
        for name, r in ranges.items()
    }


def _format(bounds: tuple[float, float], wl: int) -> FixedPoint:
    return fitting(bounds, wl, signed=bounds[0] < 0)


@dataclass
class _Range:
    """Smallest and largest values seen, 0 included."""

    input: tuple[float, float] = field(default=(0.0, 0.0))
    output: tuple[float, float] = field(default=(0.0, 0.0))

    def add(self, name: str, x: Tensor, y: Tensor) -> None:
        self.input, self.output = _grown(name, self.input, x), _grown(name, self.output, y)


def _grown(name: str, bounds: tuple[float, float], x: Tensor) -> tuple[float, float]:
    low, high = min(bounds[0], float(x.min())), max(bounds[1], float(x.max()))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ExportError(f"activations must be finite to calibrate, got {low}, {high} at {name}")
    return low, high


_See = Callable[[str, tuple[Any, ...], Any], None]


@torch.no_grad()
def _watch(model: nn.Module, batches: Iterable[Tensor], see: _See) -> None:
    """Run a model in eval mode and show what each module takes and gives."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(evaluating(model))
        for name, module in model.named_modules():
            handle = module.register_forward_hook(
                lambda _m, inputs, output, name=name: see(name, inputs, output)
            )
            stack.callback(handle.remove)
        for batch in batches:
            model(batch)
