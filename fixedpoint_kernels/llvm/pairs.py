"""The inner loop of products on processors without VNNI, as a Numba intrinsic: AVX2 alone.

``vpmaddwd`` multiplies pairs of int16 and adds them to int32, exactly. So a row's four bytes become
the even and the odd ones, each as int16, and so do the columns'; see ``tiles`` for how both lie.
Codes of few bits need none of that: ``vpmaddubsw`` multiplies pairs of bytes and adds them to int16,
exactly where they fit, and so do the sums of several steps. So fewer bits take less time.
"""

from collections.abc import Callable
from typing import Any

from numba.core import cgutils

from fixedpoint_kernels.llvm.tiles import (
    I8,
    I16,
    I32,
    I64,
    addressed,
    call,
    constant,
    load,
    runs_of,
    splat,
    store,
    vector,
)

__all__ = ["pairs_tile"]

_LANES = 8  # int32 of one register
_WHOLE, _HALVES, _BYTES = (vector(*kind) for kind in ((I32, 8), (I16, 16), (I8, 32)))
_PIECES = 16 // _LANES
_AT_ONCE = 2  # steps that are added up in int16; four took as long


def pairs_tile(rows: int, times: int) -> Any:
    """Return the tile of 16 columns: bytes of ``a`` are unsigned, those of ``b`` signed.

    Args:
        rows: Of ``a`` at once, in registers.
        times: How often so many.
    """

    def body(  # noqa: PLR0913
        builder, kind, a, _firsts, step, runs, count, b, group, begin, begin_step, out, out_step
    ):
        def places(start, row_step):
            for m in range(rows):
                first = builder.add(start, builder.mul(row_step, I64(m)))
                yield from (builder.add(first, I64(4 * _LANES * j)) for j in range(_PIECES))

        totals = [cgutils.alloca_once(builder, _WHOLE) for _ in range(rows * _PIECES)]

        def add_all(steps: Callable[..., None], at: int) -> None:
            # what is all added to one place is so once
            is_one = builder.icmp_signed("==", out_step, I64(0))
            turns = builder.select(is_one, I64(1), I64(times))
            with cgutils.for_range(builder, turns, intp=I64) as turn:
                row = builder.mul(turn.index, I64(rows))
                begins = builder.add(begin, builder.mul(row, begin_step))
                for total, place in zip(totals, places(begins, begin_step), strict=True):
                    builder.store(load(builder, place, _WHOLE), total)
                own = builder.add(a, builder.mul(row, step))
                for first, length, column in runs_of(builder, runs, count, b, 64):
                    start = builder.add(own, first)
                    firsts = [builder.add(start, builder.mul(step, I64(m))) for m in range(rows)]
                    whole = builder.and_(length, I64(-at))
                    with cgutils.for_range_slice(builder, I64(0), whole, I64(at), I64) as (i, _):
                        steps(builder, totals, firsts, column, i, at)
                    if at > 1:
                        with cgutils.for_range_slice(builder, whole, length, I64(1), I64) as (i, _):
                            steps(builder, totals, firsts, column, i, 1)
                outs = builder.add(out, builder.mul(row, out_step))
                for total, place in zip(totals, places(outs, out_step), strict=True):
                    store(builder, builder.load(total), place)

        held = builder.lshr(kind, I64(1))
        some = builder.icmp_signed(">=", held, I64(1))
        with builder.if_else(some, likely=True) as (fit, wide):
            with fit:
                several = builder.icmp_signed(">=", held, I64(_AT_ONCE))
                with builder.if_else(several, likely=True) as (more, one):
                    with more:
                        add_all(_in_int16, _AT_ONCE)
                    with one:
                        add_all(_in_int16, 1)
            with wide:
                add_all(_in_int32, 1)

    return addressed(12, body)


def _in_int32(builder: Any, totals: list, firsts: list, column: Any, i: Any, _at: int) -> None:
    """Add a step of any bytes."""
    place = builder.add(column, builder.shl(i, I64(6)))
    columns = [
        _signed_halves(builder, builder.add(place, I64(4 * _LANES * j))) for j in range(_PIECES)
    ]
    depth = builder.shl(i, I64(2))
    for m, first in enumerate(firsts):
        row = _unsigned_halves(builder, builder.add(first, depth))
        for j, column_halves in enumerate(columns):
            parts = [
                call(builder, "x86.avx2.pmadd.wd", _WHOLE, x, y)
                for x, y in zip(row, column_halves, strict=True)
            ]
            _add(builder, totals[m * _PIECES + j], builder.add(*parts))


def _in_int16(builder: Any, totals: list, firsts: list, column: Any, i: Any, at: int) -> None:
    """Add ``at`` steps whose sums int16 holds."""
    place = builder.add(column, builder.shl(i, I64(6)))
    columns = [
        load(builder, builder.add(place, I64(4 * _LANES * j)), _BYTES, 32)
        for j in range(_PIECES * at)
    ]
    depth = builder.shl(i, I64(2))
    for m, first in enumerate(firsts):
        sums: list[Any] = [None] * _PIECES
        for k in range(at):
            source = builder.add(builder.add(first, depth), I64(4 * k))
            row = builder.bitcast(splat(builder, load(builder, source, I32), _LANES), _BYTES)
            for j in range(_PIECES):
                pairs = call(
                    builder, "x86.avx2.pmadd.ub.sw", _HALVES, row, columns[k * _PIECES + j]
                )
                sums[j] = pairs if k == 0 else builder.add(sums[j], pairs)
        for j, pairs in enumerate(sums):
            ones = constant(_HALVES, 1)
            _add(
                builder,
                totals[m * _PIECES + j],
                call(builder, "x86.avx2.pmadd.wd", _WHOLE, pairs, ones),
            )


def _add(builder: Any, total: Any, value: Any) -> None:
    builder.store(builder.add(builder.load(total), value), total)


def _signed_halves(builder: Any, address: Any) -> tuple[Any, Any]:
    """Read bytes; return the even and the odd ones as int16."""
    both, up = load(builder, address, _HALVES, 32), constant(_HALVES, 8)
    return builder.ashr(builder.shl(both, up), up), builder.ashr(both, up)


def _unsigned_halves(builder: Any, address: Any) -> tuple[Any, Any]:
    """Read four bytes; return the even and the odd ones as int16, in all lanes."""
    both = builder.bitcast(splat(builder, load(builder, address, I32), _LANES), _HALVES)
    return builder.and_(both, constant(_HALVES, 255)), builder.lshr(both, constant(_HALVES, 8))
