"""Layers as operations: one handler a kind of module."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fixedpoint_kernels import FixedPoint
from fixedpoint_kernels.sides import for_each_side
from marvin.channels import ChannelFormat
from marvin.export.errors import ExportError, fixed_point
from marvin.export.execute.simulate import apply
from marvin.export.frontend.builder import Builder, Pending
from marvin.export.graph.bounds import shape_of
from marvin.export.graph.formats import codes_of
from marvin.export.graph.nodes import (
    Affine,
    AveragePool,
    Conv,
    Flatten,
    Linear,
    MaxPool,
    Pair,
    Relu,
    Round,
    Weighted,
)
from marvin.export.graph.views import Pad, Reshape, Transpose
from marvin.export.passes.batch_norm import fixed_norm, spare_of
from marvin.export.passes.biases import float_bias, spare_bits
from marvin.quantizer import Quantizer

__all__ = ["MODULES", "SAME", "average", "reshape", "rounded"]

# which give back the tensor they take
SAME = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)

_LONG = 2**25  # of a sum: float32 does not hold it, and how much longer it is does not matter
_POOLS_OF_ONE_SIDE = nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveMaxPool1d, nn.AdaptiveAvgPool1d


def _numbers(
    builder: Builder, module: str, m: nn.Conv1d | nn.Conv2d | nn.Linear, source: str
) -> dict[str, Any]:
    """Return the fields of ``Weighted``."""
    name = f"{module}.weight".lstrip(".")
    given = builder.format_of(name, m.weight)
    fmt = fixed_point(name, given)
    weight = codes_of(name, m.weight, fmt).to(torch.int64)
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    channels = given if isinstance(given, ChannelFormat) else None
    if channels is not None:
        zeros = _zeros(name, weight, channels)
    x = builder.values[source]
    bias, bias_fmt = None, FixedPoint(32, 0)
    if m.bias is not None:
        weights = weight.abs().reshape(len(weight), -1).sum(1) >> zeros
        sums = weights.clamp(max=_LONG) * min(max(-x.low, x.high), _LONG)
        fls = x.fl + fmt.fl - zeros
        spare = spare_bits(channels.fmt if channels else fmt, sums, fls, m.bias)
        bias, bias_fmt = _bias(builder, module, m.bias, fls, spare)
    return {
        "weight": weight,
        "weight_fmt": fmt,
        "bias": bias,
        "bias_fmt": bias_fmt,
        "per_channel": channels,
    }


def _zeros(name: str, weight: Tensor, channels: ChannelFormat) -> Tensor:
    """Return the zero bits at the end of each channel's codes, shape ``(out,)``."""
    if len(channels.shifts) != len(weight):
        raise ExportError(
            f"{name} must have a binary point for each of {len(weight)} channels, got "
            f"{len(channels.shifts)}"
        )
    zeros = max(channels.shifts) - torch.tensor(channels.shifts)
    rest = weight.reshape(len(weight), -1) % (1 << zeros)[:, None]
    if wrong := int((rest != 0).any(1).sum()):
        raise ExportError(
            f"{name} must hold numbers of each channel's format, got {wrong} of {len(weight)} "
            "channels that do not: marvin.export.nearest_weights(model, formats) rounds them"
        )
    return zeros


def _bias(
    builder: Builder, module: str, x: Tensor, fls: Tensor, spare: int
) -> tuple[Tensor, FixedPoint]:
    """Return a bias with its own format, or ``spare`` bits finer than each channel's products."""
    name = f"{module}.bias".lstrip(".")
    if name in builder.weights:
        fmt = fixed_point(name, builder.weights[name])
        return codes_of(name, x, fmt).to(torch.int64), fmt
    try:
        return float_bias(x.detach().cpu().double(), fls, spare)
    except ExportError as error:
        raise ExportError(f"{name}: {error}") from error


def _conv(builder: Builder, name: str, module: str, m: nn.Conv1d | nn.Conv2d, source: str) -> str:
    if m.padding_mode != "zeros":
        raise ExportError(
            f"{module}: padding must be zeros, got {m.padding_mode}: use padding_mode='zeros'"
        )
    source = builder.round_input(name, module, source)
    shape, sides = builder.values[source].shape, m.weight.ndim - 2
    _check_dims(module, "a convolution", sides, shape)
    numbers = _numbers(builder, module, m, source)
    kernel, dilation = m.weight.shape[2:], for_each_side(m.dilation, sides)
    padding, behind = _padding(m, kernel, dilation)
    if any(behind):
        ends = (0,) * (sides + 1), (0, *behind)
        source = builder.add(Pad(builder.unused(f"{name}.padded"), (source,), *ends))
    op = Conv(
        name,
        (source,),
        **numbers,
        stride=for_each_side(m.stride, sides),
        padding=padding,
        dilation=dilation,
        groups=m.groups,
    )
    return builder.round_output(name, module, builder.add(op))


