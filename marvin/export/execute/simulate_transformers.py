"""What transformers have, by torch: values in floats, norms and softmax of their codes in int64."""

from collections.abc import Callable

import torch
from torch import Tensor

from fixedpoint_kernels import FixedPoint
from marvin.export.graph.transformers import Constant, Embedding, MatMul, Norm, Softmax

__all__ = ["APPLY_TRANSFORMERS"]


def _constant(op: Constant) -> Tensor:
    return (op.codes.double() * op.codes_fmt.lsb)[None]


def _embed(op: Embedding, x: Tensor) -> Tensor:
    weight = op.weight.to(x.device).double() * op.weight_fmt.lsb
    dtype = x.dtype if x.is_floating_point() else torch.float32
    return weight[x.long()].to(dtype)


def _codes(x: Tensor, fl: int, shift: int) -> Tensor:
    return _shortened((x.double() * 2.0**fl).long(), shift)


def _shortened(codes: Tensor, shift: int) -> Tensor:
    return codes + (1 << shift >> 1) >> shift


def _norm(op: Norm, values: Tensor) -> Tensor:
    if values.is_meta:
        return values
    x = _codes(values, op.source_fl, op.shift)
    n = x.shape[-1]
    total = x.sum(-1, keepdim=True) if op.is_centered else torch.zeros_like(x[..., :1])
    variance = n * x.square().sum(-1, keepdim=True) - total.square() + op.epsilon
    root = _root(variance << 2 * op.precision).clamp(min=1)
    numerator = (n * x - total) * op.gain.to(x.device) << op.precision
    if op.bias is not None:
        numerator = numerator + op.bias.to(x.device) * root
    return _rounded(numerator, root, op.gain_fmt.fl, op.fmt).to(values)


def _softmax(op: Softmax, values: Tensor, columns: Tensor | None = None) -> Tensor:
    if values.is_meta:
        return values
    codes, table = _codes(values, op.source_fl, 0), op.codes.to(values.device)
    seen = torch.ones_like(codes) if op.mask is None else op.mask.to(codes).expand_as(codes)
    seen = seen if columns is None else seen * columns.to(codes)
    top = codes.masked_fill(seen == 0, -(2**62)).amax(-1, keepdim=True)
    places = _shortened(top - codes, op.shift).clamp(0, len(table) - 1)
    exponentials = table[places] * seen
    total = exponentials.sum(-1, keepdim=True).clamp(min=1)
    return _rounded(exponentials, total, 0, op.fmt).to(values)


def _root(x: Tensor) -> Tensor:
    root = x.double().sqrt().long()
    return root - (root.square() > x).long()  # as in ``execute.transformers``


def _rounded(numerator: Tensor, divisor: Tensor, fl: int, fmt: FixedPoint) -> Tensor:
    """Return quotients rounded to ``fmt``, float64."""
    top, bottom = numerator << max(0, fmt.fl - fl), divisor << max(0, fl - fmt.fl)
    quotient = top.div(bottom, rounding_mode="floor")
    twice = 2 * (top - quotient * bottom)
    is_up = (twice > bottom) | ((twice == bottom) & (quotient % 2 == 1))
    return (quotient + is_up).clamp(fmt.min_code, fmt.max_code).double() * fmt.lsb


APPLY_TRANSFORMERS: dict[type, Callable[..., Tensor]] = {
    Constant: _constant,
    Embedding: _embed,
    MatMul: lambda _op, x, y: x @ y,
    Norm: _norm,
    Softmax: _softmax,
}
