"""One kernel that runs the operations of a program on images, a few at a time; see ``program``.

A thread takes a few images through all operations of a region while they are in its cache.
"""

from typing import Any

import numpy as np
from numba import carray, njit, prange

from fixedpoint_kernels.fused import fields as f
from fixedpoint_kernels.fused.pooling import pool, unpool
from fixedpoint_kernels.llvm import passes, tiles
from fixedpoint_kernels.llvm.vectors import pointer_to
from fixedpoint_kernels.products import jobs
from fixedpoint_kernels.products.instructions import compiled
from fixedpoint_kernels.products.packing import pack, sum_taps
from fixedpoint_kernels.products.samples.cpu import POWERS, exponent_of, round_block

__all__ = ["collect", "pack_weights", "run"]

_NOISE_BLOCK = f.NOISE_BLOCK

enter: Any = None
leave = write_outputs = spread_weights = multiply_weights = enter
FLIPS = 0


@njit
def _floats(address, n):
    return carray(pointer_to(address), n, np.float32)


@njit
def _doubles(address, n):
    return carray(pointer_to(address), n, np.float64)


@njit
def _count(address, thread, n):
    """Add to a thread's count; in a parallel loop, Numba takes such a line for dead code."""
    carray(pointer_to(address), thread + 1, np.int64)[thread] += n


# ------------------------------------------------------------------ once a region: coefficients


@njit
def _spread(values, channels, pattern, address):
    """Write a number for each channel, again and again, as elements lie."""
    out = _floats(address, pattern)
    for i in range(pattern):
        out[i] = values[i % channels]


@njit
def _mix(address, c, value, share):
    """Move a running statistic towards a value, as batch norm does."""
    running = _floats(address, c + 1)
    running[c] = running[c] + np.float32(share) * (np.float32(value) - running[c])


@njit
def _coefficients(d, threads):
    """Write by what a layer's sums are multiplied and what is added, from all its sums."""
    channels, groups = d[f.CHANNELS], (d[f.CHANNELS] + 15) // 16
    sums = carray(pointer_to(d[f.STATISTICS]), (threads, groups, 48), np.int64)
    means, inverses = _doubles(d[f.MEANS], channels), _doubles(d[f.INVERSES], channels)
    variances, numbers = _doubles(d[f.VARIANCES], channels), _doubles(d[f.NUMBERS], 3)
    a, b = np.empty(channels, np.float32), np.empty(channels, np.float32)
    count, power, eps = d[f.POSITIONS], numbers[0], numbers[1]
    for c in range(channels):
        group, lane = c // 16, c % 16
        place = 16 + lane // 2 + 8 * (lane % 2)  # even columns, then odd ones
        total, high, low = np.int64(0), np.int64(0), np.int64(0)
        for thread in range(threads):
            total += sums[thread, group, lane]
            high += sums[thread, group, place]
            low += sums[thread, group, place + 16]
        high, low = high + (low >> 32), low & 0xFFFFFFFF
        squares = np.float64(high) * 2.0**32 + np.float64(low)
        mean = np.float64(total) / count
        variance = max(squares / count - mean * mean, 0.0)
        mean, variance = mean * power, variance * (power * power)
        inverse = 1.0 / np.sqrt(variance + eps)
        means[c], variances[c], inverses[c] = mean, variance, inverse
        if d[f.RUNNING_MEAN]:
            share, unbiased = numbers[2], variance * (count / max(count - 1, 1))
            _mix(d[f.RUNNING_MEAN], c, mean, share)
            _mix(d[f.RUNNING_VARIANCE], c, unbiased, share)
        scale = np.float64(_floats(d[f.SCALE], channels)[c]) if d[f.SCALE] else 1.0
        shift = np.float64(_floats(d[f.SHIFT], channels)[c]) if d[f.SHIFT] else 0.0
        factor = scale * inverse
        a[c], b[c] = factor, shift - factor * mean
    _spread(a, channels, d[f.PATTERN], d[f.A])
    _spread(b, channels, d[f.PATTERN], d[f.B])


@njit
def _bias(d):
    """Write the coefficients of a layer without batch norm."""
    channels = d[f.CHANNELS]
    a, b = np.ones(channels, np.float32), np.zeros(channels, np.float32)
    if d[f.SHIFT]:
        b[:] = _floats(d[f.SHIFT], channels)
    _spread(a, channels, d[f.PATTERN], d[f.A])
    _spread(b, channels, d[f.PATTERN], d[f.B])


