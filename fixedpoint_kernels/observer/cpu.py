"""The observer in Numba: a task of elements at a time, rounded on vectors, counted from the cache.

Sums are of tasks, then of all tasks in order: they do not depend on the number of threads.
"""

from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch
from numba import prange, types
from numba.core import cgutils
from torch import Tensor

from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.llvm.arrays import empty, view, zeros
from fixedpoint_kernels.llvm.calls import called, inner, keep
from fixedpoint_kernels.llvm.vectors import I8, Vector, intrinsic
from fixedpoint_kernels.observer.reference import MAGNITUDES
from fixedpoint_kernels.rounding.reference import float_bounds
from fixedpoint_kernels.threads import compile_both, is_parallel

_LANES = 64
_TASK = 256 * _LANES  # elements: 64 kB
_TABLES = 4  # of counts: like values follow each other, and would wait for each other's count


@contextmanager
def _each_vector(call, at, sums, count):
    """Loop over vectors of the arrays that an intrinsic was given.

    Args:
        call: What ``codegen`` was given.
        at: Number of the argument that says where the first vector begins; how many there are is in
            the next one.
        sums: Number of the argument with sums, ``(count, _LANES)`` float32.
        count: How many rows that has.

    Yields:
        What gives the address of the present vector in an argument; and slots of the rows, which
        stay in registers.
    """
    context, builder, signature, args = call
    index = args[at].type

    def data(i):
        return context.make_array(signature.args[i])(context, builder, args[i]).data

    pointers = [builder.gep(data(sums), [index(_LANES * row)]) for row in range(count)]
    loaded = [Vector.load(builder, pointer, _LANES).value for pointer in pointers]
    rows = [cgutils.alloca_once_value(builder, row) for row in loaded]
    with cgutils.for_range(builder, args[at + 1]) as loop:
        first = builder.add(args[at], builder.mul(loop.index, index(_LANES)))
        yield lambda i: builder.gep(data(i), [first]), rows
    for row, pointer in zip(rows, pointers, strict=True):
        Vector(builder, builder.load(row)).store(pointer)


@intrinsic
def _observe_vectors(_context, x, y, ste_mask, at, vectors, number, sums):
    """Round and mask ``vectors`` times ``_LANES`` elements from ``at`` on.

    x and y (n,) float32, y None: not written; ste_mask (n,) uint8; number: see ``_number``, None: not
    rounded; sums (3, _LANES) float32: smallest value, squares and values clamped, are added to.
    """
    signature = types.void(x, y, ste_mask, at, vectors, number, sums)

    def codegen(*call):
        _, builder, _, args = call
        with _each_vector(call, 3, 6, 3) as (pointer, rows):
            values = Vector.load(builder, pointer(0), _LANES)
            zero = values.constant(0.0)
            outside = values.is_nan().constant(0)  # nowhere
            if number != types.none:
                parts = cgutils.unpack_tuple(builder, args[5])
                scale, lsb, low, high = (Vector.splat(builder, part, _LANES) for part in parts)
                codes = (values * scale).rint() + 0.0  # -0.0 becomes 0.0
                under, over = codes < low, codes > high
                outside = under | over
                if y != types.none:
                    (over.where(high, under.where(low, codes)) * lsb).store(pointer(1))
            inside = (~outside).converted(I8)
            nonzero = ((values < zero) | (values > zero) | values.is_nan()).converted(I8)
            counted = inside & nonzero
            (inside + counted + counted).store(pointer(2))
            lowest, squares, clamped = (Vector(builder, builder.load(row)) for row in rows)
            builder.store((values < lowest).where(values, lowest).value, rows[0])
            builder.store((squares + values * values).value, rows[1])
            builder.store((clamped + outside.where(zero.constant(1.0), zero)).value, rows[2])
        return call[0].get_dummy_value()

    return signature, codegen


