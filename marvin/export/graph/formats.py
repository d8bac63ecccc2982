"""Formats of a network: those that a model carries, and those that fit numbers."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import Tensor, nn

from fixedpoint_kernels import FixedPoint, decode, encode
from fixedpoint_kernels.formats import LONGEST_FL
from marvin import estimators
from marvin.compact import master_of
from marvin.estimators import Estimator
from marvin.export.errors import ExportError, check_length, fixed_point
from marvin.layers import carried_parameters
from marvin.quantized import Quantized
from marvin.refused import check_model
from marvin.rounder import formats_of
from marvin.rounding import Format, round_one

__all__ = [
    "Formats",
    "activation_formats",
    "carried_weights",
    "codes_of",
    "exact_format",
    "fitting",
    "formats_of_weights",
    "masters_of",
    "nearest_weights",
    "plain",
    "weight_formats",
]

_LAYERS = nn.Conv1d, nn.Conv2d, nn.Linear, nn.Embedding
_FLOATS = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Formats:
    """What a module rounds.

    Args:
        input: Format of what comes in; None where that is not rounded.
        output: Format of what goes out.
    """

    input: FixedPoint | None
    output: FixedPoint | None


def activation_formats(model: nn.Module) -> dict[str, Formats]:
    """Return what each module rounds, as the model carries it; empty where nothing is rounded.

    Args:
        model: With ``marvin.quantize_activations`` on it, or frozen.

    Raises:
        ExportError: A module rounds to block floating point.
        TypeError: ``model`` is no module.
    """
    check_model(model, "activation_formats(model)")
    found = {}
    for name, carried in formats_of(model).items():
        for fmt in (carried.samples, carried.inputs, carried.outputs):
            if fmt is not None:
                fixed_point(f"activations of {name or 'the model'}", fmt)
        formats = Formats(plain(carried.inputs), plain(carried.outputs))
        if formats.input or formats.output:
            found[name] = formats
    return found


def plain(fmt: Format | None) -> FixedPoint | None:
    """Return a format of activations, None where it is none of fixed point."""
    return fmt if isinstance(fmt, FixedPoint) else None


def carried_weights(model: nn.Module) -> dict[str, Format]:
    """Return the formats of parameters that a model carries, by name.

    Args:
        model: With ``marvin.quantize_activations`` on it, or frozen.

    Raises:
        ExportError: A module has more parameters than formats, or fewer: some were added or taken away.
    """
    found: dict[str, Format] = {}
    for name, formats in formats_of(model).items():
        parameters = carried_parameters(model.get_submodule(name))
        own = [f"{name}.{parameter}".lstrip(".") for parameter, _ in parameters]
        if len(own) != len(formats.weights):
            raise ExportError(
                f"{name or 'the model'} must have {len(formats.weights)} parameters, as many as it "
                f"carries formats for, got {len(own)}"
            )
        pairs = zip(own, formats.weights, strict=True)
        found |= {parameter: fmt for parameter, fmt in pairs if fmt is not None}
    return found


def weight_formats(model: nn.Module) -> dict[str, Format]:
    """Return the formats of a model's parameters, by name: those that it carries, and of layers that carry none.

    Such a layer was left out by ``marvin.quantize_activations(..., exclude=...)``. Its weight has
    the shortest format that holds its values exactly, if 32 bits do.

    Args:
        model: With ``marvin.quantize_activations`` on it, or frozen.

    Raises:
        ExportError: A module has more parameters than formats, or fewer: some were added or taken away.
        TypeError: ``model`` is no module.
    """
    check_model(model, "weight_formats(model)")
    found = carried_weights(model)
    for name, module in model.named_modules():
        weight = f"{name}.weight".lstrip(".")
        if isinstance(module, _LAYERS) and weight not in found:
            fmt = exact_format(module.weight)
            found |= {} if fmt is None else {weight: fmt}
    return found


def fitting(bounds: tuple[float, float], wl: int, signed: bool = True) -> FixedPoint:
    """Return the finest format of ``wl`` bits that holds both bounds without saturating.

    Raises:
        ExportError: No format does.
    """
    try:
        return estimators.fitting(*bounds, wl, signed)
    except ValueError as error:
        raise ExportError(str(error)) from error


def exact_format(x: Tensor) -> FixedPoint | None:
    """Return the shortest signed format that has every one of some values; None if none has.

    ``x`` is a floating tensor of any shape.
    """
    values = x.detach().cpu().double().flatten()
    values = values[values != 0]
    if not len(values):
        return FixedPoint(2, 0)
    if not values.isfinite().all():
        return None
    codes, exponents = torch.frexp(values)
    codes = (codes * 2.0**53).to(torch.int64)  # of a float64 without its exponent
    zeros = ((codes & -codes).double().log2()).to(torch.int64)
    fl = max(-LONGEST_FL, int((53 - exponents - zeros).max()))
    largest, smallest = float(values.max()) * 2.0**fl, float(values.min()) * 2.0**fl
    bits = max(int(largest).bit_length(), (int(-smallest) - 1).bit_length() if smallest < 0 else 0)
    wl = max(2, bits + 1)
    return FixedPoint(wl, fl) if wl <= 32 and fl <= LONGEST_FL else None


def codes_of(name: str, x: Tensor, fmt: FixedPoint) -> Tensor:
    """Return the integer codes of values that are numbers of ``fmt``.

    ``x`` is a floating tensor; the codes have its shape, on the CPU, in the smallest integer dtype
    that ``fixedpoint_kernels.encode`` has for ``fmt``.

    Raises:
        ExportError: One is not.
    """
    x = x.detach().cpu()
    if x.dtype not in _FLOATS:
        raise ExportError(f"{name} must be a floating tensor to have a format, got {x.dtype}")
    codes = encode(x, fmt, rounding="nearest")
    wrong = int((decode(codes, fmt, dtype=torch.float64) != x.double()).sum())
    if wrong:
        raise ExportError(
            f"{name} must hold numbers of {fmt}, got {wrong} of {x.numel()} that are not: "
            "marvin.export.nearest_weights(model, formats) rounds them"
        )
    return codes


def masters_of(model: nn.Module, optimizer: Quantized) -> dict[str, Tensor]:
    """Return the float32 masters of a model's quantised parameters, by name.

    Args:
        model: Trained by ``optimizer``.
        optimizer: Of fixed point. Parameters without a format are left out.

    Returns:
        Each with the shape of its parameter, float32, for ``nearest_weights``.

    Raises:
        ExportError: ``optimizer`` has no parameter of the model.
        TypeError: One of both is something else.
    """
    check_model(model, "masters_of(model, optimizer)")
    if not isinstance(optimizer, Quantized):
        raise TypeError(f"optimizer must be a marvin.Quantized, got {type(optimizer).__name__}")
    named = [(name, p) for name, p in model.named_parameters() if p in optimizer]
    if not named:
        raise ExportError(
            "the optimizer must have parameters of the model, got another model's: give the model that it trained, no "
            "copy of it"
        )
    return {
        name: master_of(optimizer.state[p])
        for name, p in named
        if optimizer.format_of(p) is not None
    }


@torch.no_grad()
def nearest_weights(
    model: nn.Module, formats: Mapping[str, Format], masters: Mapping[str, Tensor] | None = None
) -> nn.Module:
    """Return a copy of a model whose weights are rounded to nearest.

    Args:
        model: Stays as it is; the copy rounds activations as ``model`` does.
        formats: Of parameters by name; the others are copied.
        masters: What to round, by name; default: the model's own values.

    Raises:
        ExportError: ``formats`` or ``masters`` have a name that the model lacks, or ``masters`` lacks one of
            ``formats``.
        TypeError: ``model`` is no module.

    Source:
        MARViN leaves open how the final weights are rounded. Nearest: the same on every export,
        and closer to the masters than one more stochastic draw.
    """
    check_model(model, "nearest_weights(model, formats)")
    own = dict(model.named_parameters(remove_duplicate=False))
    for what, given in {"formats": formats, "masters": masters or {}}.items():
        if unknown := [name for name in given if name not in own]:
            near = get_close_matches(unknown[0], own, 1) or [*own][:1]
            raise ExportError(
                f"{what} must be of parameters of the model, got {unknown[0]}: write a name as {', '.join(near)}"
            )
    if masters is not None and (without := [name for name in formats if name not in masters]):
        raise ExportError(
            f"masters must be there of all that has a format, got none of {without[0]}"
        )
    copied = copy.deepcopy(model)
    for name, p in copied.named_parameters():
        if name in formats:
            x = p.detach() if masters is None else masters[name]
            p.copy_(round_one(x, formats[name], rounding="nearest"))
    return copied


def formats_of_weights(
    model: nn.Module, wl: int = 8, estimator: Estimator = "noise"
) -> dict[str, Format]:
    """Return formats of ``wl`` bits for the weights of a network trained in floats.

    Those that ``marvin.calibrate`` gives them. Weights of two or more dimensions alone; ``describe``
    finds formats for biases.

    Args:
        model: In floats.
        wl: Word length of all weights, 2 to 32 bits.
        estimator: How ranges are found: see ``marvin.calibrate``.

    Raises:
        ExportError: ``wl`` is no word length.
        TypeError: ``model`` is no module, or ``wl`` no whole number.
        ValueError: Weights are not finite, or no format of ``wl`` bits holds them; or there is no such estimator.
    """
    check_model(model, "formats_of_weights(model)")
    check_length("wl", wl)
    estimators.check_estimator(estimator)
    return {
        name: estimators.weight_format(p.detach().float(), wl, estimator)
        for name, p in model.named_parameters()
        if p.ndim >= 2 and p.numel()
    }
