"""What the codes of an operation can be, whatever the input."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch

from fixedpoint_kernels import FixedPoint
from marvin.export.errors import ExportError
from marvin.export.execute.arithmetic import round_fraction, trailing_zeros
from marvin.export.execute.simulate import apply
from marvin.export.graph.functions import Clip, Mul, Table
from marvin.export.graph.nodes import (
    Add,
    Affine,
    AveragePool,
    Channel,
    Conv,
    Flatten,
    Linear,
    MaxPool,
    Operation,
    Relu,
    Round,
    Value,
    Weighted,
)
from marvin.export.graph.transformers import Constant, Embedding, MatMul, Norm, Softmax
from marvin.export.graph.views import Concat, Pad, Reshape, Slice, Transpose

__all__ = ["FLOAT64_BITS", "first_value", "shape_of", "value_of"]

_ALL = 64  # what divides 0
_INT64_BITS = 61  # with one bit to spare: rounding doubles rests
FLOAT64_BITS = 1023
"""Most bits of codes, and farthest binary point from 0: the integer reference gives float64."""


def value_of(op: Operation, inputs: Sequence[Value]) -> Value:
    """Return the value of an operation on inputs of these values.

    Raises:
        ExportError: Integers of 64 bits do not hold the sums of a norm or of softmax, or float64 no codes of
            this length; or the operation is none on such inputs.
    """
    shape = shape_of(op, *(v.shape for v in inputs))
    value = _VALUES[type(op)](op, shape, *inputs)
    bits = max(value.bits, value.magnitude.bit_length() + 1)
    if max(bits, abs(value.fl)) > FLOAT64_BITS:
        raise ExportError(
            f"{op.name}: codes must take {FLOAT64_BITS} bits at most, with an fl no farther from 0, got {bits} bits, "
            f"fl={value.fl}: round what it takes"
        )
    return value


def first_value(op: Round | Embedding, shape: tuple[int, ...]) -> Value:
    """Return the value of the rounding of what comes in, or of the rows that it chooses.

    Raises:
        ExportError: Rows are chosen by something else than one index for each of some positions.
    """
    if isinstance(op, Embedding):
        if len(shape) != 1 or op.weight.ndim != 2:
            got = ", ".join(map(str, ("n", *shape)))
            raise ExportError(
                f"{op.name} must take indices of shape (n, tokens), got ({got}): flatten those of a sample, or "
                "write indices[:, None] for one"
            )
        return _of_codes((*shape, op.weight.shape[1]), op.weight_fmt.fl, op.weight)
    return _of_format(shape, op.fmt, op.fmt.min_code, op.fmt.max_code)


def shape_of(op: Operation, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an operation's value, of one sample, for inputs of these shapes."""
    metas = [torch.empty((1, *shape), device="meta") for shape in shapes]
    return tuple(apply(op, *metas).shape[1:])


def _of_format(shape: tuple[int, ...], fmt: FixedPoint, low: int, high: int) -> Value:
    return Value(shape, fmt.fl, low, high, max(abs(low), abs(high)))


def _round(op: Round | AveragePool, shape: tuple[int, ...], x: Value) -> Value:
    lsb = Fraction(2) ** -x.fl
    low, high = (round_fraction(code * lsb, op.fmt) for code in (x.low, x.high))
    return _of_format(shape, op.fmt, low, high)


def _average_pool(op: AveragePool, shape: tuple[int, ...], x: Value) -> Value:
    low, high = _with_padding(x) if any(op.padding) else (x.low, x.high)
    window = math.prod(op.kernel)
    value = _round(op, shape, Value(x.shape, x.fl, low, high, 0))
    channels = x.channels or (Channel(low, high, 0),)
    total = window * max(max(abs(c.low), abs(c.high)) >> c.trailing_zeros for c in channels)
    if window & (window - 1):
        total *= 2  # the mean is rounded to a float before it is rounded to a format
    return Value(shape, value.fl, value.low, value.high, max(total, value.magnitude), window)


def _with_padding(x: Value) -> tuple[int, int]:
    return min(x.low, 0), max(x.high, 0)


def _weighted(op: Weighted, shape: tuple[int, ...], x: Value) -> Value:
    low, high = _with_padding(x)
    weight = op.weight.reshape(len(op.weight), -1)
    positive = weight.clamp(min=0).sum(1).tolist()
    negative = weight.clamp(max=0).sum(1).tolist()
    product, bias_fl = x.fl + op.weight_fmt.fl, op.bias_fmt.fl
    fl = product if op.bias is None else max(product, bias_fl)
    biases = [0] * len(weight) if op.bias is None else op.bias.tolist()
    left, right = fl - product, max(0, fl - bias_fl)
    channels = []
    for p, n, b, zeros in zip(positive, negative, biases, op.trailing_zeros, strict=True):
        bias = b << right
        channels.append(
            Channel(
                (p * low + n * high << left) + bias,
                (p * high + n * low << left) + bias,
                ((p - n) * max(-low, high) << left) + abs(bias),
                trailing_zeros(bias, zeros + left),
            )
        )
    return _of_channels(shape, fl, channels, weight.shape[1], op.per_channel is not None)


