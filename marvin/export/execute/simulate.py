"""The exported network in floats: the same operations by torch, as training simulates them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fixedpoint_kernels import FixedPoint, quantize
from marvin.export.execute.simulate_transformers import APPLY_TRANSFORMERS
from marvin.export.graph.functions import Clip, Mul, Table
from marvin.export.graph.nodes import (
    Add,
    Affine,
    AveragePool,
    Conv,
    Flatten,
    Input,
    Linear,
    MaxPool,
    Network,
    Operation,
    Relu,
    Round,
    Weighted,
)
from marvin.export.graph.views import Concat, Pad, Reshape, Slice, Transpose

__all__ = ["apply", "mean", "products", "simulate"]


@torch.no_grad()
def simulate(
    network: Network, x: Tensor, *, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return every value of the network, computed in floats.

    Args:
        network: From ``describe``.
        x: Samples, shape ``(n, *network.input.shape)``, float32.
        dtype: float32, as in training, or float64.
    """
    found = {network.input.name: x.to(dtype)}
    for op in network.operations[1:]:
        found[op.name] = apply(op, *(found[name] for name in op.inputs)).to(dtype)
    return found


def apply(op: Operation, *inputs: Tensor) -> Tensor:
    """Return the value of one operation, in the dtype of its inputs."""
    return _APPLY[type(op)](op, *inputs)


def _input(_op: Input) -> Tensor:
    raise AssertionError("an input is not computed")


def _rounded(x: Tensor, fmt: FixedPoint) -> Tensor:
    if x.is_meta:
        return x
    if x.dtype is torch.float32:
        return quantize(x, fmt, rounding="nearest")
    return torch.round(x * fmt.scale).clamp(fmt.min_code, fmt.max_code) * fmt.lsb + 0.0


def _like(codes: Tensor, fmt: FixedPoint, x: Tensor) -> Tensor:
    return (codes.double() * fmt.lsb).to(x)


def products(op: Weighted, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return sums of products as a layer adds them, with any weights and bias.

    ``x``, ``weight`` and ``bias`` have the shapes of ``F.conv2d``, ``F.conv1d`` or ``F.linear``, and one
    dtype.
    """
    if not isinstance(op, Conv):
        return F.linear(x, weight, bias)
    conv = F.conv1d if weight.ndim == 3 else F.conv2d
    return conv(x, weight, bias, op.stride, op.padding, op.dilation, op.groups)


def _weights(op: Weighted, x: Tensor) -> tuple[Tensor, Tensor | None]:
    bias = None if op.bias is None else _like(op.bias, op.bias_fmt, x)
    return _like(op.weight, op.weight_fmt, x), bias


def _affine(op: Affine, x: Tensor) -> Tensor:
    shape = -1, *[1] * (x.ndim - 2)
    before, scale, after = (n.to(x).view(shape) for n in op.numbers)
    return (x + before) * scale + after


def _max_pool(op: MaxPool, x: Tensor) -> Tensor:
    pool = F.max_pool1d if len(op.kernel) == 1 else F.max_pool2d
    return pool(x, op.kernel, op.stride, op.padding, op.dilation)


def _average_pool(op: AveragePool, x: Tensor) -> Tensor:
    return _rounded(mean(op, x), op.fmt)


def mean(op: AveragePool, x: Tensor) -> Tensor:
    """Return what average pooling gives before it is rounded; ``x`` is (n, channels, *sides)."""
    pool = F.avg_pool1d if len(op.kernel) == 1 else F.avg_pool2d
    return pool(x, op.kernel, op.stride, op.padding)


def _table(op: Table, x: Tensor) -> Tensor:
    if x.is_meta:
        return x
    indices = (x.double() * 2.0**op.source_fl).to(torch.int64) - op.low
    return (op.codes[indices].double() * op.fmt.lsb).to(x)


def _clip(op: Clip, x: Tensor) -> Tensor:
    return x.clamp(op.low * 2.0**-op.source_fl, op.high * 2.0**-op.source_fl)


def _concat(op: Concat, *parts: Tensor) -> Tensor:
    samples = max(map(len, parts))  # constants have one
    return torch.cat([x.expand(samples, *x.shape[1:]) for x in parts], op.axis + 1)


def _pad(op: Pad, x: Tensor) -> Tensor:
    pairs = zip(reversed(op.before), reversed(op.behind), strict=True)
    return F.pad(x, [n for pair in pairs for n in pair])


def _slice(op: Slice, x: Tensor) -> Tensor:
    index = (slice(None),) * (op.axis + 1)
    return x[(*index, slice(op.start, op.stop, op.step))]


_APPLY: dict[type, Callable[..., Tensor]] = {
    Input: _input,
    Round: lambda op, x: _rounded(x, op.fmt),
    Conv: lambda op, x: products(op, x, *_weights(op, x)),
    Linear: lambda op, x: products(op, x, *_weights(op, x)),
    Affine: _affine,
    Add: lambda _op, x, y: x + y,
    Relu: lambda _op, x: F.relu(x),
    MaxPool: _max_pool,
    AveragePool: _average_pool,
    Flatten: lambda _op, x: x.flatten(1),
    Reshape: lambda op, x: x.reshape(len(x), *op.shape),
    Transpose: lambda op, x: x.permute(0, *(i + 1 for i in op.order)),
    Slice: _slice,
    Pad: _pad,
    Concat: _concat,
    Clip: _clip,
    Mul: lambda _op, x, y: x * y,
    Table: _table,
    **APPLY_TRANSFORMERS,
}
