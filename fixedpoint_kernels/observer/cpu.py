"""The observer in Numba: a task of elements at a time, rounded on vectors, counted from the cache.

Sums are of tasks, then of all tasks in order: they do not depend on the number of threads.
"""

from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numba import njit, prange, types
from numba.core import cgutils
from torch import Tensor

from fixedpoint_kernels.formats import FixedPoint
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

    x and y (n,) float32, y or number None; ste_mask (n,) uint8; number: see ``_number``; sums
    (3, _LANES) float32: smallest value, squares and values clamped, are added to.
    """
    signature = types.void(x, y, ste_mask, at, vectors, number, sums)

    def codegen(*call):
        _, builder, _, args = call
        with _each_vector(call, 3, 6, 3) as (pointer, rows):
            values = Vector.load(builder, pointer(0), _LANES)
            zero = values.constant(0.0)
            outside = values.is_nan().constant(0)  # nowhere
            if y != types.none:
                parts = cgutils.unpack_tuple(builder, args[5])
                scale, lsb, low, high = (Vector.splat(builder, part, _LANES) for part in parts)
                codes = (values * scale).rint() + 0.0  # -0.0 becomes 0.0
                under, over = codes < low, codes > high
                outside = under | over
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


@njit
def _observe_rest(x, y, ste_mask, number, begin, stop, sums):
    """Observe fewer elements than a vector has."""
    values, kinds = np.full(_LANES, x[begin], np.float32), np.empty(_LANES, np.uint8)
    own = np.zeros((3, _LANES), np.float32)
    for i in range(_LANES):
        own[0, i] = np.inf
    for i in range(stop - begin):
        values[i] = x[begin + i]
    if y is None:
        _observe_vectors(values, None, kinds, 0, 1, number, own)
    else:
        rounded = np.empty(_LANES, np.float32)
        _observe_vectors(values, rounded, kinds, 0, 1, number, own)
        for i in range(stop - begin):
            y[begin + i] = rounded[i]
    for i in range(stop - begin):
        ste_mask[begin + i] = kinds[i]
        sums[0, i] = min(sums[0, i], own[0, i])
        sums[1, i] += own[1, i]
        sums[2, i] += own[2, i]


@njit
def _count(x, begin, stop, counts):
    """Count magnitudes of ``x[begin:stop]``, float32; counts (MAGNITUDES,) int64."""
    bits = x.view(np.uint32)
    tables = np.zeros((_TABLES, MAGNITUDES), np.int32)
    for i in range(begin, stop):
        # the biased exponent, one more where the mantissa is not 0; NaN gives 256
        index = ((bits[i] & np.uint32(0x7FFFFFFF)) + np.uint32(0x7FFFFF)) >> np.uint32(23)
        tables[i % _TABLES, index] += 1
    for table in range(_TABLES):
        for i in range(MAGNITUDES):
            counts[i] += tables[table, i]


@njit
def _total(row):
    """Return the sum of a row in its order, float64."""
    total = 0.0
    for value in row:
        total += np.float64(value)
    return total


def _observe(x, y, ste_mask, number, counts, sums):
    # counts (tasks, MAGNITUDES) int64, 0; sums (tasks, 3) float64; the others: see _observe_vectors
    for task in prange(counts.shape[0]):
        begin, stop = task * _TASK, min(task * _TASK + _TASK, x.size)
        lanes = np.zeros((3, _LANES), np.float32)
        for i in range(_LANES):
            lanes[0, i] = np.inf
        vectors = (stop - begin) // _LANES
        _observe_vectors(x, y, ste_mask, begin, vectors, number, lanes)
        if begin + vectors * _LANES < stop:
            _observe_rest(x, y, ste_mask, number, begin + vectors * _LANES, stop, lanes)
        _count(x, begin, stop, counts[task])
        lowest = lanes[0, 0]
        for i in range(1, _LANES):
            lowest = min(lowest, lanes[0, i])
        sums[task, 0], sums[task, 1], sums[task, 2] = lowest, _total(lanes[1]), _total(lanes[2])


def _observe_gradient(grad, ste_mask, out, sums):
    # sums (tasks,) float64; the others: see _observe_gradient_vectors
    for task in prange(sums.size):
        begin, stop = task * _TASK, min(task * _TASK + _TASK, grad.size)
        lanes = np.zeros((1, _LANES), np.float32)
        vectors = (stop - begin) // _LANES
        _observe_gradient_vectors(grad, ste_mask, out, begin, vectors, lanes)
        total = _total(lanes[0])
        for i in range(begin + vectors * _LANES, stop):
            if ste_mask[i] > 1:
                total += np.float64(grad[i] * grad[i])
            if out is not None:
                out[i] = grad[i] if ste_mask[i] & 1 else np.float32(0.0)
        sums[task] = total


_observe_serial, _observe_parallel = compile_both(_observe)
_observe_gradient_serial, _observe_gradient_parallel = compile_both(_observe_gradient)


def observe(
    x: Tensor, y: Tensor | None, ste_mask: Tensor, fmt: FixedPoint | None
) -> tuple[Tensor, Tensor]:
    """See ``fixedpoint_kernels.observer.reference.observe``."""
    tasks = (x.numel() + _TASK - 1) // _TASK
    counts, sums = np.zeros((tasks, MAGNITUDES), np.int64), np.empty((tasks, 3))
    rounded = None if y is None else _as_float32(y)
    kernel = _observe_parallel if is_parallel(x.numel()) else _observe_serial
    kernel(_flat(x), _flat(rounded), _flat(ste_mask), _number(fmt), counts, sums)
    if y is not None and rounded is not None and rounded is not y:
        y.copy_(rounded)
    total = np.array([sums[:, 0].min(), sums[:, 1].sum(), sums[:, 2].sum()])
    return torch.from_numpy(counts.sum(0)), torch.from_numpy(total)


def observe_gradient(grad: Tensor, ste_mask: Tensor, out: Tensor | None) -> Tensor:
    """See ``fixedpoint_kernels.observer.reference.observe_gradient``."""
    sums = np.empty((grad.numel() + _TASK - 1) // _TASK)
    masked = None if out is None else _as_float32(out)
    kernel = _observe_gradient_parallel if is_parallel(grad.numel()) else _observe_gradient_serial
    kernel(_flat(grad), _flat(ste_mask), _flat(masked), sums)
    if out is not None and masked is not None and masked is not out:
        out.copy_(masked)
    return torch.tensor(sums.sum())


def _as_float32(out: Tensor) -> Tensor:
    return out if out.dtype is torch.float32 else torch.empty_like(out, dtype=torch.float32)


def _flat(x: Tensor | None) -> Any:
    if x is None:
        return None
    x = x.detach() if x.requires_grad else x
    return (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x).numpy().reshape(-1)


def _number(fmt: FixedPoint | None) -> tuple[np.float32, ...] | None:
    """Return scale, lsb, and the smallest and largest code."""
    if fmt is None:
        return None
    return tuple(map(np.float32, (fmt.scale, fmt.lsb, *float_bounds(fmt))))