@njit
def _gradient_coefficients(d, images):
    """Write those of batch norm's backward, and the gradients of its scale and shift."""
    channels, stride = d[f.CHANNELS], d[f.SUMS_STRIDE]
    sums = _doubles(d[f.SUMS], images * 3 * stride)
    of_scale, of_shift = _floats(d[f.OF_SCALE], channels), _floats(d[f.OF_SHIFT], channels)
    a, b, c = (
        np.empty(channels, np.float32),
        np.empty(channels, np.float32),
        np.empty(channels, np.float32),
    )
    count = d[f.POSITIONS]
    for i in range(channels):
        first, second = 0.0, 0.0
        for n in range(images):
            first += sums[3 * n * stride + i]
            second += sums[(3 * n + d[f.WHICH]) * stride + i]
        of_shift[i] = first
        if not d[f.HAS_NORM]:
            continue
        mean = _doubles(d[f.MEANS], channels)[i]
        inverse = _doubles(d[f.INVERSES], channels)[i]
        own = (second - mean * first) * inverse
        of_scale[i] = own
        scale = np.float64(_floats(d[f.SCALE], channels)[i]) if d[f.SCALE] else 1.0
        factor = scale * inverse
        slope = -factor * inverse * own / count
        a[i], b[i], c[i] = factor, slope, -factor * first / count - slope * mean
    if d[f.HAS_NORM]:
        _spread(a, channels, d[f.PATTERN], d[f.GA])
        _spread(b, channels, d[f.PATTERN], d[f.GB])
        _spread(c, channels, d[f.PATTERN], d[f.GC])


# ------------------------------------------------------------------ on one image


@njit
def _moved(address, bytes):
    """Return an address some bytes further; 0 stays 0."""
    return address + bytes if address else np.int64(0)


