"""Parts of a network whose layers pass codes on: convolutions, batch norm, sums, activations, pooling."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.functions import Curve
from fixedpoint_kernels.products.shapes import (
    PIECE,
    Window,
    forward,
    input_gradient,
    most_squares,
    sums_fit,
)

__all__ = [
    "INPUT",
    "LONGEST",
    "MOST_TAPS",
    "Joined",
    "Layer",
    "Norm",
    "Pooled",
    "Return",
    "Scaled",
    "Segment",
    "Value",
]

INPUT = -1
"""Number of the value that comes into a segment."""
LONGEST = 2**29 // (255 * 128)
"""So many products int32 holds, four times: a sum has fewer."""
Sizes = dict[int, tuple[int, int, int]]
MOST_TAPS = 256
"""Elements of a window that is pooled: uint8 counts them."""


@dataclass(frozen=True)
class Layer:
    """A convolution of codes, then batch norm over the batch, or a bias, or neither.

    Args:
        source: Number of the value whose codes it takes.
        inputs: Format of these.
        weight: Format of its weight.
        shape: Of the weight: outputs, inputs of a group, height, width.
        window: How it moves.
        eps: Of batch norm; None: no batch norm.
        clip: Whether the gradient is 0 where a code was clamped.
        is_flat: Whether it is a linear layer: its inputs are all elements of an image, in the order
            of ``torch.flatten``, and its weight has two dimensions. ``shape`` ends with 1, 1.
        by_channel: Whether outputs have fractional bits of their own, which each call gives: ``weight`` is
            the format of those that have none.
    """

    source: int
    inputs: FixedPoint
    weight: FixedPoint
    shape: tuple[int, int, int, int]
    window: Window
    eps: float | None
    clip: bool = True
    is_flat: bool = False
    by_channel: bool = False

    @property
    def most_positions(self) -> int:
        """Most positions of a block: int32 holds so many products, int64 the squares of so many sums."""
        if self.eps is None:
            return PIECE
        return min(PIECE, most_squares(math.prod(self.shape[1:])))

    def has_room(self, taken: tuple[int, int, int]) -> bool:
        """Say whether a weight meets a value of these channels, height and width, and sums have room."""
        from fixedpoint_kernels.products.blocks import blocks  # Numba takes a second to import

        if not sums_fit(self.shape, self.window.groups, LONGEST):
            return False
        if self.is_flat:
            return True
        channels, size, kernel = taken[0], taken[1:], self.shape[2:]
        if not input_gradient(self.window, size, kernel):
            return False
        cut = blocks(forward(self.window, size, kernel), 1, size, channels, 1, self.most_positions)
        return cut.most_positions <= self.most_positions


@dataclass(frozen=True)
class Norm:
    """Batch norm over the batch of a value itself, as it stands before convolutions.

    Args:
        source: Number of the value.
        channels: How many it has.
        eps: Of batch norm.
    """

    source: int
    channels: int
    eps: float


@dataclass(frozen=True)
class Value:
    """What layers make, for other layers to take: ``relu(layer + other)``, or another function of it.

    Args:
        layer: Number of the layer; None: ``value`` is in its place.
        other_layer: Number of another one that is added; None: none.
        other_value: Number of an earlier value that is added; None: none.
        relu: Whether what is below 0 becomes 0.
        ceiling: With ``relu``: what is above becomes this; None: stays.
        curve: Another function, of a value without ``relu`` that one layer makes alone.
        is_output: Whether it leaves the segment.
        is_flat: Whether it leaves as (images, channels); it has one place.
        value: Number of an earlier value to which another is added; None: a layer makes it.
    """

    layer: int | None
    other_layer: int | None = None
    other_value: int | None = None
    relu: bool = False
    ceiling: float | None = None
    curve: Curve | None = None
    is_output: bool = False
    is_flat: bool = False
    value: int | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers that make it."""
        return tuple(n for n in (self.layer, self.other_layer) if n is not None)

    @property
    def values(self) -> tuple[int, ...]:
        """Numbers of the earlier values of which it is the sum."""
        return tuple(i for i in (self.value, self.other_value) if i is not None)

    @property
    def taken(self) -> tuple[int, ...]:
        """The same: numbers of the values that it is made of."""
        return self.values


class _Made:
    """What is made of earlier values otherwise than as their sum."""

    values: ClassVar[tuple[int, ...]] = ()
    relu: ClassVar[bool] = False
    ceiling: ClassVar[None] = None
    curve: ClassVar[None] = None
    layers: ClassVar[tuple[int, ...]] = ()


