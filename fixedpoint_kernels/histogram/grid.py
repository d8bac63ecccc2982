"""Expected counts of stochastic rounding, for every format at once, from one pass over a tensor.

A value in cell ``[k, k + 1) * lsb`` at distance ``f * lsb`` from its left end rounds to ``k`` with
probability ``1 - f`` and to ``k + 1`` with probability ``f``. So the expected number of values
that land on a grid point needs only two numbers a cell: how many values it holds and the sum of
their ``f``. Two neighbouring cells merge into one of the next coarser format without loss.

Formats finer than the grid need no cells: a step moves a value to another bin only across an edge
that lies within the step, and the few values beside an edge are taken one by one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from fixedpoint_kernels.formats import LONGEST_FL, FixedPoint
from fixedpoint_kernels.histogram import reference
from fixedpoint_kernels.histogram.reference import Bins, Cells
from fixedpoint_kernels.memory import in_memory
from fixedpoint_kernels.operators import kernels_for
from fixedpoint_kernels.rounding.reference import float_bounds

__all__ = ["Expected", "Grid", "grid_histogram"]

_MAX_CELLS = 2**24
kernels_of = kernels_for("histogram")


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
        rows = [_numbers(fmts[i]) for i in order]
        formats = np.array(rows, np.int64).reshape(-1, 3)
        result = np.empty((len(fmts), self.bins.resolution))
        result[order] = grid_histograms(self.table, self.fl, self.first, formats, self.bins)
        return result


class Expected:
    """The counts to expect of a tensor's stochastic rounding, for formats of any step.

    Coarse formats come from a grid, which is counted once. For finer ones the tensor is read again,
    when the first of them is asked for. In both, a value's part of a step counts to 2**-24.

    Args:
        x: Values, any shape, on any device; may be a part of the tensor whose range ``bins`` cover.
        bins: The bins.
        cells: How many cells the grid may have, about.
        fl: Longest fractional length that will be asked for.
        total: Returns the sum of int64 arrays over the processes that hold the parts; None where
            ``x`` is all. Each process must ask for the same formats.
    """

    def __init__(
        self,
        x: Tensor,
        bins: Bins,
        cells: int,
        *,
        fl: int = LONGEST_FL,
        total: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:
        x = in_memory(x)
        finest = math.floor(math.log2(cells * bins.inverse_width * bins.power / bins.resolution))
        own, grid = grid_histogram(x, bins, min(finest, fl))
        if total is not None:
            counts = total(np.concatenate([own.astype(np.int64), grid.table.ravel()]))
            own, table = np.split(counts, [bins.resolution])
            grid = Grid(grid.fl, grid.first, table.reshape(-1, 2), bins)
        self.own = own.astype(np.float64)
        """The histogram of the values, shape ``(resolution,)``, float64."""
        self.fl = grid.fl
        """Fractional length of the grid: longer ones are fine."""
        self._x, self._grid, self._total = x, grid, total

    def histograms(self, fmts: Sequence[FixedPoint]) -> np.ndarray:
        """Return the expected counts of rounding to each format, ``(len(fmts), bins)`` float64."""
        is_fine = [fmt.fl > self.fl for fmt in fmts]
        if not any(is_fine):
            return self._grid.histograms(fmts)
        result = np.empty((len(fmts), len(self.own)))
        result[is_fine] = self._fine([fmt for fmt in fmts if fmt.fl > self.fl])
        result[np.logical_not(is_fine)] = self._grid.histograms(
            [fmt for fmt in fmts if fmt.fl <= self.fl]
        )
        return result

    def _fine(self, fmts: Sequence[FixedPoint]) -> np.ndarray:
        from fixedpoint_kernels.histogram.cpu import moves  # numba is slow to import

        fls = sorted({fmt.fl for fmt in fmts})
        moved = moves(self._beside_edges, fls, self._grid.bins)
        if self._total is not None:
            moved = self._total(moved)
        rows = self.own + moved * 2.0**-24
        return _saturated(rows[[fls.index(fmt.fl) for fmt in fmts]], fmts, self._grid.bins)

    @cached_property
    def _beside_edges(self) -> np.ndarray:
        """Values with an edge between bins less than a fine format's step away, float32."""
        x, bins = self._x.detach().float().reshape(-1), self._grid.bins
        step = 2.0 ** -(self.fl + 1)
        left, right = (reference.place_of(y, bins) for y in (x - step, x + step))
        return x[left != right].cpu().numpy()


def grid_histogram(x: Tensor, bins: Bins, fl: int) -> tuple[np.ndarray, Grid]:
    """Count ``x`` in bins and in the cells of fractional length ``fl``, in one pass.

    ``x`` may be a part of the tensor whose range ``bins`` cover: the counts of all parts add up.

    Returns:
        The histogram of ``x``, shape ``(resolution,)``, float64, and the grid that gives the
        expected counts of every format of fractional length ``fl`` or less.

    Raises:
        ValueError: The range holds more than 2**24 steps.
    """
    first = math.floor(bins.low / bins.power * 2.0**fl)
    width = bins.resolution / (bins.inverse_width * bins.power) * 2.0**fl
    size = math.ceil(width * (1 + 2.0**-20)) + 2  # the float32 width may be a little short
    if size > _MAX_CELLS:
        raise ValueError(
            f"expected counts need at most {_MAX_CELLS} steps in the range, got {size}"
        )
    code = kernels_of(x) if x.numel() else reference
    own, table = code.cells(x.reshape(-1), bins, Cells(fl, first, size))
    return own.cpu().numpy().astype(np.float64), Grid(fl, first, table.cpu().numpy(), bins)


@lru_cache(maxsize=4096)  # the same formats come layer after layer
def _numbers(fmt: FixedPoint) -> tuple[int, int, int]:
    """Return fractional length, smallest and largest code."""
    low, high = float_bounds(fmt)
    return fmt.fl, int(low), int(high)


def _saturated(rows: np.ndarray, fmts: Sequence[FixedPoint], bins: Bins) -> np.ndarray:
    """Move what each format clamps to the bins of its smallest and its largest number.

    Args:
        rows: Counts, shape ``(len(fmts), bins)``.
        fmts: The formats.
        bins: The bins.
    """
    ends = [[code * fmt.lsb for code in float_bounds(fmt)] for fmt in fmts]
    first, last = (
        reference.bin_of(torch.tensor(ends, dtype=torch.float32, device="cpu"), bins).numpy().T
    )
    column, below = np.arange(bins.resolution), np.cumsum(rows, 1)
    below = np.where(column < first[:, None], 0.0, below)
    below = np.where(column >= last[:, None], rows.sum(1, keepdims=True), below)
    return np.diff(below, prepend=0.0)
