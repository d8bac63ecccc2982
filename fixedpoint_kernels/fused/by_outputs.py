"""Weight gradients that threads share by outputs: for its own, a thread adds up the products of all images.

The sums of 32 outputs stay in the thread's cache, and what leaves it is the gradient, once. By images (see
``by_images``) each thread has sums of the whole weight, which go to memory and back; that costs more where
a weight has many elements and there are few places.
"""

from typing import Any

import numpy as np
from numba import carray, njit

from fixedpoint_kernels.fused import fields as f
from fixedpoint_kernels.fused.by_images import fold
from fixedpoint_kernels.fused.views import doubles, floats
from fixedpoint_kernels.llvm import tiles
from fixedpoint_kernels.llvm.calls import inner, keep
from fixedpoint_kernels.llvm.vectors import pointer_to
from fixedpoint_kernels.products import jobs, weight_jobs

__all__ = ["room", "write_weights"]

turn: Any = None  # of a path
narrow = narrow_rows = wide_rows = turn
GRAIN, WIDE_ROWS = 4, 0

# of a job, images of one power of two that are laid out together: bytes of a channel and of gradients before
# them, positions of gradients before them; as ``turn`` returns; outputs; steps of tiles before them, and theirs
_X_AT, _FLAT_AT, _AT, _WHOLE, _OUTPUTS, _STEPS_AT, _STEPS = range(7)
_JOB = 8
# int64 addresses of a thread's memory
_JOBS, _POWERS, _ORDER, _TABLE, _SUMS, _TOTALS, _VALUES, _END = range(8)


def room(j: np.ndarray, images: int) -> int:
    """Return how many bytes of a thread's memory are needed behind ``WORK_BYTES``.

    Args:
        j: Row of numbers, of ``describe_weights`` with ``images``.
        images: How many.
    """
    at = np.zeros(_END + 1, np.int64)
    places(j, images, 0, at)
    return int(at[_END] - j[jobs.WORK_BYTES])


@njit
def places(j, images, work, out):
    """Write where the parts of a thread's memory begin, and where it ends."""
    sums = 32 * (j[jobs.SUM_ROWS] + 80)  # tiles write some rows more
    out[_JOBS] = (work + j[jobs.WORK_BYTES] + 63) // 64 * 64
    out[_POWERS] = out[_JOBS] + 8 * _JOB * images
    out[_ORDER] = out[_POWERS] + 8 * images
    out[_TABLE] = out[_ORDER] + 8 * images
    runs = 24 * images * max(j[jobs.SPOTS], 1)
    out[_SUMS] = (out[_TABLE] + runs + 63) // 64 * 64
    out[_TOTALS] = out[_SUMS] + 4 * sums + 64
    out[_VALUES] = out[_TOTALS] + 8 * sums
    out[_END] = out[_VALUES] + 1024


@inner
def _largest_below(scales, limit, is_first):
    """Return the largest scale below ``limit``, or of all."""
    found = -1.0
    for scale in scales:
        if (is_first or scale < limit) and scale > found:
            found = scale
    return found


def lay_out(j, x, grad, scales, images, work, at):
    """Lay out all images and their gradients, those of the largest power first; return how many jobs they are.

    Args:
        j: Address of a row of numbers.
        x: Address of codes.
        grad: Address of codes of the gradient.
        scales: Address of float64: of each image's gradient.
        images: How many.
        work: Address of the thread's memory.
        at: Address of its parts.
    """
    j, at = carray(pointer_to(j), jobs.FIELDS, np.int64), carray(pointer_to(at), _END + 1, np.int64)
    table = carray(pointer_to(at[_JOBS]), (images, _JOB), np.int64)
    powers, order = doubles(at[_POWERS], images), carray(pointer_to(at[_ORDER]), images, np.int64)
    own, power = doubles(scales, images), 0.0
    done, count, x_at, flat_at, positions = 0, 0, np.int64(0), np.int64(0), 0
    while done < images:
        power, begin = _largest_below(own, power, done == 0), done
        for i in range(images):
            if own[i] == power:
                order[done] = i
                done += 1
        for first in range(begin, done, j[jobs.SLOTS]):
            n = min(j[jobs.SLOTS], done - first)
            whole = turn(
                j,
                x,
                at[_ORDER],
                first,
                n,
                np.int64(0),
                j[jobs.COUNT_ROWS],
                grad,
                work,
                x_at,
                flat_at,
            )
            row = table[count]
            row[_X_AT], row[_FLAT_AT], row[_AT], row[_WHOLE] = x_at, flat_at, positions, whole
            row[_OUTPUTS], powers[count] = n * j[jobs.COUNT_ROWS] * j[jobs.COUNT_COLUMNS], power
            if j[jobs.SPOTS]:
                x_at += whole * j[jobs.HEIGHT] * j[jobs.WIDTH]
                flat_at += whole * j[jobs.GRAD_BYTES]
                positions += whole * j[jobs.SPOTS]
            else:
                held = ((n - 1) * j[jobs.SLOT_ROWS] + j[jobs.COUNT_ROWS]) * j[jobs.COLUMNS]
                row[_STEPS_AT], row[_STEPS] = positions // GRAIN, (held + GRAIN - 1) // GRAIN
                x_at += n * j[jobs.ROOM]
                flat_at += n * j[jobs.ROOM] * j[jobs.GRAD_CHANNELS]
                positions += n * j[jobs.ROOM]
            count += 1
    return count


