"""From a value to its code by AVX-512, where all borders and codes are in registers.

The axis is cut into 32 or 64 equal parts of at most one border each. One multiply-add finds the
part: it adds so large a number that the sum is rounded to a whole one, whose lowest bits are the
part's number. A permutation then finds the part's border, and another the codes beside it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.core.registry import cpu_target

from fixedpoint_kernels.few_bit.table import Table
from fixedpoint_kernels.llvm.lookup import LANES
from fixedpoint_kernels.llvm.vectors import F32, I16, I32, Vector

__all__ = ["coder", "entries_of"]

_HALF = 32  # parts in one array: what a permutation of two registers reaches
_WORDS = _HALF // 2  # of codes
_WHOLE = np.float32(1.5 * 2**23)  # floats near it are whole numbers, and end in their lowest bits
_TRIED = 128  # numbers of parts a unit
_FAR = 2**20  # parts from 0
_WIDEST, _FINEST = 2.0**120, 2.0**120  # so that parts a unit are an ordinary number
_NEAR = 2.0**-20  # of the middle of two parts: too near to tell where rounding leads
_SCALE, _OFFSET, _LOWEST, _HIGHEST = range(_HALF + _WORDS, _HALF + _WORDS + 4)


def entries_of(table: Table) -> tuple[np.ndarray, ...] | None:
    """Cut the axis into equal parts of at most one border each.

    Returns:
        One array for each 32 parts, uint32: their borders, float32, or infinity; of each part the
        codes left and right of the border, 8 bits each; then float32: parts a unit, what is added,
        the sum of the first part and that of the last. If 32 parts are too few and the table is
        the same for ``-x`` as for ``x``, one array of int32 for the magnitudes, whose borders
        are doubled as integers. ``None`` where there is no border or they are too close together, or the processor has
        no permutation of 16 bits.
    """
    borders = table.borders
    if not (_has_words() and len(borders) and 0 < float(borders[-1]) - float(borders[0]) < _WIDEST):
        return None
    found = _entries(borders, table.codes, 1)
    if not found and _is_even(table):
        middle = len(borders) // 2
        own = _entries(borders[middle:], table.codes[middle:], 1, np.float32(0))
        if own:
            own[0][:_HALF] <<= 1
            found = [own[0].view(np.int32)]
    found = found or _entries(borders, table.codes, 2)
    return tuple(found) if found else None


def _is_even(table: Table) -> bool:
    borders, codes = table.borders, table.codes
    is_even = np.array_equal(borders, -borders[::-1]) and np.array_equal(codes, codes[::-1])
    return is_even and 0 not in borders


def _entries(
    borders: np.ndarray, codes: np.ndarray, halves: int, first: np.float32 | None = None
) -> list[np.ndarray] | None:
    """Return the arrays of an axis whose first part is that of ``first``, or of the first border."""
    exact, last = borders.astype(np.float64), halves * _HALF - 1
    start = float(borders[0] if first is None else first)
    for taken in last + 0.9 - np.arange(_TRIED) / 16:
        scale = np.float32(min(taken / (exact[-1] - start), _FINEST))
        shift = np.rint(start * float(scale))
        places = exact * float(scale) - shift  # exact, or nearly
        at = np.rint(places).astype(np.int64)
        is_clear = np.abs(places - np.floor(places) - 0.5) > _NEAR
        if is_clear.all() and (np.diff(at) > 0).all() and at[-1] <= last and abs(shift) < _FAR:
            axis = scale, _WHOLE - np.float32(shift), _WHOLE, _WHOLE + np.float32(last)
            return _arrays(borders, codes, at, np.array(axis, np.float32), halves)
    return None


def _arrays(
    borders: np.ndarray, codes: np.ndarray, at: np.ndarray, axis: np.ndarray, halves: int
) -> list[np.ndarray]:
    parts = np.arange(halves * _HALF)
    border = np.full(len(parts), np.inf, np.float32)
    border[at] = borders
    left, right = (np.searchsorted(at, parts, side) for side in ("left", "right"))
    codes = codes.astype(np.uint16)
    words = (codes[left] | codes[right] << 8).view(np.uint32)
    cut = zip(np.split(border.view(np.uint32), halves), np.split(words, halves), strict=True)
    return [np.concatenate([*own, axis.view(np.uint32)]) for own in cut]


def coder(builder: Any, pointers: Sequence[Any], *, of_magnitudes: bool) -> Any:
    """Return what appends the code of a vector's lanes in their lowest bits; above lies anything.

    Args:
        builder: llvmlite's.
        pointers: To the first element of each of ``entries_of``.
        of_magnitudes: Whether that is an array of int32.
    """

    def at(pointer: Any, index: int) -> Any:
        return builder.gep(pointer, [ir.Constant(I32, index)])

    def number(index: int) -> Vector:
        value = builder.load(at(pointers[0], index))
        return Vector.splat(builder, builder.bitcast(value, F32), LANES)

    scale, offset, lowest, highest = map(number, (_SCALE, _OFFSET, _LOWEST, _HIGHEST))
    borders = [
        [Vector.load(builder, at(own, i * LANES), LANES) for i in range(2)] for own in pointers
    ]
    codes = [Vector.load(builder, at(own, _HALF), _WORDS).viewed(I16) for own in pointers]

    def code(x: Vector) -> Vector:
        part = _call(f"fma.v{LANES}f32", x, scale, offset)
        part = (part > lowest).where(part, lowest)  # NaN too
        part = (part < highest).where(part, highest)
        index = part.viewed(I32)
        found = [low.permuted(high, index) for low, high in borders]
        border = found[0]
        if len(found) == 2:
            bit = index & _HALF
            is_second = Vector(
                builder, builder.icmp_unsigned("!=", bit.value, bit.constant(0).value)
            )
            border = is_second.where(found[1], found[0])
        words = index.viewed(I16)
        if len(codes) == 2:
            pair = _call("x86.avx512.vpermi2var.hi.512", codes[0], words, codes[1]).viewed(I32)
        else:
            pair = _call("x86.avx512.permvar.hi.512", codes[0], words).viewed(I32)
        return (x > border.viewed(F32)).where(pair >> 8, pair)

    def code_of_magnitude(x: Vector) -> Vector:
        bits = x.viewed(I32)
        part = _call(f"fma.v{LANES}f32", (bits & 0x7FFFFFFF).viewed(F32), scale, offset)
        part = (part < highest).where(part, highest)  # NaN too: beyond both ends is one code
        ((low, high),) = borders
        border = low.permuted(high, part.viewed(I32))
        pair = _call("x86.avx512.permvar.hi.512", codes[0], part.viewed(I16)).viewed(I32)
        # the sign below the magnitude: a negative number is beyond a border that it is equal to
        return (bits.pushed(bits, 31) > border).where(pair >> 8, pair)

    return code_of_magnitude if of_magnitudes else code


def _call(name: str, *vectors: Vector) -> Vector:
    """Append a call of an LLVM intrinsic whose result has the type of its arguments."""
    builder, kind = vectors[0].builder, vectors[0].value.type
    signature = ir.FunctionType(kind, [kind] * len(vectors))
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.{name}")
    return Vector(builder, builder.call(function, [own.value for own in vectors]))


def _has_words() -> bool:
    """Say whether Numba compiles for a processor that permutes words of 16 bits."""
    context: Any = cpu_target.target_context
    *_, features = context.codegen().magic_tuple()
    return {"+avx512f", "+avx512bw"} <= set(features.split(","))
