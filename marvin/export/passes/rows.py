"""Numbers that depend on how many fractional bits a source has: of norms of rows, softmax, bounds and tables."""

from dataclasses import replace
from fractions import Fraction

import torch

from marvin.export.graph.functions import Clip, Table
from marvin.export.graph.nodes import Operation, Value
from marvin.export.graph.transformers import Norm, Softmax

__all__ = ["refitted", "root_numbers"]

_ROW_BITS = 28  # of n times a code
_VARIANCE_BITS = 60
_PRECISION = 10


def root_numbers(x: Value, eps: float | Fraction) -> dict[str, int]:
    """Return ``shift``, ``precision``, ``epsilon`` and ``source_fl`` of a norm, with which everything fits in 63 bits.

    Args:
        x: What it takes.
        eps: What is added to variances.
    """
    n, largest = x.shape[-1], max(-x.low, x.high, 1)

    def epsilon(shift: int) -> int:
        return round(Fraction(eps) * n * n * Fraction(4) ** (x.fl - shift))

    shift = 0
    while (n * (largest >> shift)).bit_length() > _ROW_BITS or epsilon(shift) >> 2 * _ROW_BITS:
        shift += 1
    variance = (n * ((largest >> shift) + 1)) ** 2 + epsilon(shift)
    precision = max(0, min(_PRECISION, (_VARIANCE_BITS - variance.bit_length()) // 2))
    return {
        "shift": shift,
        "epsilon": epsilon(shift),
        "precision": precision,
        "source_fl": x.fl,
    }


def refitted(op: Operation, x: Value) -> Operation:
    """Return an operation for a source that has got another ``fl``, or other codes.

    Bounds become the nearest codes; a table has, for each code, what it had for the nearest one before.

    Args:
        op: As it was for the source before.
        x: The value that it takes now.
    """
    if not isinstance(op, Norm | Softmax | Clip | Table):
        return op
    has_all = not isinstance(op, Table) or op.low <= x.low <= x.high < op.low + len(op.codes)
    if op.source_fl == x.fl and has_all:
        return op
    if isinstance(op, Clip | Table):
        step = Fraction(2) ** (op.source_fl - x.fl)  # codes before in one of now
        if isinstance(op, Clip):
            return replace(op, low=round(op.low / step), high=round(op.high / step), source_fl=x.fl)
        places = torch.tensor([round(code * step) - op.low for code in range(x.low, x.high + 1)])
        codes = op.codes[places.clamp(0, len(op.codes) - 1)]
        return replace(op, codes=codes, low=x.low, source_fl=x.fl)
    if isinstance(op, Norm):
        n = len(op.gain)
        eps = Fraction(op.epsilon, n * n) / Fraction(4) ** (op.source_fl - op.shift)
        return replace(op, **root_numbers(x, eps))
    shift = op.shift + x.fl - op.source_fl
    table = op.codes[
        :: 1 << max(0, -shift)
    ]  # steps of the codes are coarser than those of the table
    return replace(op, shift=max(0, shift), codes=table.contiguous(), source_fl=x.fl)
