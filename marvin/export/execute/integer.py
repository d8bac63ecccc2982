"""The integer reference: what the exported network computes, in integers alone."""

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from fixedpoint_kernels import FixedPoint
from marvin.export.errors import ExportError, check_tensor
from marvin.export.execute.arithmetic import Codes, align, magnitude, round_codes, weigh
from marvin.export.execute.samples import check_numbers, check_samples
from marvin.export.execute.transformers import embed, matmul, norm, softmax
from marvin.export.graph.functions import Clip, Mul, Table
from marvin.export.graph.nodes import (
    Add,
    Affine,
    AveragePool,
    Conv,
    Flatten,
    Linear,
    MaxPool,
    Network,
    Pair,
    Relu,
    Round,
    Weighted,
    check_network,
)
from marvin.export.graph.transformers import Constant, Embedding, MatMul, Norm, Softmax
from marvin.export.graph.views import Concat, Pad, Reshape, Slice, Transpose

__all__ = ["encode_input", "run", "run_all", "run_heads"]

_Parts = tuple[Codes, int]  # codes, and their ``fl``
_CODES = 2**24  # that are there at one time: of as many samples as this allows


def run(network: Network, x: Tensor) -> Tensor:
    """Return the network's output as float64 values, each a code times ``2**-fl``.

    Args:
        network: From ``describe``, with one output.
        x: Samples, shape ``(n, *network.input.shape)``, float32.

    Raises:
        ExportError: ``x`` has another shape, or holds a NaN; or the network has several outputs.
        TypeError: ``network`` is not a ``Network``, or ``x`` is not a tensor.
    """
    check_network(network)
    found = run_heads(network, x)
    if len(found) > 1:
        raise ExportError(f"the network has outputs {', '.join(found)}: take integer.run_heads")
    return next(iter(found.values()))


def run_heads(network: Network, x: Tensor) -> dict[str, Tensor]:
    """Return each of the network's outputs, by its label; else as ``run``.

    Samples are computed some at a time, so memory does not grow with them.

    Raises:
        ExportError: ``x`` has another shape, or holds a NaN.
        TypeError: ``x`` is not a tensor.
    """
    check_samples(network, x)
    each = sum(math.prod(value.shape) for value in network.values.values())
    found: dict[str, list[Tensor]] = {label: [] for label in network.outputs}
    for part in x.split(max(1, _CODES // each)):
        codes = run_all(network, part)
        for label, name in network.outputs.items():
            values = torch.from_numpy(codes[name].astype(np.float64))
            found[label].append(values * 2.0 ** -network.values[name].fl)
    return {label: torch.cat(parts) for label, parts in found.items()}


def run_all(network: Network, x: Tensor) -> dict[str, Codes]:
    """Return the codes of every value, by name: int64, or Python's integers where wider.

    Raises:
        ExportError: ``x`` has another shape, or holds a NaN.
        TypeError: ``x`` is not a tensor.
    """
    check_samples(network, x)
    found: dict[str, Codes] = {}
    for op in network.operations[1:]:
        if op.inputs == (network.input.name,):
            assert isinstance(op, Round | Embedding)
            is_round = isinstance(op, Round)
            found[op.name] = encode_input(x, op.fmt) if is_round else embed(op, x)
            continue
        if isinstance(op, Constant):
            found[op.name] = np.repeat(op.codes.numpy()[None], len(x), 0)
            continue
        parts = [(found[name], network.values[name].fl) for name in op.inputs]
        found[op.name] = _COMPUTE[type(op)](op, *parts)
    return found


def encode_input(x: Tensor, fmt: FixedPoint) -> Codes:
    """Return the codes of float32 values: nearest, ties to even, saturating; int64.

    Raises:
        ExportError: There is a NaN.
        TypeError: ``x`` is not a tensor, or ``fmt`` no ``FixedPoint``.
    """
    check_tensor(x, "values")
    if not isinstance(fmt, FixedPoint):
        raise TypeError(
            f"encode_input needs a tensor and its format, got {type(fmt).__name__}: write "
            "encode_input(x, FixedPoint(8, 4))"
        )
    check_numbers(x)
    values = x.detach().cpu().double().numpy()
    return np.clip(np.rint(values * fmt.scale), fmt.min_code, fmt.max_code).astype(np.int64)


def _round(op: Round, x: _Parts) -> Codes:
    return round_codes(*x, op.fmt)


def _weighted(op: Weighted, x: _Parts) -> Codes:
    codes, fl = x
    total = weigh(op, codes)
    if op.bias is None:
        return total
    at_fl = max(fl + op.weight_fmt.fl, op.bias_fmt.fl)
    bias = op.bias.numpy().reshape(-1, *[1] * (codes.ndim - 2))
    return _add((total, fl + op.weight_fmt.fl), (bias, op.bias_fmt.fl), at_fl)


def _affine(op: Affine, x: _Parts) -> Codes:
    codes, fl = x
    shape = -1, *[1] * (codes.ndim - 2)
    scale, offset = op.scale.numpy().reshape(shape), op.offset.numpy().reshape(shape)
    if magnitude(codes).bit_length() + magnitude(scale).bit_length() > 62:
        codes = codes.astype(object)
    product = fl + op.scale_fmt.fl
    return _add((codes * scale, product), (offset, op.offset_fmt.fl))


def _add(x: _Parts, y: _Parts, at_fl: int | None = None) -> Codes:
    fl = max(x[1], y[1]) if at_fl is None else at_fl
    left, right = align(x[0], fl - x[1]), align(y[0], fl - y[1])
    if max(magnitude(left), magnitude(right)).bit_length() > 61:
        left, right = left.astype(object), right.astype(object)
    return left + right


def _relu(_op: Relu, x: _Parts) -> Codes:
    return np.maximum(x[0], 0)


def _max_pool(op: MaxPool, x: _Parts) -> Codes:
    codes, _ = x
    least = int(codes.min()) if codes.size else 0
    windows = _windows(op.kernel, op.stride, op.padding, codes, least, op.dilation)
    return windows.max(tuple(range(-len(op.kernel), 0)))


def _average_pool(op: AveragePool, x: _Parts) -> Codes:
    codes, fl = x
    windows = _windows(op.kernel, op.stride, op.padding, codes, 0)
    total = windows.sum(tuple(range(-len(op.kernel), 0)))
    return round_codes(total, fl, op.fmt, math.prod(op.kernel))


def _windows(
    kernel: Pair, stride: Pair, padding: Pair, codes: Codes, fill: int, dilation: Pair = (1, 1)
) -> Codes:
    """Return the windows of images or sequences, shape ``(n, channels, *sides, *kernel)``."""
    sides = (side + 2 * p for side, p in zip(codes.shape[2:], padding, strict=True))
    padded = np.full((*codes.shape[:2], *sides), fill, codes.dtype)
    # not np.pad, which puts int64 among Python's integers, and int64 overflows
    inner = (slice(p, p + side) for side, p in zip(codes.shape[2:], padding, strict=True))
    padded[(slice(None), slice(None), *inner)] = codes
    size = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=False)]
    axes = tuple(range(2, codes.ndim))
    views = sliding_window_view(padded, size, axis=axes)  # pyright: ignore[reportCallIssue, reportArgumentType]
    steps = (*stride, *dilation[: len(kernel)])
    return views[(slice(None), slice(None), *(slice(None, None, step) for step in steps))]


