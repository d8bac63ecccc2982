"""Parts of a network whose layers pass codes on: convolutions, batch norm, sums, ReLU."""

from dataclasses import dataclass

from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.products.shapes import Window

__all__ = ["INPUT", "Layer", "Return", "Segment", "Value"]

INPUT = -1
"""Number of the value that comes into a segment."""


@dataclass(frozen=True)
class Layer:
    """A convolution of codes, then batch norm over the batch, or a bias, or neither.

    Args:
        source: Number of the value whose codes it takes.
        inputs: Format of these.
        weight: Format of its weight.
        shape: Of the weight: outputs, inputs, height, width.
        window: How it moves; one group.
        eps: Of batch norm; None: no batch norm.
        clip: Whether the gradient is 0 where a code was clamped.
    """

    source: int
    inputs: FixedPoint
    weight: FixedPoint
    shape: tuple[int, int, int, int]
    window: Window
    eps: float | None
    clip: bool = True


@dataclass(frozen=True)
class Value:
    """What layers make, for other layers to take: ``relu(layer + other)``.

    Args:
        layer: Number of the layer.
        other_layer: Number of another one that is added; None: none.
        other_value: Number of an earlier value that is added; None: none.
        relu: Whether what is below 0 becomes 0.
        is_output: Whether it leaves the segment.
    """

    layer: int
    other_layer: int | None = None
    other_value: int | None = None
    relu: bool = False
    is_output: bool = False

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers that make it."""
        return (self.layer,) if self.other_layer is None else (self.layer, self.other_layer)


@dataclass(frozen=True)
class Return:
    """Gradients that come back to a value, added up in this order and kept as bfloat16.

    Args:
        value: Number of the value.
        layer: Number of the layer whose input it is; None: none.
        continues: Whether what came back before is added.
        added: Numbers of later values to which it was added: their gradients are added.
        outer: Whether the gradient from outside is added.
        is_last: Whether this is all.
    """

    value: int
    layer: int | None
    continues: bool
    added: tuple[int, ...]
    outer: bool
    is_last: bool


@dataclass(frozen=True)
class Segment:
    """Layers and values, each after what it needs."""

    layers: tuple[Layer, ...]
    values: tuple[Value, ...]

    def sizes(self, size: tuple[int, int]) -> list[tuple[int, int]]:
        """Return height and width of what each layer makes, of an input of this size."""
        made_by = {n: i for i, value in enumerate(self.values) for n in value.layers}
        found: list[tuple[int, int]] = []
        of_values: dict[int, tuple[int, int]] = {INPUT: size}
        for n, layer in enumerate(self.layers):
            found.append(layer.window.outputs(of_values[layer.source], layer.shape[2:]))
            of_values[made_by[n]] = found[-1]
        return found

    def takers(self, value: int) -> list[int]:
        """Return the numbers of the layers that take a value's codes."""
        return [n for n, layer in enumerate(self.layers) if layer.source == value]

    def adders(self, value: int) -> list[int]:
        """Return the numbers of the values to which a value is added."""
        return [n for n, other in enumerate(self.values) if other.other_value == value]

    def backward(self, needs_input: bool) -> list[int | Return]:
        """Return in which order gradients are computed: of layers, by number, and of values."""
        return _Order(self, needs_input).steps


class _Order:
    def __init__(self, segment: Segment, needs_input: bool) -> None:
        self.segment, self.needs_input = segment, needs_input
        self.steps: list[int | Return] = []
        numbers = range(INPUT, len(segment.values))
        self._added: dict[int, list[int]] = {i: [] for i in numbers}
        self._outer = {i for i in numbers if i != INPUT and segment.values[i].is_output}
        self._left = {
            i: len(segment.takers(i)) + len(segment.adders(i)) + (i in self._outer) for i in numbers
        }
        self._begun: set[int] = set()
        for i in sorted(self._outer):
            self._give(i, None)
        for i in reversed(range(len(segment.values))):
            for n in segment.values[i].layers:
                self.steps.append(n)
                source = segment.layers[n].source
                if source != INPUT or needs_input:
                    self._left[source] -= 1
                    self._return(source, n)

    def _give(self, i: int, adder: int | None) -> None:
        """Note a gradient that comes back as it is; add it up when it is the last."""
        if i == INPUT and not self.needs_input:
            return
        if adder is not None:
            self._added[i].append(adder)
        self._left[i] -= 1
        if self._left[i] == 0:
            self._return(i, None)

    def _return(self, i: int, layer: int | None) -> None:
        continues = i in self._begun
        room = 1 if continues else 2
        added, self._added[i] = self._added[i][:room], self._added[i][room:]
        is_last = self._left[i] == 0 and not self._added[i]
        outer = i in self._outer
        self.steps.append(Return(i, layer, continues, tuple(added), outer, is_last))
        self._outer.discard(i)
        self._begun.add(i)
        if self._left[i] == 0 and not is_last:
            self._return(i, None)
        elif is_last and i != INPUT:
            other = self.segment.values[i].other_value
            if other is not None:
                self._give(other, i)
