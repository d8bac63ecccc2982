"""What happens to rows of float32 between two products, as Numba intrinsics of loops over 16 lanes.

All counts are multiples of 16 elements. Addresses are int64, 0 where there is nothing; masks have a
bit an element. Every operation rounds by itself, in the order written here: plain PyTorch can do the
same (``fixedpoint_kernels.tokens.reference``).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from fixedpoint_kernels.llvm.curves import Curves, apply
from fixedpoint_kernels.llvm.vectors import F32, I8, I16, I32, I64, Vector, columns_of
from fixedpoint_kernels.llvm.words import made_of

_LANES = 16
NAN_BIT = 40
"""Of ``encode``'s count."""
_FLOATS, _BITS = ir.VectorType(F32, _LANES), ir.VectorType(ir.IntType(1), _LANES)
_WHOLE = ir.VectorType(I32, _LANES)


class _To(Curves):
    """Words for rows, 16 elements at a time."""

    def __init__(self, builder: Any) -> None:
        super().__init__(builder, _LANES)

    def at(self, address: Any, index: Any, size: int) -> Any:
        return self.builder.add(address, self.builder.mul(index, I64(size)))

    def below(self, count: Any) -> Vector:
        """Return conditions: lanes whose number is below a count, which may be negative or large."""
        numbers = ir.Constant(_WHOLE, list(range(_LANES)))
        narrow = self.splat(self.builder.trunc(count, I32))
        return Vector(self.builder, self.builder.icmp_signed("<", numbers, narrow.value))

    @contextmanager
    def loop(self, count: Any) -> Iterator[Any]:
        """Repeat for each 16 of ``count`` elements; yields the first one's number."""
        slices = cgutils.for_range_slice(self.builder, I64(0), count, I64(_LANES), I64)
        with slices as (at, _):
            yield at

    def added(self, value: Vector, address: Any, adds: Any) -> None:
        """Write a value, or add it to what is there."""
        old = self.builder.select(self.is_set(adds), self.load(address).value, self.zero.value)
        self.store(value + Vector(self.builder, old), address)

    def total(self, value: Vector) -> Vector:
        """Add up all lanes: halves, again and again; in each lane."""
        for half in (8, 4, 2, 1):
            order = [i ^ half for i in range(_LANES)]
            value = value + value.shuffled(value, order)
        return value


def _encode(to: _To, x, count, codes, mask, flip, scale, low, high):
    """Write codes, to nearest, ties to even, their bits xor ``flip``; return how many were clamped.

    A bit of ``mask`` says that an element was not. Bit ``NAN_BIT`` of the count says that one was NaN, whose code is 0.
    """
    clamped = cgutils.alloca_once(to.builder, I64)
    to.builder.store(I64(0), clamped)
    lowest, highest, flips = to.splat(low), to.splat(high), to.builder.trunc(flip, I8)
    scales = to.splat(scale)
    count16 = ir.FunctionType(I16, [I16])
    ones = cgutils.get_or_insert_function(to.builder.module, count16, "llvm.ctpop.i16")
    with to.loop(count) as at:
        whole = (to.load(to.at(x, at, 4)) * scales).rint()
        under, over = whole < lowest, whole > highest
        bounded = over.where(highest, under.where(lowest, whole))
        unknown = bounded.is_nan()
        known = unknown.where(bounded.constant(0.0), bounded)
        own = known.converted(I32).truncated(I8)
        to.store(own ^ Vector.splat(to.builder, flips, _LANES), to.at(codes, at, 1))
        outside = to.bits(under | over)
        with to.there(mask):
            place = to.builder.add(mask, to.builder.lshr(at, I64(3)))
            to.builder.store(to.builder.not_(outside), to.place(place, I16))
        found = to.builder.zext(to.builder.call(ones, [outside]), I64)
        found = to.builder.add(to.builder.load(clamped), found)
        flags = to.bits(unknown)
        has_nan = to.builder.icmp_unsigned("!=", flags, flags.type(0))
        flag = to.builder.select(has_nan, I64(2**NAN_BIT), I64(0))
        to.builder.store(to.builder.or_(found, flag), clamped)
    return to.builder.load(clamped)


def _finish_product(to: _To, sums, step, rows, out, out_step, bias, groups, powers):
    """Write int32 sums of 16 columns, or twice as many, times the power of two of each column, plus a bias."""
    for j in range(2):
        with to.builder.if_then(to.builder.icmp_signed(">", groups, I64(j))):
            own = to.load(to.builder.add(bias, I64(64 * j)))
            scales = to.load(to.builder.add(powers, I64(64 * j)))
            with cgutils.for_range(to.builder, rows, intp=I64) as loop:
                place = to.builder.add(sums, to.builder.mul(loop.index, step))
                found = to.load(to.builder.add(place, I64(64 * j)), I32).converted(F32)
                target = to.builder.add(out, to.builder.mul(loop.index, out_step))
                to.store(found * scales + own, to.builder.add(target, I64(64 * j)))


