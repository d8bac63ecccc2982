"""Bytes that the forward-save options keep instead of whole tensors: plain numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from perfmodel.checks import check_whole

__all__ = [
    "Division",
    "compact_bytes",
    "conv_block_ratio",
    "few_bit_bytes",
    "linear_block_ratio",
]

TILE = 1024  # elements of a tile of bit planes: 128 bytes a bit


def few_bit_bytes(elements: int, bits: int) -> int:
    """Return the bytes of a few-bit code: whole tiles of bit planes.

    Args:
        elements: Of the activation's input.
        bits: Of a code, 1 to 8.

    Raises:
        TypeError: A number is not whole.
        ValueError: A number is out of range.

    Source:
        Few-bit backward, section 2. Differs: tiles are rounded up.
    """
    check_whole(0, elements=elements)
    check_whole(1, 8, bits=bits)
    return math.ceil(elements / TILE) * (TILE // 8) * bits


@dataclass(frozen=True)
class Division:
    """How DIVISION compresses activations.

    Args:
        block: Edge of the blocks whose means are kept in bfloat16.
        bits: Of a quantised residual, 0 to 8.
        is_cut: Whether blocks are cut at the edge; False: left out, as in the released code.
        rows: Share of an input's rows that linear layers keep, whole, in place of all compressed.

    Raises:
        TypeError: ``block`` or ``bits`` is no whole number, or ``rows`` no number.
        ValueError: One of them is out of range.
    """

    block: int = 8
    bits: int = 2
    is_cut: bool = True
    rows: float | None = None

    def __post_init__(self) -> None:
        check_whole(1, block=self.block)
        check_whole(0, 8, bits=self.bits)
        if self.rows is not None and not isinstance(self.rows, int | float):
            raise TypeError(f"rows must be a number above 0, at most 1, or None, got {self.rows!r}")
        if self.rows is not None and not 0 < self.rows <= 1:
            raise ValueError(f"rows must be above 0, at most 1, got {self.rows!r}")

    def size_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of one compressed tensor.

        Args:
            shape: ``(batch, channels, spatial...)``, with one (min, step) pair a plane; or
                ``(batch..., features)`` of a linear layer, with one pair a row.

        Source:
            DIVISION, equation 55. Differs: whole bytes a tensor.
        """
        planes, sides = _planes(shape)
        elements = planes * math.prod(sides)
        if elements == 0:
            return 0
        if math.prod(sides) == 1:
            return 2 * elements
        means = planes * math.prod(self._blocks(side) for side in sides)
        return 2 * means + math.ceil(elements * self.bits / 8) + 4 * planes

    def linear_bytes(self, shape: Sequence[int], itemsize: int = 4) -> int:
        """Return the bytes that a linear layer keeps of an input: rows and their numbers, with ``rows``.

        Args:
            shape: ``(rows..., features)``.
            itemsize: Bytes an element.
        """
        if self.rows is None or math.prod(shape) == 0:
            return self.size_bytes(shape)
        kept = math.ceil(self.rows * math.prod(shape[:-1]))
        return kept * (itemsize * shape[-1] + 4)

    def _blocks(self, side: int) -> int:
        block = min(self.block, side)
        return math.ceil(side / block) if self.is_cut else side // block


def _planes(shape: Sequence[int]) -> tuple[int, Sequence[int]]:
    sides = min(len(shape), max(1, min(len(shape) - 2, 3)))
    leading = len(shape) - sides
    return math.prod(shape[:leading]), shape[leading:]


def conv_block_ratio(side: int, block: int = 8, bits: int = 2) -> float:
    """Return how much DIVISION compresses convolution, batch norm and ReLU: equation 54.

    As in the paper, a plain ReLU is charged one byte an element.

    Raises:
        TypeError: A number is not whole.
        ValueError: A number is below 1.
    """
    check_whole(1, side=side, block=block, bits=bits)
    lowest = 4 / min(block, side) ** 2
    return 9 / (lowest + bits / 4 + 8 / side**2 + 1 / 8)


def linear_block_ratio(features: int, block: int = 8, bits: int = 2) -> float:
    """Return how much DIVISION compresses a linear layer and ReLU: equation 56.

    Raises:
        TypeError: A number is not whole.
        ValueError: A number is below 1.
    """
    check_whole(1, features=features, block=block, bits=bits)
    return 5 / (2 / min(block, features) + bits / 8 + 4 / features + 1 / 8)


STATES = {  # bytes of an element's codes, of the master and then of each moment
    "sgd": (2,),
    "momentum": (2, 1),
    "adam": (2, 1, 1),
}
SCALED, LEAST = 256, 64  # elements of a row that share a scale; elements of the shortest row
SCALE = 4  # bytes


def compact_bytes(shapes: Sequence[Sequence[int]], states: str, tensors: int = 0) -> int:
    """Return the bytes of an optimizer's state with ``compact_state=True``.

    A parameter of fewer than two dimensions, or with rows of fewer than 64 elements, keeps float32.

    Args:
        shapes: Of the parameters that train.
        states: One of ``STATES``: ``"sgd"`` without momentum, ``"momentum"``, or ``"adam"``, for
            Adam and AdamW, which also count steps in 4 bytes a parameter.
        tensors: How many more the policy keeps of each weight, of two or more dimensions: the
            paper's one, the sum of its window's gradients.

    Raises:
        ValueError: ``states`` is unknown.
    """
    if states not in STATES:
        raise ValueError(f"states must be one of {', '.join(STATES)}, got {states!r}")
    steps = 4 * len(shapes) if states == "adam" else 0
    own = [(*STATES[states], *(1,) * (tensors if len(shape) > 1 else 0)) for shape in shapes]
    return steps + sum(map(_state_bytes, shapes, own))


def _state_bytes(shape: Sequence[int], widths: Sequence[int]) -> int:
    elements, row = math.prod(shape), math.prod(shape[1:])
    if len(shape) < 2 or row < LEAST:
        return 4 * elements * len(widths)
    scales = shape[0] * math.ceil(row / SCALED)
    return elements * sum(widths) + SCALE * scales * len(widths)