@inner
def _runs(j, at, first, last, tap):
    """Write what tiles read of some jobs, see ``tiles.runs_of``: of a tap, place by place; return how many runs."""
    table = carray(pointer_to(at[_JOBS]), (last, _JOB), np.int64)
    count = 0
    if j[jobs.SPOTS]:
        firsts = carray(pointer_to(j[jobs.PAIR_FIRSTS]), tap + 2, np.int64)
        begin, end = int(firsts[tap]), int(firsts[tap + 1])
        pairs = carray(pointer_to(j[jobs.PAIRS]), (end, 3), np.int64)
        out = carray(pointer_to(at[_TABLE]), ((last - first) * j[jobs.SPOTS], 3), np.int64)
        for k in range(first, last):
            whole = table[k, _WHOLE]
            for i in range(begin, end):
                out[count, 0] = table[k, _X_AT] + pairs[i, 0] * whole
                out[count, 1] = pairs[i, 1] * whole // 4
                out[count, 2] = (table[k, _AT] + pairs[i, 2] * whole) // 4
                count += 1
        return count
    out = carray(pointer_to(at[_TABLE]), (last - first, 3), np.int64)
    for k in range(first, last):
        out[count, 0], out[count, 1] = table[k, _X_AT], table[k, _STEPS]
        out[count, 2] = table[k, _STEPS_AT]
        count += 1
    return count


