"""Weights as the tiles want them, in Numba."""

import numpy as np
from numba import carray, njit

from fixedpoint_kernels.llvm import tiles
from fixedpoint_kernels.llvm.vectors import pointer_to
from fixedpoint_kernels.products.instructions import keep
from fixedpoint_kernels.threads import compiled

__all__ = ["pack", "sum_taps"]


@njit
def _fill_weights(weight, taps, offsets, rows, depth, outputs, inputs, step, is_turned, out):
    """Write weights as columns of bytes, ``(outputs, depth)``; the bytes between are 0.

    weight: address of (o, all taps, c) int8, ``step`` bytes an ``o``; turned, outputs are ``c``.
    """
    tiles.blank(out, outputs * depth, 0)
    for i in range(len(taps)):
        source, target = weight + taps[i] * (outputs if is_turned else inputs), out + offsets[i]
        if not is_turned:
            for column in range(outputs):
                tiles.copy(source + column * step, target + column * depth, inputs)
        elif outputs % 16 == 0 and inputs % 16 == 0:
            for row in range(0, inputs, 16):
                for column in range(0, outputs, 16):
                    place = target + column * depth + row
                    tiles.transpose(source + row * step + column, step, place, depth)
        else:
            for row in range(inputs):
                for column in range(outputs):
                    tiles.copy(source + row * step + column, target + column * depth + row, 1)


@compiled()
def pack(weight, taps, offsets, depth, outputs, inputs, step, is_turned, sums, out):
    """Lay out weights for tiles: ``[groups][depth / 4][16][4]``; and add up each column.

    sums (16 * groups,) int32; out: address.
    """
    memory = np.empty(outputs * depth + 128, np.uint8)
    rows = memory.ctypes.data
    _fill_weights(weight, taps, offsets, rows, depth, outputs, inputs, step, is_turned, rows)
    quads = depth // 4
    source = carray(pointer_to(rows), outputs * quads, np.int32)
    target = carray(pointer_to(out), (outputs + 15) // 16 * 16 * quads, np.int32)
    target[:] = 0
    for column in range(outputs):
        first = column // 16 * quads * 16 + column % 16
        for k in range(quads):
            target[first + k * 16] = source[column * quads + k]
    codes = carray(pointer_to(rows), outputs * depth, np.int8)
    for column in range(outputs):
        total = np.int32(0)
        for k in range(depth):
            total += np.int32(codes[column * depth + k])
        sums[column] = total
    keep(memory)


@compiled()
def sum_taps(packed, depth, groups, channels, meets, sums):
    """Add up packed weights over the taps that each place meets.

    packed: address of ``[groups][depth / 4][16][4]`` int8; meets (places, taps) uint8; sums
    (places, 16 * groups) int32.
    """
    sums[:] = 0
    quads = channels // 4
    codes = carray(pointer_to(packed), (groups, depth // 4, 16, 4), np.int8)
    own = np.empty(16, np.int32)
    for group in range(groups):
        for tap in range(meets.shape[1]):
            own[:] = 0
            for k in range(tap * quads, (tap + 1) * quads):
                for lane in range(16):
                    for i in range(4):
                        own[lane] += np.int32(codes[group, k, lane, i])
            for place in range(meets.shape[0]):
                if meets[place, tap]:
                    sums[place, group * 16 : group * 16 + 16] += own
