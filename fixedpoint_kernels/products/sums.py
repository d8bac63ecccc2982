"""int32 sums of products for weights, of images whose gradients have a power of two each, and float64 for what they cannot hold."""

import numpy as np

from fixedpoint_kernels.llvm.arrays import view
from fixedpoint_kernels.llvm.calls import inner
from fixedpoint_kernels.products.shapes import LONGEST_SUM

__all__ = ["double", "fold", "make_ready"]


@inner
def double(sums, count, times):
    """Double ``count`` int32 sums ``times`` times."""
    held = view(sums, count, np.int32)
    for i in range(count):
        held[i] <<= np.int32(times)


@inner
def fold(rows, n, sums, totals, held, flipped):
    """Add rows of ``n`` int32 sums to float64 totals, which the first time may hold anything; the sums become 0.

    ``held``: how many positions ``sums`` has, of what power, and how often it was folded. What was
    never folded is left for who writes the gradient.
    """
    scale, adds = held[1], held[2] > 0
    own = view(sums, (rows + 1) * n, np.int32)
    last = own[rows * n :]
    for row in range(rows):
        values, total = own[row * n : row * n + n], totals[row * n : row * n + n]
        if not adds:
            total[:] = 0.0
        if flipped:
            for i in range(n):
                total[i] += np.float64(np.int32(values[i] - np.int32(128) * last[i])) * scale
                values[i] = 0
        else:
            for i in range(n):
                total[i] += np.float64(values[i]) * scale
                values[i] = 0
    last[:] = 0
    held[0] = 0
    held[2] += 1


@inner
def make_ready(rows, n, sums, totals, held, power, outputs, flipped):
    """Make sums ready for ``outputs`` more positions of a power, and count these; see ``fold``.

    Sums of a larger power are doubled until they are of this one: each then counts as so many positions.
    """
    times = held[1] / power if held[0] > 0 else 1.0
    if times < 1 or held[0] * times + outputs > LONGEST_SUM:
        fold(rows, n, sums, totals, held, flipped)
    elif times > 1:
        double(sums, (rows + 1) * n, np.int64(np.log2(times)))
        held[0] *= times
    held[0] += outputs
    held[1] = power
