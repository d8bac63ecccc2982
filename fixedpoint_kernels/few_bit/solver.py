"""The best table of a derivative for a number of bits."""

import math
import operator
from collections.abc import Iterable
from typing import Literal, get_args

import numpy as np

from fixedpoint_kernels.few_bit.integrals import Function, Integrals, Weight
from fixedpoint_kernels.few_bit.refine import Partition, best_levels, refine
from fixedpoint_kernels.few_bit.table import Table, number

Codes = Literal["value", "interval", "parity"]

_EQUAL = 1e-9  # of the range of f': levels closer than this are one


def solve_function(
    function: Function,
    bits: int,
    *,
    weight: Weight = "uniform",
    interval: tuple[float, float] = (-10.0, 10.0),
    codes: Codes = "value",
    grid: int = 8000,
) -> Table:
    """See ``fixedpoint_kernels.few_bit.solve``."""
    count = 1 << checked_bits(bits)
    try:
        low, high = map(float, interval)
    except (TypeError, ValueError):
        low = high = math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"interval must be two finite ascending numbers, got {interval}")
    if codes not in get_args(Codes):
        raise ValueError(f"codes must be one of {get_args(Codes)}, got {codes!r}")
    if operator.index(grid) < 2:
        raise ValueError(f"grid must be at least 2 cells, got {grid}")
    if codes == "parity":
        return _solve_half(function, count, weight, high, (low, high), grid)
    integrals = Integrals(function, weight, (low, high), grid)
    _check_weight(integrals)
    start = _by_value if codes == "value" else _by_interval
    return _finish(*_optimum(integrals, start(integrals, count)))


def solve_by_value(function: Function, bits: Iterable[int], weight: Weight) -> list[Table]:
    """Return the default table for each number of bits; f' is integrated once for all.

    Raises:
        ValueError: The weight is zero wherever f' changes, or as of ``solve_function``.
    """
    integrals = Integrals(function, weight, (-10.0, 10.0), 8000)
    _check_weight(integrals)
    return [_finish(*_optimum(integrals, _by_value(integrals, 1 << count))) for count in bits]


def checked_bits(bits: int) -> int:
    """Return ``bits`` as an integer of 1 to 8, or refuse it.

    Raises:
        TypeError: ``bits`` is no integer.
        ValueError: It is not 1 to 8.
    """
    if isinstance(bits, bool) or not hasattr(bits, "__index__"):
        raise TypeError(f"bits must be an integer, got {bits!r}")
    value = operator.index(bits)
    if not 1 <= value <= 8:
        raise ValueError(f"bits must be 1 to 8, got bits={value}")
    return value


def _by_interval(integrals: Integrals, count: int) -> Partition:
    from fixedpoint_kernels.few_bit.partition import cut_any  # numba takes half a second

    groups = min(count, integrals.cells.shape[1])
    cuts = cut_any(integrals.prefix, groups)
    return Partition(integrals.grid[cuts], np.arange(groups))


def _by_value(integrals: Integrals, count: int) -> Partition:
    """Cut the cells sorted by f' into groups; pieces are the runs of one group along x."""
    from fixedpoint_kernels.few_bit.partition import cut_sorted  # numba takes half a second

    values = integrals.values()
    closeness = _EQUAL * max(float(np.ptp(values)), 1e-300)
    order = np.argsort(values, kind="stable")
    rises = np.diff(values[order]) > closeness
    distinct = np.concatenate([[0], np.cumsum(rises)])  # the same value is never cut
    cells = np.zeros((3, distinct[-1] + 1))
    for row, cell in zip(cells, integrals.cells[:, order], strict=True):
        np.add.at(row, distinct, cell)
    prefix = np.concatenate([np.zeros((3, 1)), cells.cumsum(1)], 1)
    cuts = cut_sorted(prefix, min(count, cells.shape[1]))
    group = np.empty(len(values), np.int64)
    group[order] = np.searchsorted(cuts, distinct, side="right")
    inner = np.flatnonzero(np.diff(group))
    return Partition(integrals.grid[inner + 1], group[np.append(inner, len(group) - 1)])


def _optimum(integrals: Integrals, start: Partition) -> tuple[Partition, np.ndarray, float]:
    closeness = _EQUAL * max(float(np.ptp(integrals.values())), 1e-300)
    levels, _, _ = best_levels(integrals, start)
    partition, levels, _ = refine(integrals, start.merged(levels, closeness))
    partition = partition.merged(levels, closeness)
    levels, _, loss = best_levels(integrals, partition)
    return partition, levels, loss


def _finish(partition: Partition, levels: np.ndarray, loss: float) -> Table:
    return number(partition.borders, partition.codes, levels, max(loss, 0.0))


def _solve_half(
    function: Function,
    count: int,
    weight: Weight,
    high: float,
    interval: tuple[float, float],
    grid: int,
) -> Table:
    """Solve on ``|x|`` and mirror (the paper's sigmoid and tanh)."""
    integrals = Integrals(function, weight, (0.0, high), grid)
    _check_weight(integrals)
    x = (integrals.grid[:-1] + integrals.grid[1:]) / 2
    slope, mirrored = integrals.derivative(x), integrals.derivative(-x)
    is_even = np.abs(slope - mirrored).max() <= 1e-9 * max(1.0, np.abs(slope).max())
    if interval[0] != -high or not is_even or (integrals.weight(x) != integrals.weight(-x)).any():
        raise ValueError(
            "codes='parity' needs f' and the weight to be even and the interval symmetric, "
            f"got interval {interval} and f' that is {'even' if is_even else 'not even'}"
        )
    half, levels, loss = _optimum(integrals, _by_interval(integrals, count))
    borders = np.concatenate([-half.borders[::-1], half.borders])
    codes = np.concatenate([half.codes[:0:-1], half.codes])
    return _finish(Partition(borders, codes), levels, 2 * loss)


def _check_weight(integrals: Integrals) -> None:
    if not integrals.prefix[0, -1] > 0:
        raise ValueError("weight must be positive somewhere on the interval, got 0 everywhere")
