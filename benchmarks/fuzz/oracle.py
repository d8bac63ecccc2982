"""What the kernels must compute, written a second time: numpy and Python's integers, nothing else.

No code is shared with the packages, and nothing of theirs is imported. Where a promise is of
float32 arithmetic, numpy computes it; where it is of numbers, float64 or integers hold them
exactly, and a comment says why.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

# Salmon et al., 2011, table 2 and section 3.3: multipliers, and steps of the key
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


class Failure(AssertionError):
    """A package computed something else."""


class Format(NamedTuple):
    """A fixed-point format as plain numbers."""

    wl: int
    fl: int
    symmetric: bool = False
    signed: bool = True

    @property
    def low(self) -> int:
        if not self.signed:
            return 0
        return -(2 ** (self.wl - 1)) + self.symmetric

    @property
    def high(self) -> int:
        return 2 ** (self.wl - self.signed) - 1

    def float_bounds(self) -> tuple[int, int]:
        """Return the smallest and largest code that float32, of 24 bits, holds."""
        excess = max(0, self.high.bit_length() - 24)
        high = self.high - self.high % 2**excess
        return (-high if self.symmetric else self.low), high


def philox(counter: Sequence[Any], key: Sequence[int]) -> list[Array]:
    """Return the four words of Philox4x32-10, of four counter words (arrays, too) and two of a key."""
    c = [np.atleast_1d(np.asarray(word, np.uint64)) for word in counter]
    k = list(key)
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(_MULTIPLIERS[0]), c[2] * np.uint64(_MULTIPLIERS[1])
        c = [
            (p1 >> _HALF) ^ c[1] ^ np.uint64(k[0]),
            p1 & _LOW,
            (p0 >> _HALF) ^ c[3] ^ np.uint64(k[1]),
            p0 & _LOW,
        ]
        k = [(word + step) % 2**32 for word, step in zip(k, _STEPS, strict=True)]
    return c


def noise(n: int, seed: int, stream: int, offset: int = 0) -> Array:
    """Return the upper 24 bits of the words of elements ``offset`` on, int64."""
    first, last = offset // 4, (offset + n + 3) // 4
    index = np.arange(first, last, dtype=np.uint64)
    zero = np.zeros_like(index)
    counter = index & _LOW, index >> _HALF, zero + stream % 2**32, zero + stream // 2**32
    words = np.stack(philox(counter, (seed % 2**32, seed // 2**32)), axis=1).ravel()
    return (words[offset % 4 :][:n] >> np.uint64(8)).astype(np.int64)


def whole_codes(x: Array, fl: int, drawn: Array | None) -> Array:
    """Round ``x * 2**fl`` to whole numbers, before saturation; float64, which holds them all.

    Args:
        x: float32.
        fl: Fractional length.
        drawn: From ``noise``, shape of ``x``; None: to nearest, ties to even.
    """
    with np.errstate(all="ignore"):
        # exact in float64; float32 differs where it overflows or underflows, and is what is promised
        scaled = (x.astype(np.float64) * 2.0**fl).astype(np.float32).astype(np.float64)
        if drawn is None:
            return np.rint(scaled)
        below = np.floor(scaled)
        # The promise is the float32 nearest to the fraction. Float64 rounds before, but to no
        # other end: a number of 24 bits less its floor has at most 53 bits, or lies within
        # 2**-53 of 0 or 1, and no midpoint of float32 is there.
        fraction = (scaled - below).astype(np.float32).astype(np.float64)
        return below + (drawn < fraction * 2.0**24)


def clamped(codes: Array, fmt: Format) -> tuple[Array, Array]:
    """Return codes within the format, NaN kept, and which were inside."""
    low, high = fmt.float_bounds()
    with np.errstate(invalid="ignore"):
        outside = (codes < low) | (codes > high)
        return np.where(codes < low, low, np.where(codes > high, high, codes)), ~outside


def quantize(x: Array, fmt: Format, drawn: Array | None) -> tuple[Array, Array]:
    """Return rounded values, float32, and which did not saturate."""
    codes, inside = clamped(whole_codes(x, fmt.fl, drawn), fmt)
    return (codes * 2.0**-fmt.fl + 0.0).astype(np.float32), inside


def encode(x: Array, fmt: Format, drawn: Array | None) -> Array:
    """Return codes, int64; 0 where ``x`` is NaN."""
    codes, _ = clamped(whole_codes(x, fmt.fl, drawn), fmt)
    return np.where(np.isnan(codes), 0, codes).astype(np.int64)


def stored(x: Array, dtype: str) -> Array:
    """Return float32 values as ``dtype`` holds them, ties to even; float32, NaN kept."""
    with np.errstate(over="ignore"):
        if dtype == "float16":
            return x.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = x.view(np.uint32).astype(np.uint64)
        rounded = (bits + np.uint64(0x7FFF) + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(
            16
        )
        whole = (rounded << np.uint64(16)).astype(np.uint32).view(np.float32)
        return np.where(np.isnan(x), np.float32(np.nan), whole)
    return x


def pack(codes: Sequence[int], bits: int) -> bytes:
    """Return codes one behind the other, lowest bit first, as one long integer's bytes."""
    text = "".join(format(code & (2**bits - 1), f"0{bits}b") for code in reversed(codes))
    return int(text or "0", 2).to_bytes((len(codes) * bits + 7) // 8, "little")


def unpack(data: bytes, bits: int, count: int, signed: bool) -> list[int]:
    """Return what ``pack`` was given."""
    whole = format(int.from_bytes(data, "little"), f"0{max(1, count * bits)}b")[::-1]
    codes = [int(whole[i * bits : (i + 1) * bits][::-1], 2) for i in range(count)]
    return [code - (code >> bits - 1 << bits) if signed else code for code in codes]


def round_fraction(value: Fraction, fmt: Format) -> int:
    """Return the nearest code, ties to even, saturated."""
    scaled = value * Fraction(2) ** fmt.fl
    twice, rest = divmod(2 * scaled.numerator, scaled.denominator)
    code = (twice + 1) // 2  # of x.5 and above, one up; of an exact tie, to be put right
    if rest == 0 and twice % 2 and code % 2:
        code -= 1
    return min(max(code, fmt.low), fmt.high)


def bins_of(values: Array, low: float, high: float, resolution: int) -> Array:
    """Return the bins of float32 values: ``floor((v - low) * (resolution / (high - low)))``.

    All are scaled by the power of two that brings the range to between 1/2 and 1, within 2**-126
    and 2**126: then nothing overflows.
    """
    exponent = math.frexp(high - low)[1]
    power = np.float32(2.0 ** min(max(-exponent, -126), 126))
    first, last = np.float32(low) * power, np.float32(high) * power
    per_unit = np.float32(resolution) / (last - first)
    with np.errstate(over="ignore", under="ignore"):
        place = np.floor((values.astype(np.float32) * power - first) * per_unit)
    return np.clip(place, 0, resolution - 1).astype(np.int64)


def expected_counts(x: Array, fmt: Format, resolution: int) -> Array:
    """Return expected counts of stochastic rounding, float64.

    ``x`` has few elements, so that float64 holds the sums: each is a multiple of 2**-48 or so.
    """
    scaled = x.astype(np.float64) * 2.0**fmt.fl
    below = np.floor(scaled)
    up = scaled - below  # exact: both are multiples of the last bit of ``scaled``
    counts = np.zeros(resolution)
    for codes, weight in ((below, 1 - up), (below + 1, up)):
        values = np.clip(codes, fmt.low, fmt.high).astype(np.float32) * np.float32(2.0**-fmt.fl)
        bins = bins_of(values, float(x.min()), float(x.max()), resolution)
        counts += np.bincount(bins, weight, resolution)
    return counts


def kl(rounded: Array, own: Array, smoothing: float = 0.5) -> float:
    """Return the divergence of two histograms, nats."""
    total = own.sum() + len(own) * smoothing
    p, q = (rounded + smoothing) / total, (own + smoothing) / total
    return float((p * np.log(p / q)).sum())


def block_fl(low: float, high: float, wl: int) -> int:
    """Return the largest power at which both ends round to a code of ``wl`` bits; 0 of no range."""
    if not (np.isfinite(low) and np.isfinite(high)) or not (high > 0 or low < 0):
        return 0
    ratios = [(Fraction(2 ** (wl - 1)) - Fraction(1, 2)) / Fraction(high)] if high > 0 else []
    ratios += [(Fraction(2 ** (wl - 1)) + Fraction(1, 2)) / Fraction(-low)] if low < 0 else []
    ratio = min(ratios)
    fl = ratio.numerator.bit_length() - ratio.denominator.bit_length() - 1
    while Fraction(2) ** (fl + 1) <= ratio:
        fl += 1
    return min(max(fl, -126), 126)


def same(got: Array, want: Array, what: str) -> None:
    """Fail unless two arrays have the same shape, numbers and signs of zeros; NaN equals NaN."""
    if got.shape != want.shape:
        raise Failure(f"{what}: shape {got.shape}, must be {want.shape}")
    if got.dtype.kind == "f":
        is_same = (got == want) & (np.signbit(got) == np.signbit(want)) | (got != got) & (
            want != want
        )
    else:
        is_same = got == want
    if not is_same.all():
        at = tuple(int(i[0]) for i in np.nonzero(~is_same)) if got.ndim else ()
        count = int((~is_same).sum())
        raise Failure(
            f"{what}: {count} of {got.size} differ, first at {at}: {got[at]!r}, must be {want[at]!r}"
        )
