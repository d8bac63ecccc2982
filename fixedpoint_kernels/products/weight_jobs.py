"""What a thread does with a few images and their gradient, in Numba: add up products for weights.

As in ``jobs``, functions without a decorator know the tiles of one path by name.
"""

from typing import Any

import numpy as np

from fixedpoint_kernels.llvm import tiles
from fixedpoint_kernels.llvm.alone import EXACT
from fixedpoint_kernels.llvm.arrays import view
from fixedpoint_kernels.llvm.calls import inner
from fixedpoint_kernels.products.blocks import Blocks
from fixedpoint_kernels.products.jobs import (
    ACROSS,
    ALONE,
    B_AT,
    BUFFER_BYTES,
    BYTES,
    CHANNELS,
    COLUMNS,
    COPIES,
    COPY_OF,
    COUNT_COLUMNS,
    DOWN,
    FIELDS,
    FLAT_AT,
    FLIPPED,
    GRAD_BYTES,
    GRAD_CHANNELS,
    GRAD_IMAGE,
    GROUPS,
    HEIGHT,
    LINE,
    LONGEST,
    ONES,
    OUT_APART,
    OUT_INPUTS,
    OUT_TAPS,
    PAIR_FIRSTS,
    PAIRS,
    PLANE_BYTES,
    REACH,
    ROOM,
    ROW_STARTS,
    SLOT_ROWS,
    SPANS,
    SPOTS,
    SUM_ROWS,
    SUMS_SIZE,
    TAPS,
    TILE_ROWS,
    TURNED_AT,
    WIDTH,
    WORK_BYTES,
    X_IMAGE,
    X_ROW,
    Described,
    copy_images,
    describe_blocks,
    fill,
    number_of,
)
from fixedpoint_kernels.products.shapes import Correlation
from fixedpoint_kernels.products.spans import Spans
from fixedpoint_kernels.products.spots import Spots
from fixedpoint_kernels.products.weight_rows import (
    describe_rows,
    lay_out_rows,
    line_bytes,
    runs_of_rows,
    suits,
)

__all__ = [
    "BY_NAME",
    "PARTS",
    "describe_weights",
    "fold",
    "sum_rows",
    "sums_size",
]

_MOST_TAPS = 9  # that a tile of single channels takes at once
narrow: Any = None  # the tiles of a path
wide_rows = narrow_rows = alone_rows = narrow
FLIPS, GRAIN, WIDE_ROWS, ALONE_TAPS = 0, 4, 0, 0