@intrinsic
def _observe_gradient_vectors(_context, grad, ste_mask, out, at, vectors, sums):
    """Mask ``vectors`` times ``_LANES`` elements of a gradient from ``at`` on.

    grad and out (n,) float32, out or None; ste_mask (n,) uint8; sums (1, _LANES) float32:
    squares are added to.
    """
    signature = types.void(grad, ste_mask, out, at, vectors, sums)

    def codegen(*call):
        builder = call[1]
        with _each_vector(call, 3, 5, 1) as (pointer, rows):
            values, kinds = (Vector.load(builder, pointer(i), _LANES) for i in (0, 1))
            zero = values.constant(0.0)
            counted = (kinds > 1).where(values, zero)
            squares = Vector(builder, builder.load(rows[0]))
            builder.store((squares + counted * counted).value, rows[0])
            if out != types.none:
                ((kinds & 1) > 0).where(values, zero).store(pointer(2))
        return call[0].get_dummy_value()

    return signature, codegen


# loops below in place of array expressions, which Numba compiles for seconds


@inner
def _observe_part(x, y, ste_mask, begin, vectors, number, sums):
    """Observe whole vectors; y: address, or 0; number: address of float32, see ``_number``, or 0."""
    if not number:
        _observe_vectors(x, None, ste_mask, begin, vectors, None, sums)
        return
    own = view(number, 4, np.float32)
    parts = own[0], own[1], own[2], own[3]
    if y:
        rounded = view(y, x.size, np.float32)
        _observe_vectors(x, rounded, ste_mask, begin, vectors, parts, sums)
    else:
        _observe_vectors(x, None, ste_mask, begin, vectors, parts, sums)


@inner
def _observe_rest(x, y, ste_mask, number, begin, stop, sums):
    """Observe fewer elements than a vector has."""
    values, kinds = empty(_LANES, np.float32), empty(_LANES, np.uint8)
    own, rounded = zeros((3, _LANES), np.float32), empty(_LANES, np.float32)
    for i in range(_LANES):
        own[0, i], values[i] = np.inf, x[begin]
    for i in range(stop - begin):
        values[i] = x[begin + i]
    place = np.int64(rounded.ctypes.data) if y else np.int64(0)
    _observe_part(values, place, kinds, 0, 1, number, own)
    if y:
        out = view(y, stop, np.float32)
        for i in range(stop - begin):
            out[begin + i] = rounded[i]
    for i in range(stop - begin):
        ste_mask[begin + i] = kinds[i]
        sums[0, i] = min(sums[0, i], own[0, i])
        sums[1, i] += own[1, i]
        sums[2, i] += own[2, i]
    keep(rounded)


@inner
def _count(x, begin, stop, counts):
    """Count magnitudes of the floats whose bits are ``x[begin:stop]``; counts (MAGNITUDES,) int64."""
    tables = zeros((_TABLES, MAGNITUDES), np.int32)
    for i in range(begin, stop):
        # the biased exponent, one more where the mantissa is not 0; NaN gives 256
        index = ((x[i] & np.uint32(0x7FFFFFFF)) + np.uint32(0x7FFFFF)) >> np.uint32(23)
        tables[i % _TABLES, index] += 1
    for table in range(_TABLES):
        for i in range(MAGNITUDES):
            counts[i] += tables[table, i]


@inner
def _total(row):
    """Return the sum of a row in its order, float64."""
    total = 0.0
    for value in row:
        total += np.float64(value)
    return total


def observe_task(x, y, ste_mask, number, counts, sums, size, task):
    """Observe the elements of a task.

    Args:
        x: Address of float32.
        y: Of float32 for the rounded values, or 0.
        ste_mask: Of uint8.
        number: Of float32, see ``_number``, or 0: not rounded.
        counts: Of (tasks, MAGNITUDES) int64, 0.
        sums: Of (tasks, 3) float64.
        size: How many elements there are.
        task: Which one.
    """
    begin, stop = task * _TASK, min(task * _TASK + _TASK, size)
    values, kinds = (
        view(x, size, np.float32),
        view(ste_mask, size, np.uint8),
    )
    lanes = zeros((3, _LANES), np.float32)
    for i in range(_LANES):
        lanes[0, i] = np.inf
    vectors = (stop - begin) // _LANES
    _observe_part(values, y, kinds, begin, vectors, number, lanes)
    if begin + vectors * _LANES < stop:
        _observe_rest(values, y, kinds, number, begin + vectors * _LANES, stop, lanes)
    rows = view(counts, (task + 1, MAGNITUDES), np.int64)
    _count(view(x, size, np.uint32), begin, stop, rows[task])
    lowest, own = lanes[0, 0], view(sums, (task + 1, 3), np.float64)
    for i in range(1, _LANES):
        lowest = min(lowest, lanes[0, i])
    own[task, 0], own[task, 1], own[task, 2] = lowest, _total(lanes[1]), _total(lanes[2])
    return 0


