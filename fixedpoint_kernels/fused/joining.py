"""A value among the channels of another, each place repeated; and its gradient; channels last."""

import numpy as np
from numba import carray

from fixedpoint_kernels.fused import fields as f
from fixedpoint_kernels.llvm.calls import inner
from fixedpoint_kernels.llvm.vectors import pointer_to
from fixedpoint_kernels.llvm.views import floats

__all__ = ["cut", "join"]


@inner
def join(d, n):
    """Write image ``n`` of a value where it belongs."""
    own, width, channels, wide = d[f.ELEMENTS], d[f.J_WIDTH], d[f.CHANNELS], d[f.J_CHANNELS]
    down, across = d[f.J_DOWN], d[f.J_ACROSS]
    source = floats(d[f.Z] + 4 * n * d[f.PADDED], own)
    made = floats(d[f.Y] + 4 * n * d[f.J_PADDED], d[f.J_PADDED])
    for to in range(own // channels * down * across):
        row, column = to // (width * across) // down, to % (width * across) // across
        values = source[(row * width + column) * channels :][:channels]
        out = made[to * wide + d[f.J_FIRST] :][:channels]
        for c in range(channels):
            out[c] = values[c]


@inner
def cut(d, n, dx):
    """Write the gradient of image ``n`` of a value: sums over the places made of one, in the order of rows.

    ``dx``: address of it, float32, of one image.
    """
    own, width, channels, wide = d[f.ELEMENTS], d[f.J_WIDTH], d[f.CHANNELS], d[f.J_CHANNELS]
    down, across = d[f.J_DOWN], d[f.J_ACROSS]
    found, bits = floats(dx, own), np.empty(channels, np.uint32)
    grad, first = bits.view(np.float32), found.view(np.uint32)
    for place in range(own // channels):
        row, column = place // width * down, place % width * across
        out = found[place * channels :][:channels]
        for tap in range(down * across):
            at = (row + tap // across) * width * across + column + tap % across
            start = d[f.G] + 2 * (n * d[f.J_PADDED] + at * wide + d[f.J_FIRST])
            narrow = carray(pointer_to(start), channels, np.uint16)
            if tap == 0:
                for c in range(channels):
                    first[place * channels + c] = np.uint32(narrow[c]) << np.uint32(16)
                continue
            for c in range(channels):
                bits[c] = np.uint32(narrow[c]) << np.uint32(16)
            for c in range(channels):
                out[c] += grad[c]
