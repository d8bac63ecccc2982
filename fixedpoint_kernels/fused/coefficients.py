"""What belongs to the channels of a layer, from the sums over all images: once a region."""

import numpy as np

from fixedpoint_kernels.fused import fields as f
from fixedpoint_kernels.llvm.arrays import doubles, empty, floats, view, zeros
from fixedpoint_kernels.llvm.calls import inner

__all__ = ["bias", "coefficients", "gradient_coefficients", "spread"]


@inner
def spread(values, channels, pattern, address):
    """Write a number for each channel, again and again, as elements lie."""
    out = floats(address, pattern)
    for i in range(pattern):
        out[i] = values[i % channels]


@inner
def _mix(address, c, value, share):
    """Move a running statistic towards a value, as batch norm does."""
    running = floats(address, c + 1)
    running[c] = running[c] + np.float32(share) * (np.float32(value) - running[c])


@inner
def coefficients(d, threads):
    """Write by what a layer's sums are multiplied and what is added, from all its sums."""
    channels, groups = d[f.CHANNELS], (d[f.CHANNELS] + 15) // 16
    sums = view(d[f.STATISTICS], (threads, groups, 48), np.int64)
    means, inverses = doubles(d[f.MEANS], channels), doubles(d[f.INVERSES], channels)
    variances, numbers = doubles(d[f.VARIANCES], channels), doubles(d[f.NUMBERS], 2)
    powers = floats(d[f.POWERS], channels)
    a, b = empty(channels, np.float32), empty(channels, np.float32)
    count, eps = d[f.POSITIONS], numbers[0]
    images = count // (d[f.ELEMENTS] // channels)
    moments = doubles(d[f.SUMS], 2 * images * channels if d[f.SUMS] else 0)
    for c in range(channels):
        group, lane = c // 16, c % 16
        place = 16 + lane // 2 + 8 * (lane % 2)  # even columns, then odd ones
        total, high, low = np.int64(0), np.int64(0), np.int64(0)
        for thread in range(threads):
            total += sums[thread, group, lane]
            high += sums[thread, group, place]
            low += sums[thread, group, place + 16]
        high, low = high + (low >> 32), low & 0xFFFFFFFF
        squares = np.float64(high) * 2.0**32 + np.float64(low)
        first = np.float64(total)
        for n in range(images if d[f.SUMS] else 0):
            first += moments[2 * n * channels + c]
            squares += moments[(2 * n + 1) * channels + c]
        mean = first / count
        variance = max(squares / count - mean * mean, 0.0)
        power = np.float64(powers[c])
        mean, variance = mean * power, variance * (power * power)
        inverse = 1.0 / np.sqrt(variance + eps)
        means[c], variances[c], inverses[c] = mean, variance, inverse
        if d[f.RUNNING_MEAN]:
            share, unbiased = numbers[1], variance * (count / max(count - 1, 1))
            _mix(d[f.RUNNING_MEAN], c, mean, share)
            _mix(d[f.RUNNING_VARIANCE], c, unbiased, share)
        scale = np.float64(floats(d[f.SCALE], channels)[c]) if d[f.SCALE] else 1.0
        shift = np.float64(floats(d[f.SHIFT], channels)[c]) if d[f.SHIFT] else 0.0
        factor = scale * inverse
        a[c], b[c] = factor, shift - factor * mean
    spread(a, channels, d[f.PATTERN], d[f.A])
    spread(b, channels, d[f.PATTERN], d[f.B])


@inner
def bias(d):
    """Write the coefficients of a layer without batch norm."""
    channels = d[f.CHANNELS]
    a, b = np.ones(channels, np.float32), zeros(channels, np.float32)
    if d[f.SHIFT]:
        shift = floats(d[f.SHIFT], channels)
        for c in range(channels):  # Numba compiles much for arrays that are assigned
            b[c] = shift[c]
    spread(a, channels, d[f.PATTERN], d[f.A])
    spread(b, channels, d[f.PATTERN], d[f.B])


@inner
def gradient_coefficients(d, images):
    """Write those of batch norm's backward, and the gradients of its scale and shift."""
    channels, stride = d[f.CHANNELS], d[f.SUMS_STRIDE]
    sums = doubles(d[f.SUMS], images * 3 * stride)
    of_scale, of_shift = floats(d[f.OF_SCALE], channels), floats(d[f.OF_SHIFT], channels)
    a, b, c = (
        empty(channels, np.float32),
        empty(channels, np.float32),
        empty(channels, np.float32),
    )
    count = d[f.POSITIONS]
    firsts, seconds = zeros(channels, np.float64), zeros(channels, np.float64)
    for n in range(images):  # image by image, for channels lie side by side
        at, other = 3 * n * stride, (3 * n + d[f.WHICH]) * stride
        own, more = sums[at : at + channels], sums[other : other + channels]
        for i in range(channels):
            firsts[i] += own[i]
            seconds[i] += more[i]
    for i in range(channels):
        first, second = firsts[i], seconds[i]
        of_shift[i] = first
        if not d[f.HAS_NORM]:
            continue
        mean = doubles(d[f.MEANS], channels)[i]
        inverse = doubles(d[f.INVERSES], channels)[i]
        part = (second - mean * first) * inverse
        of_scale[i] = part
        scale = np.float64(floats(d[f.SCALE], channels)[i]) if d[f.SCALE] else 1.0
        factor = scale * inverse
        slope = -factor * inverse * part / count
        a[i], b[i], c[i] = factor, slope, -factor * first / count - slope * mean
    if d[f.HAS_NORM]:
        spread(a, channels, d[f.PATTERN], d[f.GA])
        spread(b, channels, d[f.PATTERN], d[f.GB])
        spread(c, channels, d[f.PATTERN], d[f.GC])
