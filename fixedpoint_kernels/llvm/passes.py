"""What happens to 64 elements at a time between two products, as Numba intrinsics.

Values stay in registers from the first operation to the last; which operations there are is asked
at run time, and the same for all blocks. Addresses are int64, 0 where there is nothing; elements
are float32 unless said otherwise. Masks have a bit an element: 8 bytes a block.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from fixedpoint_kernels.llvm.vectors import F32, I8, I16, I32, I64, Vector, intrinsic

BLOCK = 64
"""Elements of one call."""
NOTHING, BFLOAT16, FLOAT32, PLAIN = range(4)
"""Kinds of a term: none, bfloat16 or float32 that is scaled and shifted, float32 as it is."""

_FLOATS, _BITS = ir.VectorType(F32, BLOCK), ir.VectorType(ir.IntType(1), BLOCK)


class _Builder:
    """Short words for what the passes are made of."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def place(self, address: Any, element: Any) -> Any:
        return self.builder.inttoptr(address, element.as_pointer())

    def load(self, address: Any, element: Any = F32) -> Vector:
        return Vector.load(self.builder, self.place(address, element), BLOCK)

    def load_bfloat16(self, address: Any) -> Vector:
        bits = self.load(address, I16).converted(I32)
        shifted = self.builder.shl(bits.value, bits.constant(16).value)
        return Vector(self.builder, shifted).viewed(F32)

    def store_bfloat16(self, value: Vector, address: Any) -> Vector:
        """Write to nearest, ties to even; return what was written."""
        bits = value.viewed(I32)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        kept = value.is_nan().where(bits, nearest) & 0xFFFF0000
        (kept >> 16).truncated(I16).store(self.place(address, I16))
        return kept.viewed(F32)

    def store(self, value: Vector, address: Any) -> None:
        value.store(self.place(address, value.element))

    def load_mask(self, address: Any) -> Vector:
        bits = self.builder.load(self.place(address, I64), align=8)
        return Vector(self.builder, self.builder.bitcast(bits, _BITS))

    def store_mask(self, mask: Vector, address: Any) -> None:
        self.builder.store(self.bits(mask), self.place(address, I64), align=8)

    def bits(self, mask: Vector) -> Any:
        return self.builder.bitcast(mask.value, I64)

    def splat(self, scalar: Any) -> Vector:
        return Vector.splat(self.builder, scalar, BLOCK)

    def variable(self, kind: Any = _FLOATS) -> Any:
        return cgutils.alloca_once(self.builder, kind)

    def get(self, variable: Any) -> Vector:
        return Vector(self.builder, self.builder.load(variable))

    def put(self, value: Vector, variable: Any) -> None:
        self.builder.store(value.value, variable)

    def there(self, number: Any) -> Any:
        """Begin what is done only where a number is not 0."""
        return self.builder.if_then(self.builder.icmp_signed("!=", number, I64(0)))

    def equal(self, number: Any, kind: int) -> Any:
        return self.builder.if_then(self.builder.icmp_signed("==", number, I64(kind)))

    def scaled(self, load: Callable[[Any], Vector], x: Any, a: Any, b: Any) -> Vector:
        return load(x) * self.load(a) + self.load(b)

    def positive(self, value: Vector) -> tuple[Vector, Vector]:
        """Return ReLU of a value, which keeps NaN; and where the value is above 0."""
        zero = value.constant(0.0)
        below = Vector(self.builder, self.builder.fcmp_ordered("<=", value.value, zero.value))
        return below.where(zero, value), value > zero

    def ones(self) -> Vector:
        return Vector(self.builder, ir.Constant(_BITS, [1] * BLOCK))


def _made(names: str, body: Callable[..., Any], floats: int = 0) -> Any:
    """Return an intrinsic of int64 and then ``floats`` float32, by name; it returns int64."""
    count = len(names.split())

    def codegen(_context, builder, _signature, arguments):
        found = body(_Builder(builder), *arguments)
        return I64(0) if found is None else found

    signature = types.int64(*[types.int64] * (count - floats), *[types.float32] * floats)
    scope = {"made": (signature, codegen)}
    exec(f"def typing(_context, {', '.join(names.split())}): return made", scope)
    typing: Any = scope["typing"]
    return intrinsic(typing)


