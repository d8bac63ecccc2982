"""hls4ml's layers, each with its types: what to ``hls4ml`` is a dictionary, and names of C++."""

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from fixedpoint_kernels import FixedPoint
from marvin.export.errors import ExportError
from marvin.export.graph.functions import Clip, Table
from marvin.export.graph.nodes import (
    Add,
    Affine,
    AveragePool,
    Conv,
    Flatten,
    Linear,
    MaxPool,
    Network,
    Operation,
    Relu,
    Round,
    Value,
)
from marvin.export.graph.views import Pad

__all__ = ["LAYERS", "channels_last", "check", "exact", "linear", "orders", "rounding"]


class Writer(Protocol):
    """What a layer needs to know of the others: see ``hls4ml._Writer``."""

    network: Network
    orders: dict[str, Any]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a value."""
        ...


Layer = tuple[dict[str, Any], dict[str, str]]


def _conv(writer: Writer, op: Conv, value: Value) -> Layer:
    if op.groups != 1 or op.dilation != (1, 1):
        raise ExportError(
            f"{op.name}: hls4ml has convolutions of one group and dilation 1 only, got groups="
            f"{op.groups}, dilation={op.dilation}"
        )
    channels, height, width = writer.shape(op.inputs[0])
    out, _, *kernel = op.weight.shape
    weight = op.weight.numpy().transpose(2, 3, 1, 0) * op.weight_fmt.lsb
    layer = {
        "class_name": "Conv2D",
        "weight_data": weight,
        "n_chan": channels,
        "n_filt": out,
        "filt_height": kernel[0],
        "filt_width": kernel[1],
        "dilation": 1,
        **_image(height, width, value),
        **_window(op),
        "bias_data": _bias(op),
    }
    return layer, _weighted_types(op, value)


def _linear(writer: Writer, op: Linear, value: Value) -> Layer:
    weight = op.weight.numpy() * op.weight_fmt.lsb
    taken, given = (writer.orders.get(name, slice(None)) for name in (op.inputs[0], op.name))
    weight = weight[:, taken][given]
    layer = {
        "class_name": "Dense",
        "weight_data": weight.T.copy(),
        "n_in": weight.shape[1],
        "n_out": weight.shape[0],
        "use_bias": True,
    }
    layer["bias_data"] = _bias(op)[given]
    return layer, _weighted_types(op, value)


def _bias(op: Conv | Linear) -> np.ndarray:
    codes = np.zeros(len(op.weight)) if op.bias is None else op.bias.numpy()
    return codes * op.bias_fmt.lsb


def _weighted_types(op: Conv | Linear, value: Value) -> dict[str, str]:
    return {
        "weight": _plain(op.weight_fmt),
        "bias": _plain(op.bias_fmt),
        "accum": _type(value.magnitude.bit_length() + 1, value.fl),
    }


def _affine(writer: Writer, op: Affine, value: Value) -> Layer:
    scale = op.scale.numpy() * op.scale_fmt.lsb
    offset = op.offset.numpy() * op.offset_fmt.lsb
    if op.name in writer.orders:
        scale, offset = (x[writer.orders[op.name]] for x in (scale, offset))
    layer = {
        "class_name": "BatchNormalization",
        "n_in": math.prod(value.shape),
        "n_filt": value.shape[0] if len(value.shape) == 3 else -1,
        "scale_data": scale,
        "bias_data": offset,
    }
    return layer, {"scale": _plain(op.scale_fmt), "bias": _plain(op.offset_fmt)}


def _max_pool(writer: Writer, op: MaxPool, value: Value) -> Layer:
    if op.dilation != (1, 1):
        raise ExportError(f"{op.name}: hls4ml has pooling of dilation 1 only, got {op.dilation}")
    _, height, width = writer.shape(op.inputs[0])
    layer = {"class_name": "MaxPooling2D", **_pool(op, height, width, value)}
    return layer, {"accum": exact(value), "result": exact(value)}


def _average_pool(writer: Writer, op: AveragePool, value: Value) -> Layer:
    window, source = math.prod(op.kernel), writer.network.values[op.inputs[0]]
    if window & (window - 1):
        raise ExportError(
            f"{op.name}: hls4ml truncates a mean of {window} values: windows of 2, 4, 8, ... are "
            "exact"
        )
    _, height, width = source.shape
    layer = {"class_name": "AveragePooling2D", **_pool(op, height, width, value)}
    fraction = window.bit_length() - 1
    total = window * max(abs(source.low), abs(source.high))
    accum = _type(total.bit_length() + 1 + fraction, source.fl + fraction)
    return layer, {"accum": accum, "result": rounding(op.fmt)}


def _pool(op: MaxPool | AveragePool, height: int, width: int, value: Value) -> dict[str, Any]:
    return {
        "pool_height": op.kernel[0],
        "pool_width": op.kernel[1],
        "n_filt": value.shape[0],
        "count_pad": True,
        **_image(height, width, value),
        **_window(op),
    }


def _image(height: int, width: int, value: Value) -> dict[str, Any]:
    return {
        "data_format": "channels_last",
        "in_height": height,
        "in_width": width,
        "out_height": value.shape[1],
        "out_width": value.shape[2],
    }


def _window(op: Conv | MaxPool | AveragePool) -> dict[str, Any]:
    return {
        "stride_height": op.stride[0],
        "stride_width": op.stride[1],
        "padding": "same" if any(op.padding) else "valid",
        "pad_top": op.padding[0],
        "pad_bottom": op.padding[0],
        "pad_left": op.padding[1],
        "pad_right": op.padding[1],
    }


def _round(_writer: Writer, op: Round, value: Value) -> Layer:
    return linear(value), {"result": rounding(op.fmt)}


def linear(value: Value) -> dict[str, Any]:
    """Return a layer that casts to its type."""
    return {"class_name": "Activation", "activation": "linear", "n_in": math.prod(value.shape)}


def _pad(writer: Writer, op: Pad, value: Value) -> Layer:
    channels, height, width = writer.shape(op.inputs[0])
    before, behind = op.before, op.behind
    if len(value.shape) != 3 or value.shape[0] != channels:
        raise ExportError(f"{op.name}: hls4ml puts zeros around the sides of images only")
    layer = {
        "class_name": "ZeroPadding2D",
        "n_chan": channels,
        **_image(height, width, value),
        "pad_top": before[1],
        "pad_bottom": behind[1],
        "pad_left": before[2],
        "pad_right": behind[2],
    }
    return layer, {}


def _relu(_writer: Writer, _op: Relu, value: Value) -> Layer:
    return {
        "class_name": "Activation",
        "activation": "relu",
        "n_in": math.prod(value.shape),
    }, {}


def _add(_writer: Writer, _op: Add, _value: Value) -> Layer:
    return {"class_name": "Merge", "op": "add"}, {}


def _flatten(_writer: Writer, _op: Flatten, value: Value) -> Layer:
    return {"class_name": "Reshape", "target_shape": [math.prod(value.shape)]}, {}


def orders(network: Network) -> dict[str, np.ndarray]:
    """Return the orders of values that have another than the trained model's: where each of ours is there.

    Flattened images are by rows, columns and channels, and so is all that is computed element by element of
    them, or added to that.

    Raises:
        ExportError: A sum is of two orders.
    """
    found: dict[str, np.ndarray] = {}
    together: list[tuple[str, ...]] = []  # values of one order
    for op in network.operations[1:]:
        shape = network.values.get(op.inputs[0], network.input).shape
        if isinstance(op, Flatten) and len(shape) == 3:
            indices = np.arange(math.prod(shape)).reshape(shape)
            found[op.name] = indices.transpose(1, 2, 0).reshape(-1)
        elif isinstance(op, Affine | Add | Flatten | Relu | Round) and len(shape) == 1:
            together.append((op.name, *op.inputs))
    before = -1
    while len(found) > before:
        before = len(found)
        for names in together:
            known = [found[name] for name in names if name in found]
            if any(not np.array_equal(known[0], other) for other in known[1:]):
                raise ExportError(
                    f"{names[0]}: hls4ml has flattened images of other shapes in other orders: a sum of both is "
                    "not written: export it to c, onnx or packed"
                )
            found |= dict.fromkeys(names, known[0]) if known else {}
    return found


def check(op: Operation) -> None:
    """Refuse what is not written for hls4ml.

    Raises:
        ExportError: Names the operation, and what to use instead.
    """
    if type(op) not in LAYERS:
        kind = getattr(op, "function", type(op).__name__)
        others = "export it to c, onnx or packed"
        instead = (
            f"use ReLU and max pooling, or {others}" if isinstance(op, Clip | Table) else others
        )
        raise ExportError(f"{op.name}: {kind} is not written for hls4ml: {instead}")
    kernel = op.weight.shape[2:] if isinstance(op, Conv) else getattr(op, "kernel", (1, 1))
    if len(kernel) != 2:
        raise ExportError(
            f"{op.name}: sequences are not written for hls4ml: give images of height 1 to Conv2d"
        )


def channels_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a sample as hls4ml has it."""
    return (*shape[1:], shape[0]) if len(shape) == 3 else shape


def rounding(fmt: FixedPoint) -> str:
    """Return the type that rounds to a format, ties to even, and saturates."""
    saturation = "AP_SAT_SYM" if fmt.symmetric else "AP_SAT"
    return f"{_kind(fmt)}<{fmt.wl},{fmt.wl - fmt.fl},AP_RND_CONV,{saturation}>"


def _plain(fmt: FixedPoint) -> str:
    return f"{_kind(fmt)}<{fmt.wl},{fmt.wl - fmt.fl}>"


def _kind(fmt: FixedPoint) -> str:
    return "ap_fixed" if fmt.signed else "ap_ufixed"


def exact(value: Value) -> str:
    """Return a type that has every code of a value."""
    return _type(value.bits, value.fl)


def _type(bits: int, fl: int) -> str:
    return f"ap_fixed<{bits},{bits - fl}>"


LAYERS: dict[type, Callable[..., Layer]] = {
    Round: _round,
    Conv: _conv,
    Linear: _linear,
    Affine: _affine,
    Add: _add,
    Relu: _relu,
    MaxPool: _max_pool,
    AveragePool: _average_pool,
    Flatten: _flatten,
    Pad: _pad,
}
