"""Products of codes in Numba, on the integer units of the processor; see ``tiles`` and ``blocks``.

A thread copies a block of images with its border, and multiplies it while it is in the cache. Each
kernel is made once for each path from one definition, of other tiles.
"""

from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray, njit, prange
from torch import Tensor

from fixedpoint_kernels.llvm import tiles
from fixedpoint_kernels.llvm.vectors import pointer_to
from fixedpoint_kernels.products import paths, portable, reference, shapes
from fixedpoint_kernels.products.blocks import Blocks, Runs, blocks, runs
from fixedpoint_kernels.products.samples.cpu import round_per_sample
from fixedpoint_kernels.products.shapes import LONGEST_SUM, Correlation, Window
from fixedpoint_kernels.threads import compile_both, compiled, is_parallel, thread_count

__all__ = ["convolve", "input_gradient", "round_per_sample", "weight_gradient"]

_MACS_A_THREAD = 64  # as many as one element of another kernel costs
_PIECE = 2**16  # positions, a multiple of 64: so many products fit in int32

# what each path replaces, see ``_TILES``
enter: Any = None
leave = narrow = wide = narrow_rows = wide_rows = enter
GRAIN, NARROW_ROWS, WIDE_ROWS = 4, 0, 0
FLIPS = 0  # or 1: True would become what 1 is in loops that Numba runs in parallel


@njit
def _keep(*_arrays):
    """Keep arrays alive until here: Numba frees them after their last use, not that of addresses."""


@njit
def _fill(x, x_image, x_row, geometry, job, order, buffer, flip):
    """Copy the images of a job to a buffer, with a border of code 0; flipped, that is 128."""
    down, top, left, pixels, slot_rows, plane_bytes, extra, channels, height, width = geometry
    first, images, first_row, rows = job
    row_bytes, zero = pixels * channels, 128 if flip else 0
    skipped, begin = max(-left, 0), max(left, 0)
    count = min(width - skipped, pixels - begin) * channels
    tail = (pixels - begin) * channels - count
    for slot in range(images):
        image = x + order[first + slot] * x_image
        for plane in range(down):
            out = buffer + plane * plane_bytes + slot * slot_rows * row_bytes
            for i in range(rows + extra):
                row = (first_row + i) * down + plane - top
                if row < 0 or row >= height or count <= 0:
                    tiles.blank(out, row_bytes, zero)
                else:
                    tiles.blank(out, begin * channels, zero)
                    source, target = (
                        image + row * x_row + skipped * channels,
                        out + begin * channels,
                    )
                    if flip:
                        tiles.copy_flipped(source, target, count)
                    else:
                        tiles.copy(source, target, count)
                    tiles.blank(target + count, tail, zero)
                out += row_bytes
            tiles.blank(out, begin * channels, zero)  # what the last row reads behind it


@njit
def _place_outputs(offsets, job, slot_rows, columns, height, width, steps):
    """Write where each position of a job goes, in bytes from its first image, or -1."""
    _, images, first_row, rows = job
    image_step, row_step, column_step = steps
    n = ((images - 1) * slot_rows + rows) * columns
    offsets[: n + 64] = -1
    for slot in range(images):
        for i in range(rows):
            q = (slot * slot_rows + i) * columns
            start = slot * image_step + (first_row + i) * row_step
            for j in range(width):
                offsets[q + j] = start + j * column_step
    return n


