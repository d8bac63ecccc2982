"""Weight gradients that threads share by outputs: for its own, a thread adds up the products of all images.

The sums of 32 outputs stay in the thread's cache, and what leaves it is the gradient, once. By images (see
``fused.by_images``) each thread has sums of the whole weight, which go to memory and back; that costs more
where a weight has many elements and there are few places.
"""

from typing import Any

import numpy as np

from fixedpoint_kernels.llvm import rows as passes
from fixedpoint_kernels.llvm import tiles
from fixedpoint_kernels.llvm.arrays import doubles, empty, floats, view, zeros
from fixedpoint_kernels.llvm.calls import inner, keep
from fixedpoint_kernels.products import jobs, weight_jobs
from fixedpoint_kernels.products.shapes import LONGEST_SUM
from fixedpoint_kernels.products.sums import fold, make_ready

__all__ = ["PARTS", "make_room"]

turn: Any = None  # of a path
add_rows = add_ones = turn
FLIPS, GRAIN, WIDE_ROWS = 0, 4, 0

# of a job, images of one power of two that are laid out together: bytes of a channel and of gradients before
# them, positions of gradients before them; as ``turn`` returns; outputs; steps of tiles before them, and theirs
_X_AT, _FLAT_AT, _AT, _WHOLE, _OUTPUTS, _STEPS_AT, _STEPS = range(7)
_JOB = 7
# parts of a thread's memory, int64 addresses; then the next image in order, and the next row of its outputs
_JOBS, _POWERS, _ORDER, _SCALES, _TABLE, _SUMS, _TOTALS, _VALUES, _NEXT, _ROW = range(10)
_PARTS = 10


