"""Blocks of compact states on vectors: decoded, moved, measured and encoded.

Addresses and numbers of elements are int64. Of noise a vector more may be read than a block has
elements; nothing else is touched beyond it.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from fixedpoint_kernels.llvm.vectors import F32, I8, I16, I32, I64, Vector, intrinsic, prefetch

__all__ = ["LANES", "adam", "add_to_floats", "add_to_signed", "decode_fixed", "decode_signed"]
__all__ += ["decode_squares", "encode_fixed", "encode_signed", "encode_squares", "momentum", "sgd"]
__all__ += ["top"]

LANES = 16
AHEAD = 1024  # elements
_MAGNITUDE, _SIGN = 0x7FFFFFFF, 0x80000000


class _Lanes:
    """Some elements of a block: where they begin, and which of the lanes they are."""

    def __init__(self, builder: Any, at: Any, where: Vector | None) -> None:
        self.builder, self.at, self.where = builder, at, where

    def splat(self, scalar: Any) -> Vector:
        return Vector.splat(self.builder, scalar, LANES)

    def load(self, address: Any, element: Any) -> Vector:
        return Vector.load(self.builder, self._pointer(address, element), LANES, self.where)

    def store(self, values: Vector, address: Any) -> None:
        values.store(self._pointer(address, values.element), self.where)

    def fetch(
        self, address: Any, itemsize: int, ahead: int = AHEAD, *, writes: bool = False
    ) -> None:
        """Bring elements to the cache that lie some ahead: to be read, or written."""
        first = self.builder.add(address, self.builder.mul(self.at, I64(itemsize)))
        for line in range(0, LANES * itemsize, 64):
            place = self.builder.add(first, I64(ahead * itemsize + line))
            pointer = self.builder.inttoptr(place, I8.as_pointer())
            prefetch(self.builder, pointer, writes=writes)

    def _pointer(self, address: Any, element: Any) -> Any:
        pointer = self.builder.inttoptr(address, element.as_pointer())
        return self.builder.gep(pointer, [self.at])

    def floats(self, values: Any, _scale: Any) -> Vector:
        """Return values that are no codes."""
        return self.load(values, F32)

    def fixed(self, codes: Any, scale: Any) -> Vector:
        """Return what codes of masters mean."""
        return self.load(codes, I16).converted(F32) * self.splat(scale)

    def signed(self, codes: Any, scale: Any) -> Vector:
        """Return what codes of momenta mean."""
        code = self.load(codes, I8).converted(F32)
        return code * _absolute(code) * self.splat(scale)

    def squares(self, codes: Any, scale: Any) -> Vector:
        """Return what codes of means of squares mean."""
        code = self.load(codes, I8).converted(I32).converted(F32)
        code = code * code
        return code * code * self.splat(scale)

    def chance(self, noise: Any, factor: Any, half: Any) -> Vector:
        """Return what a distance is compared with; see ``reference._chances``."""
        own = Vector.load(self.builder, self._pointer(noise, I16), LANES)
        part = (own * self.splat(self.builder.trunc(factor, I16))).converted(I32).converted(F32)
        return part.fused(part.constant(2.0**-16), self.splat(half))


class _Top:
    """The largest magnitude's bits of what is seen; those of infinity and NaN are above all others."""

    def __init__(self, builder: Any) -> None:
        zeros = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
        self._builder, self._place = builder, cgutils.alloca_once_value(builder, zeros)

    def see(self, values: Vector, where: Vector | None) -> None:
        size, found = _size(values), Vector(self._builder, self._builder.load(self._place))
        if where is not None:
            size = where.where(size, size.constant(0))
        self._builder.store(_most(size, found).value, self._place)

    def value(self) -> Any:
        whole = self._builder.load(self._place)
        kind = ir.FunctionType(I32, [whole.type])
        name = f"llvm.vector.reduce.umax.v{LANES}i32"
        function = cgutils.get_or_insert_function(self._builder.module, kind, name)
        return self._builder.call(function, [whole])


