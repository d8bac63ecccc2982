"""Few-bit codes in Numba, a tile of 1,024 elements at a time, on LLVM vectors of 16 columns.

Up to 31 borders, an element's piece is found by a tree of selections in registers, and each bit of
its code is a bit of one 32-bit number: nothing is looked up in memory. With more borders, a binary
search. Each kernel is compiled twice from one definition, serial and parallel: a parallel region
costs more than it gains on small tensors.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from fixedpoint_kernels.few_bit import reference
from fixedpoint_kernels.few_bit.table import Table, steps_of
from fixedpoint_kernels.threads import compile_both, is_parallel
from fixedpoint_kernels.vectors import I32, Vector

_TILE, _ROWS, _COLUMNS = 1024, 32, 32
_LANES = 16
_MOST_BORDERS = 31  # in registers; more come from memory
_MOST_LEVELS = 16  # the same


def _splats(builder, values):
    return [Vector.splat(builder, value, _LANES) for value in cgutils.unpack_tuple(builder, values)]


def _choose(conditions, candidates):
    """Select one of ``2**len(conditions)`` candidates; the first condition is the highest bit."""
    for condition in conditions:
        half = len(candidates) // 2
        pairs = zip(candidates[half:], candidates[:half], strict=True)
        candidates = [condition.where(yes, no) for yes, no in pairs]
    return candidates[0]


def _position(x, borders):
    """Return the number of borders below each lane of ``x``, of 1, 3, 7, 15 or 31 borders."""
    conditions = []
    step = len(borders) + 1
    while step > 1:
        conditions.append(x > _choose(conditions, borders[step // 2 - 1 :: step]))
        step //= 2
    return _joined(conditions[::-1])


def _joined(conditions):
    """Return the number in each lane whose bits are ``conditions``, the lowest first."""
    builder = conditions[0].builder
    number = Vector.splat(builder, ir.Constant(I32, 0), _LANES)
    for i, condition in enumerate(conditions):
        number = condition.where(number | (1 << i), number)
    return number


def _search(x, borders, codes, steps):
    """Return the code of each lane of ``x``, from ``2**steps - 1`` borders in memory."""
    builder, index = x.builder, Vector.splat(x.builder, ir.Constant(I32, 0), _LANES)
    at = cgutils.alloca_once_value(builder, index.value)
    steps = builder.trunc(steps, I32)
    with cgutils.for_range(builder, steps) as loop:
        shift = builder.sub(builder.sub(steps, loop.index), ir.Constant(I32, 1))
        half = Vector.splat(builder, builder.shl(ir.Constant(I32, 1), shift), _LANES)
        index = Vector(builder, builder.load(at))
        above = x > _looked_up(borders, index + half - 1)
        builder.store(above.where(index + half, index).value, at)
    return _looked_up(codes, Vector(builder, builder.load(at)))


def _looked_up(pointer, index):
    """Read ``pointer[index]`` for each lane."""
    builder = index.builder
    found = ir.Constant(ir.VectorType(pointer.type.pointee, _LANES), ir.Undefined)
    for lane in (ir.Constant(I32, i) for i in range(_LANES)):
        element = builder.load(builder.gep(pointer, [builder.extract_element(index.value, lane)]))
        found = builder.insert_element(found, element, lane)
    return Vector(builder, found)


def _nonzero(x):
    return Vector(x.builder, x.builder.icmp_unsigned("!=", x.value, x.constant(0).value))


def _row_bit(builder, row):
    one = builder.shl(ir.Constant(I32, 1), builder.trunc(row, I32))
    return Vector.splat(builder, one, _LANES)


def _data(context, builder, signature, args, i):
    return context.make_array(signature.args[i])(context, builder, args[i]).data


@intrinsic
def _encode_columns(_context, x, at, borders, codes, members, words, word):
    """Write the words of ``_LANES`` columns whose first elements start at ``x[at]``.

    x (n,) float32; borders, 2**k - 1 float32: a tuple, or an array, then with codes (2**k,) int32
    and k before them; members, a uint32 for each bit of the codes: in which pieces it is set, or
    its place in the codes; words: ``words[word]`` on, bit planes ``_COLUMNS`` apart.
    """
    signature = types.void(x, at, borders, codes, members, words, word)

    def codegen(context, builder, signature, args):
        arguments = context, builder, signature, args
        source = builder.gep(_data(*arguments, 0), [args[1]])
        target = builder.gep(_data(*arguments, 5), [args[6]])
        sets = _splats(builder, args[4])
        zero = ir.Constant(ir.VectorType(I32, _LANES), [0] * _LANES)
        planes = [cgutils.alloca_once_value(builder, zero) for _ in sets]
        for plane in planes:
            builder.store(zero, plane)
        with cgutils.for_range(builder, ir.Constant(args[1].type, _ROWS)) as loop:
            offset = builder.mul(loop.index, ir.Constant(loop.index.type, _COLUMNS))
            values = Vector.load(builder, builder.gep(source, [offset]), _LANES)
            if codes == types.none:
                position = _position(values, _splats(builder, args[2]))
                found = Vector(builder, builder.shl(position.constant(1).value, position.value))
            else:
                table, steps = cgutils.unpack_tuple(builder, args[3])
                table = context.make_array(signature.args[3][0])(context, builder, table).data
                found = _search(values, _data(*arguments, 2), table, steps)
            bit = _row_bit(builder, loop.index)
            for plane, members_of_bit in zip(planes, sets, strict=True):
                word = Vector(builder, builder.load(plane))
                marked = _nonzero(found & members_of_bit).where(word | bit, word)
                builder.store(marked.value, plane)
        for i, plane in enumerate(planes):
            at_plane = builder.gep(target, [ir.Constant(I32, _COLUMNS * i)])
            Vector(builder, builder.load(plane)).store(at_plane)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def _decode_columns(_context, grad, at, words, word, bits, levels, out):
    """Multiply ``_LANES`` columns of ``grad`` by their levels.

    grad and out (n,) float32; words as ``_encode_columns`` writes them; bits, any tuple of that
    length; levels, 2**bits float32: a tuple, or an array.
    """
    signature = types.void(grad, at, words, word, bits, levels, out)

    def codegen(context, builder, signature, args):
        arguments = context, builder, signature, args
        source = builder.gep(_data(*arguments, 0), [args[1]])
        packed = builder.gep(_data(*arguments, 2), [args[3]])
        target = builder.gep(_data(*arguments, 6), [args[1]])
        places = [ir.Constant(I32, _COLUMNS * i) for i in range(len(bits))]
        planes = [Vector.load(builder, builder.gep(packed, [i]), _LANES) for i in places]
        with cgutils.for_range(builder, ir.Constant(args[1].type, _ROWS)) as loop:
            offset = builder.mul(loop.index, ir.Constant(loop.index.type, _COLUMNS))
            values = Vector.load(builder, builder.gep(source, [offset]), _LANES)
            row = _row_bit(builder, loop.index)
            conditions = [_nonzero(plane & row) for plane in planes]
            if isinstance(levels, types.BaseTuple):
                level = _choose(conditions[::-1], _splats(builder, args[5]))
            else:
                level = _looked_up(_data(*arguments, 5), _joined(conditions))
            zero = level.constant(0.0)
            is_zero = Vector(builder, builder.fcmp_ordered("==", level.value, zero.value))
            is_zero.where(zero, values * level).store(builder.gep(target, [offset]))
        return context.get_dummy_value()

    return signature, codegen


@njit(inline="always")
def _encode_tile(x, start, borders, codes, members, words):
    for column in range(0, _COLUMNS, _LANES):
        _encode_columns(x, start + column, borders, codes, members, words, column)


@njit(inline="always")
def _decode_tile(grad, start, words, bits, levels, out):
    for column in range(0, _COLUMNS, _LANES):
        _decode_columns(grad, start + column, words, column, bits, levels, out)


def _encode(x, borders, codes, members, words):
    # x (n,) float32; words (tiles, bits * _COLUMNS) uint32; the others: see _encode_columns
    for tile in prange(words.shape[0]):
        start = tile * _TILE
        if start + _TILE <= x.size:
            _encode_tile(x, start, borders, codes, members, words[tile])
        else:
            padded = np.full(_TILE, -np.inf, np.float32)
            padded[: x.size - start] = x[start:]
            _encode_tile(padded, 0, borders, codes, members, words[tile])


def _decode(grad, words, bits, levels, out):
    # grad and out (n,) float32; words as above; the others: see _decode_columns
    for tile in prange(words.shape[0]):
        start = tile * _TILE
        if start + _TILE <= grad.size:
            _decode_tile(grad, start, words[tile], bits, levels, out)
        else:
            padded, result = np.zeros(_TILE, np.float32), np.empty(_TILE, np.float32)
            padded[: grad.size - start] = grad[start:]
            _decode_tile(padded, 0, words[tile], bits, levels, result)
            out[start:] = result[: grad.size - start]


_encode_serial, _encode_parallel = compile_both(_encode)
_decode_serial, _decode_parallel = compile_both(_decode)


@lru_cache(maxsize=256)
def _encoding(table: Table) -> tuple[Any, Any, Any]:
    """Return what ``_encode`` wants: borders, codes and members. Missing borders are infinite."""
    steps = steps_of(table)
    borders = np.full((1 << steps) - 1, np.inf, np.float32)
    borders[: len(table.borders)] = table.borders
    codes = np.zeros(1 << steps, np.int32)
    codes[: len(table.codes)] = table.codes
    if len(borders) > _MOST_BORDERS:
        places = tuple(np.uint32(1 << bit) for bit in range(table.bits))
        return borders, (codes, steps), places
    pieces = np.uint32(1) << np.arange(len(codes), dtype=np.uint32)
    is_set = [(codes >> bit & 1).astype(np.uint32) for bit in range(table.bits)]
    return tuple(borders), None, tuple(np.uint32((pieces * bits).sum()) for bits in is_set)


@lru_cache(maxsize=256)
def _decoding(table: Table) -> tuple[Any, Any]:
    """Return what ``_decode`` wants: a tuple of ``bits`` numbers, and the levels."""
    in_registers = len(table.levels) <= _MOST_LEVELS
    return (0,) * table.bits, tuple(table.levels) if in_registers else table.levels


def encode(x: Tensor, planes: Tensor, table: Table) -> None:
    """See ``fixedpoint_kernels.few_bit.operators.encode``; ``x`` is contiguous."""
    kernel = _encode_parallel if is_parallel(x.numel()) else _encode_serial
    words = planes.numpy().view(np.uint32).reshape(-1, table.bits * _COLUMNS)
    kernel(x.detach().view(-1).float().numpy(), *_encoding(table), words)


def decode(grad: Tensor, planes: Tensor, out: Tensor, table: Table) -> None:
    """See ``fixedpoint_kernels.few_bit.operators.decode``; all are contiguous."""
    if torch.float64 in (grad.dtype, out.dtype):
        reference.decode(grad, planes, out, table)
        return
    result = out if out.dtype is torch.float32 else torch.empty_like(out, dtype=torch.float32)
    kernel = _decode_parallel if is_parallel(grad.numel()) else _decode_serial
    words = planes.numpy().view(np.uint32).reshape(-1, table.bits * _COLUMNS)
    kernel(
        grad.detach().view(-1).float().numpy(), words, *_decoding(table), result.view(-1).numpy()
    )
    if result is not out:
        out.copy_(result)
