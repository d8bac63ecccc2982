"""Operations that move codes and change none: shapes, orders, parts, zeros around, and values side by side."""

from dataclasses import dataclass

from marvin.export.graph.nodes import Operation

__all__ = ["Concat", "Pad", "Reshape", "Slice", "Transpose"]


@dataclass(frozen=True, eq=False)
class Reshape(Operation):
    """The same codes in the same order, in another shape.

    Args:
        shape: Of one sample.
    """

    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Transpose(Operation):
    """Dimensions in another order.

    Args:
        order: Dimension ``i`` of the result is ``order[i]`` of the source; of one sample, so the first
            dimension behind the batch is 0.
    """

    order: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Slice(Operation):
    """A part of one dimension.

    Args:
        axis: Of one sample, so 0 is the first behind the batch.
        start: First index.
        stop: One behind the last.
        step: From one index to the next, at least 1.
    """

    axis: int
    start: int
    stop: int
    step: int = 1


@dataclass(frozen=True, eq=False)
class Pad(Operation):
    """Zeros around a value.

    Args:
        before: How many come before each dimension of one sample.
        behind: How many come behind each.
    """

    before: tuple[int, ...]
    behind: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Concat(Operation):
    """Values one behind the other along a dimension, at the largest ``fl`` of all.

    Args:
        axis: Of one sample, so 0 is the first behind the batch.
    """

    axis: int
