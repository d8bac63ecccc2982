"""The weights that are deployed: rounded to nearest, not the last stochastic draw."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fixedpoint_kernels import FixedPoint
from marvin.export.observe import fitting
from marvin.quantized import Quantized
from marvin.rounding import Format, round_one

__all__ = ["formats_of_weights", "masters_of", "nearest_weights"]


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
