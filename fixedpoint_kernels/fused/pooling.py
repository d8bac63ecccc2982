"""The largest element of each window of an image map, or the mean, and its gradient; channels last."""

import numpy as np

from fixedpoint_kernels.fused import fields as f
from fixedpoint_kernels.fused.graph import Pooled
from fixedpoint_kernels.llvm.arrays import empty, floats, view
from fixedpoint_kernels.llvm.calls import inner

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


@inner
def _windows(d):
    """Return what a kernel knows of windows, and by what means are multiplied."""
    own = view(d[f.WINDOWS], 11, np.int64)
    return own, np.float32(1.0 / (own[5] * own[6]))


@inner
def _place(own, at, tap):
    """Return the place of a window's element in the image, or -1 outside."""
    row = at // own[4] * own[7] - own[9] + tap // own[6]
    column = at % own[4] * own[8] - own[10] + tap % own[6]
    is_inside = row >= 0 and row < own[0] and column >= 0 and column < own[1]
    return row * own[1] + column if is_inside else np.int64(-1)


@inner
def pool(d, n):
    """Write the largest elements of image ``n``'s windows, and where they stood; or the means.

    Of equal elements the first counts, in the order of rows; NaN counts as largest. Means are sums in
    the order of rows, times ``1 / places``; of them no places are kept.
    """
    (own, share), channels, keeps = _windows(d), d[f.CHANNELS], d[f.PLACES] != 0
    source = floats(d[f.Z], (n + 1) * own[2])[n * own[2] :]
    made = floats(d[f.Y], (n + 1) * d[f.PADDED])[n * d[f.PADDED] :]
    for at in range(own[3] * own[4]):
        out, is_first = made[at * channels :][:channels], True
        taken = view(d[f.PLACES] + n * d[f.PADDED] + at * channels, channels, np.uint8)
        if not keeps:
            out[:] = np.float32(0.0)
        for tap in range(own[5] * own[6]):
            place = _place(own, at, tap)
            if place < 0:
                continue
            values = source[place * channels :][:channels]
            if not keeps:
                for c in range(channels):
                    out[c] += values[c]
                continue
            for c in range(channels):
                value = values[c]
                is_taken = is_first or value > out[c] or value != value
                out[c] = value if is_taken else out[c]
                taken[c] = np.uint8(tap) if is_taken else taken[c]
            is_first = False
        if not keeps:
            for c in range(channels):
                out[c] *= share


@inner
def unpool(d, n, dx):
    """Write the gradient of what was pooled, of image ``n``: windows one after the other.

    ``dx``: address of it, float32, of one image. The gradient of a largest element goes to its place,
    that of a mean to all.
    """
    (own, share), channels, keeps = _windows(d), d[f.CHANNELS], d[f.PLACES] != 0
    found, grad = floats(dx, own[2]), empty(channels, np.float32)
    bits = view(grad.ctypes.data, channels, np.uint32)
    found[:] = np.float32(0.0)
    for at in range(own[3] * own[4]):
        start = n * d[f.PADDED] + at * channels
        narrow = view(d[f.G] + 2 * start, channels, np.uint16)
        taken = view(d[f.PLACES] + start, channels, np.uint8)
        for c in range(channels):
            bits[c] = np.uint32(narrow[c]) << np.uint32(16)
        if not keeps:
            for c in range(channels):
                grad[c] *= share
        for tap in range(own[5] * own[6]):
            place = _place(own, at, tap)
            if place < 0:
                continue
            out = found[place * channels :][:channels]
            if not keeps:
                for c in range(channels):
                    out[c] += grad[c]
                continue
            for c in range(channels):
                out[c] += grad[c] if taken[c] == np.uint8(tap) else np.float32(0.0)
