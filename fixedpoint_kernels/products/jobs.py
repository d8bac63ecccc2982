"""What a thread does with a few images, in Numba: copy them with their border, multiply, write outputs.

What it does for weights is in ``weight_jobs``.

Functions without a decorator know the tiles of one path by name, see ``instructions.compiled``.
Addresses are int64. What a job needs to know is a row of int64, whose places have the names below.
"""

from typing import Any, NamedTuple

import numpy as np

from fixedpoint_kernels.llvm import finishing, tiles
from fixedpoint_kernels.llvm.arrays import view
from fixedpoint_kernels.llvm.calls import inner
from fixedpoint_kernels.products.blocks import Blocks, Runs
from fixedpoint_kernels.products.shapes import Correlation
from fixedpoint_kernels.products.spans import Spans
from fixedpoint_kernels.threads import compiled

__all__ = [
    "Described",
    "copy_images",
    "describe_blocks",
    "describe_outputs",
    "fill",
    "flush",
    "number_of",
    "place_outputs",
    "tile",
    "write_outputs",
    "write_spots",
]

# of the codes, their blocks and jobs
X_IMAGE, X_ROW, DOWN, TOP, LEFT, PIXELS, SLOT_ROWS, PLANE_BYTES, EXTRA, CHANNELS = range(10)
HEIGHT, WIDTH, FLIPPED, COLUMNS, COUNT_ROWS, COUNT_COLUMNS, BUFFER_BYTES, POSITIONS = range(10, 18)
SLOTS, BAND, WORK_BYTES = range(18, 21)
# ``FLIPPED``: 1: signed codes, which tiles may want flipped; 2: they are flipped already where tiles want that
# of a job that writes outputs
DEPTH, RUNS, TABLE, STEP, OUT_IMAGE, OUT_ROW, OUT_COLUMN, OUT_CHANNELS, OUT_SIZE = range(21, 30)
KIND, OFFSETS, STARTS = range(30, 33)
# of a job that adds up products for weights, see ``weight_jobs``
ACROSS, TAPS, GRAD_CHANNELS, LINE, LONGEST, TILE_ROWS, GROUPS, ROW_STARTS = range(21, 29)
TURNED_AT, FLAT_AT, B_AT, ONES, REACH, SUMS_SIZE, GRAD_IMAGE = range(29, 36)
# of blocks that go place by place
SPOTS = 36
RUN_FIRSTS, OUT_PLACES, BEGIN_STEP = range(37, 40)
PAIRS, PAIR_FIRSTS, GRAD_BYTES = range(37, 40)
BYTES = 40  # what tiles must know of codes, see ``tiles.kind_of_bytes``
SPANS = 41  # of first channels, see ``spans``; of weights: of their lines
ALONE = 42  # whether each output has a channel of its own
SUM_ROWS = 43  # of sums for weights
# of weights whose outputs threads share, see ``by_outputs``: most positions of an image; taps and inputs of the
# weight, and rows of sums from one tap to the next; sums from one pair of groups to the next; where memory's parts lie
ROOM, OUT_TAPS, OUT_INPUTS, OUT_APART, PAIR_SUMS, PARTS = range(44, 50)
SHARES = 58  # whether a run is three steps from one output to the next: see ``taps`` of ``tiles.vnni_tile``
COPIES, COPY_OF, MASKS = range(59, 62)  # of gradients without a border, see ``weight_rows``
FIELDS = 62
_FLOAT32, _BY_ROW, _NORMED = (tiles.KINDS[name] for name in tiles.SIDE_BY_SIDE)
FINISHED = 9  # a kind beside ``tiles.KINDS``: the whole gradient of a value, see ``finishing``

_TILE_BYTES = 64 * 32 * 4 + 128  # of the largest tile's sums
wide: Any = None  # the tiles of a path
narrow = shared = alone = wide
FLIPS, NARROW_ROWS, WIDE_ROWS, ALONE_ROWS = 0, 0, 0, 0


class Described(NamedTuple):
    """A row of numbers, and what it has addresses of."""

    row: np.ndarray
    kept: tuple[np.ndarray, ...]


