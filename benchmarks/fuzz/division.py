"""DIVISION against its page and the order of sums that its reference states, in numpy's float32."""

from random import Random
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.fuzz import draw, oracle
from benchmarks.fuzz.oracle import Array, Failure, Format
from fixedpoint_kernels import division

_DTYPES = {**draw.DTYPES, "float64": torch.float64}
_NEAR = Format(8, 4)


class Compressed(NamedTuple):
    """What activations are kept as; float32 arrays hold numbers of bfloat16."""

    means: Array  # (planes, blocks)
    codes: Array  # (planes, elements), int64; no elements where nothing is left over
    ranges: Array  # (planes, 2)
    restored: Array  # (planes, elements)


def compress(chance: Random) -> None:
    """Activations of any shape, blocks and bits, there and back; planes that are not finite, too."""
    x, own, dtype = _map(chance)
    spatial = chance.randint(0, min(3, x.dim())) if chance.random() < 0.4 else None
    block, bits = chance.choice((None, 1, 2, 3, 4, 7, 8, 30, 200)), chance.choice((0, 1, 2, 4, 8))
    if block is None and bits == 0:
        return
    seed, stream = draw.key(chance)
    kept = division.compress(x, block=block, bits=bits, seed=seed, stream=stream, spatial=spatial)
    dims = _default_spatial(x.dim()) if spatial is None else spatial
    sides = (1,) * (3 - dims) + tuple(x.shape[x.dim() - dims :])
    planes = own.astype(np.float32).reshape(-1, *sides) if own.size else None
    if planes is None:
        if division.decompress(kept).shape != x.shape:
            raise Failure("an empty tensor lost its shape")
        return
    want = _kept(planes, block, bits, oracle.noise(own.size, seed, stream).reshape(len(planes), -1))
    oracle.same(draw.content(kept.means), want.means, "means")
    data = oracle.pack(want.codes.ravel().tolist(), bits) if bits else b""
    oracle.same(draw.content(kept.codes), np.frombuffer(data, np.uint8), "codes")
    oracle.same(draw.content(kept.ranges), want.ranges, "ranges")
    y = division.decompress(kept)
    if y.dtype is not x.dtype:
        raise Failure(f"decompress gave {y.dtype} of {x.dtype}")
    held = oracle.stored(want.restored, dtype).reshape(own.shape)
    oracle.same(draw.content(y).astype(np.float32), held, "decompress")
    if bits and block != 1 and planes[0].size > 1:
        _check_error(planes.reshape(len(planes), -1), want)


def _map(chance: Random) -> tuple[torch.Tensor, Array, str]:
    shape = tuple(chance.choice((1, 2, 3, 4, 5, 8, 9, 17)) for _ in range(chance.randint(0, 5)))
    while np.prod(shape, dtype=int) > 400:
        shape = shape[1:]
    if chance.random() < 0.02:
        shape = (*shape, 0)
    if chance.random() < 0.05:
        shape = (chance.randint(1, 3), chance.randint(100, 700))
    n, dtype = int(np.prod(shape)), chance.choices(list(_DTYPES), (6, 2, 2, 1))[0]
    kind = chance.random()
    x = draw.normal(chance, n).astype(np.float32) * np.float32(2.0 ** chance.randint(-10, 10))
    if kind < 0.3:
        x = draw.values(chance, n, _NEAR)
    elif kind < 0.4:
        x = np.full(n, x[0] if n else 0, np.float32)
    elif kind < 0.5:
        with np.errstate(over="ignore"):
            x = x * np.float32(2.0 ** chance.choice((-140, 110, 120, 127)))
    own = oracle.stored(x, dtype).reshape(shape)
    if dtype == "float64":
        with np.errstate(invalid="ignore"):
            x64 = own.astype(np.float64)
            own = x64.astype(np.float32)
        return draw.odd(chance, torch.from_numpy(x64)), own, dtype
    return draw.odd(chance, draw.tensor(own, dtype)), own, dtype


def _default_spatial(dimensions: int) -> int:
    return (0, 1, 1, 1, 2)[dimensions] if dimensions < 5 else 3


