"""Fixed-point rounding in Numba: chunks of 1,024 elements, whose noise stays in the L1 cache.

Each kernel is compiled twice from one definition, serial and parallel: a parallel region costs
more than it gains on small tensors.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numba import carray, njit, prange, types
from numba.extending import intrinsic
from torch import Tensor

from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.philox.cpu import philox, to_uniform
from fixedpoint_kernels.rounding.reference import Rounding, float_bounds
from fixedpoint_kernels.threads import compile_both, is_parallel

_CHUNK = 1024
_TASK = 4 * _CHUNK  # elements of one tensor that a thread takes at a time
_HALF = np.uint64(32)


@njit
def _noise(first, key):  # block of the first element, (k0, k1, s0, s1) uint32 -> (_CHUNK,) uint32
    words = np.empty((_CHUNK // 4, 4), np.uint32)
    for row in range(_CHUNK // 4):
        block = np.uint64(first + row)
        w = philox(np.uint32(block), np.uint32(block >> _HALF), key[2], key[3], key[0], key[1])
        words[row, 0], words[row, 1], words[row, 2], words[row, 3] = w
    return words.reshape(_CHUNK)


@njit(inline="always")
def _round_chunk(x, y, inside, noise, number, modes):
    # x (m,) float32; y (m,) float32 or integer; inside (m,) or (0,) bool; noise (_CHUNK,) uint32
    scale, lsb, low, high = number
    stochastic, integer, with_mask = (
        modes  # fixed in a call: LLVM takes these tests out of the loop
    )
    for i in range(x.size):
        k = x[i] * scale
        if stochastic:
            below = np.floor(k)
            up = to_uniform(noise[i]) < k - below
            code = below + (np.float32(1.0) if up else np.float32(0.0))
        else:
            code = np.rint(k) + np.float32(0.0)  # -0.0 becomes 0.0
        if integer and code != code:
            code = np.float32(0.0)
        bounded = low if code < low else code
        bounded = high if bounded > high else bounded
        y[i] = bounded * lsb
        if with_mask:
            inside[i] = not (code < low or code > high)


@njit(inline="always")
def _round_task(x, y, inside, start, number, modes, key):
    stop = min(start + _TASK, x.size)
    for first in range(start, stop, _CHUNK):
        end = min(first + _CHUNK, stop)
        noise = _noise(first >> 2, key) if modes[0] else np.empty(0, np.uint32)
        _round_chunk(x[first:end], y[first:end], inside[first:end], noise, number, modes)


def _quantize(x, y, inside, number, modes, key):
    for task in prange((x.size + _TASK - 1) // _TASK):
        _round_task(x, y, inside, task * _TASK, number, modes, key)


def _quantize_many(pointers, sizes, numbers, tasks, stochastic, seed, stream):
    # pointers (t, 2) int64: of x and y; sizes (t,) int64; numbers (t, 4) float32;
    # tasks (k, 2) int64: tensor and first element
    for task in prange(tasks.shape[0]):
        tensor, start = tasks[task, 0], tasks[task, 1]
        x = carray(_float32_pointer(pointers[tensor, 0]), sizes[tensor])
        y = carray(_float32_pointer(pointers[tensor, 1]), sizes[tensor])
        row = numbers[tensor]
        number = (row[0], row[1], row[2], row[3])
        own = np.uint64(stream + tensor)
        key = (seed[0], seed[1], np.uint32(own), np.uint32(own >> _HALF))
        no_mask = np.empty(0, np.bool_)
        _round_task(x, y, no_mask, start, number, (stochastic, False, False), key)


@intrinsic
def _float32_pointer(_context, address):
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(address), codegen


_quantize_serial, _quantize_parallel = compile_both(_quantize)
_quantize_many_serial, _quantize_many_parallel = compile_both(_quantize_many)


def quantize(
    x: Tensor,
    y: Tensor,
    inside: Tensor | None,
    fmt: FixedPoint,
    rounding: Rounding,
    key: Key,
) -> None:
    """See ``fixedpoint_kernels.rounding.quantize``; integer ``y`` takes codes.

    ``x``, ``y`` and ``inside`` are contiguous, of one shape.
    """
    integer = not y.dtype.is_floating_point
    result = y if integer or y.dtype is torch.float32 else torch.empty_like(y, dtype=torch.float32)
    mask = np.empty(0, np.bool_) if inside is None else inside.view(-1).numpy()
    kernel = _quantize_parallel if is_parallel(x.numel()) else _quantize_serial
    kernel(
        x.detach().view(-1).float().numpy(),
        result.detach().view(-1).numpy(),
        mask,
        _number(fmt, integer),
        (rounding == "stochastic", integer, inside is not None),
        tuple(map(np.uint32, key.words())),
    )
    if result is not y:
        y.copy_(result)


def quantize_many(
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    fmts: Sequence[FixedPoint],
    rounding: Rounding,
    key: Key,
) -> None:
    """See ``fixedpoint_kernels.rounding.quantize_many``; all tensors float32 and contiguous."""
    sizes, tasks = _tasks(tuple(x.numel() for x in xs))
    pointers = np.array([(x.data_ptr(), y.data_ptr()) for x, y in zip(xs, ys, strict=True)])
    kernel = _quantize_many_parallel if is_parallel(int(sizes.sum())) else _quantize_many_serial
    seed = tuple(map(np.uint32, key.words()[:2]))
    numbers = _numbers(tuple(fmts))
    kernel(pointers, sizes, numbers, tasks, rounding == "stochastic", seed, key.stream)


@lru_cache(maxsize=16)  # the same parameters come step after step
def _tasks(sizes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the sizes, and tensor and first element of each piece of work."""
    counts = (np.array(sizes, np.int64) + _TASK - 1) // _TASK
    tensor = np.repeat(np.arange(len(sizes)), counts)
    first = np.arange(len(tensor)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.array(sizes, np.int64), np.stack([tensor, first * _TASK], axis=1)


@lru_cache(maxsize=16)
def _numbers(fmts: tuple[FixedPoint, ...]) -> np.ndarray:
    return np.array([_number(fmt, False) for fmt in fmts], np.float32)


@lru_cache(maxsize=256)
def _number(fmt: FixedPoint, integer: bool) -> tuple[np.float32, ...]:
    """Return scale, lsb (1 for codes), and the smallest and largest code."""
    low, high = float_bounds(fmt)
    return tuple(map(np.float32, (fmt.scale, 1.0 if integer else fmt.lsb, low, high)))
