"""Layers as operations: one handler a kind of module."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fixedpoint_kernels import FixedPoint
from marvin.export.bounds import first_value, value_of
from marvin.export.errors import ExportError, signed_fixed_point
from marvin.export.network import (
    Affine,
    AveragePool,
    Conv,
    Flatten,
    Input,
    Linear,
    MaxPool,
    Network,
    Operation,
    Pair,
    Relu,
    Round,
    Value,
)
from marvin.export.observe import Formats, fitting
from marvin.export.packed import codes_of

__all__ = ["MODULES", "Builder"]


@dataclass
class Builder:
    """A network in the making.

    Args:
        model: What is translated.
        weights: Formats of parameters by name.
        activations: What modules round, by name.
        scale_wl: Word length of batch normalisation's scale.
        names: The value of each node of the trace.
        operations: So far.
        values: Of ``operations``, without the input.
    """

    model: nn.Module
    weights: Mapping[str, FixedPoint]
    activations: Mapping[str, Formats]
    scale_wl: int
    names: dict[str, str] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)

    def begin(self, name: str, shape: tuple[int, ...]) -> None:
        """Add the input."""
        self.operations.append(Input(name, (), shape))

    def add(self, op: Operation) -> str:
        """Add an operation; return its name."""
        source = self.operations[0]
        assert isinstance(source, Input)
        if op.inputs == (source.name,) and isinstance(op, Round):
            value = first_value(op, source.shape)
        else:
            value = value_of(op, [self.values[self.rounded(name, op.name)] for name in op.inputs])
        self.values[op.name] = value
        self.operations.append(op)
        return op.name

    def rounded(self, name: str, user: str) -> str:
        """Return ``name``, unless it is the input, which only a rounding can take."""
        if name not in self.values:
            raise ExportError(f"{user} takes the network's input before any layer rounds it")
        return name

    def unused(self, name: str) -> str:
        """Return ``name``, with a number behind it where it is taken."""
        taken = {op.name for op in self.operations}
        names = (name, *(f"{name}.{i}" for i in range(2, len(taken) + 3)))
        return next(n for n in names if n not in taken)

    def round_input(self, name: str, module: str, source: str) -> str:
        """Round what a module takes, where it does; return the value's name."""
        formats = self.activations.get(module)
        if formats is None or formats.input is None:
            return self.rounded(source, module)
        value = self.values.get(source)
        if formats.is_calibrated and value is not None and value.bits <= formats.input.wl:
            return source
        return self.round(f"{name}.in", source, formats.input)

    def round_output(self, name: str, module: str, source: str) -> str:
        """Round what a module gives, where it does; return the value's name."""
        formats = self.activations.get(module)
        if formats is None or formats.output is None:
            return source
        return self.round(f"{name}.out", source, formats.output)

    def round(self, name: str, source: str, fmt: FixedPoint) -> str:
        """Round a value, unless that would change nothing; return the name of the result."""
        signed_fixed_point(name, fmt)
        value = self.values.get(source)
        if value is not None and value.fl <= fmt.fl:
            shift = fmt.fl - value.fl
            if fmt.min_code <= value.low << shift and value.high << shift <= fmt.max_code:
                return source
        return self.add(Round(name, (source,), fmt))

    def end(self, name: str) -> None:
        """Take ``name`` as the output."""
        used = self.needed(self.rounded(name, "the output"))
        self.operations = [op for op in self.operations if op.name in used]
        self.operations.sort(key=lambda op: op.name == name)

    def needed(self, name: str) -> set[str]:
        """Return the names of all that a value depends on."""
        inputs = {op.name: op.inputs for op in self.operations}
        found, waiting = {self.operations[0].name}, [name]
        while waiting:
            current = waiting.pop()
            if current not in found:
                found.add(current)
                waiting.extend(inputs[current])
        return found

    def network(self, origin: str) -> Network:
        """Return what was built."""
        values = {op.name: self.values[op.name] for op in self.operations[1:]}
        return Network(tuple(self.operations), values, origin)