def _kept(planes: Array, block: int | None, bits: int, drawn: Array) -> Compressed:
    count, elements = len(planes), planes[0].size
    nothing = np.zeros((count, 0), np.int64)
    with np.errstate(all="ignore"):
        if elements == 1 and block is not None:
            means = oracle.stored(planes.reshape(count, 1), "bfloat16")
            return Compressed(means, nothing, np.zeros((0, 2), np.float32), means)
        means = np.zeros((count, 0), np.float32)
        spread = np.zeros_like(planes)
        if block is not None:
            means, spread = _means(planes, block)
        if not bits:
            return Compressed(
                means, nothing, np.zeros((0, 2), np.float32), spread.reshape(count, -1)
            )
        residual = planes - spread if block is not None else planes
        residual = residual.reshape(count, -1)
        low, step = _ranges(residual, bits)
        inverse = np.where(step > 0, np.float32(1) / step, np.float32(0))
        position = (residual - low[:, None]) * inverse[:, None]
        below = np.floor(position)
        # the fraction, float32, compared with 24 bits of noise: both exact in float64
        up = drawn < (position - below).astype(np.float64) * 2.0**24
        codes = np.clip(np.nan_to_num(below + up, nan=0.0), 0, 2**bits - 1).astype(np.int64)
        values = low[:, None] + codes.astype(np.float32) * step[:, None]
        restored = values + spread.reshape(count, -1) if block is not None else values
        return Compressed(means, codes, np.stack([low, step], 1), restored)


def _means(planes: Array, block: int) -> tuple[Array, Array]:
    """Return the means of blocks, and the tensor that they span."""
    _, depth, height, width = planes.shape
    edges = [min(block, side) for side in (depth, height, width)]
    slots = min(128, 1 << (edges[2] - 1).bit_length())
    spread, means = np.zeros_like(planes), []
    for z in range(0, depth, edges[0]):
        for y in range(0, height, edges[1]):
            for x in range(0, width, edges[2]):
                part = (slice(z, z + edges[0]), slice(y, y + edges[1]), slice(x, x + edges[2]))
                mean = oracle.stored(_mean(planes[(slice(None), *part)], slots), "bfloat16")
                means.append(mean)
                spread[(slice(None), *part)] = mean[:, None, None, None]
    return np.stack(means, 1), spread


def _mean(block: Array, slots: int) -> Array:
    """Return the mean of one block of every plane: columns, then slots, then pairs of slots."""
    count, depth, height, width = block.shape
    sums = np.zeros((slots, count), np.float32)
    for x in range(width):
        column = np.zeros(count, np.float32)
        for z in range(depth):
            for y in range(height):
                column = column + block[:, z, y, x]
        sums[x % slots] = sums[x % slots] + column
    while len(sums) > 1:
        sums = sums[0::2] + sums[1::2]
    parts = [np.float32(1 / side) for side in (depth, height, width)]
    return sums[0] * (parts[0] * parts[1] * parts[2])


def _ranges(residual: Array, bits: int) -> tuple[Array, Array]:
    """Return the smallest residual, rounded down, and the step, rounded up; both NaN or neither."""
    levels = np.float32(2**bits - 1)
    low = _down(residual.min(1) + np.float32(0))
    width = residual.max(1) - low
    step = -_down(-(width * np.float32(1 / (2**bits - 1))))
    step = np.where(width == 0, np.float32(0), np.maximum(step, np.float32(2.0**-126)))
    known = np.isfinite(low) & np.isfinite(levels * step)
    nan = np.float32(np.nan)
    return np.where(known, low, nan), np.where(known, step, nan)


def _down(x: Array) -> Array:
    """Return the largest number of bfloat16 that is not above ``x``."""
    near = oracle.stored(x, "bfloat16")
    bits = near.view(np.uint32).astype(np.int64)
    below = np.where(near > 0, bits - 0x10000, np.where(near == 0, 0x80010000, bits + 0x10000))
    lower = (below % 2**32).astype(np.uint32).view(np.float32)
    return np.where(near > x, lower, near)


def _check_error(planes: Array, want: Compressed) -> None:
    """Fail unless errors are below one step, as the page promises; float64."""
    step = want.ranges[:, 1:].astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.abs(want.restored.astype(np.float64) - planes)
        # sums and products of float32 are rounded, each by 2**-24 of the largest number there is
        slack = 8 * 2.0**-24 * (np.abs(planes).max(1, keepdims=True) + 255 * step)
        fits = np.abs(planes) + step + slack < np.finfo(np.float32).max  # what is not may overflow
        if (fits & (error > step + slack)).any():
            raise Failure(f"the error is {np.nanmax(error)} at steps of {step.ravel().tolist()}")
