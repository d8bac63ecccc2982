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
_WIDEST = np.float32(2.0**31)  # formats of up to 32 bits saturate there, or before
_BLOCK = 256  # elements


@njit(inline="always")
def _bin(value, bins):
    low, inverse_width, resolution, power = bins
    place = (value * power - low) * inverse_width
    last = np.float32(resolution - 1)
    place = place if place > np.float32(0.0) else np.float32(0.0)  # NaN is not above 0
    return np.int32(place if place < last else last)


@njit(inline="always")
def _units(fraction):
    fraction = fraction if fraction > np.float32(0.0) else np.float32(0.0)  # not NaN
    return np.int32(fraction * np.float32(2.0**24))


@njit(inline="always")
def _draw(first, key, noise):
    # noise (n,) float32: of elements from ``first`` on
    words = np.empty(4, np.uint32)
    for i in range(noise.size):
        place = first + i
        if place % 4 == 0 or i == 0:
            c = np.uint64(place >> 2)
            w = philox(np.uint32(c), np.uint32(c >> _HALF), key[2], key[3], key[0], key[1])
            words[0], words[1], words[2], words[3] = w
        noise[i] = to_uniform(words[place % 4])


# Both kernels find the places of a block first, in loops that become vectors, and then count.


def _sampled(x, offset, numbers, bins, stochastic, key, parts):
    # x (n,) float32; offset int64: of x[0] in the noise; numbers (k, 4) float32; key (4,) uint32;
    # parts (threads, k + 1, r) int64
    share = -(-x.size // parts.shape[0])
    for part in prange(parts.shape[0]):
        noise, columns = np.zeros(_BLOCK, np.float32), np.empty(_BLOCK, np.int32)
        stop = min(part * share + share, x.size)
        for begin in range(part * share, stop, _BLOCK):
            values = x[begin : min(begin + _BLOCK, stop)]
            if stochastic:
                _draw(begin + offset, key, noise[: values.size])
            for i in range(values.size):
                columns[i] = _bin(values[i], bins)
            for i in range(values.size):
                parts[part, 0, columns[i]] += 1
            for f in range(numbers.shape[0]):
                scale, lsb, smallest, largest = numbers[f]
                for i in range(values.size):
                    scaled = values[i] * scale
                    below = np.floor(scaled)
                    up = noise[i] < scaled - below
                    code = below + np.float32(up) if stochastic else np.rint(scaled)
                    code = smallest if code < smallest else code  # NaN stays
                    code = largest if code > largest else code
                    columns[i] = _bin(code * lsb, bins)
                for i in range(values.size):
                    parts[part, f + 1, columns[i]] += 1


def _cells(x, bins, scale, first, own, table):
    # x (n,) float32; first float64; own (threads, r) int64; table (threads, size, 2) int64
    share = -(-x.size // own.shape[0])
    last = np.float64(table.shape[1] - 1)
    for part in prange(own.shape[0]):
        columns, rows = np.empty(_BLOCK, np.int32), np.empty(_BLOCK, np.int32)
        units = np.empty(_BLOCK, np.int32)
        stop = min(part * share + share, x.size)
        for begin in range(part * share, stop, _BLOCK):
            values = x[begin : min(begin + _BLOCK, stop)]
            for i in range(values.size):
                columns[i] = _bin(values[i], bins)
                scaled = values[i] * scale
                below = np.floor(scaled)
                row = np.float64(below) - first
                row = row if row > 0.0 else 0.0  # NaN is not above 0
                rows[i] = np.int32(row if row < last else last)
                units[i] = _units(scaled - below)
            for i in range(values.size):
                own[part, columns[i]] += 1
                table[part, rows[i], 0] += 1
                table[part, rows[i], 1] += units[i]


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
            result[f, _bin(np.float32(code) * lsb, bins)] += weight


@compiled()
def _moves(x, numbers, bins, result):
    # x (m,) float32; numbers (k, 2) float32: codes per unit, step; result (k, r) int64
    whole = 1 << 24
    for f in range(len(numbers)):
        scale, lsb = numbers[f]
        for value in x:
            scaled = value * scale
            scaled = scaled if scaled > -_WIDEST else -_WIDEST  # NaN too
            scaled = min(scaled, _WIDEST)
            below = np.floor(scaled)
            up = _units(scaled - below)
            result[f, _bin(value, bins)] -= whole
            result[f, _bin(below * lsb, bins)] += whole - up
            result[f, _bin((below + np.float32(1.0)) * lsb, bins)] += up


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
    kernel(_values(x), _bins(bins), np.float32(2.0**grid.fl), float(grid.first), own, table)
    return torch.from_numpy(own.sum(0)), torch.from_numpy(table.sum(0) if parts > 1 else table[0])


def grid_histograms(
    table: np.ndarray, fl: int, first: int, formats: np.ndarray, bins: Bins
) -> np.ndarray:
    """See ``grid.Grid.histograms``; ``formats`` holds fl, smallest and largest code, finest first."""
    result = np.zeros((len(formats), bins.resolution))
    _grid_histograms(table, fl, first, formats, _bins(bins), result)
    return result


def moves(x: np.ndarray, fls: Sequence[int], bins: Bins) -> np.ndarray:
    """See ``expected.Expected``: how many values each bin gains, shape ``(len(fls), bins)``.

    Args:
        x: Values, shape ``(m,)``, float32.
        fls: Fractional lengths.
        bins: The bins.

    Returns:
        The counts to expect of stochastic rounding, less those of ``x``, in 2**-24, int64.
    """
    numbers = np.array([(2.0**fl, 2.0**-fl) for fl in fls], np.float32).reshape(-1, 2)
    result = np.zeros((len(fls), bins.resolution), np.int64)
    _moves(x, numbers, _bins(bins), result)
    return result


def _values(x: Tensor) -> np.ndarray:
    return in_memory(x).detach().float().contiguous().view(-1).numpy()


def _bins(bins: Bins) -> tuple[np.float32, np.float32, int, np.float32]:
    low, inverse_width, resolution, power = bins
    if resolution < 1:
        raise ValueError(f"a histogram needs 1 bin or more, got resolution={resolution}")
    return np.float32(low), np.float32(inverse_width), resolution, np.float32(power)