def describe_weights(
    cut: Blocks,
    part: Correlation,
    grad_channels: int,
    signed: bool,
    in_int16: int,
    read: Spans,
    images: int = 0,
    most: int = 2**31,
    grain: int = 0,
) -> Described:
    """Describe jobs that add up products for weights.

    Args:
        cut: Blocks of the codes.
        part: Outputs and their taps.
        grad_channels: Of the gradient.
        signed: Whether codes are.
        in_int16: Steps whose sums int16 holds, see ``shapes.steps_in_int16``.
        read: Channels that outputs read.
        images: Of which as many as fit are laid out at the same time; 0: those of one job.
        most: Positions that are laid out then, if a job has fewer.
        grain: Bytes of a row that a tile takes at a time, if rows may lie without a border.
    """
    d = describe_blocks(cut, part, signed, in_int16, read)
    (down, across), channels, taps = part.stride, int(d[CHANNELS]), len(part.taps)
    padded, blocks, groups = -(channels // -16), -(read.channels // -16), -(grad_channels // -16)
    d[SUM_ROWS] = sum_rows(taps, read)
    d[[TAPS, GRAD_CHANNELS, GROUPS]] = taps, grad_channels, groups
    d[GRAD_IMAGE] = part.counts[0] * part.counts[1] * grad_channels
    d[SUMS_SIZE] = sums_size(int(d[SUM_ROWS]), groups)
    d[[OUT_TAPS, OUT_INPUTS, OUT_APART]] = taps, channels, padded * 16
    reach = int(cut.places.max(initial=0)) // across
    room = -((cut.slot_rows * cut.columns + reach + 16) // -64) * 64  # turning writes 15 bytes more
    longest = -(cut.most_positions // -64) * 64
    if images:
        longest = min(images * room, max(-(most // -64) * 64, longest + room))
    if (own := cut.spots) is not None:
        slots = 4 * images if images else -(cut.slots // -4) * 4
        return _weights_by_spot(d, slots, own, part, grad_channels)
    if read.is_alone:
        return _weights_alone(d, cut, part, longest)
    if suits(cut, part, grad_channels, signed, grain):
        return describe_rows(d, cut, part, read)
    rows, line = taps * blocks, line_bytes(longest + reach + 128)
    firsts = (cut.planes * across + cut.places % across) * padded * 16 * line + cut.places // across
    starts = (firsts[:, None] + np.arange(blocks) * 16 * line).reshape(-1)
    starts = np.append(starts, starts[-1:].repeat(4))
    ones = np.ones(longest + 64, np.uint8)
    # the last outputs in groups read lines behind the last channel
    turned = (down * across * padded * 16 + 16 * blocks * (read.groups > 1)) * line + 128
    flat = -((longest * grad_channels + 256) // -64) * 64
    lines = read.firsts * line
    d[[ACROSS, LINE, LONGEST, SPANS]] = across, line, longest, lines.ctypes.data
    d[[TILE_ROWS, ROW_STARTS, ONES]] = rows, starts.ctypes.data, ones.ctypes.data
    d[[TURNED_AT, FLAT_AT]] = d[BUFFER_BYTES], d[BUFFER_BYTES] + turned
    d[[B_AT, REACH, ROOM]] = d[BUFFER_BYTES] + turned + flat, reach, room
    d[WORK_BYTES] = d[B_AT] + (2 if images else groups) * longest * 16 + 64
    return Described(d, (starts, ones, lines))


def sum_rows(taps: int, read: Spans) -> int:
    """Return how many rows the sums of weights have: of each tap those of its channels."""
    return -(taps // -_MOST_TAPS) * _MOST_TAPS if read.is_alone else taps * read.rows


def sums_size(rows: int, groups: int) -> int:
    """Return how many int32 the sums of weights take: tiles write some rows more, and a row is that of ``ONES``."""
    return (rows + 80) * groups * 16


def _weights_alone(d: np.ndarray, cut: Blocks, part: Correlation, longest: int) -> Described:
    """``describe_weights``, of outputs with a channel each: codes and gradients are read as they lie."""
    channels, taps = int(d[CHANNELS]), len(part.taps)
    firsts = cut.planes * cut.geometry[5] + cut.places * channels
    table = np.zeros((int(d[SUM_ROWS]), 3), np.int64)  # rows behind the last tap add up anything
    table[:taps, 0] = firsts
    d[[ACROSS, ROW_STARTS, FLAT_AT]] = part.stride[1], table.ctypes.data, d[BUFFER_BYTES]
    d[WORK_BYTES] = d[FLAT_AT] + longest * channels + 256 + 64
    return Described(d, (table,))


def _weights_by_spot(
    d: np.ndarray, slots: int, own: Spots, part: Correlation, grad_channels: int
) -> Described:
    """``describe_weights``, place by place: of a channel lie all images of a place, then the next place."""
    channels, taps, places = int(d[CHANNELS]), len(part.taps), part.counts[0] * part.counts[1]
    blocks, groups = -(channels // -16), -(grad_channels // -16)
    line = line_bytes(int(d[HEIGHT] * d[WIDTH]) * slots + 64)
    starts = np.tile(np.arange(blocks) * 16 * line, taps)
    rows, longest = taps * blocks, -(places * slots // -64) * 64
    turned, flat = blocks * 16 * line + 128, (slots + 4) * places * grad_channels + 256
    turned, flat = -(turned // -64) * 64, -(flat // -64) * 64
    d[[LINE, LONGEST, TILE_ROWS, ROW_STARTS]] = line, longest, rows, starts.ctypes.data
    d[[TURNED_AT, FLAT_AT]] = d[BUFFER_BYTES], d[BUFFER_BYTES] + turned
    d[B_AT] = d[FLAT_AT] + flat
    d[[SPOTS, PAIRS, PAIR_FIRSTS]] = places, own.pairs.ctypes.data, own.pair_firsts.ctypes.data
    d[GRAD_BYTES] = places * grad_channels
    d[WORK_BYTES] = d[B_AT] + groups * longest * 16 + 64
    return Described(d, (starts, own.pairs, own.pair_firsts))


@inner
def _turn_spots(d, x, order, first, images, grad, work, x_at, flat_at):
    """``turn``, place by place; return how many images, a multiple of 4."""
    buffer, image, places = (work + 63) // 64 * 64, d[HEIGHT] * d[X_ROW], d[HEIGHT] * d[WIDTH]
    turned, flat = buffer + d[TURNED_AT] + x_at, buffer + d[FLAT_AT] + flat_at
    channels, line, whole, own = d[CHANNELS], d[LINE], (images + 3) // 4 * 4, d[GRAD_BYTES]
    copy_images(x, order, first, images, d[X_IMAGE], buffer, image, False)
    copy_images(grad, order, first, images, d[GRAD_IMAGE], flat, own, False)
    tiles.blank(flat + images * own, (whole - images) * own, 0)
    for c in range(0, channels, 16):
        for place in range(places):
            for i in range(0, whole, 16):  # what is too much is written over, by the next place
                source = buffer + i * image + place * channels + c
                tiles.transpose(source, image, turned + c * line + place * whole + i, line)
    return whole


@inner
def _runs_of_pairs(pairs, count, images, out):
    """Write pairs of places as runs of images: byte offset, steps of 4 bytes, those before."""
    rows, runs = (
        view(pairs, (count, 3), np.int64),
        view(out, (count, 3), np.int64),
    )
    for i in range(count):
        runs[i, 0] = rows[i, 0] * images
        runs[i, 1], runs[i, 2] = rows[i, 1] * images // 4, rows[i, 2] * images // 4


def add_rows(d, row, end, source, runs, count, weights, sums, row_bytes, is_pair):
    """Add products to rows of the sums of 16 outputs, or 32 where ``is_pair``.

    ``row`` and ``end`` count sixteens of rows, ``source`` are turned inputs, ``runs`` and ``count`` as of
    ``tiles.runs_of``, ``weights`` interleaved gradients; rows of sums are ``row_bytes`` apart.
    """
    starts, run_bytes = view(d[ROW_STARTS], d[TILE_ROWS], np.int64), d[LONGEST] * 16
    while row < end:
        place, here = sums + row * 16 * row_bytes, d[ROW_STARTS] + 8 * row
        if is_pair:
            row += wide_rows(
                d[BYTES], end - row, source, here, starts[row], d[LINE], runs, count, weights,
                run_bytes, place, row_bytes,
            )  # fmt: skip
        else:
            row += narrow_rows(
                d[BYTES], end - row, source, here, starts[row], d[LINE], runs, count, weights,
                run_bytes, place, row_bytes,
            )  # fmt: skip


def add_ones(d, runs, count, weights, sums, row_bytes, groups):
    """Add gradients alone to the row behind the sums of ``groups`` times 16 outputs; see ``add_rows``."""
    run_bytes = d[LONGEST] * 16
    for group in range(groups):
        place = sums + d[TILE_ROWS] * 16 * row_bytes + group * 64
        narrow(
            0, d[ONES], d[ROW_STARTS], 0, runs, count, weights + group * run_bytes, run_bytes,
            place, 0, place, 0,
        )  # fmt: skip


def multiply_spots(d, images, sums, work):
    """``multiply_weights``, place by place: a tap has the pairs of places that it joins."""
    d = view(d, FIELDS, np.int64)
    buffer = (work + 63) // 64 * 64
    turned, b = buffer + d[TURNED_AT], buffer + d[B_AT]
    firsts = view(d[PAIR_FIRSTS], d[TAPS] + 1, np.int64)
    _runs_of_pairs(d[PAIRS], firsts[d[TAPS]], images, buffer)  # codes there are read no more
    groups, run_bytes, blocks = d[GROUPS], d[LONGEST] * 16, d[TILE_ROWS] // d[TAPS]
    row_bytes, group = groups * 64, 0
    while group < groups:
        pair = group + 1 < groups and WIDE_ROWS > 0
        weights = b + group * run_bytes
        for tap in range(d[TAPS]):
            runs, count = buffer + 24 * firsts[tap], firsts[tap + 1] - firsts[tap]
            if count:
                row, place = tap * blocks, sums + group * 64
                add_rows(
                    d, row, row + blocks, turned, runs, count, weights, place, row_bytes, pair
                )  # fmt: skip
        group += 2 if pair else 1
    return 0


def spread_weights(d, x, order, first, images, row, rows, grad, work):
    """Lay out some images and their gradient for ``multiply_weights``; return how many positions.

    Args:
        d: Address of a row of numbers, of ``describe_weights``.
        x: Address of codes.
        order: Address of the images' numbers, int64, or 0.
        first: Of ``order``.
        images: How many.
        row: First one of outputs.
        rows: How many.
        grad: Address of codes of the gradient.
        work: Address of ``d[WORK_BYTES]`` bytes.
    """
    zero, d = np.int64(0), view(d, FIELDS, np.int64)
    if d[COPIES]:
        return lay_out_rows(d, x, order, first, images, row, rows, grad, work)
    whole = turn(d, x, order, first, images, row, rows, grad, work, zero, zero)
    if d[ALONE]:
        return whole
    buffer = (work + 63) // 64 * 64
    for group in range(d[GROUPS]):
        target = buffer + d[B_AT] + group * d[LONGEST] * 16
        interleave(d, buffer + d[FLAT_AT], group, whole, target)
    return whole


def turn(d, x, order, first, images, row, rows, grad, work, x_at, flat_at):
    """Lay out the inputs of a job by channel, and its gradient in the same rows.

    Most arguments are those of ``spread_weights``, ``d`` as an array; ``x_at`` are bytes of a channel before,
    ``flat_at`` those of gradients. Returns how many positions, a multiple of 64, where those behind the last
    have a gradient of 0; place by place how many images, a multiple of 4.
    """
    if d[SPOTS]:
        return _turn_spots(d, x, order, first, images, grad, work, x_at, flat_at)
    flips = FLIPS != 0 and d[FLIPPED] == 1
    buffer = (work + 63) // 64 * 64
    turned, flat = buffer + d[TURNED_AT] + x_at, buffer + d[FLAT_AT] + flat_at
    down, across, channels, line = d[DOWN], d[ACROSS], d[CHANNELS], d[LINE]
    padded = (channels + 15) // 16 * 16
    n = ((images - 1) * d[SLOT_ROWS] + rows) * d[COLUMNS]
    fill(d, x, order, first, images, row, rows, buffer, flips)
    whole = (n + 63) // 64 * 64
    _flatten(d, grad, order, first, images, row, rows, flat, whole)
    if d[ALONE]:
        return whole
    for plane in range(down):
        for phase in range(across):
            source = buffer + plane * d[PLANE_BYTES] + phase * channels
            target = turned + (plane * across + phase) * padded * line
            for q in range(0, n + d[REACH], 16):
                for c in range(0, channels, 16):
                    tiles.transpose(
                        source + q * across * channels + c,
                        across * channels,
                        target + c * line + q,
                        line,
                    )
    return whole


@inner
def interleave(d, flat, group, whole, target):
    """Lay out the gradients of 16 outputs of a job; ``whole``: as ``turn`` returns it."""
    if d[SPOTS]:
        own = d[GRAD_BYTES]
        for place in range(d[SPOTS]):
            for i in range(0, whole, 4):
                source = flat + i * own + place * d[GRAD_CHANNELS] + group * 16
                tiles.interleave(source, own, target + (place * whole + i) * 16)
        return
    for q in range(0, whole, 4):
        source = flat + q * d[GRAD_CHANNELS] + group * 16
        tiles.interleave(source, d[GRAD_CHANNELS], target + q * 16)


@inner
def _flatten(d, grad, order, first, images, row, rows, out, positions):
    """Copy a gradient so that its rows lie as those of the inputs, 0 between."""
    channels = d[GRAD_CHANNELS]
    tiles.blank(out, positions * channels, 0)
    row_bytes = d[COUNT_COLUMNS] * channels
    for slot in range(images):
        source = grad + number_of(order, first + slot) * d[GRAD_IMAGE] + row * row_bytes
        for i in range(rows):
            place = out + (slot * d[SLOT_ROWS] + i) * d[COLUMNS] * channels
            tiles.copy(source + i * row_bytes, place, row_bytes)


def multiply_alone(d, piece, steps, sums, work):
    """``multiply_weights``, of outputs with a channel each."""
    d = view(d, FIELDS, np.int64)
    buffer, channels, row_bytes = (work + 63) // 64 * 64, d[CHANNELS], d[GROUPS] * 64
    step = d[ACROSS] * channels
    for group in range(d[GROUPS]):
        x, grad, out = buffer + group * 16, buffer + d[FLAT_AT] + group * 16, sums + group * 64
        for tap in range(0, d[TAPS], ALONE_TAPS):
            table, place = d[ROW_STARTS] + 24 * tap, out + tap * row_bytes
            for q in range(piece, piece + steps, EXACT):
                count = min(EXACT, piece + steps - q)
                alone_rows(
                    d[BYTES], x + q * step, step, grad + q * channels, channels, count, table,
                    place, row_bytes,
                )  # fmt: skip
    return 0


def multiply_rows(d, positions, sums, work):
    """``multiply_weights``, of all positions of rows without a border: taps of a column have a gradient of their own."""
    d = view(d, FIELDS, np.int64)
    buffer = (work + 63) // 64 * 64
    turned, b = buffer + d[TURNED_AT], buffer + d[B_AT]
    count = runs_of_rows(d, positions, buffer)
    copy_of = view(d[COPY_OF], d[TAPS], np.int64)
    groups, run_bytes, blocks = d[GROUPS], d[LONGEST] * 16, d[TILE_ROWS] // d[TAPS]
    spans = view(d[SPANS], groups, np.int64)
    row_bytes, group = groups * 64, 0
    while group < groups:
        pair = group + 1 < groups and WIDE_ROWS > 0 and spans[group + 1] == spans[group]
        source, place = turned + spans[group], sums + group * 64
        for copy in range(d[COPIES]):
            weights = b + (copy * groups + group) * run_bytes
            for tap in range(d[TAPS]):
                if copy_of[tap] == copy:
                    row = tap * blocks
                    add_rows(
                        d, row, row + blocks, source, buffer, count, weights, place, row_bytes, pair
                    )  # fmt: skip
        group += 2 if pair else 1
    return 0


def multiply_weights(d, piece, steps, sums, work):
    """Add products of ``shapes.PIECE`` positions or fewer to int32 sums.

    Args:
        d: Address of a row of numbers.
        piece: First position.
        steps: Positions, a multiple of 64; of rows without a border all, of 4.
        sums: Address of ``d[SUMS_SIZE]`` int32, a multiple of 64.
        work: As of ``spread_weights``.
    """
    at = d
    d = view(at, FIELDS, np.int64)
    if d[SPOTS]:
        return multiply_spots(at, steps, sums, work)
    if d[ALONE]:
        return multiply_alone(at, piece, steps, sums, work)
    if d[COPIES]:
        return multiply_rows(at, steps, sums, work)
    flips = FLIPS != 0 and d[FLIPPED] != 0
    buffer = (work + 63) // 64 * 64
    turned, b = buffer + d[TURNED_AT], buffer + d[B_AT]
    table = view(buffer, 3, np.int64)  # codes there are read no more
    table[0], table[1], table[2] = 0, (steps + GRAIN - 1) // GRAIN, 0
    groups, run_bytes = d[GROUPS], d[LONGEST] * 16
    spans = view(d[SPANS], groups, np.int64)
    row_bytes, group = groups * 64, 0
    while group < groups:
        pair = group + 1 < groups and WIDE_ROWS > 0 and spans[group + 1] == spans[group]
        weights, source = b + group * run_bytes + piece * 16, turned + spans[group] + piece
        place, one = sums + group * 64, np.int64(1)
        add_rows(d, np.int64(0), d[TILE_ROWS], source, buffer, one, weights, place, row_bytes, pair)
        if flips:
            add_ones(d, buffer, one, weights, place, row_bytes, 2 if pair else 1)
        group += 2 if pair else 1
    return 0


@inner
def fold(d, sums, totals, shift, flipped, folds):
    """Move int32 sums to int64 totals, ``shift`` bits up, which the first time may hold anything.

    Returns:
        How often that was done; the sums become 0.

    Args:
        d: Row of numbers.
        sums: Address, as of ``multiply_weights``.
        totals: (rows, 16 * groups) int64.
        shift: Bits.
        flipped: Whether codes were unsigned only here.
        folds: How often it was done before.
    """
    n = d[GROUPS] * 16
    held = view(sums, d[SUMS_SIZE], np.int32)
    last = held[d[SUM_ROWS] * n : (d[SUM_ROWS] + 1) * n]
    for row in range(d[SUM_ROWS]):
        values, total = held[row * n : row * n + n], totals[row]
        if folds == 0:
            total[:] = 0
        if flipped:
            for i in range(n):
                total[i] += np.int64(np.int32(values[i] - np.int32(128) * last[i])) << shift
                values[i] = 0
        else:
            for i in range(n):
                total[i] += np.int64(values[i]) << shift
                values[i] = 0
    last[:] = 0
    return folds + 1


BY_NAME = spread_weights, multiply_spots, multiply_alone, multiply_rows, multiply_weights
"""Of kernels that call the last of these, and the first, by name."""
PARTS = turn, add_rows, add_ones
"""Of kernels that call the functions above, see ``instructions.compiled``."""
