"""ONNX with ``QuantizeLinear`` and ``DequantizeLinear`` around float operators, as other runtimes read it."""

import math
from typing import NamedTuple

import numpy as np

from marvin.export.graph.functions import Mul
from marvin.export.graph.nodes import (
    Add,
    AveragePool,
    MaxPool,
    Network,
    Operation,
    Round,
    Weighted,
)
from marvin.export.graph.views import Pad
from marvin.export.targets.onnx.graph import container
from marvin.export.targets.onnx.int16 import Int16Writer
from marvin.export.targets.onnx.ranges import in_range

__all__ = ["QdqWriter"]

_INT32 = 2**31
# ONNX Runtime 1.31 drops a Clip whose bounds are within 2^-23 of what the codes hold
_SMALL = 2.0**-20


class _Codes(NamedTuple):
    """Codes in the graph.

    Args:
        name: Of the codes.
        step: Names of their scale and zero.
        is_long: Whether they have 16 bits.
    """

    name: str
    step: list[str]
    is_long: bool


class QdqWriter(Int16Writer):
    """Values in bytes, or in 16 bits where words are longer; every scale is a power of two.

    Operators are those of float32. OpenVINO, TensorRT and ONNX Runtime choose integer kernels by themselves
    where a layer stands between these nodes.
    """

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self._codes: dict[str, _Codes] = {}  # by the name of the floats

    def rounded(self, op: Round) -> str:
        """Add bounds where the word is shorter than its container, quantise, and dequantise.

        Bounds also keep ONNX Runtime from kernels of bytes that do not round to the format.
        """
        source, fmt, graph = self.float(op.inputs[0]), op.fmt, self.graph
        is_int8 = fmt.min_code >= -128 and fmt.max_code < 128  # TensorRT has no uint8
        kind = np.int8 if is_int8 else container(fmt)
        info = np.iinfo(kind)
        spare = max(fmt.min_code - info.min, info.max - fmt.max_code)
        if spare or not self._is_in_range(op):
            low, high = (self.number("bound", bound) for bound in (fmt.min, fmt.max))
            if spare * fmt.lsb > _SMALL:
                source = graph.node("Clip", [source, low, high], f"{op.name}.clipped")
            else:
                source = graph.node("Max", [source, low], f"{op.name}.low")
                source = graph.node("Min", [source, high], f"{op.name}.clipped")
        step = [self.number("scale", fmt.lsb), graph.constant("zero", np.array(0, kind))]
        codes = graph.node("QuantizeLinear", [source, *step], f"{op.name}.codes")
        return self._dequantized(_Codes(codes, step, info.bits == 16), op.name)

    def _is_in_range(self, op: Round) -> bool:
        rounded = self.network.operation(op.name)
        if isinstance(rounded, AveragePool):
            return in_range(self.network, rounded.inputs[0], op.fmt, math.prod(rounded.kernel))
        is_sum = isinstance(self.network.operation(rounded.inputs[0]), Add | Mul | Round)
        return not is_sum or in_range(self.network, rounded.inputs[0], op.fmt)

    def _dequantized(self, codes: _Codes, name: str) -> str:
        result = self.graph.node("DequantizeLinear", [codes.name, *codes.step], f"{name}.float")
        self._codes[result] = codes
        return result

    def moved(self, op: Operation, source: str, name: str) -> str:
        """Add an operation that only moves values; it moves codes where there are any.

        Between floats and a layer, ONNX Runtime 1.31 puts nodes of the wrong type.
        """
        if source not in self._codes:
            return super().moved(op, source, name)
        codes = self._codes[source]
        moved = super().moved(op, codes.name, name)
        return self._dequantized(codes._replace(name=moved), name)

    def padded(self, op: Pad, source: str, name: str, *zero: str) -> str:
        """Add zeros around values, or around their bytes where there are any; see ``moved``.

        ONNX Runtime pads no codes of 16 bits.
        """
        codes = self._codes.get(source)
        if codes is None or codes.is_long:
            return super().padded(op, source, name, *zero)
        padded = super().padded(op, codes.name, name)
        return self._dequantized(codes._replace(name=padded), name)

    def max_pool(self, op: MaxPool) -> str:
        """Add max pooling; of codes, with the nodes of its format behind, too, as runtimes expect it.

        Else ONNX Runtime 1.31 moves those in front behind it, and gets the wrong type.
        """
        source, result = self.float(op.inputs[0]), super().max_pool(op)
        if source not in self._codes:
            return result
        codes = self._codes[source]
        name = self.graph.node("QuantizeLinear", [result, *codes.step], f"{op.name}.codes")
        return self._dequantized(codes._replace(name=name), op.name)

    def bias(self, op: Weighted) -> list[str]:
        """Store codes at the binary point of the products, in int32; a bias that is finer has none there."""
        left = self._left(op)
        if op.bias is None or left is None:
            return []
        codes = self.graph.constant(f"{op.name}.bias", (op.bias << left).numpy().astype(np.int32))
        lsb = self.number("scale", op.bias_fmt.lsb * 2.0**-left)
        return [self.graph.node("DequantizeLinear", [codes, lsb], f"{op.name}.bias.float")]

    def _left(self, op: Weighted) -> int | None:
        """Return by how many bits the products are finer than the bias; None where int32 is not at their point."""
        if op.bias is None or op.per_channel:
            return None
        left = self.network.values[op.inputs[0]].fl + op.weight_fmt.fl - op.bias_fmt.fl
        largest = max(map(abs, op.bias.tolist()))
        return left if left >= 0 and largest << left < _INT32 else None

    def multiplied(self, op: Weighted, inputs: list[str], name: str) -> str:
        """Add sums of products; behind them a bias that is finer, which ONNX Runtime would round."""
        total = super().multiplied(op, inputs, name)
        if op.bias is None or len(inputs) > 2:
            return total
        values = op.bias.numpy().astype(np.float64) * op.bias_fmt.lsb
        values = values.reshape(-1, *[1] * (op.weight.ndim - 2))
        return self.graph.node(
            "Add", [total, self.number(f"{op.name}.bias", values)], f"{name}.biased"
        )
