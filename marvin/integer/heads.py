"""Attention in a traced graph, and what is done to heads before it: where they lie among features.

Their nodes run on the numbers of places instead of values: that tells where a number comes from, however
code has moved it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, fx
from torch.fx.node import Argument, map_arg

from fixedpoint_kernels import tokens
from fixedpoint_kernels.tokens import Odds, Part
from marvin.integer.nodes import casts

__all__ = ["HeadNorm", "Heads", "Layout", "Piece", "Places", "Turn", "Turned"]

_FAILURES = RuntimeError, TypeError, ValueError, IndexError, KeyError


class Layout(NamedTuple):
    """How the node of a value lies that has heads as a dimension.

    Args:
        size: Features of a head.
        heads_first: Whether heads come before tokens.
    """

    size: int
    heads_first: bool

    def of(self, x: Tensor) -> Tensor:
        """Return (samples, tokens, features) so."""
        x = x.unflatten(-1, (-1, self.size))
        return x.transpose(1, 2) if self.heads_first else x


class _Value(NamedTuple):
    number: int
    width: int
    layout: Layout | None


class Places:
    """Values of a chain as the numbers of their places.

    Args:
        samples: Of the batch; two tell as much as many.
        tokens: Of a sample.
    """

    def __init__(self, samples: int, tokens: int) -> None:
        self.samples, self.tokens = min(samples, 2), tokens
        self.values: dict[fx.Node, _Value] = {}

    def add(self, node: fx.Node, number: int, width: int, layout: Layout | None = None) -> None:
        """Add a value; ``layout``: of its node, where that has heads as a dimension."""
        self.values[node] = _Value(number, width, layout)

    def of(self, nodes: set[fx.Node]) -> dict[fx.Node, Argument]:
        """Return the numbers of the places of those nodes that have values."""
        found: dict[fx.Node, Argument] = {}
        for node in nodes & self.values.keys():
            own, layout = self.plain(node), self.values[node].layout
            found[node] = own if layout is None else layout.of(own)
        return found

    def plain(self, node: fx.Node) -> Tensor:
        """Return the numbers of the places of a value, (samples, tokens, features)."""
        shape = self.samples, self.tokens, self.values[node].width
        return torch.arange(math.prod(shape), device="cpu").view(shape)

    def source(self, node: fx.Node) -> _Value:
        """Return the value that a node is a part of."""
        while node not in self.values:
            node = node.all_input_nodes[0]
        return self.values[node]

    def part(self, numbers: Tensor, source: _Value) -> Part | None:
        """Return where heads lie whose features have these places; None where that is no even pattern."""
        samples, heads, count, size = numbers.shape
        if (samples, count) != (self.samples, self.tokens):
            return None
        start = int(numbers[0, 0, 0, 0])
        step = int(numbers[0, 1, 0, 0]) - start if heads > 1 else size
        own = (
            torch.arange(samples, device="cpu").view(-1, 1, 1, 1) * count * source.width
            + torch.arange(heads, device="cpu").view(-1, 1, 1) * step
            + torch.arange(count, device="cpu").view(-1, 1) * source.width
            + torch.arange(size, device="cpu")
            + start
        )
        is_even = step >= 0 and torch.equal(own, numbers)
        return Part(source.number, start, step) if is_even else None


@dataclass(frozen=True)
class Heads:
    """Attention in a graph.

    Args:
        call: The node that attends.
        wanted: Nodes of queries, keys and values.
        before: Nodes that make these from values, in order; they change shapes alone.
        after: Nodes between the call and the value, so too.
        causal: Whether a token sees those before it only.
        scale: By which products are multiplied, or None.
        odds: Of dropout, or None.
        shares: Whether heads of queries may share one of keys and values (``enable_gqa``).
    """

    call: fx.Node
    wanted: tuple[fx.Node, fx.Node, fx.Node]
    before: tuple[fx.Node, ...]
    after: tuple[fx.Node, ...]
    causal: bool
    scale: float | None
    odds: Odds | None
    shares: bool

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """All of them."""
        return *self.before, self.call, *self.after

    @property
    def bases(self) -> set[fx.Node]:
        """Nodes of which it takes values, or shapes."""
        return _bases(self.nodes)

    def operation(self, places: Places) -> tokens.Attention | None:
        """Return what it does to values; None where their heads lie otherwise than an operation takes."""
        env = places.of(self.bases)
        _last(self.before, env)
        found = [env.get(node) for node in self.wanted]
        if not _are_maps(found):
            return None
        q, k, v = found
        env[self.call] = y = torch.arange(q.numel(), device="cpu").view(q.shape)
        last = _last((self.call, *self.after), env)
        own = y.transpose(1, 2).flatten(2)
        if not isinstance(last, Tensor) or last.shape != own.shape or not torch.equal(last, own):
            return None
        heads, size = q.shape[1], q.shape[3]
        if not self.shares and not heads == k.shape[1] == v.shape[1]:
            return None
        k, v = map(_once, (k, v))
        if k.shape != v.shape or k.shape[3] != size or heads % k.shape[1]:
            return None
        pairs = zip((q, k, v), self.wanted, strict=True)
        parts = [places.part(numbers, places.source(node)) for numbers, node in pairs]
        queries, keys, values = parts
        if queries is None or keys is None or values is None:
            return None
        scale, groups = size**-0.5 if self.scale is None else self.scale, heads // k.shape[1]
        rest = heads, size, scale, self.causal, self.odds, groups
        return tokens.Attention(queries, keys, values, *rest)


@dataclass(frozen=True)
class HeadNorm:
    """A norm of each head of a value in a graph.

    Args:
        layer: Node of the value whose heads are normalised: a linear layer, or heads that are turned.
        size: Features of a head.
        nodes: That make heads of what it gives, in order, and the norm.
    """

    layer: fx.Node
    size: int
    nodes: tuple[fx.Node, ...]

    @property
    def bases(self) -> set[fx.Node]:
        """Nodes of which it takes values, or shapes."""
        return _bases(self.nodes)

    def layout(self, places: Places) -> Layout | None:
        """Return how the heads lie; None where what is normalised is something else."""
        value, env = places.plain(self.layer), places.of(self.bases)
        found = _last(self.nodes[:-1], env) if self.nodes[1:] else env[self.layer]
        if not isinstance(found, Tensor) or value.shape[-1] % self.size:
            return None
        for layout in (Layout(self.size, False), Layout(self.size, True)):
            wanted = layout.of(value)
            if found.shape == wanted.shape and torch.equal(found, wanted):
                return layout
        return None


@dataclass(frozen=True)
class Piece:
    """Some features of a value in a graph.

    Args:
        value: Node of the value.
        nodes: That make the piece of it, in order, it the last.
    """

    value: fx.Node
    nodes: tuple[fx.Node, ...]

    @property
    def bases(self) -> set[fx.Node]:
        """Nodes of which it takes values, or shapes."""
        return _bases(self.nodes)

    def operation(self, places: Places) -> tokens.Cut | None:
        """Return what it takes of a value; None where these are no features side by side of all tokens."""
        whole, found = places.plain(self.value), _last(self.nodes, places.of(self.bases))
        if not isinstance(found, Tensor) or not found.numel():
            return None
        start, width = int(found.flatten()[0]), found.shape[-1]
        own = whole[..., start : start + width]
        if found.shape != own.shape or not torch.equal(found, own):
            return None
        return tokens.Cut(places.values[self.value].number, start, width)


@dataclass(frozen=True)
class Turned:
    """A rotary position embedding in a graph.

    Args:
        layer: Node of the value whose heads are turned: a linear layer, or a norm behind one.
        tables: Nodes of cosines and sines, or of sines and cosines.
        nodes: That make the result of these, in order, it the last.
    """

    layer: fx.Node
    tables: tuple[fx.Node, fx.Node]
    nodes: tuple[fx.Node, ...]

    @property
    def bases(self) -> set[fx.Node]:
        """Nodes of which it takes values, or shapes."""
        return _bases(self.nodes) - {*self.tables}

    def turn(
        self, places: Places, shapes: Mapping[fx.Node, Sequence[int]], batch: int
    ) -> "Turn | None":
        """Return what it does to a value; None where that is something else.

        Args:
            places: Of the values.
            shapes: Of tables.
            batch: How many samples there are.
        """
        own = [shapes[table] for table in self.tables]
        is_batch = all(shape[0] == batch > 1 for shape in own)
        for by_sample in (True, False) if is_batch else (False,):
            sizes = [[places.samples, *shape[1:]] if by_sample else shape for shape in own]
            for is_swapped in (False, True):
                found = self._turn(places, sizes, by_sample, is_swapped)
                if found is not None:
                    return found
        return None

    def _turn(
        self, places: Places, sizes: Sequence[Sequence[int]], by_sample: bool, is_swapped: bool
    ) -> "Turn | None":
        def run(cos: Tensor, sin: Tensor) -> Tensor | None:
            """Return what becomes of places, counted from 1, with tables of these whole numbers."""
            found = places.of(self.bases)
            env = {node: x.double() + 1 for node, x in found.items() if isinstance(x, Tensor)}
            pair = (sin, cos) if is_swapped else (cos, sin)
            for table, numbers, size in zip(self.tables, pair, sizes, strict=True):
                env[table] = numbers.double().view(tuple(size))
            y = _last(self.nodes, {**env})
            return y if isinstance(y, Tensor) and y.dim() == 4 else None

        count = math.prod(sizes[0])
        if math.prod(sizes[1]) != count:
            return None
        ones, zeros = (
            torch.full((count,), n, dtype=torch.float64, device="cpu") for n in (1.0, 0.0)
        )
        still, rest = run(ones, zeros), run(zeros, zeros)
        if still is None or rest is None:
            return None
        source = places.source(self.layer)
        for heads_first in (True, False):
            x = still if heads_first else still.transpose(1, 2)
            if (part := places.part(x.long() - 1, source)) is not None:
                break
        else:
            return None
        _, heads, length, size = x.shape
        turned = int((rest[0, 0, 0] == 0).sum())
        if turned % 2 or not turned or count != length * turned * len(x) ** by_sample:
            return None
        draws = torch.Generator().manual_seed(1)
        cos, sin = (torch.randint(1, 9, (count,), generator=draws, device="cpu") for _ in range(2))
        y = run(cos, sin)
        cos, sin = (own.view(-1, 1, length, turned) for own in (cos, sin))
        moving, same = x.split([turned, size - turned], -1)
        for in_pairs in (False, True):
            own = torch.cat([moving * cos + _crossed(moving, in_pairs) * sin, same], -1)
            if y is not None and torch.equal(y, own if heads_first else own.transpose(1, 2)):
                operation = tokens.Rotary(part, heads, size, turned, by_sample, in_pairs)
                return Turn(operation, is_swapped, Layout(size, heads_first))
        return None


class Turn(NamedTuple):
    """What a rotary position embedding does.

    Args:
        operation: Of the chain.
        is_swapped: Whether the first of its tables has the sines.
        layout: Of its node.
    """

    operation: tokens.Rotary
    is_swapped: bool
    layout: Layout


def _crossed(x: Tensor, in_pairs: bool) -> Tensor:
    """Return of features (a, b) in halves, or in pairs, (-b, a)."""
    if in_pairs:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def _bases(nodes: tuple[fx.Node, ...]) -> set[fx.Node]:
    return {n for own in nodes for n in own.all_input_nodes} - {*nodes}


def _are_maps(found: Sequence[Argument]) -> TypeGuard[list[Tensor]]:
    return all(isinstance(x, Tensor) and x.dim() == 4 for x in found)


def _once(numbers: Tensor) -> Tensor:
    """Return heads once that are repeated one after the other."""
    first = numbers[0, :, 0, 0]
    times = int((first == first[0]).long().cumprod(0).sum())
    found = numbers[:, ::times]
    is_even = len(first) % times == 0 and torch.equal(found.repeat_interleave(times, 1), numbers)
    return found if is_even else numbers


def _last(nodes: tuple[fx.Node, ...], env: dict[fx.Node, Argument]) -> Argument:
    """Do what nodes do, with other values, which ``env`` has and gets; return the last one, None where that fails."""
    try:
        for node in nodes:
            if node not in env:
                env[node] = _evaluated(node, env)
    except _FAILURES:
        return None
    return env[nodes[-1]] if nodes else None


def _evaluated(node: fx.Node, env: dict[fx.Node, Argument]) -> Argument:
    args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
    if casts(node):  # float32 does not hold the number of each place
        return args[0]
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)