def _finish_gradient(
    to: _To, sums, step, rows, out, out_step, mask, mask_step, groups, adds, powers
):
    """Write, or add, int32 sums times the power of two of each row, where ``mask`` has a bit."""
    for j in range(2):
        with (
            to.builder.if_then(to.builder.icmp_signed(">", groups, I64(j))),
            cgutils.for_range(to.builder, rows, intp=I64) as loop,
        ):
            place = to.builder.add(sums, to.builder.mul(loop.index, step))
            power = to.splat(to.one(to.at(powers, loop.index, 4)))
            found = to.load(to.builder.add(place, I64(64 * j)), I32).converted(F32) * power
            kept = to.variable(found)
            with to.there(mask):
                bits = to.builder.add(mask, to.builder.mul(loop.index, mask_step))
                inside = to.flags(to.one(to.builder.add(bits, I64(2 * j)), I16))
                to.put(inside.where(found, to.zero), kept)
            target = to.builder.add(out, to.builder.mul(loop.index, out_step))
            to.added(to.get(kept), to.builder.add(target, I64(64 * j)), adds)


def _normalize(to: _To, x, count, y, kept, inverse, scale, shift, centred, size, eps):
    """Normalise a row: ``y``, bfloat16 ``kept`` without scale and shift, where it is, and the inverse deviation."""
    number = to.splat(size)

    def mean(of: Callable[[Vector], Vector]) -> Vector:
        total = to.variable(to.zero)
        with to.loop(count) as at:
            to.put(to.get(total) + of(to.load(to.at(x, at, 4))), total)
        return to.total(to.get(total)) / number

    place = to.variable(to.zero)
    with to.there(centred):
        to.put(mean(lambda own: own), place)
    middle = to.get(place)
    variance = mean(lambda own: (own - middle) * (own - middle))
    one = middle.constant(1.0)
    found = one / (variance + to.splat(eps)).root()
    to.builder.store(to.builder.extract_element(found.value, I32(0)), to.place(inverse, F32))
    with to.loop(count) as at:
        own = (to.load(to.at(x, at, 4)) - middle) * found
        with to.there(kept):
            to.store_bfloat16(own, to.at(kept, at, 2))
        to.store(own * to.load(to.at(scale, at, 4)) + to.load(to.at(shift, at, 4)), to.at(y, at, 4))


def _normalize_backward(
    to: _To, dy, count, kept, inverse, scale, dx, adds, of_scale, of_shift, centred, size
):
    """Write, or add, the gradient of a row; add to those of scale and shift."""
    first, second = to.variable(to.zero), to.variable(to.zero)
    with to.loop(count) as at:
        grad, own = to.load(to.at(dy, at, 4)), to.load_bfloat16(to.at(kept, at, 2))
        product = grad * own
        scaled = to.load(to.at(scale, at, 4))
        to.put(to.get(first) + grad * scaled, first)
        to.put(to.get(second) + product * scaled, second)
        to.store(to.load(to.at(of_scale, at, 4)) + product, to.at(of_scale, at, 4))
        to.store(to.load(to.at(of_shift, at, 4)) + grad, to.at(of_shift, at, 4))
    number = to.splat(size)
    with to.there(to.builder.xor(centred, I64(1))):
        to.put(to.zero, first)
    one, other = (to.total(to.get(v)) / number for v in (first, second))
    factor = to.splat(to.one(inverse))
    with to.there(dx), to.loop(count) as at:
        grad, own = to.load(to.at(dy, at, 4)), to.load_bfloat16(to.at(kept, at, 2))
        found = grad * to.load(to.at(scale, at, 4)) - one - own * other
        to.added(found * factor, to.at(dx, at, 4), adds)


def _curve(to: _To, x, count, y, kept, curve, number):
    """Write a function of numbers; bfloat16 ``kept`` of these, where they are."""
    with to.there(kept), to.loop(count) as at:
        to.store_bfloat16(to.load(to.at(x, at, 4)), to.at(kept, at, 2))
    apply(to.builder, "value", x, y, count, (curve, number))


