"""The largest element of each window of an image map, or the mean, and its gradient; channels last."""

import numpy as np
from numba import carray, njit

from fixedpoint_kernels.fused import fields as f
from fixedpoint_kernels.fused.graph import Pooled
from fixedpoint_kernels.fused.views import of_image
from fixedpoint_kernels.llvm.vectors import pointer_to

__all__ = ["numbers_of", "pool", "unpool"]


def numbers_of(value: Pooled, source: tuple[int, int, int], padded: int, made: tuple) -> np.ndarray:
    """Return what the kernels know of windows, int64.

    Args:
        value: With kernel, stride and padding.
        source: Channels, height and width of what is pooled.
        padded: Elements from one image of it to the next.
        made: Channels, height and width of the result.
    """
    stride, padding = value.window[:2]
    kernel = value.kernel or source[1:]
    found = [*source[1:], padded, *made[1:], *kernel, *stride, *padding]
    return np.array(found, np.int64)


@njit
def pool(d, n):
    """Write the largest elements of image ``n``, or means where no places are kept."""
    if d[f.PLACES]:
        _take(d, n)
    else:
        _average(d, n)


@njit
def unpool(d, n, dx):
    """Write the gradient of what was pooled, of image ``n``.

    ``dx``: address of it, float32, of one image.
    """
    if d[f.PLACES]:
        _give(d, n, dx)
    else:
        _spread(d, n, dx)


@njit
def _average(d, n):
    """Write the means of windows: sums in the order of rows, times ``1 / places``."""
    windows, channels = carray(pointer_to(d[f.WINDOWS]), 11, np.int64), d[f.CHANNELS]
    height, width, padded, rows, columns, tall, wide, down, right, above, left = windows
    source = of_image(d[f.Z], n, padded, np.float32)
    made = of_image(d[f.Y], n, d[f.PADDED], np.float32)
    share = np.float32(1.0 / (tall * wide))
    for at in range(rows * columns):
        out = made[at * channels :][:channels]
        top, start = at // columns * down - above, at % columns * right - left
        out[:] = np.float32(0.0)
        for tap in range(tall * wide):
            row, column = top + tap // wide, start + tap % wide
            if row < 0 or row >= height or column < 0 or column >= width:
                continue
            values = source[(row * width + column) * channels :][:channels]
            for c in range(channels):
                out[c] += values[c]
        for c in range(channels):
            out[c] *= share


@njit
def _spread(d, n, dx):
    """Add the gradient of each mean to its places, in the order of windows."""
    windows, channels = carray(pointer_to(d[f.WINDOWS]), 11, np.int64), d[f.CHANNELS]
    height, width, padded, rows, columns, tall, wide, down, right, above, left = windows
    found = of_image(dx, 0, padded, np.float32)
    grads = of_image(d[f.G], n, d[f.PADDED], np.uint16)
    bits = np.empty(channels, np.uint32)
    grad, share = bits.view(np.float32), np.float32(1.0 / (tall * wide))
    found[:] = np.float32(0.0)
    for at in range(rows * columns):
        narrow = grads[at * channels :][:channels]
        top, start = at // columns * down - above, at % columns * right - left
        for c in range(channels):
            bits[c] = np.uint32(narrow[c]) << np.uint32(16)
        for c in range(channels):
            grad[c] *= share
        for tap in range(tall * wide):
            row, column = top + tap // wide, start + tap % wide
            if row < 0 or row >= height or column < 0 or column >= width:
                continue
            out = found[(row * width + column) * channels :][:channels]
            for c in range(channels):
                out[c] += grad[c]


@njit
def _take(d, n):
    """Write the largest elements of image ``n``, and their numbers within their windows.

    Of equal elements the first counts, in the order of rows; NaN counts as largest.
    """
    windows, channels = carray(pointer_to(d[f.WINDOWS]), 11, np.int64), d[f.CHANNELS]
    height, width, padded, rows, columns, tall, wide, down, right, above, left = windows
    source = of_image(d[f.Z], n, padded, np.float32)
    made = of_image(d[f.Y], n, d[f.PADDED], np.float32)
    taken = of_image(d[f.PLACES], n, d[f.PADDED], np.uint8)
    for at in range(rows * columns):
        out, place = made[at * channels :][:channels], taken[at * channels :][:channels]
        top, start = at // columns * down - above, at % columns * right - left
        is_first = True
        for tap in range(tall * wide):
            row, column = top + tap // wide, start + tap % wide
            if row < 0 or row >= height or column < 0 or column >= width:
                continue
            values = source[(row * width + column) * channels :][:channels]
            own = np.uint8(tap)
            for c in range(channels):
                value = values[c]
                is_taken = is_first or value > out[c] or value != value
                out[c] = value if is_taken else out[c]
                place[c] = own if is_taken else place[c]
            is_first = False


@njit
def _give(d, n, dx):
    """Add the gradient of each window to that of its largest element, in the order of windows."""
    windows, channels = carray(pointer_to(d[f.WINDOWS]), 11, np.int64), d[f.CHANNELS]
    height, width, padded, rows, columns, tall, wide, down, right, above, left = windows
    found = of_image(dx, 0, padded, np.float32)
    grads = of_image(d[f.G], n, d[f.PADDED], np.uint16)
    taken = of_image(d[f.PLACES], n, d[f.PADDED], np.uint8)
    bits = np.empty(channels, np.uint32)
    grad = bits.view(np.float32)
    found[:] = 0.0
    for at in range(rows * columns):
        narrow, place = grads[at * channels :][:channels], taken[at * channels :][:channels]
        top, start = at // columns * down - above, at % columns * right - left
        for c in range(channels):
            bits[c] = np.uint32(narrow[c]) << np.uint32(16)
        for tap in range(tall * wide):
            row, column = top + tap // wide, start + tap % wide
            if row < 0 or row >= height or column < 0 or column >= width:
                continue
            out, own = found[(row * width + column) * channels :][:channels], np.uint8(tap)
            for c in range(channels):
                out[c] += grad[c] if place[c] == own else np.float32(0.0)
