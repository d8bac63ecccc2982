"""Histograms in Numba: one read of the values, whatever the number of candidate formats."""

from collections.abc import Sequence

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.histogram.reference import Bins, Cells
from fixedpoint_kernels.memory import in_memory
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.philox.cpu import philox, to_uniform
from fixedpoint_kernels.rounding.reference import Rounding, float_bounds
from fixedpoint_kernels.threads import compile_both, compiled, is_parallel, thread_count

_HALF = np.uint64(32)


@njit(inline="always")
def _bin(value, low, inverse_width, resolution):
    place = np.floor((value - low) * inverse_width)
    return int(min(max(place, np.float32(0.0)), np.float32(resolution - 1)))


def _sampled(x, offset, numbers, bins, stochastic, key, parts):
    # x (n,) float32; offset int64: of x[0] in the noise; numbers (k, 4) float32; key (4,) uint32;
    # parts (threads, k + 1, r) int64
    low, inverse_width, resolution = bins
    share = -(-x.size // parts.shape[0])
    for part in prange(parts.shape[0]):
        counts = parts[part]
        noise = np.empty(4, np.uint32)
        begin = part * share
        for i in range(begin, min(begin + share, x.size)):
            place = i + offset
            if stochastic and (place % 4 == 0 or i == begin):
                c = np.uint64(place >> 2)
                w = philox(np.uint32(c), np.uint32(c >> _HALF), key[2], key[3], key[0], key[1])
                noise[0], noise[1], noise[2], noise[3] = w
            u = to_uniform(noise[place % 4])  # not used by nearest
            counts[0, _bin(x[i], low, inverse_width, resolution)] += 1
            for f in range(numbers.shape[0]):
                scaled = x[i] * numbers[f, 0]
                below = np.floor(scaled)
                up = u < scaled - below
                code = below + np.float32(up) if stochastic else np.rint(scaled)
                code = min(max(code, numbers[f, 2]), numbers[f, 3])
                counts[f + 1, _bin(code * numbers[f, 1], low, inverse_width, resolution)] += 1


def _cells(x, bins, scale, first, own, table):
    # x (n,) float32; own (threads, r) int64; table (threads, size, 2) int64
    low, inverse_width, resolution = bins
    share = -(-x.size // own.shape[0])
    for part in prange(own.shape[0]):
        for i in range(part * share, min((part + 1) * share, x.size)):
            own[part, _bin(x[i], low, inverse_width, resolution)] += 1
            scaled = x[i] * scale
            below = np.floor(scaled)
            cell = int(below) - first
            table[part, cell, 0] += 1
            table[part, cell, 1] += int((scaled - below) * np.float32(2.0**24))


@compiled()
def _merge(counts, fractions, first, size):  # cells of one fractional length less, in place
    left = first % 2  # pairs are (even, odd)
    for pair in range((size + left + 1) // 2):
        even, odd = 2 * pair - left, 2 * pair - left + 1
        count = fraction = 0.0
        if even >= 0:
            count += counts[even]
            fraction += fractions[even]
        if odd < size:
            count += counts[odd]
            fraction += fractions[odd] + counts[odd]  # the odd cell starts half way
        counts[pair], fractions[pair] = count, fraction / 2
    return first // 2, (size + left + 1) // 2


@compiled()
def _grid_histograms(table, fl, first, formats, bins, result):
    # table (cells, 2) int64; formats (k, 3) int64: fl, smallest and largest code, finest first
    low, inverse_width, resolution = bins
    counts = table[:, 0].astype(np.float64)
    fractions = table[:, 1] * 2.0**-24
    size = len(counts)
    for f in range(len(formats)):
        while fl > formats[f, 0]:
            first, size = _merge(counts, fractions, first, size)
            fl -= 1
        lsb = np.float32(2.0**-fl)
        carried = 0.0  # what the cell on the left rounds up
        for cell in range(size + 1):
            weight = carried
            if cell < size:
                carried = fractions[cell]
                weight += counts[cell] - carried
            code = min(max(first + cell, formats[f, 1]), formats[f, 2])
            result[f, _bin(np.float32(code) * lsb, low, inverse_width, resolution)] += weight


_sampled_serial, _sampled_parallel = compile_both(_sampled)
_cells_serial, _cells_parallel = compile_both(_cells)


def sampled(
    x: Tensor, fmts: Sequence[FixedPoint], bins: Bins, rounding: Rounding, key: Key
) -> Tensor:
    """See ``reference.sampled``."""
    parallel = is_parallel(x.numel())
    parts = np.zeros((thread_count() if parallel else 1, len(fmts) + 1, bins.resolution), int)
    rows = [(fmt.scale, fmt.lsb, *float_bounds(fmt)) for fmt in fmts]
    numbers = np.array(rows, np.float32).reshape(-1, 4)
    kernel = _sampled_parallel if parallel else _sampled_serial
    words = np.array(key.words(), np.uint32)
    kernel(_values(x), key.offset, numbers, _bins(bins), rounding == "stochastic", words, parts)
    return torch.from_numpy(parts.sum(0))


def cells(x: Tensor, bins: Bins, grid: Cells) -> tuple[Tensor, Tensor]:
    """See ``reference.cells``."""
    # a second table costs more than a second thread gains while the values are fewer than cells
    parallel = is_parallel(x.numel()) and x.numel() > 4 * grid.size
    parts = thread_count() if parallel else 1
    own = np.zeros((parts, bins.resolution), np.int64)
    table = np.zeros((parts, grid.size, 2), np.int64)
    kernel = _cells_parallel if parallel else _cells_serial
    kernel(_values(x), _bins(bins), np.float32(2.0**grid.fl), grid.first, own, table)
    return torch.from_numpy(own.sum(0)), torch.from_numpy(table.sum(0) if parts > 1 else table[0])


def grid_histograms(
    table: np.ndarray, fl: int, first: int, formats: np.ndarray, bins: Bins
) -> np.ndarray:
    """See ``grid.Grid.histograms``; ``formats`` holds fl, smallest and largest code, finest first."""
    result = np.zeros((len(formats), bins.resolution))
    _grid_histograms(table, fl, first, formats, _bins(bins), result)
    return result


def _values(x: Tensor) -> np.ndarray:
    return in_memory(x).detach().float().contiguous().view(-1).numpy()


def _bins(bins: Bins) -> tuple[np.float32, np.float32, int]:
    return np.float32(bins.low), np.float32(bins.inverse_width), bins.resolution