@dataclass(frozen=True)
class Pooled(_Made):
    """The largest element of each window of an earlier value, or the mean; see ``torch.nn.MaxPool2d``.

    Args:
        source: Number of that value.
        kernel: Height and width of a window; None: those of the value.
        window: How it moves; no dilation, one group.
        is_output: Whether it leaves the segment.
        is_mean: Whether it is the mean, to which the border adds zeros.
        is_flat: Whether it leaves as (images, channels); it has one place.
        is_square: Whether the value must be as high as it is wide; see ``Graph.holds``.
    """

    source: int
    kernel: tuple[int, int] | None
    window: Window
    is_output: bool = False
    is_mean: bool = False
    is_flat: bool = False
    is_square: bool = False

    @property
    def taken(self) -> tuple[int, ...]:
        """Numbers of the values that it is made of."""
        return (self.source,)


@dataclass(frozen=True)
class Scaled(_Made):
    """An earlier value times a gate, one number a channel and image, as squeeze and excitation has it.

    Args:
        source: Number of the value; one layer makes it alone, and it is scaled once.
        gate: Number of the value of one place, which nothing else takes.
        is_output: Whether it leaves the segment.
    """

    source: int
    gate: int
    is_output: bool = False

    is_flat: ClassVar[bool] = False

    @property
    def taken(self) -> tuple[int, ...]:
        """Numbers of the values that it is made of."""
        return self.source, self.gate


@dataclass(frozen=True)
class Joined(_Made):
    """Channels of earlier values side by side, in this order, and of zeros around them; each place is repeated.

    Args:
        sources: Numbers of these values, each once.
        times: How many places down and across are made of one: nearest upsampling.
        is_output: Whether it leaves the segment.
        zeros: How many channels of zeros are before and behind them.
    """

    sources: tuple[int, ...]
    times: tuple[int, int] = (1, 1)
    is_output: bool = False
    zeros: tuple[int, int] = (0, 0)

    is_flat: ClassVar[bool] = False

    @property
    def taken(self) -> tuple[int, ...]:
        """Numbers of the values that it is made of."""
        return self.sources


@dataclass(frozen=True)
class Return:
    """Gradients that come back to a value, added up in this order and kept as bfloat16.

    Args:
        value: Number of the value.
        layer: Number of the layer whose input it is; None: none.
        continues: Whether what came back before is added.
        added: Numbers of later values to which it was added: their gradients are added; of one that
            was scaled from it, times the gate, before the others.
        outer: Whether the gradient from outside is added.
        is_last: Whether this is all.
        pooled: Number of the value that was pooled from it, of which this is the gradient; None: none.
        gated: Number of the value of which it is the gate; None: none.
        joined: Numbers of the values to which it was joined: their gradients of its channels are added,
            before all others but those of a layer, a pooled value or a gate.
    """

    value: int
    layer: int | None
    continues: bool
    added: tuple[int, ...]
    outer: bool
    is_last: bool
    pooled: int | None = None
    gated: int | None = None
    joined: tuple[int, ...] = ()


