"""Fixed-point rounding in Numba: vectors of 128 elements, rounded as their noise is made.

Each kernel is compiled twice from one definition, serial and parallel: a parallel region costs
more than it gains on small tensors.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numba import prange, types
from numba.core import cgutils
from torch import Tensor

from fixedpoint_kernels.formats import FixedPoint, Minifloat
from fixedpoint_kernels.llvm.arrays import empty, view, zeros
from fixedpoint_kernels.llvm.calls import inner, keep
from fixedpoint_kernels.llvm.turning import LANES, turn
from fixedpoint_kernels.llvm.vectors import F32, I8, I32, Vector, intrinsic
from fixedpoint_kernels.memory import Places
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.philox.cpu import uniform
from fixedpoint_kernels.rounding.reference import Rounding, float_bounds
from fixedpoint_kernels.threads import compile_both, is_parallel, thread_count

_BLOCK = 128  # elements of one vector: four of the longest that processors have, as 64-bit lanes
TASK = 32 * _BLOCK  # elements of one tensor that a thread takes at a time
# no kernel writes these: it writes the other, and torch converts
_BESIDE = {
    torch.uint8: torch.int16,
    **dict.fromkeys((torch.bfloat16, torch.float16), torch.float32),
}


@intrinsic
def _round_block(_context, x, y, inside, at, first, number, key):
    """Round ``_BLOCK`` elements from ``x[at]`` on to ``y``, as elements ``first`` on of a tensor.

    x (m,) float32; y (m,) float32, or integer for codes; inside (m,) bool or None; number: see
    ``_number`` and ``_minifloat``; key (seed, stream) int64, or None for nearest.
    """
    signature = types.void(x, y, inside, at, first, number, key)

    def codegen(context, builder, signature, args):
        def pointer(i):
            array = context.make_array(signature.args[i])(context, builder, args[i])
            return builder.gep(array.data, [args[3]])

        noise = None
        if key != types.none:
            block = builder.lshr(args[4], args[4].type(2))
            seed, stream = cgutils.unpack_tuple(builder, args[6])
            noise = uniform(builder, block, seed, stream, _BLOCK // 4)
        values = Vector.load(builder, pointer(0), _BLOCK)
        own = [Vector.splat(builder, v, _BLOCK) for v in cgutils.unpack_tuple(builder, args[5])]
        codes, lsb, is_inside = _rounded(values, own, noise)
        if isinstance(y.dtype, types.Integer):
            known = codes.is_nan().where(codes.constant(0.0), codes)
            known.converted(context.get_data_type(y.dtype)).store(pointer(1))
        else:
            (codes if lsb is None else codes * lsb).store(pointer(1))
        if inside != types.none:
            is_inside.converted(I8).store(pointer(2))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def _round_lanes(_context, x, y, inside, noise, number, count):
    """Round ``LANES`` elements with noise that is there, or where ``count`` is not None so many.

    x, y, noise: addresses of float32; inside: of bool, or 0; number: see ``_round_block``.
    """
    is_whole = count == types.none

    def codegen(context, builder, _signature, args):
        def pointer(i, element):
            return builder.inttoptr(args[i], element.as_pointer())

        where = None
        if not is_whole:
            most = Vector.splat(builder, args[5], LANES)
            where = most.constant(range(LANES)) < most
        values = Vector.load(builder, pointer(0, F32), LANES, where)
        own = [Vector.splat(builder, v, LANES) for v in cgutils.unpack_tuple(builder, args[4])]
        codes, lsb, is_inside = _rounded(values, own, Vector.load(builder, pointer(3, F32), LANES))
        (codes if lsb is None else codes * lsb).store(pointer(1, F32), where)
        with builder.if_then(builder.icmp_unsigned("!=", args[2], args[2].type(0))):
            is_inside.converted(I8).store(pointer(2, I8), where)
        return context.get_dummy_value()

    return types.void(x, y, inside, noise, number, count), codegen


@intrinsic
def _make_noise(_context, out, first, key):
    """Write the noise of ``_BLOCK`` elements, ``first`` on of a tensor; out: address of float32."""

    def codegen(context, builder, _signature, args):
        seed, stream = cgutils.unpack_tuple(builder, args[2])
        block = builder.lshr(args[1], args[1].type(2))
        pointer = builder.inttoptr(args[0], F32.as_pointer())
        uniform(builder, block, seed, stream, _BLOCK // 4).store(pointer)
        return context.get_dummy_value()

    return types.void(out, first, key), codegen


def _rounded(
    values: Vector, numbers: Sequence[Vector], noise: Vector | None
) -> tuple[Vector, Vector | None, Vector]:
    """Return codes and what they are multiplied by (None: nothing), and whether they were not clamped.

    values: float32; numbers: see ``_number`` and ``_minifloat``; noise: None for nearest.
    """
    is_fixed = len(numbers) == 4
    if is_fixed:
        scale, lsb, low, high = numbers
    else:
        least, shift, high = numbers
        low = high * -1.0
        scale, lsb = _own_scale(values.viewed(I32), least, shift)
    scaled = values * scale
    if noise is None:
        codes = scaled.rint() + 0.0  # -0.0 becomes 0.0
    else:
        below = scaled.floor()
        up = noise < scaled - below
        codes = below + up.where(below.constant(1.0), below.constant(0.0))
    if not is_fixed:
        codes = codes * lsb
    under, over = codes < low, codes > high
    bounded = over.where(high, under.where(low, codes))
    return bounded, lsb if is_fixed else None, ~(under | over)


def _own_scale(bits: Vector, least: Vector, shift: Vector) -> tuple[Vector, Vector]:
    """Return ``2**fl`` and ``2**-fl`` of minifloats, each with an exponent of its own.

    bits: of the values; least and shift: see ``_minifloat``.
    """
    exponent = bits & 0x7F800000
    exponent = (exponent < least).where(least, exponent)
    most = exponent.constant(254 << 23)  # infinities and NaN have one more
    exponent = (exponent > most).where(most, exponent)
    return (shift + (254 << 23) - exponent).viewed(F32), (exponent - shift).viewed(F32)


@inner
def round_task(x, y, inside, start, offset, number, key):
    """Round a piece, from element ``start`` on: below 0 where the tensor begins inside a vector."""
    begin, stop = max(start, 0), min(start + TASK, x.size)
    head = min(max(start + _BLOCK, 0), stop) if start < 0 else begin
    if begin < head:
        _round_rest(x[begin:head], y[begin:head], inside, begin, offset, number, key)
    whole = head + (stop - head) // _BLOCK * _BLOCK
    for at in range(head, whole, _BLOCK):
        _round_block(x, y, inside, at, at + offset, number, key)
    if whole < stop:
        _round_rest(x[whole:stop], y[whole:stop], inside, whole, offset, number, key)


@inner
def _round_rest(x, y, inside, at, offset, number, key):
    # x and y are less than a vector, from element ``at`` of their tensor on
    n, lead = x.size, (at + offset) % _BLOCK
    padded_x, padded_y = zeros(_BLOCK, np.float32), empty(_BLOCK, y.dtype)
    for i in range(n):  # Numba compiles much for arrays that are assigned
        padded_x[lead + i] = x[i]
    first = at + offset - lead
    if inside is None:
        _round_block(padded_x, padded_y, None, 0, first, number, key)
    else:
        padded_inside = empty(_BLOCK, np.bool_)
        _round_block(padded_x, padded_y, padded_inside, 0, first, number, key)
        for i in range(n):
            inside[at + i] = padded_inside[lead + i]
    for i in range(n):
        y[i] = padded_y[lead + i]


def _quantize(x, y, inside, offset, number, key):
    lead = offset % _BLOCK
    for task in prange((x.size + lead + TASK - 1) // TASK):
        round_task(x, y, inside, task * TASK - lead, offset, number, key)


def _quantize_turned(x, y, inside, offset, number, key):
    # x, y, inside (n, positions, channels) as they lie; noise goes by channel before position
    pieces = -(-x.shape[2] // LANES)
    for task in prange(x.shape[0] * pieces):
        _round_turned(x, y, inside, task // pieces, task % pieces * LANES, offset, number, key)


@inner
def _round_turned(x, y, inside, image, channel, offset, number, key):
    """Round some channels of an image; their noise is turned to lie as they do."""
    _, positions, channels = x.shape
    count = min(channels - channel, LANES)
    first = offset + (image * channels + channel) * positions
    lead = first % _BLOCK
    noise = empty((lead + count * positions + _BLOCK - 1) // _BLOCK * _BLOCK, np.float32)
    turned = empty(positions * LANES, np.float32)
    made, own = np.int64(noise.ctypes.data), np.int64(turned.ctypes.data)
    for i in range(0, noise.size, _BLOCK):
        _make_noise(made + 4 * i, first - lead + i, key)
    turn(made + 4 * lead, 4 * positions, count, positions, own, 4 * LANES)
    place = image * positions * channels + channel
    source, target = np.int64(x.ctypes.data) + 4 * place, np.int64(y.ctypes.data) + 4 * place
    mask, step = np.int64(0), 0
    if inside is not None:
        mask, step = np.int64(inside.ctypes.data) + place, channels
    for i in range(positions):
        at = 4 * i * channels
        ready = own + 4 * LANES * i
        if count == LANES:
            _round_lanes(source + at, target + at, mask + i * step, ready, number, None)
        else:
            _round_lanes(source + at, target + at, mask + i * step, ready, number, count)
    keep(noise)
    keep(turned)


def _keep_inside(x, inside, y):
    for i in prange(x.size):
        value = x[i]
        y[i] = value if inside[i] else np.float32(0.0)


def _quantize_many(pointers, sizes, numbers, tasks, key):
    # pointers (t, 2) int64: of x and y; sizes (t, 2) int64: elements, and those before them;
    # numbers (t, 4) float32; tasks (k, 2) int64: tensor and first element;
    # key (seed, stream) of the first, or None
    for task in prange(tasks.shape[0]):
        tensor, start = tasks[task, 0], tasks[task, 1]
        x = view(pointers[tensor, 0], sizes[tensor, 0], np.float32)
        y = view(pointers[tensor, 1], sizes[tensor, 0], np.float32)
        row = numbers[tensor]
        number = (row[0], row[1], row[2], row[3])
        if key is None:
            round_task(x, y, None, start, sizes[tensor, 1], number, None)
        else:
            own = key[0], key[1] + tensor
            round_task(x, y, None, start, sizes[tensor, 1], number, own)


_quantize_serial, _quantize_parallel = compile_both(_quantize)
_quantize_turned_serial, _quantize_turned_parallel = compile_both(_quantize_turned)
_keep_inside_serial, _keep_inside_parallel = compile_both(_keep_inside)
_quantize_many_serial, _quantize_many_parallel = compile_both(_quantize_many)


def quantize(
    x: Tensor,
    y: Tensor,
    inside: Tensor | None,
    fmt: FixedPoint | Minifloat,
    rounding: Rounding,
    key: Key,
) -> None:
    """See ``fixedpoint_kernels.rounding.quantize``; integer ``y`` takes codes.

    ``x``, ``y`` and ``inside`` are contiguous, of one shape.
    """
    integer = not y.dtype.is_floating_point
    result = torch.empty_like(y, dtype=_BESIDE[y.dtype]) if y.dtype in _BESIDE else y
    kernel = _quantize_parallel if is_parallel(x.numel()) else _quantize_serial
    kernel(
        _flat(x if x.dtype is torch.float32 else x.float()),
        _flat(result),
        None if inside is None else _flat(inside),
        key.offset,
        _numbers(fmt, integer),
        (key.seed, key.stream) if rounding == "stochastic" else None,
    )
    if result is not y:
        y.copy_(result)


def quantize_turned(
    x: Tensor,
    y: Tensor,
    inside: Tensor | None,
    fmt: FixedPoint | Minifloat,
    key: Key,
) -> None:
    """Round with noise, as ``quantize``, tensors that lie ``(n, positions, channels)`` in memory.

    Their noise goes by channel before position. ``x`` and ``y`` are float32 and contiguous, (n,
    positions, channels), as is ``inside``.
    """
    kernel = _quantize_turned_parallel if is_parallel(x.numel()) else _quantize_turned_serial
    own, mask = (key.seed, key.stream), None if inside is None else _array(inside)
    kernel(_array(x), _array(y), mask, key.offset, _numbers(fmt, False), own)


def keep_inside(x: Tensor, inside: Tensor, y: Tensor) -> None:
    """See ``fixedpoint_kernels.rounding.keep_inside``; ``x`` and ``y`` are float32, all contiguous."""
    kernel = _keep_inside_parallel if is_parallel(x.numel()) else _keep_inside_serial
    kernel(_flat(x), _flat(inside), _flat(y))


def _array(x: Tensor) -> np.ndarray:
    return (x.detach() if x.requires_grad else x).numpy()


def _flat(x: Tensor) -> np.ndarray:
    return _array(x).reshape(-1)


def quantize_many(
    places: Places,
    fmts: Sequence[FixedPoint],
    rounding: Rounding,
    first: Key,
    offsets: Sequence[int],
    device: torch.device,
) -> None:
    """See ``fixedpoint_kernels.rounding.quantize_many``; all tensors are float32.

    ``first`` has the seed of all, and the stream of the first.
    """
    is_large = is_parallel(sum(places.elements))
    kernel = _quantize_many_parallel if is_large else _quantize_many_serial
    own_key = (first.seed, first.stream) if rounding == "stochastic" else None
    pointers, counts, tasks = _tables(places, tuple(offsets))
    kernel(pointers, counts, numbers_of(tuple(fmts)), tasks, own_key)


@lru_cache(maxsize=16)  # the same parameters come step after step
def _tables(places: Places, offsets: tuple[int, ...]) -> list[np.ndarray]:
    """Return addresses, sizes, and tensor and first element of each piece of work."""
    addresses = np.array([places.xs, places.ys], np.int64).T.copy()
    return [addresses, *pieces_of(places.elements, offsets)]


@lru_cache(maxsize=16)
def pieces_of(sizes: tuple[int, ...], offsets: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return elements of tensors and those before them, and tensor and first element of each piece."""
    elements, before = np.array([sizes, offsets], np.int64)
    lead = before % _BLOCK
    counts = np.where(elements > 0, (elements + lead + TASK - 1) // TASK, 0)
    tensor = np.repeat(np.arange(len(offsets)), counts)
    first = np.arange(len(tensor)) - np.repeat(np.cumsum(counts) - counts, counts)
    tasks = np.stack([tensor, first * TASK - lead[tensor]], axis=1)
    left = elements[tensor] - tasks[:, 1]
    return np.stack([elements, before], axis=1), tasks[_shared(left)]


def _shared(left: np.ndarray) -> np.ndarray:
    """Order tasks so that each thread, which gets an equal stretch of them, has as much to do."""
    by_size = np.argsort(-np.minimum(left, TASK), kind="stable")
    threads = thread_count()
    return np.concatenate([by_size[thread::threads] for thread in range(threads)])


@lru_cache(maxsize=16)
def numbers_of(fmts: tuple[FixedPoint, ...]) -> np.ndarray:
    """Return ``_number`` of each format, (formats, 4) float32."""
    return np.array([_number(fmt, False) for fmt in fmts], np.float32)


def _numbers(fmt: FixedPoint | Minifloat, integer: bool) -> tuple[np.number, ...]:
    """Return what kernels read of a format."""
    return _minifloat(fmt) if isinstance(fmt, Minifloat) else _number(fmt, integer)


@lru_cache(maxsize=256)
def _number(fmt: FixedPoint, integer: bool) -> tuple[np.float32, ...]:
    """Return scale, lsb (1 for codes), and the smallest and largest code."""
    low, high = float_bounds(fmt)
    return tuple(map(np.float32, (fmt.scale, 1.0 if integer else fmt.lsb, low, high)))


@lru_cache(maxsize=256)
def _minifloat(fmt: Minifloat) -> tuple[np.uint32, np.uint32, np.float32]:
    """Return the exponent bits of the smallest normal number, ``man`` where these are, the largest."""
    least, shift = (fmt.min_exponent + 127) << 23, fmt.man << 23
    return np.uint32(least), np.uint32(shift), np.float32(fmt.max)
