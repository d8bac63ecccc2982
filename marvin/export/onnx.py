"""ONNX: opset 21, power-of-two scales, outputs equal to the integer reference.

Three spellings, of which the first that is exact is taken:

``"int8"``: formats up to 8 bits. Activations are uint8 with zero point 128, which ONNX Runtime
computes with integer kernels; an integer ``Clip`` carries saturation of shorter words and ReLU.
Weights of 8 bits are uint8 too: on processors without VNNI, the kernel for int8 weights overflows.

``"int16"``: formats up to 16 bits, in int16 containers; layers are computed in float32, without
error because no sum takes more than 24 bits.

``"float64"``: formats up to 32 bits whose sums take up to 53. ONNX Runtime has no convolution for
them, so windows are gathered and multiplied as matrices. Slow, and exact.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from fixedpoint_kernels import FixedPoint
from marvin.export.errors import ExportError
from marvin.export.graph import Floats, container, require_exact, window
from marvin.export.network import (
    Affine,
    Conv,
    Flatten,
    MaxPool,
    Network,
    Relu,
    Round,
    Weighted,
)
from marvin.export.wide import Doubles
from marvin.files import write_atomic

__all__ = ["Spelling", "save", "spelling_of", "to_model"]

Spelling = Literal["int8", "int16", "float64"]
_ZERO = 128  # of uint8 activations


def save(network: Network, path: Path, spelling: Spelling | None = None) -> int:
    """Write a network as an ONNX file, at once; return its bytes.

    Raises:
        ExportError: As ``to_model``.
    """
    content = to_model(network, spelling).SerializeToString()
    write_atomic(path, content)
    return len(content)


def to_model(network: Network, spelling: Spelling | None = None) -> Any:
    """Return a network as an ``onnx.ModelProto``.

    Args:
        network: From ``describe``.
        spelling: See above; default: ``spelling_of(network)``.

    Returns:
        A model from float32 samples to what the trained model gives: float32, or float64 where
        ``spelling`` is ``"float64"``.

    Raises:
        ExportError: The spelling would not be exact; names the operation and its bits. Or the
            package ``onnx`` is not installed.
    """
    spelling = spelling or spelling_of(network)
    if spelling not in get_args(Spelling):
        raise ExportError(f"spelling must be one of {get_args(Spelling)}, got {spelling!r}")
    _check(network, spelling)
    kinds: dict[Spelling, Callable[[Network], Floats]] = {
        "int8": Bytes,
        "int16": Shorts,
        "float64": Doubles,
    }
    writer = kinds[spelling](network)
    types = writer.graph.onnx.TensorProto
    dtype = types.DOUBLE if spelling == "float64" else types.FLOAT
    return writer.graph.model(network, writer.write(), dtype)


def spelling_of(network: Network) -> Spelling:
    """Return the fastest spelling that is exact.

    Raises:
        ExportError: None is: a sum takes more than 53 bits.
    """
    reasons = []
    for spelling in get_args(Spelling):
        try:
            _check(network, spelling)
        except ExportError as error:
            reasons.append(error)
        else:
            return spelling
    raise reasons[-1]


def _check(network: Network, spelling: Spelling) -> None:
    longest = {"int8": 8, "int16": 16, "float64": 32}[spelling]
    for name, fmt in (network.formats() | network.weight_formats()).items():
        if fmt.wl > longest:
            raise ExportError(f"{name}: {spelling} holds words of {longest} bits, got {fmt}")
    bits = 53 if spelling == "float64" else 24
    require_exact(network, bits, f"{spelling} is exact up to")


class Shorts(Floats):
    """Values in int16 containers, arithmetic in float32."""

    def rounded(self, op: Round) -> str:
        """Add quantise, dequantise, and a clip where the word is shorter than its container."""
        source, fmt, graph = self.float(op.inputs[0]), op.fmt, self.graph
        kind = np.int16  # of int8, ONNX Runtime 1.31 makes invalid graphs around max pooling
        scale, zero = self.number("scale", fmt.lsb), graph.constant("zero", np.array(0, kind))
        codes = graph.node("QuantizeLinear", [source, scale, zero], f"{op.name}.codes")
        value = graph.node("DequantizeLinear", [codes, scale, zero], f"{op.name}.float")
        if _fills(fmt, kind):
            return value
        bounds = [self.number("bound", bound) for bound in (fmt.min, fmt.max)]
        return graph.node("Clip", [value, *bounds], f"{op.name}.clipped")

    def weight(self, op: Weighted) -> str:
        """Store codes, and dequantise them."""
        kind = container(op.weight_fmt)
        codes = self.graph.constant(f"{op.name}.weight", op.weight.numpy().astype(kind))
        scale = self.number("scale", op.weight_fmt.lsb)
        return self.graph.node("DequantizeLinear", [codes, scale], f"{op.name}.weight.float")


class Bytes(Shorts):
    """Activations as uint8 around 128: see above."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self._codes: dict[str, tuple[str, FixedPoint]] = {}  # uint8 values
        self._users: dict[str, list[Any]] = {}
        for op in network.operations:
            for name in op.inputs:
                self._users.setdefault(name, []).append(op)

    def float(self, name: str) -> str:
        """Return the name of a value as floats, dequantised where it is bytes."""
        if name not in self.names:
            codes, fmt = self._codes[name]
            inputs = [codes, *self._scale_and_zero(fmt)]
            self.names[name] = self.graph.node("DequantizeLinear", inputs, f"{name}.float")
        return self.names[name]

    def add(self, op: Any) -> None:
        """Add one operation: on bytes where it can be, else on floats."""
        source = self._codes.get(op.inputs[0])
        if source and isinstance(op, Relu):
            self._codes[op.name] = self._clip(op.name, *source, low=0), source[1]
        elif source and isinstance(op, MaxPool):
            codes = self.graph.node("MaxPool", [source[0]], f"{op.name}.codes", **window(op))
            self._codes[op.name] = codes, source[1]
        elif source and isinstance(op, Flatten):
            codes = self.graph.node("Flatten", [source[0]], f"{op.name}.codes")
            self._codes[op.name] = codes, source[1]
        else:
            super().add(op)

    def rounded(self, op: Round) -> str:
        """Add a quantisation to bytes; the value becomes floats when it is asked for."""
        inputs = [self.float(op.inputs[0]), *self._scale_and_zero(op.fmt)]
        codes = self.graph.node("QuantizeLinear", inputs, f"{op.name}.codes")
        only_relu = [type(user) for user in self._users.get(op.name, ())] == [Relu]
        if not _fills(op.fmt, np.int8) and not only_relu:  # a ReLU clips by itself
            codes = self._clip(op.name, codes, op.fmt, low=op.fmt.min_code)
        self._codes[op.name] = codes, op.fmt
        return ""

    def affine(self, op: Affine) -> str:
        """Add a batch normalisation: an integer convolution of each channel if its scale fits."""
        shape = self.network.values[op.name].shape
        if op.scale_fmt.wl > 8 or len(shape) != 3:
            return super().affine(op)
        channels = len(op.scale)
        weight = op.scale.reshape(channels, 1, 1, 1)
        same = (1, 1), (0, 0), (1, 1), channels
        layer = Conv(op.name, op.inputs, weight, op.scale_fmt, op.offset, op.offset_fmt, *same)
        return self.conv(layer)

    def weight(self, op: Weighted) -> str:
        """Store 8-bit codes as uint8 around 128, shorter ones as int8."""
        if op.weight_fmt.wl < 8:
            return super().weight(op)
        codes = (op.weight.numpy() + _ZERO).astype(np.uint8)
        inputs = [self.graph.constant(f"{op.name}.weight", codes)]
        inputs += self._scale_and_zero(op.weight_fmt)
        return self.graph.node("DequantizeLinear", inputs, f"{op.name}.weight.float")

    def bias(self, op: Weighted) -> list[str]:
        """Store a bias as int32 at the point of the products, so that it is part of the sum."""
        if op.bias is None:
            return []
        fl = self.network.values[op.inputs[0]].fl + op.weight_fmt.fl
        if fl < op.bias_fmt.fl:
            return super().bias(op)
        codes = (op.bias.numpy() << fl - op.bias_fmt.fl).astype(np.int32)
        inputs = [self.graph.constant(f"{op.name}.bias", codes), self.number("scale", 2.0**-fl)]
        return [self.graph.node("DequantizeLinear", inputs, f"{op.name}.bias.float")]

    def _scale_and_zero(self, fmt: FixedPoint) -> list[str]:
        zero = self.graph.constant("zero", np.array(_ZERO, np.uint8))
        return [self.number("scale", fmt.lsb), zero]

    def _clip(self, name: str, codes: str, fmt: FixedPoint, low: int) -> str:
        bounds = [
            self.graph.constant("bound", np.array(code + _ZERO, np.uint8))
            for code in (low, fmt.max_code)
        ]
        return self.graph.node("Clip", [codes, *bounds], f"{name}.clipped")


def _fills(fmt: FixedPoint, kind: Any) -> bool:
    """Say whether a format has every code of its container."""
    return fmt.wl == 8 * np.dtype(kind).itemsize and not fmt.symmetric
