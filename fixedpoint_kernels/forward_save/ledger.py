"""What each choice of a plan keeps and costs, by arithmetic on what was measured."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from fixedpoint_kernels.forward_save import offload, sample
from fixedpoint_kernels.forward_save.measure import Costs

__all__ = ["EXACT", "WAYS", "Group", "Ledger", "State"]

WAYS = "levels", "again", "away"  # what a choice changes: the fields of a state
Level = int
EXACT: Level = -1  # otherwise a place among the plan's levels


@dataclass
class Group:
    """Layers that keep tensors in common, so that they must change together.

    Args:
        layers: Their names.
        errors: Squared error of the gradient, relative, at each level; 0 where exact.
        shares: Of each layer in that, at each level.
    """

    layers: set[str]
    errors: dict[Level, float] = field(default_factory=lambda: {EXACT: 0.0})
    shares: dict[Level, dict[str, float]] = field(default_factory=dict)

    def error_of(self, layer: str, level: Level) -> float:
        """Return the part of the error that one layer has."""
        return self.errors[level] * self.shares[level][layer] if level != EXACT else 0.0


class State(NamedTuple):
    """One way to keep less.

    Args:
        levels: Of each group.
        again: Blocks that run again.
        away: Blocks whose tensors are offloaded; of all these blocks, none is inside of another.
    """

    levels: tuple[Level, ...]
    again: frozenset[str] = frozenset()
    away: frozenset[str] = frozenset()

    @property
    def blocks(self) -> frozenset[str]:
        """All blocks that keep their layers as they are."""
        return self.again | self.away

    def with_block(self, block: str, way: str) -> "State":
        """Return the state in which a block goes another way, and no block is inside of it."""
        rest = State(
            self.levels,
            frozenset(other for other in self.again if not is_inside(other, block)),
            frozenset(other for other in self.away if not is_inside(other, block)),
        )
        return rest._replace(**{way: getattr(rest, way) | {block}})

    def without_block(self, block: str) -> "State":
        """Return the state in which a block is as it was."""
        return self._replace(again=self.again - {block}, away=self.away - {block})


class _Piece(NamedTuple):
    """One storage in one run: it is kept while one of its layers has the level of the run.

    Args:
        level: Of the run.
        size_bytes: Of the storage.
        layers: That save it.
        blocks: That keep it if they run again.
    """

    level: Level
    size_bytes: int
    layers: frozenset[str]
    blocks: frozenset[str] = frozenset()


class Ledger:
    """Bytes, seconds and errors of any state.

    Args:
        exact: A run of the model as it is, with what its blocks are called with.
        runs: Runs at each level.
        names: Layers that can be converted.
        costs: Seconds of layers and blocks.
        step_s: Of a step of the model as it is.
        offload_s: Seconds that each block adds that may be offloaded.
    """

    def __init__(
        self,
        exact: sample.ForwardPass,
        runs: Mapping[Level, sample.ForwardPass],
        names: Iterable[str],
        costs: Costs,
        step_s: float,
        offload_s: Mapping[str, float] = MappingProxyType({}),
    ):
        self.names, self.costs, self.step_s = set(names), costs, step_s
        self.offload_s = offload_s
        self.blocks = [name for name in exact.taken if name not in costs.refused]
        self.groups = _groups(exact, self.names)
        self._group_of = {name: i for i, group in enumerate(self.groups) for name in group.layers}
        self._pieces = [*_exact_pieces(exact, set(self.blocks))]
        for level, run in runs.items():
            kept = [(s.size_bytes, frozenset(s.layers & self.names)) for s in run.saved]
            self._pieces += [_Piece(level, size, layers) for size, layers in kept if layers]
        everybody = {name for piece in self._pieces for name in piece.layers} | self.names
        self._inside = {
            block: frozenset(n for n in everybody if is_inside(n, block))
            for block in (*self.blocks, *offload_s)
        }
        self._of: dict[str, list[_Piece]] = {name: [] for name in (*everybody, *self._inside)}
        for piece in self._pieces:
            for name in piece.layers | piece.blocks:
                self._of[name].append(piece)

    @property
    def start(self) -> State:
        """The model as it is."""
        return State((EXACT,) * len(self.groups))

    def kept_bytes(self, state: State) -> int:
        """Return the bytes kept between the passes."""
        hidden = self.hidden(state)
        return sum(p.size_bytes for p in self._pieces if self._is_kept(p, state, hidden))

    def inner_bytes(self, block: str) -> int:
        """Return what a block keeps as it is."""
        inside = self._inside[block]
        exact = (p for p in self._pieces if p.level == EXACT)
        return sum(p.size_bytes for p in exact if p.layers & inside)

    def saved_bytes(self, before: State, after: State) -> int:
        """Return how much less ``after`` keeps than ``before``."""
        changed = {
            name
            for group, old, new in zip(self.groups, before.levels, after.levels, strict=True)
            if old != new
            for name in group.layers
        }
        for block in (before.again ^ after.again) | (before.away ^ after.away):
            changed |= self._inside[block] | {block}
        touched = {id(piece): piece for name in changed for piece in self._of[name]}
        hidden, then = self.hidden(before), self.hidden(after)
        return sum(
            p.size_bytes * (self._is_kept(p, before, hidden) - self._is_kept(p, after, then))
            for p in touched.values()
        )

    def hidden(self, state: State) -> frozenset[str]:
        """Return the layers inside of blocks that run again or are offloaded."""
        return frozenset().union(*(self._inside[block] for block in state.blocks))

    def error(self, state: State) -> float:
        """Return the squared relative error of the gradient."""
        hidden = self.hidden(state)
        pairs = zip(self.groups, state.levels, strict=True)
        return sum(group.errors[level] for group, level in pairs if group.layers - hidden)

    def added_s(self, state: State) -> float:
        """Return the seconds a step takes longer."""
        hidden, seconds = self.hidden(state), self.costs.layers_s
        layers = sum(
            seconds.get(name, 0.0)
            for group, level in zip(self.groups, state.levels, strict=True)
            if level != EXACT
            for name in group.layers - hidden
        )
        again = sum(self.costs.blocks_s.get(block, 0.0) for block in state.again)
        return layers + again + sum(self.offload_s[block] for block in state.away)

    def cost(self, state: State) -> float:
        """Return the logarithm of the time to the same loss, over that of the model as it is.

        A step that takes longer is one factor. The other is the number of steps: with the best
        step size, noise of relative variance v in the gradient makes 1 + v as many necessary.

        Source:
            McCandlish, Kaplan, Amodei et al., 2018, An empirical model of large-batch training,
            section 2.2: the gain of a step is inverse to the square of the noisy gradient.
        """
        share = self.added_s(state) / self.step_s if self.step_s > 0 else 0.0
        return math.log1p(share) + math.log1p(self.error(state))

    @property
    def ways(self) -> tuple[str, ...]:
        """Those of ``WAYS`` that there is something for."""
        there = {"levels": self.groups, "again": self.blocks, "away": self.offload_s}
        return tuple(way for way in WAYS if there[way])

    def next_states(
        self, state: State, most_inside: float = math.inf, ways: Collection[str] = WAYS
    ) -> Iterator[State]:
        """Yield the states that one choice more leads to.

        Args:
            state: Any.
            most_inside: Bytes that a block may keep as it is that is to run again.
            ways: What may change.
        """
        hidden = self.hidden(state)
        if "levels" in ways:
            for at, group in enumerate(self.groups):
                if group.layers - hidden:
                    yield from self.others(state, at, ways)
        for block in self.blocks if "again" in ways else ():
            if not _has(state, block, "again") and self.inner_bytes(block) <= most_inside:
                yield state.with_block(block, "again")
        for block in self.offload_s if "away" in ways else ():
            if not _has(state, block, "away"):
                yield state.with_block(block, "away")

    def parts(self, ways: Collection[str]) -> list[int | str]:
        """Return what may change: places of groups, and blocks, those inside before those around."""
        inner = reversed({**dict.fromkeys(self.blocks), **self.offload_s})
        places = range(len(self.groups)) if "levels" in ways else ()
        return [*places, *(inner if {"again", "away"} & {*ways} else ())]

    def others(self, state: State, part: int | str, ways: Collection[str]) -> Iterator[State]:
        """Yield the states in which a group (by its place) or a block is another way."""
        if isinstance(part, int):
            for level in self.groups[part].errors:
                if level != state.levels[part]:
                    yield state._replace(levels=_changed(state.levels, part, level))
            return
        if part in state.blocks:
            yield state.without_block(part)
        for way, blocks in (("again", self.blocks), ("away", self.offload_s)):
            if way in ways and part in blocks and not _has(state, part, way):
                yield state.with_block(part, way)

    def fewer(self, state: State) -> Iterator[State]:
        """Yield the states that one choice less leads to."""
        for at, level in enumerate(state.levels):
            if level != EXACT:
                for finer in (EXACT, *range(level)):
                    yield state._replace(levels=_changed(state.levels, at, finer))
        for block in sorted(state.blocks):
            yield state.without_block(block)

    def _is_kept(self, piece: _Piece, state: State, hidden: frozenset[str]) -> bool:
        if piece.blocks & state.again:
            return True
        stays = piece.level == EXACT and offload.is_small(piece.size_bytes)
        if stays and any(piece.layers & self._inside[block] for block in state.away):
            return True
        return any(self._level(name, state) == piece.level for name in piece.layers - hidden)

    def _level(self, name: str, state: State) -> Level:
        at = self._group_of.get(name)
        return EXACT if at is None else state.levels[at]


def is_inside(name: str, block: str) -> bool:
    """Whether a module is a block, or in it."""
    return name == block or name.startswith(block + ".")


def _has(state: State, block: str, way: str) -> bool:
    """Whether a block goes a way already, or is inside of another that goes any."""
    others = state.blocks - {block}
    return block in getattr(state, way) or any(is_inside(block, other) for other in others)


def _changed(levels: tuple[Level, ...], at: int, level: Level) -> tuple[Level, ...]:
    return (*levels[:at], level, *levels[at + 1 :])


def _exact_pieces(exact: sample.ForwardPass, blocks: set[str]) -> Iterator[_Piece]:
    takers: dict[int, set[str]] = {}
    sizes: dict[int, int] = {}
    for block in blocks:
        for place, size in exact.taken[block].items():
            takers.setdefault(place, set()).add(block)
            sizes[place] = size
    for place, storage in enumerate(exact.saved):
        by = frozenset(takers.pop(place, ()))
        yield _Piece(EXACT, storage.size_bytes, frozenset(storage.layers), by)
    for place, by in takers.items():  # nobody keeps these yet
        yield _Piece(EXACT, sizes[place], frozenset(), frozenset(by))


def _groups(exact: sample.ForwardPass, names: set[str]) -> list[Group]:
    """Return the convertible layers that keep anything, those with a tensor in common together."""
    groups: list[Group] = []
    for storage in exact.saved:
        together = storage.layers & names
        if together:
            for group in [g for g in groups if g.layers & together]:
                together |= group.layers
                groups.remove(group)
            groups.append(Group(together))
    return groups
