"""Blocks of a correlation on a CPU: what a thread copies, with a border, and works on at once."""

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fixedpoint_kernels.products.shapes import LONGEST_SUM, Correlation
from fixedpoint_kernels.products.spans import Spans
from fixedpoint_kernels.products.spots import Spots, spots

BLOCK_BYTES = 2**17  # of codes with their border: they and what is made of them fit in a cache
_ROWS = 64  # that a tile reads at most, whether there are so many or not


class Blocks(NamedTuple):
    """Where the codes of a block lie, and its jobs.

    A block holds whole images one below the other, or rows of one image. Its codes lie in
    ``stride[0]`` planes: rows that are so far apart in the image are neighbours in their plane.
    Position ``q`` of a block is column ``q % columns`` of row ``q // columns``; one step of ``q``
    is ``stride[1]`` pixels, anywhere. Positions beyond the last output of a row are computed, and
    dropped. Between rows, and between images, one border serves both neighbours.
    """

    # row step, border above, border left, pixels and rows from one to the next, bytes of a plane,
    # rows more than outputs have, channels, height and width of an image
    geometry: tuple[int, ...]
    jobs: np.ndarray  # (jobs, 4) int64: first image, images, first row of outputs, rows
    slots: int  # images of a job, at most
    band: int  # rows of a job, at most
    columns: int  # positions a row
    slot_rows: int  # rows from one image of a block to the next
    places: np.ndarray  # (taps,) int64: position of each tap's pixel, relative to the first
    planes: np.ndarray  # (taps,) int64: which plane it is in
    most_positions: int
    buffer_bytes: int
    spots: Spots | None = None  # then a block holds whole images without a border, place by place


@lru_cache(maxsize=256)
def blocks(  # noqa: PLR0913
    correlation: Correlation,
    images: int,
    size: tuple[int, int],
    channels: int,
    threads: int,
    positions: int = LONGEST_SUM,
    grain: int = 0,
    block_bytes: int = BLOCK_BYTES,
) -> Blocks:
    """Return the blocks of a correlation over ``images`` images of ``size``.

    Args:
        correlation: What is computed.
        images: How many.
        size: Of an input.
        channels: Bytes of a pixel.
        threads: That share the jobs: as many for each, in a row. If there are more than one, each gets two
            jobs at least if there are so many images.
        positions: Most positions of a block, if one row has no more.
        grain: Bytes of a row that a tile takes at a time, if small images may go place by place.
        block_bytes: Most bytes of a block's codes, if a few rows have no more.
    """
    (down, across), (height, width) = correlation.stride, correlation.counts
    top, left = -min(correlation.rows), -min(correlation.columns)
    tall, wide = max(correlation.rows) + top, max(correlation.columns) + left
    pixels = _shared(width, across, left, size[1], wide)
    pixels = -(pixels // -across) * across
    extra = tall // down
    slot = _shared(height, 1, top, size[0], tall) if down == 1 else height + extra
    columns, row_bytes = pixels // across, pixels * channels
    most_rows = max(1, positions // columns)
    rows = min(height, most_rows)
    if slot * row_bytes * down > 2 * block_bytes:
        rows = min(rows, max(block_bytes // (row_bytes * down), 4 * extra, 1))
    slots = 1
    if rows == height:
        most = min(block_bytes // (slot * row_bytes * down), 1 + (most_rows - rows) // slot)
        slots = max(1, _shared_alike(images, most, threads))
    plane_rows = (slots - 1) * slot + rows + extra + 1
    plane_bytes = -((plane_rows * row_bytes + 128) // -64) * 64
    geometry = [down, top, left, pixels, slot, plane_bytes, extra, channels, *size]
    taps = list(zip(correlation.rows, correlation.columns, strict=True))
    found = Blocks(
        geometry=tuple(geometry),
        jobs=_jobs(images, slots, height, rows),
        slots=slots,
        band=rows,
        columns=columns,
        slot_rows=slot,
        places=np.array([(r + top) // down * pixels + c + left for r, c in taps], np.int64),
        planes=np.array([(r + top) % down for r, _ in taps], np.int64),
        most_positions=((slots - 1) * slot + rows) * columns,
        buffer_bytes=down * plane_bytes + _ROWS * across * channels + 128,
    )
    own = spots(correlation, size, channels, grain)
    if own is None:
        return found
    image_bytes = size[0] * size[1] * channels
    most = min(block_bytes // image_bytes, positions // (height * width))
    slots = _shared_alike(images, most, threads, 8)  # a row of a tile is an image
    if slots < 8:
        return found
    return found._replace(
        spots=own,
        jobs=_jobs(images, slots, height, height),
        slots=slots,
        band=height,
        most_positions=slots * height * width,
        buffer_bytes=(slots + 16) * image_bytes + 128,
    )


def _shared_alike(images: int, most: int, threads: int, multiple: int = 1) -> int:
    """Return how many images a job has, so that the thread with most of them has as few as can be.

    Of equals the largest, a ``multiple`` between half of ``most`` and ``most``; 0 if there is none.
    """
    most = min(most, images // (2 * threads) if threads > 1 else images)
    most -= most % multiple

    def busiest(slots: int) -> int:
        jobs = -(images // -slots)
        ends = [min(images, jobs * i // threads * slots) for i in range(threads + 1)]
        return max(end - start for start, end in pairwise(ends))

    found = range(most, most // 2, -multiple)
    return min(found, key=busiest, default=0)


def _shared(count: int, step: int, border: int, size: int, reach: int) -> int:
    """Return pixels from one row to the next, where what follows a row is the next one's border."""
    need = (count - 1) * step + reach + 1
    return max(count * step, min(border + size, need), need - max(border, 0), border)


def _jobs(images: int, slots: int, height: int, rows: int) -> np.ndarray:
    firsts = range(0, images, slots)
    bands = range(0, height, rows)
    jobs = [(i, min(slots, images - i), j, min(rows, height - j)) for i in firsts for j in bands]
    return np.array(jobs, np.int64).reshape(-1, 4)


class Runs(NamedTuple):
    """Taps that lie one after the other in memory, read as one."""

    table: np.ndarray  # (runs, 3) int64: byte offset, steps of ``grain`` bytes, those before
    offsets: np.ndarray  # (taps,) int64: of each tap in the bytes of a column of weights
    depth: int  # bytes of such a column


def runs(blocks: Blocks, grain: int, read: Spans) -> Runs:
    """Return the runs of a block's taps, each filled up to a multiple of ``grain`` bytes.

    Args:
        blocks: That taps lie in.
        grain: Bytes of a row that a tile takes at a time.
        read: Channels that outputs read of each tap; alone, each tap is a run, with a float32 a column.
    """
    starts = blocks.planes * blocks.geometry[5] + blocks.places * blocks.geometry[7]
    if read.is_alone:
        number = np.arange(len(starts))
        steps = np.stack([starts, np.ones_like(starts), number], axis=1)
        return Runs(steps, 4 * number, 4 * len(starts))
    channels = read.channels
    table: list[list[int]] = []
    offsets, depth, end = [], 0, None
    for start in starts.tolist():
        if start != end:
            depth = -(depth // -grain) * grain
            table.append([start, 0])
        offsets.append(depth)
        table[-1][1] += channels
        depth, end = depth + channels, start + channels
    lengths = [-(length // -grain) for _, length in table]
    before = np.cumsum([0, *lengths])[:-1]
    steps = np.array([[start for start, _ in table], lengths, before], np.int64).T.copy()
    return Runs(steps, np.array(offsets), -(depth // -grain) * grain)
