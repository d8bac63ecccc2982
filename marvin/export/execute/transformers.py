"""What transformers have, in integers: the definition of ``graph.transformers`` by NumPy's int64."""

import numpy as np
from torch import Tensor

from fixedpoint_kernels import FixedPoint
from marvin.export.errors import ExportError
from marvin.export.execute.arithmetic import Codes, magnitude
from marvin.export.graph.transformers import Embedding, MatMul, Norm, Softmax

__all__ = ["check_indices", "embed", "matmul", "norm", "softmax"]

_Parts = tuple[Codes, int]  # codes, and their ``fl``


def embed(op: Embedding, x: Tensor) -> Codes:
    """Return the rows of a table, shape ``(n, tokens, features)``; ``x`` is (n, tokens), whole numbers.

    Raises:
        ExportError: A number is no index of a row.
    """
    check_indices(op, x)
    return op.weight.numpy()[x.detach().cpu().long().numpy()]


def check_indices(op: Embedding, x: Tensor) -> None:
    """Refuse what is no index of a row of a table.

    Args:
        op: Has the table.
        x: Of any shape and dtype.

    Raises:
        ExportError: A number is none.
    """
    indices, rows = x.detach().double(), len(op.weight)
    is_row = (indices == indices.floor()) & (indices >= 0) & (indices < rows)
    if not is_row.all():
        raise ExportError(
            f"{op.name} must take whole numbers from 0 to {rows - 1}, got {indices[~is_row][0]:g}"
        )


def matmul(_op: MatMul, x: _Parts, y: _Parts) -> Codes:
    """Return products of matrices, exactly."""
    left, right = x[0], y[0]
    bits = magnitude(left).bit_length() + magnitude(right).bit_length()
    if bits + left.shape[-1].bit_length() > 62:
        left, right = left.astype(object), right.astype(object)
    return left @ right


def norm(op: Norm, source: _Parts) -> Codes:
    """Return rows normalised: see ``Norm``."""
    x = _shortened(source[0], op.shift)
    n = x.shape[-1]
    total = x.sum(-1, keepdims=True) if op.is_centered else 0
    variance = n * (x * x).sum(-1, keepdims=True) - total * total + op.epsilon
    root = np.maximum(_root(variance << 2 * op.precision), 1)
    numerator = (n * x - total) * op.gain.numpy() << op.precision
    if op.bias is not None:
        numerator = numerator + op.bias.numpy() * root
    return _rounded(numerator, root, op.gain_fmt.fl, op.fmt)


def softmax(op: Softmax, source: _Parts, columns: _Parts | None = None) -> Codes:
    """Return softmax of rows: see ``Softmax``."""
    codes, table = source[0], op.codes.numpy()
    seen = np.ones(1, bool) if op.mask is None else op.mask.numpy() == 1
    seen = seen if columns is None else seen & (columns[0] == 1)
    least = int(codes.min()) if codes.size else 0
    top = np.where(seen, codes, least).max(-1, keepdims=True)
    places = _shortened(top - codes, op.shift).clip(0, len(table) - 1)  # of 0 only if not seen
    exponentials = np.where(seen, table[places.astype(np.int64)], 0)
    total = np.maximum(exponentials.sum(-1, keepdims=True), 1)
    return _rounded(exponentials, total, 0, op.fmt)


def _shortened(codes: Codes, shift: int) -> Codes:
    return codes + (1 << shift >> 1) >> shift


def _root(x: Codes) -> Codes:
    """Return integer square roots of numbers below ``2**62``.

    Those of float64 are one too large at most: half of its last bit never brings a square below itself.
    """
    root = np.sqrt(x.astype(np.float64)).astype(np.int64)
    return root - (root * root > x)


def _rounded(numerator: Codes, divisor: Codes, fl: int, fmt: FixedPoint) -> Codes:
    """Round quotients at ``fl`` to ``fmt``: nearest, ties to even, saturating."""
    top, bottom = numerator << max(0, fmt.fl - fl), divisor << max(0, fl - fmt.fl)
    quotient = top // bottom
    twice = 2 * (top - quotient * bottom)
    is_up = (twice > bottom) | ((twice == bottom) & (quotient % 2 == 1))
    return np.clip(quotient + is_up, fmt.min_code, fmt.max_code).astype(np.int64)
