"""Interleaved timing: every contestant meets the same machine, busy or idle."""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

MIN_RUNS, MAX_RUNS = 9, 2000


@dataclass(frozen=True)
class Case:
    """One row of a table.

    Args:
        name: What is worked on.
        elements: How many values one call takes.
        contestants: Callables by name, ours under ``"ours"``.
    """

    name: str
    elements: int
    contestants: dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Timing:
    """Seconds of each contestant: medians and minima over ``runs`` calls."""

    runs: int
    medians_s: dict[str, float]
    minima_s: dict[str, float]


def measure(case: Case, budget_s: float) -> Timing:
    """Give the contestants turns for about ``budget_s`` seconds.

    A turn is a call that is not timed, so that the one before leaves neither its data in the caches
    nor its threads on the cores, and a call that is.
    """
    for call in case.contestants.values():
        call()
    once = sum(_turn(call) for call in case.contestants.values())
    runs = min(MAX_RUNS, max(MIN_RUNS, int(budget_s / (2 * once))))
    times: dict[str, list[float]] = {name: [] for name in case.contestants}
    order = random.Random(0)
    for _ in range(runs):
        for name in order.sample(list(times), len(times)):  # nobody always follows the slowest
            times[name].append(_turn(case.contestants[name]))
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return Timing(runs, medians, {name: min(seconds) for name, seconds in times.items()})


def _turn(call: Callable[[], object]) -> float:
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