class _Squares:
    """The sum of the squares of what is seen, in float64, where each of them is exact."""

    def __init__(self, builder: Any) -> None:
        self._wide = ir.VectorType(ir.DoubleType(), LANES)
        zeros = ir.Constant(self._wide, [0.0] * LANES)
        self._builder, self._place = builder, cgutils.alloca_once_value(builder, zeros)

    def see(self, values: Vector) -> None:
        wide = self._builder.fpext(values.value, self._wide)
        found = self._builder.load(self._place)
        kind = ir.FunctionType(self._wide, [self._wide] * 3)
        name = f"llvm.fmuladd.v{LANES}f64"  # fused or not: squares are exact
        multiply_add = cgutils.get_or_insert_function(self._builder.module, kind, name)
        total = self._builder.call(multiply_add, [wide, wide, found])
        self._builder.store(total, self._place)

    def value(self) -> Any:
        left, lanes = self._builder.load(self._place), LANES
        while lanes > 1:
            lanes //= 2
            orders = [list(range(first, first + lanes)) for first in (0, lanes)]
            masks = [ir.Constant(ir.VectorType(I32, lanes), order) for order in orders]
            halves = [self._builder.shuffle_vector(left, left, mask) for mask in masks]
            left = self._builder.fadd(*halves)
        return self._builder.extract_element(left, I32(0))


def _size(values: Vector) -> Vector:
    return values.viewed(I32) & _MAGNITUDE


def _absolute(values: Vector) -> Vector:
    return _size(values).viewed(F32)


def _least(a: Vector, b: Vector) -> Vector:
    return (a < b).where(a, b)


def _most(a: Vector, b: Vector) -> Vector:
    return (a > b).where(a, b)


def _each(builder: Any, n: Any, step: Callable[[_Lanes], None]) -> None:
    """Emit ``step`` for the elements of a block: whole vectors, then what is left."""
    whole = builder.and_(n, I64(-LANES))
    with cgutils.for_range_slice(builder, I64(0), whole, I64(LANES), intp=I64) as (at, _):
        step(_Lanes(builder, at, None))
    with builder.if_then(builder.icmp_unsigned("<", whole, n)):
        left = Vector.splat(builder, builder.trunc(builder.sub(n, whole), I32), LANES)
        step(_Lanes(builder, whole, left.constant(range(LANES)) < left))


def _unpacked(builder: Any, args: Any) -> list[list[Any]]:
    """Return the elements of tuples; what is no tuple counts as one of its own."""
    found = []
    for value in args:
        is_tuple = isinstance(value.type, ir.LiteralStructType | ir.ArrayType)
        found.append(cgutils.unpack_tuple(builder, value) if is_tuple else [value])
    return found


@intrinsic
def top(_context, x, n):
    """Return the largest magnitude's bits of float32 at an address."""

    def codegen(_context, builder, _signature, args):
        found = _Top(builder)
        _each(builder, args[1], lambda own: found.see(own.load(args[0], F32), own.where))
        return found.value()

    return types.int32(x, n), codegen


def _decode(mean: Callable[[_Lanes, Any, Any], Vector]) -> Any:
    """Return an intrinsic that writes what codes mean: addresses of both, elements, scale."""

    @intrinsic
    def decode(_context, codes, values, n, scale):
        def codegen(context, builder, _signature, args):
            own_codes, own_values, count, own_scale = args
            _each(builder, count, lambda o: o.store(mean(o, own_codes, own_scale), own_values))
            return context.get_dummy_value()

        return types.void(codes, values, n, scale), codegen

    return decode


decode_fixed, decode_signed, decode_squares = map(
    _decode, (_Lanes.fixed, _Lanes.signed, _Lanes.squares)
)


