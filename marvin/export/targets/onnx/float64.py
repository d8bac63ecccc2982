"""ONNX for words of more than 16 bits: float64, in which sums of up to 53 bits are exact."""

import math
from typing import Any

import numpy as np

from fixedpoint_kernels import FixedPoint
from marvin.export.graph.nodes import AveragePool, Conv, Linear, Network, Pair, Round, Weighted
from marvin.export.targets.onnx.graph import FloatWriter, Graph, container

__all__ = ["Float64Writer", "gather_windows"]


class Float64Writer(FloatWriter):
    """All values float64; a convolution gathers its windows and multiplies matrices."""

    real: Any = np.float64

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        name = network.input.name
        double = self.graph.onnx.TensorProto.DOUBLE
        self.names[name] = self.graph.node("Cast", [name], f"{name}.double", to=double)

    def rounded(self, op: Round) -> str:
        """Add scale, round, clip, and scale back."""
        return self._rounded(op.name, self.float(op.inputs[0]), op.fmt)

    def _rounded(self, name: str, source: str, fmt: FixedPoint) -> str:
        node, number = self.graph.node, self.number
        scaled = node("Mul", [source, number("scale", fmt.scale)], f"{name}.scaled")
        whole = node("Round", [scaled], f"{name}.whole")
        bounds = [number("bound", bound) for bound in (fmt.min_code, fmt.max_code)]
        codes = node("Clip", [whole, *bounds], f"{name}.codes")
        return node("Mul", [codes, number("scale", fmt.lsb)], f"{name}.value")

    def weight(self, op: Weighted) -> str:
        """Store codes of their own length, and scale them."""
        return self._weight(op, op.weight.numpy())

    def _weight(self, op: Weighted, codes: Any) -> str:
        stored = self.graph.constant(f"{op.name}.weight", codes.astype(container(op.weight_fmt)))
        double = self.graph.onnx.TensorProto.DOUBLE
        codes = self.graph.node("Cast", [stored], f"{op.name}.weight.codes", to=double)
        scale = self.number("scale", op.weight_fmt.lsb)
        return self.graph.node("Mul", [codes, scale], f"{op.name}.weight.value")

    def linear(self, op: Linear) -> str:
        """Add a product of matrices."""
        weight = self._weight(op, op.weight.numpy().T)
        product = self.graph.node("MatMul", [self.float(op.inputs[0]), weight], f"{op.name}.sum")
        return self._add_bias(op, product, (-1,))

    def conv(self, op: Conv) -> str:
        """Add a convolution as a product of matrices, one for each group."""
        channels, *_ = self.network.values[op.inputs[0]].shape
        out, _, *kernel = op.weight.shape
        windows = self._windows(
            op.name, self.float(op.inputs[0]), self.network.values[op.inputs[0]].shape,
            (tuple(kernel), op.stride, op.padding, op.dilation),
        )  # fmt: skip
        terms = channels // op.groups * math.prod(kernel)
        shape = self.network.values[op.name].shape  # (channels, *sides)
        columns = self._reshape(
            f"{op.name}.columns", windows, (0, op.groups, terms, math.prod(shape[1:]))
        )
        weight = self._weight(op, op.weight.numpy().reshape(op.groups, out // op.groups, terms))
        product = self.graph.node("MatMul", [weight, columns], f"{op.name}.product")
        total = self._reshape(f"{op.name}.sum", product, (0, *shape))
        return self._add_bias(op, total, (-1, *[1] * len(kernel)))

    def average_pool(self, op: AveragePool) -> str:
        """Add the sum of each window, divided and rounded once."""
        source, shape = op.inputs[0], self.network.values[op.inputs[0]].shape
        options = op.kernel, op.stride, op.padding, (1,) * len(op.kernel)
        windows = self._windows(op.name, self.float(source), shape, options)
        axes = self.graph.constant("axes", np.arange(2, 2 + len(op.kernel)))
        total = self.graph.node("ReduceSum", [windows, axes], f"{op.name}.sum", keepdims=0)
        count = self.number("count", math.prod(op.kernel))
        mean = self.graph.node("Div", [total, count], f"{op.name}.mean")
        return self._rounded(op.name, mean, op.fmt)

    def _add_bias(self, op: Weighted, product: str, shape: tuple[int, ...]) -> str:
        if op.bias is None:
            return product
        bias = op.bias.numpy().reshape(shape) * op.bias_fmt.lsb
        return self.graph.node(
            "Add", [product, self.number(f"{op.name}.bias", bias)], f"{op.name}.value"
        )

    def _windows(
        self,
        name: str,
        source: str,
        shape: tuple[int, ...],
        options: tuple[Pair, Pair, Pair, Pair],
    ) -> str:
        """Return windows, shape ``(n, channels, *kernel, *out)``: gathered one side after the other."""
        x = gather_windows(self.graph, name, source, shape, options)
        if len(options[0]) == 1:
            return x
        return self.graph.node("Transpose", [x], f"{name}.ordered", perm=[0, 1, 2, 4, 3, 5])

    def _reshape(self, name: str, source: str, shape: tuple[int, ...]) -> str:
        return self.graph.node(
            "Reshape", [source, self.graph.constant("shape", np.array(shape, np.int64))], name
        )


def gather_windows(
    graph: Graph,
    name: str,
    source: str,
    shape: tuple[int, ...],
    options: tuple[Pair, Pair, Pair, Pair],
    zero: str = "",
) -> str:
    """Add windows, ``(n, channels, kernel, out)``, of two sides ``(..., kernel, out, kernel, out)``.

    Args:
        graph: Where to.
        name: Of the operation.
        source: What is gathered.
        shape: Of a sample of it.
        options: Kernel, stride, padding and dilation.
        zero: The constant around samples; "": 0.
    """
    kernel, stride, padding, dilation = options
    if any(padding):
        pads = graph.constant("pads", np.array([0, 0, *padding, 0, 0, *padding], np.int64))
        source = graph.node("Pad", [source, pads, zero][: 3 if zero else 2], f"{name}.padded")
    for axis, what in zip(range(len(kernel)), ("rows", "windows"), strict=False):
        size = shape[1 + axis] + 2 * padding[axis] - dilation[axis] * (kernel[axis] - 1)
        starts = np.arange(0, size, stride[axis])
        indices = np.arange(kernel[axis])[:, None] * dilation[axis] + starts
        taken = graph.constant("indices", indices.astype(np.int64))
        source = graph.node("Gather", [source, taken], f"{name}.{what}", axis=2 + 2 * axis)
    return source
