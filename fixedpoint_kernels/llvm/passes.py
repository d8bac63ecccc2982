"""What happens to 64 elements at a time between two products, as Numba intrinsics.

Addresses are int64; float32 unless said otherwise. Masks have a bit an element: 8 bytes.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from fixedpoint_kernels.llvm.vectors import F32, I16, I32, I64, Vector, intrinsic

BLOCK = 64
"""Elements of one call."""

_BIT = ir.IntType(1)


def _at(builder: Any, address: Any, element: Any) -> Any:
    return builder.inttoptr(address, element.as_pointer())


def _load(builder: Any, address: Any, element: Any = F32) -> Vector:
    return Vector.load(builder, _at(builder, address, element), BLOCK)


def _load_bfloat16(builder: Any, address: Any) -> Vector:
    bits = _load(builder, address, I16).converted(I32)
    shifted = builder.shl(bits.value, bits.constant(16).value)
    return Vector(builder, shifted).viewed(F32)


def _load_mask(builder: Any, address: Any) -> Vector:
    bits = builder.load(_at(builder, address, I64), align=8)
    return Vector(builder, builder.bitcast(bits, ir.VectorType(_BIT, BLOCK)))


def _bits(mask: Vector) -> Any:
    return mask.builder.bitcast(mask.value, I64)


def _made(floats: int, body: Callable[..., Any], addresses: int) -> Any:
    """Return an intrinsic of addresses and then ``floats`` float32; it returns int64."""

    def codegen(_context, builder, _signature, arguments):
        found = body(builder, *arguments)
        return I64(0) if found is None else found

    signature = types.int64(*[types.int64] * addresses, *[types.float32] * floats)
    names = ", ".join(f"a{i}" for i in range(addresses + floats))
    scope = {"made": (signature, codegen)}
    exec(f"def typing(_context, {names}): return made", scope)
    typing: Any = scope["typing"]
    return intrinsic(typing)


def _scaled(load: Callable[..., Vector], adds: bool) -> Callable[..., None]:
    def body(builder: Any, x: Any, a: Any, b: Any, y: Any) -> None:
        """Write ``x * a + b``, rounded twice, to ``y``; or add it to what is there."""
        value = load(builder, x) * _load(builder, a) + _load(builder, b)
        if adds:
            value = _load(builder, y) + value
        value.store(_at(builder, y, F32))

    return body


def _plain(adds: bool) -> Callable[..., None]:
    def body(builder: Any, x: Any, y: Any) -> None:
        """Copy ``x`` to ``y``, or add it to what is there."""
        value = _load(builder, x)
        if adds:
            value = _load(builder, y) + value
        value.store(_at(builder, y, F32))

    return body


def _relu(builder: Any, y: Any) -> Any:
    """Set what is not above 0 to 0, NaN apart; return what is above."""
    value = _load(builder, y)
    zero = value.constant(0.0)
    below = Vector(builder, builder.fcmp_ordered("<=", value.value, zero.value))
    below.where(zero, value).store(_at(builder, y, F32))
    return _bits(value > zero)


def _code(builder: Any, y: Any, codes: Any, scale: Any, low: Any, high: Any) -> Any:
    """Round to nearest, ties to even, as bytes; return which were inside ``low`` to ``high``."""
    lowest, highest = (Vector.splat(builder, limit, BLOCK) for limit in (low, high))
    whole = (_load(builder, y) * Vector.splat(builder, scale, BLOCK)).rint()
    under, over = whole < lowest, whole > highest
    bounded = over.where(highest, under.where(lowest, whole))
    known = bounded.is_nan().where(bounded.constant(0.0), bounded)
    known.converted(I32).truncated(ir.IntType(8)).store(_at(builder, codes, ir.IntType(8)))
    return _bits(~(under | over))


def _gradient(load: Callable[..., Vector]) -> Callable[..., None]:
    def body(builder: Any, g: Any, x: Any, a: Any, b: Any, c: Any, out: Any) -> None:
        """Write ``g * a + (x * b + c)``, each operation rounded."""
        rest = load(builder, x) * _load(builder, b) + _load(builder, c)
        (_load(builder, g) * _load(builder, a) + rest).store(_at(builder, out, F32))

    return body


def _largest(builder: Any, x: Any, out: Any) -> None:
    """Take the largest magnitudes, as bits of float32, into 64 int32 at ``out``."""
    magnitudes = _load(builder, x, I32) & 0x7FFFFFFF
    before = _load(builder, out, I32)
    (magnitudes > before).where(magnitudes, before).store(_at(builder, out, I32))


def _masked(builder: Any, x: Any, mask: Any, y: Any) -> None:
    """Write ``x`` to ``y``, 0 where ``mask`` has no bit."""
    value = _load(builder, x)
    kept = _load_mask(builder, mask).where(value, value.constant(0.0))
    kept.store(_at(builder, y, F32))


def _add_up(builder: Any, x: Any, total: Any) -> None:
    """Add ``x`` to ``total``."""
    (_load(builder, total) + _load(builder, x)).store(_at(builder, total, F32))


def _add_up_products(load: Callable[..., Vector]) -> Callable[..., None]:
    def body(builder: Any, x: Any, z: Any, total: Any) -> None:
        """Add ``x * z`` to ``total``, each operation rounded."""
        product = _load(builder, x) * load(builder, z)
        (_load(builder, total) + product).store(_at(builder, total, F32))

    return body


scale = _made(0, _scaled(_load, False), 4)
scale_bfloat16 = _made(0, _scaled(_load_bfloat16, False), 4)
add_scaled = _made(0, _scaled(_load, True), 4)
add_scaled_bfloat16 = _made(0, _scaled(_load_bfloat16, True), 4)
move = _made(0, _plain(False), 2)
add = _made(0, _plain(True), 2)
relu = _made(0, _relu, 1)
code = _made(3, _code, 2)
gradient = _made(0, _gradient(_load), 6)
gradient_bfloat16 = _made(0, _gradient(_load_bfloat16), 6)
largest = _made(0, _largest, 2)
masked = _made(0, _masked, 3)
add_up = _made(0, _add_up, 2)
add_up_products = _made(0, _add_up_products(_load), 3)
add_up_products_bfloat16 = _made(0, _add_up_products(_load_bfloat16), 3)


@intrinsic
def store_mask(_context, bits, address):
    """Write 64 bits; int64 both."""

    def codegen(context, builder, _signature, arguments):
        builder.store(arguments[0], _at(builder, arguments[1], I64), align=8)
        return context.get_dummy_value()

    return types.void(bits, address), codegen


@intrinsic
def count(_context, bits):
    """Return how many of 64 bits are set."""

    def codegen(_context, builder, _signature, arguments):
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(I64, [I64]), "llvm.ctpop.i64"
        )
        return builder.call(function, arguments)

    return types.int64(bits), codegen