def _add_to(mean: Callable[[_Lanes, Any, Any], Vector], itemsize: int) -> Any:
    """Return an intrinsic that adds values to what a block means.

    Its arguments: addresses of the block, the values, and where the sums go, float32; elements; scale. It
    returns the largest magnitude's bits of the sums, and the sum of their squares.
    """

    @intrinsic
    def add(_context, addresses, n, scale):
        signature = types.Tuple((types.int32, types.float64))(addresses, n, scale)

        def codegen(context, builder, signature, args):
            (before, values, sums), (count,), (own_scale,) = _unpacked(builder, args)
            high, squares = _Top(builder), _Squares(builder)

            def step(own: _Lanes) -> None:
                for place, size in ((before, itemsize), (values, 4)):
                    own.fetch(place, size)
                new = mean(own, before, own_scale) + own.load(values, F32)
                own.store(new, sums)
                high.see(new, own.where)
                squares.see(new)  # lanes that are not loaded are 0

            _each(builder, count, step)
            found = [high.value(), squares.value()]
            return context.make_tuple(builder, signature.return_type, found)

        return signature, codegen

    return add


add_to_signed, add_to_floats = _add_to(_Lanes.signed, 1), _add_to(_Lanes.floats, 4)


def _gradient(own: _Lanes, grad: Any, value: Vector, decay: Vector) -> Vector:
    """Return the gradient, with the decay's where there is one."""
    g = own.load(grad, F32)
    return decay.is_zero().where(g, value.fused(decay, g))


@intrinsic
def sgd(_context, addresses, n, lsb, rate):
    """Move a block without momentum.

    Args:
        addresses: Of codes, gradient, and where the masters go, float32.
        n: Elements.
        lsb: Of the masters.
        rate: -lr, momentum, weight decay, nesterov: see ``cpu._rate_of``.

    Returns:
        Largest magnitude's bits of the masters.
    """

    def codegen(_context, builder, _signature, args):
        (codes, grad, masters), (count,), (scale,), (step, _, decay, _) = _unpacked(builder, args)
        found = _Top(builder)

        def move(own: _Lanes) -> None:
            value = own.fixed(codes, scale)
            new = _gradient(own, grad, value, own.splat(decay)).fused(own.splat(step), value)
            own.store(new, masters)
            found.see(new, own.where)

        _each(builder, count, move)
        return found.value()

    return types.int32(addresses, n, lsb, rate), codegen


@intrinsic
def momentum(_context, addresses, n, scales, rate):
    """Move a block with momentum.

    Args:
        addresses: As of ``sgd``; then of the momentum's codes, and where the momenta go, float32.
        n: Elements.
        scales: Of masters and momenta.
        rate: As of ``sgd``.

    Returns:
        Largest magnitudes' bits of the masters and the momenta.
    """
    signature = types.UniTuple(types.int32, 2)(addresses, n, scales, rate)

    def codegen(context, builder, signature, args):
        places, (count,), (lsb, scale), (step, kept, decay, nesterov) = _unpacked(builder, args)
        codes, grad, masters, old, momenta = places
        found, high = _Top(builder), _Top(builder)

        def move(own: _Lanes) -> None:
            for place, itemsize in ((codes, 2), (grad, 4), (old, 1)):
                own.fetch(place, itemsize)
            value, factor = own.fixed(codes, lsb), own.splat(kept)
            g = _gradient(own, grad, value, own.splat(decay))
            moved = factor * own.signed(old, scale) + g
            g = own.splat(nesterov).is_zero().where(moved, moved.fused(factor, g))
            new = g.fused(own.splat(step), value)
            own.store(moved, momenta)
            own.store(new, masters)
            found.see(new, own.where)
            high.see(moved, own.where)

        _each(builder, count, move)
        return context.make_tuple(builder, signature.return_type, [found.value(), high.value()])

    return signature, codegen


