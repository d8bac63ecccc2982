"""Fused segments: against their reference in plain PyTorch, and that against autograd in float64."""

import ctypes
import dataclasses
import gc
import math
import subprocess
import sys
import threading
from pathlib import Path

import numba
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fixedpoint_kernels import FixedPoint
from fixedpoint_kernels.functions import Curve
from fixedpoint_kernels.fused import (
    INPUT,
    Joined,
    Layer,
    Norm,
    Parameters,
    Pooled,
    Scaled,
    Segment,
    Value,
    execute,
    layout,
    operations,
    reference,
)
from fixedpoint_kernels.fused import fields as f
from fixedpoint_kernels.fused import program as programs
from fixedpoint_kernels.fused.backward import Backward
from fixedpoint_kernels.fused.graph import Return
from fixedpoint_kernels.fused.memory import Memory
from fixedpoint_kernels.fused.program import Program
from fixedpoint_kernels.products import jobs, paths, shapes
from fixedpoint_kernels.products.blocks import blocks
from fixedpoint_kernels.products.shapes import Window

HERE = [name for name in paths.OWN if name not in paths.unavailable()]
SIGNED, UNSIGNED = FixedPoint(8, 5), FixedPoint(8, 5, signed=False)
PADDED, STRIDED, PROJECTED = Window((1, 1), (1, 1)), Window((2, 2), (1, 1)), Window((2, 2))

pytestmark = [
    pytest.mark.skipif(not HERE, reason="no own path of products on this processor"),
    pytest.mark.usefixtures("full_memory"),
]


def layer(source, outputs, inputs, *, size=3, window=PADDED, eps=1e-5, **more):
    fmt = SIGNED if source == INPUT else UNSIGNED
    shape = (outputs, inputs, size, size)
    return Layer(source, fmt, FixedPoint(8, 7), shape, window, eps, **more)


def residual(width=8, eps=1e-5, inputs=3):
    """Two blocks, the second with a projection and a stride; the last value leaves."""
    layers = (
        layer(INPUT, width, inputs, eps=eps),
        layer(0, width, width, eps=eps),
        layer(1, width, width, eps=eps),
        layer(2, 2 * width, width, window=STRIDED, eps=eps),
        layer(3, 2 * width, 2 * width, eps=eps),
        layer(2, 2 * width, width, size=1, window=PROJECTED, eps=eps),
    )
    values = (
        Value(0, relu=True),
        Value(1, relu=True),
        Value(2, other_value=0, relu=True),
        Value(3, relu=True),
        Value(4, other_layer=5, relu=True, is_output=True),
    )
    return Segment(layers, values)


def branches(width=4):
    """Values without ReLU, two that leave, the input added, layers that do not clip."""
    layers = (
        layer(INPUT, width, width, clip=False),
        layer(0, width, width, size=1, window=Window(), eps=None),
        layer(0, width, width, clip=False),
        layer(2, width, width, size=2, window=Window((2, 1), (1, 0), (2, 1)), eps=None),
    )
    values = (
        Value(0, other_value=INPUT),
        Value(1, relu=True, is_output=True),
        Value(2, other_value=0, relu=True),
        Value(3, is_output=True),
    )
    return Segment(layers, values)


def pooled(width=8, eps=1e-5):
    """Windows that meet and do not; a pooled value that is added, one that leaves, and their sources."""
    layers = (
        layer(INPUT, width, 3, eps=eps),
        layer(1, width, width, eps=eps),
        layer(2, width, width, eps=None),
        layer(4, width, width, eps=eps),
    )
    values = (
        Value(0, relu=True),
        Pooled(0, (3, 3), Window((2, 2), (1, 1))),
        Value(1, other_value=1, relu=True),
        Value(2),
        Pooled(3, (2, 3), Window((2, 1), (0, 1))),
        Value(3, relu=True, is_output=True),
        Pooled(5, (2, 2), Window((2, 2)), is_output=True),
    )
    return Segment(layers, values)


def linear(source, outputs, inputs, **more):
    shape = outputs, inputs, 1, 1
    return Layer(source, UNSIGNED, FixedPoint(8, 7), shape, Window(), None, is_flat=True, **more)


def classifier(width=16, eps=1e-5, outputs=10):
    """As ResNets end: the mean of all places, and a linear layer; the mean leaves too."""
    layers = layer(INPUT, width, 3, eps=eps), linear(1, outputs, width)
    values = (
        Value(0, relu=True),
        Pooled(0, None, Window(), is_mean=True, is_flat=True, is_output=True),
        Value(1, is_output=True, is_flat=True),
    )
    return Segment(layers, values)


def flattened(places, width=16, hidden=32, outputs=10):
    """As AlexNet ends: linear layers behind an image, one of them added, one with a frozen mask."""
    layers = (
        layer(INPUT, width, 3, eps=None),
        linear(1, hidden, width * places),
        linear(2, hidden, hidden, clip=False),
        linear(3, outputs, hidden),
    )
    values = (
        Value(0, relu=True),
        Pooled(0, (2, 2), Window((2, 2))),
        Value(1, relu=True, is_flat=True),
        Value(2, other_value=2, relu=True, is_flat=True),
        Value(3, is_output=True, is_flat=True),
    )
    return Segment(layers, values)


def averaged(width=8):
    """Means of windows that meet, reach over the border, and leave out places; also one added."""
    layers = layer(INPUT, width, 3, eps=None), layer(1, width, width), layer(3, width, width)
    values = (
        Value(0),
        Pooled(0, (3, 3), Window((2, 1), (1, 1)), is_mean=True),
        Value(1, other_value=1, relu=True),
        Pooled(2, (2, 3), Window((3, 2)), is_mean=True),
        Value(2, relu=True, is_output=True),
    )
    return Segment(layers, values)


def kernels(width=16):
    """Kernels of more taps than vectors have lanes, and of one; widths of whole vectors."""
    layers = (
        layer(INPUT, width, width, size=5, window=Window((1, 1), (2, 2))),
        layer(0, 2 * width, width, size=1, window=Window((2, 2))),
        layer(1, width, 2 * width, size=3, eps=None),
    )
    values = Value(0, relu=True), Value(1, relu=True), Value(2, is_output=True)
    return Segment(layers, values)


