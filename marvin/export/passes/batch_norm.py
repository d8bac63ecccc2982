"""Batch normalisation in fixed point: a scale, and an offset that is a multiple of it."""

import torch
from torch import Tensor, nn

from fixedpoint_kernels import FixedPoint
from fixedpoint_kernels.formats import LONGEST_FL
from marvin.export.errors import ExportError
from marvin.export.graph.formats import fitting
from marvin.export.graph.nodes import Operation, Value, Weighted

__all__ = [
    "FixedNorm",
    "exact_norm",
    "fixed_norm",
    "nearest",
    "scales",
    "spare_of",
    "zeros_of",
]

FixedNorm = tuple[Tensor, FixedPoint, Tensor, FixedPoint]  # of Affine: scale, offset
_OFFSET_WL = 32
_GIVEN_UP = 4  # last bits of a scale, at most, so that 32 bits hold multiples of it


def nearest(x: Tensor, wl: int, longest_fl: int = LONGEST_FL) -> tuple[Tensor, FixedPoint]:
    """Return codes of ``x``, float64, in the finest format that holds it, and the format."""
    x = x.detach().cpu()
    fmt = fitting((float(x.min()), float(x.max())), wl)
    fmt = FixedPoint(wl, max(-LONGEST_FL, min(fmt.fl, longest_fl)))
    return torch.round(x * fmt.scale).to(torch.int64), fmt


def scales(name: str, x: Tensor, wl: int) -> tuple[Tensor, FixedPoint]:
    """Return codes of scales, as ``nearest`` does, and their format.

    Raises:
        ExportError: The largest keeps less than half of its bits, since steps end at ``2**-31``.
    """
    codes, fmt = nearest(x, wl)
    bits, largest = int(codes.abs().max()).bit_length(), float(x.abs().max())
    is_exact = torch.equal(codes.double() * fmt.lsb, x.detach().cpu().double())
    if bits < wl // 2 and not is_exact:
        raise ExportError(
            f"{name}: the largest scale must keep {wl // 2} of {wl} bits, got {largest:.3g}, which keeps "
            f"{bits}, since formats have steps of 2**-31 or more: scale the data, so that the values here "
            "are smaller"
        )
    return codes, fmt


def exact_norm(m: nn.BatchNorm1d | nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return what batch normalisation computes: scale and offset, float64, shape ``(channels,)``."""
    assert m.running_mean is not None
    assert m.running_var is not None
    scale = (m.running_var.double() + m.eps).rsqrt()
    if m.weight is not None:
        scale = scale * m.weight.detach().double()
    offset = -m.running_mean.double() * scale
    if m.bias is not None:
        offset = offset + m.bias.detach().double()
    return scale, offset


def fixed_norm(
    module: str, m: nn.BatchNorm1d | nn.BatchNorm2d, x: Value, spare: Tensor, scale_wl: int
) -> FixedNorm:
    """Return batch normalisation as ``scale * (x + b)``, with ``b`` an integer at an ``fl`` of its own.

    So a layer before it can take ``b`` as its bias, and the scale is all that is left to do. In
    channels whose scale is rounded to 0, the offset is rounded to nearest.

    Args:
        module: Its name.
        m: With running statistics.
        x: What it takes.
        spare: Bits by which ``b`` is finer than ``x``, where 32 bits hold the offset, of each
            channel. Where channels of ``x`` have an ``fl`` of their own, than each.
        scale_wl: Word length of the scale, bits.

    Returns:
        Codes and format of the scale, then of the offset ``scale * b``.

    Raises:
        ExportError: There are no running statistics; or scales are too small for their bits.
    """
    if m.running_mean is None or m.running_var is None:
        raise ExportError(
            f"{module}: batch normalisation must have running statistics, got none: write "
            "track_running_stats=True and train some steps"
        )
    scale, offset = exact_norm(m)
    codes, fmt = scales(module, scale, scale_wl)
    product = x.fl + fmt.fl
    offset_codes, offset_fmt = nearest(offset, _OFFSET_WL, product + int(spare.max()))
    finer = offset_fmt.fl - product
    if -_GIVEN_UP <= finer < 0 and not x.channels:
        codes, fmt = nearest(scale, scale_wl, fmt.fl + finer)
        finer = 0
    if finer >= 0 or x.channels:
        steps = torch.where(codes == 0, 1, codes << zeros_of(x, spare, finer))
        multiples = torch.round(offset.cpu() * offset_fmt.scale / steps).to(torch.int64) * steps
        if offset_fmt.min_code <= multiples.min() and multiples.max() <= offset_fmt.max_code:
            offset_codes = multiples
    return codes, fmt, offset_codes, offset_fmt


def spare_of(before: Operation, x: Value, source_fl: int) -> Tensor:
    """Return by how many bits ``b`` is finer than ``x``: as fine as bytes hold weights then.

    Args:
        before: What batch normalisation comes after.
        x: Its value.
        source_fl: Fractional length of what ``before`` takes.

    Returns:
        int64, shape ``(channels,)``.
    """
    if not isinstance(before, Weighted):
        return torch.full((x.channel_count,), max(0, min(6, 14 - x.bits)))
    finer = x.fl - source_fl - before.weight_fmt.fl
    # a bias may have taken some of them
    used = [
        finer + zeros - x.channel(i).trailing_zeros for i, zeros in enumerate(before.trailing_zeros)
    ]
    return (7 - before.word.wl - torch.tensor(used).clamp(min=0)).clamp(min=0)


def zeros_of(x: Value, spare: Tensor, finer: int) -> Tensor:
    """Return how many zeros ``b`` must end with, to be ``spare`` bits finer than its channel.

    Args:
        x: What batch normalisation takes.
        spare: From ``spare_of``.
        finer: Bits by which the ``fl`` of ``b`` is longer than that of ``x``, or below 0.

    Returns:
        int64, shape ``(channels,)``; 0 where channels have one ``fl``.
    """
    if not x.channels:
        return torch.zeros_like(spare)
    zeros = torch.tensor([x.channel(i).trailing_zeros for i in range(x.channel_count)])
    return (zeros - spare + finer).clamp(min=0)
