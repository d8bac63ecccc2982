"""Layers as operations: one handler a kind of module."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fixedpoint_kernels import FixedPoint
from marvin.channels import ChannelFormat
from marvin.export.errors import ExportError, fixed_point
from marvin.export.frontend.builder import Builder
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
)
from marvin.export.passes.batch_norm import fixed_norm, spare_of
from marvin.export.passes.biases import float_bias, spare_bits

__all__ = ["MODULES"]


def _numbers(
    builder: Builder, module: str, m: nn.Conv2d | nn.Linear, source: str
) -> dict[str, Any]:
    """Return the fields of ``Weighted``."""
    name = f"{module}.weight"
    if name not in builder.weights:
        raise ExportError(f"{name} has no format: its layer stayed in floats")
    given = builder.weights[name]
    fmt = fixed_point(name, given)
    weight = codes_of(name, m.weight, fmt).to(torch.int64)
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    channels = given if isinstance(given, ChannelFormat) else None
    if channels is not None:
        zeros = _zeros(name, weight, channels)
    x = builder.values[source]
    bias, bias_fmt = None, FixedPoint(32, 0)
    if m.bias is not None:
        sums = (weight.abs().reshape(len(weight), -1).sum(1) >> zeros) * max(-x.low, x.high)
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
            "channels that do not"
        )
    return zeros


def _bias(
    builder: Builder, module: str, x: Tensor, fls: Tensor, spare: int
) -> tuple[Tensor, FixedPoint]:
    """Return a bias with its own format, or ``spare`` bits finer than each channel's products."""
    name = f"{module}.bias"
    if name in builder.weights:
        fmt = fixed_point(name, builder.weights[name])
        return codes_of(name, x, fmt).to(torch.int64), fmt
    return float_bias(x.detach().cpu().double(), fls, spare)


def _conv(builder: Builder, name: str, module: str, m: nn.Conv2d, source: str) -> str:
    if m.padding_mode != "zeros" or isinstance(m.padding, str):
        raise ExportError(
            f"{module}: padding must be zeros, their number given, got {m.padding_mode} "
            f"and padding={m.padding!r}"
        )
    source = builder.round_input(name, module, source)
    op = Conv(
        name,
        (source,),
        **_numbers(builder, module, m, source),
        stride=_pair(m.stride),
        padding=_pair(m.padding),
        dilation=_pair(m.dilation),
        groups=m.groups,
    )
    return builder.round_output(name, module, builder.add(op))


def _linear(builder: Builder, name: str, module: str, m: nn.Linear, source: str) -> str:
    source = builder.round_input(name, module, source)
    if len(builder.values[source].shape) != 1:
        raise ExportError(f"{module}: a linear layer must take vectors: flatten images before it")
    op = Linear(name, (source,), **_numbers(builder, module, m, source))
    return builder.round_output(name, module, builder.add(op))


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
    spare = spare_of(before, x, builder.values[before.inputs[0]].fl)
    numbers = fixed_norm(module, m, x, spare, builder.scale_wl)
    return builder.round_output(name, module, builder.add(Affine(name, (source,), *numbers)))


def _max_pool(builder: Builder, name: str, module: str, m: nn.MaxPool2d, source: str) -> str:
    if m.ceil_mode or m.return_indices:
        raise ExportError(f"{module}: max pooling must have no ceil_mode and no return_indices")
    kernel = _pair(m.kernel_size)
    stride = _pair(m.stride if m.stride is not None else m.kernel_size)
    source = builder.rounded(source, module)
    op = MaxPool(name, (source,), kernel, stride, _pair(m.padding), _pair(m.dilation))
    return builder.add(op)


def _average_pool(builder: Builder, name: str, module: str, m: nn.AvgPool2d, source: str) -> str:
    padding = _pair(m.padding)
    if m.ceil_mode or m.divisor_override or (any(padding) and not m.count_include_pad):
        raise ExportError(
            f"{module}: average pooling must divide by the size of the window, without ceil_mode, "
            "divisor_override and count_include_pad=False"
        )
    return _average(builder, name, module, source, (m.kernel_size, m.stride, padding))


def _adaptive_pool(
    builder: Builder, name: str, module: str, m: nn.AdaptiveAvgPool2d, source: str
) -> str:
    size = builder.values[builder.rounded(source, module)].shape[-2:]
    wanted = m.output_size if isinstance(m.output_size, tuple) else (m.output_size,) * 2
    given = [s if w is None else w for s, w in zip(size, wanted, strict=True)]
    if any(s % w for s, w in zip(size, given, strict=True)):
        raise ExportError(f"{module}: windows must be of one size, got {size} to {tuple(given)}")
    kernel = tuple(s // w for s, w in zip(size, given, strict=True))
    return _average(builder, name, module, source, (kernel, kernel, (0, 0)))


def _average(builder: Builder, name: str, module: str, source: str, window: Any) -> str:
    source = builder.round_input(name, module, source)
    formats = builder.activations.get(module)
    if formats is None or formats.output is None:
        raise ExportError(
            f"{module}: average pooling must have a format for its output, its own or that of one "
            "layer which takes it"
        )
    fixed_point(name, formats.output)
    kernel, stride, padding = window
    op = AveragePool(
        name, (source,), _pair(kernel), _pair(stride or kernel), padding, formats.output
    )
    return builder.add(op)


def _relu(builder: Builder, name: str, module: str, _m: nn.ReLU, source: str) -> str:
    return builder.add(Relu(name, (builder.rounded(source, module),)))


def _flatten(builder: Builder, name: str, module: str, m: nn.Flatten, source: str) -> str:
    if (m.start_dim, m.end_dim) != (1, -1):
        raise ExportError(f"{module}: must flatten a whole sample, got {m}")
    return builder.add(Flatten(name, (builder.rounded(source, module),)))


def _nothing(_builder: Builder, _name: str, _module: str, _m: nn.Module, source: str) -> str:
    return source


def _pair(x: Any) -> Pair:
    first, second = x if isinstance(x, tuple) else (x, x)
    return int(first), int(second)


MODULES: dict[type[nn.Module], Callable[..., str]] = {
    nn.Conv2d: _conv,
    nn.Linear: _linear,
    nn.BatchNorm1d: _norm,
    nn.BatchNorm2d: _norm,
    nn.ReLU: _relu,
    nn.MaxPool2d: _max_pool,
    nn.AvgPool2d: _average_pool,
    nn.AdaptiveAvgPool2d: _adaptive_pool,
    nn.Flatten: _flatten,
    nn.Identity: _nothing,
    nn.Dropout: _nothing,
}
