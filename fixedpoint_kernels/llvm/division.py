"""What DIVISION's Numba kernels do to rows of a plane, on LLVM vectors of 16 columns.

The last vector of a row reads up to 15 elements of what follows, so that no row needs a loop of
single elements: whoever calls sees to it that they can be read.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from fixedpoint_kernels.llvm.vectors import F32, I8, I16, I32, I64, Vector, intrinsic
from fixedpoint_kernels.philox.cpu import uniform

LANES = 16
BLOCK = 128  # elements that get their noise together, see ``rounding.cpu``


def _data(context, builder, signature, args, i):
    return context.make_array(signature.args[i])(context, builder, args[i]).data


def _loaded(builder, pointer):
    """Read 16 elements, float32 or the bits of bfloat16, as float32."""
    values = Vector.load(builder, pointer, LANES)
    if values.element == F32:
        return values
    wide = values.converted(I32)
    return Vector(builder, builder.shl(wide.value, wide.constant(16).value)).viewed(F32)


def _bfloat16_bits(x):
    """Round to bfloat16, ties to even; 16 bits in a lane of 32."""
    bits = x.viewed(I32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return x.is_nan().where(bits.constant(0x7FC0), rounded)


def _from_bits(bits):
    builder = bits.builder
    return Vector(builder, builder.shl(bits.value, bits.constant(16).value)).viewed(F32)


def _truncated(x, element):
    builder = x.builder
    return Vector(builder, builder.trunc(x.value, ir.VectorType(element, x.lanes)))


def _numbers(builder, first):
    """Return ``first``, ``first + 1``, ... in the lanes."""
    start = Vector.splat(builder, builder.trunc(first, I32), LANES)
    return start + start.constant(range(LANES))


def _splat(builder, scalar):
    return Vector.splat(builder, scalar, LANES)


def _if(builder, condition, yes, no):
    return Vector(builder, builder.select(condition, yes.value, no.value))


def _columns(builder, width):
    """Loop over the first columns of a row's vectors."""
    return cgutils.for_range_slice(builder, _index(0), width, _index(LANES), intp=I64)


def _index(value):
    return ir.Constant(I64, value)


@intrinsic
def bits_of(_context, x):
    """Return the bits of a float32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], I32)

    return types.uint32(types.float32), codegen


@intrinsic
def float_of(_context, bits):
    """Return the float32 of some bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], F32)

    return types.float32(types.uint32), codegen


@intrinsic
def add_rows(_context, x, at, rows, width, sums):
    """Add ``rows`` rows of ``x``, from ``x[at]`` on, to ``sums``, row by row.

    x (n,) float32 or uint16; sums (at least ``width`` and to a multiple of 16,) float32.
    """
    signature = types.void(x, types.int64, types.int64, types.int64, sums)

    def codegen(context, builder, signature, args):
        source = _data(context, builder, signature, args, 0)
        target = _data(context, builder, signature, args, 4)
        _, at, rows, width, _ = args
        with _columns(builder, width) as (column, _):
            place = builder.gep(target, [column])
            first = Vector.load(builder, place, LANES)
            total = cgutils.alloca_once(builder, first.value.type)
            builder.store(first.value, total)
            with cgutils.for_range(builder, rows, intp=I64) as loop:
                offset = builder.add(builder.add(at, column), builder.mul(loop.index, width))
                row = _loaded(builder, builder.gep(source, [offset]))
                builder.store((Vector(builder, builder.load(total)) + row).value, total)
            Vector(builder, builder.load(total)).store(place)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def mean_of_columns(_context, sums, width, slots, last, inverses, means, bits):  # noqa: PLR0913  kernels take buffers and sizes
    """Turn sums of columns into means of blocks, rounded to bfloat16 and spread over the columns.

    sums, means (width to a multiple of 16,) float32; slots: 1, 2, 4, 8 or 16, the columns of a
    block unless it is the only one; last: where the last block starts; inverses: 1 over the
    elements of a block and of the last one; bits, uint16: those of means.
    """
    signature = types.void(sums, types.int64, types.int64, types.int64, inverses, means, bits)

    def codegen(context, builder, signature, args):
        source, spread, codes = (_data(context, builder, signature, args, i) for i in (0, 5, 6))
        _, width, slots, last, inverses, _, _ = args
        inner, outer = (_splat(builder, v) for v in cgutils.unpack_tuple(builder, inverses))
        ends = [_splat(builder, builder.trunc(v, I32)) for v in (width, last)]
        with _columns(builder, width) as (column, _):
            number = _numbers(builder, column)
            total = Vector.load(builder, builder.gep(source, [column]), LANES)
            total = _is_below(number, ends[0]).where(total, total.constant(0.0))
            for step in (1, 2, 4, 8):
                pairs = _with_neighbours(total, step)
                is_needed = builder.icmp_signed(">", slots, _index(step))
                total = _if(builder, is_needed, pairs, total)
            mean = _bfloat16_bits(total * _is_below(number, ends[1]).where(inner, outer))
            _truncated(mean, I16).store(builder.gep(codes, [column]))
            _from_bits(mean).store(builder.gep(spread, [column]))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def mean_of_plane(_context, x, at, elements, width, inverse):
    """Return the bits, bfloat16, of the mean of a plane that is one block.

    x (n,) float32 or uint16, from ``x[at]`` on; elements: a multiple of 16; width: 4, 8 or 16;
    inverse: 1 over the elements.
    """
    signature = types.uint16(x, types.int64, types.int64, types.int64, types.float32)

    def codegen(context, builder, signature, args):
        source = _data(context, builder, signature, args, 0)
        _, at, elements, width, inverse = args
        zero = _splat(builder, F32(0.0))
        total = cgutils.alloca_once_value(builder, zero.value)
        for own in (4, 8, 16):
            with builder.if_then(builder.icmp_signed("==", width, _index(own))):
                builder.store(zero.value, total)
                with _columns(builder, elements) as (first, _):
                    values = _loaded(builder, builder.gep(source, [builder.add(at, first)]))
                    sums = Vector(builder, builder.load(total))
                    for row in range(0, LANES, own):
                        sums += values.shuffled(values, [row + i % own for i in range(LANES)])
                    builder.store(sums.value, total)
                sums, step = Vector(builder, builder.load(total)), 1
                while step < own:
                    sums, step = _with_neighbours(sums, step), 2 * step
                builder.store(sums.value, total)
        mean = Vector(builder, builder.load(total)) * _splat(builder, inverse)
        bits = builder.extract_element(_bfloat16_bits(mean).value, _index(0))
        return builder.trunc(bits, I16)

    return signature, codegen


