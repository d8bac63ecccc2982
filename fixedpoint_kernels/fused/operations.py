"""What an operation of a program is: numbers, some of which are known later."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fixedpoint_kernels.fused import fields as f
from fixedpoint_kernels.products import jobs

__all__ = ["Addresses", "Buffer", "Given", "Kept", "Number", "Operation", "place_buffers", "table"]


@dataclass(eq=False)
class Buffer:
    """Memory that is known by size first.

    Args:
        size: Bytes.
        first: First region that uses it.
        last: Last one.
        address: Of what it is given; operations that are never run together share memory.
    """

    size: int
    first: int = 2**31
    last: int = -1
    address: int = 0


class Kept(NamedTuple):
    """A place in the memory that forward leaves for backward."""

    offset: int


class Given(NamedTuple):
    """An address that each call gives, of a layer or value."""

    name: str
    number: int


Number = int | Buffer | Kept | Given
Details = Callable[[int], jobs.Described]


@dataclass
class Operation:
    """A row of the table.

    Args:
        numbers: By their place in the row, see ``fields``.
        reals: Scale, lowest and highest code.
        number: ReLU's ceiling, or that of a curve.
        details: Of a product, for so many images at a time.
        bytes_an_image: That it touches.
        scratch: Bytes of each part of a thread's memory that it uses; of some, an image.
    """

    numbers: dict[int, Number]
    reals: tuple[float, float, float] = (0.0, 0.0, 0.0)
    number: float = 0.0
    details: Details | None = None
    bytes_an_image: int = 0
    scratch: dict[int, int] = field(default_factory=dict)


class Addresses(NamedTuple):
    """Where in a table which addresses belong: those of kept memory, and those given at each call."""

    kept: tuple[np.ndarray, np.ndarray, np.ndarray]
    given: dict[tuple[str, int], list[tuple[int, int]]]


def place_buffers(turns: Sequence[Sequence[Operation]], take: Callable[[int], int]) -> None:
    """Give buffers addresses; those that are not needed in the same turns share memory.

    Args:
        turns: Operations of each.
        take: Returns the address of so many bytes.
    """
    used: dict[Buffer, None] = {}
    for k, operations in enumerate(turns):
        for op in operations:
            for number in op.numbers.values():
                if isinstance(number, Buffer):
                    number.first, number.last = min(number.first, k), max(number.last, k)
                    used[number] = None
    free: list[tuple[int, int]] = []  # size and address
    for k in range(len(turns)):
        for buffer in (b for b in used if b.first == k):
            fitting = [place for place in free if place[0] >= buffer.size]
            if fitting:
                found = min(fitting)
                free.remove(found)
            else:
                found = buffer.size, take(buffer.size)
            buffer.size, buffer.address = found
        free += [(b.size, b.address) for b in used if b.last == k]


def table(operations: list[Operation]) -> tuple[np.ndarray, np.ndarray, Addresses]:
    """Return the numbers and reals of operations, and which addresses belong where."""
    rows = np.zeros((len(operations), f.COUNT), np.int64)
    reals = np.array([(*op.reals, op.number) for op in operations], np.float32).reshape(-1, 4)
    kept: list[tuple[int, int, int]] = []
    given: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for k, op in enumerate(operations):
        for place, number in op.numbers.items():
            if isinstance(number, Kept):
                kept.append((k, place, number.offset))
            elif isinstance(number, Given):
                given.setdefault((number.name, number.number), []).append((k, place))
            elif isinstance(number, Buffer):
                rows[k, place] = number.address
            else:
                rows[k, place] = number
    kept_rows, places, offsets = np.array(kept, np.int64).reshape(-1, 3).T
    return rows, reals, Addresses((kept_rows, places, offsets), given)
