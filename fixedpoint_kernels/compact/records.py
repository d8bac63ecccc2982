"""What compact states are made of."""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.philox import Key

__all__ = [
    "BLOCK",
    "DTYPES",
    "FACTORS",
    "Adam",
    "Codes",
    "Kind",
    "Moves",
    "Noise",
    "Row",
    "Sgd",
    "Sum",
    "block_shape",
    "blocks_of",
    "check_codes",
    "flattened",
]

FACTORS = 1, 0x9E35, 0x6A0B, 0xC2B3  # odd; of the noise of each tensor of a parameter
BLOCK = 256  # elements that share a scale, at most
DTYPES = {"fixed": torch.int16, "signed": torch.int8, "squares": torch.uint8}
Kind = Literal["fixed", "signed", "squares"]


class Codes(NamedTuple):
    """A tensor in few bytes.

    Args:
        codes: Shape of the tensor, contiguous; int16 (``"fixed"``), int8 (``"signed"``) or uint8
            (``"squares"``).
        scales: float32, ``(rows, blocks)``: a row is what one index of the first dimension has,
            a block ``BLOCK`` of its elements, fewer at its end.
    """

    codes: Tensor
    scales: Tensor

    @property
    def size_bytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes


class Noise(NamedTuple):
    """Sixteen bits of noise an element: half of a word, the lower one first.

    The tensors of one parameter share them: each takes them times an odd number of its own, modulo
    2**16, which makes each as even as the bits are.

    Args:
        key: Where the words come from; element ``i`` has a half of word ``i >> 1``.
        lane: Which tensor of the parameter, 0 to 3.
    """

    key: Key
    lane: int = 0


class Sum(NamedTuple):
    """What ``add_many`` makes of one tensor.

    Args:
        codes: Of the sum, rounded.
        before: Codes that were added to.
        x: What was added, float32.
    """

    codes: Codes
    before: Codes
    x: Tensor


class Sgd(NamedTuple):
    """One step of ``torch.optim.SGD``; dampening is 0."""

    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool


class Adam(NamedTuple):
    """One step of ``torch.optim.Adam``, or of ``AdamW`` where the decay is ``decoupled``."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    step: int  # counted from 1


class Row(NamedTuple):
    """One parameter in ``step_many``.

    Args:
        master: ``Codes`` of kind ``"fixed"``, or float32, contiguous, which moves by ``Sgd`` alone.
        weight: float32, where the master goes, rounded.
        fmt: Of the weight; None: it is the master.
        stream: Of the noise of the weight, counted from the step's.
        offset: Position of the first element in the whole tensor.
        moments: For ``Sgd`` the momentum (``"signed"``), or none where it is 0; for ``Adam`` the
            first moment (``"signed"``) and the second (``"squares"``). Of a float32 master float32.
        noise: Stream of the noise of the states, counted from the step's.
    """

    master: Codes | Tensor
    weight: Tensor
    fmt: FixedPoint | None
    stream: int
    offset: int
    moments: tuple[Codes | Tensor, ...] = ()
    noise: int = 0

    @property
    def tensors(self) -> list[Tensor]:
        """What a step writes: of the master, the weight and the moments."""
        return flattened((self.master, self.weight, *self.moments))


class Moves(NamedTuple):
    """Which masters move, and how; sequences of one length.

    Args:
        rows: Positions among the parameters, ascending.
        grads: float32, contiguous.
        moves: Of each.
    """

    rows: Sequence[int]
    grads: Sequence[Tensor]
    moves: Sequence[Sgd | Adam]


def flattened(parts: Iterable[Codes | Tensor]) -> list[Tensor]:
    """Return the tensors that some values are kept in."""
    return [x for part in parts for x in (part if isinstance(part, Codes) else (part,))]


def blocks_of(shape: torch.Size) -> tuple[int, int]:
    """Return the rows of a tensor of two or more dimensions, and the blocks of each."""
    return shape[0], -(-shape[1:].numel() // BLOCK)


def check_codes(codes: Codes, kind: Kind, shape: torch.Size | None = None) -> None:
    """Refuse codes that kernels would not read, or behind which they would read other memory.

    Args:
        codes: To look at.
        kind: What they must be.
        shape: What they must have; None: any of two or more dimensions.

    Raises:
        ValueError: Codes or scales have another type or shape, or are not dense.
    """
    own, scales = codes
    is_alike = own.ndim >= 2 if shape is None else own.shape == shape
    if (
        is_alike
        and own.dtype is DTYPES[kind]
        and scales.dtype is torch.float32
        and scales.shape == blocks_of(own.shape)
        and own.layout is scales.layout is torch.strided
        and own.is_contiguous()
        and scales.is_contiguous()
    ):
        return
    asked = "(rows, ...)" if shape is None else tuple(shape)
    blocks = blocks_of(shape or own.shape) if shape or own.ndim >= 2 else "(rows, blocks)"
    got = f"{own.dtype} of {tuple(own.shape)}, scales {scales.dtype} of {tuple(scales.shape)}"
    raise ValueError(
        f"{kind} codes must be {DTYPES[kind]} of {asked}, their scales float32 of {blocks}, all "
        f"contiguous, got {got}"
    )


def block_shape(shape: torch.Size, *, is_coded: bool) -> tuple[int, int, int]:
    """Return how a kernel sees a tensor: its blocks, those of a row, and the columns.

    Without codes it is one row.
    """
    if is_coded:
        rows, count = blocks_of(shape)
        return rows * count, count, shape[1:].numel()
    count = -(-shape.numel() // BLOCK)
    return count, count, shape.numel()
