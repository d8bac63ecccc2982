"""Histograms in plain PyTorch: the definition that the kernels are tested against."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.rounding.reference import Rounding, float_bounds, unbounded_codes


class Bins(NamedTuple):
    """Equal-width bins over a range; values outside count in the end bins, NaN in the first.

    Value ``v`` is in bin ``floor((v * power - low) * inverse_width)``. The power of two brings any
    range, the smallest and the largest of float32 too, to numbers that float32 can divide.
    """

    low: float
    inverse_width: float
    resolution: int
    power: float = 1.0


class Cells(NamedTuple):
    """The grid ``(first + arange(size)) * 2**-fl``, which covers all values."""

    fl: int
    first: int
    size: int


def sampled(
    x: Tensor, fmts: Sequence[FixedPoint], bins: Bins, rounding: Rounding, key: Key
) -> Tensor:
    """Count ``x`` and its rounding to each format; shape ``(1 + len(fmts), resolution)``, int64."""
    rows = [x.detach().float()]
    for fmt in fmts:
        codes = unbounded_codes(x, fmt, rounding, key).clamp(*float_bounds(fmt))
        rows.append(codes * fmt.lsb)
    counts = [torch.bincount(bin_of(row, bins), minlength=bins.resolution) for row in rows]
    return torch.stack(counts)


def cells(x: Tensor, bins: Bins, grid: Cells) -> tuple[Tensor, Tensor]:
    """Count ``x`` in bins, and in the cells of a grid together with the place in the cell.

    Returns:
        ``(resolution,)`` int64, and ``(grid.size, 2)`` int64: how many values lie in each cell
        ``[k, k + 1) * lsb``, and the sum of their distances from ``k * lsb`` in 2**-24 lsb.
        Values outside the grid count in its end cells, NaN in the first.
    """
    own = torch.bincount(bin_of(x.detach().float(), bins), minlength=bins.resolution)
    scaled = x.detach().float() * 2.0**grid.fl
    below = torch.floor(scaled)
    index = _code(below) - grid.first
    fraction = scaled - below
    units = torch.where(fraction > 0, fraction * 2.0**24, 0.0).long()
    table = torch.zeros(grid.size, 2, dtype=torch.int64, device=x.device)
    index = index.clamp(0, grid.size - 1)
    return own, table.index_add_(0, index, torch.stack([torch.ones_like(units), units], dim=1))


def bin_of(x: Tensor, bins: Bins) -> Tensor:
    """Return the bin of each value of a flat float32 tensor, int64."""
    place = place_of(x, bins)
    return torch.where(place > 0, place, 0.0).clamp(max=bins.resolution - 1).long()


def place_of(x: Tensor, bins: Bins) -> Tensor:
    """Return the number of the bin of each value of a float32 tensor, were there more on both sides."""
    return torch.floor((x * bins.power - bins.low) * bins.inverse_width)


def _code(below: Tensor) -> Tensor:
    """Return whole numbers as int64: infinities and NaN, too, become a number."""
    return torch.where(below > -(2.0**62), below, -(2.0**62)).clamp(max=2.0**62).long()
