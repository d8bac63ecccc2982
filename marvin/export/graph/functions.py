"""Functions of single values: bounds, and tables of codes."""

from dataclasses import dataclass

from torch import Tensor

from fixedpoint_kernels import FixedPoint
from marvin.export.graph.nodes import Flatten, MaxPool, Operation, Relu
from marvin.export.graph.views import Pad, Reshape, Slice, Transpose

__all__ = ["KEEP_ORDER", "PASS_ON", "Clip", "Mul", "Table"]


@dataclass(frozen=True, eq=False)
class Clip(Operation):
    """Each code, or the bound that it is beyond.

    Args:
        low: Smallest code, at the ``fl`` of the source.
        high: Largest code.
        source_fl: Of the source, and of the result.
    """

    low: int
    high: int
    source_fl: int


@dataclass(frozen=True, eq=False)
class Mul(Operation):
    """The products of two values, at the sum of their ``fl``; sides of 1 are repeated."""


@dataclass(frozen=True, eq=False)
class Table(Operation):
    """A function of one variable: for each code of the source, the code of its value.

    Every value is computed once, in float64, and rounded to ``fmt``: nearest, ties to even, saturating.
    So it is exact by construction.

    Args:
        codes: Of the results, int64, shape ``(n,)``.
        low: The source's code that ``codes[0]`` belongs to; the next belongs to ``low + 1``.
        source_fl: Of the source: a code of it is worth ``2**-source_fl``.
        fmt: Of the results.
        function: Its name, for reports.
    """

    codes: Tensor
    low: int
    source_fl: int
    fmt: FixedPoint
    function: str


PASS_ON = (MaxPool, Flatten, Reshape, Transpose, Slice, Pad)
"""Operations that give on some of the numbers they take."""
KEEP_ORDER = (Relu, Clip, *PASS_ON)
"""Operations that keep the order of numbers: rounding before them or behind them is the same."""