def _of_channels(
    shape: tuple[int, ...], fl: int, channels: Sequence[Channel], terms: int, is_kept: bool
) -> Value:
    return Value(
        shape,
        fl,
        min(c.low for c in channels),
        max(c.high for c in channels),
        max(c.magnitude for c in channels),
        terms,
        tuple(channels) if is_kept else (),
    )


def _affine(op: Affine, shape: tuple[int, ...], x: Value) -> Value:
    product, offset_fl = x.fl + op.scale_fmt.fl, op.offset_fmt.fl
    fl = max(product, offset_fl)
    channels = []
    for i, (s, o) in enumerate(zip(op.scale.tolist(), op.offset.tolist(), strict=True)):
        before = x.channel(i)
        offset, scale = o << fl - offset_fl, s << fl - product
        ends = sorted((scale * before.low, scale * before.high))
        largest = max(abs(before.low), abs(before.high))
        channels.append(
            Channel(
                ends[0] + offset,
                ends[1] + offset,
                abs(scale) * largest + abs(offset),
                trailing_zeros(offset, before.trailing_zeros + trailing_zeros(scale, _ALL)),
            )
        )
    return _of_channels(shape, fl, channels, 1, bool(x.channels))


def _add(_op: Add, shape: tuple[int, ...], x: Value, y: Value) -> Value:
    fl = max(x.fl, y.fl)
    a, b = fl - x.fl, fl - y.fl
    low, high = (x.low << a) + (y.low << b), (x.high << a) + (y.high << b)
    magnitude = max(abs(low), abs(high), *(max(-v.low, v.high) << fl - v.fl for v in (x, y)))
    return Value(shape, fl, low, high, magnitude)


def _relu(_op: Relu, shape: tuple[int, ...], x: Value) -> Value:
    low, high = max(x.low, 0), max(x.high, 0)
    channels = tuple(replace(c, low=max(c.low, 0), high=max(c.high, 0)) for c in x.channels)
    return Value(shape, x.fl, low, high, max(-x.low, x.high, 0), channels=channels)


def _same(_op: Operation, shape: tuple[int, ...], x: Value) -> Value:
    return Value(shape, x.fl, x.low, x.high, max(abs(x.low), abs(x.high)), channels=x.channels)


def _mul(_op: Mul, shape: tuple[int, ...], x: Value, y: Value) -> Value:
    ends = [a * b for a in (x.low, x.high) for b in (y.low, y.high)]
    magnitude = max(-x.low, x.high, 0) * max(-y.low, y.high, 0)
    return Value(shape, x.fl + y.fl, min(ends), max(ends), magnitude)


def _moved(_op: Operation, shape: tuple[int, ...], x: Value) -> Value:
    return Value(shape, x.fl, x.low, x.high, max(abs(x.low), abs(x.high)))


def _pad(op: Pad, shape: tuple[int, ...], x: Value) -> Value:
    if not len(op.before) == len(op.behind) == len(x.shape):
        raise ExportError(f"{op.name} must pad {len(x.shape)} dimensions")
    return _moved(op, shape, replace(x, low=min(x.low, 0), high=max(x.high, 0)))


def _concat(_op: Concat, shape: tuple[int, ...], *parts: Value) -> Value:
    fl = max(x.fl for x in parts)
    low, high = min(x.low << fl - x.fl for x in parts), max(x.high << fl - x.fl for x in parts)
    return Value(shape, fl, low, high, max(abs(low), abs(high)))


def _clip(op: Clip, shape: tuple[int, ...], x: Value) -> Value:
    def bounded(code: int) -> int:
        return min(max(code, op.low), op.high)

    if op.source_fl != x.fl or op.low > op.high:
        raise ExportError(f"{op.name} must have ordered bounds at fl={x.fl}, got {op.source_fl}")
    low, high = bounded(x.low), bounded(x.high)
    return Value(shape, x.fl, low, high, max(abs(x.low), abs(x.high), abs(low), abs(high)))


def _table(op: Table, shape: tuple[int, ...], x: Value) -> Value:
    if op.source_fl != x.fl or not op.low <= x.low <= x.high < op.low + len(op.codes):
        raise ExportError(f"{op.name} must have all codes from {x.low} to {x.high}, at fl={x.fl}")
    least, most = int(op.codes.min()), int(op.codes.max())
    if not op.fmt.min_code <= least <= most <= op.fmt.max_code:
        raise ExportError(f"{op.name} must have codes of {op.fmt}, got {least} to {most}")
    reached = op.codes[x.low - op.low : x.high - op.low + 1]
    return _of_format(shape, op.fmt, int(reached.min()), int(reached.max()))


