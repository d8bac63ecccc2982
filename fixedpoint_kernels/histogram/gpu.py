"""Histograms in Triton: one read of the values, whatever the number of candidate formats."""

# Rules that kernels break, for they are Triton's language; launchers keep all others.
# pyright: reportInvalidTypeForm=false

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.histogram.reference import Bins, Cells
from fixedpoint_kernels.memory import in_memory
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.philox.gpu import jit
from fixedpoint_kernels.rounding.gpu import codes_of, noise_of, saturate
from fixedpoint_kernels.rounding.reference import Rounding, float_bounds

_BLOCK = 1024


@jit
def _bin(value, low, inverse_width, resolution, power):
    place = tl.floor((value * power - low) * inverse_width)
    place = tl.where(place > 0.0, place, 0.0).to(tl.float32)  # NaN is not above 0
    last = (resolution - 1).to(tl.float32)
    return tl.where(place > last, last, place).to(tl.int32)


@jit
def _count(counts_ptr, bins, mask, resolution, BINS: tl.constexpr):
    """Add a block's histogram to ``counts_ptr``; bin ``resolution`` takes the masked elements."""
    counts = tl.histogram(tl.where(mask, bins, resolution), BINS).to(tl.int64)
    columns = tl.arange(0, BINS)
    tl.atomic_add(counts_ptr + columns, counts, mask=(columns < resolution) & (counts > 0))


@jit(do_not_specialize=["resolution", "formats", "seed", "stream", "block"])
def _sampled_kernel(
    x_ptr,  # (n,) float32
    n,
    numbers_ptr,  # (formats, 4) float32: scale, lsb, smallest and largest code
    formats: tl.int32,
    counts_ptr,  # (formats + 1, resolution) int64
    low,
    inverse_width,
    resolution: tl.int32,
    power,
    seed: tl.int64,
    stream: tl.int64,
    block: tl.int64,  # of the noise in which element 0 is
    LEAD: tl.constexpr,  # its lane there
    STOCHASTIC: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = first + tl.arange(0, BLOCK) - LEAD
    mask = offsets < n
    if LEAD > 0:
        mask = mask & (offsets >= 0)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    resolution = tl.full((), 0, tl.int32) + resolution
    noise = noise_of(block.to(tl.int64) + (first >> 2), seed, stream, STOCHASTIC, BLOCK)
    _count(counts_ptr, _bin(x, low, inverse_width, resolution, power), mask, resolution, BINS)
    row = 0
    while row < formats:
        scale = tl.load(numbers_ptr + 4 * row)
        lsb = tl.load(numbers_ptr + 4 * row + 1)
        smallest = tl.load(numbers_ptr + 4 * row + 2)
        largest = tl.load(numbers_ptr + 4 * row + 3)
        codes = codes_of(x, noise, scale, STOCHASTIC)
        y = saturate(codes, smallest, largest) * lsb
        row += 1
        counts = counts_ptr + row * resolution
        _count(counts, _bin(y, low, inverse_width, resolution, power), mask, resolution, BINS)


@jit(do_not_specialize=["size", "first_cell", "resolution"])
def _cells_kernel(
    x_ptr,  # (n,) float32
    n,
    own_ptr,  # (resolution,) int64
    table_ptr,  # (size, 2) int64
    size: tl.int64,
    scale,
    first_cell: tl.int64,
    low,
    inverse_width,
    resolution: tl.int32,
    power,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    resolution = tl.full((), 0, tl.int32) + resolution
    _count(own_ptr, _bin(x, low, inverse_width, resolution, power), mask, resolution, BINS)
    scaled = x * scale
    below = tl.floor(scaled)
    fraction = scaled - below
    far = 4611686018427387904.0  # 2**62: no code is as large
    below = tl.where(below > -far, below, -far)  # NaN too
    cell = tl.where(below < far, below, far).to(tl.int64) - first_cell
    cell = tl.minimum(tl.maximum(cell, 0), size - 1)
    units = tl.where(fraction > 0.0, fraction * 16777216.0, 0.0).to(tl.int64)  # 2**24
    tl.atomic_add(table_ptr + 2 * cell, tl.full((BLOCK,), 1, tl.int64), mask=mask)
    tl.atomic_add(table_ptr + 2 * cell + 1, units, mask=mask)


def sampled(
    x: Tensor, fmts: Sequence[FixedPoint], bins: Bins, rounding: Rounding, key: Key
) -> Tensor:
    """See ``reference.sampled``."""
    rows = [(fmt.scale, fmt.lsb, *float_bounds(fmt)) for fmt in fmts]
    numbers = torch.tensor(rows, dtype=torch.float32, device=x.device)
    shape = len(fmts) + 1, bins.resolution
    counts = torch.zeros(shape, dtype=torch.int64, device=x.device)
    _sampled_kernel[(triton.cdiv(x.numel() + key.lead, _BLOCK),)](
        _values(x),
        x.numel(),
        numbers,
        len(fmts),
        counts,
        bins.low,
        bins.inverse_width,
        bins.resolution,
        bins.power,
        key.seed,
        key.stream,
        key.offset >> 2,
        LEAD=key.lead,
        STOCHASTIC=rounding == "stochastic",
        BINS=triton.next_power_of_2(bins.resolution + 1),
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )
    return counts


def cells(x: Tensor, bins: Bins, grid: Cells) -> tuple[Tensor, Tensor]:
    """See ``reference.cells``."""
    own = torch.zeros(bins.resolution, dtype=torch.int64, device=x.device)
    table = torch.zeros(grid.size, 2, dtype=torch.int64, device=x.device)
    _cells_kernel[(triton.cdiv(x.numel(), _BLOCK),)](
        _values(x),
        x.numel(),
        own,
        table,
        grid.size,
        2.0**grid.fl,
        grid.first,
        bins.low,
        bins.inverse_width,
        bins.resolution,
        bins.power,
        BINS=triton.next_power_of_2(bins.resolution + 1),
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )
    return own, table


def _values(x: Tensor) -> Tensor:
    return in_memory(x).detach().float().contiguous()
