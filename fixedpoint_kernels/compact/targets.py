"""What a step of compact states writes, where that lies, and whether a kernel may."""

from collections.abc import Sequence
from operator import is_
from typing import NamedTuple

import numpy as np
from torch import Tensor

from fixedpoint_kernels.compact.records import (
    Codes,
    Kind,
    Row,
    block_shape,
    check_codes,
    flattened,
)
from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.memory import places_on_cpu

__all__ = ["Tables", "Targets"]


class Tables(NamedTuple):
    """Targets, for a kernel.

    Args:
        pointers: Addresses, (t, 8) int64: codes and scales of the master (or float32, and 0), weight, 0 for
            the gradient, codes and scales of two moments (or float32, and 0), 0 where there is none.
        sizes: (t, 6) int64: elements, those before them, blocks, blocks of a row, columns, number of moments.
        streams: (t, 2) int64, counted from the step's: of the weight, -1 without a format, and of the states.
        shapes: Blocks, blocks of a row and columns of each.
        fmts: Of each.
        elements: Of all.
    """

    pointers: np.ndarray
    sizes: np.ndarray
    streams: np.ndarray
    shapes: tuple[tuple[int, ...], ...]
    fmts: tuple[FixedPoint | None, ...]
    elements: int


class Targets:
    """What steps write. Where it lies is looked up once, until it changes.

    Args:
        rows: The parameters; no two share memory.

    Raises:
        ValueError: A master or a moment is not of its weight's shape, or codes are of another kind.

    Attributes:
        written: What others may look at: weights, and masters and moments that are float32.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = tuple(rows)
        for row in self.rows:
            _check(row)
        self._tensors = flattened(row.master for row in rows)
        self._tensors += [row.weight for row in rows]
        self._tensors += flattened(x for row in rows for x in row.moments)
        self.written = [
            x
            for row in self.rows
            for x in (row.weight, row.master, *row.moments)
            if isinstance(x, Tensor)
        ]
        coded = [x for row in rows for x in (row.master, *row.moments) if isinstance(x, Codes)]
        self._codes = [x.codes for x in coded]
        self._floats = [*self.written, *(x.scales for x in coded)]
        self._seen: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self._tables: Tables | None = None

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Say whether ``tensors`` are those of the masters, the weights and the moments, the very same ones."""
        return len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors))

    def find(self) -> Tables | None:
        """Return where the tensors lie; None where a kernel takes them not.

        Raises:
            ValueError: A weight has got memory of another shape.
        """
        # codes are nobody else's: they may be moved, but keep their shapes
        now = tuple(map(Tensor.data_ptr, self._tensors)), tuple(map(Tensor.numel, self.written))
        if now != self._seen or not all(map(Tensor.is_contiguous, self.written)):
            self._seen, self._tables = now, self._looked_up()
        return self._tables

    def _looked_up(self) -> Tables | None:
        for row in self.rows:
            _check(row)  # a weight may have been given memory of another shape
        is_plain = all(type(x) is Tensor and x.is_cpu and x.is_contiguous() for x in self._codes)
        if not is_plain or (self._floats and places_on_cpu(self._floats) is None):
            return None
        pointers = np.array([_pointers(row) for row in self.rows], np.int64).reshape(-1, 8)
        sizes = list(map(_sizes, self.rows))
        streams = [(row.stream if row.fmt else -1, row.noise) for row in self.rows]
        return Tables(
            pointers,
            np.array(sizes, np.int64).reshape(-1, 6),
            np.array(streams, np.int64).reshape(-1, 2),
            tuple(own[2:5] for own in sizes),
            tuple(row.fmt for row in self.rows),
            sum(own[0] for own in sizes),
        )


def _check(row: Row) -> None:
    kinds: tuple[Kind, ...] = ("fixed", "signed", "squares")
    for part, kind in zip((row.master, *row.moments), kinds, strict=False):
        if isinstance(part, Codes):
            check_codes(part, kind, row.weight.shape)
        elif part.shape != row.weight.shape:
            got = tuple(part.shape)
            raise ValueError(f"a state must be of {tuple(row.weight.shape)}, got {got}")


def _pointers(row: Row) -> list[int]:
    own = [_pair(part) for part in (row.master, *row.moments)]
    found = [*own[0], row.weight.data_ptr(), 0, *(x for pair in own[1:] for x in pair)]
    return found + [0] * (8 - len(found))


def _pair(part: Codes | Tensor) -> tuple[int, int]:
    if isinstance(part, Codes):
        return part.codes.data_ptr(), part.scales.data_ptr()
    return part.data_ptr(), 0


def _sizes(row: Row) -> tuple[int, ...]:
    shape = block_shape(row.weight.shape, is_coded=isinstance(row.master, Codes))
    return row.weight.numel(), row.offset, *shape, len(row.moments)
