"""Sums that float32 does not hold, in a file of integer kernels: int32 and float64, for these alone."""

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np

from fixedpoint_kernels import FixedPoint
from marvin.export.execute.arithmetic import Codes
from marvin.export.graph.nodes import Conv, Linear, Network, Weighted
from marvin.export.graph.transformers import MatMul
from marvin.export.targets.onnx.float64 import Float64Writer, gather_windows
from marvin.export.targets.onnx.graph import FloatWriter, Graph

__all__ = ["WideWriter", "integer_sums", "value_of_sums"]

_INT32 = 2**31 - 1


Stored = Callable[[Codes, int], tuple[Codes, int]]


class Bytes(Protocol):
    """What a writer of bytes knows of values: see ``int8.Int8Writer``."""

    network: Network
    graph: Graph

    def codes(self, name: str) -> tuple[str, FixedPoint] | None:
        """Return codes and format of a value; None where it has none of 8 bits."""
        ...

    def holds(self, name: str) -> bool:
        """Say whether float32 has every code of a value."""
        ...

    def float(self, name: str) -> str:
        """Return the name of a value as float32."""
        ...

    def zero_of(self, codes: str, fmt: FixedPoint) -> int:
        """Return the byte that stands for 0 among codes."""
        ...

    @property
    def unfused(self) -> set[str]:
        """Layers whose sums are written as int32."""
        ...


class WideWriter(Float64Writer):
    """Adds values as float64 to a graph whose other values are bytes and float32.

    Layers of bytes are summed in int32 by an integer kernel. Others are computed in float64.

    Args:
        narrow: Writes the rest of the graph.
        stored: Returns weights as bytes, and their zero point, for inputs of bytes up to one.
        in_floats: Gets the layers that no integer kernel computes, and why.
    """

    def __init__(
        self,
        narrow: Bytes,
        stored: Stored,
        in_floats: dict[str, str],
    ) -> None:
        self.network, self.graph, self.narrow = narrow.network, narrow.graph, narrow
        self.stored, self.in_floats = stored, in_floats
        self.names = {}

    def float(self, name: str) -> str:
        """Return the name of a value as float64, which is added if it is not there."""
        if name not in self.names:
            if self.narrow.codes(name) or self.narrow.holds(name):
                source = self.narrow.float(name)
                double = self.graph.onnx.TensorProto.DOUBLE
                self.names[name] = self.graph.node("Cast", [source], f"{name}.double", to=double)
            else:
                self.add(self.network.operation(name))
        return self.names[name]

    def bytes_of(self, name: str, fmt: FixedPoint, low: int, high: int, zero: int) -> str:
        """Return the codes of a value rounded to ``fmt``, from ``low`` to ``high``, as bytes."""
        node, number = self.graph.node, self.number
        scaled = node("Mul", [self.float(name), number("scale", fmt.scale)], f"{name}.scaled")
        whole = node("Round", [scaled], f"{name}.whole")
        bounds = [number("bound", bound) for bound in (low, high)]
        codes = node("Clip", [whole, *bounds], f"{name}.within")
        if zero:
            codes = node("Add", [codes, number("zero", zero)], f"{name}.around")
        return node("Cast", [codes], f"{name}.codes", to=self.graph.onnx.TensorProto.UINT8)

    def conv(self, op: Conv) -> str:
        """Add a convolution: by an integer kernel if bytes hold what it multiplies."""
        return self._sums(op) or super().conv(op)

    def linear(self, op: Linear) -> str:
        """Add a linear layer: by an integer kernel if bytes hold what it multiplies."""
        return self._sums(op) or super().linear(op)

    def matmul(self, op: MatMul) -> str:
        """Add a product of matrices, of bytes by an integer kernel."""
        total = integer_products(self.narrow, op)
        return value_of_products(self, op, total) if total else super().matmul(op)

    def _sums(self, op: Weighted) -> str:
        """Add a layer by an integer kernel; ``""`` where there is none, which is noted."""
        if sums := integer_sums(self.narrow, op, self.stored):
            return value_of_sums(self, op, sums)
        why = "bytes and int32 do not hold its products"
        if not self.narrow.codes(op.inputs[0]):
            why = f"{op.inputs[0]} is not rounded to bytes"
        self.in_floats[op.name] = why
        return ""


def value_of_sums(writer: FloatWriter, op: Weighted, sums: str) -> str:
    """Add the value of a layer's sums, with its bias, in the floats that ``writer`` has."""
    shape = (-1, *[1] * (op.weight.ndim - 2))
    dtype = writer.graph.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(writer.real))
    total = writer.graph.node("Cast", [sums], f"{op.name}.total", to=dtype)
    lsb = 2.0 ** -(writer.network.values[op.inputs[0]].fl + op.weight_fmt.fl)
    scales = lsb * 2.0 ** np.array(op.trailing_zeros).reshape(shape)
    scale = writer.number(f"{op.name}.scale", scales if op.per_channel else lsb)
    value = writer.graph.node("Mul", [total, scale], f"{op.name}.product")
    if op.bias is None:
        return value
    bias = writer.number(f"{op.name}.bias", op.bias.numpy().reshape(shape) * op.bias_fmt.lsb)
    return writer.graph.node("Add", [value, bias], f"{op.name}.value")


