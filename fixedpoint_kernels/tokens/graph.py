"""What a segment of a transformer is: linear layers, layer norms, activation functions, attention, sums.

Values are tensors of (samples, tokens, features). They are numbered: first those that come in, then
what each operation makes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fixedpoint_kernels.dropout import Odds
from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.functions import Curve
from fixedpoint_kernels.products.shapes import LONGEST_SUM, sums_fit

__all__ = [
    "Add",
    "Attention",
    "Curved",
    "Cut",
    "Dropout",
    "Linear",
    "Multiply",
    "Norm",
    "Operation",
    "Part",
    "Relu",
    "Rotary",
    "Segment",
    "width_of",
]


@dataclass(frozen=True)
class _OfOne:
    source: int

    @property
    def sources(self) -> tuple[int, ...]:
        """Numbers of the values that it takes."""
        return (self.source,)


@dataclass(frozen=True)
class _OfTwo:
    source: int
    other: int

    @property
    def sources(self) -> tuple[int, ...]:
        """Numbers of the values that it takes."""
        return self.source, self.other


@dataclass(frozen=True)
class Linear(_OfOne):
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

    inputs: FixedPoint
    weight: FixedPoint
    shape: tuple[int, int]
    clip: bool = True
    is_turned: bool = False
    by_channel: bool = False


@dataclass(frozen=True)
class Norm(_OfOne):
    """Layer normalisation of the features of each token, or of each of its heads.

    Args:
        source: Number of the value that it takes.
        eps: Added to the variance, or to the mean square.
        centred: Whether the mean is taken off first; without, it is RMS normalisation, which has no shift.
        size: Features of a head, a multiple of 16; all heads share scale and shift. None: all features are one.
    """

    eps: float = 1e-5
    centred: bool = True
    size: int | None = None


@dataclass(frozen=True)
class Curved(_OfOne):
    """An activation function, see ``functions.Curve``."""

    curve: Curve


@dataclass(frozen=True)
class Relu(_OfOne):
    """A number, or 0 where it is below 0."""


@dataclass(frozen=True)
class Dropout(_OfOne):
    """A number times a factor, or 0, by chance; each call gives the seed.

    Args:
        source: Number of the value that it takes.
        odds: Of 0.
    """

    odds: Odds


@dataclass(frozen=True)
class Add(_OfTwo):
    """The sum of two values."""


@dataclass(frozen=True)
class Multiply(_OfTwo):
    """The product of two values, element by element, as gated networks have it."""


@dataclass(frozen=True)
class Cut(_OfOne):
    """Some features of a value that lie side by side, such as the gate of a layer that makes gate and values.

    Args:
        source: Number of the value that it takes.
        start: First of the features.
        width: How many, a multiple of 16.
    """

    start: int
    width: int


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
class Rotary:
    """Rotary position embedding of the heads in a part of a value; in the result they lie side by side.

    Of a head the first ``turned`` features, in halves (a, b), become (a, b) * cos + (-b, a) * sin; the others
    stay. In pairs, neighbours are a and b. Each call gives cosines and sines, of (tokens, turned) or (samples, tokens, turned).

    Args:
        part: Where the heads lie, in a value that a linear layer makes.
        heads: How many.
        size: Features of a head, a multiple of 16.
        turned: How many of them are turned, even.
        by_sample: Whether samples have cosines and sines of their own.
        in_pairs: Whether features lie as (a0, b0, a1, b1, ...).
    """

    part: Part
    heads: int
    size: int
    turned: int
    by_sample: bool = False
    in_pairs: bool = False

    @property
    def sources(self) -> tuple[int, ...]:
        """Numbers of the values that it takes."""
        return (self.part.value,)


@dataclass(frozen=True)
class Attention:
    """Scaled dot-product attention of the tokens of a sample; heads lie side by side in the result.

    Args:
        queries: Where they lie, in values that operations make.
        keys: So too.
        values: So too.
        heads: Of queries, how many.
        size: Features of a head, a multiple of 16.
        scale: By which products of queries and keys are multiplied.
        causal: Whether a token sees itself and those before it only.
        odds: Of 0, of what tokens are weighted with; None: no dropout.
        groups: How many heads of queries, one after the other, take the same head of keys and values.
    """

    queries: Part
    keys: Part
    values: Part
    heads: int
    size: int
    scale: float
    causal: bool = False
    odds: Odds | None = None
    groups: int = 1

    @property
    def heads_of_parts(self) -> tuple[tuple[Part, int], ...]:
        """Queries, keys and values, each with the number of its heads."""
        shared = self.heads // self.groups
        return (self.queries, self.heads), (self.keys, shared), (self.values, shared)

    @property
    def parts(self) -> tuple[Part, Part, Part]:
        """Queries, keys and values."""
        return self.queries, self.keys, self.values

    @property
    def sources(self) -> tuple[int, ...]:
        """Numbers of the values that it takes, each once."""
        return tuple(dict.fromkeys(part.value for part in self.parts))


Operation = Linear | Norm | Curved | Relu | Dropout | Add | Multiply | Cut | Rotary | Attention


def width_of(operation: Operation, widths: Sequence[int]) -> int:
    """Return how many features an operation makes of values of ``widths``."""
    if isinstance(operation, Linear):
        return operation.shape[0]
    if isinstance(operation, Attention | Rotary):
        return operation.heads * operation.size
    if isinstance(operation, Cut):
        return operation.width
    return widths[operation.source]


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
        long = [
            op.shape for op in self.operations if isinstance(op, Linear) and not sums_fit(op.shape)
        ]
        if long:
            raise ValueError(
                f"sums must have {LONGEST_SUM} products or fewer, got weights of {long}"
            )
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
            widths.append(width_of(op, widths))
        return widths

    def _check(self, op: Operation, widths: list[int]) -> None:
        if isinstance(op, Linear):
            _check_linear(op, widths[op.source])
        elif isinstance(op, Norm) and op.size is not None:
            if op.size < 16 or op.size % 16 or widths[op.source] % op.size:
                raise ValueError(
                    f"heads must have a multiple of 16 features, of {widths[op.source]}, got {op}"
                )
        elif isinstance(op, Add | Multiply) and widths[op.source] != widths[op.other]:
            raise ValueError(f"{op} takes {widths[op.source]} and {widths[op.other]} features")
        elif isinstance(op, Cut):
            if not 0 <= op.start < op.start + op.width <= widths[op.source]:
                raise ValueError(f"{op} does not lie in {widths[op.source]} features")
        elif isinstance(op, Attention | Rotary):
            self._check_parts(op, widths)

    def _check_parts(self, op: Attention | Rotary, widths: list[int]) -> None:
        if isinstance(op, Attention):
            if op.heads % op.groups:
                raise ValueError(f"heads must be a multiple of groups, got {op}")
            for part, heads in op.heads_of_parts:
                self._check_heads(part, heads, op.size, widths)
            return
        self._check_heads(op.part, op.heads, op.size, widths)
        if op.turned % 2 or not 0 < op.turned <= op.size:
            raise ValueError(f"turned features must be even, and of a head, got {op}")

    def _check_heads(self, part: Part, heads: int, size: int, widths: list[int]) -> None:
        if size % 16:
            raise ValueError(f"features of a head must be a multiple of 16, got {size}")
        end = part.start + (heads - 1) * part.step + size
        if part.value < len(self.inputs) or end > widths[part.value]:
            raise ValueError(f"{part} does not lie in a value that an operation makes")


def _check_linear(op: Linear, width: int) -> None:
    if op.shape[1] != width:
        raise ValueError(f"{op} takes {width} features")
    if op.inputs.wl > 8 or op.weight.wl > 8 or not op.weight.signed:
        raise ValueError(f"formats must have 8 bits or fewer, weights signed, got {op}")