@njit
def _make_value(d, n, scale, low, high):
    """Make the elements of a value, and codes of them; return how many were clamped."""
    start, padded = n * d[f.PADDED], d[f.PADDED]
    size = 2 if d[f.FIRST] == passes.BFLOAT16 else 4
    size2 = 2 if d[f.SECOND] == passes.BFLOAT16 else 4
    return passes.make_value(
        d[f.ELEMENTS], padded, d[f.PATTERN], d[f.FIRST], d[f.Z] + start * size, d[f.A], d[f.B],
        d[f.SECOND], d[f.Z2] + start * size2, d[f.A2], d[f.B2], d[f.RELU],
        _moved(d[f.RELU_MASK], start // 8), _moved(d[f.Y], 4 * start), _moved(d[f.CODES], start),
        d[f.CLIPS], d[f.BOTH], _moved(d[f.CLIP_MASK], start // 8), scale, low, high,
    )  # fmt: skip


@njit
def _round_gradient(d, n, slot, dz, codes, scales, largest):
    """Round the gradient of what a layer makes, of one image, to codes of its own power of two."""
    padded, elements = d[f.PADDED], d[f.ELEMENTS]
    passes.make_gradient(
        elements, padded, d[f.PATTERN], d[f.FIRST], d[f.G] + 2 * n * padded,
        d[f.Z] + 2 * n * padded, d[f.GA], d[f.GB], d[f.GC], dz, largest.ctypes.data,
    )  # fmt: skip
    exponent = exponent_of(largest)
    powers = _floats(d[f.POWERS], n + 1)
    moved = min(exponent - d[f.WEIGHT_FL], 127)
    # inf: what is multiplied into it becomes NaN
    scales[slot] = np.inf if exponent == 128 else np.ldexp(1.0, exponent)
    powers[n] = np.float32(np.inf) if exponent == 128 else np.float32(np.ldexp(1.0, moved))
    whole = (elements + _NOISE_BLOCK - 1) // _NOISE_BLOCK * _NOISE_BLOCK
    if exponent == 128:
        tiles.blank(codes, whole, 0)
        return
    out = carray(pointer_to(codes), whole, np.int8)
    values, start = _floats(dz, whole), n * ((elements + 15) // 16)
    power, key = POWERS[exponent + 126], (d[f.SEED], d[f.STREAM])
    for e in range(0, elements, _NOISE_BLOCK):
        round_block(values, out, e, start + e // 16, key, power)


@njit
def _finish(d, n, dx, sums):
    """Add up what comes back to a value, of one image; at the last, batch norm's two sums too."""
    start = n * d[f.PADDED]
    passes.finish(
        d[f.ELEMENTS], d[f.PADDED], d[f.PATTERN], d[f.HAS_PRODUCT], dx, _moved(d[f.SEEN], 4 * start),
        _moved(d[f.CLIP_MASK], start // 8), _moved(d[f.ADD], 2 * start), _moved(d[f.ADD2], 2 * start),
        _moved(d[f.OUTER], 4 * start), _moved(d[f.RELU_MASK], start // 8),
        _moved(d[f.OUT], 2 * start), _moved(d[f.OUTER_OUT], 4 * start), d[f.FIRST],
        d[f.Z] + 2 * start, d[f.SECOND], d[f.Z2] + 2 * start, sums if d[f.SUMS] else 0,
    )  # fmt: skip
    if d[f.SUMS]:
        _fold_pattern(d, n, sums)


@njit
def _fold_pattern(d, n, sums):
    """Add up the sums of an image by channel."""
    pattern, channels, stride = d[f.PATTERN], d[f.CHANNELS], d[f.SUMS_STRIDE]
    out, found = _doubles(d[f.SUMS] + 24 * n * stride, 3 * stride), _floats(sums, 3 * pattern)
    for k in range(3):
        for i in range(channels):
            total = 0.0
            for j in range(i, pattern, channels):
                total += found[k * pattern + j]
            out[k * stride + i] = total


@njit
def _fold(j, sums, totals, held, flipped):
    """Add int32 sums to float64 totals, which the first time may hold anything; the sums become 0.

    ``held``: how many positions ``sums`` has, of what power, and how often it was folded.
    """
    scale, adds = held[1], held[2] > 0
    n = j[jobs.GROUPS] * 16
    own = carray(pointer_to(sums), j[jobs.SUMS_SIZE], np.int32)
    last = own[j[jobs.TILE_ROWS] * 16 * n : (j[jobs.TILE_ROWS] * 16 + 1) * n]
    for row in range(j[jobs.TILE_ROWS] * 16):
        values, total = own[row * n : row * n + n], totals[row * n : row * n + n]
        if not adds:
            total[:] = 0.0
        if flipped:
            for i in range(n):
                total[i] += np.float64(np.int32(values[i] - np.int32(128) * last[i])) * scale
                values[i] = 0
        else:
            for i in range(n):
                total[i] += np.float64(values[i]) * scale
                values[i] = 0
    last[:] = 0
    held[0] = 0
    held[2] += 1


@njit
def _sort(order, scales, images, is_odd):
    """Order images by the power of two of their gradient, largest first.

    Where there are few powers, every other time the largest comes last: what comes last then comes
    first the next time.
    """
    for i in range(images):
        order[i] = i
    for i in range(1, images):
        own, j = order[i], i - 1
        while j >= 0 and scales[order[j]] < scales[own]:
            order[j + 1] = order[j]
            j -= 1
        order[j + 1] = own
    powers = 1
    for i in range(1, images):
        powers += scales[order[i]] != scales[order[i - 1]]
    if is_odd and powers < 4:
        for i in range(images // 2):
            order[i], order[images - 1 - i] = order[images - 1 - i], order[i]


def add_weights(d, j, first, images, x, codes, order, scales, totals, work, sums, held):
    """Add the products of a few images to a layer's weight gradient.

    ``held``: as of ``_fold``; it is brought up to date. Sums of a
    larger power are doubled until they are of the smaller one: each then counts as so many positions.
    """
    flipped = FLIPS != 0 and j[jobs.SIGNED] != 0
    at = 0
    while at < images:
        power, end = scales[order[at]], at + 1
        while end < images and end - at < j[jobs.SLOTS] and scales[order[end]] == power:
            end += 1
        for row in range(0, j[jobs.COUNT_ROWS], j[jobs.BAND]):
            rows = min(j[jobs.BAND], j[jobs.COUNT_ROWS] - row)
            outputs = (end - at) * rows * j[jobs.COUNT_COLUMNS]
            times = held[1] / power if held[0] > 0 else 1.0
            if times < 1 or held[0] * times + outputs > f.LONGEST_SUM:
                _fold(j, sums, totals, held, flipped)
            elif times > 1:
                jobs.double(j, sums, np.int64(np.log2(times)))
                held[0] *= times
            held[1] = power
            source = x + first * j[jobs.X_IMAGE]
            whole = spread_weights(
                j, source, order.ctypes.data, at, end - at, row, rows, codes, work
            )
            multiply_weights(j, 0, whole, sums, work)
            held[0] += outputs
        at = end


def region(
    table, reals, details, begin, end, images, chunk, scratch, scratch_bytes, places, threads
):
    """Run the operations ``begin`` to ``end`` on all images.

    Args:
        table: (operations, ...) int64, see ``fields``.
        reals: (operations, 3) float32: scale, lowest and highest code.
        details: (operations, ...) int64, rows of ``jobs``.
        begin: First operation.
        end: After the last one.
        images: How many.
        chunk: How many a thread takes at a time.
        scratch: Address of each thread's memory, one after the other.
        scratch_bytes: Of a thread.
        places: (7,) int64: where in it which part begins, see ``fields``.
        threads: How many.
    """
    for k in range(begin, end):
        d = table[k]
        if d[f.KIND] == f.COEFFICIENTS:
            if d[f.HAS_NORM]:
                _coefficients(d, threads)
            else:
                _bias(d)
        elif d[f.KIND] == f.GRADIENT_COEFFICIENTS:
            _gradient_coefficients(d, images)
    for thread in prange(threads):
        own = scratch + thread * scratch_bytes
        work, dz, codes, dx = own, own + places[1], own + places[2], own + places[3]
        sums, recent_at = own + places[4], own + places[5]
        weight_sums = own + places[6]
        order, scales = np.empty(chunk, np.int64), np.empty(chunk, np.float64)
        largest = np.empty(passes.BLOCK, np.int32)
        held = np.zeros((end - begin, 3), np.float64)
        enter()
        for k in range(begin, end):
            if table[k, f.KIND] == f.WEIGHT_PRODUCT:
                j, at = details[k], weight_sums + table[k, f.SUMS]
                tiles.blank(at, j[jobs.SUMS_SIZE] * 4, 0)
        last = images * (thread + 1) // threads
        for first in range(images * thread // threads, last, chunk):
            count = min(chunk, last - first)
            for k in range(begin, end):
                d, j = table[k], details[k]
                kind = d[f.KIND]
                if kind == f.VALUE:
                    clamped = np.int64(0)
                    for n in range(first, first + count):
                        clamped += _make_value(d, n, reals[k, 0], reals[k, 1], reals[k, 2])
                    if d[f.CLAMPED]:
                        _count(d[f.CLAMPED], thread, clamped)
                elif kind == f.PRODUCT:
                    groups = (j[jobs.OUT_CHANNELS] + 15) // 16
                    recent = carray(pointer_to(recent_at), (groups, 48), np.int64)
                    place = d[f.STATISTICS] + thread * groups * 384
                    totals = carray(pointer_to(place), (groups, 48), np.int64)
                    if d[f.HAS_NORM]:
                        tiles.blank(recent_at, groups * 384, 0)
                    for n in range(first, first + count, j[jobs.SLOTS]):
                        slots = min(j[jobs.SLOTS], first + count - n)
                        for row in range(0, j[jobs.COUNT_ROWS], j[jobs.BAND]):
                            rows = min(j[jobs.BAND], j[jobs.COUNT_ROWS] - row)
                            write_outputs(
                                j, d[f.X], n, slots, row, rows, d[f.WEIGHTS], d[f.BEGIN],
                                d[f.POWERS], recent, d[f.OUT], work,
                            )  # fmt: skip
                            if d[f.HAS_NORM]:
                                jobs.flush(totals, recent)
                elif kind == f.GRADIENT:
                    for n in range(first, first + count):
                        slot = n - first
                        place = codes + slot * d[f.CODES_STEP]
                        _round_gradient(d, n, slot, dz, place, scales, largest)
                    _sort(order, scales, count, first // chunk % 2 == 1)
                elif kind == f.WEIGHT_PRODUCT:
                    size = j[jobs.TILE_ROWS] * j[jobs.GROUPS] * 256
                    totals = _doubles(d[f.TOTALS] + 8 * thread * size, size)
                    at = weight_sums + d[f.SUMS]
                    add_weights(
                        d, j, first, count, d[f.X], codes, order, scales, totals, work, at,
                        held[k - begin],
                    )  # fmt: skip
                elif kind == f.INPUT_PRODUCT:
                    if d[f.ZEROES]:  # some places meet no weight
                        tiles.blank(dx, 4 * count * d[f.PADDED], 0)
                    groups = (j[jobs.OUT_CHANNELS] + 15) // 16
                    recent = carray(pointer_to(recent_at), (groups, 48), np.int64)
                    power = d[f.POWERS] + 4 * first
                    for n in range(0, count, j[jobs.SLOTS]):
                        slots = min(j[jobs.SLOTS], count - n)
                        for row in range(0, j[jobs.COUNT_ROWS], j[jobs.BAND]):
                            rows = min(j[jobs.BAND], j[jobs.COUNT_ROWS] - row)
                            write_outputs(
                                j, codes, n, slots, row, rows, d[f.WEIGHTS], d[f.BEGIN], power,
                                recent, dx + d[f.OUT], work,
                            )  # fmt: skip
                elif kind == f.FINISH:
                    for n in range(first, first + count):
                        place = dx + 4 * (n - first) * d[f.PADDED]
                        _finish(d, n, place, sums)
                elif kind == f.POOL:
                    for n in range(first, first + count):
                        pool(d, n)
                elif kind == f.UNPOOL:
                    step = 4 * carray(pointer_to(d[f.WINDOWS]), 3, np.int64)[2]
                    for n in range(first, first + count):
                        unpool(d, n, dx + (n - first) * step)
        for k in range(begin, end):
            if table[k, f.KIND] == f.WEIGHT_PRODUCT and (
                held[k - begin, 0] > 0 or held[k - begin, 2] == 0
            ):
                j = details[k]
                size = j[jobs.TILE_ROWS] * j[jobs.GROUPS] * 256
                totals = _doubles(table[k, f.TOTALS] + 8 * thread * size, size)
                flipped = FLIPS != 0 and j[jobs.SIGNED] != 0
                _fold(j, weight_sums + table[k, f.SUMS], totals, held[k - begin], flipped)
        leave()


def run(path: str, parallel: bool) -> Any:
    """Return ``region`` with the tiles of a path."""
    parts = jobs.write_spots, jobs.write_outputs, jobs.spread_weights
    parts += jobs.multiply_spots, jobs.multiply_weights, add_weights
    return compiled(region, path, *parts)[parallel]


@njit
def _begin(d, channels, sums):
    """Make of the sums of weights what sums of products start from: in all, then place by place."""
    rows = carray(pointer_to(d[f.BEGIN]), (1 + d[f.W_SPOTS], len(sums)), np.int32)
    if d[f.W_SPOTS] and d[f.W_FLIPS]:
        meets = carray(pointer_to(d[f.W_MEETS]), (d[f.W_SPOTS], d[f.W_PART_TAPS]), np.uint8)
        sum_taps(d[f.W_PACKED], d[f.W_DEPTH], len(sums) // 16, channels, meets, rows[1:])
    for row in range(len(rows)):
        for i in range(len(sums)):
            rows[row, i] *= np.int32(-128) * np.int32(d[f.W_FLIPS])


@njit
def _code(value, scale, low, high):
    rounded = np.rint(value * scale)
    bounded = min(max(rounded, low), high)
    return np.int8(bounded) if rounded == rounded else np.int8(0)


@njit
def _round_rows(weight, step_o, taps, inputs, codes, scale, low, high):
    """Round a contiguous weight; the codes of a row lie by tap, then by input."""
    size = taps * inputs
    row = np.empty(size, np.int8)
    for first in range(0, len(codes), size):
        start = first // size * step_o
        values, out = weight[start : start + size], codes[first : first + size]
        for i in range(size):
            row[i] = _code(values[i], scale, low, high)
        for t in range(taps):
            own, tap = out[t * inputs : (t + 1) * inputs], row[t:]
            for c in range(inputs):
                own[c] = tap[c * taps]


@njit
def _round_places(weight, step_o, step_c, step_t, taps, inputs, codes, scale, low, high):
    """``_round_rows`` of any strides."""
    for at in range(len(codes)):
        o, t, c = at // (taps * inputs), at // inputs % taps, at % inputs
        codes[at] = _code(weight[o * step_o + c * step_c + t * step_t], scale, low, high)


def _pack_weights(tasks, scales, spare, spare_bytes, threads):
    """Round weights to nearest codes, and lay them out for tiles.

    Args:
        tasks: (tasks, ...) int64, see ``fields``.
        scales: (tasks, 3) float32: scale, lowest and highest code.
        spare: Address of each thread's memory.
        spare_bytes: Of a thread.
        threads: How many.
    """
    for thread in prange(threads):
        own = spare + thread * spare_bytes
        for k in range(thread, len(tasks), threads):
            d = tasks[k]
            outputs, inputs, taps = d[f.W_OUTPUTS], d[f.W_INPUTS], d[f.W_TAPS]
            scale, low, high = scales[k]
            codes = carray(pointer_to(own), outputs * taps * inputs, np.int8)
            step_o, step_c, step_t = d[f.W_STEP_O], d[f.W_STEP_C], d[f.W_STEP_T]
            size = (outputs - 1) * step_o + (inputs - 1) * step_c + (taps - 1) * step_t + 1
            weight = _floats(d[f.WEIGHTS], size)
            if step_t == 1 and step_c == taps:
                _round_rows(weight, step_o, taps, inputs, codes, scale, low, high)
            else:
                _round_places(weight, step_o, step_c, step_t, taps, inputs, codes, scale, low, high)
            count = d[f.W_PART_TAPS]
            numbers = carray(pointer_to(d[f.W_NUMBERS]), count, np.int64)
            offsets = carray(pointer_to(d[f.W_OFFSETS]), count, np.int64)
            turned = d[f.W_IS_TURNED] != 0
            columns, depth = (inputs, outputs) if turned else (outputs, inputs)
            begin = carray(pointer_to(d[f.BEGIN]), (columns + 15) // 16 * 16, np.int32)
            begin[:] = 0
            pack(
                own, numbers, offsets, d[f.W_DEPTH], columns, depth, taps * inputs, turned, begin,
                d[f.W_PACKED],
            )  # fmt: skip
            _begin(d, depth, begin)


def _collect(tasks, items, threads):
    """Add up the threads' totals of weight gradients, and write them as the weights lie.

    Args:
        tasks: (layers, ...) int64, see ``fields``.
        items: (items, 2) int64: a layer, and the first of 16 inputs.
        threads: That added up.
    """
    for k in prange(len(items)):
        d, first = tasks[items[k, 0]], items[k, 1]
        if d[f.OUT]:
            _collect_inputs(d, first, threads)


@njit
def _collect_inputs(d, first, threads):
    """Write what belongs to 16 inputs: totals lie by tap, input and output."""
    outputs, inputs, taps = d[f.W_OUTPUTS], d[f.W_INPUTS], d[f.W_TAPS]
    padded, columns = (inputs + 15) // 16 * 16, (outputs + 15) // 16 * 16
    size, rows = taps * padded * columns, min(16, inputs - first) * taps
    totals, lsb = _doubles(d[f.TOTALS], threads * size), _floats(d[f.POWERS], 1)[0]
    out = _floats(d[f.OUT], outputs * inputs * taps)
    values, sums = np.empty((rows, columns), np.float32), np.empty(columns, np.float64)
    for row in range(rows):
        at = (row % taps * padded + first + row // taps) * columns
        sums[:] = totals[at : at + columns]
        for thread in range(1, threads):
            own = totals[thread * size + at : thread * size + at + columns]
            for o in range(columns):
                sums[o] += own[o]
        for o in range(columns):
            values[row, o] = np.float32(sums[o]) * lsb
    for o in range(outputs):
        start = (o * inputs + first) * taps
        own_out = out[start : start + rows]
        for row in range(rows):
            own_out[row] = values[row, o]


def pack_weights(parallel: bool) -> Any:
    """Return the kernel that lays out weights."""
    return _both(_pack_weights)[parallel]


def collect(parallel: bool) -> Any:
    """Return the kernel that writes weight gradients."""
    return _both(_collect)[parallel]


_made: dict[Any, Any] = {}


def _both(kernel: Any) -> Any:
    from fixedpoint_kernels.threads import compile_both

    if kernel not in _made:
        _made[kernel] = compile_both(kernel)
    return _made[kernel]
