"""ONNX for word lengths up to 8 bits, in the dtypes that ONNX Runtime computes with integers.

Layers of longer words are computed in float32, or in float64, for themselves alone.

A layer, the batch normalisation behind it and the rounding of that are written as
DequantizeLinear, Conv, QuantizeLinear, with scales and biases of each channel: one integer kernel,
exact by the rule of ``fold``. So is the sum of two rounded values. ReLU, max pooling and flattening
keep the order of values, so rounding comes before them, and they work on bytes.
"""

import math
from fractions import Fraction
from typing import Any

import numpy as np

from fixedpoint_kernels import FixedPoint
from fixedpoint_kernels.formats import LONGEST_FL
from marvin.export.execute.arithmetic import Codes, round_fraction
from marvin.export.graph.functions import KEEP_ORDER, Clip, Mul, Table
from marvin.export.graph.nodes import (
    FLOAT32_BITS,
    Add,
    AveragePool,
    Conv,
    Flatten,
    Linear,
    MaxPool,
    Network,
    Operation,
    Relu,
    Round,
    Weighted,
)
from marvin.export.graph.transformers import Embedding, MatMul, Norm, Softmax
from marvin.export.graph.views import Concat, Pad, Reshape, Slice, Transpose
from marvin.export.passes.fold import Folded, fold
from marvin.export.targets.onnx.blocks import SIDE, in_blocks
from marvin.export.targets.onnx.graph import window
from marvin.export.targets.onnx.int16 import Int16Writer
from marvin.export.targets.onnx.ranges import in_range
from marvin.export.targets.onnx.wide import (
    WideWriter,
    integer_products,
    integer_sums,
    value_of_products,
    value_of_sums,
)

__all__ = ["Int8Writer"]

_INT16_MAX = 2**15 - 1
_LONGEST = 16  # bits of containers that ONNX quantises to
_SMALL_WINDOW = 25  # places under a kernel
_MOVES = Reshape, Transpose, Slice


