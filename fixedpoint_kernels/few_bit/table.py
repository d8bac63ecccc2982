"""The table of a few-bit derivative: where it changes, and what it is between."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

_MOST_LEVELS = 256


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

    def check(self) -> None:
        """Raise unless kernels can read the arrays, which they do without looking at their sizes.

        Raises:
            ValueError: A dtype or shape is not as above, or a code has no level.
        """
        borders, codes, levels = self.borders, self.codes, self.levels
        dtypes = borders.dtype, codes.dtype, levels.dtype
        is_whole = (
            dtypes == (np.float32, np.uint8, np.float32)
            and borders.ndim == codes.ndim == levels.ndim == 1
            and len(codes) == len(borders) + 1
            and 2 <= len(levels) <= _MOST_LEVELS
            and len(levels) == 1 << self.bits
            and codes.max() < len(levels)
        )
        if not is_whole:
            raise ValueError(
                "a table must have float32 borders, one uint8 code more than borders, and 2, 4, ... or "
                f"256 float32 levels, one of each code; got borders {dtypes[0]} of shape "
                f"{borders.shape}, codes {dtypes[1]} of {codes.shape}, levels {dtypes[2]} of "
                f"{levels.shape}"
            )

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
