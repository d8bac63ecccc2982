"""Ways from a model as it is to one that keeps little, a choice at a time."""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, combinations

from fixedpoint_kernels.forward_save.ledger import WAYS, Ledger, State

__all__ = ["first_under", "least", "path", "paths", "without_waste"]

TRIALS = 12  # states along a path whose peak is measured at first


def paths(ledger: Ledger, most_inside: float = float("inf")) -> Iterator[list[State]]:
    """Yield the path of all choices, then those of some: a choice more never leads to less."""
    can = ledger.ways
    some = chain(*(combinations(can, count) for count in range(len(can) - 1, 0, -1)))
    for ways in (can, *some):
        yield [*path(ledger, most_inside, ways)]


def path(
    ledger: Ledger, most_inside: float = float("inf"), ways: Collection[str] = WAYS
) -> Iterator[State]:
    """Yield the model as it is, then one choice more each time, the least cost for a byte first."""
    state: State | None = ledger.start
    while state is not None:
        yield state
        before, best, state_before = ledger.cost(state), None, state
        state = None
        for after in ledger.next_states(state_before, most_inside, ways):
            saved = ledger.saved_bytes(state_before, after)
            if saved > 0:
                rank = (ledger.cost(after) - before) / saved, -saved
                if best is None or rank < best:
                    best, state = rank, after


def least(ledger: Ledger) -> State:
    """Return the state with the least bytes that is found without a look at the clock.

    From the best of each set of choices alone, each group and each block takes what keeps least
    beside the others, until nothing changes.
    """
    can = ledger.ways
    alone = chain(*(combinations(can, count) for count in range(1, len(can) + 1)))
    ends = [_settled(ledger, ledger.start, ways) for ways in alone]
    levels = _settled(ledger, ledger.start, ["levels"]).levels
    ends += [state._replace(levels=levels) for state in ends]
    ends += [_settled(ledger, state, can) for state in ends]
    return min([ledger.start, *ends], key=ledger.kept_bytes)


def _settled(ledger: Ledger, state: State, ways: Collection[str]) -> State:
    """Change one group or block at a time, as long as that keeps less."""
    before = None
    while state != before:
        before = state
        for part in ledger.parts(ways):
            after = max(
                ledger.others(state, part, ways),
                key=lambda other: ledger.saved_bytes(state, other),
                default=state,
            )
            if ledger.saved_bytes(state, after) > 0:
                state = after
    return state


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