def _make_value(
    to: _Builder, first, z, a, b, second, z2, a2, b2, relu, relu_mask, y, codes, clips, both,
    clip_mask, own, scale, low, high,
):  # fmt: skip
    """Make elements of a value: a term, or two, ReLU, and codes of them.

    Codes are rounded to nearest, ties to even. Returns how many were clamped, of those in ``own``.
    """
    value, above = to.variable(), to.variable(_BITS)
    clamped = cgutils.alloca_once(to.builder, I64)
    to.builder.store(I64(0), clamped)
    to.put(to.ones(), above)
    with to.equal(first, BFLOAT16):
        to.put(to.scaled(to.load_bfloat16, z, a, b), value)
    with to.equal(first, FLOAT32):
        to.put(to.scaled(to.load, z, a, b), value)
    with to.equal(first, PLAIN):
        to.put(to.load(z), value)
    with to.equal(second, BFLOAT16):
        to.put(to.get(value) + to.scaled(to.load_bfloat16, z2, a2, b2), value)
    with to.equal(second, FLOAT32):
        to.put(to.get(value) + to.scaled(to.load, z2, a2, b2), value)
    with to.equal(second, PLAIN):
        to.put(to.get(value) + to.load(z2), value)
    with to.there(relu):
        kept, more = to.positive(to.get(value))
        to.put(kept, value)
        to.put(more, above)
        with to.there(relu_mask):
            to.store_mask(more, relu_mask)
    with to.there(y):
        to.store(to.get(value), y)
    with to.there(codes):
        lowest, highest = to.splat(low), to.splat(high)
        whole = (to.get(value) * to.splat(scale)).rint()
        under, over = whole < lowest, whole > highest
        bounded = over.where(highest, under.where(lowest, whole))
        known = bounded.is_nan().where(bounded.constant(0.0), bounded)
        to.store(known.converted(I32).truncated(I8), codes)
        inside = ~(under | over)
        kind = ir.FunctionType(I64, [I64])
        function = cgutils.get_or_insert_function(to.builder.module, kind, "llvm.ctpop.i64")
        outside = to.builder.and_(to.builder.not_(to.bits(inside)), own)
        to.builder.store(to.builder.call(function, [outside]), clamped)
        with to.there(clip_mask):
            no_clip = to.builder.icmp_signed("==", clips, I64(0))
            kept = to.builder.select(no_clip, I64(-1), to.bits(inside))
            alone = to.builder.icmp_signed("==", both, I64(0))
            more = to.builder.select(alone, I64(-1), to.bits(to.get(above)))
            mask = to.builder.and_(to.builder.and_(kept, more), own)
            to.builder.store(mask, to.place(clip_mask, I64), align=8)
    return to.builder.load(clamped)


def _make_gradient(to: _Builder, first, g, z, a, b, c, out, own, largest):
    """Write ``g * a + (z * b + c)``, or ``g``; take the largest magnitudes, as bits of float32.

    What is not in ``own`` is 0. ``g``: bfloat16; ``largest``: 64 int32.
    """
    value = to.variable()
    with to.equal(first, BFLOAT16):
        rest = to.load_bfloat16(z) * to.load(b) + to.load(c)
        to.put(to.load_bfloat16(g) * to.load(a) + rest, value)
    with to.equal(first, FLOAT32):
        to.put(to.load_bfloat16(g), value)
    inside = Vector(to.builder, to.builder.bitcast(own, _BITS))
    found = inside.where(to.get(value), to.get(value).constant(0.0))
    to.store(found, out)
    magnitudes = found.viewed(I32) & 0x7FFFFFFF
    before = to.load(largest, I32)
    to.store((magnitudes > before).where(magnitudes, before), largest)


def _finish(
    to: _Builder, has_product, dx, clip_mask, add, add2, outer, relu_mask, out, outer_out, own,
    first, z, second, z2, sums, step,
):  # fmt: skip
    """Add up what comes back to a value; and batch norm's sums where ``sums`` is not 0.

    ``add``, ``add2``, ``out``: bfloat16; ``outer``, ``outer_out``: float32, what comes from and goes
    to others. Sums: of the gradient, and of its products with two layers' bfloat16, ``step`` bytes
    apart.
    """
    value = to.variable()
    to.put(Vector(to.builder, ir.Constant(_FLOATS, [0.0] * BLOCK)), value)
    with to.there(has_product):
        to.put(to.load(dx), value)
        with to.there(clip_mask):
            found = to.get(value)
            to.put(to.load_mask(clip_mask).where(found, found.constant(0.0)), value)
    for address in (add, add2):
        with to.there(address):
            to.put(to.get(value) + to.load_bfloat16(address), value)
    with to.there(outer):
        to.put(to.get(value) + to.load(outer), value)
    with to.there(relu_mask):
        found = to.get(value)
        to.put(to.load_mask(relu_mask).where(found, found.constant(0.0)), value)
    with to.there(out):
        to.put(to.store_bfloat16(to.get(value), out), value)
    with to.there(outer_out):
        to.store(to.get(value), outer_out)
    with to.there(sums):
        found = to.get(value)
        inside = Vector(to.builder, to.builder.bitcast(own, _BITS))
        kept = inside.where(found, found.constant(0.0))
        to.store(to.load(sums) + kept, sums)
        for kind, address, times in ((first, z, 1), (second, z2, 2)):
            with to.equal(kind, BFLOAT16):
                place = to.builder.add(sums, to.builder.mul(step, I64(times)))
                product = kept * to.load_bfloat16(address)
                product = inside.where(product, product.constant(0.0))
                to.store(to.load(place) + product, place)


make_value = _made(
    "first z a b second z2 a2 b2 relu relu_mask y codes clips both clip_mask own scale low high",
    _make_value,
    3,
)
make_gradient = _made("first g z a b c out own largest", _make_gradient)
finish = _made(
    "has_product dx clip_mask add add2 outer relu_mask out outer_out own first z second z2 sums step",
    _finish,
)
