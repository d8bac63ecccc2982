"""ONNX for words of 9 to 16 bits: int16 containers, arithmetic in float32."""

import numpy as np

from marvin.export.graph import Floats, container
from marvin.export.network import Round, Weighted

__all__ = ["Shorts"]


class Shorts(Floats):
    """Values in containers of 16 bits, arithmetic in float32."""

    def rounded(self, op: Round) -> str:
        """Add quantise, dequantise, and a clip where the word is shorter than its container."""
        source, fmt, graph = self.float(op.inputs[0]), op.fmt, self.graph
        # of 8-bit containers, ONNX Runtime 1.31 makes invalid graphs around max pooling
        kind = np.int16 if fmt.signed else np.uint16
        scale, zero = self.number("scale", fmt.lsb), graph.constant("zero", np.array(0, kind))
        codes = graph.node("QuantizeLinear", [source, scale, zero], f"{op.name}.codes")
        value = graph.node("DequantizeLinear", [codes, scale, zero], f"{op.name}.float")
        if fmt.wl == 16 and not fmt.symmetric:
            return value
        bounds = [self.number("bound", bound) for bound in (fmt.min, fmt.max)]
        return graph.node("Clip", [value, *bounds], f"{op.name}.clipped")

    def weight(self, op: Weighted) -> str:
        """Store codes, and dequantise them."""
        kind = container(op.weight_fmt)
        codes = self.graph.constant(f"{op.name}.weight", op.weight.numpy().astype(kind))
        scale = self.number("scale", op.weight_fmt.lsb)
        return self.graph.node("DequantizeLinear", [codes, scale], f"{op.name}.weight.float")