def observe_gradient_task(grad, ste_mask, out, sums, size, task):
    """Observe the gradient of the elements of a task.

    Args:
        grad: Address of float32.
        ste_mask: Of uint8.
        out: Of float32 for the masked gradient, or 0.
        sums: Of (tasks,) float64.
        size: How many elements there are.
        task: Which one.
    """
    begin, stop = task * _TASK, min(task * _TASK + _TASK, size)
    values, kinds = (
        view(grad, size, np.float32),
        view(ste_mask, size, np.uint8),
    )
    masked = view(out, size, np.float32)
    lanes = zeros((1, _LANES), np.float32)
    vectors = (stop - begin) // _LANES
    if out:
        _observe_gradient_vectors(values, kinds, masked, begin, vectors, lanes)
    else:
        _observe_gradient_vectors(values, kinds, None, begin, vectors, lanes)
    total = _total(lanes[0])
    for i in range(begin + vectors * _LANES, stop):
        if kinds[i] > 1:
            total += np.float64(values[i] * values[i])
        if out:
            masked[i] = values[i] if kinds[i] & 1 else np.float32(0.0)
    view(sums, task + 1, np.float64)[task] = total
    return 0


_observe_task, _observe_gradient_task = called(observe_task), called(observe_gradient_task)


def _observe(x, y, ste_mask, number, counts, sums, size, tasks):
    for task in prange(tasks):
        _observe_task(x, y, ste_mask, number, counts, sums, size, task)


def _observe_gradient(grad, ste_mask, out, sums, size, tasks):
    for task in prange(tasks):
        _observe_gradient_task(grad, ste_mask, out, sums, size, task)


_OBSERVE, _OBSERVE_GRADIENT = compile_both(_observe), compile_both(_observe_gradient)


def observe(
    x: Tensor, y: Tensor | None, ste_mask: Tensor, fmt: FixedPoint | None
) -> tuple[Tensor, Tensor]:
    """See ``fixedpoint_kernels.observer.reference.observe``."""
    size, tasks = x.numel(), (x.numel() + _TASK - 1) // _TASK
    counts, sums = np.zeros((tasks, MAGNITUDES), np.int64), np.empty((tasks, 3))
    number = None if fmt is None else _number(fmt)
    source, rounded = _as_float32(x), None if y is None else _room(y)
    _OBSERVE[is_parallel(size)](
        *(source.data_ptr(), 0 if rounded is None else rounded.data_ptr(), ste_mask.data_ptr()),
        0 if number is None else number.ctypes.data,
        *(counts.ctypes.data, sums.ctypes.data, size, tasks),
    )
    if y is not None and rounded is not None and rounded is not y:
        y.copy_(rounded)
    total = np.array([sums[:, 0].min(), sums[:, 1].sum(), sums[:, 2].sum()])
    return torch.from_numpy(counts.sum(0)), torch.from_numpy(total)


def observe_gradient(grad: Tensor, ste_mask: Tensor, out: Tensor | None) -> Tensor:
    """See ``fixedpoint_kernels.observer.reference.observe_gradient``."""
    size, tasks = grad.numel(), (grad.numel() + _TASK - 1) // _TASK
    sums, source = np.empty(tasks), _as_float32(grad)
    masked = None if out is None else _room(out)
    _OBSERVE_GRADIENT[is_parallel(size)](
        *(source.data_ptr(), ste_mask.data_ptr(), 0 if masked is None else masked.data_ptr()),
        *(sums.ctypes.data, size, tasks),
    )
    if out is not None and masked is not None and masked is not out:
        out.copy_(masked)
    return torch.tensor(sums.sum(), device="cpu")


def _as_float32(x: Tensor) -> Tensor:
    return x.detach().float()


def _room(out: Tensor) -> Tensor:
    """Return where float32 for ``out`` can be written."""
    return out if out.dtype is torch.float32 else torch.empty_like(out, dtype=torch.float32)


@lru_cache(maxsize=256)
def _number(fmt: FixedPoint) -> np.ndarray:
    """Return scale, lsb, and the smallest and largest code, float32."""
    return np.array((fmt.scale, fmt.lsb, *float_bounds(fmt)), np.float32)
