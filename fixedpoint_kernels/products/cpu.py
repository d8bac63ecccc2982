"""Products of codes in Numba, on the integer units of the processor; see ``jobs`` and ``blocks``.

A thread copies a block of images with its border, and multiplies it while it is in the cache. Each
kernel is made once for each path from one definition, of other tiles.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import prange
from torch import Tensor
from torch.nn import functional as F

from fixedpoint_kernels.llvm import tiles
from fixedpoint_kernels.llvm.calls import outer
from fixedpoint_kernels.products import jobs, paths, portable, reference, shapes, weight_jobs
from fixedpoint_kernels.products.blocks import BLOCK_BYTES, Blocks, Runs, blocks, runs
from fixedpoint_kernels.products.instructions import FLIPS, GRAINS, ByName, compiled
from fixedpoint_kernels.products.packing import (
    Totals,
    finish_weights,
    pack,
    pack_alone,
    pack_groups,
    sum_taps,
)
from fixedpoint_kernels.products.samples.cpu import round_per_sample
from fixedpoint_kernels.products.shapes import (
    LONGEST_SUM,
    LOWEST_EXPONENT,
    NOT_FINITE,
    PIECE,
    Correlation,
    Window,
)
from fixedpoint_kernels.products.spans import Spans, spans
from fixedpoint_kernels.products.sums import double
from fixedpoint_kernels.scratch import Scratch
from fixedpoint_kernels.threads import is_parallel, thread_count

__all__ = ["convolve", "input_gradient", "round_per_sample", "weight_gradient"]

_MACS_A_THREAD = 64  # as many as one element of another kernel costs
_FEW = 8  # channels
_MANY_SUMS = 2**18  # bytes: each job reads and writes all of them, so it should have much to add
_WORK, _SUMS, _COLUMNS = jobs.WORK_BYTES, jobs.SUMS_SIZE, jobs.COUNT_COLUMNS
_POWERS = reference.powers_of_two(
    torch.arange(LOWEST_EXPONENT, NOT_FINITE + 1, device="cpu")
).numpy()
_ONE, _NO_SUMS = np.ones(1, np.float32), np.empty((1, 0), np.int32)
_WRITE = jobs.tile, jobs.write_rows, *map(ByName, jobs.BY_NAME)
_ADD_UP = *weight_jobs.PARTS, *map(ByName, weight_jobs.BY_NAME)
_pack, _pack_alone, _pack_groups, _sum_taps = map(outer, (pack, pack_alone, pack_groups, sum_taps))

enter: Any = None
leave = write_outputs = spread_weights = multiply_weights = enter


def _correlate(d, x, table, b, begin, scales, statistics, out, memory, room, threads):
    """Write the outputs of all jobs.

    Args:
        d: Row of numbers, see ``jobs``.
        x: Address of (images, height, width, channels) bytes.
        table: (jobs, 4) int64.
        b: Address of packed weights.
        begin: (1 or 1 + places, 16 * groups) int32 to start sums from.
        scales: (16 * groups,) float32, or one an image.
        statistics: (2, threads, groups, 48) int64: totals, and of one job.
        out: Address of the first output.
        memory: Address of ``room`` bytes for each thread, which may hold anything.
        room: ``d[jobs.WORK_BYTES]`` or more.
        threads: How many.
    """
    for thread in prange(threads):
        enter()
        for k in range(len(table) * thread // threads, len(table) * (thread + 1) // threads):
            first, images, row, rows = table[k]
            recent = statistics[1, thread]
            write_outputs(
                d.ctypes.data, x, first, images, row, rows, b, begin.ctypes.data,
                scales.ctypes.data, recent.ctypes.data, out, memory + thread * room,
            )  # fmt: skip
            if recent.size:
                jobs.flush(statistics[0, thread], recent)
        leave()


def _correlate_weights(
    d, x, table, order, shifts, grad, sums, totals, ends, flips, memory, room, threads
):
    """Add up products for weights.

    Args:
        d: Row of numbers, see ``jobs``.
        x: Address of (images, height, width, channels) bytes.
        table: (jobs, 4) int64, over ``order``.
        order: (images,) int64.
        shifts: (jobs,) int64.
        grad: Address of (images, rows, columns, channels) int8.
        sums: Address of each thread's int32, ``d[jobs.SUMS_SIZE]`` of them, which may hold anything.
        totals: (threads, tap rows, 16 * groups) int64, which may hold anything, and do where the
            int32 count.
        ends: (threads, 2) int64: whether sums that int32 holds may stay there, 0 or 1; becomes whether
            they have, and by how many bits they count more.
        flips: Whether codes of ``x`` are signed, and must not be.
        memory: Address of ``room`` bytes for each thread, which may hold anything.
        room: ``d[jobs.WORK_BYTES]`` or more.
        threads: How many.
    """
    for thread in prange(threads):
        work = memory + thread * room
        own = sums + 4 * thread * d[_SUMS]
        tiles.blank(own, 4 * d[_SUMS], 0)
        held, shift, folds = 0, 0, 0
        enter()
        for k in range(len(table) * thread // threads, len(table) * (thread + 1) // threads):
            first, images, row, rows = table[k]
            outputs = images * rows * d[_COLUMNS]
            down = shift - shifts[k] if held else 0  # jobs come by falling shift
            if held and (down > 16 or (held << down) + outputs > LONGEST_SUM):
                folds = weight_jobs.fold(d, own, totals[thread], shift, flips, folds)
                held, ends[thread, 0] = 0, 0
            elif down:
                double(own, (d[jobs.SUM_ROWS] + 1) * d[jobs.GROUPS] * 16, down)
                held <<= down
            shift = shifts[k]
            whole = spread_weights(
                d.ctypes.data, x, order.ctypes.data, first, images, row, rows, grad, work
            )
            for piece in range(0, whole, PIECE):
                if piece:
                    folds = weight_jobs.fold(d, own, totals[thread], shift, flips, folds)
                    ends[thread, 0] = 0
                multiply_weights(d.ctypes.data, piece, min(PIECE, whole - piece), own, work)
            held = held + outputs
        if ends[thread, 0] == 0:  # without jobs it is 0 that is moved
            weight_jobs.fold(d, own, totals[thread], shift, flips, folds)
        ends[thread, 1] = shift
        leave()


class _Plan(NamedTuple):
    """What products of one shape that write outputs share; nothing writes to it."""

    cut: Blocks
    described: jobs.Described
    runs: Runs
    taps: np.ndarray
    read: Spans
    work: int  # bytes that a thread needs
    columns: int  # of the packed weights, a multiple of 16
    begin: np.ndarray  # what sums start from where that is 0
    no_statistics: np.ndarray


@lru_cache(maxsize=256)
def _plan_of_outputs(
    part: Correlation,
    x: tuple[torch.Size, torch.dtype],
    out: tuple[torch.Size, torch.dtype],
    by_image: bool,
    has_statistics: bool,
    groups: int,
    in_int16: int,
    path: str,
    threads: int,
) -> _Plan:
    """Return the plan of a correlation that writes outputs, of maps channels last; see ``jobs.describe_outputs``."""
    (images, height, width, channels), dtype = x
    (_, _, columns, outputs), out_dtype = out
    read, grain = spans(channels, outputs, groups, len(part.taps)), GRAINS[path]
    grain_of_blocks = grain if groups == 1 else 0
    cut = blocks(part, images, (height, width), channels, threads, grain=grain_of_blocks)
    found, size = runs(cut, grain, read), out_dtype.itemsize
    kind = tiles.KINDS[str(out_dtype).removeprefix("torch.")] + 3 * by_image + 6 * has_statistics
    steps = size * outputs * columns * out[0][1], size * outputs * columns, size * outputs, outputs
    rest = steps, size, kind, dtype is torch.int8, in_int16, read
    described = jobs.describe_outputs(cut, found, part, *rest)
    work, padded = _work(described), -(outputs // -16) * 16
    begin = np.zeros((1 if cut.spots is None else 1 + len(cut.spots.meets), padded), np.int32)
    no_statistics = np.zeros((2, threads, padded // 16, 0), np.int64)
    return _Plan(
        cut, described, found, np.array(part.taps), read, work, padded, begin, no_statistics
    )


class _WeightPlan(NamedTuple):
    """What products of one shape for weights share."""

    described: jobs.Described
    work: int  # bytes that a thread needs
    slots: int  # images of a job, at most
    bands: list[list[int]]  # first row and rows of each job of the same images


@lru_cache(maxsize=256)
def _plan_of_weights(
    part: Correlation,
    images: int,
    size: tuple[int, int],
    channels: int,
    threads: int,
    grain: int,
    outputs: int,
    signed: bool,
    in_int16: int,
    groups: int,
) -> _WeightPlan:
    """Return the plan of a correlation for weights; see ``weight_jobs.describe_weights``."""
    read = spans(channels, outputs, groups, len(part.taps))
    sums = 4 * len(part.taps) * read.channels * outputs
    rest = grain if groups == 1 else 0, BLOCK_BYTES * (2 if sums >= _MANY_SUMS else 1)
    cut = blocks(part, images, size, channels, threads, LONGEST_SUM, *rest)
    rest = outputs, signed, in_int16, read
    described = weight_jobs.describe_weights(cut, part, *rest, grain=grain)
    bands = cut.jobs[cut.jobs[:, 0] == 0, 2:].tolist()
    return _WeightPlan(described, _work(described), int(cut.jobs[:, 1].max()), bands)


def _work(described: jobs.Described) -> int:
    """Return bytes that a thread needs, a multiple of 64."""
    return -(int(described.row[_WORK]) // -64) * 64


def _pack_weights(
    weight: Tensor, plan: _Plan, is_turned: bool, flips: bool, address: int
) -> np.ndarray:
    """Lay out weights (o, c, r, s) for a correlation; turned, outputs are ``c``.

    Args:
        weight: See there.
        plan: Of the correlation.
        is_turned: See there.
        flips: Whether codes are signed, and must not be.
        address: Where to; of ``plan.columns * plan.runs.depth`` bytes.

    Returns:
        (1 or 1 + places, 16 * groups) int32: what sums start from, in all and by place.
    """
    found, own, laid = plan.runs, plan.cut.spots, _laid(weight)
    groups, (first, height, width, last) = plan.read.groups, laid.shape
    outputs, inputs = first // groups, last
    if is_turned:
        outputs, inputs = inputs, outputs
    outputs *= groups
    step, source = height * width * last, laid.data_ptr()
    if plan.read.is_alone:
        _pack_alone(source, plan.taps, outputs, step, address)
        return plan.begin
    sums = np.zeros(plan.begin.shape, np.int32) if flips else _NO_SUMS
    start = source, plan.taps, found.offsets, found.depth
    if groups > 1:
        shape = groups, first // groups, last
        _pack_groups(*start, shape, step, is_turned, plan.read.firsts, sums[0], address)
    else:
        _pack(*start, outputs, inputs, step, is_turned, sums[0], address)
    if not flips:
        return plan.begin
    if own is not None:
        _sum_taps(address, found.depth, plan.columns // 16, inputs, own.meets, sums[1:])
    return sums * np.int32(-128)


def _run_correlation(
    x: Tensor,  # (images, height, width, channels), contiguous
    weight: Tensor,
    part: Correlation,
    is_turned: bool,
    groups: int,
    scales: np.ndarray | None,
    by_image: bool,
    out: Tensor,  # (images, height, width, channels) of results, contiguous
    statistics: np.ndarray | None,  # (threads, groups, 48) int64
    path: str,
) -> None:
    """Write a correlation's part of the results."""
    macs = len(x) * math.prod(part.counts) * len(part.taps) * x.shape[3] * out.shape[3] // groups
    parallel = is_parallel(macs // _MACS_A_THREAD)
    threads = thread_count() if parallel else 1
    plan = _plan_of_outputs(
        part, (x.shape, x.dtype), (out.shape, out.dtype), by_image, statistics is not None, groups,
        _steps_in_int16(x, weight, path), path, threads,
    )  # fmt: skip
    both = plan.no_statistics
    if statistics is not None:
        both = np.zeros((*both.shape[:3], 48), np.int64)
    row, column = part.first
    first = out.data_ptr() + (row * out.shape[2] + column) * out.shape[3] * out.element_size()
    work = threads * plan.work
    flips = x.dtype is torch.int8 and bool(FLIPS[path])
    with Scratch(work + plan.columns * plan.runs.depth) as (_, memory):
        packed = memory + work
        begin = _pack_weights(weight, plan, is_turned, flips, packed)
        compiled(_correlate, path, *_WRITE)[parallel](
            plan.described.row,
            x.data_ptr(),
            plan.cut.jobs,
            packed,
            begin,
            _ONE if scales is None else scales,
            both,
            first,
            memory,
            plan.work,
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
    path = paths.chosen(forced).name
    if path in portable.MULTIPLY:
        return portable.convolve(x, weight, exponents, window, dtype, statistics, path)
    outputs = weight.shape[0]
    out, laid = _results(x, outputs, part.counts, dtype)
    totals = None
    if statistics:
        if not _sums_fit(part, x, weight, GRAINS[path] if window.groups == 1 else 0):
            sums, _ = convolve(x, weight, None, window, torch.int32, False, path)
            return reference.finish(sums, exponents, 1, dtype), reference.sum_up(sums)
        totals = np.zeros((-(outputs // -16), 48), np.int64)
    if out.numel():
        scales = None if exponents is None else _scales(exponents, outputs)
        rest = scales, False, laid, totals, path
        _run_correlation(_laid(x), weight, part, False, window.groups, *rest)
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
    path = paths.chosen(forced).name
    if path in portable.MULTIPLY:
        return portable.input_gradient(grad, weight, exponents, size, window, dtype, path)
    groups, channels = window.groups, weight.shape[1] * window.groups
    out, laid = _results(grad, channels, size, dtype)
    parts = shapes.input_gradient(window, size, _size(weight))
    if not shapes.covers(parts, size):
        reference.finish_empty(out, exponents)
    if out.numel() == 0:
        return out
    by_image, scales = False, None
    if exponents is not None:
        by_image = exponents.numel() > 1
        scales = _scales(exponents, grad.shape[0] if by_image else channels)
    source = _laid(grad)
    for part in parts:
        _run_correlation(source, weight, part, True, groups, scales, by_image, laid, None, path)
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
    path = paths.chosen(forced).name
    if path in portable.MULTIPLY:
        return portable.weight_gradient(x, grad, exponents, kernel, window, path)
    if window.groups == 1 and _is_of_patches(window, kernel):
        found = weight_gradient(_patches(x, kernel), grad, exponents, (1, 1), Window(), forced)
        return found.view(grad.shape[1], *kernel, x.shape[1]).permute(0, 3, 1, 2)
    is_narrow = x.shape[1] < _FEW and kernel[1] > 1 and window.groups == 1
    if is_narrow and window.dilation[1] == 1:
        merged = _columns_as_channels(x, kernel[1], window, grad.shape[3])
        rows = Window((window.stride[0], 1), (window.padding[0], 0), (window.dilation[0], 1))
        total = weight_gradient(merged, grad, exponents, (kernel[0], 1), rows, forced)
        by_column = total.view(len(total), kernel[1], x.shape[1], kernel[0])
        return by_column.permute(0, 2, 3, 1).contiguous()
    _, channels, height, width = x.shape
    (images, outputs), places = grad.shape[:2], grad.shape[2] * grad.shape[3]
    positions = images * places
    room = shapes.shift_room(positions)
    order, shifts, top = _order(exponents, images, room)
    part = shapes.forward(window, (height, width), kernel)
    taps, columns = len(part.taps), -(outputs // -16)
    read = spans(channels, outputs, window.groups, taps)
    parallel = is_parallel(positions * taps * read.channels * outputs // _MACS_A_THREAD)
    threads = thread_count() if parallel else 1
    shape = threads, weight_jobs.sum_rows(taps, read), columns * 16
    ends = np.zeros((threads, 2), np.int64)
    ends[:, 0] = exponents is not None and read.groups == 1
    signed = x.dtype is torch.int8
    flips = signed and bool(FLIPS[path]) and not read.is_alone
    plan = None
    if len(order) and positions and channels and outputs:
        grain = 0 if signed else GRAINS[path]
        plan = _plan_of_weights(
            part, images, (height, width), channels, threads, grain, outputs, signed,
            _steps_in_int16(x, grad, path), read.groups,
        )  # fmt: skip
    of_totals = 8 * math.prod(shape)
    of_both = of_totals + 4 * threads * weight_jobs.sums_size(shape[1], columns)
    work = plan.work if plan else 0
    with Scratch(of_both + threads * work) as (memory, address):
        totals = memory[:of_totals].view(np.int64).reshape(shape)
        sums = memory[of_totals:of_both].view(np.int32).reshape(threads, -1)
        if plan:
            table, job_shifts = _sorted_jobs(plan.slots, plan.bands, shifts)
            source, target = _laid(x), _laid(grad)
            compiled(_correlate_weights, path, *_ADD_UP)[parallel](
                plan.described.row,
                source.data_ptr(),
                table,
                order,
                job_shifts,
                target.data_ptr(),
                address + of_totals,
                totals,
                ends,
                flips,
                address + of_both,
                work,
                threads,
            )
        else:
            ends[:, 0], totals[:] = 0, 0
        power = float(_POWERS[top - LOWEST_EXPONENT])
        if exponents is not None and read.groups == 1:
            out = torch.empty(outputs, channels, *kernel, dtype=torch.float32, device="cpu")
            if out.numel():
                held = Totals(totals, sums, ends, flips)
                finish_weights(held, (outputs, channels, taps), 2.0**-room, power, out.data_ptr())
            return out
        whole = totals.sum(0)
    if read.groups > 1:
        found = _of_groups(whole, read, taps, channels // read.groups).unflatten(2, kernel)
        return found if exponents is None else found.float() * 2.0**-room * power
    total = torch.from_numpy(whole).view(*kernel, read.rows, -1)[:, :, :channels, :outputs]
    return total.permute(3, 2, 0, 1)


def _of_groups(totals: np.ndarray, read: Spans, taps: int, channels: int) -> Tensor:
    """Return what outputs have of the channels of their groups, (outputs, channels, taps) int64.

    totals: (rows, outputs).
    """
    by_tap = totals[: taps * read.rows].reshape(taps, read.rows, -1)
    rows = read.starts[:, None] + np.arange(channels)
    found = by_tap[:, rows, np.arange(len(rows))[:, None]]
    return torch.from_numpy(found).permute(1, 2, 0).contiguous()


def _steps_in_int16(x: Tensor, other: Tensor, path: str) -> int:
    """Return of how many steps int16 holds the sums, where a path asks."""
    if path != "avx2":
        return 0
    low, high = (int(code) for code in other.aminmax())
    highest = int(x.max()) if x.numel() else 0  # as the border is
    largest = max(0, highest) + 128 * (x.dtype is torch.int8)
    return shapes.steps_of_codes(largest, max(-low, high))


def _columns_as_channels(x: Tensor, columns: int, window: Window, width: int) -> Tensor:
    """Return images with a kernel's columns as channels: tiles take 16 channels, whether there are so many or not."""
    laid = F.pad(_laid(x), (0, 0, window.padding[1], window.padding[1])).contiguous()
    images, height, across, channels = laid.shape
    size, row = columns * channels, across * channels
    steps = height * row, row, window.stride[1] * channels, 1
    return laid.as_strided((images, height, width, size), steps).permute(0, 3, 1, 2)


def _is_of_patches(window: Window, kernel: tuple[int, int]) -> bool:
    """Say whether each input meets one output: an image is cut into patches."""
    alone = window.stride == kernel and window.padding == (0, 0) and window.dilation == (1, 1)
    return alone and kernel != (1, 1)


def _patches(x: Tensor, kernel: tuple[int, int]) -> Tensor:
    """Return patches as positions, their pixels and channels as channels, channels last."""
    (height, width), (down, across) = _size(x), kernel
    rows, columns = height // down, width // across
    whole = x.detach().permute(0, 2, 3, 1)[:, : rows * down, : columns * across]
    cut = whole.unflatten(2, (columns, across)).unflatten(1, (rows, down))
    return cut.transpose(2, 3).flatten(3).permute(0, 3, 1, 2)


def _order(exponents: Tensor | None, images: int, room: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the images that count, by falling exponent, by how much each sum moves, and the top."""
    if exponents is None:
        return np.arange(images), np.zeros(images, np.int64), 0
    given = exponents.numpy().astype(np.int64)
    numbers = np.minimum(np.maximum(given, LOWEST_EXPONENT), NOT_FINITE)
    if len(numbers) != images:  # one for all
        numbers = numbers.repeat(images)
    top = int(numbers.max(initial=LOWEST_EXPONENT))
    order = np.argsort(-numbers, kind="stable")
    shifts = room - top + numbers[order]
    counts = int(np.count_nonzero(shifts >= 0))  # they fall
    return order[:counts], shifts[:counts], top


def _sorted_jobs(
    slots: int, bands: list[list[int]], shifts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return jobs over images in their order, of one shift each: see ``_plan_of_weights``."""
    table, of_jobs, start = [], [], 0
    for end in [*(np.flatnonzero(shifts[1:] != shifts[:-1]) + 1).tolist(), len(shifts)]:
        for first in range(start, end, slots):
            table += [(first, min(slots, end - first), *band) for band in bands]
        of_jobs += [shifts[start]] * (len(table) - len(of_jobs))
        start = end
    return np.array(table, np.int64), np.array(of_jobs, np.int64)


def _results(
    x: Tensor, channels: int, size: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return an empty result, channels last, and the same with its channels last."""
    shape = x.shape[0], channels, *size
    out = torch.empty(shape, dtype=dtype, memory_format=torch.channels_last, device="cpu")
    return out, out.permute(0, 2, 3, 1)


def _laid(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).contiguous()


def _size(x: Tensor) -> tuple[int, int]:
    return x.shape[2], x.shape[3]


def _scales(exponents: Tensor, count: int) -> np.ndarray:
    """Return powers of two, ``count`` and ones up to a multiple of 16; nothing may write to them."""
    if exponents.numel() == 1:
        return _equal_scales(int(exponents), count)
    return _powers(exponents.numpy().astype(np.int64), count)


@lru_cache(maxsize=256)
def _equal_scales(exponent: int, count: int) -> np.ndarray:
    return _powers(np.array(exponent), count)


def _powers(exponents: np.ndarray, count: int) -> np.ndarray:
    padded = np.ones(-(count // -16) * 16, np.float32)
    padded[:count] = _POWERS.take(exponents - LOWEST_EXPONENT, mode="clip")
    return padded


def _sums_fit(part: Correlation, x: Tensor, weight: Tensor, grain: int) -> bool:
    """Say whether the sums of any tile fit int32, and the squares of any block int64."""
    depth = math.prod(weight.shape[1:])
    positions = blocks(part, len(x), _size(x), x.shape[1], 1, grain=grain).most_positions
    return 4 * 255 * 128 * depth < 2**31 and positions <= shapes.most_squares(depth)


def _statistics(totals: np.ndarray, outputs: int) -> Tensor:
    sums, high, low = np.split(totals, 3, axis=1)
    order = np.arange(16).reshape(2, 8).T.reshape(-1)  # even columns, then odd ones
    parts = [torch.from_numpy(n.reshape(-1)) for n in (sums, high[:, order], low[:, order])]
    return reference.carried(*(part[:outputs] for part in parts))
