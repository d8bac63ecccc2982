"""Few-bit codes in Numba, a tile of 1,024 elements at a time, on LLVM vectors of 16 columns.

How a code is found is in ``llvm/lookup.py``. Each kernel is compiled twice from one definition, serial
and parallel: a parallel region costs more than it gains on small tensors. Kernels take addresses:
making arrays of tensors takes a hundredth of GELU's time at 1e6 elements, as every call into torch
does that finds its code no longer in the caches.
"""

from functools import lru_cache, reduce
from operator import or_
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from torch import Tensor

from fixedpoint_kernels.few_bit import reference
from fixedpoint_kernels.few_bit.formulas import formula_of, value_of
from fixedpoint_kernels.few_bit.fused import ONE_PASS as PASSES
from fixedpoint_kernels.few_bit.fused import Fused
from fixedpoint_kernels.few_bit.table import Table
from fixedpoint_kernels.llvm.arrays import view
from fixedpoint_kernels.llvm.entries import coder, entries_of
from fixedpoint_kernels.llvm.lookup import (
    LANES,
    choose,
    encoding_of,
    indexed,
    looked_up,
    permuted,
    position,
    search,
    splats,
    unzipped,
)
from fixedpoint_kernels.llvm.vectors import I32, Vector, has_avx512, intrinsic, prefetch
from fixedpoint_kernels.threads import compile_both, is_parallel

_TILE, _ROWS, _COLUMNS = 1024, 32, 32
ONE_PASS = PASSES["cpu"]
_ROWS_AHEAD = 64  # that are brought to the cache: two tiles, as many pages
_MOST_UNROLLED = 2  # rows whose words of codes are in registers
_AT_ONCE = 4  # rows that no loop parts: LLVM reads tables once for them that are in no register
_PERMUTED_BITS = 4  # whose levels are in registers; more come from memory


def _data(context, builder, signature, args, i):
    return context.make_array(signature.args[i])(context, builder, args[i]).data


def _element(builder, tile, row, column):
    offset = builder.mul(row, ir.Constant(row.type, _COLUMNS))
    return builder.gep(tile, [builder.add(offset, ir.Constant(row.type, column))])


def _field(bits):
    """Return the bits that a code takes in a word of codes, before they are made planes."""
    return 1 << (bits - 1).bit_length()


def _every(field, first=0):
    """Return a word with every ``field``-th bit set."""
    return sum(1 << at for at in range(first, 32, field))


def _moved(word, places):
    return word << places if places >= 0 else word >> -places


def _in_places(builder, values):
    """Return a pointer to places that hold ``values``; LLVM keeps them in registers if it can."""
    places = cgutils.alloca_once(builder, values[0].type, size=len(values))
    for i, value in enumerate(values):
        builder.store(value, builder.gep(places, [ir.Constant(I32, i)]))
    return places


