"""Expected counts of stochastic rounding, for every format at once, from one pass over a tensor.

A value in cell ``[k, k + 1) * lsb`` at distance ``f * lsb`` from its left end rounds to ``k`` with
probability ``1 - f`` and to ``k + 1`` with probability ``f``. So the expected number of values
that land on a grid point needs only two numbers a cell: how many values it holds and the sum of
their ``f``. Two neighbouring cells merge into one of the next coarser format without loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.histogram.reference import Bins

__all__ = ["Grid"]


@dataclass(frozen=True)
class Grid:
    """The cells of a tensor at one fractional length.

    Args:
        fl: Fractional length of the cells.
        first: Code at the left end of the first cell.
        table: Values in each cell, and the sum of their distances from its left end in 2**-24
            steps, shape ``(cells, 2)``, int64.
        bins: The bins of the histograms.
    """

    fl: int
    first: int
    table: np.ndarray
    bins: Bins

    def histograms(self, fmts: Sequence[FixedPoint]) -> np.ndarray:
        """Return the expected counts of rounding to each format, ``(len(fmts), bins)`` float64.

        Raises:
            ValueError: A format is finer than the grid.
        """
        if max((fmt.fl for fmt in fmts), default=self.fl) > self.fl:
            raise ValueError(
                f"this grid serves formats up to fl={self.fl}, got {list(map(str, fmts))}"
            )
        from fixedpoint_kernels.histogram.cpu import grid_histograms  # numba is slow to import

        order = sorted(range(len(fmts)), key=lambda i: -fmts[i].fl)
        rows = [(fmts[i].fl, fmts[i].min_code, fmts[i].max_code) for i in order]
        formats = np.array(rows, np.int64).reshape(-1, 3)
        result = np.empty((len(fmts), self.bins.resolution))
        result[order] = grid_histograms(self.table, self.fl, self.first, formats, self.bins)
        return result
