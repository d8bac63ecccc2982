"""What happens to the elements of an image between two products, as Numba intrinsics.

An element's channel repeats after ``pattern`` elements, a multiple of 64. So elements of a strip are
taken 64 at a time, ``pattern`` apart: what belongs to channels is read once and sums over them stay in
registers; then follow the next 64 of the pattern, then the next strip. Addresses are int64, 0 where there is nothing;
elements are float32 unless said otherwise. Masks have a bit an element: 8 bytes for 64.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from fixedpoint_kernels.llvm import curves
from fixedpoint_kernels.llvm.vectors import F32, I8, I32, I64, Vector, prefetch
from fixedpoint_kernels.llvm.words import Words, made_of

BLOCK = 64
"""Elements of one turn."""
NOTHING, BFLOAT16, FLOAT32, PLAIN, SCALED, FUSED = range(6)
"""Kinds of a term: none, bfloat16 or float32 that is scaled and shifted, float32 as it is or scaled; and
float32 that is scaled and shifted, rounded once."""


_STRIP = 8192  # elements
_AHEAD = 2048


class _Image(Words):
    """Words for elements of an image, 64 at a time."""

    def __init__(self, builder: Any) -> None:
        super().__init__(builder, BLOCK)

    @contextmanager
    def strips(self, padded: Any, pattern: Any) -> Iterator[Any]:
        """Repeat for pieces of an image that the nearest cache holds; yields where each begins and ends.

        Elements ``pattern`` apart are read from there: the memory behind it is read in order.
        """
        count = self.builder.udiv(I64(_STRIP), pattern)
        count = self.builder.select(self.is_set(count), count, I64(1))
        step = self.builder.mul(count, pattern)
        with cgutils.for_range_slice(self.builder, I64(0), padded, step, I64) as (begin, _):
            end = self.builder.add(begin, step)
            is_last = self.builder.icmp_signed(">", end, padded)
            yield begin, self.builder.select(is_last, padded, end)

    @contextmanager
    def pattern(self, padded: Any, pattern: Any) -> Iterator[Any]:
        """Repeat for each 64 elements of the pattern in each strip; yields the first one's number, and the strip."""
        slices = cgutils.for_range_slice(self.builder, I64(0), pattern, I64(BLOCK), I64)
        with self.strips(padded, pattern) as strip, slices as (at, _):
            yield at, strip

    @contextmanager
    def every(self, at: Any, strip: Any, pattern: Any) -> Iterator[Any]:
        """Repeat for what has the channels of element ``at`` in a strip; yields the first one's number."""
        first, end = self.builder.add(strip[0], at), strip[1]
        with cgutils.for_range_slice(self.builder, first, end, pattern, I64) as (e, _):
            yield e

    def moved(self, address: Any, element: Any, bits: int) -> Any:
        """Return where an element of so many bits is; of an address 0, anything."""
        offset = self.builder.lshr(self.builder.mul(element, I64(bits)), I64(3))
        return self.builder.add(address, offset)

    def far(self, address: Any, e: Any) -> Vector:
        """Return the bfloat16 of elements from ``e`` on, which an earlier region left in memory.

        Those some elements ahead come near: they arrive while these are worked on.
        """
        self._call(address, e, 16)
        return self.load_bfloat16(self.moved(address, e, 16))

    def far_floats(self, address: Any, e: Any) -> Vector:
        """Return the same of float32."""
        self._call(address, e, 32)
        return self.load(self.moved(address, e, 32))

    def _call(self, address: Any, e: Any, bits: int) -> None:
        ahead = self.moved(address, self.builder.add(e, I64(_AHEAD)), bits)
        for line in range(0, bits * BLOCK // 8, 64):
            place = self.builder.add(ahead, I64(line))
            prefetch(self.builder, self.builder.inttoptr(place, I8.as_pointer()))

    def load_mask(self, address: Any) -> Vector:
        return self.flags(self.one(address, I64))

    def store_bits(self, bits: Any, address: Any) -> None:
        self.builder.store(bits, self.place(address, I64), align=8)

    def inside(self, e: Any, elements: Any) -> Any:
        """Return a bit for each element from ``e`` on that is there."""
        left = self.builder.sub(elements, e)
        some = self.builder.sub(self.builder.shl(I64(1), left), I64(1))
        is_whole = self.builder.icmp_signed(">=", left, I64(BLOCK))
        none = self.builder.icmp_signed("<=", left, I64(0))
        return self.builder.select(is_whole, I64(-1), self.builder.select(none, I64(0), some))

    def equal(self, number: Any, kind: int) -> Any:
        return self.builder.if_then(self.builder.icmp_signed("==", number, I64(kind)))

    def scales(self, kind: Any) -> Any:
        """Begin what is done for terms whose channels have factors."""
        own = [self.builder.icmp_signed("==", kind, I64(k)) for k in (NOTHING, PLAIN)]
        return self.builder.if_then(self.builder.not_(self.builder.or_(*own)))

    def positive(self, value: Vector) -> tuple[Vector, Vector]:
        """Return ReLU of a value, which keeps NaN; and where the value is above 0."""
        zero = value.constant(0.0)
        below = Vector(self.builder, self.builder.fcmp_ordered("<=", value.value, zero.value))
        return below.where(zero, value), value > zero

    def counted(self, bits: Any) -> Any:
        """Return how many bits are set."""
        kind = ir.FunctionType(I64, [I64])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.ctpop.i64")
        return self.builder.call(function, [bits])

    def curved(self, which: str, value: Vector, curve: Any, number: Any) -> Vector:
        """Return a curve's values, or its slopes; see ``curves.apply``."""
        place = cgutils.alloca_once(self.builder, F32, size=BLOCK)
        address = self.builder.ptrtoint(place, I64)
        self.store(value, address)
        curves.apply(self.builder, which, address, address, I64(BLOCK), (curve, number))
        return self.load(address)

    def factors(self, kind: Any, at: Any, *addresses: Any) -> list[Any]:
        """Return variables of what belongs to the channels of element ``at``."""
        found = [self.variable(self.zero) for _ in addresses]
        with self.scales(kind):
            for address, variable in zip(addresses, found, strict=True):
                self.put(self.load(self.moved(address, at, 32)), variable)
        return found


def _make_value(
    to: _Image, elements, padded, pattern, first, z, a, b, second, z2, a2, b2, relu, relu_mask, curve, y,
    codes, clips, both, clip_mask, scale, low, high, number,
):  # fmt: skip
    """Make the elements of a value: a term, or two, ReLU or a curve, and codes of them.

    ``relu``: 0: none; 2: what is above ``number`` becomes that. ``curve``, ``number``: see
    ``curves.apply``. Codes are rounded to nearest, ties to even. Returns how many were clamped.
    """
    clamped, above = (cgutils.alloca_once(to.builder, I64) for _ in range(2))
    to.builder.store(I64(0), clamped)
    scale, lowest, highest, top = (to.splat(real) for real in (scale, low, high, number))
    with to.pattern(padded, pattern) as (at, strip):
        own, more = to.factors(first, at, a, b), to.factors(second, at, a2, b2)
        with to.every(at, strip, pattern) as e:
            value = to.variable(to.zero)
            to.builder.store(I64(-1), above)
            _add_term(to, value, first, z, e, *own)
            _add_term(to, value, second, z2, e, *more, adds=True)
            _activate(to, value, above, relu, curve, number, top)
            with to.there(relu_mask):
                to.store_bits(to.builder.load(above), to.moved(relu_mask, e, 1))
            with to.there(y):
                to.store(to.get(value), to.moved(y, e, 32))
            with to.there(codes):
                whole = (to.get(value) * scale).rint()
                bounded = (whole > highest).where(highest, (whole < lowest).where(lowest, whole))
                known = bounded.is_nan().where(to.zero, bounded)
                to.store(known.converted(I32).truncated(I8), to.moved(codes, e, 8))
                held = Vector(
                    to.builder, to.builder.fcmp_unordered("==", bounded.value, whole.value)
                )
                held, there = to.bits(held), to.inside(e, elements)
                outside = to.counted(to.builder.and_(to.builder.not_(held), there))
                to.builder.store(to.builder.add(to.builder.load(clamped), outside), clamped)
                with to.there(clip_mask):
                    kept = to.builder.select(to.is_set(clips), held, I64(-1))
                    alive = to.builder.select(to.is_set(both), to.builder.load(above), I64(-1))
                    mask = to.builder.and_(to.builder.and_(kept, alive), there)
                    to.store_bits(mask, to.moved(clip_mask, e, 1))
    return to.builder.load(clamped)


def _add_term(to: _Image, value, kind, z, e, a, b, adds=False):
    """Set ``value`` to a term, or add one to it."""

    def put(term: Vector) -> None:
        to.put(to.get(value) + term if adds else term, value)

    with to.equal(kind, BFLOAT16):
        put(to.far(z, e) * to.get(a) + to.get(b))
    with to.equal(kind, FLOAT32):
        put(to.far_floats(z, e) * to.get(a) + to.get(b))
    with to.equal(kind, PLAIN):
        put(to.far_floats(z, e))
    with to.equal(kind, FUSED):
        put(to.far_floats(z, e).fused(to.get(a), to.get(b)))
    with to.equal(kind, SCALED):
        put(to.far_floats(z, e) * to.get(a))


def _activate(to: _Image, value, above, relu, curve, number, top):
    """Put a term through ReLU or a curve; note in ``above`` where ReLU let it through as it is."""
    with to.there(relu):
        kept, positive = to.positive(to.get(value))
        to.put(kept, value)
        to.builder.store(to.bits(positive), above)
        with to.equal(relu, 2):
            to.put((kept > top).where(top, kept), value)
            under = to.builder.not_(to.bits(kept >= top))
            to.builder.store(to.builder.and_(to.builder.load(above), under), above)
    with to.there(curve):
        to.put(to.curved("value", to.get(value), curve, number), value)


def _make_gradient(
    to: _Image, elements, padded, pattern, first, g, z, a, b, c, factors, out, largest
):
    """Write ``g * a + (z * b + c)``, or ``g``, times factors; and the largest magnitudes, as bits of float32.

    Behind the last element stands 0. ``g``, ``z``: bfloat16; ``largest``: 64 int32.
    """
    none = Vector(to.builder, ir.Constant(ir.VectorType(I32, BLOCK), [0] * BLOCK))
    most = to.variable(none)
    with to.pattern(padded, pattern) as (at, strip):
        a, b, c = to.factors(first, at, a, b, c)
        moves = to.builder.select(to.is_set(factors), I64(SCALED), I64(NOTHING))
        (factor,) = to.factors(moves, at, factors)
        with to.every(at, strip, pattern) as e:
            value = to.variable(to.far(g, e))
            with to.equal(first, BFLOAT16):
                rest = to.far(z, e) * to.get(b) + to.get(c)
                to.put(to.get(value) * to.get(a) + rest, value)
            with to.there(factors):
                to.put(to.get(value) * to.get(factor), value)
            found = to.flags(to.inside(e, elements)).where(to.get(value), to.zero)
            to.store(found, to.moved(out, e, 32))
            magnitudes, before = found.viewed(I32) & 0x7FFFFFFF, to.get(most)
            to.put((magnitudes > before).where(magnitudes, before), most)
    to.store(to.get(most), largest)


def _finish(
    to: _Image, elements, padded, pattern, has_product, dx, seen, clip_mask, scaled, gate, add, add2, outer,
    relu_mask, curve, a, b, out, outer_out, first, z, second, z2, sums, number,
):  # fmt: skip
    """Add up what comes back to a value; and batch norm's sums where ``sums`` is not 0.

    ``scaled``, ``add``, ``add2``, ``out``: bfloat16, the first times ``gate``; ``outer``, ``outer_out``:
    float32, what comes from and goes to others; ``seen``: where ``dx`` goes as it came. The slope of ``curve`` is that where the value's
    first term is. Sums, ``pattern`` of each: of the gradient, and of its products with two layers' bfloat16.
    """
    with to.pattern(padded, pattern) as (at, strip):
        totals = [to.variable(to.zero) for _ in range(3)]
        places = [
            to.moved(sums, to.builder.add(at, to.builder.mul(pattern, I64(k))), 32)
            for k in range(3)
        ]
        with to.there(to.builder.select(to.is_set(sums), strip[0], I64(0))):
            for total, place in zip(totals, places, strict=True):
                to.put(to.load(place), total)
        (gates,) = to.factors(
            to.builder.select(to.is_set(scaled), I64(SCALED), I64(NOTHING)), at, gate
        )
        own = to.factors(to.builder.select(to.is_set(curve), first, I64(NOTHING)), at, a, b)
        with to.every(at, strip, pattern) as e:
            value = to.variable(to.zero)
            with to.there(has_product):
                to.put(to.load(to.moved(dx, e, 32)), value)
                with to.there(seen):
                    to.store(to.get(value), to.moved(seen, e, 32))
                with to.there(clip_mask):
                    _keep(to, value, to.moved(clip_mask, e, 1))
            with to.there(scaled):
                own_part = to.far(scaled, e) * to.get(gates)
                to.put(to.get(value) + own_part, value)
            for address in (add, add2):
                with to.there(address):
                    to.put(to.get(value) + to.far(address, e), value)
            with to.there(outer):
                to.put(to.get(value) + to.load(to.moved(outer, e, 32)), value)
            with to.there(relu_mask):
                _keep(to, value, to.moved(relu_mask, e, 1))
            with to.there(curve):
                term = to.variable(to.zero)
                _add_term(to, term, first, z, e, *own)
                slope = to.curved("slope", to.get(term), curve, number)
                to.put(to.get(value) * slope, value)
            with to.there(out):
                to.put(to.store_bfloat16(to.get(value), to.moved(out, e, 16)), value)
            with to.there(outer_out):
                to.store(to.get(value), to.moved(outer_out, e, 32))
            with to.there(sums):
                inside = to.flags(to.inside(e, elements))
                kept = inside.where(to.get(value), to.zero)
                to.put(to.get(totals[0]) + kept, totals[0])
                for kind, address, total in ((first, z, totals[1]), (second, z2, totals[2])):
                    with to.equal(kind, BFLOAT16):
                        product = kept * to.far(address, e)
                        product = inside.where(product, to.zero)
                        to.put(to.get(total) + product, total)
        with to.there(sums):
            for total, place in zip(totals, places, strict=True):
                to.store(to.get(total), place)


def _weigh(
    to: _Image, elements, padded, pattern, g, first, z, a, b, relu, curve, sums, number,
):  # fmt: skip
    """Add up the products of a gradient, bfloat16, and a value of one term: ``pattern`` sums."""
    top, above = to.splat(number), cgutils.alloca_once(to.builder, I64)
    with to.pattern(padded, pattern) as (at, strip):
        total, own = to.variable(to.zero), to.factors(first, at, a, b)
        place = to.moved(sums, at, 32)
        with to.there(strip[0]):
            to.put(to.load(place), total)
        with to.every(at, strip, pattern) as e:
            value = to.variable(to.zero)
            _add_term(to, value, first, z, e, *own)
            _activate(to, value, above, relu, curve, number, top)
            product = to.get(value) * to.far(g, e)
            inside = to.flags(to.inside(e, elements))
            to.put(to.get(total) + inside.where(product, to.zero), total)
        to.store(to.get(total), place)


def _moments(to: _Image, elements, padded, pattern, x, out, sums):
    """Write a value as bfloat16; and its sums, and those of its squares: float64, ``pattern`` of each."""
    wide = ir.VectorType(ir.DoubleType(), BLOCK)
    with to.pattern(padded, pattern) as (at, strip):
        totals = [cgutils.alloca_once(to.builder, wide) for _ in range(2)]
        places = []
        for k, total in enumerate(totals):
            first = to.builder.add(at, to.builder.mul(pattern, I64(k)))
            place = to.place(to.moved(sums, first, 64), ir.DoubleType())
            places.append(to.builder.bitcast(place, wide.as_pointer()))
            to.builder.store(ir.Constant(wide, [0.0] * BLOCK), total)
            with to.there(strip[0]):
                to.builder.store(to.builder.load(places[-1], align=8), total)
        with to.every(at, strip, pattern) as e:
            value = to.load(to.moved(x, e, 32))
            to.store_bfloat16(value, to.moved(out, e, 16))
            kept = to.flags(to.inside(e, elements)).where(value, to.zero)
            exact = to.builder.fpext(kept.value, wide)
            for total, part in zip(totals, (exact, to.builder.fmul(exact, exact)), strict=True):
                to.builder.store(to.builder.fadd(to.builder.load(total), part), total)
        for place, total in zip(places, totals, strict=True):
            to.builder.store(to.builder.load(total), place, align=8)


def _keep(to: _Image, value, mask):
    """Set to 0 what a mask has not."""
    to.put(to.load_mask(mask).where(to.get(value), to.zero), value)


_made = partial(made_of, _Image)
make_value = _made(
    "elements padded pattern first z a b second z2 a2 b2 relu relu_mask curve y codes clips both clip_mask "
    "scale low high number",
    _make_value,
    4,
)
make_gradient = _made("elements padded pattern first g z a b c factors out largest", _make_gradient)
finish = _made(
    "elements padded pattern has_product dx seen clip_mask scaled gate add add2 outer relu_mask curve a b "
    "out outer_out first z second z2 sums number",
    _finish,
    1,
)
moments = _made("elements padded pattern x out sums", _moments)
weigh = _made("elements padded pattern g first z a b relu curve sums number", _weigh, 1)
