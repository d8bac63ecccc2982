"""What an operation of a program is: numbers, some of which are known later."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import itemgetter
from typing import NamedTuple, Protocol

import numpy as np

from fixedpoint_kernels.fused import fields as f
from fixedpoint_kernels.products import jobs

__all__ = ["Addresses", "Buffer", "Cells", "Given", "GivenNumbers", "Kept", "Number", "Operation"]
__all__ += ["Numbers", "noise_given", "place_buffers", "table", "write_over"]

_LINE = 64  # bytes: buffers begin at multiples


@dataclass(eq=False)
class Buffer:
    """Memory that is known by size first.

    Args:
        size: Bytes.
        first: First region that uses it.
        last: Last one.
        offset: In working memory; operations that are never run together share it.
    """

    size: int
    first: int = 2**31
    last: int = -1
    offset: int = 0


class Kept(NamedTuple):
    """A place in the memory that forward leaves for backward."""

    offset: int


class _Noisy(Protocol):
    noise: tuple[int, int]
    second_stream: int


class Given(NamedTuple):
    """An address that each call gives, of a layer or value."""

    name: str
    number: int


Number = int | Buffer | Kept | Given
Numbers = Sequence[int] | Mapping[int, int]
GivenNumbers = Mapping[str, Numbers]
"""What a call gives: by name, then by number of a layer or value."""
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


class Cells:
    """Cells of a table that get what each call gives.

    Args:
        given: Row and column of each, by names and numbers of layers or values.

    Attributes:
        keys: Name and number of each.
        rows: In a table.
        columns: In it.
    """

    def __init__(self, given: Mapping[tuple[str, int], Sequence[tuple[int, int]]]) -> None:
        keys = [key for key, own in given.items() for _ in own]
        places = [cell for own in given.values() for cell in own]
        order = sorted(range(len(keys)), key=lambda i: keys[i][0])  # a name's together
        self.keys = [keys[i] for i in order]
        self.rows, self.columns = np.array(places, np.int64).reshape(-1, 2)[order].T
        by_name = groupby(self.keys, itemgetter(0))
        self._takers = [(name, _taker([n for _, n in own])) for name, own in by_name]

    def numbers(self, given: GivenNumbers) -> list[int]:
        """Return what a call gives each cell."""
        return [*chain.from_iterable(take(given[name]) for name, take in self._takers)]

    def fill(self, table: np.ndarray, given: GivenNumbers) -> None:
        """Write into a table what a call gives: all at once, for each cell alone takes as long as a key."""
        table[self.rows, self.columns] = self.numbers(given)


class Addresses(NamedTuple):
    """Where in a table which addresses belong.

    Args:
        kept: Rows, columns and offsets, (3, n), of those in kept memory.
        work: The same of those in working memory.
        given: Cells of those given at each call.
    """

    kept: np.ndarray
    work: np.ndarray
    given: Cells

    def fill(self, table: np.ndarray, kept: int, work: int) -> None:
        """Write into a table the addresses in kept memory, and those in working memory."""
        for start, (rows, columns, offsets) in ((kept, self.kept), (work, self.work)):
            table[rows, columns] = offsets + start


def noise_given(layers: Sequence[_Noisy]) -> dict[str, list[int]]:
    """Return seeds and streams of what each layer rounds, for ``Cells``."""
    return {
        "seed": [own.noise[0] for own in layers],
        "stream": [own.noise[1] for own in layers],
        "second stream": [own.second_stream for own in layers],
    }


def _taker(numbers: list[int]) -> Callable[[Numbers], tuple[int, ...]]:
    """Return what takes the items of these numbers from a sequence or mapping."""
    take = itemgetter(*numbers)
    return take if len(numbers) > 1 else lambda own: (take(own),)


# what an operation writes element by element, and of the same elements what it reads
_READ: dict[Number, tuple[int, tuple[int, ...]]] = {
    f.VALUE: (f.Y, (f.Z, f.Z2)),
    f.FINISH: (f.OUT, (f.ADD, f.ADD2)),
    f.INPUT_PRODUCT: (f.OUT, (f.ADD,)),
}


def write_over(turns: Sequence[Sequence[Operation]]) -> None:
    """Let operations write over what they read, if nothing reads that later: it is near, other memory is not.

    Args:
        turns: Operations of each.
    """
    operations = [op for own in turns for op in own]
    uses: dict[Buffer, list[int]] = {}
    for k, op in enumerate(operations):
        for number in op.numbers.values():
            if isinstance(number, Buffer):
                uses.setdefault(number, []).append(k)
    for k, op in enumerate(operations):
        place, sources = _READ.get(op.numbers[f.KIND], (-1, ()))
        made = op.numbers.get(place)
        if not isinstance(made, Buffer) or uses[made][0] != k:
            continue
        for source in sources:
            own = op.numbers.get(source)
            if isinstance(own, Buffer) and own.size == made.size and uses[own][-1] == k:
                for other in uses[made]:
                    numbers = operations[other].numbers
                    numbers |= {n: own for n, number in numbers.items() if number is made}
                uses[own] += uses.pop(made)
                break


def place_buffers(turns: Sequence[Sequence[Operation]]) -> int:
    """Give buffers offsets, and return how many bytes they take.

    Those that are not needed in the same turns share memory.

    Args:
        turns: Operations of each.
    """
    end = 0
    used: dict[Buffer, None] = {}
    for k, operations in enumerate(turns):
        for op in operations:
            for number in op.numbers.values():
                if isinstance(number, Buffer):
                    number.first, number.last = min(number.first, k), max(number.last, k)
                    used[number] = None
    free: list[tuple[int, int]] = []  # size and offset
    for k in range(len(turns)):
        for buffer in (b for b in used if b.first == k):
            fitting = [place for place in free if place[0] >= buffer.size]
            if fitting:
                found = min(fitting)
                free.remove(found)
            else:
                found = buffer.size, end
                end += -(-buffer.size // _LINE) * _LINE + _LINE  # clearing writes 63 bytes more
            buffer.size, buffer.offset = found
        free += [(b.size, b.offset) for b in used if b.last == k]
    return end


def table(operations: list[Operation]) -> tuple[np.ndarray, np.ndarray, Addresses]:
    """Return the numbers and reals of operations, and which addresses belong where."""
    rows = np.zeros((len(operations), f.COUNT), np.int64)
    reals = np.array([(*op.reals, op.number) for op in operations], np.float32).reshape(-1, 4)
    kept: list[tuple[int, int, int]] = []
    work: list[tuple[int, int, int]] = []
    given: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for k, op in enumerate(operations):
        row = [0] * f.COUNT
        for place, number in op.numbers.items():
            if isinstance(number, int):  # most are
                row[place] = number
            elif isinstance(number, Kept):
                kept.append((k, place, number.offset))
            elif isinstance(number, Given):
                given.setdefault((number.name, number.number), []).append((k, place))
            else:
                work.append((k, place, number.offset))
        rows[k] = row
    kept_at, work_at = (np.array(own, np.int64).reshape(-1, 3).T for own in (kept, work))
    return rows, reals, Addresses(kept_at, work_at, Cells(given))
