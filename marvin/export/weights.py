"""The weights that are deployed: rounded to nearest, not the last stochastic draw."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fixedpoint_kernels import FixedPoint
from marvin.activations import formats_of
from marvin.export.observe import fitting
from marvin.quantized import Quantized
from marvin.rounding import Format, round_one

__all__ = ["carried_weights", "exact_format", "formats_of_weights", "masters_of"]
__all__ += ["nearest_weights", "weight_formats"]


def masters_of(model: nn.Module, optimizer: Quantized) -> dict[str, Tensor]:
    """Return the float32 masters of a model's quantised parameters, by name."""
    named = ((name, p) for name, p in model.named_parameters() if p in optimizer)
    return {
        name: optimizer.state[p]["master"]
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

    Source:
        MARViN leaves open how the final weights are rounded. Nearest: the same on every export,
        and closer to the masters than one more stochastic draw.
    """
    copied = copy.deepcopy(model)
    for name, p in copied.named_parameters():
        if name in formats:
            x = p.detach() if masters is None else masters[name]
            p.copy_(round_one(x, formats[name], rounding="nearest"))
    return copied


def formats_of_weights(model: nn.Module, wl: int = 8) -> dict[str, FixedPoint]:
    """Return formats of ``wl`` bits that hold the weights of a network trained in floats.

    Weights of two or more dimensions alone; ``describe`` finds formats for biases.
    """
    return {
        name: fitting((float(p.detach().min()), float(p.detach().max())), wl)
        for name, p in model.named_parameters()
        if p.ndim >= 2 and p.numel()
    }


def carried_weights(model: nn.Module) -> dict[str, Format]:
    """Return the formats of parameters that a model carries, by name.

    Args:
        model: With ``marvin.quantize_activations`` on it, or frozen.
    """
    found: dict[str, Format] = {}
    for name, formats in formats_of(model).items():
        own = [n for n, _ in model.get_submodule(name).named_parameters(name, recurse=False)]
        pairs = zip(own, formats.weights, strict=True)
        found |= {parameter: fmt for parameter, fmt in pairs if fmt is not None}
    return found


def weight_formats(model: nn.Module) -> dict[str, Format]:
    """Return ``carried_weights``, and formats of the weights of layers that carry none.

    Such a layer was left out by ``marvin.quantize_activations(..., exclude=...)``. Its weight has
    the shortest format that holds its values exactly, if 32 bits do.
    """
    found = carried_weights(model)
    for name, module in model.named_modules():
        weight = f"{name}.weight".lstrip(".")
        if isinstance(module, nn.Conv2d | nn.Linear) and weight not in found:
            fmt = exact_format(module.weight)
            found |= {} if fmt is None else {weight: fmt}
    return found


def exact_format(x: Tensor) -> FixedPoint | None:
    """Return the shortest signed format that has every one of some values; None if none has."""
    values = x.detach().cpu().double().flatten()
    values = values[values != 0]
    if not len(values):
        return FixedPoint(2, 0)
    if not values.isfinite().all():
        return None
    codes, exponents = torch.frexp(values)
    codes = (codes * 2.0**53).to(torch.int64)  # of a float64 without its exponent
    zeros = ((codes & -codes).double().log2()).to(torch.int64)
    fl = int((53 - exponents - zeros).max())
    largest, smallest = float(values.max()) * 2.0**fl, float(values.min()) * 2.0**fl
    bits = max(int(largest).bit_length(), (int(-smallest) - 1).bit_length() if smallest < 0 else 0)
    wl = max(2, bits + 1)
    return FixedPoint(wl, fl) if wl <= 32 and abs(fl) <= 31 else None