def _weight(builder: Builder, module: str, x: Tensor) -> tuple[Tensor, FixedPoint]:
    name = f"{module}.weight"
    if name not in builder.weights:
        raise ExportError(f"{name} has no format: its layer stayed in floats")
    fmt = signed_fixed_point(name, builder.weights[name])
    return codes_of(name, x, fmt).to(torch.int64), fmt


def _bias(
    builder: Builder, module: str, x: Tensor | None, product_fl: int
) -> tuple[Tensor | None, FixedPoint]:
    """Return a bias with its own format, or rounded to the point of the products."""
    name = f"{module}.bias"
    if x is None:
        return None, FixedPoint(32, 0)
    if name in builder.weights:
        fmt = signed_fixed_point(name, builder.weights[name])
        return codes_of(name, x, fmt).to(torch.int64), fmt
    return nearest(x.double(), 32, product_fl)


def nearest(x: Tensor, wl: int, longest_fl: int = 31) -> tuple[Tensor, FixedPoint]:
    """Return codes of ``x``, float64, in the finest format that holds it, and the format."""
    x = x.detach().cpu()
    fmt = fitting((float(x.min()), float(x.max())), wl)
    fmt = FixedPoint(wl, max(-31, min(fmt.fl, longest_fl)))
    return torch.round(x * fmt.scale).to(torch.int64), fmt


def _conv(builder: Builder, name: str, module: str, m: nn.Conv2d, source: str) -> str:
    if m.padding_mode != "zeros" or isinstance(m.padding, str):
        raise ExportError(
            f"{module}: padding must be zeros, their number given, got {m.padding_mode} "
            f"and padding={m.padding!r}"
        )
    source = builder.round_input(name, module, source)
    weight, weight_fmt = _weight(builder, module, m.weight)
    bias, bias_fmt = _bias(builder, module, m.bias, builder.values[source].fl + weight_fmt.fl)
    op = Conv(
        name,
        (source,),
        weight,
        weight_fmt,
        bias,
        bias_fmt,
        _pair(m.stride),
        _pair(m.padding),
        _pair(m.dilation),
        m.groups,
    )
    return builder.round_output(name, module, builder.add(op))


def _linear(builder: Builder, name: str, module: str, m: nn.Linear, source: str) -> str:
    source = builder.round_input(name, module, source)
    if len(builder.values[source].shape) != 1:
        raise ExportError(f"{module}: a linear layer must take vectors: flatten images before it")
    weight, weight_fmt = _weight(builder, module, m.weight)
    bias, bias_fmt = _bias(builder, module, m.bias, builder.values[source].fl + weight_fmt.fl)
    op = Linear(name, (source,), weight, weight_fmt, bias, bias_fmt)
    return builder.round_output(name, module, builder.add(op))


def _norm(
    builder: Builder,
    name: str,
    module: str,
    m: nn.BatchNorm1d | nn.BatchNorm2d,
    source: str,
) -> str:
    if m.running_mean is None or m.running_var is None:
        raise ExportError(f"{module}: batch normalisation must have running statistics")
    source = builder.round_input(name, module, source)
    scale = (m.running_var.double() + m.eps).rsqrt()
    if m.weight is not None:
        scale = scale * m.weight.detach().double()
    offset = -m.running_mean.double() * scale
    if m.bias is not None:
        offset = offset + m.bias.detach().double()
    scale_codes, scale_fmt = nearest(scale, builder.scale_wl)
    point = builder.values[source].fl + scale_fmt.fl
    op = Affine(name, (source,), scale_codes, scale_fmt, *nearest(offset, 32, point))
    return builder.round_output(name, module, builder.add(op))


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
        raise ExportError(f"{module}: average pooling must have a format for its output")
    signed_fixed_point(name, formats.output)
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
