"""Integrals of a derivative and its square under a weight, over any part of an interval."""

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]
Weight = Literal["uniform", "normal"] | Function

_NODES, _SHARES = np.polynomial.legendre.leggauss(5)
_JUMP = 1e-6  # of the range of f': what a change over no distance must exceed


class Integrals:
    """Prefix integrals of w, f'w and f'^2 w over cells whose borders include the jumps of f'.

    Args:
        function: f; differentiated by autograd in float64.
        weight: w: ``"uniform"``, ``"normal"``, or a function.
        interval: Where w counts.
        cells: Of equal width; a jump inside one cuts it.

    Raises:
        TypeError: ``function`` is none.
        ValueError: It does not work element by element, its derivative is not finite on the
            interval, or the weight is no such weight.
    """

    def __init__(
        self, function: Function, weight: Weight, interval: tuple[float, float], cells: int
    ) -> None:
        if not callable(function):
            raise TypeError(f"the function must be one of a tensor, as torch.sin, got {function!r}")
        self._function, self._weight = function, weight
        grid = np.linspace(*interval, cells + 1)
        self.jumps = _find_jumps(self.derivative, grid)
        self._check_elements(torch.from_numpy(grid))
        self.grid = np.unique(np.concatenate([grid, self.jumps]))
        self.cells = self._integrate(self.grid[:-1], self.grid[1:])
        self.prefix = np.concatenate([np.zeros((3, 1)), self.cells.cumsum(1)], 1)

    def derivative(self, x: np.ndarray) -> np.ndarray:
        """Return f' at points of any shape.

        Raises:
            ValueError: The function changes the shape, or the derivative is not finite.
        """
        points = torch.from_numpy(np.ascontiguousarray(x, np.float64)).requires_grad_()
        with torch.enable_grad():
            y = self._function(points)
            if not isinstance(y, Tensor) or y.shape != points.shape:
                came = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
                raise ValueError(f"the function must keep the shape {tuple(x.shape)}, got {came}")
            if not y.requires_grad:
                return np.zeros_like(x)
            (slope,) = torch.autograd.grad(y.sum(), points)
        if not slope.isfinite().all():
            raise ValueError("the derivative must be finite on the interval, got inf or NaN")
        return slope.numpy()

    def _check_elements(self, points: Tensor) -> None:
        """Refuse functions whose values depend on other points than their own."""
        with torch.no_grad():
            whole, part = self._function(points)[::3], self._function(points[::3])
        size = whole.nan_to_num(0.0, 0.0, 0.0).abs().max()
        if not torch.isclose(whole, part, rtol=0, atol=1e-6 * float(size), equal_nan=True).all():
            raise ValueError(
                "the function must work element by element, got one whose values depend on other "
                "elements"
            )

    def weight(self, x: np.ndarray) -> np.ndarray:
        """Return w at points of any shape.

        Raises:
            ValueError: The weight is no known name, changes the shape, or is negative somewhere.
        """
        if self._weight == "uniform":
            return np.ones_like(x)
        if self._weight == "normal":
            return np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        if not callable(self._weight):
            raise ValueError(
                f"weight must be 'uniform', 'normal' or a function, got {self._weight!r}"
            )
        w = self._weight(torch.from_numpy(x))
        if not isinstance(w, Tensor) or w.shape != x.shape or not (w >= 0).all():
            came = f"shape {tuple(w.shape)}" if isinstance(w, Tensor) else type(w).__name__
            if isinstance(w, Tensor) and w.shape == x.shape:
                came = f"numbers from {w.min():.6g} to {w.max():.6g}"
            raise ValueError(
                f"weight must give a tensor with one number of at least 0 for each point, got {came}"
            )
        return w.detach().numpy()

    def values(self) -> np.ndarray:
        """Return the mean of f' in each cell."""
        middle = self.derivative((self.grid[:-1] + self.grid[1:]) / 2)
        w, moment, _ = self.cells
        return np.divide(moment, w, out=middle, where=w > 0)

    def upto(self, x: np.ndarray) -> np.ndarray:
        """Return the three integrals from the start of the interval to each ``x``: (3, len(x))."""
        cell = np.searchsorted(self.grid, x, side="right").clip(1, len(self.grid) - 1) - 1
        return self.prefix[:, cell] + self._integrate(self.grid[cell], x)

    def _integrate(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        half = (stop - start) / 2
        x = (start + stop) / 2 + half * _NODES[:, None]
        slope, w = self.derivative(x), self.weight(x)
        powers = np.stack([w, w * slope, w * slope * slope])
        return (powers * _SHARES[:, None]).sum(1) * half


def _find_jumps(derivative: Callable[[np.ndarray], np.ndarray], grid: np.ndarray) -> np.ndarray:
    """Bisect each cell towards its larger change: what does not shrink is a jump."""
    slope = derivative(grid)
    limit = _JUMP * max(float(np.ptp(slope)), 1e-300)
    steep = np.flatnonzero(np.abs(np.diff(slope)) > limit)
    a, b, at_a, at_b = grid[steep], grid[steep + 1], slope[steep], slope[steep + 1]
    for _ in range(60):
        middle = (a + b) / 2
        at = derivative(middle)
        left = np.abs(at - at_a) > np.abs(at_b - at)
        a, at_a = np.where(left, a, middle), np.where(left, at_a, at)
        b, at_b = np.where(left, middle, b), np.where(left, at, at_b)
    jumps = ((a + b) / 2)[np.abs(at_b - at_a) > limit]
    rounded = jumps.round(6)
    return np.unique(np.where(np.abs(rounded - jumps) < 1e-9, rounded, jumps))
