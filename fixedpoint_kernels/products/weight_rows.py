"""Jobs of ``weight_jobs`` whose codes and gradients are read as they lie, in Numba: no border beside a row, none copied.

Where a convolution keeps the size of its images, rows of inputs follow each other as rows of outputs do. A tap of
another column then meets, at one end of each row, a code of the row beside it. So each column that taps lie in has a
copy of the gradient, which is 0 there. With a border (see ``blocks``) one place in 9, 17 or 33 would be of it, for
rows of 8, 16 or 32, and codes and gradients would be copied before they are laid out.
"""

import numpy as np

from fixedpoint_kernels.llvm import tiles
from fixedpoint_kernels.llvm.arrays import view
from fixedpoint_kernels.llvm.calls import inner
from fixedpoint_kernels.products.blocks import Blocks
from fixedpoint_kernels.products.jobs import (
    B_AT,
    BAND,
    BUFFER_BYTES,
    CHANNELS,
    COPIES,
    COPY_OF,
    EXTRA,
    GRAD_CHANNELS,
    GRAD_IMAGE,
    GROUPS,
    HEIGHT,
    LINE,
    LONGEST,
    MASKS,
    ROW_STARTS,
    SLOT_ROWS,
    SPANS,
    TILE_ROWS,
    TOP,
    TURNED_AT,
    WIDTH,
    WORK_BYTES,
    X_IMAGE,
    Described,
    number_of,
)
from fixedpoint_kernels.products.shapes import PIECE, Correlation
from fixedpoint_kernels.products.spans import Spans

__all__ = ["describe_rows", "lay_out_rows", "line_bytes", "runs_of_rows", "suits"]

_GRAIN = 4  # positions that a tile takes at a time
_LEAD = 64  # bytes of a line before its first row


def suits(cut: Blocks, part: Correlation, outputs: int, signed: bool, grain: int) -> bool:
    """Say whether a job's rows may lie without a border.

    Args:
        cut: Blocks of the codes.
        part: Outputs and their taps.
        outputs: Channels of the gradient.
        signed: Whether codes are: their border would not be 0 where tiles want them flipped.
        grain: Bytes of a row that a tile takes at a time.
    """
    channels, height, width = cut.geometry[-3:]
    columns = set(part.columns)
    is_whole = cut.band == height and width % _GRAIN == height * width % 16 == 0
    return (
        (grain, signed, cut.spots) == (_GRAIN, False, None)
        and (part.stride, part.counts) == ((1, 1), (height, width))
        and channels % 16 == outputs % 16 == 0
        and (width % 16 == 0 or is_whole)
        and min(part.rows) <= 0 <= max(part.rows)
        and len(columns) <= tiles.MASKS
        and max(map(abs, columns)) <= _GRAIN
        and cut.slots * cut.band * width <= PIECE
    )


