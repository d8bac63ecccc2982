"""Products of convolutions whose outputs each have a channel of their own, as Numba intrinsics.

Sixteen channels are sixteen lanes of float32, in which sums of up to 512 products of codes are exact:
any processor multiplies and adds these at once. Codes are read as they lie, channels last. Addresses
are int64.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from fixedpoint_kernels.llvm.tiles import F32, I8, I32, I64, addressed, call, load, store, vector

__all__ = ["EXACT", "outputs_tile", "weights_tile"]

EXACT = 512
"""So many products float32 adds up exactly."""
_FLOATS, _WORDS = vector(F32, 16), vector(I32, 16)
_ZERO = ir.Constant(_FLOATS, [0.0] * 16)


def _codes(builder: Any, address: Any, is_signed: bool) -> Any:
    """Return 16 codes as float32."""
    own = load(builder, address, vector(I8, 16))
    wide = builder.sext(own, _WORDS) if is_signed else builder.zext(own, _WORDS)
    return builder.sitofp(wide, _FLOATS)


def _multiply_add(builder: Any, a: Any, b: Any, total: Any) -> None:
    found = call(builder, "fma.v16f32", _FLOATS, a, b, builder.load(total))
    builder.store(found, total)


def _by_sign(builder: Any, kind: Any, body: Callable[[bool], None]) -> None:
    """Make code for signed codes and for unsigned ones, see ``tiles.kind_of_bytes``."""
    is_signed = builder.icmp_signed("!=", builder.and_(kind, I64(1)), I64(0))
    with builder.if_else(is_signed) as (yes, no):
        for branch, sign in ((yes, True), (no, False)):
            with branch:
                body(sign)


def outputs_tile(rows: int) -> Any:
    """Return the tile that writes sums of 16 channels, int32, at as many places in a row.

    It takes what codes are, the first place's codes, bytes from one place to the next, (taps, 3) int64
    whose first is a tap's offset in bytes, how many, their weights ``[taps][16]`` float32, and where
    sums go, 64 bytes a place.
    """

    def body(builder, kind, a, step, table, count, b, out):
        _by_sign(builder, kind, lambda sign: sums(builder, sign, a, step, table, count, b, out))

    def sums(builder, is_signed, a, step, table, count, b, out):
        totals = [cgutils.alloca_once_value(builder, _ZERO) for _ in range(rows)]
        for total in totals:
            builder.store(_ZERO, total)
        with cgutils.for_range(builder, count, intp=I64) as loop:
            offset = load(builder, builder.add(table, builder.mul(loop.index, I64(24))), I64, 8)
            place = builder.add(b, builder.shl(loop.index, I64(6)))
            weight, first = load(builder, place, _FLOATS, 64), builder.add(a, offset)
            for m, total in enumerate(totals):
                source = builder.add(first, builder.mul(step, I64(m)))
                _multiply_add(builder, _codes(builder, source, is_signed), weight, total)
        for m, total in enumerate(totals):
            store(
                builder, builder.fptosi(builder.load(total), _WORDS), builder.add(out, I64(64 * m))
            )

    return addressed(7, body)


def weights_tile(taps: int) -> Any:
    """Return the tile that adds products for the weights of 16 channels to int32, at as many taps.

    It takes what codes are, the first place's codes, bytes from one place to the next, the first
    place's gradient, bytes from one to the next, how many places (``EXACT`` at most), (taps, 3) int64
    whose first is a tap's offset in bytes, and where sums are, with bytes from tap to tap.
    """

    def body(builder, kind, x, step, grad, grad_step, count, table, out, out_step):
        rest = x, step, grad, grad_step, count, table, out, out_step
        _by_sign(builder, kind, lambda sign: sums(builder, sign, *rest))

    def sums(builder, is_signed, x, step, grad, grad_step, count, table, out, out_step):
        offsets = [load(builder, builder.add(table, I64(24 * t)), I64, 8) for t in range(taps)]
        totals = [cgutils.alloca_once_value(builder, _ZERO) for _ in range(taps)]
        for total in totals:
            builder.store(_ZERO, total)
        with cgutils.for_range(builder, count, intp=I64) as loop:
            own = _codes(builder, builder.add(grad, builder.mul(grad_step, loop.index)), True)
            first = builder.add(x, builder.mul(step, loop.index))
            for offset, total in zip(offsets, totals, strict=True):
                codes = _codes(builder, builder.add(first, offset), is_signed)
                _multiply_add(builder, codes, own, total)
        for t, total in enumerate(totals):
            place = builder.add(out, builder.mul(out_step, I64(t)))
            found = builder.fptosi(builder.load(total), _WORDS)
            store(builder, builder.add(load(builder, place, _WORDS), found), place)

    return addressed(9, body)