@dataclass(frozen=True)
class Segment:
    """Layers and values, each after what it needs.

    Raises:
        ValueError: A curve, or a gate, is of a value that not one layer makes alone; a value is joined
            with itself.
    """

    layers: tuple[Layer | Norm, ...]
    values: tuple[Value | Pooled | Scaled | Joined, ...]

    def __post_init__(self) -> None:
        for value in self.values:
            source = self.values[value.source] if isinstance(value, Scaled) else value
            again = isinstance(value, Scaled) or value.curve is not None
            if again and (len(source.layers) != 1 or source.values):
                raise ValueError(f"one layer must make what backward computes again, got {source}")
            if isinstance(value, Joined) and len({*value.sources}) < len(value.sources):
                raise ValueError(f"a value is joined with others alone, got {value}")

    def __hash__(self) -> int:
        """Return what is computed once: programs are looked up by it at each call."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.layers, self.values))

    def sizes(self, size: tuple[int, int]) -> Sizes:
        """Return channels, height and width of each value, of an input of this height and width.

        Raises:
            ValueError: A window is larger than what it moves over.
        """
        first = self.layers[0]
        channels = (
            first.channels if isinstance(first, Norm) else first.shape[1] * first.window.groups
        )
        found = {INPUT: (channels, *size)}
        for i, value in enumerate(self.values):
            if isinstance(value, Joined):
                _, *places = found[value.sources[0]]
                rows, columns = (n * times for n, times in zip(places, value.times, strict=True))
                channels = sum(found[k][0] for k in value.sources) + sum(value.zeros)
                found[i] = channels, rows, columns
                continue
            if isinstance(value, Scaled):
                found[i] = found[value.source]
                continue
            if isinstance(value, Pooled):
                channels, *taken = found[value.source]
                kernel, window = value.kernel or (taken[0], taken[1]), value.window
                found[i] = channels, *window.outputs((taken[0], taken[1]), kernel)
            else:
                if value.layer is None:
                    found[i] = found[value.values[0]]
                    continue
                found[i] = self._made(value.layer, found)
                layer = self.layers[value.layer]
                if isinstance(layer, Norm):
                    continue
                _, *taken = found[layer.source]
                kernel = layer.shape[2:]
            if min(found[i]) < 1:
                names = "x".join(map(str, kernel)), "x".join(map(str, taken))
                raise ValueError(
                    f"windows of {names[0]} must fit in the image, got {names[1]} places"
                )
        return found

    def _made(self, n: int, sizes: Sizes) -> tuple[int, int, int]:
        """Return channels, height and width of what a layer makes."""
        layer = self.layers[n]
        if isinstance(layer, Norm):
            return sizes[layer.source]
        _, height, width = sizes[layer.source]
        size = (1, 1) if layer.is_flat else (height, width)
        return layer.shape[0], *layer.window.outputs(size, layer.shape[2:])

    def normalises_one(self, size: tuple[int, int]) -> bool:
        """Say whether a batch norm takes one value of each channel from an image of this height and width.

        Raises:
            ValueError: A window is larger than what it moves over.
        """
        sizes = self.sizes(size)
        norms = [n for n, own in enumerate(self.layers) if own.eps is not None]
        return any(self._made(n, sizes)[1:] == (1, 1) for n in norms)

    def holds(self, shape: tuple[int, int, int]) -> bool:
        """Say whether layers have an input for each channel, or element, sums are of equal shapes, and fit.

        Args:
            shape: Channels, height and width of the input.

        Raises:
            ValueError: A window is larger than what it moves over.
        """
        sizes = self.sizes(shape[1:])
        fit = sizes[INPUT] == shape
        for own in self.layers:
            if isinstance(own, Norm):
                fit = fit and sizes[own.source][0] == own.channels
                continue
            taken = math.prod(sizes[own.source]) if own.is_flat else sizes[own.source][0]
            fit = fit and taken == own.shape[1] * own.window.groups
            fit = fit and own.has_room(sizes[own.source])
        for i, value in enumerate(self.values):
            terms = [self._made(n, sizes) for n in value.layers]
            terms += [sizes[k] for k in value.values]
            if isinstance(value, Joined):
                fit = fit and len({sizes[k][1:] for k in value.sources}) == 1
            if isinstance(value, Pooled) and value.is_square:
                fit = fit and sizes[value.source][1] == sizes[value.source][2]
            fit = fit and all(term == sizes[i] for term in terms)
            fit = fit and (not value.is_flat or sizes[i][1:] == (1, 1))
            fit = fit and (
                not isinstance(value, Scaled) or sizes[value.gate] == (sizes[i][0], 1, 1)
            )
        return fit

    @property
    def made_by(self) -> dict[int, int]:
        """Number of the value that each layer makes."""
        return {n: i for i, value in enumerate(self.values) for n in value.layers}

    def takers(self, value: int) -> Sequence[int]:
        """Return the numbers of the layers that take a value's codes."""
        return self._taken_by[Layer].get(value, ())

    def norms(self, value: int) -> Sequence[int]:
        """Return the numbers of the batch norms of a value itself."""
        return self._taken_by[Norm].get(value, ())

    @cached_property
    def _taken_by(self) -> dict[type, dict[int, list[int]]]:
        """Numbers of the layers and values of each class that take a value, by its number."""
        found: dict[type, dict[int, list[int]]] = {
            own: {} for own in (Layer, Norm, Value, Pooled, Joined, Scaled)
        }
        for n, layer in enumerate(self.layers):
            found[type(layer)].setdefault(layer.source, []).append(n)
        for n, value in enumerate(self.values):
            for source in dict.fromkeys(value.taken):
                found[type(value)].setdefault(source, []).append(n)
        return found

    @cached_property
    def normed(self) -> set[int]:
        """Numbers of the values that batch norm takes, and of those joined to them."""
        return self._with_sources({own.source for own in self.layers if isinstance(own, Norm)})

    @cached_property
    def floats(self) -> set[int]:
        """Numbers of the joined values that something takes but batch norm, and of those joined to them."""
        others = self.takers, self.adders, self.poolers, self.scalers
        values = enumerate(self.values)
        joined = [i for i, own in values if isinstance(own, Joined)]
        taken = (i for i in joined if self.values[i].is_output or any(of(i) for of in others))
        return self._with_sources({*taken})

    def _with_sources(self, found: set[int]) -> set[int]:
        for i, value in reversed([*enumerate(self.values)]):
            if isinstance(value, Joined) and i in found:
                found |= {*value.sources}
        return found

    @property
    def products(self) -> list[Layer]:
        """The layers that multiply codes."""
        return [own for own in self.layers if isinstance(own, Layer)]

    def product(self, n: int) -> Layer:
        """Return layer ``n``, which multiplies codes."""
        layer = self.layers[n]
        assert isinstance(layer, Layer)
        return layer

    def adders(self, value: int) -> Sequence[int]:
        """Return the numbers of the values to which a value is added."""
        return self._taken_by[Value].get(value, ())

    def poolers(self, value: int) -> Sequence[int]:
        """Return the numbers of the values that are pooled from a value."""
        return self._taken_by[Pooled].get(value, ())

    def scalers(self, value: int) -> Sequence[int]:
        """Return the numbers of the values that are scaled from a value, or of which it is the gate."""
        return self._taken_by[Scaled].get(value, ())

    def users(self, value: int) -> int:
        """Return how many layers and values take a value."""
        return sum(len(own.get(value, ())) for own in self._taken_by.values())

    @property
    def computed_again(self) -> set[int]:
        """Numbers of the layers whose values backward computes from their sums."""
        found = {i for i, value in enumerate(self.values) if value.curve is not None}
        found |= {value.source for value in self.values if isinstance(value, Scaled)}
        return {n for i in found for n in self.values[i].layers}

    def backward(self, needs_input: bool) -> list[int | Return]:
        """Return in which order gradients are computed: of layers, by number, and of values."""
        return _Order(self, needs_input).steps


