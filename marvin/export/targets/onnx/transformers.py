"""What transformers have, in ONNX: int64 arithmetic that is the definition in ``graph.transformers``.

On x86, ONNX Runtime 1.31 compares only 32 bits of int64 in ``Max``, ``Min``, ``Clip``, ``ReduceMax``,
``ReduceMin`` and ``Sign``, and its ``ReduceSum`` adds int64 as float64. So maxima and bounds are those of
floats, and sums are products with ones.
"""

from typing import Any, Protocol

import numpy as np

from fixedpoint_kernels import FixedPoint
from marvin.export.execute.arithmetic import Codes
from marvin.export.graph.transformers import Norm, Softmax

__all__ = ["Integers"]


class _Graph(Protocol):
    onnx: Any

    def constant(self, hint: str, array: Codes) -> str: ...

    def node(self, kind: str, inputs: list[str], hint: str, **attributes: object) -> str: ...


class Integers:
    """Adds int64 nodes to a graph.

    Args:
        graph: Where to.
        name: Of what is computed: its nodes begin with it.
        real: Dtype of the floats that hold what comes in and the result.
    """

    def __init__(self, graph: _Graph, name: str, real: type[np.floating]) -> None:
        self.graph, self.name, self.real = graph, name, real
        self.types: Any = graph.onnx.TensorProto

    def codes(self, values: str, fl: int) -> str:
        """Return the codes of floats, as floats."""
        return self("Mul", values, self.float(2.0**fl, self.real))

    def __call__(self, kind: str, *inputs: str | int, **attributes: object) -> str:
        """Add a node; a number stands for a constant."""
        names = [self.number(x) if isinstance(x, int) else x for x in inputs]
        return self.graph.node(kind, names, f"{self.name}.{kind.lower()}", **attributes)

    def number(self, x: int) -> str:
        """Return the name of a constant, int64."""
        return self.graph.constant("number", np.array(x, np.int64))

    def float(self, x: float, real: type[np.floating]) -> str:
        """Return the name of a constant of dtype ``real``."""
        return self.graph.constant("number", np.array(x, real))

    def cast(self, source: str, dtype: int) -> str:
        """Return numbers in another dtype."""
        return self("Cast", source, to=dtype)

    def norm(self, op: Norm, codes: str) -> str:
        """Return the codes of a norm of rows, as floats, of such codes."""
        x, n = self.shortened(self.cast(codes, self.types.INT64), op.shift), len(op.gain)
        squares = self("Mul", self.total(self("Mul", x, x), n), n)
        apart = self("Mul", x, n)
        if op.is_centered:
            total = self.total(x, n)
            squares = self("Sub", squares, self("Mul", total, total))
            apart = self("Sub", apart, total)
        variance = self("Mul", self("Add", squares, op.epsilon), 4**op.precision)
        root = self.at_least_1(self.root(variance))
        gain = self.graph.constant(f"{op.name}.gain", op.gain.numpy() << op.precision)
        top = self("Mul", apart, gain)
        if op.bias is not None:
            bias = self.graph.constant(f"{op.name}.bias", op.bias.numpy())
            top = self("Add", top, self("Mul", bias, root))
        return self.rounded(top, root, op.gain_fmt.fl, op.fmt)

    def softmax(self, op: Softmax, codes: str, n: int, columns: str = "") -> str:
        """Return the codes of softmax of rows, as floats, of such codes.

        Args:
            op: The softmax.
            codes: What it takes.
            n: Columns of a row.
            columns: Floats, 1 where a sample's columns are seen; ``""`` where all are.
        """
        seen, whole = self._seen(op, columns), self.types.INT64
        known = self("Where", seen, codes, self.float(-(2.0**62), self.real)) if seen else codes
        top = self("ReduceMax", known, self.graph.constant("axes", np.array([-1])))
        apart = self("Sub", self.cast(top, whole), self.cast(codes, whole))
        places = self.within(self.shortened(apart, op.shift), 0, len(op.codes) - 1, np.float64)
        places = self.cast(places, self.types.INT32)
        table = self.graph.constant(f"{op.name}.table", op.codes.numpy())
        parts = self("Gather", table, places)
        parts = self("Where", seen, parts, 0) if seen else parts
        total = self.total(parts, n)
        total = self.at_least_1(total) if columns else total
        return self.rounded(parts, total, 0, op.fmt)

    def _seen(self, op: Softmax, columns: str) -> str:
        """Return truths, of what each row sees; ``""`` where it is everything."""
        known = self.cast(columns, self.types.BOOL) if columns else ""
        if op.mask is None:
            return known
        mask = self.graph.constant(f"{op.name}.mask", op.mask.numpy() == 1)
        return self("And", mask, known) if known else mask

    def total(self, x: str, n: int) -> str:
        """Return the sum of each row of ``n`` numbers."""
        return self("MatMul", x, self.graph.constant("ones", np.ones((n, 1), np.int64)))

    def at_least_1(self, x: str) -> str:
        """Return numbers that are not below 0, and 1 instead of 0."""
        return self("Add", x, self.cast(self("Equal", x, 0), self.types.INT64))

    def within(self, x: str, low: int, high: int, real: type[np.floating]) -> str:
        """Return numbers from ``low`` to ``high`` as floats of dtype ``real``, which has all of these."""
        dtype = self.graph.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(real))
        ends = [self.float(end, real) for end in (low, high)]
        return self("Clip", self.cast(x, dtype), *ends)

    def shortened(self, x: str, shift: int) -> str:
        """Return ``(x + half) // 2**shift``."""
        if not shift:
            return x
        whole = self("Add", x, 1 << shift - 1)
        return self("Div", self("Sub", whole, self("Mod", whole, 1 << shift)), 1 << shift)

    def root(self, x: str) -> str:
        """Return integer square roots of numbers below ``2**62``: of float64, one too large at most."""
        root = self("Sqrt", self.cast(x, self.types.DOUBLE))
        root = self.cast(root, self.types.INT64)
        is_larger = self("Greater", self("Mul", root, root), x)
        return self("Sub", root, self.cast(is_larger, self.types.INT64))

    def rounded(self, top: str, bottom: str, fl: int, fmt: FixedPoint) -> str:
        """Return quotients at ``fl`` rounded to ``fmt``, as floats: nearest, ties to even, saturating."""
        if fmt.fl > fl:
            top = self("Mul", top, 1 << fmt.fl - fl)
        if fmt.fl < fl:
            bottom = self("Mul", bottom, 1 << fl - fmt.fl)
        rest = self("Mod", top, bottom)  # at least 0, as the divisor is
        quotient = self("Div", self("Sub", top, rest), bottom)
        twice, odd = self("Add", rest, rest), self("Mod", quotient, 2)
        is_tie = self("And", self("Equal", twice, bottom), self("Equal", odd, 1))
        is_up = self("Or", self("Greater", twice, bottom), is_tie)
        whole = self("Add", quotient, self.cast(is_up, self.types.INT64))
        return self.within(whole, fmt.min_code, fmt.max_code, self.real)
