"""Rows of numbers in the making, of which a program is, and who needs which memory of a thread until when."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fixedpoint_kernels.fused.operations import Cells
from fixedpoint_kernels.tokens import fields as f

__all__ = ["SPARE_ROWS", "Given", "Kept", "Local", "Number", "Pass", "Rows"]

SPARE_ROWS = 64
"""That tiles, and rounding of gradients, reach behind the last row."""


class Kept(NamedTuple):
    """A place in what forward leaves for backward."""

    offset: int


class Given(NamedTuple):
    """An address that each call brings."""

    name: str
    number: int


@dataclass(eq=False)
class Local:
    """Rows of a value, or of its gradient, in a thread's memory."""

    width: int
    first: int
    last: int = -1
    size: int = 0
    offset: int = 0


Number = int | Kept | Given | Local


@dataclass
class Pass:
    """Operations of one direction.

    Args:
        table: See ``fields``.
        reals: Row of float32 of each.
        kept: Rows and places of the table, and offsets in kept memory.
        given: Cells of the addresses that calls bring.
    """

    table: np.ndarray
    reals: np.ndarray
    kept: tuple[np.ndarray, np.ndarray, np.ndarray]
    given: Cells


@dataclass
class Rows:
    """Rows of numbers in the making, and who needs which memory of a thread until when."""

    numbers: list[dict[int, Number]] = field(default_factory=list)
    reals: list[tuple[float, ...]] = field(default_factory=list)
    locals: list[Local] = field(default_factory=list)

    def add(self, kind: int, numbers: Mapping[str, Number], *reals: float) -> None:
        """Add an operation: its kind, and what stands where, by names of ``fields``."""
        row = {f.KIND: kind} | {getattr(f, name): number for name, number in numbers.items()}
        for number in numbers.values():
            if isinstance(number, Local):
                number.last = len(self.numbers)
        self.numbers.append(row)
        self.reals.append((*reals, 0.0, 0.0, 0.0, 0.0)[:4])

    def local(self, width: int) -> Local:
        """Return memory for rows of ``width`` float32 that the next operation is the first to need."""
        self.locals.append(Local(width, len(self.numbers)))
        return self.locals[-1]

    def place(self, rows: int) -> int:
        """Give memory to what is local, and return how much that takes."""
        free: list[tuple[int, int]] = []  # size and offset
        end = 0
        for k in range(len(self.numbers)):
            for own in (v for v in self.locals if v.first == k):
                size = 4 * own.width * (rows + SPARE_ROWS)
                fitting = [place for place in free if place[0] >= size]
                if fitting:
                    place = min(fitting)
                    free.remove(place)
                else:
                    place = size, end
                    end += size
                own.size, own.offset = place
            free += [(v.size, v.offset) for v in self.locals if v.last == k]
        return end

    def finished(self, local: int) -> Pass:
        """Return all as arrays; what is local lies from ``local`` on in a thread's memory."""
        table = np.zeros((len(self.numbers), f.COUNT), np.int64)
        kept: list[tuple[int, int, int]] = []
        given: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for k, numbers in enumerate(self.numbers):
            for place, number in numbers.items():
                if isinstance(number, Kept):
                    kept.append((k, place, number.offset))
                elif isinstance(number, Given):
                    given.setdefault((number.name, number.number), []).append((k, place))
                else:
                    is_local = isinstance(number, Local)
                    table[k, place] = local + number.offset if is_local else number
        cells = np.array(kept, np.int64).reshape(-1, 3).T
        reals = np.array(self.reals, np.float32).reshape(-1, 4)
        return Pass(table, reals, (cells[0], cells[1], cells[2]), Cells(given))