def _check_dims(module: str, what: str, sides: int, shape: tuple[int, ...]) -> None:
    """Refuse samples of another number of dimensions than channels and sides."""
    if len(shape) != sides + 1:
        raise ExportError(
            f"{module}: {what} must take samples of {sides + 1} dimensions, got {len(shape)}: "
            "the first dimension of what describe takes counts samples, so write x[None] for one"
        )


def _pooled_sides(module: str, m: nn.Module, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sides that pooling makes smaller.

    Raises:
        ExportError: Samples have another number of dimensions.
    """
    _check_dims(module, "pooling", 1 if isinstance(m, _POOLS_OF_ONE_SIDE) else 2, shape)
    return shape[1:]


def _padding(m: nn.Conv1d | nn.Conv2d, kernel: Sequence[int], dilation: Pair) -> tuple[Pair, Pair]:
    """Return zeros on both ends of each side, and one more behind it where "same" pads more behind than before."""
    if m.padding == "valid":
        return (0,) * len(kernel), (0,) * len(kernel)
    if not isinstance(m.padding, str):
        return for_each_side(m.padding, len(kernel)), (0,) * len(kernel)
    totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    return tuple(total // 2 for total in totals), tuple(total % 2 for total in totals)


def _linear(builder: Builder, name: str, module: str, m: nn.Linear, source: str) -> str:
    source = builder.round_input(name, module, source)
    if not builder.values[source].shape:
        raise ExportError(
            f"{module}: a linear layer must take samples of a dimension or more, got numbers: the first "
            "dimension of what describe takes counts samples, so write x[None] for one"
        )
    numbers, shape = _numbers(builder, module, m, source), builder.values[source].shape
    if len(shape) == 1:
        result = builder.add(Linear(name, (source,), **numbers))
    else:
        result = _over_positions(builder, name, source, numbers)
    return builder.round_output(name, module, result)


def _over_positions(builder: Builder, name: str, source: str, numbers: Mapping[str, object]) -> str:
    """Add a linear layer over the last dimension, as a convolution of all positions with 1 tap."""
    *before, features = builder.values[source].shape
    dims, positions = len(before), math.prod(before)
    order = dims, *range(dims)
    channels = Transpose(builder.unused(f"{name}.channels"), (source,), order)
    row = Reshape(builder.unused(f"{name}.row"), (builder.add(channels),), (features, positions))
    taken = builder.add(row) if dims > 1 else channels.name
    weight = numbers["weight"]
    assert isinstance(weight, Tensor)
    given = {**numbers, "weight": weight[..., None]}
    one = {"stride": (1,), "padding": (0,), "dilation": (1,), "groups": 1}
    result = builder.add(Conv(name, (taken,), **given, **one))  # pyright: ignore[reportArgumentType]
    if dims > 1:
        shape = len(weight), *before
        result = builder.add(Reshape(builder.unused(f"{name}.shaped"), (result,), shape))
    back = *range(1, dims + 1), 0
    return builder.add(Transpose(builder.unused(f"{name}.last"), (result,), back))


def _norm(
    builder: Builder,
    name: str,
    module: str,
    m: nn.BatchNorm1d | nn.BatchNorm2d,
    source: str,
) -> str:
    source = builder.round_input(name, module, source)
    x = builder.values[source]
    before = builder.operation(source)
    fl = builder.values[before.inputs[0]].fl if isinstance(before, Weighted) else 0
    numbers = fixed_norm(module, m, x, spare_of(before, x, fl), builder.scale_wl)
    return builder.round_output(name, module, builder.add(Affine(name, (source,), *numbers)))


def _max_pool(
    builder: Builder, name: str, module: str, m: nn.MaxPool1d | nn.MaxPool2d, source: str
) -> str:
    if m.return_indices:
        raise ExportError(f"{module}: max pooling must have return_indices=False")
    sides = _pooled_sides(module, m, builder.shape(source))
    stride = m.stride if m.stride is not None else m.kernel_size
    window = [for_each_side(x, len(sides)) for x in (m.kernel_size, stride, m.padding, m.dilation)]
    if m.ceil_mode:
        _check_ceil(module, sides, window)
    return builder.keep(name, source, lambda n, x, _fmt: MaxPool(n, (x,), *window))


def _check_ceil(module: str, sides: Sequence[int], window: Sequence[Pair]) -> None:
    """Refuse ``ceil_mode`` where it adds a window.

    As PyTorch does, it adds none that would begin behind the side and the zeros before it.
    """
    for side, kernel, stride, padding, dilation in zip(sides, *window, strict=True):
        last = side + 2 * padding - dilation * (kernel - 1) - 1  # where a window can begin at most
        rest = last % stride
        if rest and last - rest + stride < side + padding:
            fitting = [side - rest] if rest <= min(last, side - 1) else []
            fitting.append(side + stride - rest)
            raise ExportError(
                f"{module}: ceil_mode must add no window, got one of {kernel} with stride {stride} on a "
                f"side of {side}: use sides of {' or '.join(map(str, fitting))}, or ceil_mode=False"
            )


def _average_pool(
    builder: Builder, name: str, module: str, m: nn.AvgPool1d | nn.AvgPool2d, source: str
) -> str:
    sides = _pooled_sides(module, m, builder.shape(source))
    stride = m.stride if m.stride is not None else m.kernel_size
    kernel, stride, padding = (
        for_each_side(x, len(sides)) for x in (m.kernel_size, stride, m.padding)
    )
    if m.ceil_mode:
        _check_ceil(module, sides, (kernel, stride, padding, (1,) * len(sides)))
    divisor = getattr(m, "divisor_override", None) or math.prod(kernel)
    if divisor != math.prod(kernel) or (any(padding) and not m.count_include_pad):
        raise ExportError(
            f"{module}: average pooling must divide by the size of the window, without "
            "divisor_override and, where it pads, with count_include_pad=True"
        )
    return _average(builder, name, module, source, (kernel, stride, padding))


def _adaptive_window(builder: Builder, module: str, m: Any, source: str) -> tuple[Pair, Pair]:
    """Return kernel and stride of an adaptive pooling, whose windows must be of one size."""
    sides = _pooled_sides(module, m, builder.shape(source))
    size = m.output_size
    wanted = size if isinstance(size, tuple | list) else (size,) * len(sides)
    given = [s if w is None else w for s, w in zip(sides, wanted, strict=True)]
    if any(s % w for s, w in zip(sides, given, strict=True)):
        raise ExportError(
            f"{module}: windows must be of one size, got {sides} to {tuple(given)}: take samples whose "
            "sides here are multiples of these"
        )
    kernel = tuple(s // w for s, w in zip(sides, given, strict=True))
    return kernel, kernel


def _adaptive_pool(
    builder: Builder, name: str, module: str, m: nn.AdaptiveAvgPool2d, source: str
) -> str:
    window = _adaptive_window(builder, module, m, source)
    return _average(builder, name, module, source, (*window, (0,) * len(window[0])))


def _adaptive_max_pool(
    builder: Builder, name: str, module: str, m: nn.AdaptiveMaxPool2d, source: str
) -> str:
    if m.return_indices:
        raise ExportError(f"{module}: max pooling must have return_indices=False")
    kernel, stride = _adaptive_window(builder, module, m, source)
    rest = (0,) * len(kernel), (1,) * len(kernel)
    return builder.keep(name, source, lambda n, x, _fmt: MaxPool(n, (x,), kernel, stride, *rest))


def _average(
    builder: Builder, name: str, module: str, source: str, window: tuple[Pair, Pair, Pair]
) -> str:
    source = builder.round_input(name, module, source)
    result = average(builder, name, source, window, builder.node)
    return builder.round_output(name, module, result)


def average(
    builder: Builder, name: str, source: str, window: tuple[Pair, Pair, Pair], node: str
) -> str:
    """Add the means of windows, which wait for what rounds them; return the name.

    Args:
        builder: Of the network.
        name: Of the operation.
        source: What it takes, with codes.
        window: Kernel, stride and padding.
        node: Of the trace, see ``Pending``.
    """

    def make(own: str, taken: str, fmt: FixedPoint) -> AveragePool:
        return AveragePool(own, (taken,), *window, fmt)

    shape = shape_of(make(name, source, FixedPoint(8, 0)), builder.values[source].shape)
    return builder.wait(name, Pending(source, make, shape, node))


def _relu(builder: Builder, name: str, _module: str, _m: nn.ReLU, source: str) -> str:
    return builder.keep(name, source, lambda n, x, _fmt: Relu(n, (x,)))


def _flatten(builder: Builder, name: str, module: str, m: nn.Flatten, source: str) -> str:
    shape = builder.shape(source)
    last = m.end_dim % (len(shape) + 1)
    if m.start_dim < 1:
        raise ExportError(f"{module}: must leave the batch alone, got {m}: use start_dim=1")
    if (m.start_dim, last) == (1, len(shape)):
        return builder.keep(name, source, lambda n, x, _fmt: Flatten(n, (x,)))
    merged = math.prod(shape[m.start_dim - 1 : last])
    return reshape(builder, name, source, (*shape[: m.start_dim - 1], merged, *shape[last:]))


def _unflatten(builder: Builder, name: str, module: str, m: nn.Unflatten, source: str) -> str:
    if not isinstance(m.dim, int) or m.dim < 1:
        raise ExportError(f"{module}: must leave the batch alone, got {m}: give a dim from 1 on")
    shape = builder.shape(source)
    after = torch.empty(1, *shape, device="meta").unflatten(m.dim, m.unflattened_size)
    return reshape(builder, name, source, tuple(after.shape[1:]))


def reshape(builder: Builder, name: str, source: str, shape: tuple[int, ...]) -> str:
    """Add another shape for the same codes; return the name."""
    return builder.keep(name, source, lambda n, x, _fmt: Reshape(n, (x,), shape))


def _zeros_around(
    builder: Builder, name: str, module: str, m: nn.ConstantPad2d, source: str
) -> str:
    sides, shape = [int(n) for n in m.padding], builder.shape(source)
    before, behind = (
        sides[-2::-2],
        sides[-1::-2],
    )  # of the last dimensions, of which torch begins with the last
    left = [0] * (len(shape) - len(before))
    if m.value or min(sides) < 0 or len(before) > len(shape):
        raise ExportError(
            f"{module}: zeros can be put around a sample of {len(shape)} dimensions, got {m}: use value=0, take "
            "a part of it by an index, x[:, :, 1:], and leave the batch alone"
        )
    if not any(sides):
        return source
    ends = (*left, *before), (*left, *behind)
    return builder.keep(name, source, lambda n, x, _fmt: Pad(n, (x,), *ends))


def _nothing(_builder: Builder, _name: str, _module: str, _m: nn.Module, source: str) -> str:
    return source


def _quantizer(builder: Builder, name: str, _key: str, m: Quantizer, source: str) -> str:
    """Add the rounding that a quantizer is; nothing where it rounds the gradient alone."""
    fmt = m.forward_format
    if fmt is None:
        return source
    if not isinstance(fmt, FixedPoint) or m.forward_rounding != "nearest":
        raise ExportError(
            f"{name}: a Quantizer must round to a FixedPoint, to nearest, to be exported, got {fmt}, "
            f'{m.forward_rounding}: write marvin.Quantizer(FixedPoint(8, 4), forward_rounding="nearest"), '
            "or take it out and call marvin.calibrate"
        )
    return rounded(builder, name, source, fmt)


def rounded(builder: Builder, name: str, source: str, fmt: FixedPoint) -> str:
    """Add a rounding that the model itself does; return the name of its result."""
    result = builder.round(name, source, fmt)
    builder.whole = lambda inputs: (apply(Round("", (), fmt), inputs[0]), inputs[0] * 0)
    return result


MODULES: dict[type[nn.Module], Callable[..., str]] = {
    nn.Conv1d: _conv,
    nn.Conv2d: _conv,
    nn.Linear: _linear,
    nn.BatchNorm1d: _norm,
    nn.BatchNorm2d: _norm,
    nn.ReLU: _relu,
    nn.MaxPool1d: _max_pool,
    nn.MaxPool2d: _max_pool,
    nn.AvgPool1d: _average_pool,
    nn.AvgPool2d: _average_pool,
    nn.AdaptiveAvgPool1d: _adaptive_pool,
    nn.AdaptiveAvgPool2d: _adaptive_pool,
    nn.AdaptiveMaxPool1d: _adaptive_max_pool,
    nn.AdaptiveMaxPool2d: _adaptive_max_pool,
    nn.ZeroPad1d: _zeros_around,
    nn.ZeroPad2d: _zeros_around,
    nn.ConstantPad1d: _zeros_around,
    nn.ConstantPad2d: _zeros_around,
    nn.ConstantPad3d: _zeros_around,
    nn.Flatten: _flatten,
    nn.Unflatten: _unflatten,
    Quantizer: _quantizer,
    **dict.fromkeys(SAME, _nothing),
}
