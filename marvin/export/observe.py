"""Formats of activations: those a model rounds to, or those that fit what a model sees."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fixedpoint_kernels import FixedPoint
from marvin.activations import formats_of
from marvin.export.errors import ExportError, fixed_point
from marvin.rounding import Format

__all__ = ["POOLS", "ROUNDED", "Formats", "activation_formats", "calibrate", "evaluating"]
__all__ += ["fitting"]

# what marvin.quantize_activations rounds, as far as it can be exported
POOLS = nn.AvgPool2d, nn.AdaptiveAvgPool2d
ROUNDED = nn.Conv2d, nn.Linear, nn.BatchNorm1d, nn.BatchNorm2d, *POOLS

_LONGEST_FL = 31


@dataclass(frozen=True)
class Formats:
    """What a module rounds.

    Args:
        input: Format of what comes in; None where that is not rounded.
        output: Format of what goes out.
        is_calibrated: Found by ``calibrate``: then a value that already is as short as ``input``
            stays as it is.
    """

    input: FixedPoint | None
    output: FixedPoint | None
    is_calibrated: bool = False


def activation_formats(model: nn.Module) -> dict[str, Formats]:
    """Return what each module rounds, as the model carries it; empty where nothing is rounded.

    Args:
        model: With ``marvin.quantize_activations`` on it, or frozen.

    Raises:
        ExportError: A module rounds to block floating point.
    """
    found = {}
    for name, carried in formats_of(model).items():
        for fmt in (carried.samples, carried.inputs, carried.outputs):
            if fmt is not None:
                fixed_point(f"activations of {name or 'the model'}", fmt)
        formats = Formats(_plain(carried.inputs), _plain(carried.outputs))
        if formats.input or formats.output:
            found[name] = formats
    return found


def _plain(fmt: Format | None) -> FixedPoint | None:
    return fmt if isinstance(fmt, FixedPoint) else None


def calibrate(model: nn.Module, loader: Iterable[Any], wl: int = 8) -> dict[str, Formats]:
    """Return formats of ``wl`` bits that hold every activation of some samples.

    For a network trained without quantised activations: inputs and outputs of the layers that
    ``marvin.quantize_activations`` would round get the largest fractional length at which
    nothing saturates.

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
    kinds = {name: module for name, module in model.named_modules() if isinstance(module, ROUNDED)}

    def see(name: str, inputs: tuple[Any, ...], output: Any) -> None:
        if name in kinds:
            ranges.setdefault(name, _Range()).add(name, inputs[0], output)

    _watch(model, (b if isinstance(b, Tensor) else b[0] for b in loader), see)
    if not ranges:
        raise ExportError("calibration needs a layer to round and at least one batch, got none")
    return {
        name: Formats(fitting(r.input, wl), fitting(r.output, wl), is_calibrated=True)
        for name, r in ranges.items()
    }


def fitting(bounds: tuple[float, float], wl: int, signed: bool = True) -> FixedPoint:
    """Return the finest format of ``wl`` bits that holds both bounds without saturating."""
    low, high = bounds
    for fl in range(_LONGEST_FL, -_LONGEST_FL - 1, -1):
        fmt = FixedPoint(wl, fl, signed=signed)
        codes = (round(bound * fmt.scale) for bound in (low, high))
        if all(fmt.min_code <= code <= fmt.max_code for code in codes):
            return fmt
    raise ExportError(f"no format of {wl} bits holds {low} to {high}")


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


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module in eval mode, and back in its own after."""
    modes: Mapping[nn.Module, bool] = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
