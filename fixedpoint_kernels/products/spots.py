"""Which taps each place of a small image meets.

A border costs as much as codes do: of a 3x3 kernel on 2x2 places, 16 of 36 products are of codes, and
a block with its border (see ``blocks``) computes 81. Where that is so, each place is a product of its
own, of the taps that meet the image, and the rows of a tile are images.
"""

from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from fixedpoint_kernels.products.shapes import Correlation

__all__ = ["Spots", "spots"]

_MOST = 64  # places; larger images have little border
_GAIN = 1.25  # products with a border over those without, from which on it pays
_GRAIN = 4  # bytes of a row that a tile takes at a time; with more there would be gaps between taps


class Spots(NamedTuple):
    """The places of a correlation's outputs, each with its taps."""

    meets: np.ndarray  # (places, taps) uint8: whether a tap meets the image
    runs: np.ndarray  # (runs, 3) int64: byte offset in an image, steps of 4 bytes, those before
    firsts: np.ndarray  # (places + 1,) int64: first run of each place
    pairs: np.ndarray  # (pairs, 3) int64: place of an input, how many in a row, place of the output
    pair_firsts: np.ndarray  # (taps + 1,) int64: first pair of each tap


@lru_cache(maxsize=256)
def spots(part: Correlation, size: tuple[int, int], channels: int, grain: int) -> Spots | None:
    """Return the places of a correlation, if it pays to go through them one by one.

    Args:
        part: What is computed.
        size: Height and width of an input.
        channels: Bytes of a pixel.
        grain: Bytes of a row that a tile takes at a time.
    """
    (height, width), (rows, columns) = size, part.counts
    if grain != _GRAIN or channels % _GRAIN or not 0 < rows * columns <= _MOST:
        return None
    inputs = np.full((rows * columns, len(part.taps)), -1)
    for (i, j), (t, (r, c)) in product(
        np.ndindex(rows, columns), enumerate(zip(part.rows, part.columns, strict=True))
    ):
        row, column = i * part.stride[0] + r, j * part.stride[1] + c
        if 0 <= row < height and 0 <= column < width:
            inputs[i * columns + j, t] = row * width + column
    meets = inputs >= 0
    tall, wide = (max(n) - min(n) for n in (part.rows, part.columns))
    bordered = (rows + tall // part.stride[0]) * (columns + wide // part.stride[1])
    if not meets.any() or bordered * len(part.taps) < _GAIN * meets.sum():
        return None
    steps = channels // _GRAIN
    runs = [_joined([(p, t) for t, p in enumerate(row) if p >= 0]) for row in inputs]
    pairs = [_joined([(p, q) for q, p in enumerate(row) if p >= 0]) for row in inputs.T]
    table = np.array([run for row in runs for run in row], np.int64)
    return Spots(
        meets.astype(np.uint8),
        table * (channels, steps, steps),
        _starts(runs),
        np.array([pair for row in pairs for pair in row], np.int64).reshape(-1, 3),
        _starts(pairs),
    )


def _joined(pairs: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Join pairs of numbers that go on by 1 together: first, how many, second."""
    found: list[tuple[int, int, int]] = []
    for a, b in pairs:
        if found and found[-1][0] + found[-1][1] == a and found[-1][2] + found[-1][1] == b:
            found[-1] = found[-1][0], found[-1][1] + 1, found[-1][2]
        else:
            found.append((a, 1, b))
    return found


def _starts(rows: list[list[tuple[int, int, int]]]) -> np.ndarray:
    return np.cumsum([0, *map(len, rows)], dtype=np.int64)
