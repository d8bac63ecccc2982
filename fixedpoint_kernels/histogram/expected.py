"""Expected counts of stochastic rounding, for every format at once, from one pass over a tensor.

A value in cell ``[k, k + 1) * lsb`` at distance ``f * lsb`` from its left end rounds to ``k`` with
probability ``1 - f`` and to ``k + 1`` with probability ``f``. So the expected number of values
that land on a grid point needs only two numbers a cell, how many values it holds and the sum of
their ``f``; and two neighbouring cells merge into one of the next coarser format exactly. The
cells of the finest format are counted on the device, in whole numbers; the rest happens here.
"""

from dataclasses import dataclass

import numpy as np

from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.histogram.reference import Bins

__all__ = ["Grid"]


@dataclass(frozen=True)
class Grid:
    """A tensor's cells at one fractional length.

    Args:
        fl: Fractional length of the cells.
        first: Code at the left end of the first cell.
        counts: Values in each cell, shape ``(cells,)``, float64.
        fractions: Sum of the values' distances from the left end, in cells, shape ``(cells,)``.
        bins: The bins of its histograms.
    """

    fl: int
    first: int
    counts: np.ndarray
    fractions: np.ndarray
    bins: Bins

    def coarser(self) -> "Grid":
        """Return the grid of ``fl - 1``."""
        left = self.first % 2  # pad so that cells pair up as (even, odd)
        pad = left, (len(self.counts) + left) % 2
        counts = np.pad(self.counts, pad).reshape(-1, 2)
        fractions = np.pad(self.fractions, pad).reshape(-1, 2)
        merged = (fractions.sum(1) + counts[:, 1]) / 2  # the odd cell starts half way
        return Grid(self.fl - 1, self.first // 2, counts.sum(1), merged, self.bins)

    def histogram(self, fmt: FixedPoint) -> np.ndarray:
        """Return the expected counts of rounding to ``fmt``, shape ``(resolution,)``, float64.

        ``fmt.fl`` must be the grid's own.
        """
        weights = np.zeros(len(self.counts) + 1)
        weights[:-1] += self.counts - self.fractions
        weights[1:] += self.fractions
        codes = np.arange(self.first, self.first + len(weights)).clip(fmt.min_code, fmt.max_code)
        values = codes.astype(np.float32) * np.float32(fmt.lsb)
        resolution = self.bins.resolution
        places = np.floor(
            (values - np.float32(self.bins.low)) * np.float32(self.bins.inverse_width)
        )
        return np.bincount(places.clip(0, resolution - 1).astype(np.int64), weights, resolution)