def line_bytes(held: int) -> int:
    """Return how far from each other lines of as many bytes lie: not all in one set of a cache."""
    line = -(held // -64) * 64
    return line + 64 * (line % 512 == 0)


def describe_rows(d: np.ndarray, cut: Blocks, part: Correlation, read: Spans) -> Described:
    """Describe such jobs, which ``suits`` must allow.

    Args:
        d: Row of numbers, with what all jobs for weights have.
        cut: Blocks of the codes.
        part: Outputs and their taps.
        read: Channels that outputs read.
    """
    channels, taps, width = int(d[CHANNELS]), len(part.taps), int(d[WIDTH])
    blocks = -(read.channels // -16)
    held = ((cut.slots - 1) * cut.slot_rows + cut.band + int(d[EXTRA])) * width
    line = line_bytes(_LEAD + held + 64)  # what is blanked ends up to 63 bytes later
    firsts = _LEAD + (np.array(part.rows) + d[TOP]) * width + np.array(part.columns)
    starts = (firsts[:, None] + np.arange(blocks) * 16 * line).reshape(-1)
    columns = sorted(set(part.columns))
    copy_of = np.array([columns.index(column) for column in part.columns], np.int64)
    masks, lines = np.array([_masks(column) for column in columns]).T.copy(), read.firsts * line
    longest = -(cut.slots * cut.band * width // -64) * 64
    # the last outputs in groups read lines behind the last channel
    turned = (channels + 16 * blocks * (read.groups > 1)) * line + 128
    table, turned = -(24 * cut.slots // -64) * 64, -(turned // -64) * 64
    d[[LINE, LONGEST, SPANS]] = line, longest, lines.ctypes.data
    d[[TILE_ROWS, ROW_STARTS]] = taps * blocks, starts.ctypes.data
    d[[BUFFER_BYTES, TURNED_AT, B_AT]] = table, table, table + turned
    d[[COPIES, COPY_OF, MASKS]] = len(columns), copy_of.ctypes.data, masks.ctypes.data
    d[WORK_BYTES] = d[B_AT] + len(columns) * d[GROUPS] * longest * 16 + 64
    return Described(d, (starts, copy_of, masks, lines))


def _masks(column: int) -> np.ndarray:
    """Return which of four gradients taps of a column leave: of any, at the first of a row, at the last, at both."""
    first = np.arange(_GRAIN) >= -column
    last = np.arange(_GRAIN) < _GRAIN - column
    kept = np.stack([np.full(_GRAIN, True), first, last, first & last])
    return (kept * np.uint8(255)).astype(np.uint8).view(np.int32)[:, 0]


@inner
def lay_out_rows(d, x, order, first, images, row, rows, grad, work):
    """``spread_weights`` of such jobs; returns positions, a multiple of 4."""
    buffer, width, grads = (work + 63) // 64 * 64, d[WIDTH], d[GRAD_CHANNELS]
    own, copy_bytes = rows * width, d[GROUPS] * d[LONGEST] * 16
    for i in range(images):
        number = number_of(order, first + i)
        image, out = x + number * d[X_IMAGE], buffer + d[B_AT] + i * own * 16
        source = grad + number * d[GRAD_IMAGE] + row * width * grads
        column = 0
        for here in range(0, own, 4):
            if column == 0:
                tiles.come(image + (row * width + here) * d[CHANNELS], width * d[CHANNELS])
            masks = d[MASKS] + 4 * d[COPIES] * ((column == 0) + 2 * (column + 4 == width))
            for group in range(d[GROUPS]):
                target = out + (group * d[LONGEST] + here) * 16
                own_grad = source + here * grads + 16 * group
                tiles.interleave_masked(own_grad, grads, target, copy_bytes, masks, d[COPIES])
            column = column + 4 if column + 4 < width else 0
        place = buffer + d[TURNED_AT] + _LEAD + i * d[SLOT_ROWS] * width
        _turn_rows(d, image, row - d[TOP], rows + d[EXTRA], place)
    return images * own


@inner
def _turn_rows(d, image, row, rows, out):
    """Lay out rows of an image by channel, from ``row`` on, 0 where there are none."""
    channels, width, line = d[CHANNELS], d[WIDTH], d[LINE]
    above, below = max(-row, 0), max(row + rows - d[HEIGHT], 0)
    n, place = (rows - above - below) * width, out + above * width
    source = image + (row + above) * width * channels
    for c in range(channels):
        tiles.blank(out + c * line, above * width, 0)
    for q in range(0, n, 16):
        for c in range(0, channels, 16):
            tiles.transpose(source + q * channels + c, channels, place + c * line + q, line)
    for c in range(channels):
        tiles.blank(place + c * line + n, below * width, 0)


@inner
def runs_of_rows(d, positions, out):
    """Write what tiles read, see ``tiles.runs_of``: places of an image follow each other; return how many runs."""
    width, size = d[WIDTH], d[BAND] * d[WIDTH]
    if d[SLOT_ROWS] == d[BAND]:  # and so do images
        size = positions
    count = (positions + size - 1) // size
    table = view(out, (count, 3), np.int64)
    for i in range(count):
        table[i, 0] = i * d[SLOT_ROWS] * width
        table[i, 1] = min(size, positions - i * size) // _GRAIN
        table[i, 2] = i * size // _GRAIN
    return count
