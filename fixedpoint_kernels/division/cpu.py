"""DIVISION in Numba: a thread takes some planes, and reads each from memory once.

Where channels lie last in memory, it turns some planes of 16 channels into memory of its own.

Planes of one block and a usual width are taken a vector at a time, across their rows.

Residuals wait in a buffer of the thread's, which a plane of usual size leaves in the cache. They
are coded in pieces of 128 elements counted through the tensor, not the plane: that is how noise
and bytes are counted. Each kernel is compiled twice from one definition, serial and parallel.
"""

from functools import lru_cache

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from fixedpoint_kernels.division.layout import Layout
from fixedpoint_kernels.llvm.calls import inner, keep
from fixedpoint_kernels.llvm.division import (
    BLOCK,
    LANES,
    add_rows,
    bits_of,
    code_block,
    ends_of,
    float_of,
    mean_of_columns,
    mean_of_plane,
    restore_rows,
    subtract_mean,
    subtract_rows,
    to_positions,
)
from fixedpoint_kernels.llvm.turning import turn
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.threads import compile_both, is_parallel

KNOWS_ORDERS = True  # of activations in memory
_TASK = 4096  # elements of small planes that a thread takes at a time
_SMALLEST_STEP = np.float32(2.0**-126)
_NAN_BITS = np.uint16(0x7FC0)
_INFINITY = np.float32(np.inf)


@njit(inline="always")
def _mean_of(sums, column, count, slots, inverse):
    """Return the bits of a block's mean, from the sums of its columns; see ``reference``."""
    slot = np.zeros(slots, np.float32)
    for i in range(count):
        slot[i % slots] += sums[column + i]
    left = slots // 2
    while left > 0:
        for i in range(left):
            slot[i] = slot[2 * i] + slot[2 * i + 1]
        left //= 2
    return _bfloat16(slot[0] * inverse)


@njit(inline="always")
def _bfloat16(x):
    if x != x:
        return _NAN_BITS
    bits = bits_of(x)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> 16)


@njit(inline="always")
def _value(bits):
    return float_of(np.uint32(bits) << np.uint32(16))


@njit(inline="always")
def _rounded_down(x):
    bits = bits_of(x)
    carry = np.uint32(0xFFFF) if x < 0 else np.uint32(0)
    return float_of((bits + carry) & np.uint32(0xFFFF0000))


@njit(inline="always")
def _range(low, high, levels, inverse_levels):
    """Return smallest residual and step, or two NaN; see ``reference``."""
    low = _rounded_down(low + np.float32(0.0))
    width = high - low
    step = np.float32(0.0)
    if width != 0:
        step = max(-_rounded_down(-(width * inverse_levels)), _SMALLEST_STEP)
    if not (np.isfinite(low) and np.isfinite(levels * step)):
        low = step = np.float32(np.nan)
    return low, step


@inner
def _block_row(sums, plane_means, sizes, slots, inverses, spread, bits):
    """Write the means of a row of blocks from the sums of their columns, and spread them.

    sums, spread, bits (width to a multiple of 16,) float32, float32, uint16; plane_means (blocks
    of the row,) uint16; sizes: width and edge; inverses: of a whole block and of the last.
    """
    width, edge = sizes
    count = plane_means.size
    if slots <= LANES and (slots == edge or count == 1):
        mean_of_columns(sums, width, slots, (count - 1) * edge, inverses, spread, bits)
        for block in range(count):
            plane_means[block] = bits[block * edge]
    else:
        for block in range(count):
            start, stop = block * edge, min(block * edge + edge, width)
            inverse = inverses[0] if block < count - 1 else inverses[1]
            mean = _mean_of(sums, start, stop - start, slots, inverse)
            plane_means[block] = mean
            spread[start:stop] = _value(mean)


@inner
def _turn_planes(x, planes, channels, elements, first, last, is_back):
    """Copy the planes ``first`` to ``last`` of a tensor with channels last, or write them there.

    x: the tensor; planes: one behind the other; both addresses.
    """
    plane = first
    while plane < last:
        sample, channel = plane // channels, plane % channels
        count = min(last - plane, channels - channel)
        there = x + 4 * (sample * elements * channels + channel)
        own = planes + 4 * (plane - first) * elements
        if is_back:
            turn(own, 4 * elements, count, elements, there, 4 * channels)
        else:
            turn(there, 4 * channels, elements, count, own, 4 * elements)
        plane += count