def _for_each_row(builder, index, field, body):
    """Call ``body`` for each row of a tile with its number, and that of its word of codes."""
    is_unrolled = field <= _MOST_UNROLLED
    step = _AT_ONCE if is_unrolled else field
    with cgutils.for_range(builder, ir.Constant(index, _ROWS // step)) as loop:
        first = builder.mul(loop.index, ir.Constant(index, step))
        if is_unrolled:
            for i in range(step):
                body(builder.add(first, ir.Constant(index, i)), ir.Constant(index, i % field))
        else:
            with cgutils.for_range(builder, ir.Constant(index, field)) as inner:
                body(builder.add(first, inner.index), inner.index)


def _fetch_row(builder, tile, row, *, writes=False):
    """Bring a row of a later tile to the cache; beyond the last it does nothing."""
    ahead = builder.add(row, ir.Constant(row.type, _ROWS_AHEAD))
    for column in range(0, _COLUMNS, LANES):
        prefetch(builder, _element(builder, tile, ahead, column), writes=writes)


def _coder(context, builder, kinds, given):
    """Return what appends the code of a vector's lanes in their lowest bits; above lies anything.

    Registers are filled here, once a tile: LLVM does not know that values overwrite no table.
    """
    parts = []
    for kind, part in zip(kinds[0], cgutils.unpack_tuple(builder, given[0]), strict=True):
        if isinstance(kind, types.Array):
            parts.append(context.make_array(kind)(context, builder, part).data)
        else:
            parts.append(Vector.splat(builder, part, LANES))
    if isinstance(kinds[0][0], types.Array):
        if len(parts) < 3:
            return coder(builder, parts, of_magnitudes=kinds[0][0].dtype == types.int32)
        if len(parts) == 3:
            return lambda x: search(x, *parts)
        if len(parts) == 4:
            return lambda x: indexed(x, *parts)
        tables = unzipped([Vector.load(builder, part, LANES) for part in parts[:-3]])
        return lambda x: permuted(x, tables, *parts[-3:])
    members = splats(builder, given[1])

    def code(x):
        number = position(x, parts)
        first, *others = [own >> number for own in members]
        word = first & 1 if others else first
        for bit, is_set in enumerate(others, 1):
            word = word | ((is_set & 1) << bit)
        return word

    return code


@intrinsic
def _encode_tile(_context, x, at, pieces, members, words, formula, y):
    """Write the words of the tile that starts at ``x[at]``, and with a formula its values.

    x and y (n,) float32; pieces and members: see ``encoding_of``; words (bits * _COLUMNS,) int32;
    formula: ``formula_of``, or (). Of a column's 32 codes, each ``field``-th goes to the same
    word of codes. The bits of those words then make the planes.
    """
    signature = types.void(x, at, pieces, members, words, formula, y)
    bits, field = len(members), _field(len(members))
    columns = range(0, _COLUMNS, LANES)

    def codegen(context, builder, signature, args):
        source = builder.gep(_data(context, builder, signature, args, 0), [args[1]])
        target = _data(context, builder, signature, args, 4)
        values_at = builder.gep(_data(context, builder, signature, args, 6), [args[1]])
        code = _coder(context, builder, (pieces, members), args[2:4])
        zeros = [ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)] * field
        packed = [_in_places(builder, zeros) for _ in columns]

        def encode_row(row, r):
            _fetch_row(builder, source, row)
            if len(formula):
                _fetch_row(builder, values_at, row, writes=True)
            for column, own in zip(columns, packed, strict=True):
                values = Vector.load(builder, _element(builder, source, row, column), LANES)
                if len(formula):
                    value = value_of(values, splats(builder, args[5]))
                    value.store(_element(builder, values_at, row, column))
                place = builder.gep(own, [r])
                word = Vector(builder, builder.load(place)).pushed(code(values), field)
                builder.store(word.value, place)

        _for_each_row(builder, args[1].type, field, encode_row)
        for column, own in zip(columns, packed, strict=True):
            places = [builder.gep(own, [ir.Constant(I32, r)]) for r in range(field)]
            codes = [Vector(builder, builder.load(place)) for place in places]
            for bit in range(bits):
                planes = [_moved(code, r - bit) & _every(field, r) for r, code in enumerate(codes)]
                at_plane = ir.Constant(I32, _COLUMNS * bit + column)
                reduce(or_, planes).store(builder.gep(target, [at_plane]))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def _decode_tile(_context, grad, at, words, bits, levels, out):
    """Multiply the tile of ``grad`` that starts at ``grad[at]`` by its levels.

    grad and out (n,) float32; words as ``_encode_tile`` writes them; bits, any tuple of that
    length; levels, 2**bits float32: a tuple, or an array; or an array of 16, each level as often as
    it fits in, for AVX-512.
    """
    signature = types.void(grad, at, words, bits, levels, out)
    field = _field(len(bits))

    def codegen(context, builder, signature, args):
        arguments = context, builder, signature, args
        source = builder.gep(_data(*arguments, 0), [args[1]])
        planes_at = _data(*arguments, 2)
        target = builder.gep(_data(*arguments, 5), [args[1]])
        columns, packed = range(0, _COLUMNS, LANES), []
        for column in columns:
            indices = [ir.Constant(I32, _COLUMNS * i + column) for i in range(len(bits))]
            planes = [Vector.load(builder, builder.gep(planes_at, [i]), LANES) for i in indices]
            codes = [
                reduce(or_, [_moved(p, b - r) & _every(field, b) for b, p in enumerate(planes)])
                for r in range(field)
            ]
            packed.append(_in_places(builder, [code.value for code in codes]))

        def decode_row(row, r):
            _fetch_row(builder, source, row)
            _fetch_row(builder, target, row, writes=True)
            for column, own in zip(columns, packed, strict=True):
                values = Vector.load(builder, _element(builder, source, row, column), LANES)
                place = builder.gep(own, [r])
                word = Vector(builder, builder.load(place))
                builder.store((word >> field).value, place)
                level = _level(context, builder, word, (bits, levels), args[4])
                zero = level.constant(0.0)
                is_zero = Vector(builder, builder.fcmp_ordered("==", level.value, zero.value))
                product = is_zero.where(zero, values * level)
                product.store(_element(builder, target, row, column))

        _for_each_row(builder, args[1].type, field, decode_row)
        return context.get_dummy_value()

    return signature, codegen


def _level(context, builder, word, kinds, given):
    """Return the level of the code in the lowest bits of each lane."""
    bits, levels = kinds
    if isinstance(levels, types.BaseTuple):
        conditions = [_nonzero(word & (1 << bit)) for bit in range(len(bits))]
        return choose(conditions[::-1], splats(builder, given))
    data = context.make_array(levels)(context, builder, given).data
    if len(bits) <= _PERMUTED_BITS:
        return Vector.load(builder, data, LANES).entry(word)
    return looked_up(data, word & ((1 << len(bits)) - 1))


def _nonzero(x):
    return Vector(x.builder, x.builder.icmp_unsigned("!=", x.value, x.constant(0).value))


def _encode(address, n, pieces, members, address_of_words, formula, address_of_y):
    # x and y (n,) float32; words (tiles * bits * _COLUMNS,) int32; the others: see _encode_tile
    width, tiles = len(members) * _COLUMNS, (n + _TILE - 1) // _TILE
    x = view(address, n, np.float32)
    y = view(address_of_y, n, np.float32)
    words = view(address_of_words, tiles * width, np.int32)
    for tile in prange(tiles):
        start, own = tile * _TILE, words[tile * width : (tile + 1) * width]
        if start + _TILE <= x.size:
            _encode_tile(x, start, pieces, members, own, formula, y)
        else:
            padded, values = np.full(_TILE, -np.inf, np.float32), np.empty(_TILE, np.float32)
            padded[: x.size - start] = x[start:]
            _encode_tile(padded, 0, pieces, members, own, formula, values)
            if len(formula):
                y[start:] = values[: x.size - start]


def _decode(address, n, address_of_words, bits, levels, address_of_out):
    # grad and out (n,) float32; words as above; the others: see _decode_tile
    width, tiles = len(bits) * _COLUMNS, (n + _TILE - 1) // _TILE
    grad = view(address, n, np.float32)
    out = view(address_of_out, n, np.float32)
    words = view(address_of_words, tiles * width, np.int32)
    for tile in prange(tiles):
        start, own = tile * _TILE, words[tile * width : (tile + 1) * width]
        if start + _TILE <= grad.size:
            _decode_tile(grad, start, own, bits, levels, out)
        else:
            padded, result = np.zeros(_TILE, np.float32), np.empty(_TILE, np.float32)
            padded[: grad.size - start] = grad[start:]
            _decode_tile(padded, 0, own, bits, levels, result)
            out[start:] = result[: grad.size - start]


_encode_serial, _encode_parallel = compile_both(_encode)
_decode_serial, _decode_parallel = compile_both(_decode)


@lru_cache(maxsize=256)
def _encoding(table: Table) -> tuple[Any, Any]:
    """Return the ``pieces`` and ``members`` of ``_encode_tile``."""
    entries = entries_of(table)
    return (entries, (0,) * table.bits) if entries else encoding_of(table)


@lru_cache(maxsize=256)
def _decoding(table: Table) -> tuple[Any, Any]:
    """Return what ``_decode`` wants: a tuple of ``bits`` numbers, and the levels."""
    levels = table.levels
    if table.bits > _PERMUTED_BITS:
        return (0,) * table.bits, levels
    if has_avx512():
        return (0,) * table.bits, np.tile(levels, LANES // len(levels))
    return (0,) * table.bits, tuple(levels)


def encode(x: Tensor, planes: Tensor, table: Table) -> None:
    """See ``fixedpoint_kernels.few_bit.operators.encode``; ``x`` is contiguous."""
    x, n = x if x.dtype is torch.float32 else x.float(), x.numel()
    kernel = _encode_parallel if is_parallel(n) else _encode_serial
    kernel(x.data_ptr(), n, *_encoding(table), planes.data_ptr(), (), 0)


def value_and_encode(x: Tensor, y: Tensor, planes: Tensor, table: Table, fused: Fused) -> None:
    """See ``fixedpoint_kernels.few_bit.operators.value_and_encode``; ``x`` is contiguous float32."""
    n, formula = x.numel(), formula_of(fused)
    kernel = _encode_parallel if is_parallel(n) else _encode_serial
    kernel(x.data_ptr(), n, *_encoding(table), planes.data_ptr(), formula, y.data_ptr())


def decode(grad: Tensor, planes: Tensor, out: Tensor, table: Table) -> None:
    """See ``fixedpoint_kernels.few_bit.operators.decode``; all are contiguous."""
    if torch.float64 in (grad.dtype, out.dtype):
        reference.decode(grad, planes, out, table)
        return
    grad, n = grad if grad.dtype is torch.float32 else grad.float(), grad.numel()
    result = out if out.dtype is torch.float32 else torch.empty_like(out, dtype=torch.float32)
    kernel = _decode_parallel if is_parallel(n) else _decode_serial
    kernel(grad.data_ptr(), n, planes.data_ptr(), *_decoding(table), result.data_ptr())
    if result is not out:
        out.copy_(result)
