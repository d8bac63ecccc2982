"""Parts of a network whose layers pass codes on: convolutions, batch norm, sums, ReLU."""

from dataclasses import dataclass

from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.products.shapes import Window

__all__ = ["INPUT", "Layer", "Segment", "Value"]

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