class _Order:
    def __init__(self, segment: Segment, needs_input: bool) -> None:
        self.segment, self.needs_input = segment, needs_input
        self.steps: list[int | Return] = []
        numbers = range(INPUT, len(segment.values))
        self._added: dict[int, list[int]] = {i: [] for i in numbers}
        self._joined: dict[int, list[int]] = {i: [] for i in numbers}
        self._outer = {i for i in numbers if i != INPUT and segment.values[i].is_output}
        self._left = {i: segment.users(i) + (i in self._outer) for i in numbers}
        self._begun: set[int] = set()
        for i in sorted(self._outer):
            self._give(i, None)
        for i in reversed(range(len(segment.values))):
            value = segment.values[i]
            if isinstance(value, Pooled):
                self._left[value.source] -= 1
                self._return(value.source, None, i)
            elif isinstance(value, Joined):
                for source in value.sources:
                    self._give(source, i, self._joined)
            elif isinstance(value, Scaled):
                self._left[value.gate] -= 1
                self._return(value.gate, None, gated=i)
                self._give(value.source, i)
            for n in value.layers:
                self.steps.append(n)
                source = segment.layers[n].source
                if source != INPUT or needs_input:
                    self._left[source] -= 1
                    self._return(source, n)

    def _give(self, i: int, adder: int | None, noted: dict[int, list[int]] | None = None) -> None:
        """Note a gradient that comes back as it is; add it up when it is the last."""
        if i == INPUT and not self.needs_input:
            return
        if adder is not None:
            (self._added if noted is None else noted)[i].append(adder)
        self._left[i] -= 1
        if self._left[i] == 0:
            self._return(i, None)

    def _return(
        self, i: int, layer: int | None, pooled: int | None = None, gated: int | None = None
    ) -> None:
        continues = i in self._begun
        room = 1 if continues else 2
        added, self._added[i] = self._added[i][:room], self._added[i][room:]
        joined: list[int] = []
        masks = layer is not None and isinstance(self.segment.layers[layer], Layer)
        if not masks:  # else what is added would be masked, too
            joined, self._joined[i] = self._joined[i], []
        is_last = self._left[i] == 0 and not self._added[i] and not self._joined[i]
        outer = i in self._outer
        rest = outer, is_last, pooled, gated, tuple(joined)
        self.steps.append(Return(i, layer, continues, tuple(added), *rest))
        self._outer.discard(i)
        self._begun.add(i)
        if self._left[i] == 0 and not is_last:
            self._return(i, None)
        elif is_last and i != INPUT:
            for other in self.segment.values[i].values:
                self._give(other, i)
