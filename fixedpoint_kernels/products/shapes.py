"""Which inputs meet which weights: the geometry that every execution shares."""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from fixedpoint_kernels.formats import FixedPoint

# of uint8 and int8 codes, at their extremes; one more could pass int32
LONGEST_SUM = (2**31 - 1) // (255 * 128)
PIECE = 2**16  # positions, a multiple of 64: int32 holds so many products
LOWEST_EXPONENT, NOT_FINITE = -126, 128
GRADIENTS = FixedPoint(8, 0)
"""Codes of gradients, of whatever power of two: what they may be."""


def sums_fit(shape: Sequence[int], groups: int = 1, longest: int = LONGEST_SUM) -> bool:
    """Say whether int32 holds a layer's sums, forward and of its input's gradient.

    Args:
        shape: Of its weight: outputs, inputs of a group, and a kernel's size if it has one.
        groups: Of channels.
        longest: So many products a sum has at most, forward.
    """
    outputs, inputs, *kernel = shape
    taps = math.prod(kernel)
    return inputs * taps <= longest and outputs // groups * taps <= LONGEST_SUM


def most_squares(products: int) -> int:
    """Return how many squares int64 holds, of sums of so many products."""
    return (2**63 - 1) // max(255 * 128 * products, 1) ** 2


class Window(NamedTuple):
    """How a kernel moves over its input, height first; see ``torch.nn.functional.conv2d``."""

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    def outputs(self, size: tuple[int, int], kernel: tuple[int, int]) -> tuple[int, int]:
        """Return height and width of the output; 0 or less where the kernel is larger."""
        numbers = zip(size, kernel, self.stride, self.padding, self.dilation, strict=True)
        height, width = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in numbers)
        return height, width


class Correlation(NamedTuple):
    """One part of the outputs, each a sum over the same taps.

    Output ``(i, j)`` of ``counts`` reads tap ``t`` at row ``i * stride[0] + rows[t]`` and column
    ``j * stride[1] + columns[t]``, 0 outside the input, and is written at row
    ``first[0] + i * step[0]`` and column ``first[1] + j * step[1]``.
    """

    taps: tuple[int, ...]  # kernel row * kernel width + kernel column
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    stride: tuple[int, int]
    counts: tuple[int, int]
    first: tuple[int, int]
    step: tuple[int, int]


@lru_cache(maxsize=256)
def forward(window: Window, size: tuple[int, int], kernel: tuple[int, int]) -> Correlation:
    """Return the correlation of a forward product, of an input of this size."""
    rows, columns = ([k * d - p for k in range(n)] for n, d, p in _axes(window, kernel))
    places = list(product(rows, columns))
    return Correlation(
        taps=tuple(range(len(places))),
        rows=tuple(row for row, _ in places),
        columns=tuple(column for _, column in places),
        stride=window.stride,
        counts=window.outputs(size, kernel),
        first=(0, 0),
        step=(1, 1),
    )


@lru_cache(maxsize=256)
def input_gradient(
    window: Window, size: tuple[int, int], kernel: tuple[int, int]
) -> tuple[Correlation, ...]:
    """Return the correlations of an input gradient of this size, over the output's gradient.

    Inputs ``stride`` apart share their taps: one correlation for each place in a stride. Those that
    no output read are in none.
    """
    parts = []
    for first in product(range(window.stride[0]), range(window.stride[1])):
        axes = [_phase(*numbers) for numbers in zip(first, size, kernel, *window[:3], strict=True)]
        (row_taps, rows, height), (column_taps, columns, width) = axes
        if row_taps and column_taps and height > 0 and width > 0:
            parts.append(
                Correlation(
                    taps=tuple(i * kernel[1] + j for i, j in product(row_taps, column_taps)),
                    rows=tuple(row for row, _ in product(rows, columns)),
                    columns=tuple(column for _, column in product(rows, columns)),
                    stride=(1, 1),
                    counts=(height, width),
                    first=first,
                    step=window.stride,
                )
            )
    return tuple(parts)


def covers(parts: tuple[Correlation, ...], size: tuple[int, int]) -> bool:
    """Say whether correlations write every place of a result."""
    return sum(part.counts[0] * part.counts[1] for part in parts) == size[0] * size[1]


def _phase(
    first: int, size: int, kernel: int, stride: int, padding: int, dilation: int
) -> tuple[list[int], list[int], int]:
    """Return taps and their places along one axis, nearest place first, and how many inputs."""
    places = [(first + padding - k * dilation, k) for k in range(kernel)]
    met = sorted((place // stride, k) for place, k in places if place % stride == 0)
    return [k for _, k in met], [place for place, _ in met], -((first - size) // stride)


def _axes(window: Window, kernel: tuple[int, int]) -> zip:
    return zip(kernel, window.dilation, window.padding, strict=True)


def steps_in_int16(a: FixedPoint, b: FixedPoint) -> int:
    """Return of how many steps int16 holds the sums, 2 at most; a step adds two products.

    Args:
        a: Codes that go in as unsigned bytes: signed ones as ``code + 128``.
        b: Codes that go in as they are.
    """
    return steps_of_codes(a.max_code + 128 * a.signed, max(-b.min_code, b.max_code))


def steps_of_codes(a: int, b: int) -> int:
    """See ``steps_in_int16``; of the largest byte, and the largest magnitude."""
    return min(2, (2**15 - 1) // max(1, 2 * a * b))


def shift_room(positions: int) -> int:
    """Return by how many bits a sum over ``positions`` products of codes may move in int64."""
    return 62 - (255 * 128 * positions).bit_length()
