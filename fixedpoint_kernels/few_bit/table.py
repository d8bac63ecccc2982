"""The table of a few-bit derivative: where it changes, and what it is between."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class Table:
    """A piecewise constant derivative: ``levels[codes[j]]`` between borders ``j - 1`` and ``j``.

    An ``x`` equal to a border lies left of it; the outer pieces reach to infinity; NaN takes the
    code of the first piece. Codes are numbered as a Gray code, so that the codes of neighbouring
    levels differ in one bit and encoding costs one exclusive or a border.

    Attributes:
        borders: Ascending, shape (m,), float32.
        codes: Of the m + 1 pieces, uint8.
        levels: Of each code, shape (2**bits,), float32; a code that no piece has is 0.
        loss: The integral of ``(f' - level)**2 * weight``.
    """

    borders: np.ndarray
    codes: np.ndarray
    levels: np.ndarray
    loss: float

    @cached_property
    def bits(self) -> int:
        """Bits a code, 1 to 8: not more than the levels need."""
        return len(self.levels).bit_length() - 1

    @property
    def is_exact(self) -> bool:
        """Whether the table is the derivative itself."""
        return self.loss == 0

    @cached_property
    def key(self) -> str:
        """A name made of the contents: equal tables have equal keys in every process."""
        digest = hashlib.sha256(len(self.borders).to_bytes(4, "little"))
        for part in (self.borders, self.codes, self.levels):
            digest.update(part.tobytes())
        return digest.hexdigest()[:24]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return the level at each ``x``, float32."""
        points = np.asarray(x)
        position = np.searchsorted(self.borders, points, side="left")
        return self.levels[self.codes[np.where(np.isnan(points), 0, position)]]


def number(borders: np.ndarray, ranks: np.ndarray, levels: np.ndarray, loss: float = 0.0) -> Table:
    """Make a table from pieces whose levels are numbered 0, 1, 2, ...

    Args:
        borders: Ascending, shape (m,).
        ranks: The level of each piece, shape (m + 1,).
        levels: At most 256; neighbours get codes that differ in one bit.
        loss: Of the table.
    """
    gray = np.arange(len(levels)) ^ (np.arange(len(levels)) >> 1)
    padded = np.zeros(max(2, 1 << (len(levels) - 1).bit_length()), np.float32)
    padded[gray] = levels
    return Table(np.asarray(borders, np.float32), gray[ranks].astype(np.uint8), padded, float(loss))


def steps_of(table: Table) -> int:
    """Return the comparisons of a binary search among the borders, at least one."""
    return max(1, len(table.borders).bit_length())