def integer_products(narrow: Bytes, op: MatMul) -> str:
    """Add a product of matrices of bytes as int32; return its name, ``""`` where these do not do."""
    found = [narrow.codes(name) for name in op.inputs]
    terms = narrow.network.values[op.name].terms
    if None in found or 2 * terms * 255**2 > _INT32:
        return ""
    parts = [part for part in found if part]
    zeros = [
        narrow.graph.constant("zero", np.array(narrow.zero_of(*part), np.uint8)) for part in parts
    ]
    names = [name for name, _ in parts]
    return narrow.graph.node("MatMulInteger", [*names, *zeros], f"{op.name}.sums")


def value_of_products(writer: FloatWriter, op: MatMul, sums: str) -> str:
    """Add the value of a product of matrices, in the floats that ``writer`` has."""
    dtype = writer.graph.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(writer.real))
    total = writer.graph.node("Cast", [sums], f"{op.name}.total", to=dtype)
    lsb = writer.number("scale", 2.0 ** -writer.network.values[op.name].fl)
    return writer.graph.node("Mul", [total, lsb], f"{op.name}.value")


def integer_sums(narrow: Bytes, op: Weighted, stored: Stored) -> str:
    """Add the sums of a layer without bias as int32, by an integer kernel; return their name.

    Args:
        narrow: Writes the graph.
        op: The layer.
        stored: As in ``WideWriter``.

    Returns:
        ``""`` where bytes do not hold what it takes or its weights, or int32 its sums.
    """
    found = narrow.codes(op.inputs[0])
    zeros = np.array(op.trailing_zeros).reshape(-1, *[1] * (op.weight.ndim - 1))
    weight = op.weight.numpy() >> zeros
    low, high = int(weight.min()), int(weight.max())
    is_byte = low >= -128 and (high <= 127 or (low >= 0 and high <= 255))
    most = 255 * np.abs(weight).reshape(len(weight), -1).sum(1).max()
    if found is None or not is_byte or 2 * most > _INT32:
        return ""
    narrow.unfused.add(op.name)
    own = narrow.zero_of(*found)
    codes, zero = stored(weight, found[1].max_code + own)
    graph = narrow.graph
    zeros = [own, zero]
    given = [
        graph.constant("zero", np.array(z, k))
        for z, k in zip(zeros, (np.uint8, codes.dtype), strict=True)
    ]
    if isinstance(op, Conv) and op.groups > 1:
        kept = graph.weights(f"{op.name}.weight", codes)
        pads, kernel = [*op.padding, *op.padding], list(op.weight.shape[2:])
        attributes = {"strides": op.stride, "dilations": op.dilation, "group": op.groups}
        return graph.node(
            "ConvInteger", [found[0], kept, *given], f"{op.name}.sums",
            pads=pads, kernel_shape=kernel, **attributes,
        )  # fmt: skip
    columns = np.ascontiguousarray(codes.reshape(len(codes), -1).T)
    kept = graph.weights(f"{op.name}.weight.columns", columns)
    if isinstance(op, Conv):
        return _of_windows(narrow, op, [found[0], kept, *given])
    return graph.node("MatMulInteger", [found[0], kept, *given], f"{op.name}.sums")


def _of_windows(narrow: Bytes, op: Conv, inputs: list[str]) -> str:
    """Add a convolution of bytes as a product of matrices, which runtimes compute faster.

    ONNX Runtime 1.31 takes eight times as long for ``ConvInteger``.
    """
    graph, values, name = narrow.graph, narrow.network.values, op.name
    options = tuple(op.weight.shape[2:]), op.stride, op.padding, op.dilation
    shape, taken = values[name].shape, values[op.inputs[0]].shape
    x = gather_windows(graph, name, inputs[0], taken, options, inputs[2])
    outs, taps = range(3, 1 + 2 * len(shape), 2), range(2, 2 * len(shape), 2)
    x = graph.node("Transpose", [x], f"{name}.rows", perm=[0, *outs, 1, *taps])
    places, terms = math.prod(shape[1:]), op.weight[0].numel()
    rows = graph.constant("shape", np.array([-1, places, terms], np.int64))
    x = graph.node("Reshape", [x, rows], f"{name}.matrix")
    product = graph.node("MatMulInteger", [x, *inputs[1:]], f"{name}.products")
    turned = graph.node("Transpose", [product], f"{name}.turned", perm=[0, 2, 1])
    back = graph.constant("shape", np.array([-1, *shape], np.int64))
    return graph.node("Reshape", [turned, back], f"{name}.sums")
