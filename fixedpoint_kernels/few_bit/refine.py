"""Newton's method on the borders of a partition, starting beside the optimum."""

from dataclasses import dataclass

import numpy as np

from fixedpoint_kernels.few_bit.integrals import Integrals

_STEP = 1e-5  # of the difference quotient for f''
_ROUNDS = 40


@dataclass(frozen=True, eq=False)
class Partition:
    """Pieces of the axis, each with the number of a level.

    Attributes:
        borders: Inner borders, ascending, shape (m,).
        codes: The level of each piece, shape (m + 1,).
    """

    borders: np.ndarray
    codes: np.ndarray

    def merged(self, levels: np.ndarray, closeness: float) -> "Partition":
        """Give equal levels one code, neighbours of one code one piece, and codes from 0 up.

        Codes follow the order of their levels.
        """
        order = np.argsort(levels, kind="stable")
        order = order[np.isin(order, self.codes)]
        rises = np.diff(levels[order], prepend=-np.inf) > closeness
        number = np.zeros(len(levels), np.int64)
        number[order] = np.cumsum(rises) - 1
        codes = number[self.codes]
        inner = np.flatnonzero(np.diff(codes))
        return Partition(self.borders[inner], codes[np.append(inner, len(codes) - 1)])


def best_levels(integrals: Integrals, partition: Partition) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the best level of each code, its weight, and the loss (equations 3 and 4)."""
    borders, codes = partition.borders, partition.codes
    upto = np.concatenate([np.zeros((3, 1)), integrals.upto(borders)], 1)
    pieces = np.diff(upto, append=integrals.prefix[:, -1:])
    sums = np.zeros((3, codes.max() + 1))
    for row, piece in zip(sums, pieces, strict=True):
        np.add.at(row, codes, piece)
    weight, moment, square = sums
    levels = np.divide(moment, weight, out=np.zeros_like(weight), where=weight > 0)
    return levels, weight, float((square - levels * moment).sum())


def refine(integrals: Integrals, start: Partition) -> tuple[Partition, np.ndarray, float]:
    """Move the borders to where f' is the mean of the levels beside it (equation 5).

    Borders on a jump of f' stay. A step that does not lower the loss is halved; when no step
    does, that is the end.

    Returns:
        The partition, its levels and its loss.
    """
    partition = start
    levels, weight, loss = best_levels(integrals, partition)
    for _ in range(_ROUNDS):
        step = _newton_step(integrals, partition, levels, weight)
        for share in (1.0, 0.5, 0.25, 0.125):
            trial = Partition(partition.borders + share * step, partition.codes)
            found = best_levels(integrals, trial)
            if found[2] < loss:
                break
        else:
            break
        partition, (levels, weight, loss) = trial, found
    return partition, levels, loss


def _newton_step(
    integrals: Integrals, partition: Partition, levels: np.ndarray, weight: np.ndarray
) -> np.ndarray:
    """Solve for ``2 f'(s) = y_left + y_right`` at every border, linearised."""
    s, left, right = partition.borders, partition.codes[:-1], partition.codes[1:]
    step = np.zeros_like(s)
    free = ~np.isin(s, integrals.jumps) & (weight[left] > 0) & (weight[right] > 0)
    if not free.any():
        return step
    s, left, right = s[free], left[free], right[free]
    slope, w = integrals.derivative(s), integrals.weight(s)
    bend = integrals.derivative(s + _STEP) - integrals.derivative(s - _STEP)
    border = np.arange(len(s))
    by_border = np.zeros((len(levels), len(s)))  # how each level moves with each border
    by_border[left, border] += w * (slope - levels[left]) / weight[left]
    by_border[right, border] -= w * (slope - levels[right]) / weight[right]
    jacobian = np.diag(bend / _STEP) - by_border[left] - by_border[right]
    residual = 2 * slope - levels[left] - levels[right]
    move = _solved(jacobian, -residual)
    fences = np.unique(
        np.concatenate([partition.borders, integrals.jumps, integrals.grid[[0, -1]]])
    )
    at = np.searchsorted(fences, s)
    room = 0.45 * np.minimum(s - fences[at - 1], fences[at + 1] - s)
    step[free] = np.clip(move, -room, room)
    return step


def _solved(matrix: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Solve a linear system, by least squares where it is singular: 30 times as long."""
    try:
        move = np.linalg.solve(matrix, right)
    except np.linalg.LinAlgError:
        return np.linalg.lstsq(matrix, right)[0]
    return move if np.isfinite(move).all() else np.linalg.lstsq(matrix, right)[0]
