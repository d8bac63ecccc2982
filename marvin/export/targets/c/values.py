"""Values in memory, functions that make them, and orders in which codes lie."""

from dataclasses import dataclass, field
from math import prod

import numpy as np

from marvin.export.execute.arithmetic import Codes

__all__ = [
    "Function",
    "Scratch",
    "Shape",
    "Stored",
    "channels_last",
    "indented",
    "same_order",
    "transposed",
]


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A value in memory.

    Args:
        word: Its C type.
        fl: Fractional length; it may be shorter than the network's, where codes end with zeros.
        shape: Of one sample, as the network has it.
        order: Which code of the network lies at each place of the memory, int64; None where each is at its own.
        low: Smallest code.
        high: Largest code.
    """

    word: str
    fl: int
    shape: Shape
    order: Codes | None
    low: int
    high: int

    @property
    def count(self) -> int:
        """How many codes."""
        return prod(self.shape)


@dataclass(frozen=True)
class Scratch:
    """Memory that a function needs while it runs.

    Args:
        word: Type of the parameter.
        stored: Type of integers that is long enough.
        count: How many, where memory is short.
        vectors: Of rows: how many, where there are vectors; else 0.
    """

    word: str
    stored: str
    count: int
    vectors: int = 0


@dataclass
class Function:
    """A C function.

    Args:
        name: Its name.
        text: Its definition.
        inputs: Values it takes, in the order of its parameters.
        outputs: Values it stores, likewise.
        scratch: Memory it needs meanwhile, the last parameters.
        others: Values that are the codes of an output in another order: the output, and how they lie.
    """

    name: str
    text: str
    inputs: list[str]
    outputs: dict[str, Stored]
    scratch: list["Scratch"] = field(default_factory=list)
    others: dict[str, tuple[str, Stored]] = field(default_factory=dict)


def channels_last(shape: Shape) -> Codes | None:
    """Return the order of memory in which images, and sequences, have their channels side by side."""
    codes = np.arange(prod(shape))
    order = codes.reshape(shape[0], -1).T.reshape(-1)
    return None if np.array_equal(order, codes) else order


def transposed(shape: Shape, axes: tuple[int, ...], order: Codes | None) -> Codes | None:
    """Return the order of a transposed value that lies where the value of ``shape`` lies."""
    count = prod(shape)
    sources = np.arange(count).reshape(shape).transpose(axes).reshape(-1)
    results = np.empty(count, np.int64)
    results[sources] = np.arange(count)
    found = results if order is None else results[order]
    return None if np.array_equal(found, np.arange(count)) else found


def same_order(x: Codes | None, y: Codes | None) -> bool:
    """Say whether two values lie in memory alike."""
    return y is None if x is None else y is not None and np.array_equal(x, y)


def indented(lines: list[str]) -> list[str]:
    """Return lines with blanks in front, by braces."""
    found, depth = [], 1
    for line in lines:
        depth -= line.startswith("}")
        found.append(line if line.startswith("#") else "    " * depth + line)
        depth += line.endswith("{")
    return found