def _of_codes(shape: tuple[int, ...], fl: int, codes: torch.Tensor) -> Value:
    low, high = int(codes.min()), int(codes.max())
    return Value(shape, fl, low, high, max(abs(low), abs(high)))


def _embedding(op: Embedding, _shape: tuple[int, ...], *_inputs: Value) -> Value:
    raise ExportError(f"{op.name} must take the network's input")


def _matmul(_op: MatMul, shape: tuple[int, ...], x: Value, y: Value) -> Value:
    if len(x.shape) < 2 or x.shape[:-2] != y.shape[:-2]:
        raise ExportError(f"{_op.name} must multiply matrices, got {x.shape} and {y.shape}")
    terms = x.shape[-1]
    ends = [a * b * terms for a in (x.low, x.high) for b in (y.low, y.high)]
    magnitude = max(-x.low, x.high, 0) * max(-y.low, y.high, 0) * terms
    fl = x.fl + y.fl
    return Value(shape, fl, min(ends), max(ends), magnitude, terms)


def _check_sums(op: Operation, longest: int, instead: str) -> None:
    """Refuse an operation whose integers are too long for int64."""
    bits = longest.bit_length()
    if bits > _INT64_BITS:
        raise ExportError(
            f"{op.name}: sums must take {_INT64_BITS} bits at most, got {bits}: {instead}"
        )


def _norm(op: Norm, shape: tuple[int, ...], x: Value) -> Value:
    n, point = shape[-1], op.gain_fmt.fl - op.fmt.fl
    if max(op.shift, op.precision, abs(point)) > _INT64_BITS or op.epsilon < 0:
        raise ExportError(
            f"{op.name} must have shifts of up to {_INT64_BITS} bits: give its weight, what it takes and what it "
            "is rounded to formats whose fractional lengths are nearer to each other"
        )
    largest = max(-x.low, x.high, 0) + (1 << op.shift >> 1) >> op.shift
    variance = (n * largest) ** 2 + op.epsilon << 2 * op.precision
    root = math.isqrt(variance) + 1
    biases = 0 if op.bias is None else int(op.bias.abs().max())
    total = (2 * n * largest * int(op.gain.abs().max()) << op.precision) + biases * root
    longest = max(variance, total << max(0, -point), root << max(0, point))
    sizes = {len(op.gain), n if op.bias is None else len(op.bias)}
    if op.source_fl != x.fl or sizes != {n}:
        raise ExportError(
            f"{op.name} must have {n} gains at fl={x.fl}, got {op.source_fl}, {sizes}"
        )
    _check_sums(op, longest, "give its weight and bias formats with fewer fractional bits")
    return _of_format(shape, op.fmt, op.fmt.min_code, op.fmt.max_code)


def _softmax(op: Softmax, shape: tuple[int, ...], x: Value, seen: Value | None = None) -> Value:
    if max(op.shift, op.fmt.fl) > _INT64_BITS:
        raise ExportError(
            f"{op.name} must have shifts of up to {_INT64_BITS} bits, got {op.shift}: round what it takes to "
            "fewer fractional bits"
        )
    longest = max(x.high - x.low, shape[-1] * int(op.codes.max()) << abs(op.fmt.fl))
    is_table = bool((op.codes >= 0).all()) and int(op.codes[0]) > 0
    if op.source_fl != x.fl or not is_table:
        raise ExportError(f"{op.name} must have a table at fl={x.fl}, got one at {op.source_fl}")
    _check_sums(op, longest, "round what it takes, and its result, to fewer fractional bits")
    if op.mask is not None:
        is_whole = tuple(op.mask.shape) == shape[-2:] and bool(op.mask.any(-1).all())
        if not is_whole or not torch.equal(op.mask, op.mask.ne(0).long()):
            raise ExportError(f"{op.name} must see at least one column from each row of {shape}")
    columns = (*[1] * (len(shape) - 1), shape[-1])
    if seen and (seen.shape != columns or seen.fl or not 0 <= seen.low <= seen.high <= 1):
        raise ExportError(f"{op.name} must see columns by 0 and 1 of shape {columns}")
    high = min(op.fmt.max_code, 1 << max(0, op.fmt.fl))
    return _of_format(shape, op.fmt, 0, high)


_VALUES: dict[type, Callable[..., Any]] = {
    Round: _round,
    Conv: _weighted,
    Linear: _weighted,
    Affine: _affine,
    Add: _add,
    Relu: _relu,
    MaxPool: _same,
    AveragePool: _average_pool,
    Flatten: _same,
    Reshape: _moved,
    Transpose: _moved,
    Slice: _moved,
    Pad: _pad,
    Concat: _concat,
    Clip: _clip,
    Mul: _mul,
    Table: _table,
    Constant: lambda op, shape: _of_codes(shape, op.codes_fmt.fl, op.codes),
    Embedding: _embedding,
    MatMul: _matmul,
    Norm: _norm,
    Softmax: _softmax,
}
