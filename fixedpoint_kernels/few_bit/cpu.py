"""Few-bit codes in Numba, a tile of 1,024 elements at a time, on LLVM vectors of 16 columns.

How a code is found is in ``llvm/lookup.py``. Each kernel is compiled twice from one definition, serial
and parallel: a parallel region costs more than it gains on small tensors. Kernels take addresses:
making arrays of tensors takes a hundredth of GELU's time at 1e6 elements, as every call into torch
does that finds its code no longer in the caches.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, prange, types
from numba.core import cgutils
from torch import Tensor

from fixedpoint_kernels.few_bit import reference
from fixedpoint_kernels.few_bit.table import Table
from fixedpoint_kernels.llvm.lookup import (
    LANES,
    choose,
    encoding_of,
    indexed,
    joined,
    looked_up,
    permuted,
    position,
    search,
    splats,
)
from fixedpoint_kernels.llvm.vectors import I32, Vector, intrinsic, pointer_to
from fixedpoint_kernels.threads import compile_both, is_parallel

_TILE, _ROWS, _COLUMNS = 1024, 32, 32
_MOST_LEVELS = 16  # in registers; more come from memory


def _nonzero(x):
    return Vector(x.builder, x.builder.icmp_unsigned("!=", x.value, x.constant(0).value))


def _row_bit(builder, row):
    one = builder.shl(ir.Constant(I32, 1), builder.trunc(row, I32))
    return Vector.splat(builder, one, LANES)


def _element(builder, tile, row, column):
    offset = builder.mul(row, ir.Constant(row.type, _COLUMNS))
    return builder.gep(tile, [builder.add(offset, ir.Constant(row.type, column))])


def _data(context, builder, signature, args, i):
    return context.make_array(signature.args[i])(context, builder, args[i]).data


def _code_bits(context, builder, x, kinds, given):
    """Return a vector for each bit of the codes; the lowest bit of each lane is it."""
    parts = []
    for kind, part in zip(kinds[0], cgutils.unpack_tuple(builder, given[0]), strict=True):
        if isinstance(kind, types.Array):
            parts.append(context.make_array(kind)(context, builder, part).data)
        else:
            parts.append(Vector.splat(builder, part, LANES))
    sets = splats(builder, given[1])
    if not isinstance(kinds[0][0], types.Array):
        number = position(x, parts)
        return [members_of_bit >> number for members_of_bit in sets]
    if len(parts) == 3:
        code = search(x, *parts)
    elif len(parts) == 4:
        code = indexed(x, *parts)
    else:
        registers = [Vector.load(builder, part, LANES) for part in parts[:-3]]
        code = permuted(x, registers, *parts[-3:])
    return [code >> bit for bit in range(len(sets))]


@intrinsic
def _encode_tile(_context, x, at, pieces, members, words):
    """Write the words of the tile that starts at ``x[at]``.

    x (n,) float32; pieces and members: see ``encoding_of``; words (bits * _COLUMNS,) int32.
    """
    signature = types.void(x, at, pieces, members, words)

    def codegen(context, builder, signature, args):
        source = builder.gep(_data(context, builder, signature, args, 0), [args[1]])
        target = _data(context, builder, signature, args, 4)
        zero = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
        columns = range(0, _COLUMNS, LANES)
        planes = [cgutils.alloca_once(builder, zero.type) for _ in [*columns] * len(members)]
        for plane in planes:
            builder.store(zero, plane)
        with cgutils.for_range(builder, ir.Constant(args[1].type, _ROWS)) as loop:
            for h, column in enumerate(columns):
                values = Vector.load(builder, _element(builder, source, loop.index, column), LANES)
                bits = _code_bits(context, builder, values, (pieces, members), args[2:4])
                for plane, bit in zip(planes[h::2], bits, strict=True):
                    word = Vector(builder, builder.load(plane))
                    builder.store(word.pushed(bit).value, plane)
        for i, plane in enumerate(planes):
            at_plane = builder.gep(target, [ir.Constant(I32, LANES * i)])
            Vector(builder, builder.load(plane)).store(at_plane)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def _decode_tile(_context, grad, at, words, bits, levels, out):
    """Multiply the tile of ``grad`` that starts at ``grad[at]`` by its levels.

    grad and out (n,) float32; words as ``_encode_tile`` writes them; bits, any tuple of that
    length; levels, 2**bits float32: a tuple, or an array.
    """
    signature = types.void(grad, at, words, bits, levels, out)

    def codegen(context, builder, signature, args):
        arguments = context, builder, signature, args
        source = builder.gep(_data(*arguments, 0), [args[1]])
        packed = _data(*arguments, 2)
        target = builder.gep(_data(*arguments, 5), [args[1]])
        for column in range(0, _COLUMNS, LANES):
            indices = [ir.Constant(I32, _COLUMNS * i + column) for i in range(len(bits))]
            planes = [Vector.load(builder, builder.gep(packed, [i]), LANES) for i in indices]
            with cgutils.for_range(builder, ir.Constant(args[1].type, _ROWS)) as loop:
                values = Vector.load(builder, _element(builder, source, loop.index, column), LANES)
                row = _row_bit(builder, loop.index)
                conditions = [_nonzero(plane & row) for plane in planes]
                if isinstance(levels, types.BaseTuple):
                    level = choose(conditions[::-1], splats(builder, args[4]))
                else:
                    level = looked_up(_data(*arguments, 4), joined(conditions))
                zero = level.constant(0.0)
                is_zero = Vector(builder, builder.fcmp_ordered("==", level.value, zero.value))
                product = is_zero.where(zero, values * level)
                product.store(_element(builder, target, loop.index, column))
        return context.get_dummy_value()

    return signature, codegen


def _encode(address, n, pieces, members, address_of_words):
    # x (n,) float32; words (tiles * bits * _COLUMNS,) int32; the others: see encoding_of
    width, tiles = len(members) * _COLUMNS, (n + _TILE - 1) // _TILE
    x = carray(pointer_to(address), n, np.float32)
    words = carray(pointer_to(address_of_words), tiles * width, np.int32)
    for tile in prange(tiles):
        start, own = tile * _TILE, words[tile * width : (tile + 1) * width]
        if start + _TILE <= x.size:
            _encode_tile(x, start, pieces, members, own)
        else:
            padded = np.full(_TILE, -np.inf, np.float32)
            padded[: x.size - start] = x[start:]
            _encode_tile(padded, 0, pieces, members, own)


def _decode(address, n, address_of_words, bits, levels, address_of_out):
    # grad and out (n,) float32; words as above; the others: see _decode_tile
    width, tiles = len(bits) * _COLUMNS, (n + _TILE - 1) // _TILE
    grad = carray(pointer_to(address), n, np.float32)
    out = carray(pointer_to(address_of_out), n, np.float32)
    words = carray(pointer_to(address_of_words), tiles * width, np.int32)
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


_encoding = lru_cache(maxsize=256)(encoding_of)


@lru_cache(maxsize=256)
def _decoding(table: Table) -> tuple[Any, Any]:
    """Return what ``_decode`` wants: a tuple of ``bits`` numbers, and the levels."""
    in_registers = len(table.levels) <= _MOST_LEVELS
    return (0,) * table.bits, tuple(table.levels) if in_registers else table.levels


def encode(x: Tensor, planes: Tensor, table: Table) -> None:
    """See ``fixedpoint_kernels.few_bit.operators.encode``; ``x`` is contiguous."""
    x, n = x if x.dtype is torch.float32 else x.float(), x.numel()
    kernel = _encode_parallel if is_parallel(n) else _encode_serial
    kernel(x.data_ptr(), n, *_encoding(table), planes.data_ptr())


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