def _curve_backward(to: _To, dy, count, kept, dx, adds, slopes, curve, number):
    """Write, or add, gradients times the function's slope; ``slopes``: room for ``count`` float32."""
    with to.loop(count) as at:
        to.store(to.load_bfloat16(to.at(kept, at, 2)), to.at(slopes, at, 4))
    apply(to.builder, "slope", slopes, slopes, count, (curve, number))
    with to.loop(count) as at:
        own = to.load(to.at(dy, at, 4)) * to.load(to.at(slopes, at, 4))
        to.added(own, to.at(dx, at, 4), adds)


def _multiply(to: _To, x, other, count, y, kept, other_kept):
    """Write products of numbers; bfloat16 ``kept`` of both, where they are."""
    with to.loop(count) as at:
        one, two = to.load(to.at(x, at, 4)), to.load(to.at(other, at, 4))
        with to.there(kept):
            to.store_bfloat16(one, to.at(kept, at, 2))
            to.store_bfloat16(two, to.at(other_kept, at, 2))
        to.store(one * two, to.at(y, at, 4))


def _multiply_backward(to: _To, dy, count, other_kept, dx, adds):
    """Write, or add, gradients times what the number was multiplied with."""
    with to.loop(count) as at:
        own = to.load(to.at(dy, at, 4)) * to.load_bfloat16(to.at(other_kept, at, 2))
        to.added(own, to.at(dx, at, 4), adds)


def _relu(to: _To, x, count, y, mask):
    with to.loop(count) as at:
        z = to.load(to.at(x, at, 4))
        below = Vector(to.builder, to.builder.fcmp_ordered("<=", z.value, to.zero.value))
        to.store(below.where(to.zero, z), to.at(y, at, 4))
        place = to.builder.add(mask, to.builder.lshr(at, I64(3)))
        bits = to.bits(z > to.zero)
        to.builder.store(bits, to.place(place, I16))


def _masked(to: _To, x, count, mask, y, adds, factor):
    """Write, or add, numbers times a factor, and 0 where a bit of ``mask`` is 0."""
    factors = to.splat(factor)
    with to.loop(count) as at:
        place = to.builder.add(mask, to.builder.lshr(at, I64(3)))
        own = to.flags(to.one(place, I16)).where(to.load(to.at(x, at, 4)) * factors, to.zero)
        to.added(own, to.at(y, at, 4), adds)


def _add(to: _To, x, other, count, y):
    with to.loop(count) as at:
        to.store(to.load(to.at(x, at, 4)) + to.load(to.at(other, at, 4)), to.at(y, at, 4))


def _pass_on(to: _To, dy, count, dx, adds):
    with to.loop(count) as at:
        to.added(to.load(to.at(dy, at, 4)), to.at(dx, at, 4), adds)


def _add_rows(to: _To, x, rows, count, out):
    """Add rows, one after the other, to sums."""
    with to.loop(count) as at:
        total = to.variable(to.load(to.at(out, at, 4)))
        place, step = to.at(x, at, 4), to.builder.mul(count, I64(4))
        with cgutils.for_range(to.builder, rows, intp=I64) as loop:
            row = to.builder.add(place, to.builder.mul(loop.index, step))
            to.put(to.get(total) + to.load(row), total)
        to.store(to.get(total), to.at(out, at, 4))


def _softmax(to: _To, x, count, first, causal, scale):
    """Replace 16 columns of ``count`` rows by their softmax after scaling.

    Column ``i`` belongs to the token ``first + i``, row ``j`` to token ``j``; where ``causal``, what is
    behind the column's own token counts as 0.
    """
    scales, none = to.splat(scale), to.constant(float("-inf"))
    top, total = to.variable(none), to.variable(to.zero)
    every = to.is_set(causal)

    def hidden(j: Any) -> Vector:
        behind = to.below(to.builder.sub(j, first))
        off = to.builder.select(every, behind.value, ir.Constant(_BITS, [0] * _LANES))
        return Vector(to.builder, off)

    with cgutils.for_range(to.builder, count, intp=I64) as loop:
        place = to.at(x, loop.index, 64)
        own = hidden(loop.index).where(none, to.load(place) * scales)
        to.store(own, place)
        to.put((own > to.get(top)).where(own, to.get(top)), top)
    with cgutils.for_range(to.builder, count, intp=I64) as loop:
        place = to.at(x, loop.index, 64)
        own = hidden(loop.index).where(to.zero, to.exp(to.load(place) - to.get(top)))
        to.store(own, place)
        to.put(to.get(total) + own, total)
    with cgutils.for_range(to.builder, count, intp=I64) as loop:
        place = to.at(x, loop.index, 64)
        to.store(to.load(place) / to.get(total), place)