def _with_neighbours(x, step):
    return x + x.shuffled(x, [lane ^ step for lane in range(LANES)])


@intrinsic
def subtract_mean(_context, x, at, elements, mean, out, start):
    """Write elements less their mean; return the smallest and the largest.

    Of NaN or infinities the smallest is infinite. x (n,) float32 or uint16, from ``x[at]`` on;
    elements: a multiple of 16; out: ``out[start]`` on, float32.
    """
    two, integer = types.UniTuple(types.float32, 2), types.int64
    signature = two(x, integer, integer, types.float32, out, integer)

    def codegen(context, builder, signature, args):
        source, target = (_data(context, builder, signature, args, i) for i in (0, 4))
        _, at, elements, mean, _, start = args
        mean = _splat(builder, mean)
        ends = [_splat(builder, F32(float(end))) for end in ("inf", "-inf")]
        slots = [cgutils.alloca_once_value(builder, end.value) for end in ends]
        for slot, end in zip(slots, ends, strict=True):
            builder.store(end.value, slot)
        with _columns(builder, elements) as (first, _):
            values = _loaded(builder, builder.gep(source, [builder.add(at, first)])) - mean
            values.store(builder.gep(target, [builder.add(start, first)]))
            low, high = (Vector(builder, builder.load(slot)) for slot in slots)
            builder.store((values < low).where(values, low).value, slots[0])
            builder.store((values > high).where(values, high).value, slots[1])
        found = _ends(*(Vector(builder, builder.load(slot)) for slot in slots))
        return context.make_tuple(builder, signature.return_type, found)

    return signature, codegen


@intrinsic
def to_positions(_context, residuals, at, count, low, inverse):
    """Turn residuals, ``residuals[at]`` on, float32, to steps above the smallest.

    Up to 15 elements of what follows are overwritten.
    """
    number, integer = types.float32, types.int64
    signature = types.void(residuals, integer, integer, number, number)

    def codegen(context, builder, signature, args):
        data = _data(context, builder, signature, args, 0)
        _, at, count, low, inverse = args
        low, inverse = (_splat(builder, number) for number in (low, inverse))
        with _columns(builder, count) as (first, _):
            place = builder.gep(data, [builder.add(at, first)])
            ((Vector.load(builder, place, LANES) - low) * inverse).store(place)
        return context.get_dummy_value()

    return signature, codegen


def _is_below(x, y):
    return Vector(x.builder, x.builder.icmp_signed("<", x.value, y.value))


