"""hls4ml: a C++ project for Vitis or Vivado HLS that computes the integer reference's codes.

Every type is written out. A value that is rounded has ``ap_fixed<WL, WL - FL, AP_RND_CONV,
AP_SAT>``, which rounds ties to even and saturates; the defaults of hls4ml truncate and wrap. Every
other value, and every accumulator, has a type that holds whatever it can be. Images are
channels-last inside, as hls4ml wants them.
"""

import math
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fixedpoint_kernels import FixedPoint
from marvin.export.errors import ExportError
from marvin.export.extras import require
from marvin.export.network import (
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

__all__ = ["Project", "write"]

_NAME = "network"
FORGOTTEN = "ap_fixed<2,1>"  # of a type that is not written out: too short for anything
# these would compute batch normalisation as part of the layer before it, which rounds differently
_NO_FUSION = ["fuse_batch_normalization", "fuse_consecutive_batch_normalization"]
# whose result is cast to its type; a reshaping casts nothing, and a pooling may round already
_CASTING = Conv, Linear, Affine, Add, Relu


@dataclass(frozen=True)
class Project:
    """A project on disk, and its emulation.

    Args:
        graph: hls4ml's own ``ModelGraph``.
        network: What it computes.
        order: Where each output is in the trained model's, None where it is there.
    """

    graph: Any
    network: Network
    order: Any

    def predict(self, samples: Tensor) -> Tensor:
        """Compile the C++ with g++ if that was not done, and run it.

        Args:
            samples: Shape ``(n, *shape)``, float32.

        Returns:
            float64, shape as of the trained model.

        Raises:
            ExportError: The compilation failed.
        """
        if self.graph._top_function_lib is None:
            try:
                self.graph._compile()
            except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
                raise ExportError(f"g++ could not compile the project: {error}") from error
        x = samples.double().numpy()
        if x.ndim == 4:
            x = x.transpose(0, 2, 3, 1)
        shape = len(x), *self.network.values[self.network.output].shape
        rows = [np.asarray(self.graph.predict(np.ascontiguousarray(row[None]))) for row in x]
        y = np.stack([row.reshape(-1) for row in rows])
        if self.order is not None:
            y = y[:, np.argsort(self.order)]
        elif len(shape) == 4:
            y = y.reshape(len(x), *shape[2:], shape[1]).transpose(0, 3, 1, 2)
        return torch.from_numpy(y.reshape(shape).copy())


def write(network: Network, folder: Path, backend: str = "Vitis") -> Project:
    """Write a project.

    Args:
        network: From ``describe``.
        folder: To write to.
        backend: ``"Vitis"`` or ``"Vivado"``; the emulations of others are not exact.

    Raises:
        ExportError: An operation has no exact counterpart; named, with the reason. Or hls4ml is
            not installed.
    """
    if backend not in ("Vitis", "Vivado"):
        raise ExportError(f"the backend must be Vitis or Vivado, got {backend!r}")
    writer = _Writer(network)
    writer.write()
    require("hls4ml", "hls4ml")
    from hls4ml.model.graph import ModelGraph
    from hls4ml.utils.config import create_config

    config = create_config(output_dir=str(folder), project_name=_NAME, backend=backend)
    config["IOType"] = "io_parallel"
    config["HLSConfig"] = {
        "Model": {"Precision": FORGOTTEN, "ReuseFactor": 1, "Strategy": "Latency"},
        "LayerName": {name: {"Precision": types} for name, types in writer.types.items()},
        "SkipOptimizers": _NO_FUSION,
    }
    graph = ModelGraph.from_layer_list(config, writer.layers)
    graph.write()
    return Project(graph, network, writer.orders.get(network.output))


@dataclass
class _Writer:
    """Layers as hls4ml's dictionaries, in the making.

    Args:
        network: What is written.
        layers: So far.
        types: Of each layer: what to it is a name of a type, and that type.
        names: Layer of each value.
        orders: Of flattened images: where each of ours is in the trained model's.
    """

    network: Network
    layers: list[dict[str, Any]] = field(default_factory=list)
    types: dict[str, dict[str, str]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    orders: dict[str, Any] = field(default_factory=dict)

    def write(self) -> None:
        """Add all operations."""
        users = self.network.users
        self._input(users[self.network.input.name])
        for op in self.network.operations[1:]:
            if op.name not in self.names:
                rounded = users.get(op.name, [])
                is_fused = len(rounded) == 1 and isinstance(rounded[0], Round)
                is_fused &= isinstance(op, _CASTING)
                self._operation(op, rounded[0] if is_fused else None)

    def _input(self, users: list[Operation]) -> None:
        (first, *others) = users
        if others or not isinstance(first, Round):
            raise ExportError("hls4ml rounds the input once; this network has several roundings")
        name = self._identifier(self.network.input.name)
        shape = _channels_last(self.network.input.shape)
        self.layers.append({"class_name": "InputLayer", "name": name, "input_shape": list(shape)})
        self.types[name] = {"result": _rounding(first.fmt)}
        self.names[first.name] = self.names[self.network.input.name] = name

    def _operation(self, op: Operation, rounded: Any) -> None:
        """Add one operation, together with the rounding of its result where that is all."""
        value = self.network.values[op.name]
        name = self._identifier(op.name)
        if op.inputs[0] in self.orders and not isinstance(op, Linear):
            self.orders[op.name] = self.orders[op.inputs[0]]
        layer, types = _LAYERS[type(op)](self, op, value)
        result = _rounding(rounded.fmt) if rounded else types.pop("result", _exact(value))
        self.types[name] = {**types, "result": result}
        inputs = [self.names[source] for source in op.inputs]
        self.layers.append({**layer, "name": name, "inputs": inputs, "outputs": [name]})
        self.names[op.name] = name
        if rounded:
            self.names[rounded.name] = name
            if op.name in self.orders:
                self.orders[rounded.name] = self.orders[op.name]

    def _identifier(self, name: str) -> str:
        word = re.sub(r"\W", "_", name)
        taken = {layer["name"] for layer in self.layers}
        word = word if word[0].isalpha() else f"layer_{word}"
        return word if word not in taken else f"{word}_{len(taken)}"

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a value."""
        return self.network.values[name].shape


_Layer = tuple[dict[str, Any], dict[str, str]]


def _conv(writer: _Writer, op: Conv, value: Value) -> _Layer:
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
    }
    return layer | _bias(op), _weighted_types(op, value)


def _linear(writer: _Writer, op: Linear, value: Value) -> _Layer:
    weight = op.weight.numpy() * op.weight_fmt.lsb
    order = writer.orders.get(op.inputs[0])
    if order is not None:
        weight = weight[:, order]
    layer = {
        "class_name": "Dense",
        "weight_data": weight.T.copy(),
        "n_in": weight.shape[1],
        "n_out": weight.shape[0],
        "use_bias": True,
    }
    return layer | _bias(op), _weighted_types(op, value)


def _bias(op: Conv | Linear) -> dict[str, Any]:
    codes = np.zeros(len(op.weight)) if op.bias is None else op.bias.numpy()
    return {"bias_data": codes * op.bias_fmt.lsb}


def _weighted_types(op: Conv | Linear, value: Value) -> dict[str, str]:
    return {
        "weight": _plain(op.weight_fmt),
        "bias": _plain(op.bias_fmt),
        "accum": _type(value.magnitude.bit_length() + 1, value.fl),
    }


def _affine(writer: _Writer, op: Affine, value: Value) -> _Layer:
    scale = op.scale.numpy() * op.scale_fmt.lsb
    offset = op.offset.numpy() * op.offset_fmt.lsb
    order = writer.orders.get(op.inputs[0])
    if order is not None:
        scale, offset = scale[order], offset[order]
    layer = {
        "class_name": "BatchNormalization",
        "n_in": math.prod(value.shape),
        "n_filt": value.shape[0] if len(value.shape) == 3 else -1,
        "scale_data": scale,
        "bias_data": offset,
    }
    return layer, {"scale": _plain(op.scale_fmt), "bias": _plain(op.offset_fmt)}


def _max_pool(writer: _Writer, op: MaxPool, value: Value) -> _Layer:
    if op.dilation != (1, 1):
        raise ExportError(f"{op.name}: hls4ml has pooling of dilation 1 only, got {op.dilation}")
    _, height, width = writer.shape(op.inputs[0])
    layer = {"class_name": "MaxPooling2D", **_pool(op, height, width, value)}
    exact = _exact(value)
    return layer, {"accum": exact, "result": exact}


def _average_pool(writer: _Writer, op: AveragePool, value: Value) -> _Layer:
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
    return layer, {"accum": accum, "result": _rounding(op.fmt)}


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


def _round(_writer: _Writer, op: Round, value: Value) -> _Layer:
    layer = {
        "class_name": "Activation",
        "activation": "linear",
        "n_in": math.prod(value.shape),
    }
    return layer, {"result": _rounding(op.fmt)}


def _relu(_writer: _Writer, _op: Relu, value: Value) -> _Layer:
    return {
        "class_name": "Activation",
        "activation": "relu",
        "n_in": math.prod(value.shape),
    }, {}


def _add(_writer: _Writer, _op: Add, _value: Value) -> _Layer:
    return {"class_name": "Merge", "op": "add"}, {}


def _flatten(writer: _Writer, op: Flatten, value: Value) -> _Layer:
    shape = writer.shape(op.inputs[0])
    if len(shape) == 3:
        places = np.arange(math.prod(shape)).reshape(shape)
        writer.orders[op.name] = places.transpose(1, 2, 0).reshape(-1)
    return {"class_name": "Reshape", "target_shape": [math.prod(value.shape)]}, {}


def _channels_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[1:], shape[0]) if len(shape) == 3 else shape


def _rounding(fmt: FixedPoint) -> str:
    saturation = "AP_SAT_SYM" if fmt.symmetric else "AP_SAT"
    return f"{_kind(fmt)}<{fmt.wl},{fmt.wl - fmt.fl},AP_RND_CONV,{saturation}>"


def _plain(fmt: FixedPoint) -> str:
    return f"{_kind(fmt)}<{fmt.wl},{fmt.wl - fmt.fl}>"


def _kind(fmt: FixedPoint) -> str:
    return "ap_fixed" if fmt.signed else "ap_ufixed"


def _exact(value: Value) -> str:
    return _type(value.bits, value.fl)


def _type(bits: int, fl: int) -> str:
    return f"ap_fixed<{bits},{bits - fl}>"


_LAYERS: dict[type, Callable[..., _Layer]] = {
    Round: _round,
    Conv: _conv,
    Linear: _linear,
    Affine: _affine,
    Add: _add,
    Relu: _relu,
    MaxPool: _max_pool,
    AveragePool: _average_pool,
    Flatten: _flatten,
}
