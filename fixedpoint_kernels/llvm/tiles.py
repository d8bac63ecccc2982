"""The inner loops of products on CPUs, as Numba intrinsics: LLVM's own integer instructions.

A tile multiplies rows of ``a`` by columns of ``b``, and adds int32 to what stands in memory. Rows
are bytes that lie a fixed step apart, read in runs of consecutive bytes; columns come in groups of
16, each ``[depth / 4][16][4]`` bytes: four bytes of a row meet four of a column in one lane. AMX
takes 16 such steps at a time, from the same memory. Addresses are int64.
"""

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils

from fixedpoint_kernels.llvm.vectors import (
    Vector,
    columns_of,
    has_avx512,
    has_bfloat16,
    intrinsic,
    prefetch,
)

I1, I8, I16, I32, I64 = map(ir.IntType, (1, 8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()
_POINTER = I8.as_pointer()
_AHEAD = 2048  # bytes that are copied later come near


def vector(element: Any, lanes: int) -> Any:
    """Return LLVM's type of a vector."""
    return ir.VectorType(element, lanes)


def load(builder: Any, address: Any, kind: Any, align: int = 1) -> Any:
    """Read a value of type ``kind``."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def store(builder: Any, value: Any, address: Any, align: int = 1) -> None:
    """Write a value."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def constant(kind: Any, value: Any) -> Any:
    """Return a vector with ``value`` in each lane."""
    return ir.Constant(kind, [value] * kind.count)


def splat(builder: Any, scalar: Any, lanes: int) -> Any:
    """Return a vector with ``scalar`` in each lane."""
    empty = ir.Constant(vector(scalar.type, lanes), ir.Undefined)
    return shuffle(builder, builder.insert_element(empty, scalar, I32(0)), None, [0] * lanes)


def shuffle(builder: Any, a: Any, b: Any, order: list[int]) -> Any:
    """Pick lanes by number, those of ``b`` counted on from those of ``a``."""
    mask = ir.Constant(vector(I32, len(order)), order)
    return builder.shuffle_vector(a, ir.Constant(a.type, ir.Undefined) if b is None else b, mask)


def call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Call an LLVM function."""
    signature = ir.FunctionType(result, [x.type for x in arguments])
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.{name}")
    return builder.call(function, list(arguments))


def addressed(count: int, body: Callable[..., None]) -> Any:
    """Return an intrinsic of ``count`` int64 that returns nothing."""

    def codegen(context, builder, _signature, arguments):
        body(builder, *arguments)
        return context.get_dummy_value()

    # Numba counts the parameters of the function itself
    names = ", ".join(f"a{i}" for i in range(count))
    scope = {"made": (types.void(*[types.int64] * count), codegen)}
    exec(f"def typing(_context, {names}): return made", scope)
    typing: Any = scope["typing"]
    return intrinsic(typing)


def _dot(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """Add four products of bytes to each int32 lane: ``vpdpbusd``."""
    if binding.llvm_version_info[0] >= 22:  # bytes as bytes, since then
        whole = vector(I8, 4 * total.type.count)
        unsigned, signed = builder.bitcast(unsigned, whole), builder.bitcast(signed, whole)
    name = f"x86.avx512.vpdpbusd.{32 * total.type.count}"
    return call(builder, name, total.type, total, unsigned, signed)


def opaque(builder: Any, value: Any) -> Any:
    """Keep a value in a register of its own: LLVM would make addresses in a chain of additions."""
    signature = ir.FunctionType(value.type, [value.type])
    return builder.asm(signature, "", "=r,0", [value], False)


def vnni_tile(rows: int, groups: int, lanes: int, taps: int = 1) -> Any:  # noqa: C901
    """Return the tile of ``vpdpbusd``: bytes of ``a`` are unsigned, those of ``b`` signed.

    With ``taps`` each run must be so many steps from one row to the next. A row is then also what
    those before it read later, as in a convolution, and is read once for all: reading is what a
    tile of few columns waits for.

    Args:
        rows: Of ``a``.
        groups: Of 16 columns.
        lanes: int32 of one register.
        taps: That share what is read.
    """
    whole, pieces = vector(I32, lanes), groups * 16 // lanes

    def body(  # noqa: C901, PLR0913
        builder, _kind, a, _firsts, step, runs, count, b, group, begin, begin_step, *out
    ):
        def places(start, row_step):
            for m in range(rows):
                first = builder.add(start, builder.mul(row_step, I64(m)))
                yield from (builder.add(first, I64(4 * lanes * j)) for j in range(pieces))

        def columns_at(place):
            for j in range(pieces):
                start = builder.add(place, builder.mul(group, I64(j * lanes // 16)))
                start = builder.add(start, I64(j * lanes % 16 * 4))
                yield load(builder, start, whole, 4 * lanes)

        totals = [cgutils.alloca_once(builder, whole) for _ in range(rows * pieces)]
        for total, place in zip(totals, places(begin, begin_step), strict=True):
            builder.store(load(builder, place, whole), total)
        eight = builder.mul(step, I64(8))
        for first, length, column in runs_of(builder, runs, count, b, 64):
            start = builder.add(a, first)
            firsts = [
                opaque(builder, builder.add(start, builder.mul(step, I64(m))))
                for m in range(min(rows, 8))
            ]
            steps = length if taps == 1 else builder.lshr(step, I64(2))
            with cgutils.for_range(builder, steps, intp=I64) as loop:
                later = [builder.shl(loop.index, I64(2))]
                while 8 * len(later) < rows + taps - 1:
                    later.append(opaque(builder, builder.add(eight, later[-1])))
                columns = []
                for tap in range(taps):
                    number = builder.add(loop.index, builder.mul(steps, I64(tap)))
                    place = builder.add(column, builder.shl(number, I64(6)))
                    columns.append(list(columns_at(place)))
                for m in range(rows + taps - 1):
                    source = builder.add(firsts[m % 8], later[m // 8])
                    row = splat(builder, load(builder, source, I32), lanes)
                    for tap in range(max(0, m - rows + 1), min(taps, m + 1)):
                        for j in range(pieces):
                            total = totals[(m - tap) * pieces + j]
                            own = _dot(builder, builder.load(total), row, columns[tap][j])
                            builder.store(own, total)
        for total, place in zip(totals, places(*out), strict=True):
            store(builder, builder.load(total), place)

    return addressed(12, body)


def amx_tile(rows: int, groups: int) -> Any:  # noqa: C901
    """Return the tile of AMX: ``16 * rows`` rows by ``16 * groups`` columns.

    Takes the places of each 16 rows from ``firsts``, and runs counted in 64 bytes. Bytes of ``b``
    are signed, those of ``a`` as ``kind_of_bytes`` says.
    """
    right, left = rows * groups, rows * groups + groups  # numbers of tiles
    void = ir.VoidType()

    def body(builder, kind, *arguments):
        is_signed = builder.icmp_signed("!=", builder.and_(kind, I64(1)), I64(0))
        with builder.if_else(is_signed) as (yes, no):
            with yes:
                multiplied(builder, "x86.tdpbssd", *arguments)
            with no:
                multiplied(builder, "x86.tdpbusd", *arguments)

    def multiplied(  # noqa: C901, PLR0913
        builder, name, a, firsts, step, runs, count, b, group, begin, begin_step, *out
    ):
        def memory(kind, tile, address, stride):
            call(builder, kind, void, I8(tile), builder.inttoptr(address, _POINTER), stride)

        def places(start, row_step):
            for i in range(rows):
                first = builder.add(start, builder.mul(row_step, I64(16 * i)))
                for j in range(groups):
                    yield i * groups + j, builder.add(first, I64(64 * j)), row_step

        for place in places(begin, begin_step):
            memory("x86.tileloadd64", *place)
        starts = [
            builder.add(a, load(builder, builder.add(firsts, I64(8 * i)), I64, 8))
            for i in range(rows)
        ]
        for first, length, column in runs_of(builder, runs, count, b, 1024):
            with cgutils.for_range(builder, length, intp=I64) as loop:
                place = builder.add(column, builder.shl(loop.index, I64(10)))
                for j in range(groups):
                    source = builder.add(place, builder.mul(group, I64(j)))
                    memory("x86.tileloadd64", right + j, source, I64(64))
                depth = builder.add(first, builder.shl(loop.index, I64(6)))
                for i in range(rows):
                    memory("x86.tileloadd64", left, builder.add(starts[i], depth), step)
                    for j in range(groups):
                        numbers = I8(i * groups + j), I8(left), I8(right + j)
                        call(builder, name, void, *numbers)
        for place in places(*out):
            memory("x86.tilestored64", *place)

    return addressed(12, body)


def runs_of(builder: Any, runs: Any, count: Any, b: Any, column_bytes: int) -> Iterator[tuple]:
    """Generate the code of a loop over runs: offset, length, and where its weights are."""
    with cgutils.for_range(builder, count, intp=I64) as run:
        entry = builder.add(runs, builder.mul(run.index, I64(24)))
        first, length, column = (
            load(builder, builder.add(entry, I64(8 * i)), I64, 8) for i in range(3)
        )
        yield first, length, builder.add(b, builder.mul(column, I64(column_bytes)))


def kind_of_bytes(signed: bool, in_int16: int) -> int:
    """Return what tiles are told of bytes.

    Args:
        signed: Whether those of ``a`` are; AMX asks.
        in_int16: Steps of four bytes whose sums of pairs int16 holds; AVX2 asks.
    """
    return signed + 2 * in_int16


def _configure(builder: Any, address: Any) -> None:
    """Load a configuration of tiles; 64 bytes at ``address``."""
    call(builder, "x86.ldtilecfg", ir.VoidType(), builder.inttoptr(address, _POINTER))


def _release(builder: Any, _unused: Any) -> None:
    call(builder, "x86.tilerelease", ir.VoidType())


def _interleave(builder: Any, source: Any, step: Any, out: Any) -> None:
    """Write 16 bytes at each of four places as 16 groups of four: ``[4][16]`` to ``[16][4]``."""
    store(builder, _interleaved(builder, source, step, 0), out)


def _interleaved(builder: Any, source: Any, step: Any, first: int) -> Any:
    places = [
        builder.add(source, builder.mul(step, I64(first + i))) if first + i else source
        for i in range(4)
    ]
    rows = [load(builder, place, vector(I8, 16)) for place in places]
    low = shuffle(builder, rows[0], rows[1], list(range(32)))
    high = shuffle(builder, rows[2], rows[3], list(range(32)))
    whole = shuffle(builder, low, high, list(range(64)))
    return shuffle(builder, whole, None, [i % 4 * 16 + i // 4 for i in range(64)])


MASKS = 3
"""Of ``interleave_masked``, at most."""


def _interleave_masked(  # noqa: PLR0913
    builder: Any, source: Any, step: Any, out: Any, out_step: Any, masks: Any, count: Any
) -> None:
    """``_interleave``, to ``count`` places ``out_step`` apart, of each group the bits of an int32 of its own."""
    whole = builder.bitcast(_interleaved(builder, source, step, 0), vector(I32, 16))
    for i in range(MASKS):
        with builder.if_then(builder.icmp_signed(">", count, I64(i)), likely=True):
            mask = load(builder, builder.add(masks, I64(4 * i)), I32)
            place = builder.add(out, builder.mul(out_step, I64(i)))
            store(builder, builder.and_(whole, splat(builder, mask, 16)), place)


def _come(builder: Any, source: Any, count: Any) -> None:
    """Ask for ``count`` bytes."""
    with cgutils.for_range_slice(builder, I64(0), count, I64(64), I64) as (at, _):
        prefetch(builder, builder.inttoptr(builder.add(source, at), _POINTER))


def _come_for_writing(builder: Any, out: Any, step: Any, rows: Any) -> None:
    """Ask for a cache line at each of some places ``step`` bytes apart, which are written soon."""
    with cgutils.for_range(builder, rows, intp=I64) as loop:
        place = builder.add(out, builder.mul(step, loop.index))
        prefetch(builder, builder.inttoptr(place, _POINTER), writes=True)


def _transpose(builder: Any, source: Any, step: Any, out: Any, out_step: Any) -> None:
    """Write 16 rows of 16 bytes as columns: byte j of row i at ``out + j * out_step + i``."""

    def merged(a, b, kind, places):  # within each 128 bits, as the machine's own instructions
        a, b = builder.bitcast(a, kind), builder.bitcast(b, kind)
        n = kind.count // 4
        order = [q * n + i + other for q in range(4) for i in places for other in (0, kind.count)]
        return shuffle(builder, a, b, order)

    words, pairs = vector(I32, 16), vector(I64, 8)
    quads = [_interleaved(builder, source, step, 4 * i) for i in range(4)]
    for half in range(2):
        first, second = (
            merged(quads[i], quads[i + 1], words, (2 * half, 2 * half + 1)) for i in (0, 2)
        )
        for odd in range(2):
            rows = builder.bitcast(merged(first, second, pairs, (odd,)), vector(I8, 64))
            for q in range(4):
                row = 4 * q + 2 * half + odd
                place = builder.add(out, builder.mul(out_step, I64(row)))
                part = shuffle(builder, rows, None, list(range(16 * q, 16 * q + 16)))
                store(builder, part, place)


def _transpose_floats(builder: Any, source: Any, step: Any, out: Any, out_step: Any) -> None:
    """Write 16 rows of 16 float32, ``step`` bytes apart, as columns: row j at ``out + j * out_step``."""
    whole = vector(F32, 16)
    places = (builder.add(source, builder.mul(step, I64(i))) for i in range(16))
    rows = [Vector(builder, load(builder, place, whole)) for place in places]
    for j, column in enumerate(columns_of(rows)):
        store(builder, column.value, builder.add(out, builder.mul(out_step, I64(j))))


def _sum_columns(builder: Any, source: Any, quads: Any, out: Any) -> None:
    """Write the sums of 16 columns of signed bytes, ``[quads][16][4]``, as int32."""
    whole = vector(I32, 16)
    total = cgutils.alloca_once_value(builder, constant(whole, 0))
    with cgutils.for_range(builder, quads, intp=I64) as loop:
        words = load(builder, builder.add(source, builder.shl(loop.index, I64(6))), whole)
        own = builder.load(total)
        for places in (24, 16, 8, 0):
            left = builder.shl(words, constant(whole, places))
            own = builder.add(own, builder.ashr(left, constant(whole, 24)))
        builder.store(own, total)
    store(builder, builder.load(total), out)


def _add_doubles(builder: Any, source: Any, out: Any) -> None:
    """Add 16 float64 to others."""
    whole = vector(F64, 16)
    store(builder, builder.fadd(load(builder, out, whole), load(builder, source, whole)), out)


def _add_scaled(builder: Any, source: Any, last: Any, flip: Any, scale: Any, out: Any) -> None:
    """Add 16 int32, less ``flip`` times others, and times the float64 at ``scale``, to 16 float64."""
    integers, whole = vector(I32, 16), vector(F64, 16)
    times = splat(builder, builder.trunc(flip, I32), 16)
    taken = builder.mul(load(builder, last, integers), times)
    own = builder.sitofp(builder.sub(load(builder, source, integers), taken), whole)
    product = builder.fmul(own, splat(builder, load(builder, scale, F64), 16))
    store(builder, builder.fadd(load(builder, out, whole), product), out)


def _scale_doubles(builder: Any, source: Any, scale: Any, out: Any) -> None:
    """Write 16 float64 as float32, times the float32 at ``scale``."""
    own = builder.fptrunc(load(builder, source, vector(F64, 16)), vector(F32, 16))
    store(builder, builder.fmul(own, splat(builder, load(builder, scale, F32), 16)), out)


def _copy(flip: bool) -> Callable[..., None]:
    """Copy bytes, reading no others; or flip their highest bits too."""

    def body(builder: Any, source: Any, out: Any, count: Any) -> None:
        def move(at: Any, lanes: int) -> None:
            whole = vector(I8, lanes)
            place = builder.add(source, at)
            value = load(builder, place, whole)
            if lanes == 64:
                prefetch(builder, builder.inttoptr(builder.add(place, I64(_AHEAD)), _POINTER))
            flipped = builder.xor(value, constant(whole, 128)) if flip else value
            store(builder, flipped, builder.add(out, at))

        def pieces(lanes: int) -> None:  # the last one ends with the bytes, over others
            last = builder.sub(count, I64(lanes))
            with cgutils.for_range_slice(builder, I64(0), last, I64(lanes), I64) as (at, _):
                move(at, lanes)
            move(last, lanes)

        with builder.if_else(builder.icmp_signed(">=", count, I64(64))) as (long, short):
            with long:
                pieces(64)
            with short, builder.if_else(builder.icmp_signed(">=", count, I64(8))) as (some, few):
                with some:
                    pieces(8)
                with few, cgutils.for_range(builder, count, intp=I64) as loop:
                    move(loop.index, 1)

    return body


def _blank(builder: Any, out: Any, count: Any, value: Any) -> None:
    """Write ``count`` bytes and up to 63 more."""
    whole = splat(builder, builder.trunc(value, I8), 64)
    with cgutils.for_range_slice(builder, I64(0), count, I64(64), I64) as (at, _):
        store(builder, whole, builder.add(out, at))


KINDS = {  # of results, and their numbers for ``emit``
    "int32": 0,
    "float32": 1,
    "bfloat16": 2,
    "float32 by row": 4,
    "bfloat16 by row": 5,
    "int32 and statistics": 6,
    "float32 and statistics": 7,
    "bfloat16 and statistics": 8,
}
SIDE_BY_SIDE = "float32", "float32 by row", "bfloat16 and statistics"


def _emit(builder: Any, kind: Any, *arguments: Any) -> None:
    """Write 16 columns of some rows of int32 sums as results of a kind.

    Scales are 16 float32, or one a row. Statistics are int64: 16 sums, 8 of squares of even
    columns, 8 of odd ones.
    """
    for name, number in KINDS.items():
        with builder.if_then(builder.icmp_signed("==", kind, I64(number))):
            _Emitted(builder, name, arguments).write()


def _emit_rows(  # noqa: PLR0913
    builder: Any, kind: Any, sums: Any, sums_step: Any, rows: Any, out: Any, step: Any, scales: Any, statistics: Any
) -> None:  # fmt: skip
    """Do as ``emit``, of all 16 columns, ``step`` bytes from one of some rows to the next.

    Of results that are ``SIDE_BY_SIDE``: others would take longer to compile.
    """
    arguments = sums, sums_step, None, rows, out, I64(16), scales, statistics
    for name in SIDE_BY_SIDE:
        with builder.if_then(builder.icmp_signed("==", kind, I64(KINDS[name]))):
            _Emitted(builder, name, arguments, step).write()


class _Emitted:
    """The code of one kind of results; ``step``: bytes between rows that are all there, with all columns."""

    def __init__(self, builder: Any, name: str, arguments: Any, step: Any = None):
        self.builder, self.step = builder, step
        self.sums, self.sums_step, self.offsets, self.rows = arguments[:4]
        self.out, self.lanes, self.scales, self.statistics = arguments[4:]
        self.dtype, self.by_row, self.sums_up = name.split()[0], "row" in name, "stat" in name
        self.size = 2 if self.dtype == "bfloat16" else 4
        self.whole, self.wide = vector(I32, 16), vector(I64, 8)
        self.recent = cgutils.alloca_once(builder, self.whole)
        builder.store(constant(self.whole, 0), self.recent)
        self.squares = [cgutils.alloca_once(builder, self.wide) for _ in range(2)]
        self.spare = cgutils.alloca_once(builder, vector(I8, 16 * self.size))
        self.is_whole = builder.icmp_signed("==", self.lanes, I64(16))
        self.scale = None
        if self.dtype != "int32" and not self.by_row:
            self.scale = load(builder, self.scales, vector(F32, 16))

    def write(self) -> None:
        builder = self.builder
        places = [builder.add(self.statistics, I64(128 + 64 * i)) for i in range(2)]
        if self.sums_up:
            for square, place in zip(self.squares, places, strict=True):
                builder.store(load(builder, place, self.wide), square)
        quarter = builder.lshr(builder.add(self.rows, I64(3)), I64(2))
        with cgutils.for_range(builder, quarter, intp=I64) as loop:
            for i in range(4):  # so many sums of 16,000 products fit in int32
                self._row(builder.add(builder.shl(loop.index, I64(2)), I64(i)))
            if self.sums_up:
                self._flush()
        if self.sums_up:
            for square, place in zip(self.squares, places, strict=True):
                store(builder, builder.load(square), place)

    def _row(self, row: Any) -> None:
        builder = self.builder
        if self.step is not None:
            self._write_row(row, builder.mul(row, self.step))
            return
        offset = load(builder, builder.add(self.offsets, builder.shl(row, I64(3))), I64, 8)
        with builder.if_then(builder.icmp_signed(">=", offset, I64(0)), likely=True):
            self._write_row(row, offset)

    def _write_row(self, row: Any, offset: Any) -> None:
        builder = self.builder
        place = builder.add(self.sums, builder.mul(row, self.sums_step))
        sums, scale = load(builder, place, self.whole), self.scale
        if self.by_row:
            place = builder.add(self.scales, builder.shl(row, I64(2)))
            scale = splat(builder, load(builder, place, F32), 16)
        self._store(self._result(sums, scale), builder.add(self.out, offset))
        if self.sums_up:
            builder.store(builder.add(builder.load(self.recent), sums), self.recent)
            self._square(builder.bitcast(sums, self.wide))

    def _result(self, sums: Any, scale: Any) -> Any:
        builder, whole = self.builder, self.whole
        if self.dtype == "int32":
            return sums
        value = builder.fmul(builder.sitofp(sums, vector(F32, 16)), scale)
        if self.dtype == "float32":
            return value
        if has_bfloat16():
            return Vector(builder, value).bfloat16().value
        bits = builder.bitcast(value, whole)  # sums times 2**-126 or more: 0, or not small
        odd = builder.and_(builder.lshr(bits, constant(whole, 16)), constant(whole, 1))
        nearest = builder.add(builder.add(bits, constant(whole, 0x7FFF)), odd)
        return builder.trunc(builder.lshr(nearest, constant(whole, 16)), vector(I16, 16))

    def _store(self, value: Any, place: Any) -> None:
        builder = self.builder
        if self.step is not None:
            store(builder, value, place)
            return
        with builder.if_else(self.is_whole, likely=True) as (all_lanes, some):
            with all_lanes:
                store(builder, value, place)
            with some:
                if has_avx512():
                    ones = builder.sub(builder.shl(I64(1), self.lanes), I64(1))
                    mask = builder.bitcast(builder.trunc(ones, I16), vector(I1, 16))
                    pointer = builder.inttoptr(place, value.type.element.as_pointer())
                    Vector(builder, value).store(pointer, Vector(builder, mask))
                    return
                start = builder.ptrtoint(self.spare, I64)
                store(builder, value, start)
                with cgutils.for_range(builder, self.lanes, intp=I64) as loop:
                    at = builder.mul(loop.index, I64(self.size))
                    lane = load(builder, builder.add(start, at), ir.IntType(8 * self.size))
                    store(builder, lane, builder.add(place, at))

    def _square(self, pairs: Any) -> None:
        builder, half = self.builder, constant(self.wide, 32)
        even = builder.ashr(builder.shl(pairs, half), half)
        for total, value in zip(self.squares, (even, builder.ashr(pairs, half)), strict=True):
            builder.store(builder.add(builder.load(total), builder.mul(value, value)), total)

    def _flush(self) -> None:
        builder, recent = self.builder, self.builder.load(self.recent)
        for i in range(2):
            lanes = shuffle(builder, recent, None, list(range(8 * i, 8 * i + 8)))
            place = builder.add(self.statistics, I64(64 * i))
            total = builder.add(load(builder, place, self.wide), builder.sext(lanes, self.wide))
            store(builder, total, place)
        builder.store(constant(self.whole, 0), self.recent)


configure = addressed(1, _configure)
release = addressed(1, _release)
come = addressed(2, _come)
come_for_writing = addressed(3, _come_for_writing)
interleave = addressed(3, _interleave)
interleave_masked = addressed(6, _interleave_masked)
transpose = addressed(4, _transpose)
transpose_floats = addressed(4, _transpose_floats)
sum_columns = addressed(3, _sum_columns)
add_doubles = addressed(2, _add_doubles)
add_scaled = addressed(5, _add_scaled)
scale_doubles = addressed(3, _scale_doubles)
copy = addressed(3, _copy(False))
copy_flipped = addressed(3, _copy(True))
blank = addressed(3, _blank)
emit = addressed(9, _emit)
emit_rows = addressed(8, _emit_rows)