@inner
def _compress_task(x, begin, means, codes, ranges, geometry, numbers, bits, key, first, last):
    # x: from plane ``begin`` on
    elements = geometry[0] * geometry[1] * geometry[2]
    width = geometry[5]
    start, stop = first * elements, last * elements
    base = start - start % BLOCK
    residual = np.empty(stop - base + BLOCK, np.float32)
    planes = begin, first, last, base
    is_one_block = means.shape[1] == 1 and (width == 4 or width == 8 or width == 16)
    if is_one_block and codes is not None and elements % LANES == 0:
        _subtract_means(x, means, ranges, elements, width, numbers, residual, planes)
    else:
        _subtract_blocks(x, means, codes, ranges, geometry, numbers, residual, planes)
    if codes is not None:
        residual[: start - base] = 0
        residual[stop - base :] = 0
        _code(residual, start, stop, bits, key, codes)


@inner
def _subtract_means(x, means, ranges, elements, width, numbers, residual, planes):
    """Do as ``_subtract_blocks``, of planes of one block, whole vectors of 16 elements."""
    begin, first, last, base = planes
    inverse = numbers[3] * numbers[5] * numbers[7]
    for plane in range(first, last):
        at, to = (plane - begin) * elements, plane * elements - base
        means[plane, 0] = mean = mean_of_plane(x, at, elements, width, inverse)
        ends = subtract_mean(x, at, elements, _value(mean), residual, to)
        _to_positions(residual, to, elements, ends, numbers, ranges, plane)


