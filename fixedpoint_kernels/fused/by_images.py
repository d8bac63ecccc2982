"""Weight gradients that threads add up by images: each has sums of the whole weight, which ``weights.collect_share`` adds up."""

from typing import Any

from fixedpoint_kernels.fused import fields as f
from fixedpoint_kernels.llvm.arrays import doubles
from fixedpoint_kernels.llvm.calls import inner
from fixedpoint_kernels.products import jobs
from fixedpoint_kernels.products.sums import make_ready

__all__ = ["add_weights", "held_of", "sort", "sums_of", "totals_of"]

spread_weights: Any = None  # of a path
multiply_weights = spread_weights
FLIPS = 0


@inner
def held_of(d, thread):
    """Return what a thread's sums for weights have; see ``sums.fold``."""
    return doubles(d[f.HELD], 3 * thread + 3)[3 * thread :]


@inner
def sums_of(d, thread):
    """Return the address of a thread's int32 sums for weights."""
    return d[f.SUMS] + thread * d[f.SUMS_STRIDE]


@inner
def totals_of(d, j, thread):
    """Return a thread's float64 totals for weights."""
    size = j[jobs.SUM_ROWS] * j[jobs.GROUPS] * 16
    return doubles(d[f.TOTALS], (thread + 1) * size)[thread * size :]


@inner
def sort(order, scales, images, is_odd):
    """Order images by the power of two of their gradient, largest first.

    Where there are few powers, every other time the largest comes last: what comes last then comes
    first the next time.
    """
    for i in range(images):
        order[i] = i
    for i in range(1, images):
        own, j = order[i], i - 1
        while j >= 0 and scales[order[j]] < scales[own]:
            order[j + 1] = order[j]
            j -= 1
        order[j + 1] = own
    powers = 1
    for i in range(1, images):
        powers += scales[order[i]] != scales[order[i - 1]]
    if is_odd and powers < 4:
        for i in range(images // 2):
            order[i], order[images - 1 - i] = order[images - 1 - i], order[i]


def add_weights(d, j, first, images, x, codes, order, scales, totals, work, sums, held):
    """Add the products of a few images to a layer's weight gradient.

    ``held``: as of ``sums.fold``; it is brought up to date.
    """
    flipped = FLIPS != 0 and j[jobs.FLIPPED] != 0
    rows_of_sums, n, at = j[jobs.SUM_ROWS], j[jobs.GROUPS] * 16, 0
    while at < images:
        power, end = scales[order[at]], at + 1
        while end < images and end - at < j[jobs.SLOTS] and scales[order[end]] == power:
            end += 1
        for row in range(0, j[jobs.COUNT_ROWS], j[jobs.BAND]):
            rows = min(j[jobs.BAND], j[jobs.COUNT_ROWS] - row)
            outputs = (end - at) * rows * j[jobs.COUNT_COLUMNS]
            make_ready(rows_of_sums, n, sums, totals, held, power, outputs, flipped)
            source = x + first * j[jobs.X_IMAGE]
            whole = spread_weights(
                j.ctypes.data, source, order.ctypes.data, at, end - at, row, rows, codes, work
            )
            multiply_weights(j.ctypes.data, 0, whole, sums, work)
        at = end