def _correlate(  # noqa: C901  loops over what lies in the cache
    x,  # address of (images, height, width, channels) bytes
    x_steps,  # (2,): bytes of an image and of a row
    geometry,
    jobs,
    order,
    columns,
    slot_rows,
    count,  # (2,): rows and columns of outputs
    b,  # address of packed weights
    depth,  # bytes of a column of them
    begin,  # address of (groups, 16) int32 to start from
    table,  # (runs, 2)
    step,  # bytes from one position to the next
    out,  # address of the first output
    out_steps,  # (3,): bytes of an image, a row and a column of outputs
    out_channels,
    out_size,  # bytes of an element
    kind,
    scales,  # (16 * groups,) float32, or one an image
    statistics,  # (2, threads, groups, 48) int64: totals, and of one job
    signed,
    buffer_bytes,
    most_positions,
    threads,
):
    groups, flips = (out_channels + 15) // 16, FLIPS != 0 and signed
    for thread in prange(threads):
        memory = np.empty(buffer_bytes + 64, np.uint8)
        buffer = (memory.ctypes.data + 63) // 64 * 64
        room = np.empty(64 * 32 + 16, np.int32)  # of the largest tile
        sums = (room.ctypes.data + 63) // 64 * 64
        offsets = np.empty(most_positions + 128, np.int64)
        row_scales = np.empty(most_positions + 128 if kind in (4, 5) else 0, np.float32)
        starts = np.array([0, 16 * step, 32 * step, 48 * step])
        enter()
        placed_images, placed_row, placed_rows, n = -1, -1, -1, 0
        for k in range(len(jobs) * thread // threads, len(jobs) * (thread + 1) // threads):
            job = (jobs[k, 0], jobs[k, 1], jobs[k, 2], jobs[k, 3])
            _fill(x, x_steps[0], x_steps[1], geometry, job, order, buffer, flips)
            if job[1] != placed_images or job[2] != placed_row or job[3] != placed_rows:
                _, placed_images, placed_row, placed_rows = job
                n = _place_outputs(offsets, job, slot_rows, columns, count[0], count[1], out_steps)
            if kind == 4 or kind == 5:
                for slot in range(job[1]):
                    here = slot * slot_rows * columns
                    row_scales[here : here + slot_rows * columns] = scales[job[0] + slot]
            first_out = out + job[0] * out_steps[0]
            group = 0
            while group < groups:
                pair = group + 1 < groups and WIDE_ROWS > 0
                at_once = WIDE_ROWS if pair else NARROW_ROWS
                sums_step = 128 if pair else 64
                weights, start = b + group * depth * 16, begin + group * 64
                for q in range(0, n, at_once):
                    a = buffer + q * step
                    run = table.ctypes.data
                    if pair:
                        wide(
                            signed, a, starts.ctypes.data, step, run, len(table), weights,
                            depth * 16, start, 0, sums, sums_step,
                        )  # fmt: skip
                    else:
                        narrow(
                            signed, a, starts.ctypes.data, step, run, len(table), weights,
                            depth * 16, start, 0, sums, sums_step,
                        )  # fmt: skip
                    for half in range(2 if pair else 1):
                        channel = (group + half) * 16
                        if kind == 4 or kind == 5:
                            scale = row_scales.ctypes.data + 4 * q
                        else:
                            scale = scales.ctypes.data + 4 * channel
                        tiles.emit(
                            kind, sums + 64 * half, sums_step, offsets.ctypes.data + 8 * q,
                            at_once, first_out + channel * out_size,
                            min(16, out_channels - channel), scale,
                            statistics[1, thread, group + half].ctypes.data,
                        )  # fmt: skip
                group += 2 if pair else 1
            if kind >= 6:
                _flush(statistics[0, thread], statistics[1, thread])
        leave()
        _keep(memory, room, offsets, row_scales, starts)


@njit
def _flush(totals, recent):
    """Add the sums of a job to those of its thread: sums, and both halves of squares."""
    for group in range(len(recent)):
        for i in range(16):
            totals[group, i] += recent[group, i]
            square = recent[group, 16 + i]
            totals[group, 16 + i] += square >> 32
            totals[group, 32 + i] += square & 0xFFFFFFFF
            recent[group, i] = 0
            recent[group, 16 + i] = 0


def _correlate_weights(  # noqa: C901
    x,  # address of (images, height, width, channels) bytes
    x_steps,  # (2,): bytes of an image and of a row
    geometry,
    jobs,
    order,
    shifts,  # (jobs,) int64
    columns,
    slot_rows,
    count,  # (2,): rows and columns of outputs
    across,  # pixels from one position to the next
    places,  # (taps,): pixel of each
    planes,  # (taps,)
    grad,  # address of (images, *count, grad_channels) int8
    grad_channels,
    totals,  # (threads, tap rows, 16 * groups) int64, zeros
    taps,
    signed,
    buffer_bytes,
    most_positions,
    threads,
):
    down, plane_bytes, channels = geometry[0], geometry[5], geometry[7]
    groups, blocks = (grad_channels + 15) // 16, (channels + 15) // 16
    padded, flips = blocks * 16, FLIPS != 0 and signed
    longest = (most_positions + 63) // 64 * 64
    reach = 0
    for t in range(taps):
        reach = max(reach, places[t] // across)
    line = (longest + reach + 64 + 127) // 64 * 64  # bytes of a channel
    if line % 512 == 0:
        line += 64  # not all in one set of the cache
    tile_rows = taps * blocks
    run_bytes = longest // 4 * 64
    for thread in prange(threads):
        memory = np.empty(buffer_bytes + 64, np.uint8)
        buffer = (memory.ctypes.data + 63) // 64 * 64
        turned_memory = np.empty(down * across * padded * line + 128, np.uint8)
        turned = (turned_memory.ctypes.data + 63) // 64 * 64
        flat_memory = np.empty(longest * grad_channels + 256, np.uint8)
        flat = (flat_memory.ctypes.data + 63) // 64 * 64
        b_memory = np.empty(groups * run_bytes + 64, np.uint8)
        b = (b_memory.ctypes.data + 63) // 64 * 64
        ones_memory = np.ones(longest + 64 if flips else 0, np.uint8)
        starts = np.empty(tile_rows + 4, np.int64)
        for t in range(taps):
            pixel = places[t]
            place = planes[t] * across * padded * line
            place += pixel % across * padded * line + pixel // across
            for c in range(blocks):
                starts[t * blocks + c] = place + c * 16 * line
        starts[tile_rows:] = starts[tile_rows - 1]
        sums_memory = np.zeros(((tile_rows + 4) * 16 + 16) * groups * 16 + 16, np.int32)
        sums = (sums_memory.ctypes.data + 63) // 64 * 64
        skip = (sums - sums_memory.ctypes.data) // 4
        sums_view = sums_memory[skip : skip + ((tile_rows + 4) * 16 + 16) * groups * 16]
        table = np.zeros((1, 2), np.int64)
        row_bytes = groups * 64
        held, shift = 0, 0
        enter()
        for k in range(len(jobs) * thread // threads, len(jobs) * (thread + 1) // threads):
            job = (jobs[k, 0], jobs[k, 1], jobs[k, 2], jobs[k, 3])
            _, images, _, rows = job
            n = ((images - 1) * slot_rows + rows) * columns
            outputs = images * rows * count[1]
            if held and (shift != shifts[k] or held + outputs > LONGEST_SUM):
                _fold(sums_view, totals[thread], tile_rows, groups, shift, flips)
                held = 0
            shift = shifts[k]
            _fill(x, x_steps[0], x_steps[1], geometry, job, order, buffer, flips)
            for plane in range(down):
                for phase in range(across):
                    source = buffer + plane * plane_bytes + phase * channels
                    target = turned + (plane * across + phase) * padded * line
                    for q in range(0, n + reach, 16):
                        for c in range(0, channels, 16):
                            tiles.transpose(
                                source + q * across * channels + c,
                                across * channels,
                                target + c * line + q,
                                line,
                            )
            whole = (n + 63) // 64 * 64
            _flatten(grad, grad_channels, job, order, slot_rows, columns, count, flat, whole)
            for group in range(groups):
                target = b + group * run_bytes
                for q in range(0, whole, 4):
                    source = flat + q * grad_channels + group * 16
                    tiles.interleave(source, grad_channels, target + q * 16)
            for piece in range(0, whole, _PIECE):
                steps = min(_PIECE, whole - piece)
                table[0, 1] = (steps + GRAIN - 1) // GRAIN
                if piece:
                    _fold(sums_view, totals[thread], tile_rows, groups, shift, flips)
                group = 0
                while group < groups:
                    pair = group + 1 < groups and WIDE_ROWS > 0
                    weights = b + group * run_bytes + piece * 16
                    row = 0
                    while row < tile_rows:
                        place = sums + row * 16 * row_bytes + group * 64
                        if pair:
                            row += wide_rows(
                                signed, tile_rows - row, turned + piece,
                                starts.ctypes.data + 8 * row, starts[row], line,
                                table.ctypes.data, weights, run_bytes, place, row_bytes,
                            )  # fmt: skip
                        else:
                            row += narrow_rows(
                                signed, tile_rows - row, turned + piece,
                                starts.ctypes.data + 8 * row, starts[row], line,
                                table.ctypes.data, weights, run_bytes, place, row_bytes,
                            )  # fmt: skip
                    if flips:
                        for half in range(2 if pair else 1):
                            place = sums + tile_rows * 16 * row_bytes + (group + half) * 64
                            narrow(
                                False, ones_memory.ctypes.data, starts.ctypes.data, 0,
                                table.ctypes.data, 1, weights + half * run_bytes, run_bytes,
                                place, 0, place, 0,
                            )  # fmt: skip
                    group += 2 if pair else 1
            held = held + outputs
        if held:
            _fold(sums_view, totals[thread], tile_rows, groups, shift, flips)
        leave()
        _keep(memory, turned_memory, flat_memory, b_memory, ones_memory, starts, table)


@njit
def _flatten(grad, channels, job, order, slot_rows, columns, count, out, positions):
    """Copy the gradient of a job so that its rows lie as those of the inputs, 0 between."""
    first, images, first_row, rows = job
    tiles.blank(out, positions * channels, 0)
    row_bytes = count[1] * channels
    for slot in range(images):
        source = grad + (order[first + slot] * count[0] + first_row) * row_bytes
        for i in range(rows):
            place = out + (slot * slot_rows + i) * columns * channels
            tiles.copy(source + i * row_bytes, place, row_bytes)


@njit
def _fold(sums, totals, tile_rows, groups, shift, flipped):
    """Move int32 sums to int64 totals, ``shift`` bits up."""
    n = groups * 16
    last = sums[tile_rows * 16 * n : (tile_rows * 16 + 1) * n]
    for row in range(tile_rows * 16):
        values, total = sums[row * n : row * n + n], totals[row]
        if flipped:
            for i in range(n):
                total[i] += np.int64(np.int32(values[i] - np.int32(128) * last[i])) << shift
                values[i] = 0
        else:
            for i in range(n):
                total[i] += np.int64(values[i]) << shift
                values[i] = 0
    last[:] = 0


@njit
def _fill_weights(weight, taps, offsets, rows, depth, outputs, inputs, step, is_turned, out):
    """Write weights as columns of bytes, ``(outputs, depth)``; the bytes between are 0.

    weight: address of (o, all taps, c) int8, ``step`` bytes an ``o``; turned, outputs are ``c``.
    """
    tiles.blank(out, outputs * depth, 0)
    for i in range(len(taps)):
        source, target = weight + taps[i] * (outputs if is_turned else inputs), out + offsets[i]
        if not is_turned:
            for column in range(outputs):
                tiles.copy(source + column * step, target + column * depth, inputs)
        elif outputs % 16 == 0 and inputs % 16 == 0:
            for row in range(0, inputs, 16):
                for column in range(0, outputs, 16):
                    place = target + column * depth + row
                    tiles.transpose(source + row * step + column, step, place, depth)
        else:
            for row in range(inputs):
                for column in range(outputs):
                    tiles.copy(source + row * step + column, target + column * depth + row, 1)


@compiled()
def _pack(weight, taps, offsets, depth, outputs, inputs, step, is_turned, sums, out):
    """Lay out weights for tiles: ``[groups][depth / 4][16][4]``; and add up each column.

    sums (16 * groups,) int32; out: address.
    """
    memory = np.empty(outputs * depth + 128, np.uint8)
    rows = memory.ctypes.data
    _fill_weights(weight, taps, offsets, rows, depth, outputs, inputs, step, is_turned, rows)
    quads = depth // 4
    source = carray(pointer_to(rows), outputs * quads, np.int32)
    target = carray(pointer_to(out), (outputs + 15) // 16 * 16 * quads, np.int32)
    target[:] = 0
    for column in range(outputs):
        first = column // 16 * quads * 16 + column % 16
        for k in range(quads):
            target[first + k * 16] = source[column * quads + k]
    codes = carray(pointer_to(rows), outputs * depth, np.int8)
    for column in range(outputs):
        total = np.int32(0)
        for k in range(depth):
            total += np.int32(codes[column * depth + k])
        sums[column] = total
    _keep(memory)


_VNNI_16X1 = tiles.vnni_tile(16, 1, 16)
_VNNI_8X2 = tiles.vnni_tile(8, 2, 16)
_VNNI_4X1 = tiles.vnni_tile(4, 1, 8)
_AMX_4X1, _AMX_3X1, _AMX_1X1 = (tiles.amx_tile(rows, 1) for rows in (4, 3, 1))
_AMX_2X2, _AMX_1X2 = (tiles.amx_tile(rows, 2) for rows in (2, 1))


@njit
def _enter_nothing():
    pass


@njit
def _enter_amx():
    configuration = np.zeros(64, np.uint8)
    configuration[0] = 1
    for tile in range(8):
        configuration[16 + 2 * tile] = 64  # bytes of a row
        configuration[48 + tile] = 16  # rows
    tiles.configure(configuration.ctypes.data)
    _keep(configuration)


@njit
def _leave_amx():
    tiles.release(0)


@njit
def _narrow_rows_amx(signed, left, a, starts, first, step, run, b, group, place, row_bytes):
    """Add 16 rows, or up to four times as many; return how many times."""
    if left % 4 and left >= 3 and (left % 3 == 0 or left < 4):
        _AMX_3X1(signed, a, starts, step, run, 1, b, group, place, row_bytes, place, row_bytes)
        return 3
    if left < 4:
        _AMX_1X1(signed, a, starts, step, run, 1, b, group, place, row_bytes, place, row_bytes)
        return 1
    _AMX_4X1(signed, a, starts, step, run, 1, b, group, place, row_bytes, place, row_bytes)
    return 4


@njit
def _wide_rows_amx(signed, left, a, starts, first, step, run, b, group, place, row_bytes):
    if left == 1:
        _AMX_1X2(signed, a, starts, step, run, 1, b, group, place, row_bytes, place, row_bytes)
        return 1
    _AMX_2X2(signed, a, starts, step, run, 1, b, group, place, row_bytes, place, row_bytes)
    return 2


@njit
def _narrow_rows_avx512(signed, left, a, starts, first, step, run, b, group, place, row_bytes):
    a += first
    _VNNI_16X1(signed, a, 0, step, run, 1, b, group, place, row_bytes, place, row_bytes)
    return 1


@njit
def _wide_rows_avx512(signed, left, a, starts, first, step, run, b, group, place, row_bytes):
    for row in range(0, 16, 8):
        here, out = a + first + row * step, place + row * row_bytes
        _VNNI_8X2(signed, here, 0, step, run, 1, b, group, out, row_bytes, out, row_bytes)
    return 1


@njit
def _narrow_rows_avx(signed, left, a, starts, first, step, run, b, group, place, row_bytes):
    for row in range(0, 16, 4):
        here, out = a + first + row * step, place + row * row_bytes
        _VNNI_4X1(signed, here, 0, step, run, 1, b, group, out, row_bytes, out, row_bytes)
    return 1


# by the names that the kernels know them by: what has 16 columns is narrow, what has 32 wide
_TILES: dict[str, dict[str, Any]] = {
    "amx": {
        "enter": _enter_amx,
        "leave": _leave_amx,
        "GRAIN": 64,
        "FLIPS": 0,
        "narrow": _AMX_4X1,
        "NARROW_ROWS": 64,
        "narrow_rows": _narrow_rows_amx,
        "wide": _AMX_2X2,
        "WIDE_ROWS": 32,
        "wide_rows": _wide_rows_amx,
    },
    "avx512_vnni": {
        "enter": _enter_nothing,
        "leave": _enter_nothing,
        "GRAIN": 4,
        "FLIPS": 1,
        "narrow": _VNNI_16X1,
        "NARROW_ROWS": 16,
        "narrow_rows": _narrow_rows_avx512,
        "wide": _VNNI_8X2,
        "WIDE_ROWS": 8,
        "wide_rows": _wide_rows_avx512,
    },
    "avx_vnni": {
        "enter": _enter_nothing,
        "leave": _enter_nothing,
        "GRAIN": 4,
        "FLIPS": 1,
        "narrow": _VNNI_4X1,
        "NARROW_ROWS": 4,
        "narrow_rows": _narrow_rows_avx,
        "wide": _VNNI_4X1,
        "WIDE_ROWS": 0,
        "wide_rows": _narrow_rows_avx,
    },
}


@cache
def _compiled(kernel: Any, path: str) -> tuple[Any, Any]:
    """Return a kernel with the tiles of a path, serial and parallel."""
    name, scope = f"{kernel.__name__}_{path}", {**globals(), **_TILES[path]}
    copy = FunctionType(kernel.__code__, scope, name)
    copy.__qualname__ = name
    return compile_both(copy)


class _Weights(NamedTuple):
    """Weights laid out for tiles."""

    memory: np.ndarray
    address: int
    begin: np.ndarray  # (16 * groups,) int32: what sums start from
    runs: Runs


def _packed(
    weight: Tensor, part: Correlation, cut: Blocks, path: str, is_turned: bool, flips: bool
) -> _Weights:
    """Lay out weights (o, c, r, s) for a correlation; turned, outputs are ``c``."""
    found = runs(cut, _TILES[path]["GRAIN"])
    laid = weight.permute(0, 2, 3, 1).contiguous().numpy()
    outputs, inputs = (
        (laid.shape[3], laid.shape[0]) if is_turned else (laid.shape[0], laid.shape[3])
    )
    padded = -(outputs // -16) * 16
    memory = np.empty(padded * found.depth + 64, np.uint8)
    address = -(memory.ctypes.data // -64) * 64
    begin = np.zeros(padded, np.int32)
    taps, step = np.array(part.taps), laid[:1].size
    pack = outputs, inputs, step, is_turned, begin, address
    _pack(laid.ctypes.data, taps, found.offsets, found.depth, *pack)
    begin *= np.int32(-128) if flips else np.int32(0)
    return _Weights(memory, address, begin, found)


def _run_correlation(
    x: Tensor,  # (images, height, width, channels), contiguous
    weight: Tensor,
    part: Correlation,
    is_turned: bool,
    scales: np.ndarray | None,
    by_image: bool,
    out: Tensor,  # (images, height, width, channels) of results, contiguous
    statistics: np.ndarray | None,  # (threads, groups, 48) int64
    path: str,
) -> None:
    """Write a correlation's part of the results."""
    images, height, width, channels = x.shape
    signed = x.dtype is torch.int8
    flips = signed and bool(_TILES[path]["FLIPS"])
    macs = images * part.counts[0] * part.counts[1] * len(part.taps) * channels * out.shape[3]
    parallel = is_parallel(macs // _MACS_A_THREAD)
    threads = thread_count() if parallel else 1
    cut = blocks(part, images, (height, width), channels, 2 * threads if parallel else 1)
    packed = _packed(weight, part, cut, path, is_turned, flips)
    kind = tiles.KINDS[str(out.dtype).removeprefix("torch.")] + 3 * by_image
    groups = len(packed.begin) // 16
    if statistics is not None:
        kind += 6
        both = np.zeros((2, threads, groups, 48), np.int64)
    else:
        both = np.zeros((2, threads, groups, 0), np.int64)
    if scales is None:
        scales = np.ones(1, np.float32)
    size = out.element_size()
    steps = [size * n for n in out.stride()]
    start = out.data_ptr() + part.first[0] * steps[1] + part.first[1] * steps[2]
    _compiled(_correlate, path)[parallel](
        x.data_ptr(),
        (height * width * channels, width * channels),
        cut.geometry,
        cut.jobs,
        np.arange(images),
        cut.columns,
        cut.slot_rows,
        part.counts,
        packed.address,
        packed.runs.depth,
        packed.begin.ctypes.data,
        packed.runs.table,
        part.stride[1] * channels,
        start,
        (steps[0], steps[1] * part.step[0], steps[2] * part.step[1]),
        out.shape[3],
        size,
        kind,
        scales,
        both,
        signed,
        cut.buffer_bytes,
        cut.most_positions,
        threads,
    )
    if statistics is not None:
        statistics += both[0].sum(0)


def convolve(
    x: Tensor,
    weight: Tensor,
    exponents: Tensor | None,
    window: Window,
    dtype: torch.dtype,
    statistics: bool,
    forced: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See ``fixedpoint_kernels.products.convolve``."""
    part = shapes.forward(window, _size(x), _size(weight))
    path = paths.chosen(window.groups, _depth(weight), forced).name
    if path in portable.MULTIPLY:
        return portable.convolve(x, weight, exponents, window, dtype, statistics, path)
    outputs = len(weight)
    out, laid = _results(x, outputs, part.counts, dtype)
    totals = None
    if statistics:
        if not _sums_fit(part, x, weight):
            sums, _ = convolve(x, weight, None, window, torch.int32, False, path)
            return reference.finish(sums, exponents, 1, dtype), reference.sum_up(sums)
        totals = np.zeros((-(outputs // -16), 48), np.int64)
    if out.numel():
        scales = None if exponents is None else _scales(exponents, outputs)
        _run_correlation(_laid(x), weight, part, False, scales, False, laid, totals, path)
    return out, (None if totals is None else _statistics(totals, outputs))


def input_gradient(
    grad: Tensor,
    weight: Tensor,
    exponents: Tensor | None,
    size: tuple[int, int],
    window: Window,
    dtype: torch.dtype,
    forced: str | None = None,
) -> Tensor:
    """See ``fixedpoint_kernels.products.convolve_input_gradient``."""
    path = paths.chosen(window.groups, len(weight) * weight[0, 0].numel(), forced).name
    if path in portable.MULTIPLY:
        return portable.input_gradient(grad, weight, exponents, size, window, dtype, path)
    out, laid = _results(grad, weight.shape[1], size, dtype)
    parts = shapes.input_gradient(window, size, _size(weight))
    if not shapes.covers(parts, size):
        reference.finish_empty(out, exponents)
    if out.numel() == 0:
        return out
    by_image, scales = False, None
    if exponents is not None:
        by_image = exponents.numel() > 1
        scales = _scales(exponents, len(grad) if by_image else weight.shape[1])
    source = _laid(grad)
    for part in parts:
        _run_correlation(source, weight, part, True, scales, by_image, laid, None, path)
    return out


def weight_gradient(
    x: Tensor,
    grad: Tensor,
    exponents: Tensor | None,
    kernel: tuple[int, int],
    window: Window,
    forced: str | None = None,
) -> Tensor:
    """See ``fixedpoint_kernels.products.convolve_weight_gradient``."""
    path = paths.chosen(window.groups, 1, forced).name
    if path in portable.MULTIPLY:
        return portable.weight_gradient(x, grad, exponents, kernel, window, path)
    images, channels, height, width = x.shape
    outputs, positions = grad.shape[1], len(grad) * grad.shape[2] * grad.shape[3]
    room = shapes.shift_room(positions)
    order, shifts, top = _order(exponents, images, room)
    part = shapes.forward(window, (height, width), kernel)
    taps, groups = len(part.taps), -(outputs // -16)
    parallel = is_parallel(positions * taps * channels * outputs // _MACS_A_THREAD)
    threads = thread_count() if parallel else 1
    padded = -(channels // -16) * 16
    totals = np.zeros((threads, taps * padded, groups * 16), np.int64)
    if len(order) and positions and channels and outputs:
        least = 2 * threads if parallel else 1
        cut = blocks(part, images, (height, width), channels, least, LONGEST_SUM)
        jobs, job_shifts = _sorted_jobs(cut, shifts)
        source, target = _laid(x), _laid(grad)
        _compiled(_correlate_weights, path)[parallel](
            source.data_ptr(),
            (height * width * channels, width * channels),
            cut.geometry,
            jobs,
            order,
            job_shifts,
            cut.columns,
            cut.slot_rows,
            part.counts,
            part.stride[1],
            cut.places,
            cut.planes,
            target.data_ptr(),
            outputs,
            totals,
            taps,
            x.dtype is torch.int8,
            cut.buffer_bytes,
            cut.most_positions,
            threads,
        )
    total = totals[0] if threads == 1 else totals.sum(0)
    total = torch.from_numpy(total).view(*kernel, padded, -1)[:, :, :channels, :outputs]
    total = total.permute(3, 2, 0, 1)
    return total if exponents is None else reference.folded(total, torch.tensor(top), room)


def _order(exponents: Tensor | None, images: int, room: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the images that count, by falling exponent, by how much each sum moves, and the top."""
    if exponents is None:
        return np.arange(images), np.zeros(images, np.int64), 0
    bounded = exponents.clamp(shapes.LOWEST_EXPONENT, shapes.NOT_FINITE).long().expand(images)
    numbers = bounded.numpy()
    top = int(numbers.max(initial=shapes.LOWEST_EXPONENT))
    order = np.argsort(-numbers, kind="stable")
    shifts = room - top + numbers[order]
    return order[shifts >= 0], shifts[shifts >= 0], top


def _sorted_jobs(cut: Blocks, shifts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return jobs over images in their order, of one shift each."""
    slots, bands = int(cut.jobs[:, 1].max()), cut.jobs[cut.jobs[:, 0] == 0]
    jobs, at = [], 0
    for shift, count in zip(*np.unique(-shifts, return_counts=True), strict=True):
        for first in range(at, at + count, slots):
            for band in bands:
                jobs.append((first, min(slots, at + count - first), band[2], band[3], -shift))
        at += count
    table = np.array(jobs, np.int64)
    return table[:, :4].copy(), table[:, 4].copy()


def _results(
    x: Tensor, channels: int, size: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return an empty result, channels last, and the same with its channels last."""
    shape = len(x), channels, *size
    out = torch.empty(shape, dtype=dtype, memory_format=torch.channels_last)
    return out, out.permute(0, 2, 3, 1)


def _laid(x: Tensor) -> Tensor:
    return x.detach().permute(0, 2, 3, 1).contiguous()


def _size(x: Tensor) -> tuple[int, int]:
    return x.shape[2], x.shape[3]


def _depth(weight: Tensor) -> int:
    return weight[0].numel()


def _scales(exponents: Tensor, count: int) -> np.ndarray:
    scales = reference.powers_of_two(exponents).numpy()
    padded = np.ones(-(count // -16) * 16, np.float32)
    padded[:count] = scales
    return padded


def _sums_fit(part: Correlation, x: Tensor, weight: Tensor) -> bool:
    """Say whether the sums of any tile fit int32, and the squares of any block int64."""
    largest = 255 * 128 * _depth(weight)
    positions = blocks(part, len(x), _size(x), x.shape[1], 1).most_positions
    return 4 * largest < 2**31 and largest**2 * positions < 2**63


def _statistics(totals: np.ndarray, outputs: int) -> Tensor:
    sums, high, low = np.split(totals, 3, axis=1)
    order = np.arange(16).reshape(2, 8).T.reshape(-1)  # even columns, then odd ones
    parts = [torch.from_numpy(n.reshape(-1)) for n in (sums, high[:, order], low[:, order])]
    return reference.carried(*(part[:outputs] for part in parts))
