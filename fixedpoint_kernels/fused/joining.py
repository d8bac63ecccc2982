"""A value among the channels of another, and of zeros, each place repeated; and its gradient; channels last."""

import numpy as np

from fixedpoint_kernels.fused import fields as f
from fixedpoint_kernels.llvm.arrays import doubles, empty, floats, view
from fixedpoint_kernels.llvm.calls import inner

__all__ = ["cut", "join", "join_sums"]


@inner
def join(d, n):
    """Write image ``n`` of a value where it belongs."""
    source = floats(d[f.Z] + 4 * n * d[f.PADDED], d[f.ELEMENTS])
    _copy(d, source, floats(d[f.Y] + 4 * n * d[f.J_PADDED], d[f.J_PADDED]))


@inner
def join_sums(d, n):
    """Write image ``n`` of a value, as bfloat16, and its sums where they belong."""
    source = view(d[f.Z] + 2 * n * d[f.PADDED], d[f.ELEMENTS], np.uint16)
    made = view(d[f.OUT] + 2 * n * d[f.J_PADDED], d[f.J_PADDED], np.uint16)
    _copy(d, source, made)
    channels, wide = d[f.CHANNELS], d[f.J_CHANNELS]
    sums = doubles(d[f.X] + 16 * n * channels, 2 * channels)
    whole = doubles(d[f.SUMS] + 16 * n * wide, 2 * wide)
    times = np.float64(d[f.J_DOWN] * d[f.J_ACROSS])
    for k in range(2):
        out = whole[k * wide + d[f.J_FIRST] - d[f.J_BEFORE] :]
        _clear(d, out)
        for c in range(channels):
            out[d[f.J_BEFORE] + c] = sums[k * channels + c] * times


@inner
def _copy(d, source, made):
    """Write the elements of an image among those of another."""
    own, width, channels, wide = d[f.ELEMENTS], d[f.J_WIDTH], d[f.CHANNELS], d[f.J_CHANNELS]
    down, across = d[f.J_DOWN], d[f.J_ACROSS]
    for to in range(own // channels * down * across):
        row, column = to // (width * across) // down, to % (width * across) // across
        values = source[(row * width + column) * channels :][:channels]
        _clear(d, made[to * wide + d[f.J_FIRST] - d[f.J_BEFORE] :])
        out = made[to * wide + d[f.J_FIRST] :][:channels]
        for c in range(channels):
            out[c] = values[c]


@inner
def _clear(d, made):
    """Write zeros before and behind the channels of a value."""
    behind = made[d[f.J_BEFORE] + d[f.CHANNELS] :][: d[f.J_BEHIND]]
    for c in range(d[f.J_BEFORE]):
        made[c] = 0
    for c in range(behind.size):
        behind[c] = 0


@inner
def cut(d, n, dx):
    """Write the gradient of image ``n`` of a value, or add it: the places made of one, in the order of rows.

    ``dx``: address of it, float32, of one image.
    """
    own, width, channels, wide = d[f.ELEMENTS], d[f.J_WIDTH], d[f.CHANNELS], d[f.J_CHANNELS]
    down, across = d[f.J_DOWN], d[f.J_ACROSS]
    found, first, grad = floats(dx, own), view(dx, own, np.uint32), empty(channels, np.float32)
    bits = view(grad.ctypes.data, channels, np.uint32)
    for place in range(own // channels):
        row, column = place // width * down, place % width * across
        out = found[place * channels :][:channels]
        for tap in range(down * across):
            at = (row + tap // across) * width * across + column + tap % across
            start = d[f.G] + 2 * (n * d[f.J_PADDED] + at * wide + d[f.J_FIRST])
            narrow = view(start, channels, np.uint16)
            if tap == 0 and not d[f.J_ADDS]:
                for c in range(channels):
                    first[place * channels + c] = np.uint32(narrow[c]) << np.uint32(16)
                continue
            for c in range(channels):
                bits[c] = np.uint32(narrow[c]) << np.uint32(16)
            for c in range(channels):
                out[c] += grad[c]
