"""``fixedpoint_kernels.functions`` as LLVM's vectors: the same sums and products in the same order."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from fixedpoint_kernels.functions import (
    CURVES,
    ERF,
    ERF_FROM,
    EXP,
    LN2,
    LOG2_E,
    LOWEST,
    NORMAL,
    TANH,
    TANH_FROM,
)
from fixedpoint_kernels.llvm.vectors import F32, I32, I64, Vector
from fixedpoint_kernels.llvm.words import Words

__all__ = ["Curves", "apply"]

_LANES = 16


class Curves(Words):
    """Words for functions of vectors."""

    def polynomial(self, x: Vector, factors: tuple[float, ...]) -> Vector:
        """Return a sum of powers."""
        value = x.constant(factors[-1])
        for factor in factors[-2::-1]:
            value = value * x + factor
        return value

    def exp(self, x: Vector) -> Vector:
        """Return the exponential of numbers that are not above 0."""
        low = x.constant(LOWEST)
        x = (x < low).where(low, x)
        whole = (x * LOG2_E).rint()
        rest = x - whole * LN2[0] - whole * LN2[1]
        known = whole.is_nan().where(whole.constant(0.0), whole)
        bits = known.converted(I32) + 127
        power = Vector(self.builder, self.builder.shl(bits.value, bits.constant(23).value))
        return self.polynomial(rest, EXP) * power.viewed(F32)

    def normal(self, z: Vector) -> Vector:
        """Return the share of a normal distribution below ``z``."""
        t = self.bounded(z * NORMAL[0], ERF_FROM)
        square = t * t
        above, below = (self.polynomial(square, factors) for factors in ERF)
        return (t * above / below + 1.0) * 0.5

    def bounded(self, x: Vector, most: float) -> Vector:
        """Return ``x``, or the nearest number that is no farther than ``most`` from 0."""
        low, high = x.constant(-most), x.constant(most)
        return (x < low).where(low, (x > high).where(high, x))

    def normal_by_tanh(self, x: Vector) -> Vector:
        """Return ``(1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2``."""
        t = self.bounded(x, TANH_FROM)
        return self.sigmoid((t * t * TANH[1] + TANH[0]) * t)

    def sigmoid(self, x: Vector) -> Vector:
        """Return ``1 / (1 + exp(-x))``."""
        bits = x.viewed(I32) | 0x80000000  # -abs(x)
        power = self.exp(bits.viewed(F32))
        return (x > 0.0).where(power.constant(1.0), power) / (power + 1.0)


def _value(to: Curves, name: str, x: Vector, number: Vector) -> Vector:
    zero, three, six = map(x.constant, (0.0, 3.0, 6.0))
    match name:
        case "silu":
            return x * to.sigmoid(x)
        case "sigmoid":
            return to.sigmoid(x)
        case "gelu":
            return x * to.normal(x)
        case "gelu_tanh":
            return x * to.normal_by_tanh(x)
        case "leaky_relu":
            return (x > zero).where(x, x * number)
    moved = x + three
    bounded = (moved < zero).where(zero, (moved > six).where(six, moved))
    return (x * bounded if name == "hardswish" else bounded) / six


def _slope(to: Curves, name: str, x: Vector, number: Vector) -> Vector:
    zero, one, three, six = map(x.constant, (0.0, 1.0, 3.0, 6.0))
    above, over = x > x.constant(-3.0), x >= three
    match name:
        case "silu":
            s = to.sigmoid(x)
            return s * (x * (one - s) + 1.0)
        case "sigmoid":
            s = to.sigmoid(x)
            return s * (one - s)
        case "gelu":
            return to.normal(x) + x * (to.exp(x * x * -0.5) * NORMAL[1])
        case "gelu_tanh":
            s, t = to.normal_by_tanh(x), to.bounded(x, TANH_FROM)
            return s + x * ((one - s) * s * (t * t * (3 * TANH[1]) + TANH[0]))
        case "leaky_relu":
            return (x > zero).where(one, number)
        case "hardswish":
            return over.where(one, above.where(x / three + 0.5, zero))
    return (above & (x < three)).where(one / six, zero)


_BODIES: dict[str, Callable[[Curves, str, Vector, Vector], Vector]] = {
    "value": _value,
    "slope": _slope,
}


def apply(
    builder: Any, which: str, source: Any, target: Any, count: Any, curve: tuple[Any, Any]
) -> None:
    """Write a curve's values, or its slopes, at float32; the two places may be one.

    The code is one function of a module, which others call: each curve is compiled once.

    Args:
        builder: llvmlite's.
        which: ``value`` or ``slope``.
        source: int64: address of float32.
        target: int64: of room for as many.
        count: int64: how many; a multiple of 16.
        curve: int64, see ``functions.number_of``, and float32, the number of ``Curve``.
    """
    kind = ir.FunctionType(ir.VoidType(), [I64, I64, I64, I64, F32])
    name = f"fixedpoint_kernels.curve.{which}"
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, kind, name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        _define(function, _BODIES[which])
    builder.call(function, [source, target, count, *curve])


def _define(function: Any, body: Callable[[Curves, str, Vector, Vector], Vector]) -> None:
    builder = ir.IRBuilder(function.append_basic_block("begin"))
    source, target, count, curve, number = function.args
    to = Curves(builder, _LANES)
    number = to.splat(number)
    for k, name in enumerate(CURVES):
        with (
            builder.if_then(builder.icmp_signed("==", curve, I64(k + 1))),
            cgutils.for_range_slice(builder, I64(0), count, I64(_LANES), I64) as (at, _),
        ):
            step = builder.mul(at, I64(4))
            x = to.load(builder.add(source, step))
            to.store(body(to, name, x, number), builder.add(target, step))
    builder.ret_void()
