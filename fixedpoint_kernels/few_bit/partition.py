"""Dynamic programming in Numba: the best cut of a row of cells into groups of one level each.

A cell has three integrals: of w, of f'w and of f'^2 w. A group of cells costs
``F2 - FW**2 / W``, the squared error of its best level; prefix sums give that in four reads.
"""

import numpy as np
from numba import njit

from fixedpoint_kernels.threads import compiled

_TINY = 1e-14  # of all weight: less is lost in the rounding of the prefix sums, and costs nothing


@njit(inline="always")
def _cost(prefix, j, i):  # of the group of cells j to i - 1; prefix (3, n + 1) float64
    least = _TINY * prefix[0, -1]
    width = prefix[0, i] - prefix[0, j]
    moment = prefix[1, i] - prefix[1, j]
    cost = prefix[2, i] - prefix[2, j] - moment * moment / max(width, least)
    return cost if width > least else 0.0


@compiled(fastmath={"nnan", "ninf", "nsz", "reassoc"})
def cut_any(prefix: np.ndarray, groups: int) -> np.ndarray:
    """Return the first cell of each group but the first: O(n^2 groups), for cells in any order.

    Only costs are kept; the cuts are found again on the way back, so that the inner loop is a
    minimum and nothing else.
    """
    n = prefix.shape[1] - 1
    best = np.full((groups, n + 1), np.inf)
    for i in range(1, n + 1):
        best[0, i] = _cost(prefix, 0, i)
    for k in range(1, groups):
        before = best[k - 1]
        for i in range(k + 1, n + 1):
            least = np.inf
            for j in range(k, i):
                least = min(least, before[j] + _cost(prefix, j, i))
            best[k, i] = least
    cuts, end = np.zeros(groups - 1, np.int64), n
    for k in range(groups - 1, 0, -1):
        least = np.inf
        for j in range(k, end):
            total = best[k - 1, j] + _cost(prefix, j, end)
            if total < least:
                least, cuts[k - 1] = total, j
        end = cuts[k - 1]
    return cuts


@compiled()
def cut_sorted(prefix: np.ndarray, groups: int) -> np.ndarray:
    """Return the first cell of each group but the first: O(n log n groups), for sorted cells.

    Cells sorted by their value satisfy the quadrangle inequality, so the last cut moves right
    with the end of the row, and divide and conquer is exact. It is not for cells in order of x.
    """
    n = prefix.shape[1] - 1
    before, best = np.zeros(n + 1), np.zeros(n + 1)
    last = np.zeros((groups, n + 1), np.int32)
    for i in range(1, n + 1):
        before[i] = _cost(prefix, 0, i)
    stack = np.empty((128, 4), np.int64)  # ends from, to; last cuts from, to
    for k in range(1, groups):
        stack[0], depth = np.array([k + 1, n, k, n - 1]), 1
        while depth:
            depth -= 1
            low, high, first, final = stack[depth]
            i = (low + high) // 2
            least, at = np.inf, first
            for j in range(first, min(i - 1, final) + 1):
                total = before[j] + _cost(prefix, j, i)
                if total < least:
                    least, at = total, j
            best[i], last[k, i] = least, at
            if low < i:
                stack[depth], depth = np.array([low, i - 1, first, at]), depth + 1
            if i < high:
                stack[depth], depth = np.array([i + 1, high, at, final]), depth + 1
        before, best = best, before
    cuts, end = np.zeros(groups - 1, np.int64), n
    for k in range(groups - 1, 0, -1):
        end = last[k, end]
        cuts[k - 1] = end
    return cuts