def describe_outputs(
    cut: Blocks,
    runs: Runs,
    part: Correlation,
    out: tuple[int, int, int, int],
    size: int,
    kind: int,
    signed: bool,
    in_int16: int,
    read: Spans,
) -> Described:
    """Describe jobs that write outputs.

    Args:
        cut: Blocks of the codes.
        runs: Of the taps.
        part: Outputs and their taps.
        out: Bytes of an image, a row and a column of results, and channels.
        size: Bytes of a result.
        kind: Of results, ``tiles.KINDS``.
        signed: Whether codes are.
        in_int16: Steps whose sums int16 holds, see ``shapes.steps_in_int16``.
        read: Channels that outputs read.
    """
    d = describe_blocks(cut, part, signed, in_int16, read)
    image, row, column, channels = out
    d[[OUT_IMAGE, OUT_ROW, OUT_COLUMN]] = image, row * part.step[0], column * part.step[1]
    step = part.stride[1] * d[CHANNELS]
    starts = np.arange(4) * 16 * step
    offsets = np.empty(cut.most_positions + 128, np.int64)
    if cut.spots is None:
        place_outputs(offsets, cut.slots, cut.band, d)
    d[[DEPTH, RUNS, TABLE]] = runs.depth, len(runs.table), runs.table.ctypes.data
    d[[STEP, OUT_CHANNELS, OUT_SIZE, KIND]] = step, channels, size, kind
    d[[OFFSETS, STARTS, SPANS]] = offsets.ctypes.data, starts.ctypes.data, read.firsts.ctypes.data
    d[WORK_BYTES] = d[BUFFER_BYTES] + _TILE_BYTES + 12 * (cut.most_positions + 128) + 64
    d[SHARES] = cut.spots is None and step % 4 == 0 and (4 * runs.table[:, 1] == 3 * step).all()
    kept = runs.table, offsets, starts, read.firsts
    if (own := cut.spots) is not None:
        i, j = np.indices(part.counts).reshape(2, -1)
        places = (i * d[OUT_ROW] + j * d[OUT_COLUMN]).astype(np.int64)
        d[[SPOTS, TABLE]] = len(places), own.runs.ctypes.data
        d[[RUN_FIRSTS, OUT_PLACES]] = own.firsts.ctypes.data, places.ctypes.data
        d[[STEP, BEGIN_STEP]] = d[HEIGHT] * d[X_ROW], signed * -(channels // -16) * 64
        kept += own.runs, own.firsts, places
    return Described(d, kept)


def describe_blocks(
    cut: Blocks, part: Correlation, signed: bool, in_int16: int, read: Spans
) -> np.ndarray:
    """Return a row with what is known of codes and their blocks; see ``describe_outputs``."""
    down, top, left, pixels, slot_rows, plane_bytes, extra, channels, height, width = cut.geometry
    d = np.zeros(FIELDS, np.int64)
    d[[X_IMAGE, X_ROW, CHANNELS]] = height * width * channels, width * channels, channels
    d[[HEIGHT, WIDTH, DOWN, TOP, LEFT, PIXELS]] = height, width, down, top, left, pixels
    d[[SLOT_ROWS, PLANE_BYTES, EXTRA, ALONE]] = slot_rows, plane_bytes, extra, read.is_alone
    d[FLIPPED] = signed and not read.is_alone
    d[[COLUMNS, COUNT_ROWS, COUNT_COLUMNS]] = cut.columns, *part.counts
    d[[BUFFER_BYTES, POSITIONS]] = -(cut.buffer_bytes // -64) * 64, cut.most_positions
    d[[SLOTS, BAND, BYTES]] = cut.slots, cut.band, tiles.kind_of_bytes(signed, in_int16)
    return d


@inner
def number_of(order, i):
    """Return the number of image ``i``: that at address ``order``, int64, or ``i`` itself."""
    return view(order, i + 1, np.int64)[i] if order else i


@inner
def fill(d, x, order, first, images, first_row, rows, buffer, flip):
    """Copy images to a buffer, with a border of code 0; flipped, that is 128."""
    down, left, pixels, channels = d[DOWN], d[LEFT], d[PIXELS], d[CHANNELS]
    row_bytes, zero = pixels * channels, 128 if flip else 0
    skipped, begin = max(-left, 0), max(left, 0)
    count = min(d[WIDTH] - skipped, pixels - begin) * channels
    tail = (pixels - begin) * channels - count
    for slot in range(images):
        image = x + number_of(order, first + slot) * d[X_IMAGE]
        for plane in range(down):
            out = buffer + plane * d[PLANE_BYTES] + slot * d[SLOT_ROWS] * row_bytes
            for i in range(rows + d[EXTRA]):
                row = (first_row + i) * down + plane - d[TOP]
                if row < 0 or row >= d[HEIGHT] or count <= 0:
                    tiles.blank(out, row_bytes, zero)
                else:
                    tiles.blank(out, begin * channels, zero)
                    source = image + row * d[X_ROW] + skipped * channels
                    target = out + begin * channels
                    if flip:
                        tiles.copy_flipped(source, target, count)
                    else:
                        tiles.copy(source, target, count)
                    tiles.blank(target + count, tail, zero)
                out += row_bytes
            tiles.blank(out, begin * channels, zero)  # what the last row reads behind it


@compiled()
def place_outputs(offsets, images, rows, d):
    """Write where each position of a job goes, in bytes from its first one, or -1.

    Args:
        offsets: (positions + 128,) int64, to be written.
        images: Of the job.
        rows: Of the job.
        d: Row of numbers.
    """
    n = ((images - 1) * d[SLOT_ROWS] + rows) * d[COLUMNS]
    offsets[: n + 64] = -1
    for slot in range(images):
        for i in range(rows):
            q = (slot * d[SLOT_ROWS] + i) * d[COLUMNS]
            start = slot * d[OUT_IMAGE] + i * d[OUT_ROW]
            for j in range(d[COUNT_COLUMNS]):
                offsets[q + j] = start + j * d[OUT_COLUMN]


@inner
def _offsets_of(d, images, rows, spare):
    """Return the address of where positions go; for fewer images or rows than a whole job has, write it first."""
    if images == d[SLOTS] and rows == d[BAND]:
        return d[OFFSETS]
    place_outputs(view(spare, d[POSITIONS] + 128, np.int64), images, rows, d)
    return spare


@inner
def copy_images(x, order, first, images, step, buffer, size, flip):
    """Copy images, ``step`` bytes apart, one behind the other."""
    for i in range(images):
        source, target = x + number_of(order, first + i) * step, buffer + i * size
        if flip:
            tiles.copy_flipped(source, target, size)
        else:
            tiles.copy(source, target, size)


@inner
def _place_images(out, images, step):
    """Write where each image goes, in bytes, (images + 64,) int64; -1 behind the last."""
    offsets = view(out, images + 64, np.int64)
    for i in range(images):
        offsets[i] = i * step
    offsets[images:] = -1


@inner
def _ask_for_room(d, is_pair, out, step, rows):
    """Let memory come near, ``step`` bytes apart, while a tile is multiplied whose results go there."""
    tiles.come_for_writing(out, step, rows)
    if is_pair and d[OUT_SIZE] == 4:  # 32 channels are two cache lines
        tiles.come_for_writing(out + 64, step, rows)


def tile(d, is_pair, a, table, count, weights, begin, sums):
    """Multiply some places by 16 columns of weights, or 32 where ``is_pair``, and write int32 sums."""
    step, group_bytes = d[STEP], d[DEPTH] * 16
    if is_pair:
        wide(
            d[BYTES], a, d[STARTS], step, table, count, weights, group_bytes, begin, 0, sums, 128
        )  # fmt: skip
    elif d[SHARES]:
        shared(
            d[BYTES], a, d[STARTS], step, table, count, weights, group_bytes, begin, 0, sums, 64
        )  # fmt: skip
    else:
        narrow(
            d[BYTES], a, d[STARTS], step, table, count, weights, group_bytes, begin, 0, sums, 64
        )  # fmt: skip


def write_spots(d, x, first, images, b, begin, scales, statistics, out, work):
    """``write_outputs`` of whole images, place by place; ``begin`` has rows for each place, too."""
    d = view(d, FIELDS, np.int64)
    step = d[STEP]
    buffer = (work + 63) // 64 * 64
    sums = buffer + d[BUFFER_BYTES]
    offsets = sums + _TILE_BYTES
    flips = FLIPS != 0 and d[FLIPPED] != 0
    copy_images(x, np.int64(0), first, images, d[X_IMAGE], buffer, step, flips)
    _place_images(offsets, images, d[OUT_IMAGE])
    firsts = view(d[RUN_FIRSTS], d[SPOTS] + 1, np.int64)
    places = view(d[OUT_PLACES], d[SPOTS], np.int64)
    kind, depth, out_channels = d[KIND], d[DEPTH], d[OUT_CHANNELS]
    by_row = kind == 4 or kind == 5
    group, groups = 0, (out_channels + 15) // 16
    while group < groups:
        pair = group + 1 < groups and WIDE_ROWS > 0
        at_once = WIDE_ROWS if pair else NARROW_ROWS
        sums_step = 128 if pair else 64
        weights = b + group * depth * 16
        for spot in range(d[SPOTS]):
            table, count = d[TABLE] + 24 * firsts[spot], firsts[spot + 1] - firsts[spot]
            start = begin + (spot + 1) * d[BEGIN_STEP] + group * 64
            own_out = out + first * d[OUT_IMAGE] + places[spot]
            for q in range(0, images, at_once):
                room = own_out + q * d[OUT_IMAGE] + group * 16 * d[OUT_SIZE]
                _ask_for_room(d, pair, room, d[OUT_IMAGE], min(at_once, images - q))
                tile(d, pair, buffer + q * step, table, count, weights, start, sums)
                for half in range(2 if pair else 1):
                    channel = (group + half) * 16
                    scale = scales + 4 * (first + q) if by_row else scales + 4 * channel
                    tiles.emit(
                        kind, sums + 64 * half, sums_step, offsets + 8 * q, at_once,
                        own_out + channel * d[OUT_SIZE], min(16, out_channels - channel), scale,
                        statistics + (group + half) * 384,
                    )  # fmt: skip
        group += 2 if pair else 1
    return 0


@inner
def _spread_scales(d, scales, first, images, out):
    """Write the scale of its image for each position."""
    of_rows = view(out, d[POSITIONS] + 128, np.float32)
    of_images = view(scales, first + images, np.float32)
    for slot in range(images):
        here = slot * d[SLOT_ROWS] * d[COLUMNS]
        of_rows[here : here + d[SLOT_ROWS] * d[COLUMNS]] = of_images[first + slot]


def write_rows(
    d, group, pair, first, images, rows, buffer, weights, begin, sums, scales, row_scales, statistics, out
):  # fmt: skip
    """Write 16 channels, or 32 where ``pair``, of rows of outputs that tiles take from end to end.

    group: Number of the first 16 of them, of which ``weights`` and ``begin`` are.
    buffer: Address of their first codes.
    sums: Address of a tile's int32.
    row_scales: Address of a float32 for each position.
    out: Address of their first output.

    The rest is as for ``write_outputs``.
    """
    kind, step, columns, places = d[KIND], d[STEP], d[COLUMNS], d[COUNT_COLUMNS]
    slot_rows, image, row, column = d[SLOT_ROWS], d[OUT_IMAGE], d[OUT_ROW], d[OUT_COLUMN]
    table, runs, is_alone = d[TABLE], d[RUNS], d[ALONE] != 0
    at_once = ALONE_ROWS if is_alone else (WIDE_ROWS if pair else NARROW_ROWS)
    sums_step, halves, half_bytes = 128 if pair else 64, 2 if pair else 1, 16 * d[OUT_SIZE]
    totals, pattern = np.int64(0), np.int64(0)
    if kind == FINISHED:
        more = view(statistics, finishing.FIELDS, np.int64)
        totals, pattern = more[finishing.TOTALS] + 64 * group, more[finishing.PATTERN]
    for slot in range(images):
        for i in range(rows):
            q = (slot * slot_rows + i) * columns
            a, place = buffer + q * step, out + slot * image + i * row
            for _ in range(0, places, at_once):
                _ask_for_room(d, pair, place, column, at_once)
                if is_alone:
                    alone(d[BYTES], a, step, table, runs, weights, sums)
                else:
                    tile(d, pair, a, table, runs, weights, begin, sums)
                for half in range(halves):
                    here, made = place + half * half_bytes, sums + 64 * half
                    if kind == FINISHED:
                        finishing.finish_rows(
                            made, sums_step, at_once, here, column, scales + 4 * (first + slot), statistics,
                            totals + 64 * half + 12 * slot * pattern,
                        )  # fmt: skip
                        continue
                    scale = row_scales + 4 * q if kind == _BY_ROW else scales + 64 * (group + half)
                    own_statistics = statistics + 384 * (group + half)
                    tiles.emit_rows(
                        kind, made, sums_step, at_once, here, column, scale, own_statistics
                    )
                a, place, q = a + at_once * step, place + at_once * column, q + at_once


def write_outputs(d, x, first, images, row, rows, b, begin, scales, statistics, out, work):
    """Multiply some images, or some rows of one, and write the results.

    Args:
        d: Address of a row of numbers, of ``describe_outputs``.
        x: Address of codes.
        first: Image.
        images: How many.
        row: First one of outputs.
        rows: How many.
        b: Address of packed weights.
        begin: Address of (groups, 16) int32 to start sums from.
        scales: Address of float32: 16 a group, or one an image.
        statistics: Address of (groups, 48) int64, to be added to; where results are ``FINISHED``, which rows
            of outputs then must be tiles from end to end, of ``finishing.FIELDS`` int64.
        out: Address of the first image's first output.
        work: Address of ``d[WORK_BYTES]`` bytes.
    """
    at = d
    d = view(at, FIELDS, np.int64)
    if d[SPOTS]:
        return write_spots(at, x, first, images, b, begin, scales, statistics, out, work)
    flips = FLIPS != 0 and d[FLIPPED] != 0
    buffer = (work + 63) // 64 * 64
    sums = buffer + d[BUFFER_BYTES]
    row_scales = sums + _TILE_BYTES
    spare = row_scales + (d[POSITIONS] + 128) * 4
    fill(d, x, np.int64(0), first, images, row, rows, buffer, flips)
    n = ((images - 1) * d[SLOT_ROWS] + rows) * d[COLUMNS]
    offsets = _offsets_of(d, images, rows, spare)
    first_out = out + first * d[OUT_IMAGE] + row * d[OUT_ROW]
    kind, depth, step, out_channels = d[KIND], d[DEPTH], d[STEP], d[OUT_CHANNELS]
    by_row = kind == 4 or kind == 5
    is_side_by_side = kind in (FINISHED, _FLOAT32, _BY_ROW, _NORMED)
    if by_row:
        _spread_scales(d, scales, first, images, row_scales)
    group, groups = 0, (out_channels + 15) // 16
    spans = view(d[SPANS], groups, np.int64)
    while group < groups:
        span = spans[group]
        pair = group + 1 < groups and WIDE_ROWS > 0 and spans[group + 1] == span
        at_once = ALONE_ROWS if d[ALONE] else (WIDE_ROWS if pair else NARROW_ROWS)
        sums_step = 128 if pair else 64
        weights, start = b + group * depth * 16, begin + group * 64
        is_even, halves = d[COUNT_COLUMNS] % at_once == 0, 2 if pair else 1
        if is_even and is_side_by_side and (group + halves) * 16 <= out_channels:
            write_rows(
                d, group, pair, first, images, rows, buffer + span, weights, start, sums, scales, row_scales,
                statistics, first_out + group * 16 * d[OUT_SIZE],
            )  # fmt: skip
            group += halves
            continue
        count, line = 1, n
        if is_even:  # row by row, without what lies between
            count, line = images * rows, d[COUNT_COLUMNS]
        for number in range(count):
            start_q = (number // rows * d[SLOT_ROWS] + number % rows) * d[COLUMNS]
            for q in range(start_q, start_q + line, at_once):
                a = buffer + q * step + span
                if d[ALONE]:
                    alone(d[BYTES], a, step, d[TABLE], d[RUNS], weights, sums)
                else:
                    tile(d, pair, a, d[TABLE], d[RUNS], weights, start, sums)
                for half in range(halves):
                    channel = (group + half) * 16
                    tiles.emit(
                        kind, sums + 64 * half, sums_step, offsets + 8 * q, at_once,
                        first_out + channel * d[OUT_SIZE], min(16, out_channels - channel),
                        row_scales + 4 * q if by_row else scales + 4 * channel,
                        statistics + (group + half) * 384,
                    )  # fmt: skip
        group += halves
    return 0


BY_NAME = write_spots, write_outputs  # those that are called first


@inner
def flush(totals, recent):
    """Add the sums of a job to those of its thread: sums, and both halves of squares.

    Args:
        totals: (groups, 48) int64.
        recent: (groups, 48) int64, of the job; becomes 0.
    """
    for group in range(len(recent)):
        for i in range(16):
            totals[group, i] += recent[group, i]
            square = recent[group, 16 + i]
            totals[group, 16 + i] += square >> 32
            totals[group, 32 + i] += square & 0xFFFFFFFF
            recent[group, i] = 0
            recent[group, 16 + i] = 0
