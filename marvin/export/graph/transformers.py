"""What transformers have and other networks have not: products of values, norms, softmax, embeddings.

Each is defined in integers first; whoever computes it in floats approximates that. ``a // b`` rounds down.
"""

from dataclasses import dataclass

from torch import Tensor

from fixedpoint_kernels import FixedPoint
from marvin.export.graph.nodes import Operation

__all__ = ["Constant", "Embedding", "MatMul", "Norm", "Softmax"]


@dataclass(frozen=True, eq=False)
class Constant(Operation):
    """The same codes for each sample: what is learned of positions.

    Args:
        codes: int64, of the shape of one sample.
        codes_fmt: Of ``codes``.
    """

    codes: Tensor
    codes_fmt: FixedPoint


@dataclass(frozen=True, eq=False)
class Embedding(Operation):
    """Rows of a table; takes the network's input, which is whole numbers: the rows' indices.

    Args:
        weight: Codes, int64, shape ``(rows, features)``.
        weight_fmt: Of ``weight``.
    """

    weight: Tensor
    weight_fmt: FixedPoint


@dataclass(frozen=True, eq=False)
class MatMul(Operation):
    """Products of matrices, ``(..., m, k)`` with ``(..., k, n)``, at the sum of both ``fl``."""


@dataclass(frozen=True, eq=False)
class Norm(Operation):
    """Layer normalisation over the last dimension, or RMS normalisation; rounded once.

    Of the ``n`` codes ``c`` of a row, with ``half = 2**shift // 2``::

        x = (c + half) // 2**shift
        s = sum(x), 0 if not is_centered
        d = n * x - s                         # n times what x is from the mean
        v = n * sum(x * x) - s * s + epsilon  # n**2 times the variance
        r = isqrt(v * 4**precision), at least 1
        y = (d * gain * 2**precision + bias * r) / r, at the fl of the gain, rounded to fmt

    ``isqrt`` is the largest integer whose square is not larger. Everything fits in 63 bits.

    Args:
        gain: Codes, int64, shape ``(n,)``.
        gain_fmt: Of ``gain``.
        bias: Codes at the ``fl`` of the gain, int64, shape ``(n,)``, or None.
        bias_fmt: Of ``bias``; unused where there is none.
        epsilon: What is added to ``n**2`` variances.
        shift: Bits by which codes are shortened first.
        precision: Bits of the root behind the point.
        source_fl: Of the source.
        fmt: Of the result.
        is_centered: Whether the mean is taken away, as layer normalisation does.
    """

    gain: Tensor
    gain_fmt: FixedPoint
    bias: Tensor | None
    bias_fmt: FixedPoint
    epsilon: int
    shift: int
    precision: int
    source_fl: int
    fmt: FixedPoint
    is_centered: bool


@dataclass(frozen=True, eq=False)
class Softmax(Operation):
    """Softmax over the last dimension, by a table of exponentials; rounded once.

    Of the codes ``c`` of a row, with ``half = 2**shift // 2`` and ``last`` the index of the table's end::

        d = (max(c) - c + half) // 2**shift
        e = codes[min(d, last)]
        y = e / max(1, sum(e)), rounded to fmt

    A second value, of one number for each column, says of each sample which columns are seen: its padding.
    Where this or the mask is 0, ``c`` is not in the maximum and ``e`` is 0. A row that sees no column is 0.

    Args:
        codes: The table, int64, not negative: ``exp(-d * step) * codes[0]``, rounded to nearest.
        shift: Bits by which differences are shortened.
        mask: 1 where a column is seen from a row and 0 where not, int64, shape ``(rows, columns)``, at
            least one in each row; or None.
        source_fl: Of the source.
        fmt: Of the result.
    """

    codes: Tensor
    shift: int
    mask: Tensor | None
    source_fl: int
    fmt: FixedPoint