def make_room(j: np.ndarray, images: int, groups: int) -> None:
    """Add to ``WORK_BYTES`` what ``write_weights`` needs, and write where it lies.

    Args:
        j: Row of numbers, of ``describe_weights`` with ``images``.
        images: How many.
        groups: Of 16 outputs, that a thread has at most.
    """
    bands = -(int(j[jobs.COUNT_ROWS]) // -int(j[jobs.BAND]))
    are_together = j[jobs.SPOTS] > 0 or (bands == 1 and images * j[jobs.ROOM] <= j[jobs.LONGEST])
    size = 32 * (int(j[jobs.SUM_ROWS]) + 80)  # tiles write some rows more
    most, sums = images * bands, size * (1 if are_together else -(groups // -2))
    runs = 24 * most * max(int(j[jobs.SPOTS]), 1)
    sizes = 8 * _JOB * most, 8 * most, 8 * images, 8 * images, runs, 4 * sums, 8 * sums, 1024
    ends = np.cumsum(
        [-((int(j[jobs.WORK_BYTES]) + 64) // -64) * 64] + [-(n // -64) * 64 + 64 for n in sizes]
    )
    j[jobs.PARTS : jobs.PARTS + len(sizes)] = ends[:-1]
    j[[jobs.WORK_BYTES, jobs.PAIR_SUMS]] = ends[-1], 0 if are_together else size


@inner
def _sort(scales, images, order, out):
    """Write the numbers of images, and their scales, from the largest scale on, others as they come."""
    power, done = 0.0, 0
    while done < images:
        largest = -1.0
        for scale in scales:
            if (done == 0 or scale < power) and scale > largest:
                largest = scale
        power = largest
        for i in range(images):
            if scales[i] == power:
                order[done], out[done] = i, power
                done += 1


@inner
def _bytes_of(j, images, rows):
    """Return how many positions a job has, and bytes of a channel that it takes, a multiple of 64."""
    n = ((images - 1) * j[jobs.SLOT_ROWS] + rows) * j[jobs.COLUMNS]
    return n, (n + j[jobs.REACH] + 16 + 63) // 64 * 64  # turning writes 15 bytes more


def lay_out(j, x, grad, images, work, at):
    """Lay out images and their gradients in order, from the next one on, while there is room; return how many jobs.

    Args:
        j: Address of a row of numbers.
        x: Address of codes.
        grad: Address of codes of the gradient.
        images: How many.
        work: Address of the thread's memory.
        at: Address of its parts.
    """
    j, at = view(j, jobs.FIELDS, np.int64), view(at, _PARTS, np.int64)
    bands = -(j[jobs.COUNT_ROWS] // -j[jobs.BAND])
    table = view(at[_JOBS], (images * bands, _JOB), np.int64)
    powers, scales = doubles(at[_POWERS], images * bands), doubles(at[_SCALES], images)
    count, x_at, flat_at, positions = 0, np.int64(0), np.int64(0), np.int64(0)
    while at[_NEXT] < images:
        first, row = at[_NEXT], at[_ROW]
        rows, n = min(j[jobs.BAND], j[jobs.COUNT_ROWS] - row), np.int64(1)
        while n < j[jobs.SLOTS] and first + n < images and scales[first + n] == scales[first]:
            n += 1
        if not j[jobs.SPOTS]:
            while n > 1 and positions + _bytes_of(j, n, rows)[1] > j[jobs.LONGEST]:
                n -= 1
            if count > 0 and positions + _bytes_of(j, n, rows)[1] > j[jobs.LONGEST]:
                break
        whole = turn(j, x, at[_ORDER], first, n, row, rows, grad, work, x_at, flat_at)
        own = table[count]
        own[_X_AT], own[_FLAT_AT], own[_AT], own[_WHOLE] = x_at, flat_at, positions, whole
        own[_OUTPUTS], powers[count] = n * rows * j[jobs.COUNT_COLUMNS], scales[first]
        if j[jobs.SPOTS]:
            x_at += whole * j[jobs.HEIGHT] * j[jobs.WIDTH]
            flat_at += whole * j[jobs.GRAD_BYTES]
            positions += whole * j[jobs.SPOTS]
        else:
            held, size = _bytes_of(j, n, rows)
            own[_STEPS_AT], own[_STEPS] = positions // GRAIN, (held + GRAIN - 1) // GRAIN
            x_at, positions = x_at + size, positions + size
            flat_at += size * j[jobs.GRAD_CHANNELS]
        count += 1
        at[_ROW] = row + rows
        if at[_ROW] == j[jobs.COUNT_ROWS]:
            at[_NEXT], at[_ROW] = first + n, 0
    return count


@inner
def _runs(j, at, first, last, tap):
    """Write what tiles read of some jobs, see ``tiles.runs_of``: of a tap, place by place; return how many runs."""
    table = view(at[_JOBS], (last, _JOB), np.int64)
    count = 0
    if j[jobs.SPOTS]:
        firsts = view(j[jobs.PAIR_FIRSTS], tap + 2, np.int64)
        begin, end = int(firsts[tap]), int(firsts[tap + 1])
        pairs = view(j[jobs.PAIRS], (end, 3), np.int64)
        out = view(at[_TABLE], ((last - first) * j[jobs.SPOTS], 3), np.int64)
        for k in range(first, last):
            whole = table[k, _WHOLE]
            for i in range(begin, end):
                out[count, 0] = table[k, _X_AT] + pairs[i, 0] * whole
                out[count, 1] = pairs[i, 1] * whole // 4
                out[count, 2] = (table[k, _AT] + pairs[i, 2] * whole) // 4
                count += 1
        return count
    out = view(at[_TABLE], (last - first, 3), np.int64)
    for k in range(first, last):
        out[count, 0], out[count, 1] = table[k, _X_AT], table[k, _STEPS]
        out[count, 2] = table[k, _STEPS_AT]
        count += 1
    return count


def add_jobs(j, at, sums, first, last, width, work):
    """Add the products of some jobs of one power to the sums of 16 outputs, or 32.

    Args:
        j: Address of a row of numbers.
        at: Address of the parts of a thread's memory.
        sums: Address of int32.
        first: Of the jobs.
        last: Behind the last of them.
        width: 1 or 2.
        work: Address of the thread's memory.
    """
    j, at = view(j, jobs.FIELDS, np.int64), view(at, _PARTS, np.int64)
    buffer = (work + 63) // 64 * 64
    turned, b, runs = buffer + j[jobs.TURNED_AT], buffer + j[jobs.B_AT], at[_TABLE]
    taps, count = j[jobs.TAPS] if j[jobs.SPOTS] else 1, np.int64(0)
    rows, step = j[jobs.TILE_ROWS] // taps, width * 64
    for tap in range(taps):
        count = _runs(j, at, first, last, tap)
        if count > 0:
            row = tap * rows
            add_rows(j, row, row + rows, turned, runs, count, b, sums, step, width == 2)
    if FLIPS != 0 and j[jobs.FLIPPED] != 0:
        add_ones(j, runs, count, b, sums, step, width)
    return 0


def add_up(j, at, sums, totals, count, width, held, work):
    """Add up the products of the jobs that are laid out, for 16 outputs or 32.

    Args:
        j: Address of a row of numbers.
        at: Address of the parts of a thread's memory.
        sums: Address of int32.
        totals: Address of float64.
        count: Jobs.
        width: 1 or 2.
        held: Address of float64, as of ``fold``.
        work: Address of the thread's memory.
    """
    j_at, parts, held = j, at, doubles(held, 3)
    j, at = view(j, jobs.FIELDS, np.int64), view(at, _PARTS, np.int64)
    n, powers, rows = width * 16, doubles(at[_POWERS], count), j[jobs.SUM_ROWS]
    table, first = view(at[_JOBS], (count, _JOB), np.int64), 0
    totals, flipped = doubles(totals, rows * n), FLIPS != 0 and j[jobs.FLIPPED] != 0
    while first < count:
        last, outputs = first + 1, table[first, _OUTPUTS]
        while (
            last < count
            and powers[last] == powers[first]
            and outputs + table[last, _OUTPUTS] <= LONGEST_SUM
        ):
            outputs += table[last, _OUTPUTS]
            last += 1
        make_ready(rows, n, sums, totals, held, powers[first], outputs, flipped)
        add_jobs(j_at, parts, sums, first, last, width, work)
        first = last
    return 0


@inner
def _from(j, first, lies):
    """Return which row of sums a row of gradients comes from, without the distance of outputs."""
    taps, inputs, apart = j[jobs.OUT_TAPS], j[jobs.OUT_INPUTS], j[jobs.OUT_APART]
    if taps == 1:
        return first
    tap, c = (first // inputs, first % inputs) if lies != 0 else (first % taps, first // taps)
    return tap * apart + c


@inner
def _lost(last, n, flipped):
    """Return what flipped codes added to the sums of each of ``n`` outputs, whose gradients' sums are at ``last``."""
    lost = zeros(n, np.int32)
    if flipped:
        own = view(last, n, np.int32)
        for i in range(n):
            lost[i] = np.int32(128) * own[i]
    return lost


@inner
def _write_totals(totals, starts, lsb, values, target, out_step, turns):
    """Write 16 rows of float64 sums that were folded; see ``write_sums``."""
    found = floats(values, 256)
    for i in range(16):
        for o in range(16):
            found[16 * i + o] = np.float32(totals[starts[i] + o]) * lsb
    if turns:
        tiles.transpose_floats(values, 64, target, out_step)
    else:
        for i in range(16):
            tiles.copy(values + 64 * i, target + i * out_step, 64)


@inner
def _write(j, at, sums, totals, width, held, out, lies, lsb, flipped):
    """Write the gradients of 16 outputs, or 32, as the weight lies, from their sums; ``lies``: see ``write_weights``."""
    n, rows = width * 16, j[jobs.SUM_ROWS]
    if held[2] > 0:
        fold(rows, n, sums, doubles(totals, rows * n), held, flipped)
    is_folded, scale, totals = held[2] > 0, np.float32(held[1]), doubles(totals, rows * n)
    lost, values, starts = (
        _lost(sums + 4 * rows * n, n, flipped),
        at[_VALUES],
        empty(16, np.int64),
    )
    taps, inputs, turns = j[jobs.OUT_TAPS], j[jobs.OUT_INPUTS], lies != 2
    are_apart = taps > 1 and lies == 0  # inputs are a multiple of 16
    out_step = 4 * taps * inputs if turns else 4 * j[jobs.GRAD_CHANNELS]
    for half in range(width):
        place = out + 16 * half * out_step if turns else out + 64 * half
        for first in range(0, taps * inputs, 16):
            target = place + 4 * first if turns else place + first * out_step
            for i in range(16 if are_apart or is_folded else 1):
                starts[i] = _from(j, first + i, lies) * n + half * 16
            if is_folded:
                _write_totals(totals, starts, lsb, values, target, out_step, turns)
                continue
            own, step = sums + 4 * starts[0], 4 * n
            if are_apart:
                own, step = values, 64
                for i in range(16):
                    tiles.copy(sums + 4 * starts[i], values + 64 * i, 64)
            less = lost.ctypes.data + 64 * half
            passes.write_sums(own, step, less, target, out_step, turns, scale, lsb)
    keep(lost, starts)


def write_weights(j, x, grad, scales, images, out, lies, lsb, begin, end, work):
    """Write the gradient of a weight, of some outputs.

    Args:
        j: Address of a row of numbers, of ``describe_weights`` with ``images``, and ``make_room``.
        x: Address of codes.
        grad: Address of codes of the gradient.
        scales: Address of float64: what a code of each image's gradient counts.
        images: How many.
        out: Address of float32.
        lies: How: 0: (outputs, inputs, taps); 1: (outputs, taps, inputs); 2: (taps, inputs, outputs).
        lsb: Address of float32: what a code of ``x`` counts.
        begin: Of groups of 16 outputs, even.
        end: Behind the last of them.
        work: Address of the thread's memory, ``WORK_BYTES``.
    """
    j_at, j = j, view(j, jobs.FIELDS, np.int64)
    flipped, buffer = FLIPS != 0 and j[jobs.FLIPPED] != 0, (work + 63) // 64 * 64
    if begin >= end:
        return 0
    at, held, before = empty(_PARTS, np.int64), empty(3, np.float64), zeros(3, np.float64)
    for i in range(_NEXT):
        at[i] = buffer + j[jobs.PARTS + i]
    at[_NEXT] = at[_ROW] = 0
    order, sorted_scales = (
        view(at[_ORDER], images, np.int64),
        doubles(at[_SCALES], images),
    )
    _sort(doubles(scales, images), images, order, sorted_scales)
    size = 4 * (j[jobs.SUM_ROWS] + 80)  # bytes of an output
    while at[_NEXT] < images:
        is_first = at[_NEXT] == 0 and at[_ROW] == 0
        count = lay_out(j_at, x, grad, images, work, at.ctypes.data)
        table = view(at[_JOBS], (count, _JOB), np.int64)
        group = begin
        while group < end:
            width = 2 if group + 1 < end and WIDE_ROWS > 0 else 1
            for half in range(width):
                for k in range(count):
                    target = buffer + j[jobs.B_AT] + (half * j[jobs.LONGEST] + table[k, _AT]) * 16
                    flat = buffer + j[jobs.FLAT_AT] + table[k, _FLAT_AT]
                    weight_jobs.interleave(j, flat, group + half, table[k, _WHOLE], target)
            own = (group - begin) * j[jobs.PAIR_SUMS] // 2
            sums, totals = at[_SUMS] + 4 * own, at[_TOTALS] + 8 * own
            tiles.copy(before.ctypes.data, held.ctypes.data, 24)
            if is_first:
                tiles.blank(sums, size * width * 16, 0)
            add_up(j_at, at.ctypes.data, sums, totals, count, width, held.ctypes.data, work)
            if at[_NEXT] == images:
                apart = 1 if lies == 2 else j[jobs.OUT_TAPS] * j[jobs.OUT_INPUTS]
                place = out + 64 * group * apart
                _write(j, at, sums, totals, width, held, place, lies, floats(lsb, 1)[0], flipped)
            group += width
        tiles.copy(held.ctypes.data, before.ctypes.data, 24)
    keep(at, held, before)
    return 0


PARTS = lay_out, add_jobs, add_up, write_weights
"""Of kernels, by name, behind those of ``weight_jobs``; see ``instructions.compiled``."""
