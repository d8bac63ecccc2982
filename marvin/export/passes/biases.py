"""Biases that training left in floats, as integers that change no rounding where they need not."""

import torch
from torch import Tensor

from fixedpoint_kernels import FixedPoint
from marvin.export.graph.nodes import FLOAT32_BITS
from marvin.export.passes.batch_norm import nearest

__all__ = ["float_bias", "spare_bits"]

_BYTE = 7  # bits of weights that every integer kernel multiplies fast
_WL = 32


def spare_bits(word: FixedPoint, sums: Tensor, fls: Tensor, bias: Tensor) -> int:
    """Return by how many bits a bias can be finer than the products of its layer.

    As many as bytes have left beside the weights, which become longer by them, and float32 beside
    the sums.

    Args:
        word: Format of the weights.
        sums: Bound of each channel's sums, codes, int64, shape ``(out,)``.
        fls: Of each channel's products, int64, shape ``(out,)``.
        bias: Float, shape ``(out,)``.
    """
    own = (bias.detach().cpu().double().abs() * 2.0**fls).ceil().clamp(max=2.0**_WL)
    sizes = sums + own.to(torch.int64)
    room = FLOAT32_BITS - int(sizes.max()).bit_length()
    return max(0, min(_BYTE - word.wl, room))


def float_bias(x: Tensor, fls: Tensor, spare: int) -> tuple[Tensor, FixedPoint]:
    """Return codes and format of a bias, ``spare`` bits finer than the products.

    With bits to spare, a bias between two codes becomes the odd one of them. So a sum is never
    on the border between two results of a rounding, nor on its other side: what rounds the
    sum, to steps of at least two of its own, gives the same as with the bias itself. Without, it
    becomes the nearest.

    Args:
        x: Float64, shape ``(out,)``.
        fls: Of each channel's products, int64, shape ``(out,)``.
        spare: From ``spare_bits``.

    Returns:
        int64, shape ``(out,)``; a format of 32 bits.
    """
    fmt = nearest(x, _WL, int(fls.max()) + spare)[1]
    lost = (fmt.fl - fls - spare).clamp(min=0)  # bits by which a channel is coarser
    exact = x * fmt.scale * 2.0**-lost
    low = exact.floor()
    odd = torch.where(exact == low, low, low + (low + 1) % 2)
    codes = torch.where(fmt.fl - lost > fls, odd, exact.round()).to(torch.int64) << lost
    return codes.clamp(fmt.min_code, fmt.max_code), fmt