def add_jobs(d, j, at, first, last, width, work):
    """Add the products of some jobs of one power to the sums of 16 outputs, or 32.

    Args:
        d: Address of a row of numbers, see ``fields``.
        j: Address of a row of numbers, of ``describe_weights``.
        at: Address of the parts of a thread's memory.
        first: Of the jobs.
        last: Behind the last of them.
        width: 1 or 2.
        work: Address of the thread's memory.
    """
    d, j = carray(pointer_to(d), f.COUNT, np.int64), carray(pointer_to(j), jobs.FIELDS, np.int64)
    at, buffer = carray(pointer_to(at), _END + 1, np.int64), (work + 63) // 64 * 64
    turned, b, line = buffer + j[jobs.TURNED_AT], buffer + j[jobs.B_AT], j[jobs.LINE]
    rows, run_bytes, row_bytes = j[jobs.TILE_ROWS], j[jobs.LONGEST] * 16, width * 64
    starts, sums, runs = (
        carray(pointer_to(j[jobs.ROW_STARTS]), rows, np.int64),
        at[_SUMS],
        at[_TABLE],
    )
    taps, count = j[jobs.TAPS] if j[jobs.SPOTS] else 1, 0
    for tap in range(taps):
        count = _runs(j, at, first, last, tap)
        row, end = tap * (rows // taps), (tap + 1) * (rows // taps)
        while row < end and count > 0:
            place, here = sums + row * 16 * row_bytes, j[jobs.ROW_STARTS] + 8 * row
            if width == 2:
                row += wide_rows(
                    j[jobs.BYTES], end - row, turned, here, starts[row], line, runs, count, b, run_bytes,
                    place, row_bytes,
                )  # fmt: skip
            else:
                row += narrow_rows(
                    j[jobs.BYTES], end - row, turned, here, starts[row], line, runs, count, b, run_bytes,
                    place, row_bytes,
                )  # fmt: skip
    if d[f.W_FLIPS]:
        for half in range(width):
            place = sums + rows * 16 * row_bytes + half * 64
            narrow(
                0, j[jobs.ONES], j[jobs.ROW_STARTS], 0, runs, count, b + half * run_bytes,
                run_bytes, place, 0, place, 0,
            )  # fmt: skip
    return 0


def add_up(d, j, at, count, width, held, work):
    """Add up the products of all jobs for 16 outputs, or 32.

    Args:
        d: Address of a row of numbers, see ``fields``.
        j: Address of a row of numbers, of ``describe_weights``.
        at: Address of the parts of a thread's memory.
        count: Jobs.
        width: 1 or 2.
        held: Address of float64, as of ``fold``.
        work: Address of the thread's memory.
    """
    d_at, j_at, parts, held = d, j, at, doubles(held, 3)
    d, j = carray(pointer_to(d), f.COUNT, np.int64), carray(pointer_to(j), jobs.FIELDS, np.int64)
    at = carray(pointer_to(at), _END + 1, np.int64)
    n, powers = width * 16, doubles(at[_POWERS], count)
    table, rows = carray(pointer_to(at[_JOBS]), (count, _JOB), np.int64), j[jobs.SUM_ROWS]
    totals, flipped = doubles(at[_TOTALS], rows * n), d[f.W_FLIPS] != 0
    tiles.blank(at[_SUMS], 4 * (rows + 80) * n, 0)
    held[:] = 0.0
    first = 0
    while first < count:
        last, outputs = first, 0
        while last < count and powers[last] == powers[first]:
            outputs += table[last, _OUTPUTS]
            last += 1
        times = held[1] / powers[first] if held[0] > 0 else 1.0
        if held[0] * times + outputs > f.LONGEST_SUM:
            fold(rows, n, at[_SUMS], totals, held, flipped)
        elif times > 1:
            weight_jobs.double(at[_SUMS], (rows + 1) * n, np.int64(np.log2(times)))
            held[0] *= times
        held[1] = powers[first]
        add_jobs(d_at, j_at, parts, first, last, width, work)
        held[0] += outputs
        first = last
    if held[2] > 0:
        fold(rows, n, at[_SUMS], totals, held, flipped)
    return 0


@inner
def _write(d, j, at, group, width, held):
    """Write the gradients of some outputs as the weight lies, from their sums."""
    n, rows, is_folded = width * 16, j[jobs.SUM_ROWS], held[2] > 0
    flips, scale = d[f.W_FLIPS] != 0, np.float32(held[1])
    sums = carray(pointer_to(at[_SUMS]), (rows + 1) * n, np.int32)
    totals, last = doubles(at[_TOTALS], rows * n), sums[rows * n :]
    lost = np.zeros(n, np.int32)
    if flips:
        for i in range(n):
            lost[i] = np.int32(128) * last[i]
    values, lsb = floats(at[_VALUES], 256), floats(d[f.POWERS], 1)[0]
    taps, inputs, is_last = d[f.W_TAPS], d[f.W_INPUTS], d[f.W_STEP_C] != 0
    apart = inputs if d[f.W_IS_FLAT] else (inputs + 15) // 16 * 16
    for half in range(width):
        out = d[f.OUT] + 4 * (group + half) * 16 * taps * inputs
        for first in range(0, taps * inputs, 16):
            for i in range(16):
                k = first + i
                tap, c = (k // inputs, k % inputs) if is_last else (k % taps, k // taps)
                start = (tap * apart + c) * n + half * 16
                found = values[i * 16 : i * 16 + 16]
                if is_folded:
                    own_totals = totals[start : start + 16]
                    for o in range(16):
                        found[o] = np.float32(own_totals[o]) * lsb
                else:
                    own, own_lost = sums[start : start + 16], lost[half * 16 : half * 16 + 16]
                    for o in range(16):
                        found[o] = np.float32(np.int32(own[o] - own_lost[o])) * scale * lsb
            tiles.transpose_floats(at[_VALUES], out + 4 * first, 4 * taps * inputs)


def write_weights(d, j, images, thread, threads, work):
    """Write a thread's share of a weight's gradient.

    Args:
        d: Address of a row of numbers, see ``fields``.
        j: Address of a row of numbers, of ``describe_weights`` with ``images``.
        images: How many.
        thread: Which share.
        threads: How many there are.
        work: Address of the thread's memory: ``WORK_BYTES``, and ``room``.
    """
    d_at, j_at = d, j
    d, j = (
        carray(pointer_to(d_at), f.COUNT, np.int64),
        carray(pointer_to(j_at), jobs.FIELDS, np.int64),
    )
    pairs = (j[jobs.GROUPS] + 1) // 2
    group, end = (
        2 * (pairs * thread // threads),
        min(j[jobs.GROUPS], 2 * (pairs * (thread + 1) // threads)),
    )
    if group >= end:
        return 0
    at, held = np.empty(_END + 1, np.int64), np.empty(3, np.float64)
    places(j, images, work, at)
    count = lay_out(j_at, d[f.X], d[f.CODES], d[f.SCALES], images, work, at.ctypes.data)
    table = carray(pointer_to(at[_JOBS]), (count, _JOB), np.int64)
    buffer = (work + 63) // 64 * 64
    while group < end:
        width = 2 if group + 1 < end and WIDE_ROWS > 0 else 1
        for half in range(width):
            for k in range(count):
                target = buffer + j[jobs.B_AT] + (half * j[jobs.LONGEST] + table[k, _AT]) * 16
                flat = buffer + j[jobs.FLAT_AT] + table[k, _FLAT_AT]
                weight_jobs.interleave(j, flat, group + half, table[k, _WHOLE], target)
        add_up(d_at, j_at, at.ctypes.data, count, width, held.ctypes.data, work)
        _write(d, j, at, group, width, held)
        group += width
    keep(at, held)
    return 0