def _flatten(_op: Flatten, x: _Parts) -> Codes:
    return x[0].reshape(len(x[0]), math.prod(x[0].shape[1:]))


def _reshape(op: Reshape, x: _Parts) -> Codes:
    return x[0].reshape(len(x[0]), *op.shape)


def _transpose(op: Transpose, x: _Parts) -> Codes:
    return x[0].transpose(0, *(i + 1 for i in op.order))


def _slice(op: Slice, x: _Parts) -> Codes:
    return x[0][(*(slice(None),) * (op.axis + 1), slice(op.start, op.stop, op.step))]


def _pad(op: Pad, x: _Parts) -> Codes:
    return np.pad(x[0], [(0, 0), *zip(op.before, op.behind, strict=True)])


def _concat(op: Concat, *parts: _Parts) -> Codes:
    fl = max(at_fl for _, at_fl in parts)
    return np.concatenate([align(codes, fl - at_fl) for codes, at_fl in parts], op.axis + 1)


def _mul(_op: Mul, x: _Parts, y: _Parts) -> Codes:
    left, right = x[0], y[0]
    if magnitude(left).bit_length() + magnitude(right).bit_length() > 62:
        left, right = left.astype(object), right.astype(object)
    return left * right


def _clip(op: Clip, x: _Parts) -> Codes:
    return np.clip(x[0], op.low, op.high)


def _table(op: Table, x: _Parts) -> Codes:
    return op.codes.numpy()[x[0] - op.low]


_COMPUTE: dict[type, Callable[..., Codes]] = {
    Round: _round,
    Conv: _weighted,
    Linear: _weighted,
    Affine: _affine,
    Add: lambda _op, x, y: _add(x, y),
    Relu: _relu,
    MaxPool: _max_pool,
    AveragePool: _average_pool,
    Flatten: _flatten,
    Reshape: _reshape,
    Transpose: _transpose,
    Slice: _slice,
    Pad: _pad,
    Concat: _concat,
    Clip: _clip,
    Mul: _mul,
    Table: _table,
    MatMul: matmul,
    Norm: norm,
    Softmax: softmax,
}