@intrinsic
def subtract_rows(_context, x, at, rows, width, means, out, start, stop, found):  # noqa: PLR0913  kernels take buffers and sizes
    """Write ``rows`` rows of ``x``, less the means, to ``out``, and widen what was found.

    x (n,) float32 or uint16, from ``x[at]`` on; means (width to a multiple of 16,) float32;
    out: ``out[start]`` on, float32; nothing is written from ``stop`` on; found (3, 16)
    float32: the smallest, the largest, and 0 or NaN.
    """
    integer = types.int64
    signature = types.void(x, integer, integer, integer, means, out, integer, integer, found)

    def codegen(context, builder, signature, args):
        indices = 0, 4, 5, 8
        source, spread, target, state = (
            _data(context, builder, signature, args, i) for i in indices
        )
        _, at, rows, width, _, _, start, stop, _ = args
        places = [builder.gep(state, [_index(LANES * i)]) for i in range(3)]
        stats = [Vector.load(builder, place, LANES) for place in places]
        slots = [cgutils.alloca_once(builder, stat.value.type) for stat in stats]
        for slot, stat in zip(slots, stats, strict=True):
            builder.store(stat.value, slot)

        def one(offset, column, end):
            where = builder.add(offset, column)
            values = _loaded(builder, builder.gep(source, [builder.add(at, where)]))
            values = values - Vector.load(builder, builder.gep(spread, [column]), LANES)
            to = builder.add(start, where)
            if end is None:
                values.store(builder.gep(target, [to]))
            else:
                _store_until(builder, values, target, to, stop)
            low, high, wrong = (Vector(builder, builder.load(slot)) for slot in slots)
            if end is not None:
                is_inside = _is_below(_numbers(builder, column), end)
                values_low, values_high = (
                    is_inside.where(values, low),
                    is_inside.where(values, high),
                )
                values = is_inside.where(values, values.constant(0.0))
            else:
                values_low = values_high = values
            low = (values_low < low).where(values_low, low)
            high = (values_high > high).where(values_high, high)
            wrong = wrong + (values - values)
            for slot, stat in zip(slots, (low, high, wrong), strict=True):
                builder.store(stat.value, slot)

        whole = builder.and_(width, _index(-LANES))
        has_rest = builder.icmp_signed("!=", whole, width)
        end = _splat(builder, builder.trunc(width, I32))
        with cgutils.for_range(builder, rows, intp=I64) as loop:
            offset = builder.mul(loop.index, width)
            with _columns(builder, whole) as (column, _):
                one(offset, column, None)
            with builder.if_then(has_rest):
                one(offset, whole, end)
        for slot, place in zip(slots, places, strict=True):
            Vector(builder, builder.load(slot)).store(place)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def ends_of(_context, found):
    """Return the smallest, or NaN, and the largest, of what ``subtract_rows`` found."""

    def codegen(context, builder, signature, args):
        state = _data(context, builder, signature, args, 0)
        low, high, wrong = (
            Vector.load(builder, builder.gep(state, [_index(LANES * i)]), LANES) for i in range(3)
        )
        for step in (1, 2, 4, 8):
            wrong = _with_neighbours(wrong, step)
        low, high = _ends(low, high)
        low = builder.fadd(low, builder.extract_element(wrong.value, _index(0)))
        return context.make_tuple(builder, signature.return_type, (low, high))

    return types.UniTuple(types.float32, 2)(found), codegen


def _ends(low, high):
    for step in (1, 2, 4, 8):
        order = [lane ^ step for lane in range(LANES)]
        other = low.shuffled(low, order)
        low = (other < low).where(other, low)
        other = high.shuffled(high, order)
        high = (other > high).where(other, high)
    return [v.builder.extract_element(v.value, _index(0)) for v in (low, high)]