def inverted(inputs=3, width=8, times=6, stride=1, kernel=3):
    """As MobileNetV2: wider, each channel alone, narrower, the input added; ReLU6."""
    inner, moves = width * times, Window((stride, stride), (kernel // 2, kernel // 2), groups=1)
    layers = (
        layer(INPUT, width, inputs, size=kernel, window=moves),
        layer(0, inner, width, size=1, window=Window()),
        layer(1, inner, 1, size=kernel, window=moves._replace(groups=inner)),
        layer(2, width, inner, size=1, window=Window()),
    )
    own = None if stride > 1 else 0
    values = (
        Value(0),
        Value(1, relu=True, ceiling=0.75),
        Value(2, relu=True, ceiling=1.5),
        Value(3, other_value=own, relu=True, ceiling=1.0, is_output=True),
    )
    return Segment(layers, values)


def grouped(width=12, eps=1e-5):
    """As ResNeXt: groups of some channels; the first layer, one that widens and one that narrows."""
    layers = (
        layer(INPUT, 2 * width, 3, window=PADDED._replace(groups=2), eps=eps),
        layer(0, 2 * width, width // 2, window=STRIDED._replace(groups=4), eps=eps),
        layer(1, width, 4, size=2, window=Window(groups=width // 2), eps=None, clip=False),
        layer(2, 3 * width, 1, window=Window((1, 1), (2, 1), (2, 1), groups=width), eps=eps),
    )
    values = (
        Value(0, relu=True),
        Value(1),
        Value(2, relu=True),
        Value(3, relu=True, is_output=True),
    )
    return Segment(layers, values)


def curved(width=8, eps=1e-5, names=("silu", "hardswish", "gelu", "leaky_relu")):
    """A curve behind each layer: with batch norm, with a bias, pooled and added, and one that leaves."""
    curves = [Curve(name, 0.1 if name == "leaky_relu" else 0.0) for name in names]
    layers = (
        layer(INPUT, width, 3, eps=eps),
        layer(0, width, width, size=1, window=Window(), eps=None),
        layer(1, width, width, eps=eps, clip=False),
        layer(3, width, width, eps=eps),
    )
    layers = (layers[0], *(dataclasses.replace(own, inputs=SIGNED) for own in layers[1:]))
    values = (
        Value(0, curve=curves[0]),
        Value(1, curve=curves[1]),
        Value(2, curve=curves[2]),
        Pooled(2, (2, 2), Window((2, 2))),
        Value(3, curve=curves[3], is_output=True),
    )
    return Segment(layers, values)


def squeezed(width=8, inner=4, eps=1e-5, first="silu", last="sigmoid", leaves=False):
    """As EfficientNet: means of a value, two layers, and the value times what comes out; then added."""
    one, made = Window(), {"relu": True} if first == "relu" else {"curve": Curve(first)}
    gate = {"relu": True, "ceiling": 0.5} if last == "relu6" else {"curve": Curve(last)}
    layers = (
        layer(INPUT, width, 3, eps=eps),
        layer(0, width, width, eps=eps),
        layer(2, inner, width, size=1, window=one, eps=None),
        layer(3, width, inner, size=1, window=one, eps=None),
        layer(5, width, width, eps=eps),
        layer(6, width, width, size=1, window=one, eps=eps),
    )
    layers = (layers[0], *(dataclasses.replace(own, inputs=SIGNED) for own in layers[1:]))
    values = (
        Value(0),
        Value(1, **made, is_output=leaves),
        Pooled(1, None, Window(), is_mean=True),
        Value(2, relu=True),
        Value(3, **gate),
        Scaled(1, 4, is_output=leaves),
        Value(4, other_value=0),
        Value(5, is_output=True),
    )
    return Segment(layers, values)


def added(width=8, eps=1e-5):
    """Sums of two values: behind a curve, behind a gate, of the input, in one and two steps; one leaves."""
    one = Window()
    layers = (
        layer(INPUT, width, width, eps=eps),
        layer(1, width, width, size=1, window=one, eps=eps),
        layer(3, width, width, size=1, window=one, eps=None),
        layer(6, width, width, eps=eps),
    )
    layers = (layers[0], *(dataclasses.replace(own, inputs=SIGNED) for own in layers[1:]))
    values = (
        Value(0, curve=Curve("silu")),
        Value(None, value=0, other_value=INPUT),
        Value(1),
        Pooled(2, None, Window(), is_mean=True),
        Value(2, curve=Curve("hardsigmoid")),
        Scaled(2, 4),
        Value(None, value=5, other_value=1, relu=True, ceiling=2.0, is_output=True),
        Value(3, relu=True),
        Value(None, value=6, other_value=7, is_output=True),
    )
    return Segment(layers, values)


def preactivated(width=8, eps=1e-5, curve=None):
    """Batch norm of the input, of a sum and of a sum that leaves; a value that a convolution takes, too."""
    made = {"relu": True} if curve is None else {"curve": Curve(curve)}
    layers = (
        Norm(INPUT, 3, 1e-5),
        layer(0, width, 3, eps=None),
        Norm(1, width, 1e-3),
        layer(2, width, width, eps=eps),
        layer(3, width, width, eps=None, clip=False),
        Norm(4, width, 1e-5),
        layer(4, width, width, size=1, window=PROJECTED, eps=None),
        layer(5, width, width, window=STRIDED, eps=None),
        Norm(6, width, 1e-5),
    )
    layers = tuple(
        dataclasses.replace(own, inputs=SIGNED) if n in (1, 6) else own
        for n, own in enumerate(layers)
    )
    values = (
        Value(0),
        Value(1),
        Value(2, **made),
        Value(3, relu=True),
        Value(4, other_value=1, is_output=True),
        Value(5, relu=True, ceiling=2.0),
        Value(6, other_layer=7, is_output=True),
        Value(8, relu=True, is_output=True),
    )
    return Segment(layers, values)


def dense(width=8, growth=4, count=3, ends=True):
    """As DenseNet: each layer's output beside what it took, batch norm of both; the input beside the last."""
    layers, values, wide = [layer(INPUT, width, 3, eps=None)], [Value(0)], width
    for _ in range(count):
        layers.append(Norm(len(values) - 1, wide, 1e-5))
        values.append(Value(len(layers) - 1, relu=True))
        layers.append(layer(len(values) - 1, growth, wide, eps=None))
        values.append(Value(len(layers) - 1))
        values.append(Joined((len(values) - 3, len(values) - 1)))
        wide += growth
    if not ends:
        layers += Norm(len(values) - 1, wide, 1e-5), layer(len(values), width, wide)
        values += Value(len(layers) - 2, relu=True), Value(len(layers) - 1, is_output=True)
        return Segment(tuple(layers), tuple(values))
    values.append(Joined((INPUT, len(values) - 1, 1), is_output=True))
    layers.append(layer(len(values) - 1, width, 3 + wide + width))
    layers[-1] = dataclasses.replace(layers[-1], inputs=SIGNED)
    values.append(Value(len(layers) - 1, relu=True, is_output=True))
    return Segment(tuple(layers), tuple(values))


def repeated(width=8, times=(2, 2), eps=1e-5):
    """As U-Net: pooled, taken, repeated, and beside what it was before; repeated once more, which leaves, and its batch norm."""
    layers = (
        layer(INPUT, width, 3, eps=eps),
        layer(1, 2 * width, width, eps=eps),
        layer(4, width, 3 * width, eps=None),
        Norm(6, width, 1e-5),
    )
    values = (
        Value(0, relu=True),
        Pooled(0, times, Window(times)),
        Value(1, relu=True),
        Joined((2,), times),
        Joined((3, 0)),
        Value(2),
        Joined((5,), (1, 3), is_output=True),
        Value(3, relu=True, is_output=True),
    )
    return Segment(layers, values)


def surrounded(width=8, eps=1e-5, zeros=(4, 4)):
    """As ResNets of CIFAR: every second place and channels of zeros are added; two values among zeros, and their batch norm."""
    wide = width + sum(zeros)
    layers = (
        layer(INPUT, width, 3, eps=eps),
        layer(0, wide, width, window=STRIDED, eps=eps),
        layer(3, wide, wide, eps=eps),
        layer(5, width, width + wide + 5, size=1, window=Window(), eps=None),
        Norm(5, width + wide + 5, 1e-5),
    )
    values = (
        Value(0, relu=True),
        Pooled(0, (1, 1), Window((2, 2))),
        Joined((1,), zeros=zeros),
        Value(1, other_value=2, relu=True),
        Value(2, relu=True),
        Joined((1, 4), zeros=(3, 2)),
        Value(3, is_output=True),
        Value(4, relu=True, is_output=True),
    )
    return Segment(layers, values)


def narrowed(segment, bits):
    """The same with formats of so many bits, over the same range."""

    def fewer(fmt):
        return dataclasses.replace(fmt, wl=bits, fl=fmt.fl - fmt.wl + bits)

    layers = [
        dataclasses.replace(own, inputs=fewer(own.inputs), weight=fewer(own.weight))
        for own in segment.layers
    ]
    return Segment(tuple(layers), segment.values)


def by_channel(segment, every=1):
    """The same; the weight of each, or of every second layer, has a fractional length for each output."""
    layers = [
        dataclasses.replace(own, by_channel=n % every == 0) if isinstance(own, Layer) else own
        for n, own in enumerate(segment.layers)
    ]
    return Segment(tuple(layers), segment.values)


SEGMENTS = {
    "residual": (residual(), 3, (12, 10)),
    "odd": (residual(5, inputs=2), 3, (9, 7)),
    "wide": (residual(20), 2, (8, 8)),
    "rows": (residual(16), 5, (20, 16)),
    "biases": (residual(8, None), 3, (8, 8)),
    "branches": (branches(), 3, (9, 7)),
    "places": (residual(16, inputs=4), 20, (4, 4)),
    "pooled": (pooled(), 3, (17, 14)),
    "pooled odd": (pooled(5, None), 2, (16, 13)),
    "classifier": (classifier(), 3, (7, 5)),
    "classifier odd": (classifier(5, None, 3), 2, (4, 4)),
    "flattened": (flattened(6), 5, (4, 6)),
    "flattened odd": (flattened(6, 5, 19, 7), 3, (5, 7)),
    "flattened large": (flattened(64, 24, 40, 100), 70, (16, 16)),
    "averaged": (averaged(), 3, (11, 9)),
    "averaged odd": (averaged(5), 2, (12, 8)),
    "kernels": (kernels(), 3, (7, 6)),
    "few places": (residual(20, None, inputs=20), 19, (3, 2)),
    "inverted": (inverted(), 3, (9, 8)),
    "inverted odd": (inverted(2, 5, 3, 2, 5), 2, (11, 7)),
    "inverted places": (inverted(16, 16, 4), 20, (3, 2)),
    "grouped": (grouped(), 3, (10, 9)),
    "grouped wide": (grouped(64), 2, (8, 8)),
    "grouped rows": (grouped(64), 3, (16, 16)),
    "grouped five bits": (narrowed(grouped(20, None), 5), 3, (9, 7)),
    "curved": (curved(), 3, (10, 9)),
    "curved odd": (curved(5, names=("sigmoid", "hardsigmoid", "leaky_relu", "silu")), 2, (7, 9)),
    "curved biases": (curved(16, None, ("gelu_tanh", "silu", "hardswish", "sigmoid")), 3, (8, 8)),
    "squeezed": (squeezed(), 3, (9, 8)),
    "squeezed odd": (squeezed(5, 3, 1e-5, "hardswish", "hardsigmoid", leaves=True), 2, (5, 7)),
    "squeezed wide": (squeezed(40, 10, 1e-5, "relu"), 3, (8, 8)),
    "squeezed strips": (squeezed(76, 12, leaves=True), 2, (17, 13)),
    "squeezed biases": (squeezed(16, 8, None, "gelu", "relu6"), 20, (4, 4)),
    "added": (added(), 3, (9, 8)),
    "added odd": (added(5, None), 2, (7, 5)),
    "preactivated": (preactivated(), 3, (9, 8)),
    "preactivated odd": (preactivated(5, None, "silu"), 20, (5, 3)),
    "preactivated wide": (preactivated(70, curve="hardswish"), 2, (12, 13)),
    "dense": (dense(), 3, (8, 7)),
    "dense odd": (dense(5, 3), 2, (5, 9)),
    "dense to the end": (dense(16, 12, 3, ends=False), 3, (6, 5)),
    "dense strips": (dense(76, 12, 2), 2, (17, 13)),
    "dense wide": (dense(64, 32, 2), 20, (4, 4)),
    "repeated": (repeated(), 3, (8, 12)),
    "repeated odd": (repeated(5, (1, 3), None), 2, (5, 9)),
    "surrounded": (surrounded(), 3, (8, 12)),
    "surrounded odd": (surrounded(5, None, (0, 3)), 2, (9, 7)),
    "surrounded wide": (surrounded(32, zeros=(16, 16)), 3, (16, 16)),
    "seven bits": (narrowed(residual(16), 7), 3, (8, 8)),
    "five bits": (narrowed(residual(20, inputs=20), 5), 3, (9, 7)),
    "five bits by place": (narrowed(residual(16, inputs=4), 5), 20, (4, 4)),
    "by channel": (by_channel(residual(16, inputs=16)), 3, (9, 7)),
    "by channel odd": (by_channel(residual(5, inputs=2), 2), 3, (9, 7)),
    "by channel biases": (by_channel(residual(20, None)), 3, (8, 8)),
    "by channel places": (by_channel(residual(16, inputs=4)), 20, (4, 4)),
    "by channel flattened": (by_channel(flattened(6, 16, 32, 16)), 5, (4, 6)),
    "by channel grouped": (by_channel(grouped()), 3, (10, 9)),
    "by channel inverted": (by_channel(inverted()), 3, (9, 8)),
    "by channel preactivated": (by_channel(preactivated()), 3, (9, 8)),
    "by channel squeezed": (by_channel(squeezed()), 3, (9, 8)),
}


def parameters(segment, seed=0):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for n, own in enumerate(segment.layers):
        if isinstance(own, Norm):
            scale, shift = torch.randn(2, own.channels, generator=generator) * 0.1
            found.append(Parameters(torch.empty(0), 1 + scale, shift))
            continue
        outputs, inputs, height, width = own.shape
        weight = (
            torch.randn(own.shape, generator=generator) * (2 / (inputs * height * width)) ** 0.5
        )
        shifts = torch.randint(6, (outputs,), generator=generator) if own.by_channel else None
        codes = (weight * own.weight.scale).round()
        weight = codes.clamp(own.weight.min_code, own.weight.max_code) * own.weight.lsb
        if shifts is not None:
            weight = weight / 2.0 ** shifts.view(-1, 1, 1, 1)
        weight = weight.flatten(1) if own.is_flat else weight
        scale = 1 + 0.1 * torch.randn(outputs, generator=generator)
        shift = 0.1 * torch.randn(outputs, generator=generator)
        found.append(Parameters(weight, None if own.eps is None else scale, shift, (seed, n)))
        if shifts is not None:
            found[-1] = dataclasses.replace(
                found[-1], shifts=tuple(shifts.tolist()), second_stream=n + 100
            )
    return found


def images(segment, count, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    channels = segment.sizes(size)[INPUT][0]
    return torch.randn(count, channels, *size, generator=generator)


def program(segment, x, path=None, threads=1, needs_input=True, needs_weights=None):
    path = path or HERE[0]
    paths.chosen(path)  # asks for AMX
    wanted = needs_weights or [isinstance(own, Layer) for own in segment.layers]
    return Program(segment, len(x), tuple(x.shape[2:]), path, threads, needs_input, wanted)


def check(segment, x, made, seed=0):
    own = parameters(segment, seed)
    expected, kept = reference.forward(segment, x, own)
    clamped: list[int] = []
    outputs, memory = execute.forward(made, x, own, clamped)
    assert len(outputs) == len(expected)
    assert all(map(torch.equal, outputs, expected))
    statistics = kept.statistics(), execute.statistics(made, memory)
    for own_layer, wanted, found in zip(segment.layers, *statistics, strict=True):
        if own_layer.eps is not None:
            assert all(map(torch.equal, wanted, found))
    for n, (one, counts) in enumerate(zip(kept.layers, clamped, strict=True)):
        assert counts == (~one.inside).sum(), n
    generator = torch.Generator().manual_seed(seed + 1)
    grads = [torch.randn(y.shape, generator=generator) * 1e-3 for y in outputs]
    dx, wanted = reference.backward(segment, kept, own, grads)
    found_dx, found = execute.backward(made, memory, own, grads)
    # one float32 sum in another order may move one code of a gradient
    close = {"rtol": 1e-3, "atol": 1e-5}
    torch.testing.assert_close(found_dx, dx if made.needs_input else None, **close)
    for own_layer, a, b in zip(segment.layers, wanted, found, strict=True):
        torch.testing.assert_close(b.weight, a.weight, **close)
        torch.testing.assert_close(b.shift, a.shift, rtol=1e-4, atol=1e-6)
        if own_layer.eps is not None:
            torch.testing.assert_close(b.scale, a.scale, rtol=1e-4, atol=1e-6)
    return outputs, found


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("name", SEGMENTS)
def test_every_path_equals_the_reference(name, path, guards):
    segment, count, size = SEGMENTS[name]
    x = images(segment, count, size)
    check(segment, x, program(segment, x, path))
    assert guards.passes


@pytest.mark.parametrize("name", SEGMENTS)
def test_threads_and_small_pieces_change_nothing(name, monkeypatch):
    segment, count, size = SEGMENTS[name]
    x = images(segment, count, size)
    whole = check(segment, x, program(segment, x))
    monkeypatch.setattr(programs, "_FORWARD", 1)
    monkeypatch.setattr(programs, "_BACKWARD", 1)
    parts = check(segment, x, program(segment, x, threads=2))
    assert all(map(torch.equal, whole[0], parts[0]))
    for a, b in zip(whole[1], parts[1], strict=True):
        assert torch.equal(a.weight, b.weight)
        assert torch.equal(a.shift, b.shift)


def finished(width, inner, eps=1e-5, clip=True):
    """Values whose gradients a product ends: of two layers, of one, added to another, taken twice."""
    layers = (
        layer(INPUT, width, 3, eps=eps),
        layer(0, width, width, eps=eps, clip=clip),
        layer(0, width, width, size=1, window=Window(), eps=eps, clip=clip),
        layer(1, inner, width, eps=eps),
        layer(2, width, inner, eps=eps, clip=clip),
    )
    values = (
        Value(0, relu=True),
        Value(1, other_layer=2),
        Value(3, relu=True),
        Value(4, other_value=1, relu=True, is_output=True),
    )
    return Segment(layers, values)


FINISHED = {  # with images, their size, and how many products end a gradient on a path of tiles of 16 and 8
    "16": (finished(16, 32), 5, (6, 16), 3),
    "32": (finished(32, 48), 3, (12, 16), 3),
    "64": (finished(64, 96), 3, (9, 8), 3),
    "80": (finished(80, 16), 2, (5, 32), 3),
    "biases": (finished(16, 64, None), 3, (6, 16), 3),
    "no clipping": (finished(32, 16, clip=False), 3, (6, 16), 3),
    "biases without clipping": (finished(64, 32, None, False), 20, (10, 16), 3),
    "many images": (finished(16, 16), 40, (5, 16), 3),
    "an image in pieces": (finished(16, 32), 2, (160, 48), 3),
    "wide images": (finished(32, 64), 2, (5, 64), 3),
    "by channel": (by_channel(finished(32, 48)), 3, (6, 16), 3),
    "five bits": (narrowed(finished(16, 32), 5), 3, (6, 16), 3),
    "odd places": (finished(16, 32), 3, (9, 14), 0),
    "odd channels": (finished(20, 40), 3, (6, 16), 0),
    "few places": (finished(64, 64), 20, (8, 8), 1),
}


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("name", FINISHED)
def test_products_that_end_gradients_do_as_passes_do(name, path, monkeypatch, guards):
    segment, count, size, expected = FINISHED[name]
    x, threads = images(segment, count, size), 2
    made = program(segment, x, path, threads)
    if path == "avx512_vnni":
        assert (made.backward.details[:, jobs.KIND] == jobs.FINISHED).sum() == expected
    found = check(segment, x, made)
    assert guards.passes
    monkeypatch.setattr(Backward, "_ends_with_product", lambda *_: False)
    apart = program(segment, x, path, threads)
    assert not (apart.backward.details[:, jobs.KIND] == jobs.FINISHED).any()
    for a, b in zip(found[1], check(segment, x, apart)[1], strict=True):
        assert torch.equal(a.weight, b.weight)
        assert torch.equal(a.shift, b.shift)
        assert segment.layers[0].eps is None or torch.equal(a.scale, b.scale)


@pytest.fixture
def missed(monkeypatch):
    """How often threads did not meet."""
    from fixedpoint_kernels.fused import cpu

    own = {"times": 0}
    monkeypatch.setattr(cpu, "_missed", own)
    return own


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="needs two threads of Numba's")
def test_threads_meet_between_regions(missed):
    segment, count, size = SEGMENTS["residual"]
    x = images(segment, count, size)
    for _ in range(5):  # on a busy machine one may come late
        missed["times"] = 0
        check(segment, x, program(segment, x, threads=2))
        if not missed["times"]:
            return
    pytest.fail("threads that were there did not meet")


def test_threads_that_cannot_meet_do_their_work_apart(missed):
    from fixedpoint_kernels.threads import thread_count

    segment, count, size = SEGMENTS["residual"]
    x, threads = images(segment, count, size), thread_count() + 1
    check(segment, x, program(segment, x, threads=threads))  # one thread has two turns
    assert missed["times"] == 2


@pytest.mark.parametrize("name", ["residual", "grouped", "inverted"])
def test_sums_for_weights_that_int32_holds_are_those_that_it_does_not(name, monkeypatch):
    """Folded to float64 at each turn, or never."""
    segment, count, size = SEGMENTS[name]
    x = images(segment, count, size)
    made = program(segment, x)
    whole = check(segment, x, made)[1]
    held = [doubles(own.held, 3) for own in made.weight_sums]
    assert not all(times for _, _, times in held)
    monkeypatch.setattr(programs, "_BACKWARD", 1)
    made = program(segment, x)
    parts = check(segment, x, made)[1]
    assert any(times for _, _, times in (doubles(own.held, 3) for own in made.weight_sums))
    for a, b in zip(whole, parts, strict=True):
        assert torch.equal(a.weight, b.weight)


def test_sums_are_written_over_what_is_added_last():
    segment, count, size = SEGMENTS["residual"]
    made = program(segment, images(segment, count, size))
    found = []
    for own, out, added in ((made.forward, f.Y, f.Z2), (made.backward, f.OUT, f.ADD)):
        work = {(row, column): at for row, column, at in zip(*own.addresses.work, strict=True)}
        pairs = ((work.get((k, out)), work.get((k, added))) for k in range(len(own.table)))
        found.append([a == b for a, b in pairs if a is not None and b is not None])
    assert all(map(any, found))


def operation(kind, **numbers):
    return operations.Operation({f.KIND: kind, **{getattr(f, n): b for n, b in numbers.items()}})


def test_what_is_read_later_or_was_written_before_or_is_smaller_is_not_written_over():
    x, y, small, made = (operations.Buffer(size) for size in (64, 64, 32, 64))
    first = operation(f.VALUE, Z=small, Z2=x, Y=y)  # x is read again
    second = operation(f.VALUE, Z=x, Z2=y, Y=made)  # x, whose last use this is, goes before y
    third = operation(f.VALUE, Z=made, Y=y)  # y was written before
    operations.write_over([[first], [second, third]])
    assert first.numbers == {f.KIND: f.VALUE, f.Z: small, f.Z2: x, f.Y: y}
    assert second.numbers == {f.KIND: f.VALUE, f.Z: x, f.Z2: y, f.Y: x}
    assert third.numbers == {f.KIND: f.VALUE, f.Z: x, f.Y: y}


def large(outputs=64, size=3, window=PADDED):
    """Layers with 32 outputs or more for each of two threads."""
    layers = (
        layer(INPUT, 64, 16, size=size),
        layer(0, outputs, 64, size=size, window=window),
        layer(1, 64, outputs, size=1, window=Window(), eps=None),
    )
    values = *(Value(n, relu=True) for n in range(2)), Value(2, is_output=True)
    return Segment(layers, values)


LARGE = {
    "images": (large(), 3, (9, 8)),
    "images, strided": (large(window=STRIDED), 5, (11, 7)),
    "images, many": (large(), 70, (9, 8)),
    "places": (large(), 21, (4, 4)),
    "places, strided": (large(window=STRIDED), 70, (4, 3)),
    "sixteens": (large(80), 3, (6, 5)),
    "one tap": (large(size=1, window=PROJECTED), 4, (5, 5)),
    "flattened": (flattened(16, 32, 64, 64), 20, (8, 8)),
    "by channel": (by_channel(large()), 3, (9, 8)),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("name", LARGE)
def test_weights_by_output_are_those_by_image(name, path, threads, monkeypatch):
    """Images of many powers of two, so that sums are doubled and folded; weights that lie either way."""
    segment, count, size = LARGE[name]
    x, own = images(segment, count, size), parameters(segment)
    found = []
    for least in (2**40, 0):
        monkeypatch.setattr(layout, "LEAST_BY_OUTPUTS", least)
        made = program(segment, x, path, threads)
        assert all(made.goes_by_outputs(n) == (least == 0) for n in range(1, 3))
        check(segment, x, made)
        for is_last in (False, True):
            own = [with_layout(one, is_last) for one in own]
            outputs, memory = execute.forward(made, x, own)
            powers = 2.0 ** -(torch.arange(count) * 5 % 23).view(-1, *[1] * (outputs[0].dim() - 1))
            grads = [torch.linspace(-1, 1, y.numel()).view(y.shape) * powers for y in outputs]
            dx, gradients = execute.backward(made, memory, own, grads)
            found.append([dx, *(one.weight for one in gradients)])
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


def with_layout(own, is_last):
    if own.weight.dim() != 4 or not is_last:
        return dataclasses.replace(own, weight=own.weight.contiguous())
    return dataclasses.replace(own, weight=own.weight.to(memory_format=torch.channels_last))


def test_gradients_that_are_not_finite_leave_no_weight_finite(monkeypatch):
    """By output as by image."""
    segment, count, size = LARGE["images"]
    x, own = images(segment, count, size), parameters(segment)
    for least in (2**40, 0):
        monkeypatch.setattr(layout, "LEAST_BY_OUTPUTS", least)
        made = program(segment, x)
        outputs, memory = execute.forward(made, x, own)
        grads = [torch.ones_like(y) for y in outputs]
        grads[0][1, 0, 0, 0] = torch.inf
        _, gradients = execute.backward(made, memory, own, grads)
        assert all(not one.weight.isfinite().any() for one in gradients)


def doubles(address, n):
    return list((ctypes.c_double * n).from_address(address))


def test_adding_a_value_twice_returns_both_gradients():
    """Value 0 is added to values 1 and 2, and taken by a layer."""
    layers = tuple(layer(k - 1, 4, 4) for k in range(3))
    values = (
        Value(0, relu=True),
        Value(1, other_value=0, relu=True),
        Value(2, other_value=0, is_output=True),
    )
    segment = Segment(layers, values)
    x = images(segment, 3, (6, 6))
    check(segment, x, program(segment, x))
    steps = [s for s in segment.backward(True) if isinstance(s, Return) and s.value == 0]
    assert sorted(k for s in steps for k in s.added) == [1, 2]


def test_what_is_not_needed_is_not_computed():
    segment, count, size = SEGMENTS["residual"]
    x = images(segment, count, size)
    wanted = [True, False, True, True, False, True]
    made = program(segment, x, needs_input=False, needs_weights=wanted)
    own = parameters(segment)
    outputs, memory = execute.forward(made, x, own)
    dx, found = execute.backward(made, memory, own, [torch.ones_like(outputs[0])])
    assert dx is None
    assert [bool(one.weight.numel()) for one in found] == wanted
    assert made.kept_bytes < program(segment, x).kept_bytes


def test_strides_of_a_linear_weight_do_not_matter():
    segment, count, size = SEGMENTS["flattened"]
    x = images(segment, count, size)
    own = parameters(segment)
    made = program(segment, x)
    (y,), kept = execute.forward(made, x, own)
    _, found = execute.backward(made, kept, own, [torch.ones_like(y)])
    for one in own[1:]:
        one.weight = one.weight.t().contiguous().t()
    (other,), kept = execute.forward(made, x, own)
    _, others = execute.backward(made, kept, own, [torch.ones_like(y)])
    assert torch.equal(y, other)
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(found, others, strict=True))


def spread(x):
    """The same with room between its elements, which no vector takes."""
    return torch.stack([x, x], dim=-1).flatten(-2)[..., ::2]


def last(x):
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("lies", [last, spread])
@pytest.mark.parametrize(
    "name", ["residual", "kernels", "places", "few places", "flattened", "grouped", "inverted"]
)
def test_strides_do_not_matter(name, lies, path):
    segment, count, size = SEGMENTS[name]
    x = images(segment, count, size)
    own, made = parameters(segment), program(segment, x, path)
    outputs, kept = execute.forward(made, x, own)
    grads = [torch.randn(y.shape) for y in outputs]
    dx, found = execute.backward(made, kept, own, grads)
    for one in own:
        one.weight = lies(one.weight)
    others, other_kept = execute.forward(made, last(x), own)
    other_dx, other = execute.backward(made, other_kept, own, list(map(last, grads)))
    assert all(map(torch.equal, outputs, others))
    assert torch.equal(dx, other_dx)
    for a, b in zip(found, other, strict=True):
        assert torch.equal(a.weight, b.weight)
        assert lies is spread or last(b.weight) is b.weight  # autograd need not copy it


def test_a_gradient_that_is_not_finite_is_seen():
    segment, count, size = SEGMENTS["residual"]
    x = images(segment, count, size)
    own = parameters(segment)
    made = program(segment, x)
    (y,), kept = execute.forward(made, x, own)
    dx, found = execute.backward(made, kept, own, [torch.full_like(y, float("inf"))])
    assert not found[4].weight.isfinite().any()
    assert not dx.isfinite().all()


CURVES = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "gelu": F.gelu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("name", CURVES)
def test_curves_and_their_slopes_are_those_of_pytorch(name):
    x = torch.cat([torch.linspace(-30, 30, 60001), torch.randn(20000) * 1e-3, torch.zeros(1)])
    exact = x.double().requires_grad_()
    y = CURVES[name](exact)
    y.sum().backward()
    own = Curve(name, 0.1)
    close = 2e-6 if "gelu" in name else 3e-7  # times 30
    torch.testing.assert_close(own.value(x).double(), y.detach(), rtol=3e-6, atol=close)
    torch.testing.assert_close(own.slope(x).double(), exact.grad, rtol=3e-6, atol=2e-6)
    if name in ("hardswish", "hardsigmoid", "leaky_relu"):
        assert torch.equal(own.value(x), CURVES[name](x))
    edges = torch.tensor([1e4, -3.0, 3.0, 0.0])
    if name != "gelu":  # whose share of a normal distribution ends at 6e-8
        edges = torch.cat([edges, torch.tensor([1e20, -1e4, -1e20])])
    torch.testing.assert_close(own.value(edges), CURVES[name](edges))
    leaves = edges.double().requires_grad_()
    CURVES[name](leaves).sum().backward()
    torch.testing.assert_close(own.slope(edges).double(), leaves.grad, rtol=3e-6, atol=2e-6)
    assert own.value(torch.tensor([float("nan")])).isnan().all()


def test_curves_of_sums_are_refused():
    layers = layer(INPUT, 4, 4), layer(0, 4, 4)
    added = Value(0, other_value=INPUT, curve=Curve("silu"))
    with pytest.raises(ValueError, match="one layer must make what backward computes again"):
        Segment(layers, (added, Value(1)))
    with pytest.raises(ValueError, match="one layer"):
        Segment(layers, (Value(0, other_layer=1), Value(0), Scaled(0, 1)))


def in_float64(value, x, places):
    """Return what is pooled of ``x``; the largest elements are where the reference found them."""
    if value.is_mean:
        return F.avg_pool2d(x, value.kernel or x.shape[2:], *value.window[:2])
    return x.flatten(2).gather(2, places.flatten(2)).view(places.shape)


def term_in_float64(one, made, x, weight, scale, shift):
    """Return what a layer makes of ``x``, whose codes are the reference's own: gradients are compared alone."""
    if isinstance(one, Norm):
        return F.batch_norm(x, None, None, scale, shift, True, 0.1, one.eps)
    x = x.flatten(1)[..., None, None] if one.is_flat else x
    rounded = made.codes * one.inputs.lsb + (x - x.detach()) * (made.inside if one.clip else 1)
    z = F.conv2d(rounded, weight.view(one.shape), None, *one.window)
    if one.eps is None:
        return z + shift.view(-1, 1, 1)
    return F.batch_norm(z, None, None, scale, shift, True, 0.1, one.eps)


def values_in_float64(segment, kept, leaves, source):
    """Return a segment's values by PyTorch's own functions."""
    values = {INPUT: source}

    def term(n):
        one = segment.layers[n]
        return term_in_float64(one, kept.layers[n], values[one.source], *leaves[n])

    for i, value in enumerate(segment.values):
        if isinstance(value, Pooled):
            values[i] = in_float64(value, values[value.source], kept.places.get(i))
            continue
        if isinstance(value, Scaled):
            values[i] = values[value.source] * values[value.gate]
            continue
        if isinstance(value, Joined):
            before, behind = value.zeros
            whole = F.pad(
                torch.cat([values[k] for k in value.sources], 1), (0, 0, 0, 0, before, behind)
            )
            values[i] = F.interpolate(whole, scale_factor=value.times)
            continue
        terms = [*map(term, value.layers), *(values[k] for k in value.values)]
        h = sum(terms[1:], terms[0])
        made = h.clamp(0, value.ceiling) if value.relu else h
        if value.curve is not None:
            made = h = CURVES[value.curve.name](h)
        torch.testing.assert_close(made.float(), kept.values[i], rtol=0.02, atol=0.03)
        inside = (kept.values[i] > 0) & (kept.values[i] < (value.ceiling or torch.inf))
        values[i] = made.detach() + inside * (h - h.detach()) if value.relu else h
    return values


@pytest.mark.parametrize(
    ("name", "count_of_draws", "share"),
    [
        ("residual", 64, 0.02),
        ("classifier", 64, 0.02),
        ("flattened", 64, 0.02),
        ("averaged", 64, 0.02),
        ("inverted", 256, 0.02),
        ("grouped", 256, 0.1),  # what its small groups make has much noise
        ("curved", 256, 0.02),
        ("added", 256, 0.02),
        ("squeezed", 256, 0.05),  # a shift before batch norm has a gradient of almost 0
        ("squeezed odd", 256, 0.02),
        ("preactivated", 128, 0.02),
        ("dense", 128, 0.02),
        ("repeated", 128, 0.02),
        ("by channel", 128, 0.02),
    ],
)
def test_reference_is_the_gradient_of_batch_norm_and_convolutions(name, count_of_draws, share):
    """Averaged over the noise of gradients, that of float64 under autograd.

    What is left is bfloat16, of z and of gradients: 2**-9 a layer, and codes that it moves by one.
    """
    segment, count, size = SEGMENTS[name]
    x = images(segment, count, size)
    own = parameters(segment)
    ys, kept = reference.forward(segment, x, own)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(y.shape, generator=generator) * 1e-3 for y in ys]
    draws = []
    for draw in range(count_of_draws):
        for n, one in enumerate(own):
            one.noise = draw, n
        dx, found = reference.backward(segment, kept, own, grads)
        draws.append([dx, *(t for one in found for t in (one.weight, one.scale, one.shift))])
    leaves = [
        [
            None if t is None else t.double().requires_grad_()
            for t in (one.weight, one.scale, one.shift)
        ]
        for one in own
    ]
    source = x.double().requires_grad_()
    values = values_in_float64(segment, kept, leaves, source)
    outputs = [i for i, value in enumerate(segment.values) if value.is_output]
    torch.autograd.backward(
        [values[i] for i in outputs],
        [g.double().view(values[i].shape) for i, g in zip(outputs, grads, strict=True)],
    )
    wanted = [source.grad, *(None if t is None else t.grad for one in leaves for t in one)]
    for number, exact in enumerate(wanted):
        if exact is not None:
            mean = torch.stack([draw[number].double() for draw in draws]).mean(0)
            assert (mean - exact).norm() < share * exact.norm(), number


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    count=st.integers(1, 5),
    size=st.tuples(st.integers(3, 12), st.integers(3, 12)),
    widths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    relu=st.booleans(),
    norm=st.booleans(),
    grouped=st.booleans(),
    curve=st.sampled_from([None, *CURVES]),
    channels=st.booleans(),
)
def test_chains_of_any_shape(seed, count, size, widths, relu, norm, grouped, curve, channels):
    layers, values, before = [], [], 2
    for i, width in enumerate(widths):
        fmt = UNSIGNED if relu and i else SIGNED
        window = STRIDED if (seed >> i) % 2 and min(size) > 6 else PADDED
        groups = math.gcd(before, width) if grouped else 1
        shape, eps = (width, before // groups, 3, 3), 1e-5 if norm else None
        window = window._replace(groups=groups)
        layers.append(Layer(i - 1, fmt, FixedPoint(6, 5), shape, window, eps))
        ceiling = 1.0 if relu and grouped else None
        own = Curve(curve, 0.2) if curve and not relu else None
        values.append(Value(i, None, None, relu, ceiling, own, is_output=i == len(widths) - 1))
        before = width
    segment = Segment(tuple(layers), tuple(values))
    segment = by_channel(segment) if channels else segment
    x = images(segment, count, size, seed)
    check(segment, x, program(segment, x), seed)


def test_threads_of_python_take_turns():
    """A program's tables are filled, and then a kernel runs: nobody may come between.

    In a process of its own: who does writes to memory of others.
    """
    folder = Path(__file__).parent
    script = (
        f"import sys; sys.path.insert(0, {str(folder)!r}); import test_fused as t; t.take_turns()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def take_turns():
    segment, count, size = SEGMENTS["residual"]
    own = parameters(segment)
    made = program(segment, images(segment, count, size))
    inputs = [images(segment, count, size, seed) for seed in range(3)]
    grad = torch.randn(execute.forward(made, inputs[0], own)[0][0].shape)

    def both(x):
        outputs, kept = execute.forward(made, x, own)
        return outputs[0], execute.backward(made, kept, own, [grad])[0]

    expected, wrong = list(map(both, inputs)), []

    def run(n):
        for _ in range(200):
            wrong.append(not all(map(torch.equal, both(inputs[n]), expected[n])))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=run, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(before)
    assert len(wrong) == 600
    assert not any(wrong)


def test_what_several_forward_passes_kept_is_found_where_each_has_it():
    segment, count, size = SEGMENTS["residual"]
    own, inputs = parameters(segment), [images(segment, count, size, seed) for seed in range(3)]
    made = program(segment, inputs[0])

    def back(kept):
        return execute.backward(made, kept, own, [grad])[0]

    grad = torch.randn(execute.forward(made, inputs[0], own)[0][0].shape)
    expected = [back(execute.forward(made, x, own)[1]) for x in inputs]
    memories = [execute.forward(made, x, own)[1] for x in inputs]
    assert len({kept.data_ptr() for kept in memories}) == 3
    for n in (1, 0, 2):
        assert torch.equal(back(memories[n]), expected[n])


def test_addresses_are_whole_after_an_interrupt(monkeypatch):
    segment, count, size = SEGMENTS["residual"]
    own, inputs = parameters(segment), [images(segment, count, size, seed) for seed in range(2)]
    made = program(segment, inputs[0])
    (y,), first = execute.forward(made, inputs[0], own)
    grad = torch.randn(y.shape)
    expected = execute.backward(made, first, own, [grad])[0]
    _, second = execute.forward(made, inputs[1], own)
    fill, calls = operations.Addresses.fill, []

    def interrupted(*arguments):
        fill(*arguments)
        calls.append(None)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(operations.Addresses, "fill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        execute.backward(made, second, own, [grad])
    assert torch.equal(execute.backward(made, first, own, [grad])[0], expected)
    assert len(calls) == 3


def test_memory_is_lent_to_one_at_a_time():
    memory = Memory()
    first, second = memory.lend(128), memory.lend(128)
    assert first.data_ptr() != second.data_ptr()
    place, view = first.data_ptr(), first[64:].view(torch.float32)
    del first
    gc.collect()
    third = memory.lend(128)  # ``view`` still holds the first
    assert third.data_ptr() not in (place, second.data_ptr())
    del view
    gc.collect()
    assert memory.lend(128).data_ptr() == place


def test_memory_serves_batches_of_other_sizes():
    memory = Memory()
    large = memory.lend(4096)
    place = large.data_ptr()
    del large
    small = memory.lend(100)
    assert (small.data_ptr(), len(small)) == (place, 100)
    large = memory.lend(5000)
    place = large.data_ptr()
    del large, small  # the smaller comes back last, and goes
    gc.collect()
    large = memory.lend(4097)
    assert (large.data_ptr(), len(large)) == (place, 4097)
    del large
    gc.collect()
    assert len(memory.lend(6000)) == 6000


def test_programs_of_other_formats_and_sizes_share_memory():
    """What they keep for backward stays each one's own."""
    segment, count, size = SEGMENTS["residual"]
    own, memory = parameters(segment), Memory()
    x = images(segment, count, size)
    batches = [x, x[:1], x]
    shared = [
        Program(
            segment, len(b), size, HERE[0], 1, True, [True] * len(segment.layers), False, memory
        )
        for b in batches
    ]

    def backward(made, forward):
        (y, *_), kept = forward
        return execute.backward(made, kept, own, [torch.ones_like(y)])

    alone = []
    for b in batches:
        made = program(segment, b)
        alone.append(backward(made, execute.forward(made, b, own)))
    forwards = [execute.forward(made, b, own) for made, b in zip(shared, batches, strict=True)]
    for made, forward, (dx, found) in zip(shared, forwards, alone, strict=True):
        here, others = backward(made, forward)
        assert torch.equal(here, dx)
        for a, b in zip(others, found, strict=True):
            assert torch.equal(a.weight, b.weight)
            assert torch.equal(a.scale, b.scale)


def test_segments_say_which_shapes_they_hold():
    """Of linear layers, means and sums of two values."""
    segment = SEGMENTS["flattened"][0]
    assert segment.holds((3, 4, 6))
    assert not segment.holds((3, 4, 8))
    assert not segment.holds((4, 4, 6))
    assert SEGMENTS["classifier"][0].holds((3, 9, 2))
    grouped, *_ = SEGMENTS["grouped"]
    assert grouped.holds((6, 10, 9))
    assert not grouped.holds((3, 10, 9))
    narrow = dataclasses.replace(grouped.layers[1], shape=(24, 5, 3, 3))
    layers = grouped.layers[0], narrow, *grouped.layers[2:]
    assert not dataclasses.replace(grouped, layers=layers).holds((6, 10, 9))
    layers = layer(INPUT, 4, 3), layer(1, 4, 4, size=1, window=Window())
    mean = Pooled(0, None, Window(), is_mean=True)
    added = Segment(layers, (Value(0), mean, Value(1, other_value=0, is_output=True)))
    assert added.holds((3, 1, 1))
    assert not added.holds((3, 2, 1))
    squeezed = SEGMENTS["squeezed"][0]
    assert squeezed.holds((3, 9, 8))
    narrow = dataclasses.replace(squeezed.layers[3], shape=(1, 4, 1, 1))  # PyTorch would repeat it
    layers = *squeezed.layers[:3], narrow, *squeezed.layers[4:]
    assert not dataclasses.replace(squeezed, layers=layers).holds((3, 9, 8))


def test_joined_values_have_equal_places_and_all_channels():
    segment, *_ = SEGMENTS["repeated"]
    assert segment.sizes((8, 12))[4] == (24, 8, 12)
    assert segment.holds((3, 8, 12))
    assert not segment.holds((3, 9, 12))  # what is pooled by 2 and repeated has 8
    assert not segment.holds((4, 8, 12))
    assert SEGMENTS["dense"][0].holds((3, 8, 7))
    before, *_ = SEGMENTS["preactivated"]
    assert before.holds((3, 9, 8))
    layers = [*before.layers]
    layers[2] = dataclasses.replace(layers[2], channels=4)
    assert not Segment(tuple(layers), before.values).holds((3, 9, 8))
    with pytest.raises(ValueError, match="a value is joined with others alone"):
        Segment(segment.layers, (*segment.values, Joined((0, 0))))


def test_what_batch_norm_alone_takes_is_kept_once():
    """Joined values have no float32, and their gradients are added to that of batch norm."""
    segment = SEGMENTS["dense"][0]
    joined = [i for i, value in enumerate(segment.values) if isinstance(value, Joined)]
    assert joined == [3, 6, 9, 10]
    assert segment.floats >= {*joined}
    segment, count, size = SEGMENTS["dense to the end"]
    assert not segment.floats
    made = program(segment, images(segment, count, size))
    assert set(made.wide) == {0, 2, 3, 5, 6, 8, 9}
    steps = [s for s in segment.backward(True) if isinstance(s, Return) and s.joined]
    found = [(s.value, s.layer, s.joined, s.is_last) for s in steps]
    assert found == [
        (8, None, (9,), True),
        (6, 5, (9,), True),
        (5, None, (6,), True),
        (3, 3, (6,), True),
        (2, None, (3,), True),
        (0, 1, (3,), True),
    ]


def single(outputs, inputs, **more):
    return Segment((layer(INPUT, outputs, inputs, **more),), (Value(0, is_output=True),))


@pytest.mark.parametrize(
    ("segment", "size", "fits"),
    [
        (single(4, 1827), (4, 3), True),
        (single(4, 1828), (4, 3), False),  # products of a sum
        (single(7310, 4), (4, 4), True),
        (single(7311, 4), (4, 4), False),  # of a sum backward
        (single(16, 1024), (16, 99), True),
        (single(16, 1024), (16, 101), False),  # squares of the sums of a row
        (single(16, 1024, eps=None), (16, 101), True),
        (single(4, 1), (3, 65_500), True),
        (single(4, 1), (3, 65_536), False),  # places of a row
        (single(4, 2, size=1, window=STRIDED), (2, 2), True),
        (single(4, 2, size=1, window=STRIDED), (1, 1), False),  # all that is read is border
    ],
)
def test_a_segment_holds_images_whose_sums_fit(segment, size, fits):
    assert segment.holds((segment.layers[0].shape[1], *size)) == fits


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("inputs", [1024, 1700])
def test_squares_of_the_largest_sums_fit(inputs, path):
    """As in the middle of a U-Net: int64 does not hold those of an image."""
    taken = dataclasses.replace(layer(INPUT, 4, inputs), inputs=UNSIGNED)
    segment = Segment((taken,), (Value(0, is_output=True),))
    x = torch.full((3, inputs, 21, 21), UNSIGNED.max)
    weight = torch.full(taken.shape, taken.weight.min)
    own = dataclasses.replace(parameters(segment)[0], weight=weight)
    kept = reference.forward(segment, x, [own])[1]
    made = program(segment, x, path)
    memory = execute.forward(made, x, [own])[1]
    (wanted,), (found,) = kept.statistics(), execute.statistics(made, memory)
    assert all(map(torch.equal, wanted, found))


@pytest.mark.parametrize("path", HERE)
def test_many_gray_images_on_one_thread(path):
    """Borders between images are positions, too: with them, a block holds fewer images."""
    segment = single(8, 1)
    x = images(segment, 100, (28, 28))
    check(segment, x, program(segment, x, path))


@given(
    counts=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    taps=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    channels=st.sampled_from([1, 3, 16, 64]),
    images=st.integers(1, 300),
    most=st.integers(1, 3000),
)
def test_blocks_have_no_more_positions_than_is_said(counts, taps, stride, channels, images, most):
    size = [(n - 1) * s + 1 for n, s in zip(counts, stride, strict=True)]
    padding = taps[0] // 2, taps[1] // 2
    part = shapes.forward(Window(stride, padding), (size[0], size[1]), taps)
    for grain in (0, 4):
        cut = blocks(part, images, (size[0], size[1]), channels, 1, most, grain)
        assert cut.most_positions <= max(most, cut.columns)
        assert (cut.jobs[:, 1] * cut.jobs[:, 3]).sum() == images * part.counts[0]
