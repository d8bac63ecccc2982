"""Ways from a model as it is to one that keeps little, a choice at a time."""

from collections.abc import Callable, Iterator, Sequence

from fixedpoint_kernels.forward_save.ledger import Ledger, State

__all__ = ["first_under", "path", "without_waste"]

TRIALS = 12  # states along a path whose peak is measured at first


def path(ledger: Ledger, most_inside: float = float("inf")) -> Iterator[State]:
    """Yield the model as it is, then one choice more each time, the least cost for a byte first."""
    state: State | None = ledger.start
    while state is not None:
        yield state
        before, best, state_before = ledger.cost(state), None, state
        state = None
        for after in ledger.next_states(state_before, most_inside):
            saved = ledger.saved_bytes(state_before, after)
            if saved > 0:
                rank = (ledger.cost(after) - before) / saved, -saved
                if best is None or rank < best:
                    best, state = rank, after


def without_waste(ledger: Ledger, state: State, budget: int) -> State:
    """Take back what costs most, as long as the budget holds."""
    while True:
        spare = budget - ledger.kept_bytes(state)
        fits = [
            fewer for fewer in ledger.fewer(state) if -ledger.saved_bytes(state, fewer) <= spare
        ]
        cheapest = min(fits, key=ledger.cost, default=state)
        if ledger.cost(cheapest) >= ledger.cost(state):
            return state
        state = cheapest


def first_under(
    path: Sequence[State], peak_of: Callable[[State], int], limit: int
) -> tuple[State | None, int | None]:
    """Return the first state of a path that was found under a limit, and the lowest peak seen.

    Peaks fall along a path, nearly: a few places are tried, then those between the first of these
    that fits and the one before.
    """
    before, last, seen = 0, len(path) - 1, []
    for trial in sorted({round(i * last / TRIALS) for i in range(TRIALS + 1)} if path else ()):
        seen.append(peak_of(path[trial]))
        if seen[-1] <= limit:
            return path[_between(path, before, trial, lambda s: peak_of(s) <= limit)], min(seen)
        before = trial + 1
    return None, min(seen, default=None)


def _between(path: Sequence[State], first: int, last: int, fits: Callable[[State], bool]) -> int:
    """Return a place from ``first`` to ``last`` that fits, as ``last`` does, by halving."""
    while first < last:
        middle = (first + last) // 2
        if fits(path[middle]):
            last = middle
        else:
            first = middle + 1
    return last