class Int8Writer(Int16Writer):
    """Rounded values are uint8: signed ones around 128, unsigned ones from 0.

    Weights are int8 where every processor multiplies them right: without VNNI, ONNX Runtime's
    kernel adds two products in 16 bits. Else they are uint8 around 128, or, if ``vnni``, int8.

    Args:
        network: What is written.
        vnni: The processor has VNNI.
        int4: Weights of up to 4 bits take 4 bits each in the file.
    """

    def __init__(self, network: Network, *, vnni: bool = False, int4: bool = False) -> None:
        super().__init__(network)
        self.graph.in_4_bits = int4
        self._vnni = vnni
        self._bytes: dict[str, tuple[str, FixedPoint]] = {}  # of values
        self._rounded: dict[tuple[str, FixedPoint, int, int], str] = {}
        self._zeros: dict[str, int] = {}  # of codes, where it is another than ``_zero``
        self._unclipped: dict[str, tuple[str, tuple[int, int]]] = {}
        self.in_floats: dict[str, str] = {}
        """Layers that no integer kernel computes, and why."""
        self.unfused: set[str] = set()
        """Layers whose sums are written as int32, before anything rounds them."""
        self._wide = WideWriter(self, lambda w, most: _stored(w, most, vnni), self.in_floats)

    def write(self) -> dict[str, tuple[str, int]]:
        """Add all that the outputs need; return name and dtype of each, by its label."""
        for op in self.network.operations:
            if isinstance(
                op, Round | AveragePool | Norm | Softmax
            ):  # in order, so that no recursion is deep
                self._as_bytes(op.name)
        types, found = self.graph.onnx.TensorProto, {}
        for label, name in self.network.outputs.items():
            is_short = self.codes(name) is not None or self.holds(name)
            value = self.float(name) if is_short else self._wide.float(name)
            found[label] = value, types.FLOAT if is_short else types.DOUBLE
        return found

    def codes(self, name: str) -> tuple[str, FixedPoint] | None:
        """Return codes and format of a value; None where it has none of 8 bits."""
        return self._as_bytes(name)

    def zero_of(self, codes: str, fmt: FixedPoint) -> int:
        """Return the byte that stands for 0 among codes."""
        return self._zeros.get(codes, _zero(fmt))

    def holds(self, name: str) -> bool:
        """Say whether float32 has every code of a value."""
        value = self.network.values.get(name)  # what comes in is float32, and has none
        return value is None or value.is_exact(FLOAT32_BITS)

    def float(self, name: str) -> str:
        """Return the name of a value as float32, which is added if it is not there."""
        if name not in self.names:
            if found := self._as_bytes(name):
                self.names[name] = self._dequantized(*found, f"{name}.float")
            elif self.holds(name):
                self._add_held(self.network.operation(name))
            else:
                raise AssertionError(f"float32 does not hold {name}")
        return self.names[name]

    def _add_held(self, op: Operation) -> None:
        """Add an operation whose result float32 holds; in float64 where it does not hold what comes in."""
        is_short = all(self._as_bytes(name) or self.holds(name) for name in op.inputs)
        if is_short and not (isinstance(op, Round | AveragePool) and op.fmt.wl > _LONGEST):
            self.add(op)
            return
        self._wide.add(op)
        single = self.graph.onnx.TensorProto.FLOAT
        source = self._wide.names[op.name]
        self.names[op.name] = self.graph.node("Cast", [source], f"{op.name}.single", to=single)

    def rounded_mean(self, op: AveragePool, mean: str) -> str:
        """Round what average pooling gives; bytes become floats when they are asked for."""
        if op.fmt.wl > 8:
            return super().rounded_mean(op, mean)
        if self._is_from_above(op):
            codes = self._from_above(mean, op.fmt)
        else:
            codes = self._quantized(mean, op.fmt, *_range(op.fmt))
        self._bytes[op.name] = codes, op.fmt
        return ""

    def _mean_of(self, op: AveragePool) -> None:
        """Add average pooling; in float64 if float32 does not hold the sums, or kernels of bytes the steps."""
        is_held = self.holds(op.inputs[0]) and self.holds(op.name)
        if is_held and in_range(self.network, op.inputs[0], op.fmt, math.prod(op.kernel)):
            self.add(op)
        else:
            self._wide.names[op.name] = self._wide.average_pool(op)
            codes = self._wide.bytes_of(op.name, op.fmt, *_range(op.fmt), _zero(op.fmt))
            self._bytes[op.name] = codes, op.fmt

    def conv(self, op: Conv) -> str:
        """Add a convolution whose sums something takes before they are rounded."""
        return self._unrounded(op) or self._summed(op) or super().conv(self._in_floats(op))

    def linear(self, op: Linear) -> str:
        """Add a linear layer whose sums something takes before they are rounded."""
        return self._unrounded(op) or self._summed(op) or super().linear(self._in_floats(op))

    def _summed(self, op: Weighted) -> str:
        """Add a layer as sums in int32 and their value in float32."""
        sums = integer_sums(self, op, lambda w, most: _stored(w, most, self._vnni))
        return value_of_sums(self, op, sums) if sums else ""

    def _in_floats(self, op: Any) -> Any:
        """Return a layer that is computed in floats, because bytes do not hold what it multiplies."""
        why = "bytes and int32 do not hold its products"
        if not self._as_bytes(op.inputs[0]):
            why = f"{op.inputs[0]} is not rounded to bytes"
        self.in_floats[op.name] = why
        return op

    def _unrounded(self, op: Weighted) -> str:
        """Add a linear layer as one kernel that gives float32; ``""`` where there is none."""
        if isinstance(op, Conv):
            return ""
        folded = fold(self.network, op, None)
        return self._layer(op.name, folded) if folded and self._takes_bytes(folded) else ""

    def _as_bytes(self, name: str) -> tuple[str, FixedPoint] | None:
        """Return codes and format of a value; None where it has none of 8 bits."""
        if name not in self._bytes and name != self.network.input.name:
            op = self.network.operation(name)
            if isinstance(op, Round) and op.fmt.wl <= 8:
                self._bytes[name] = self._codes_of(op), op.fmt
            elif isinstance(op, AveragePool) and op.fmt.wl <= 8:
                self._mean_of(op)
            elif isinstance(op, Table) and op.fmt.wl <= 8:
                self._bytes[name] = self._looked_up(op), op.fmt
            elif isinstance(op, Norm | Softmax) and op.fmt.wl <= 8:
                self._bytes[name] = self._normalised(op), op.fmt
            elif isinstance(op, Embedding) and op.weight_fmt.wl <= 8:
                self._bytes[name] = self._chosen(op), op.weight_fmt
            elif isinstance(op, KEEP_ORDER) and (found := self._as_bytes(op.inputs[0])):
                self._bytes[name] = self._ordered(op, *found), found[1]
            elif isinstance(op, Concat) and (found := self._beside(op)):
                self._bytes[name] = found
            elif fmt := self._implied(name):
                self._bytes[name] = self._round(name, fmt, *_range(fmt)), fmt
        return self._bytes.get(name)

    def _implied(self, name: str) -> FixedPoint | None:
        """Return a format that has every code of a sum, or of what is made of it, if one does."""
        value, op = self.network.values[name], self.network.operation(name)
        signed = value.low < 0
        if value.bits - (not signed) > 8 or abs(value.fl) > LONGEST_FL:
            return None
        while isinstance(op, KEEP_ORDER):
            op = self.network.operation(op.inputs[0])
        is_fused = isinstance(op, Add) and all(map(self._as_bytes, op.inputs))
        return FixedPoint(8, value.fl, signed=signed) if is_fused else None

    def _beside(self, op: Concat) -> tuple[str, FixedPoint] | None:
        """Return values one behind the other as bytes, where all have one format of 8 bits."""
        found = [self._as_bytes(name) for name in op.inputs]
        formats = {part[1] for part in found if part}
        if None in found or len(formats) > 1:
            return None
        codes = [part[0] for part in found if part]
        name = self.graph.node("Concat", codes, f"{op.name}.codes", axis=op.axis + 1)
        return name, formats.pop()

    def _normalised(self, op: Norm | Softmax) -> str:
        """Add a norm of rows or softmax, computed in int64, as bytes."""
        source, types = op.inputs[0], self.graph.onnx.TensorProto
        is_short = self._as_bytes(source) is not None or self.holds(source)
        writer = self if is_short else self._wide
        codes = self.integers(op, writer.float(source), writer.real)
        if zero := _zero(op.fmt):
            zeros = self.graph.constant("number", np.array(zero, writer.real))
            codes = self.graph.node("Add", [codes, zeros], f"{op.name}.around")
        return self.graph.node("Cast", [codes], f"{op.name}.codes", to=types.UINT8)

    def _chosen(self, op: Embedding) -> str:
        """Add rows of a table of bytes."""
        codes = (op.weight.numpy() + _zero(op.weight_fmt)).astype(np.uint8)
        table = self.graph.constant(f"{op.name}.weight", codes)
        return self.graph.node("Gather", [table, self.network.input.name], f"{op.name}.codes")

    def matmul(self, op: MatMul) -> str:
        """Add a product of matrices, of bytes by an integer kernel."""
        total = integer_products(self, op)
        return value_of_products(self, op, total) if total else super().matmul(op)

    def _looked_up(self, op: Table) -> str:
        """Add a table of bytes, which bytes or other codes choose from."""
        found = self._as_bytes(op.inputs[0])
        codes = op.codes.numpy() + _zero(op.fmt)
        node, types = self.graph.node, self.graph.onnx.TensorProto
        if found and found[1].fl == op.source_fl:
            places = np.arange(256) - _zero(found[1]) - op.low  # of each byte
            codes, source = codes[places.clip(0, len(codes) - 1)], found[0]
        else:
            value = self.float(op.inputs[0])
            scaled = node("Mul", [value, self.number("scale", 2.0**op.source_fl)], f"{op.name}.at")
            source = node("Sub", [scaled, self.number("first", float(op.low))], f"{op.name}.places")
        indices = node("Cast", [source], f"{op.name}.indices", to=types.INT32)
        table = self.graph.constant(f"{op.name}.table", codes.astype(np.uint8))
        return node("Gather", [table, indices], f"{op.name}.codes")

    def _ordered(
        self, op: Operation, codes: str, fmt: FixedPoint, bounds: tuple[int, int] | None = None
    ) -> str:
        """Add an operation that keeps the order of values, on bytes, which have these bounds."""
        low, high = bounds or _range(fmt)
        if isinstance(op, Pad):
            zero = np.array(self.zero_of(codes, fmt) + min(max(0, low), high), np.uint8)
            number = self.graph.constant("zero", zero)
            return self.padded(op, codes, f"{op.name}.codes", number)
        if isinstance(op, Relu):
            return self._clipped(codes, fmt, max(0, low), max(0, high))
        if isinstance(op, Clip):
            return self._clipped(codes, fmt, *_within(op, fmt, low, high))
        if isinstance(op, _MOVES):
            return self.moved(op, codes, f"{op.name}.codes")
        attributes, zero = window(op) if isinstance(op, MaxPool) else {}, self.zero_of(codes, fmt)
        if isinstance(op, Flatten) and self._is_pooled(op.inputs[0]):
            # moves nothing; ONNX Runtime's own transposition, to channels first, falls away with it
            codes = self.graph.node("Transpose", [codes], f"{op.name}.last", perm=[0, 2, 3, 1])
        found = self.graph.node(type(op).__name__, [codes], f"{op.name}.codes", **attributes)
        self._zeros[found] = zero
        return found

    def _is_pooled(self, name: str) -> bool:
        """Say whether an integer kernel pools whole images."""
        op, sides = self.network.operation(name), self.network.values[name].shape[1:]
        is_mean = isinstance(op, AveragePool) and math.prod(op.kernel).bit_count() == 1
        if sides != (1, 1) or not (is_mean or isinstance(op, MaxPool)):
            return False
        return self._as_bytes(op.inputs[0]) is not None

    def _round(self, source: str, fmt: FixedPoint, low: int, high: int) -> str:
        """Return the codes of a value rounded to ``fmt``, within ``low`` and ``high``."""
        key = source, fmt, low, high
        if key not in self._rounded:
            op, found = self.network.operation(source), self._bytes.get(source)
            if found and found[1] == fmt:
                codes = self._clipped(found[0], fmt, low, high)
            elif isinstance(op, Relu):
                codes = self._round(op.inputs[0], fmt, min(max(0, low), high), high)
            elif isinstance(op, Clip):
                codes = self._round(op.inputs[0], fmt, *_within(op, fmt, low, high))
            elif isinstance(op, KEEP_ORDER):
                codes = self._round(op.inputs[0], fmt, low, high)
                codes = self._ordered(op, codes, fmt, (low, high))
            elif isinstance(op, Concat):
                parts = [self._round(name, fmt, low, high) for name in op.inputs]
                codes = self.graph.node("Concat", parts, f"{source}.codes", axis=op.axis + 1)
            else:
                value = self._unrounded_value(op, fmt)
                if value:
                    codes = self._quantized(value, fmt, low, high)
                else:
                    codes = self._wide.bytes_of(source, fmt, low, high, _zero(fmt))
            self._rounded[key] = codes
        return self._rounded[key]

    def _codes_of(self, op: Round) -> str:
        """Return the codes of a rounding; from above where they can be, so that nothing must be clipped."""
        source, fmt = op.inputs[0], op.fmt
        is_summed = any(isinstance(o, Add | Mul) for o in self.network.users.get(source, []))
        found = self._as_bytes(source) if is_summed else self._bytes.get(source)
        is_own = not found and isinstance(self.network.operation(source), (Concat, *KEEP_ORDER))
        key = source, fmt, -1, -1
        if is_own or (found and found[1] == fmt) or not self._is_from_above(op):
            return self._round(source, fmt, *_range(fmt))
        if key not in self._rounded:
            value = self._unrounded_value(self.network.operation(source), fmt)
            self._rounded[key] = (
                self._from_above(value, fmt) if value else self._round(source, fmt, *_range(fmt))
            )
        return self._rounded[key]

    def _is_from_above(self, op: Round | AveragePool) -> bool:
        """Say whether the largest byte may stand for the largest code of a rounding.

        That is so where no value is below 0, and layers alone take the codes.
        """
        source = self.network.values.get(op.inputs[0])
        if source is None or source.low < 0 or op.fmt.signed or op.fmt.wl == 8:
            return False
        users, outputs = self.network.users, set(self.network.outputs.values())
        waiting: list[Operation] = [op]
        while waiting:
            taken = waiting.pop()
            if isinstance(taken, Weighted):
                continue
            if taken.name in outputs or not (taken is op or isinstance(taken, Flatten)):
                return False
            waiting += users.get(taken.name, [])
        return True

    def _from_above(self, source: str, fmt: FixedPoint) -> str:
        """Return the codes of a value that is not below 0: the largest is 255, where bytes end, too."""
        zero = 255 - fmt.max_code  # even, so that ties go to even codes
        given = [source, self.number("scale", fmt.lsb), self._byte(zero)]
        codes = self.graph.node("QuantizeLinear", given, f"{source}.codes")
        self._zeros[codes] = zero
        return codes

    def _byte(self, value: int) -> str:
        return self.graph.constant("zero", np.array(value, np.uint8))

    def _unrounded_value(self, op: Operation, fmt: FixedPoint) -> str:
        """Return a value as floats, written so that with the rounding it is one integer kernel.

        ``""`` where float32 does not hold it, or the kernel not its codes.
        """
        is_sum = isinstance(op, Add | Mul) and all(map(self._as_bytes, op.inputs))
        if is_sum or self._as_bytes(op.name):
            if not (self.holds(op.name) and in_range(self.network, op.name, fmt)):
                return ""
            return self._sum(op) if is_sum else self._again(op.name)
        folded = fold(self.network, op, fmt)
        if folded and self._takes_bytes(folded):
            return self._layer(op.name, folded)
        return self.float(op.name) if self.holds(op.name) else ""

    def _takes_bytes(self, folded: Folded) -> bool:
        return self._as_bytes(folded.layer.inputs[0]) is not None

    def _sum(self, op: Operation) -> str:
        """Add a sum, once for each rounding: with one alone it is an integer kernel."""
        return self.graph.node(type(op).__name__, [self.float(name) for name in op.inputs], op.name)

    def _again(self, name: str) -> str:
        """Add rounded values plus 0, for another rounding: a sum alone is an integer kernel."""
        found = self._as_bytes(name)
        assert found is not None
        fmt = found[1]
        zero = self.graph.constant("zero", np.full(1, _zero(fmt), np.uint8))
        nothing = self._dequantized(zero, fmt, "nothing")
        return self.graph.node("Add", [self.float(name), nothing], f"{name}.again")

    def _layer(self, name: str, folded: Folded) -> str:
        """Add the sums of a layer as floats, once for each rounding."""
        op, fl = folded.layer, self.network.values[folded.layer.inputs[0]].fl
        found = self._as_bytes(op.inputs[0])
        assert found is not None
        most = found[1].max_code + self.zero_of(*found)
        codes, zero = _stored(folded.weight, most, self._vnni)
        source, pads = self.float(op.inputs[0]), None
        if isinstance(op, Conv) and op.groups == 1 and codes.dtype == np.int8:
            if blocks := self._blocks_of(op, codes):
                source, codes, pads = blocks
            else:
                source, codes = self._widened(source, found, codes)
        axis = {"axis": 0} if folded.scales.ndim else {}
        weight = self.graph.weights(f"{name}.weight", codes)
        zeros = self.graph.constant("zero", np.full(folded.scales.shape, zero, codes.dtype))
        parts = [(weight, f"{name}.weight", folded.scales, [zeros])]
        if folded.bias is not None:
            bias = self.graph.constant(f"{name}.bias", folded.bias.astype(np.int32))
            parts.append((bias, f"{name}.bias", folded.scales * 2.0**-fl, []))
        inputs = [source]
        for stored, what, scales, rest in parts:
            given = [stored, self.number(f"{what}.scale", scales), *rest]
            inputs.append(self.graph.node("DequantizeLinear", given, f"{what}.float", **axis))
        if pads:
            return self.graph.node("Conv", inputs, name, pads=pads, kernel_shape=codes.shape[2:])
        return self.multiplied(op, inputs, name)

    def _blocks_of(self, op: Conv, codes: Codes) -> tuple[str, Codes, list[int]] | None:
        """Return blocks of pixels, weights and paddings of a convolution that takes rounded images.

        Blocks are made of floats: ONNX Runtime makes them of bytes only since 2026.
        """
        images, rounded = self.network.input, self.network.operation(op.inputs[0])
        if not isinstance(rounded, Round) or rounded.inputs != (images.name,):
            return None
        if not (found := in_blocks(op, codes, images.shape[1:])):
            return None
        name = images.name
        pixels = self.graph.node("SpaceToDepth", [name], f"{name}.blocks", blocksize=SIDE)
        whole = self._quantized(pixels, rounded.fmt, *_range(rounded.fmt))
        return self._dequantized(whole, rounded.fmt, f"{whole}.float"), *found

    def _widened(self, source: str, found: tuple[str, FixedPoint], codes: Any) -> tuple[str, Any]:
        """Return what a convolution takes, and weights, with more channels, up to a multiple of 4.

        They are the first channel again, under weights of 0. The runtime has no fast kernel for other
        numbers of channels; under large windows, its products of matrices are faster.
        """
        channels = codes.shape[1]
        missing = -channels % 4
        if not missing or math.prod(codes.shape[2:]) > _SMALL_WINDOW:
            return source, codes
        taken = self.graph.constant("channels", np.array([*range(channels), *[0] * missing]))
        wide = self.graph.node("Gather", [found[0], taken], f"{found[0]}.wide", axis=1)
        self._zeros[wide] = self.zero_of(*found)
        weight = np.pad(codes, [(0, 0), (0, missing), *[(0, 0)] * (codes.ndim - 2)])
        return self._dequantized(wide, found[1], f"{wide}.float"), weight

    def _quantized(self, source: str, fmt: FixedPoint, low: int, high: int) -> str:
        codes = self.graph.node(
            "QuantizeLinear", [source, *self._scale_and_zero(fmt)], f"{source}.codes"
        )
        return self._clipped(codes, fmt, low, high)

    def _dequantized(self, codes: str, fmt: FixedPoint, name: str) -> str:
        zero = self._byte(self.zero_of(codes, fmt))
        return self.graph.node(
            "DequantizeLinear", [codes, self.number("scale", fmt.lsb), zero], name
        )

    def _scale_and_zero(self, fmt: FixedPoint) -> list[str]:
        return [self.number("scale", fmt.lsb), self._byte(_zero(fmt))]

    def _clipped(self, codes: str, fmt: FixedPoint, low: int, high: int) -> str:
        """Add a clip to the codes from ``low`` to ``high``, where bytes have others."""
        bounds = [code + _zero(fmt) for code in (low, high)]
        if bounds == [0, 255]:
            return codes
        limits = [self.graph.constant("bound", np.array(bound, np.uint8)) for bound in bounds]
        before, (low_byte, high_byte) = self._unclipped.get(codes, (codes, (0, 255)))
        is_narrower = low_byte <= bounds[0] and bounds[1] <= high_byte
        source = before if is_narrower else codes  # the narrower clip alone is enough
        clipped = self.graph.node("Clip", [source, *limits], f"{source}.clipped")
        self._unclipped[clipped] = source, (bounds[0], bounds[1])
        return clipped


def _zero(fmt: FixedPoint) -> int:
    return 128 if fmt.signed else 0


def _range(fmt: FixedPoint) -> tuple[int, int]:
    return fmt.min_code, fmt.max_code


def _within(op: Clip, fmt: FixedPoint, low: int, high: int) -> tuple[int, int]:
    """Return the bounds that clipping, rounding to ``fmt`` and clipping to two more codes make."""
    ends = (Fraction(end) * Fraction(2) ** -op.source_fl for end in (op.low, op.high))
    first, last = (min(max(round_fraction(end, fmt), low), high) for end in ends)
    return first, last


def _stored(codes: Any, most: int, vnni: bool) -> tuple[Any, int]:
    """Return weights as bytes, and their zero point, for inputs of bytes up to ``most``."""
    if codes.max() > 127:
        return codes.astype(np.uint8), 0
    largest = 2 * most * int(np.abs(codes).max())
    if vnni or largest <= _INT16_MAX:
        return codes.astype(np.int8), 0
    return (codes + 128).astype(np.uint8), 128