@intrinsic
def code_block(_context, positions, at, first, bits, key, codes, byte):  # noqa: PLR0913  kernels take buffers and sizes
    """Round ``BLOCK`` positions stochastically, as elements ``first`` on of the map, and pack them.

    positions: ``positions[at]`` on, float32, 0 or more; first: a multiple of ``BLOCK``; bits: a
    tuple of 1, 2, 4 or 8 elements; key (seed, stream) int64; codes: ``codes[byte]`` on, uint8.
    """
    integer = types.int64
    signature = types.void(positions, integer, integer, bits, key, codes, integer)
    width = len(bits)

    def codegen(context, builder, signature, args):
        source, target = (_data(context, builder, signature, args, i) for i in (0, 5))
        _, at, first, _, key, _, byte = args
        position = Vector.load(builder, builder.gep(source, [at]), BLOCK)
        below = position.floor()
        block = builder.lshr(first, _index(2))
        seed, stream = cgutils.unpack_tuple(builder, key)
        noise = uniform(builder, block, seed, stream, BLOCK // 4)
        up = (noise < position - below).where(below.constant(1.0), below.constant(0.0))
        top = below.constant(2.0**width - 1)
        code = below + up
        code = _truncated((code > top).where(top, code).converted(I32), I8)
        filled = width
        while filled < 8:  # a byte and its neighbour become one
            pairs = code.viewed(I16)
            code = _truncated(pairs | pairs >> (8 - filled), I8) & ((1 << 2 * filled) - 1)
            filled *= 2
        code.store(builder.gep(target, [byte]))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def restore_rows(_context, codes, bit, rows, width, bits, means, numbers, out, at, stop):  # noqa: PLR0913  kernels take buffers and sizes
    """Write ``rows`` rows of a plane: smallest residual + code * step + mean.

    codes: from bit ``bit`` on, uint8, with 16 bytes more; bits: a tuple of as many elements, empty
    for no codes; means (width to a multiple of 16,) float32; numbers: smallest residual
    and step, float32; out: ``out[at]`` on, float32 or uint16; nothing is written from ``stop`` on.
    """
    integer = types.int64
    signature = types.void(
        codes, integer, integer, integer, bits, means, numbers, out, integer, integer
    )

    def codegen(context, builder, signature, args):
        source, spread, target = (_data(context, builder, signature, args, i) for i in (0, 5, 7))
        _, bit, rows, width, _, _, numbers, _, at, stop = args
        low, step = (_splat(builder, v) for v in cgutils.unpack_tuple(builder, numbers))

        def one(offset, column):
            where = builder.add(offset, column)
            values = low
            if len(bits):
                place = builder.add(bit, builder.mul(where, _index(len(bits))))
                values = low + _codes_at(builder, source, place, len(bits)).converted(F32) * step
            mean = Vector.load(builder, builder.gep(spread, [column]), LANES)
            values = values + mean if len(bits) else mean
            if target.type.pointee != F32:
                values = _truncated(_bfloat16_bits(values), I16)
            _store_until(builder, values, target, builder.add(at, where), stop)

        with cgutils.for_range(builder, rows, intp=I64) as loop:
            offset = builder.mul(loop.index, width)
            with _columns(builder, width) as (column, _):
                one(offset, column)
        return context.get_dummy_value()

    return signature, codegen


def _codes_at(builder, source, bit, bits):
    """Read 16 codes of ``bits`` bits, of which the first starts at any bit."""
    byte = builder.gep(source, [builder.lshr(bit, _index(3))])
    if bits == 8:
        return Vector.load(builder, byte, LANES).converted(I32)
    whole = ir.IntType({1: 32, 2: 64, 4: 128}[bits])
    word = builder.load(builder.bitcast(byte, whole.as_pointer()), align=1)
    shift = builder.and_(bit, _index(7))
    shift = builder.zext(shift, whole) if bits == 4 else shift
    shift = builder.trunc(shift, whole) if bits == 1 else shift
    word = builder.lshr(word, shift)
    mask = (1 << bits) - 1
    if bits < 4:
        word = word if bits == 1 else builder.trunc(word, I32)
        return _shifted(_splat(builder, word), range(0, LANES * bits, bits)) & mask
    halves = [builder.trunc(builder.lshr(word, ir.Constant(whole, n)), I32) for n in (0, 32)]
    low, high = (_splat(builder, half) for half in halves)
    half = low.shuffled(high, [0] * 8 + [LANES] * 8)
    return _shifted(half, [4 * (lane % 8) for lane in range(LANES)]) & mask


def _shifted(x, places):
    return Vector(x.builder, x.builder.lshr(x.value, x.constant(places).value))


def _store_until(builder, values, target, at, stop):
    """Write 16 elements, but none from ``stop`` on."""
    left = builder.sub(stop, at)
    with builder.if_else(builder.icmp_signed(">=", left, _index(LANES)), likely=True) as (yes, no):
        with yes:
            values.store(builder.gep(target, [at]))
        with no:
            lanes = cgutils.alloca_once(builder, values.value.type)
            builder.store(values.value, lanes)
            first = builder.bitcast(lanes, values.element.as_pointer())
            with cgutils.for_range(builder, left, intp=I64) as loop:
                one = builder.load(builder.gep(first, [loop.index]))
                builder.store(one, builder.gep(target, [builder.add(at, loop.index)]))
