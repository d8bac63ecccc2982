"""One kernel that runs the operations of a program on images, a few at a time; see ``program``.

A thread takes a few images through all operations of a region while they are in its cache.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import prange

from fixedpoint_kernels.fused import by_images
from fixedpoint_kernels.fused import fields as f
from fixedpoint_kernels.fused.by_images import held_of, sort, sums_of, totals_of
from fixedpoint_kernels.fused.coefficients import bias, coefficients, gradient_coefficients, spread
from fixedpoint_kernels.fused.joining import cut, join, join_sums
from fixedpoint_kernels.fused.pooling import pool, unpool
from fixedpoint_kernels.fused.weights import collect_share, pack_share
from fixedpoint_kernels.llvm import barrier, finishing, passes, tiles
from fixedpoint_kernels.llvm.arrays import doubles, empty, floats, view
from fixedpoint_kernels.llvm.barrier import all_come, wait
from fixedpoint_kernels.llvm.calls import called, inner
from fixedpoint_kernels.products import by_outputs, jobs, weight_jobs
from fixedpoint_kernels.products.instructions import ByName, compiled
from fixedpoint_kernels.products.samples.cpu import POWERS, exponent_of, round_block
from fixedpoint_kernels.products.sums import fold

__all__ = ["parts_of_regions", "run"]

_NOISE_BLOCK = f.NOISE_BLOCK

enter: Any = None
leave = write_outputs = add_weights = write_weights = enter
FLIPS = 0


@inner
def _moved(address, bytes):
    """Return an address some bytes further; 0 stays 0."""
    return address + bytes if address else np.int64(0)


@inner
def _gate_of(d, n, room):
    """Write the gate of image ``n`` as elements lie, and return where; 0: there is none."""
    if d[f.GATE] == 0:
        return np.int64(0)
    spread(floats(d[f.GATE] + n * d[f.GATE_STEP], d[f.CHANNELS]), d[f.CHANNELS], d[f.PATTERN], room)
    return room


@inner
def _make_value(d, n, gate, scale, low, high, number):
    """Make the elements of a value, and codes of them; return how many were clamped."""
    start, padded = n * d[f.PADDED], d[f.PADDED]
    size = 2 if d[f.FIRST] == passes.BFLOAT16 else 4
    size2 = 2 if d[f.SECOND] == passes.BFLOAT16 else 4
    return passes.make_value(
        d[f.ELEMENTS], padded, d[f.PATTERN], d[f.FIRST], d[f.Z] + start * size,
        gate or d[f.A], gate or d[f.B], d[f.SECOND], d[f.Z2] + start * size2, d[f.A2], d[f.B2], d[f.RELU],
        _moved(d[f.RELU_MASK], start // 8), d[f.CURVE], _moved(d[f.Y], 4 * start),
        _moved(d[f.CODES], start), d[f.CLIPS], d[f.BOTH], _moved(d[f.CLIP_MASK], start // 8),
        scale, low, high, number,
    )  # fmt: skip


@inner
def _round_gradient(d, n, slot, dz, codes, scales, largest):
    """Round the gradient of what a layer makes, of one image, to codes of its own power of two."""
    padded, elements = d[f.PADDED], d[f.ELEMENTS]
    passes.make_gradient(
        elements, padded, d[f.PATTERN], d[f.FIRST], d[f.G] + 2 * n * padded,
        d[f.Z] + 2 * n * padded, d[f.GA], d[f.GB], d[f.GC], d[f.FACTORS], dz, largest.ctypes.data,
    )  # fmt: skip
    exponent = exponent_of(largest)
    powers = floats(d[f.POWERS], n + 1)
    moved = min(exponent - d[f.WEIGHT_FL], 127)
    # inf: what is multiplied into it becomes NaN
    scales[slot] = np.inf if exponent == 128 else np.ldexp(1.0, exponent)
    if d[f.SCALES]:
        doubles(d[f.SCALES], n + 1)[n] = scales[slot]
    powers[n] = np.float32(np.inf) if exponent == 128 else np.float32(np.ldexp(1.0, moved))
    whole = (elements + _NOISE_BLOCK - 1) // _NOISE_BLOCK * _NOISE_BLOCK
    if exponent == 128:
        tiles.blank(codes, whole, 0)
        return
    out = view(codes, whole, np.int8)
    values, start = floats(dz, whole), n * ((elements + 15) // 16)
    power, key = POWERS[exponent + 126], (d[f.SEED], d[f.STREAM])
    g, z = d[f.G] + 2 * (n + 1) * padded, _moved(d[f.Z], 2 * (n + 1) * padded)
    for e in range(0, elements, _NOISE_BLOCK):
        tiles.come(g + 2 * e, 2 * _NOISE_BLOCK)  # of the next image: noise is made meanwhile
        tiles.come(z + 2 * e, 2 * _NOISE_BLOCK)
        round_block(values, out, e, start + e // 16, key, power)


@inner
def _finish(d, n, dx, sums, gate, number):
    """Add up what comes back to a value, of one image; at the last, batch norm's two sums too."""
    start = n * d[f.PADDED]
    size = 4 if d[f.FIRST] == passes.FLOAT32 else 2
    passes.finish(
        d[f.ELEMENTS], d[f.PADDED], d[f.PATTERN], d[f.HAS_PRODUCT], dx, _moved(d[f.SEEN], 4 * start),
        _moved(d[f.CLIP_MASK], start // 8), _moved(d[f.SCALED_GRADIENT], 2 * start), gate,
        _moved(d[f.ADD], 2 * start), _moved(d[f.ADD2], 2 * start), _moved(d[f.OUTER], 4 * start),
        _moved(d[f.RELU_MASK], start // 8), d[f.CURVE], d[f.A], d[f.B], _moved(d[f.OUT], 2 * start),
        _moved(d[f.OUTER_OUT], 4 * start), d[f.FIRST], d[f.Z] + size * start, d[f.SECOND],
        d[f.Z2] + 2 * start, sums if d[f.SUMS] else 0, number,
    )  # fmt: skip
    if d[f.SUMS]:
        _fold_pattern(d, n, sums)


@inner
def _finishing(d, first, sums, own):
    """Say where the gradient of a value lies, from image ``first`` on, and what belongs to it; return its address."""
    start = first * d[f.PADDED]
    own[finishing.OUT] = d[f.OUT] + 2 * start
    own[finishing.CLIP_MASK] = _moved(d[f.CLIP_MASK], start // 8)
    own[finishing.ADD] = _moved(d[f.ADD], 2 * start)
    own[finishing.RELU_MASK] = _moved(d[f.RELU_MASK], start // 8)
    own[finishing.Z] = d[f.Z] + 2 * start if d[f.FIRST] == passes.BFLOAT16 else 0
    own[finishing.Z2] = d[f.Z2] + 2 * start if d[f.SECOND] == passes.BFLOAT16 else 0
    own[finishing.TOTALS], own[finishing.PATTERN] = sums, d[f.PATTERN]
    own[finishing.PLACES] = d[f.PATTERN] // d[f.CHANNELS]
    return own[finishing.OUT]


@inner
def _fold_pattern(d, n, sums):
    """Add up the sums of an image by channel."""
    pattern, channels, stride = d[f.PATTERN], d[f.CHANNELS], d[f.SUMS_STRIDE]
    out, found = doubles(d[f.SUMS] + 24 * n * stride, 3 * stride), floats(sums, 3 * pattern)
    for k in range(3):
        if (k == 1 and d[f.FIRST] != passes.BFLOAT16) or (
            k == 2 and d[f.SECOND] != passes.BFLOAT16
        ):
            continue
        totals = out[k * stride : k * stride + channels]
        for i in range(channels):  # channels lie side by side: vectors
            totals[i] = np.float64(found[k * pattern + i])
        for first in range(channels, pattern, channels):
            own = found[k * pattern + first : k * pattern + first + channels]
            for i in range(channels):
                totals[i] += np.float64(own[i])


@inner
def _weigh(d, n, dx, sums, number):
    """Write the gradient of a gate, of one image: by channel, sums in the order of elements."""
    start, channels, pattern = n * d[f.PADDED], d[f.CHANNELS], d[f.PATTERN]
    size = 4 if d[f.FIRST] == passes.FLOAT32 else 2
    passes.weigh(
        d[f.ELEMENTS], d[f.PADDED], pattern, d[f.G] + 2 * start, d[f.FIRST],
        d[f.Z] + size * start, d[f.A], d[f.B], d[f.RELU], d[f.CURVE], sums, number,
    )  # fmt: skip
    found, out = floats(sums, pattern), floats(dx, channels)
    for i in range(channels):
        out[i] = found[i]
    for first in range(channels, pattern, channels):
        for i in range(channels):
            out[i] += found[first + i]


@inner
def _measure(d, n, sums):
    """Keep a value of image ``n`` for batch norm, and write its sums by channel."""
    start, channels, pattern = n * d[f.PADDED], d[f.CHANNELS], d[f.PATTERN]
    passes.moments(
        d[f.ELEMENTS], d[f.PADDED], pattern, d[f.Z] + 4 * start, d[f.OUT] + 2 * start, sums
    )
    out, found = doubles(d[f.SUMS] + 16 * n * channels, 2 * channels), doubles(sums, 2 * pattern)
    for k in range(2):
        totals = out[k * channels :][:channels]
        totals[:] = 0.0
        for first in range(0, pattern, channels):
            own = found[k * pattern + first :][:channels]
            for c in range(channels):
                totals[c] += own[c]


@inner
def _codes_of(d, first, own):
    """Return where codes of gradients from image ``first`` on lie: with those of all images, or in a thread's memory."""
    return d[f.CODES] + first * d[f.CODES_STEP] if d[f.CODES] else own


def run_region(context, number, thread):
    """Run the operations of a region on a thread's share of the images.

    Args:
        context: Address of ``fields.CONTEXT`` int64.
        number: Of the region.
        thread: One of as many as share the images.
    """
    c = view(context, f.CONTEXT, np.int64)
    operations, images, threads = c[f.C_OPERATIONS], c[f.C_IMAGES], c[f.C_THREADS]
    table = view(c[f.C_TABLE], (operations, f.COUNT), np.int64)
    details = view(c[f.C_DETAILS], (operations, jobs.FIELDS), np.int64)
    reals = view(c[f.C_REALS], (operations, 4), np.float32)
    places = view(c[f.C_PLACES], 7, np.int64)
    begin, end, chunk = view(c[f.C_REGIONS], (number + 1, 3), np.int64)[number]
    own = c[f.C_SCRATCH] + thread * c[f.C_SCRATCH_BYTES]
    work, dz, codes, dx = own, own + places[1], own + places[2], own + places[3]
    sums, recent_at, gates = own + places[4], own + places[5], own + places[6]
    order, scales = empty(chunk, np.int64), empty(chunk, np.float64)
    largest = empty(passes.BLOCK, np.int32)
    finished = empty(finishing.FIELDS, np.int64)
    enter()
    for k in range(begin, end):
        if table[k, f.KIND] == f.WEIGHT_PRODUCT:
            tiles.blank(sums_of(table[k], thread), 4 * details[k, jobs.SUMS_SIZE], 0)
            held_of(table[k], thread)[:] = 0.0
        elif table[k, f.KIND] == f.WEIGHTS_BY_OUTPUT:
            d, j = table[k], details[k]
            pairs = (j[jobs.GROUPS] + 1) // 2
            share = 2 * (pairs * thread // threads), 2 * (pairs * (thread + 1) // threads)
            write_weights(
                j.ctypes.data, d[f.X], d[f.CODES], d[f.SCALES], images, d[f.OUT], d[f.W_STEP_C],
                d[f.POWERS], share[0], min(share[1], j[jobs.GROUPS]), work,
            )  # fmt: skip
    last = images * (thread + 1) // threads
    for first in range(images * thread // threads, last, chunk):
        count = min(chunk, last - first)
        for k in range(begin, end):
            d, j = table[k], details[k]
            kind = d[f.KIND]
            if kind == f.VALUE:
                clamped, own_reals = np.int64(0), reals[k]
                scale, low, high = own_reals[0], own_reals[1], own_reals[2]
                for n in range(first, first + count):
                    gate = _gate_of(d, n, gates)
                    clamped += _make_value(d, n, gate, scale, low, high, own_reals[3])
                if d[f.CLAMPED]:
                    view(d[f.CLAMPED], thread + 1, np.int64)[thread] += clamped
            elif kind == f.PRODUCT:
                groups = (j[jobs.OUT_CHANNELS] + 15) // 16
                recent = view(recent_at, (groups, 48), np.int64)
                place = d[f.STATISTICS] + thread * groups * 384
                totals = view(place, (groups, 48), np.int64)
                if d[f.HAS_NORM]:
                    tiles.blank(recent_at, groups * 384, 0)
                for n in range(first, first + count, j[jobs.SLOTS]):
                    slots = min(j[jobs.SLOTS], first + count - n)
                    for row in range(0, j[jobs.COUNT_ROWS], j[jobs.BAND]):
                        rows = min(j[jobs.BAND], j[jobs.COUNT_ROWS] - row)
                        write_outputs(
                            j.ctypes.data, d[f.X], n, slots, row, rows, d[f.WEIGHTS],
                            d[f.BEGIN], d[f.POWERS], recent_at, d[f.OUT], work,
                        )  # fmt: skip
                        if d[f.HAS_NORM]:
                            jobs.flush(totals, recent)
            elif kind == f.GRADIENT:
                all_codes = _codes_of(d, first, codes)
                for n in range(first, first + count):
                    slot = n - first
                    place = all_codes + slot * d[f.CODES_STEP]
                    _round_gradient(d, n, slot, dz, place, scales, largest)
                sort(order, scales, count, first // chunk % 2 == 1)
            elif kind == f.WEIGHT_PRODUCT:
                at, totals = sums_of(d, thread), totals_of(d, j, thread)
                add_weights(
                    d, j, first, count, d[f.X], codes, order, scales, totals, work, at,
                    held_of(d, thread),
                )  # fmt: skip
            elif kind == f.INPUT_PRODUCT:
                if d[f.ZEROES]:  # some places meet no weight
                    tiles.blank(dx, 4 * count * d[f.PADDED], 0)
                power = d[f.POWERS] + 4 * first
                all_codes = _codes_of(d, first, codes)
                is_finished = j[jobs.KIND] == jobs.FINISHED
                made, more = dx + d[f.OUT], recent_at
                if is_finished:
                    made, more = _finishing(d, first, sums, finished), finished.ctypes.data
                for n in range(0, count, j[jobs.SLOTS]):
                    slots = min(j[jobs.SLOTS], count - n)
                    if is_finished:
                        tiles.blank(sums, slots * 12 * d[f.PATTERN], 0)
                    for row in range(0, j[jobs.COUNT_ROWS], j[jobs.BAND]):
                        rows = min(j[jobs.BAND], j[jobs.COUNT_ROWS] - row)
                        write_outputs(
                            j.ctypes.data, all_codes, n, slots, row, rows, d[f.WEIGHTS],
                            d[f.BEGIN], power, more, made, work,
                        )  # fmt: skip
                    if is_finished:
                        for slot in range(slots):
                            _fold_pattern(d, first + n + slot, sums + slot * 12 * d[f.PATTERN])
            elif kind == f.FINISH:
                for n in range(first, first + count):
                    place = dx + 4 * (n - first) * d[f.PADDED]
                    _finish(d, n, place, sums, _gate_of(d, n, gates), reals[k, 3])
            elif kind == f.MOMENTS:
                for n in range(first, first + count):
                    _measure(d, n, sums)
            elif kind == f.NORM_GRADIENT:
                for n in range(first, first + count):
                    start = 2 * n * d[f.PADDED]
                    passes.make_gradient(
                        d[f.ELEMENTS], d[f.PADDED], d[f.PATTERN], d[f.FIRST], d[f.G] + start,
                        d[f.Z] + start, d[f.GA], d[f.GB], d[f.GC], 0,
                        dx + 4 * (n - first) * d[f.PADDED], largest.ctypes.data,
                    )  # fmt: skip
            elif kind == f.JOIN:
                for n in range(first, first + count):
                    join(d, n)
            elif kind == f.JOIN_SUMS:
                for n in range(first, first + count):
                    join_sums(d, n)
            elif kind == f.CUT:
                for n in range(first, first + count):
                    cut(d, n, dx + 4 * (n - first) * d[f.PADDED])
            elif kind == f.POOL:
                for n in range(first, first + count):
                    pool(d, n)
            elif kind == f.UNPOOL:
                step = 4 * view(d[f.WINDOWS], 3, np.int64)[2]
                for n in range(first, first + count):
                    unpool(d, n, dx + (n - first) * step)
            elif kind == f.WEIGH:
                for n in range(first, first + count):
                    _weigh(d, n, dx + (n - first) * d[f.GATE_STEP], sums, reals[k, 3])
    for k in range(begin, end):
        if table[k, f.KIND] == f.WEIGHT_PRODUCT:
            d, j, held = table[k], details[k], held_of(table[k], thread)
            if held[0] > 0 and held[2] > 0:  # else ``collect_share`` takes the int32
                flipped = FLIPS != 0 and j[jobs.FLIPPED] != 0
                own_sums, totals = sums_of(d, thread), totals_of(d, j, thread)
                fold(j[jobs.SUM_ROWS], j[jobs.GROUPS] * 16, own_sums, totals, held, flipped)
    leave()
    return 0


def begin_region(context, number):
    """Compute what belongs to channels, from sums over all images that earlier regions added up."""
    c = view(context, f.CONTEXT, np.int64)
    table = view(c[f.C_TABLE], (c[f.C_OPERATIONS], f.COUNT), np.int64)
    begin, end, _ = view(c[f.C_REGIONS], (number + 1, 3), np.int64)[number]
    for k in range(begin, end):
        d = table[k]
        if d[f.KIND] == f.COEFFICIENTS:
            if d[f.HAS_NORM]:
                coefficients(d, c[f.C_THREADS])
            else:
                bias(d)
        elif d[f.KIND] == f.GRADIENT_COEFFICIENTS:
            gradient_coefficients(d, c[f.C_IMAGES])
    return 0


_pack_share, _collect_share = called(pack_share), called(collect_share)


def _run_apart(context, regions, threads):
    """Lay out weights, run regions, and write weights' gradients, in a parallel loop each."""
    for thread in prange(threads):
        _pack_share(context, thread)
    for number in range(regions):
        begin_region(context, number)
        for thread in prange(threads):
            run_region(context, number, thread)
    for thread in prange(threads):
        _collect_share(context, thread)


def _run_together(context, regions, threads, meeting):
    """Do as ``_run_apart`` in one parallel loop, whose threads meet between its parts.

    meeting: address of ``barrier.SIZE`` int64, zeros. If the threads do not all meet, nothing is done.
    """
    for thread in prange(threads):
        if all_come(meeting, threads):
            _pack_share(context, thread)
            for number in range(regions):
                if thread == 0:
                    begin_region(context, number)
                wait(meeting, threads * (2 * number + 1))
                run_region(context, number, thread)
                wait(meeting, threads * (2 * number + 2))
            _collect_share(context, thread)


@cache
def parts_of_regions() -> tuple[Any, ...]:
    """Return what kernels are made of that run regions, ``run_region`` last; see ``compiled``."""
    by_name = *jobs.BY_NAME, *weight_jobs.BY_NAME, *by_outputs.PARTS
    parts = jobs.tile, jobs.write_rows, *weight_jobs.PARTS, *map(ByName, by_name)
    return *parts, by_images.add_weights, ByName(run_region)


def run(path: str, context: np.ndarray, regions: int, threads: int) -> None:
    """Run a program's regions on all images, with the tiles of a path.

    Args:
        path: One of ``GRAINS``.
        context: ``fields.CONTEXT`` int64, see there.
        regions: How many.
        threads: That share the images.
    """
    parts = *parts_of_regions(), ByName(begin_region)
    if threads > 1 and barrier.CAN_MEET and _missed["times"] < _MOST_MISSED:
        meeting = np.zeros(barrier.SIZE, np.int64)
        together = compiled(_run_together, path, *parts)[True]
        together(context.ctypes.data, regions, threads, meeting.ctypes.data)
        if barrier.have_met(meeting):
            return
        _missed["times"] += 1
    compiled(_run_apart, path, *parts)[threads > 1](context.ctypes.data, regions, threads)


_MOST_MISSED = 3
_missed = {"times": 0}  # where threads do not meet, it is not tried for ever