@intrinsic
def adam(_context, addresses, n, scales, rate):
    """Move a block as Adam does.

    Args:
        addresses: As of ``momentum``; then of the squares' codes, and where the squares go, float32.
        n: Elements.
        scales: Of masters, momenta and squares.
        rate: See ``cpu._rate_of``.

    Returns:
        Largest magnitudes' bits of the masters, the momenta and the squares.
    """
    signature = types.UniTuple(types.int32, 3)(addresses, n, scales, rate)

    def codegen(context, builder, signature, args):
        places, (count,), (lsb, scale, power), numbers = _unpacked(builder, args)
        codes, grad, masters, old, momenta, old_squares, squares = places
        tops = [_Top(builder) for _ in range(3)]

        def move(own: _Lanes) -> None:
            step, weight1, beta2, weight2, correction, eps, decay, kept = map(own.splat, numbers)
            value = own.fixed(codes, lsb) * kept
            g = _gradient(own, grad, value, decay)
            m = own.signed(old, scale)
            m = weight1.fused(g - m, m)
            v = (weight2 * g).fused(g, own.squares(old_squares, power) * beta2)
            new = value + step * m / (v.root() / correction + eps)
            for values, place, found in zip(
                (new, m, v), (masters, momenta, squares), tops, strict=True
            ):
                own.store(values, place)
                found.see(values, own.where)

        _each(builder, count, move)
        found = [own.value() for own in tops]
        return context.make_tuple(builder, signature.return_type, found)

    return signature, codegen


@intrinsic
def encode_fixed(_context, addresses, n, lsb, factor, half):
    """Encode a block of masters.

    Args:
        addresses: Of values, codes, noise, of what the codes mean, which may be the values, and of
            memory that is written next.
        n: Elements.
        lsb: A power of two, which leaves no code to clamp, and its inverse.
        factor: Of the noise.
        half: Of a step of the noise.
    """

    def codegen(context, builder, _signature, args):
        places, (count,), (own_lsb, scale), (times,), (middle,) = _unpacked(builder, args)
        values, codes, noise, meant, weight = places

        def encode(own: _Lanes) -> None:
            own.fetch(weight, 4, 0, writes=True)
            scaled = own.load(values, F32) * own.splat(scale)
            below = scaled.floor()
            is_up = scaled - below > own.chance(noise, times, middle)
            code = is_up.where(below + 1.0, below)
            own.store(code.converted(I32).truncated(I16), codes)
            own.store(code * own.splat(own_lsb), meant)

        _each(builder, count, encode)
        return context.get_dummy_value()

    return types.void(addresses, n, lsb, factor, half), codegen


@intrinsic
def encode_signed(_context, addresses, n, inverse, factor, half):
    """Encode a block of momenta: addresses of values, codes and noise; see ``encode_fixed``."""

    def codegen(context, builder, _signature, args):
        (values, codes, noise), (count,), (scale,), (times,), (middle,) = _unpacked(builder, args)

        def encode(own: _Lanes) -> None:
            scaled = own.load(values, F32) * own.splat(scale)
            size = _absolute(scaled)
            below = size.root().floor()  # never above 127
            gap = below.fused(below.constant(2.0), below.constant(1.0))  # to the next square
            is_up = gap * own.chance(noise, times, middle) < size - below * below
            code = _least(is_up.where(below + 1.0, below), below.constant(127.0))
            signed = (code.viewed(I32) | scaled.viewed(I32) & _SIGN).viewed(F32)
            own.store(signed.converted(I32).truncated(I8), codes)

        _each(builder, count, encode)
        return context.get_dummy_value()

    return types.void(addresses, n, inverse, factor, half), codegen


@intrinsic
def encode_squares(_context, addresses, n, inverse, factor, half):
    """Encode a block of means of squares: addresses of values, codes and noise; see ``encode_fixed``."""

    def codegen(context, builder, _signature, args):
        (values, codes, noise), (count,), (scale,), (times,), (middle,) = _unpacked(builder, args)

        def encode(own: _Lanes) -> None:
            given = own.load(values, F32)
            zero, one, most = map(given.constant, (0.0, 1.0, 255.0))
            size = _most(given * own.splat(scale), zero)
            below = _least(size.root().root().floor(), most)
            above = below + 1.0
            low, high = below * below, above * above
            low, high = low * low, high * high
            step = (high - low) * own.chance(noise, times, middle)
            code = _least(below + (step < size - low).where(one, zero), most)
            code = _most(code, (given > 0.0).where(one, zero))
            own.store(code.converted(I32).truncated(I8), codes)

        _each(builder, count, encode)
        return context.get_dummy_value()

    return types.void(addresses, n, inverse, factor, half), codegen