def _softmax_backward(to: _To, p, grad, count, scale):
    """Replace the gradient of 16 columns of a softmax by that of what was scaled."""
    total, scales = to.variable(to.zero), to.splat(scale)
    with cgutils.for_range(to.builder, count, intp=I64) as loop:
        own = to.load(to.at(p, loop.index, 64)) * to.load(to.at(grad, loop.index, 64))
        to.put(to.get(total) + own, total)
    with cgutils.for_range(to.builder, count, intp=I64) as loop:
        place = to.at(grad, loop.index, 64)
        own = to.load(to.at(p, loop.index, 64)) * (to.load(place) - to.get(total))
        to.store(own * scales, place)


def _transpose(to: _To, source, step, valid, out):
    """Write 16 rows of 16 float32 as columns, 64 bytes apart; rows from ``valid`` on count as 0."""
    rows = []
    for i in range(_LANES):
        is_there = to.builder.icmp_signed("<", I64(i), valid)
        row = to.load(to.builder.add(source, to.builder.mul(step, I64(i)))).value
        rows.append(Vector(to.builder, to.builder.select(is_there, row, to.zero.value)))
    for i, row in enumerate(columns_of(rows)):
        to.store(row, to.builder.add(out, I64(64 * i)))


def _write_sums(to: _To, source, step, lost, out, out_step, turns, scale, lsb):
    """Write 16 rows of 16 int32, less those at ``lost``, times two numbers; as columns where ``turns``.

    Rows are ``step`` bytes apart, what is written ``out_step``.
    """
    less, scales, lsbs = to.load(lost, I32), to.splat(scale), to.splat(lsb)
    places = (to.builder.add(source, to.builder.mul(step, I64(i))) for i in range(_LANES))
    rows = [(to.load(place, I32) - less).converted(F32) * scales * lsbs for place in places]

    def write(values: list[Vector]) -> None:
        for i, row in enumerate(values):
            to.store(row, to.builder.add(out, to.builder.mul(out_step, I64(i))))

    with to.builder.if_else(to.is_set(turns)) as (yes, no):
        with yes:
            write(columns_of(rows))
        with no:
            write(rows)


_TILE_ROWS = 8


def _float_tile(to: _To, a, a_row, a_step, b, b_step, depth, out, out_step, adds):
    """Write, or add, 8 rows by 16 columns of products of float32, added up one after the other.

    Element k of row i of ``a`` is at ``a + i * a_row + k * a_step``; row k of ``b`` has 16 elements.
    """
    totals = [to.variable(to.zero) for _ in range(_TILE_ROWS)]
    rows = [to.builder.add(a, to.builder.mul(a_row, I64(i))) for i in range(_TILE_ROWS)]
    with cgutils.for_range(to.builder, depth, intp=I64) as loop:
        column = to.load(to.builder.add(b, to.builder.mul(b_step, loop.index)))
        offset = to.builder.mul(a_step, loop.index)
        for row, total in zip(rows, totals, strict=True):
            own = to.splat(to.one(to.builder.add(row, offset)))
            to.put(to.get(total) + own * column, total)
    for i, total in enumerate(totals):
        place = to.builder.add(out, to.builder.mul(out_step, I64(i)))
        to.added(to.get(total), place, adds)


_made = partial(made_of, _To)
encode = _made("x count codes mask flip scale low high", _encode, 3)
finish_product = _made("sums step rows out out_step bias groups powers", _finish_product)
finish_gradient = _made(
    "sums step rows out out_step mask mask_step groups adds powers", _finish_gradient
)
normalize = _made("x count y kept inverse scale shift centred size eps", _normalize, 2)
normalize_backward = _made(
    "dy count kept inverse scale dx adds of_scale of_shift centred size", _normalize_backward, 1
)
curve = _made("x count y kept curve number", _curve, 1)
curve_backward = _made("dy count kept dx adds slopes curve number", _curve_backward, 1)
multiply = _made("x other count y kept other_kept", _multiply)
multiply_backward = _made("dy count other_kept dx adds", _multiply_backward)
relu = _made("x count y mask", _relu)
masked = _made("x count mask y adds factor", _masked, 1)
add = _made("x other count y", _add)
pass_on = _made("dy count dx adds", _pass_on)
add_rows = _made("x rows count out", _add_rows)
softmax = _made("x count first causal scale", _softmax, 1)
softmax_backward = _made("p grad count scale", _softmax_backward, 1)
transpose = _made("source step valid out", _transpose)
write_sums = _made("source step lost out out_step turns scale lsb", _write_sums, 2)
float_tile = _made("a a_row a_step b b_step depth out out_step adds", _float_tile)
