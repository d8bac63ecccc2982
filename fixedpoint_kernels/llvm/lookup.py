"""From a value to its code, on LLVM vectors: what ``cpu.py`` builds its kernels from.

There are three ways. The axis is cut into equal parts of at most one border each, and one entry,
found by a product, holds that border and the codes beside it; up to 64 entries are in registers of
AVX-512, more of them in memory. Up to 31 borders, where entries would be in memory: a tree of
selections in registers. A table whose borders lie too close together for any of this: a binary
search.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from fixedpoint_kernels.few_bit.table import Table, steps_of
from fixedpoint_kernels.llvm.vectors import F32, I32, Vector, has_avx512

LANES = 16
_MOST_BORDERS = 31  # of a tree
_FEW_BORDERS = 3  # for which a tree is faster than entries in registers
_MOST_ENTRIES = 64  # in registers
_PARTS = 32, 64, 256, 512, 1024, 2048, 4096, 8192  # the shipped tables need no more


def splats(builder: Any, values: Any) -> list[Vector]:
    """Return a vector of each of the numbers in a tuple."""
    return [Vector.splat(builder, value, LANES) for value in cgutils.unpack_tuple(builder, values)]


def choose(conditions: Sequence[Vector], candidates: list[Vector]) -> Vector:
    """Select one of ``2**len(conditions)`` candidates; the first condition is the highest bit."""
    for condition in conditions:
        half = len(candidates) // 2
        pairs = zip(candidates[half:], candidates[:half], strict=True)
        candidates = [condition.where(yes, no) for yes, no in pairs]
    return candidates[0]


def joined(conditions: Sequence[Vector]) -> Vector:
    """Return the number in each lane whose bits are ``conditions``, the lowest first."""
    builder = conditions[0].builder
    number = Vector.splat(builder, ir.Constant(I32, 0), LANES)
    for i, condition in enumerate(conditions):
        number = condition.where(number | (1 << i), number)
    return number


def position(x: Vector, borders: list[Vector]) -> Vector:
    """Return the number of borders below each lane of ``x``, of 1, 3, 7, 15 or 31 borders."""
    conditions = []
    step = len(borders) + 1
    while step > 1:
        conditions.append(x > choose(conditions, borders[step // 2 - 1 :: step]))
        step //= 2
    return joined(conditions[::-1])


def indexed(x: Vector, entries: Any, *axis: Vector) -> Vector:
    """Return the code of each lane of ``x``, from the arguments that ``index_of`` returns."""
    return _beside(x, *_borders_and_codes(looked_up(entries, _part(x, *axis))))


def unzipped(registers: Sequence[Vector]) -> tuple[Sequence[Vector], Sequence[Vector]]:
    """Return borders and codes of 2 or 4 vectors of 16 entries, each in as many vectors."""
    borders, codes = zip(*map(_borders_and_codes, registers), strict=True)
    return borders, codes


def permuted(x: Vector, tables: tuple[Sequence[Vector], Sequence[Vector]], *axis: Vector) -> Vector:
    """Do as ``indexed`` does, from what ``unzipped`` returns."""
    part = _part(x, *axis)
    return _beside(x, *(_entry(table, part) for table in tables))


def _part(x: Vector, low: Vector, scale: Vector, last: Vector) -> Vector:
    """Return the number of the part of the axis where each lane of ``x`` is.

    No operation here ever turns a larger number into a smaller one, so borders of other parts need
    no comparison. NaN becomes ``low``, and is above no border.
    """
    part = ((x > low).where(x, low) - low) * scale
    return (part < last).where(part, last).converted(I32)


def _borders_and_codes(entries: Vector) -> tuple[Vector, Vector]:
    entries = entries.viewed(I32)
    border = entries.shuffled(entries, range(0, 2 * LANES, 2)).viewed(F32)
    return border, entries.shuffled(entries, range(1, 2 * LANES, 2))


def _beside(x: Vector, border: Vector, codes: Vector) -> Vector:
    return (x > border).where(codes >> 16, codes)


def _entry(table: Sequence[Vector], index: Vector) -> Vector:
    if len(table) == 2:
        return table[0].permuted(table[1], index)
    return (index > 31).where(_entry(table[2:], index), _entry(table[:2], index))


def index_of(table: Table) -> tuple[Any, ...] | None:
    """Cut the axis into equal parts of at most one border each.

    Returns:
        Entries, uint64: a border, or infinity, below the codes left and right of it, 16 bits each;
        then float32: the first border, parts a unit, and the number of the last part. ``None``
        where borders are too close together.
    """
    low = table.borders[0]
    with np.errstate(over="ignore", divide="ignore"):
        reach = table.borders[-1] - low
        most = np.float32(_PARTS[-1]) / reach
    if not (np.isfinite(reach) and np.isfinite(most)):
        return None
    for parts in _PARTS:
        last = np.float32(parts - 1)
        scale = last / reach
        at = np.minimum((table.borders - low) * scale, last).astype(np.int32)  # as indexed does
        if (np.diff(at) > 0).all():
            return _entries(table, at, parts), low, scale, last
    return None


def _entries(table: Table, at: np.ndarray, parts: int) -> np.ndarray:
    border = np.full(parts, np.inf, np.float32)
    border[at] = table.borders
    left, right = (np.searchsorted(at, np.arange(parts), side) for side in ("left", "right"))
    codes = table.codes.astype(np.uint32)
    words = np.stack([border.view(np.uint32), codes[left] | codes[right] << 16], 1)
    return words.view(np.uint64).ravel()


def search(x: Vector, borders: Any, codes: Any, steps: Vector) -> Vector:
    """Return the code of each lane of ``x``, from ``2**steps - 1`` borders in memory."""
    builder, index = x.builder, Vector.splat(x.builder, ir.Constant(I32, 0), LANES)
    at = cgutils.alloca_once_value(builder, index.value)
    steps = builder.trunc(builder.extract_element(steps.value, ir.Constant(I32, 0)), I32)
    with cgutils.for_range(builder, steps) as loop:
        shift = builder.sub(builder.sub(steps, loop.index), ir.Constant(I32, 1))
        half = Vector.splat(builder, builder.shl(ir.Constant(I32, 1), shift), LANES)
        index = Vector(builder, builder.load(at))
        above = x > looked_up(borders, index + half - 1)
        builder.store(above.where(index + half, index).value, at)
    return looked_up(codes, Vector(builder, builder.load(at)))


def looked_up(pointer: Any, index: Vector) -> Vector:
    """Read ``pointer[index]`` for each lane."""
    builder = index.builder
    found = ir.Constant(ir.VectorType(pointer.type.pointee, LANES), ir.Undefined)
    for lane in (ir.Constant(I32, i) for i in range(LANES)):
        element = builder.load(builder.gep(pointer, [builder.extract_element(index.value, lane)]))
        found = builder.insert_element(found, element, lane)
    return Vector(builder, found)


def encoding_of(table: Table) -> tuple[Any, Any]:
    """Return where the codes are found, and for each bit of the codes a number.

    Returns:
        Of a tree, a tuple of float32 borders, 2**k - 1 of them, infinite ones at the end, and for
        each bit the set of pieces, as a uint32, whose codes have it. Else what ``index_of``
        returns, with entries in registers as arrays of 16; or an array of borders, their codes
        (2**k,) int32 and k; and any numbers for the bits.
    """
    index = index_of(table) if len(table.borders) > _FEW_BORDERS else None
    if index and len(index[0]) <= _MOST_ENTRIES and has_avx512():
        registers = index[0].reshape(-1, LANES)
        return (*registers, *index[1:]), (0,) * table.bits
    steps = steps_of(table)
    borders = np.full((1 << steps) - 1, np.inf, np.float32)
    borders[: len(table.borders)] = table.borders
    codes = np.zeros(1 << steps, np.int32)
    codes[: len(table.codes)] = table.codes
    if len(borders) > _MOST_BORDERS:
        return index or (borders, codes, steps), (0,) * table.bits
    pieces = np.uint32(1) << np.arange(len(codes), dtype=np.uint32)
    is_set = [(codes >> bit & 1).astype(np.uint32) for bit in range(table.bits)]
    return tuple(borders), tuple(np.uint32((pieces * bits).sum()) for bits in is_set)
