"""ONNX for word lengths of 9 to 16 bits: int16 containers, arithmetic in float32."""

import numpy as np

from marvin.export.graph.nodes import Round, Weighted
from marvin.export.targets.onnx.graph import FloatWriter, container

__all__ = ["Int16Writer"]


class Int16Writer(FloatWriter):
    """Values in containers of 16 bits, arithmetic in float32."""

    def rounded(self, op: Round) -> str:
        """Add quantise, dequantise and clip.

        Words of 16 bits are clipped too: else ONNX Runtime takes the layer behind them for one of
        integers, and rounds its bias.
        """
        source, fmt, graph = self.float(op.inputs[0]), op.fmt, self.graph
        # of 8-bit containers, ONNX Runtime 1.31 makes invalid graphs around max pooling
        kind = np.int16 if fmt.signed else np.uint16
        scale, zero = self.number("scale", fmt.lsb), graph.constant("zero", np.array(0, kind))
        codes = graph.node("QuantizeLinear", [source, scale, zero], f"{op.name}.codes")
        value = graph.node("DequantizeLinear", [codes, scale, zero], f"{op.name}.float")
        bounds = [self.number("bound", bound) for bound in (fmt.min, fmt.max)]
        return graph.node("Clip", [value, *bounds], f"{op.name}.clipped")

    def weight(self, op: Weighted) -> str:
        """Store codes, and dequantise them."""
        codes, scale, axis = op.weight.numpy(), op.weight_fmt.lsb, {}
        if op.per_channel:
            zeros = np.array(op.trailing_zeros)
            codes = codes >> zeros.reshape(-1, *[1] * (codes.ndim - 1))
            scale, axis = scale * 2.0**zeros, {"axis": 0}
        stored = self.graph.constant(f"{op.name}.weight", codes.astype(container(op.word)))
        given = [stored, self.number("scale", scale)]
        return self.graph.node("DequantizeLinear", given, f"{op.name}.weight.float", **axis)