@inner
def _subtract_blocks(x, means, codes, ranges, geometry, numbers, residual, planes):
    """Write means, ranges and positions of the planes of a task."""
    begin, first, last, base = planes
    depth, height, width, edge_z, edge_y, edge_x, nz, ny, nx, slots = geometry
    elements = depth * height * width
    columns = -(-width // LANES) * LANES
    sums, spread = np.empty(columns, np.float32), np.zeros(columns, np.float32)
    mean_bits = np.empty(columns, np.uint16)
    found = np.empty((3, LANES), np.float32)
    values, start = _readable(x, (first - begin) * elements, (last - first) * elements, LANES)
    for plane in range(first, last):
        at = start + (plane - first) * elements
        found[0], found[1], found[2] = _INFINITY, -_INFINITY, np.float32(0.0)
        for band in range(nz * ny):
            z, y = band // ny * edge_z, band % ny * edge_y
            layers, rows = min(edge_z, depth - z), min(edge_y, height - y)
            if means.size:
                sums[:] = 0
                for layer in range(z, z + layers):
                    add_rows(values, at + (layer * height + y) * width, rows, width, sums)
                inverse = numbers[3 if z + edge_z >= depth else 2]
                inverse *= numbers[5 if y + edge_y >= height else 4]
                along = inverse * numbers[6], inverse * numbers[7]
                row = means[plane, band * nx : band * nx + nx]
                _block_row(sums, row, (width, edge_x), slots, along, spread, mean_bits)
            if codes is not None:
                for layer in range(z, z + layers):
                    offset = (layer * height + y) * width
                    to = plane * elements - base + offset
                    end = to + (height - y) * width if depth > 1 else residual.size
                    at_row = at + offset
                    subtract_rows(values, at_row, rows, width, spread, residual, to, end, found)
        if codes is not None:
            to = plane * elements - base
            _to_positions(residual, to, elements, ends_of(found), numbers, ranges, plane)


@inner
def _readable(x, at, count, beyond):
    """Return an array, and where in it are ``x[at : at + count]`` and ``beyond`` elements more."""
    if at + count + beyond <= x.size:
        return x, at
    there = min(count, x.size - at)
    copy = np.empty(count + beyond, x.dtype)
    copy[:there] = x[at : at + there]
    return copy, 0


@inner
def _to_positions(residual, at, elements, ends, numbers, ranges, plane):
    """Keep the range of a plane, and turn its residuals to steps above the smallest.

    ends: the smallest and the largest. The next plane's residuals come later.
    """
    low, step = _range(ends[0], ends[1], numbers[0], numbers[1])
    ranges[plane, 0], ranges[plane, 1] = _bfloat16(low), _bfloat16(step)
    if step > 0:
        to_positions(residual, at, elements, low, np.float32(1.0) / step)
    else:
        residual[at : at + elements] = 0  # constant, or NaN


@inner
def _code(positions, start, stop, bits, key, codes):
    """Code elements ``start`` to ``stop`` of the tensor; ``positions`` start at a whole block."""
    base = start - start % BLOCK
    rest = np.empty(BLOCK, np.uint8)
    for block in range(base, stop, BLOCK):
        byte = block * len(bits) // 8
        is_whole = start <= block and block + BLOCK <= stop
        target, at = (codes, byte) if is_whole else (rest, 0)
        code_block(positions, block - base, block, bits, key, target, at)
        if not is_whole:
            first = max(start, block) * len(bits) // 8
            last = (min(stop, block + BLOCK) * len(bits) + 7) // 8
            codes[first:last] = rest[first - byte : last - byte]


@inner
def _restore_task(means, codes, ranges, out, begin, geometry, bits, first, last):
    # out: from plane ``begin`` on
    depth, height, width, edge_z, edge_y, edge_x, nz, ny, nx, _ = geometry
    elements = depth * height * width
    if nz * ny * nx == 1:  # one mean for all elements, as for a row
        depth, height, width, edge_z, edge_y, edge_x = 1, 1, elements, 1, 1, elements
    spread = np.zeros(-(-width // LANES) * LANES, np.float32)
    low = step = np.float32(0.0)
    own = elements * len(bits)
    packed, byte = _readable(codes, first * own // 8, ((last - first) * own + 7) // 8, LANES)
    for plane in range(first, last):
        bit = 8 * byte + (plane - first) * own  # a task starts at a whole byte
        if len(bits):
            low, step = _value(ranges[plane, 0]), _value(ranges[plane, 1])
        for band in range(nz * ny):
            z, y = band // ny * edge_z, band % ny * edge_y
            rows = min(edge_y, height - y)
            if means.shape[1] == 1:  # no slice: to count who has it takes as long as a small plane
                spread[:] = _value(means[plane, 0])
            elif means.size:
                _spread_row(means[plane, band * nx : band * nx + nx], edge_x, spread)
            for layer in range(z, min(z + edge_z, depth)):
                offset = (layer * height + y) * width
                to = (plane - begin) * elements + offset
                stop = to + (height - y) * width if depth > 1 else (last - begin) * elements
                at = bit + offset * len(bits)
                restore_rows(packed, at, rows, width, bits, spread, (low, step), out, to, stop)


@inner
def _spread_row(row, edge, spread):
    if edge == 8:  # as usual: one store a block
        for block in range(row.size):
            for column in range(8):
                spread[8 * block + column] = _value(row[block])
    else:
        for block in range(row.size):
            spread[block * edge : block * edge + edge] = _value(row[block])


def _compress(x, means, codes, ranges, geometry, numbers, bits, key, planes, task, channels):
    # x (n,) float32, or uint16: bfloat16; means (planes, blocks or 0) uint16; codes (bytes,)
    # uint8, or None; ranges (planes, 2) uint16; geometry: sides, edges, blocks, slots; numbers:
    # 2**bits - 1 and its inverse, then of each side 1 over a whole block's edge and over the last
    # one's; bits, any tuple of that length; key (seed, stream); planes; a task's; channels that
    # come last in x, float32, or 0
    elements = geometry[0] * geometry[1] * geometry[2]
    for i in prange((planes + task - 1) // task):
        first, last = i * task, min(planes, (i + 1) * task)
        values, begin = x, 0
        if channels:
            values, begin = np.empty((last - first) * elements + LANES, x.dtype), first
            places = x.ctypes.data, values.ctypes.data
            _turn_planes(places[0], places[1], channels, elements, first, last, False)
        _compress_task(
            values, begin, means, codes, ranges, geometry, numbers, bits, key, first, last
        )


def _decompress(means, codes, ranges, out, geometry, bits, planes, task, channels):
    # the same; out (n,) float32, or uint16: bfloat16
    elements = geometry[0] * geometry[1] * geometry[2]
    for i in prange((planes + task - 1) // task):
        first, last = i * task, min(planes, (i + 1) * task)
        if channels:
            own = np.empty((last - first) * elements, out.dtype)
            _restore_task(means, codes, ranges, own, first, geometry, bits, first, last)
            places = out.ctypes.data, own.ctypes.data
            _turn_planes(places[0], places[1], channels, elements, first, last, True)
            keep(own)
        else:
            _restore_task(means, codes, ranges, out, 0, geometry, bits, first, last)


_compress_serial, _compress_parallel = compile_both(_compress)
_decompress_serial, _decompress_parallel = compile_both(_decompress)


def compress(
    x: Tensor, means: Tensor, codes: Tensor, ranges: Tensor, layout: Layout, key: Key
) -> None:
    """See ``fixedpoint_kernels.division.compress``; ``x`` has elements."""
    kernel = _compress_parallel if is_parallel(x.numel()) else _compress_serial
    x = x.detach() if x.dtype is torch.bfloat16 else x.detach().float()
    channels = _channels_of(x, layout)
    x = _in_order(x) if channels else x.contiguous().view(-1)
    geometry, numbers, bits, task = _arguments(layout, bool(channels))
    kernel(
        _array(x),
        _array(means),
        codes.numpy() if layout.has_codes else None,
        _array(ranges),
        geometry,
        numbers,
        bits,
        (key.seed, key.stream),
        layout.planes,
        task,
        channels,
    )


def decompress(means: Tensor, codes: Tensor, ranges: Tensor, out: Tensor, layout: Layout) -> None:
    """See ``fixedpoint_kernels.division.decompress``; ``out`` has elements, as the layout says."""
    kernel = _decompress_parallel if is_parallel(out.numel()) else _decompress_serial
    is_direct = out.dtype in (torch.float32, torch.bfloat16)
    result = out if is_direct else torch.empty_like(out, dtype=torch.float32)
    channels = _channels_of(result, layout)
    if not channels and not result.is_contiguous():
        result = torch.empty(result.shape, dtype=result.dtype, device="cpu")
    geometry, _, bits, task = _arguments(layout, bool(channels))
    kernel(
        _array(means),
        codes.numpy(),
        _array(ranges),
        _array(_in_order(result) if channels else result.view(-1)),
        geometry,
        bits,
        layout.planes,
        task,
        channels,
    )
    if result is not out:
        out.copy_(result)


def _channels_of(x: Tensor, layout: Layout) -> int:
    """Return the channels that lie last in memory and are no part of a plane; 0 where none do."""
    is_turned = layout.is_channels_last and layout.spatial == x.dim() - 2
    return x.shape[1] if is_turned and x.dtype is torch.float32 else 0


def _in_order(x: Tensor) -> Tensor:
    """Return the elements of a tensor with channels last, as they lie in memory."""
    return x.permute(0, *range(2, x.dim()), 1).reshape(-1)


def _array(x: Tensor) -> np.ndarray:
    return x.view(torch.uint16).numpy() if x.dtype is torch.bfloat16 else x.numpy()


@lru_cache(maxsize=256)
def _arguments(layout: Layout, is_turned: bool) -> tuple:
    """Return geometry, numbers and bits for the kernels, and the planes of a task.

    Where planes are read across memory it is 16 or a multiple: whole vectors of channels.
    """
    sides, edges, blocks, slots = layout.geometry
    numbers = 2.0**layout.bits - 1, layout.inverse_levels, *sum(layout.inverses, ())
    least = LANES if is_turned else layout.planes_of_whole_bytes
    task = least * max(1, _TASK // (least * layout.elements))
    flat = *sides, *edges, *blocks, slots  # parallel kernels take no tuple of tuples
    return flat, tuple(map(np.float32, numbers)), (0,) * layout.bits, task
