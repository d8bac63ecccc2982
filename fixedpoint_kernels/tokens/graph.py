"""What a segment of a transformer is: linear layers, layer norms, activation functions, attention, sums.

Values are tensors of (samples, tokens, features). They are numbered: first those that come in, then
what each operation makes.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fixedpoint_kernels.dropout import Odds
from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.functions import Curve

__all__ = [
    "Add",
    "Attention",
    "Curved",
    "Dropout",
    "Linear",
    "Multiply",
    "Norm",
    "Operation",
    "Part",
    "Relu",
    "Segment",
]


@dataclass(frozen=True)
class Linear:
    """A linear layer: codes of its input with codes of its weight.

    Args:
        source: Number of the value that it takes.
        inputs: Format to which this is rounded, to nearest.
        weight: Format of the weight, signed.
        shape: Outputs and inputs, multiples of 16.
        clip: Whether the gradient of clamped inputs is 0.
        is_turned: Whether the weight, and its gradient, lie as (inputs, outputs).
        by_channel: Whether outputs have fractional bits of their own, which each call gives: ``weight`` is
            the format of those that have none.
    """

    source: int
    inputs: FixedPoint
    weight: FixedPoint
    shape: tuple[int, int]
    clip: bool = True
    is_turned: bool = False
    by_channel: bool = False

    @property
    def sources(self) -> tuple[int, ...]:
        """Numbers of the values that it takes."""
        return (self.source,)


@dataclass(frozen=True)
class Norm:
    """Layer normalisation of the features of each token.

    Args:
        source: Number of the value that it takes.
        eps: Added to the variance, or to the mean square.
        centred: Whether the mean is taken off first; without, it is RMS normalisation, which has no shift.
    """

    source: int
    eps: float = 1e-5
    centred: bool = True

    @property
    def sources(self) -> tuple[int, ...]:
        """Numbers of the values that it takes."""
        return (self.source,)


@dataclass(frozen=True)
class Curved:
    """An activation function, see ``functions.Curve``."""

    source: int
    curve: Curve

    @property
    def sources(self) -> tuple[int, ...]:
        """Numbers of the values that it takes."""
        return (self.source,)


@dataclass(frozen=True)
class Relu:
    """A number, or 0 where it is below 0."""

    source: int

    @property
    def sources(self) -> tuple[int, ...]:
        """Numbers of the values that it takes."""
        return (self.source,)


@dataclass(frozen=True)
class Dropout:
    """A number times a factor, or 0, by chance; each call gives the seed.

    Args:
        source: Number of the value that it takes.
        odds: Of 0.
    """

    source: int
    odds: Odds

    @property
    def sources(self) -> tuple[int, ...]:
        """Numbers of the values that it takes."""
        return (self.source,)


@dataclass(frozen=True)
class Add:
    """The sum of two values."""

    source: int
    other: int

    @property
    def sources(self) -> tuple[int, ...]:
        """Numbers of the values that it takes."""
        return self.source, self.other


@dataclass(frozen=True)
class Multiply:
    """The product of two values, element by element, as gated networks have it."""

    source: int
    other: int

    @property
    def sources(self) -> tuple[int, ...]:
        """Numbers of the values that it takes."""
        return self.source, self.other


class Part(NamedTuple):
    """Where the heads of queries, keys or values lie among the features of a value.

    Args:
        value: Its number.
        start: First feature of the first head.
        step: Features from one head to the next.
    """

    value: int
    start: int
    step: int


@dataclass(frozen=True)
class Attention:
    """Scaled dot-product attention of the tokens of a sample; heads lie side by side in the result.

    Args:
        queries: Where they lie, in values that linear layers make.
        keys: So too.
        values: So too.
        heads: How many.
        size: Features of a head, a multiple of 16.
        scale: By which products of queries and keys are multiplied.
        causal: Whether a token sees itself and those before it only.
        odds: Of 0, of what tokens are weighted with; None: no dropout.
    """

    queries: Part
    keys: Part
    values: Part
    heads: int
    size: int
    scale: float
    causal: bool = False
    odds: Odds | None = None

    @property
    def parts(self) -> tuple[Part, Part, Part]:
        """Queries, keys and values."""
        return self.queries, self.keys, self.values

    @property
    def sources(self) -> tuple[int, ...]:
        """Numbers of the values that it takes, each once."""
        return tuple(dict.fromkeys(part.value for part in self.parts))


Operation = Linear | Norm | Curved | Relu | Dropout | Add | Multiply | Attention


@dataclass(frozen=True)
class Segment:
    """Operations in order.

    Args:
        inputs: Features of each value that comes in, multiples of 16.
        operations: Each makes the next value.
        outputs: Numbers of the values that leave.

    Raises:
        ValueError: Something does not fit.
    """

    inputs: tuple[int, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[int, ...]

    def __post_init__(self) -> None:
        widths = self.widths()
        if any(width % 16 or width < 1 for width in widths):
            raise ValueError(f"features must be multiples of 16, got {widths}")
        if not self.outputs or not all(len(self.inputs) <= v < len(widths) for v in self.outputs):
            raise ValueError(f"outputs must be values that operations make, got {self.outputs}")
        used = {s for op in self.operations for s in op.sources} | set(self.outputs)
        if used != set(range(len(widths))):
            raise ValueError("each value must be taken by an operation, or leave")

    def __hash__(self) -> int:
        """Return what is computed once: programs are looked up by it at each call."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.inputs, self.operations, self.outputs))

    @cached_property
    def has_dropout(self) -> bool:
        """Whether an operation makes numbers 0 by chance."""
        own = (op for op in self.operations if isinstance(op, Dropout | Attention))
        return any(op.odds is not None for op in own)

    def widths(self) -> list[int]:
        """Return how many features each value has.

        Raises:
            ValueError: An operation takes what is not there, or other features.
        """
        widths = list(self.inputs)
        for op in self.operations:
            if not all(0 <= source < len(widths) for source in op.sources):
                raise ValueError(f"{op} takes a value that is not made before it")
            self._check(op, widths)
            if isinstance(op, Linear):
                widths.append(op.shape[0])
            elif isinstance(op, Attention):
                widths.append(op.heads * op.size)
            else:
                widths.append(widths[op.source])
        return widths

    def _check(self, op: Operation, widths: list[int]) -> None:
        if isinstance(op, Linear):
            if op.shape[1] != widths[op.source]:
                raise ValueError(f"{op} takes {widths[op.source]} features")
            if op.inputs.wl > 8 or op.weight.wl > 8 or not op.weight.signed:
                raise ValueError(f"formats must have 8 bits or fewer, weights signed, got {op}")
        elif isinstance(op, Add | Multiply) and widths[op.source] != widths[op.other]:
            raise ValueError(f"{op} takes {widths[op.source]} and {widths[op.other]} features")
        elif isinstance(op, Attention):
            if op.size % 16:
                raise ValueError(f"features of a head must be a multiple of 16, got {op.size}")
            for part in op.parts:
                end = part.start + (op.heads - 1) * part.step + op.size
                if part.value < len(self.inputs) or end > widths[part.value]:
                    raise ValueError(f"{part} does not lie in a value that an operation makes")
