"""Activations that a CPU computes in the pass that makes their codes, with torch's bits.

Most are made of sums, comparisons, products and quotients, which every processor rounds alike. For
exponentials torch calls SLEEF where it has whole vectors, and libm for the rest, so that its last
bit depends on the number of threads: here are SLEEF's steps for all. Tanh is ours, within a unit of the
last place of the exact value, as torch's is. What has no short formula is left to torch's operator.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.polynomial import Chebyshev, Polynomial

from fixedpoint_kernels.few_bit.fused import ON_CPU, Fused
from fixedpoint_kernels.llvm.vectors import F32, I32, Vector, has_avx512

__all__ = ["formula_of", "value_of"]


def _clamped(x: Vector, low: Vector, high: Vector) -> Vector:
    x = (x < low).where(low, x)  # NaN stays, and the sign of 0
    return (x > high).where(high, x)


def _sixth(x: Vector) -> Vector:
    return _clamped(x + 3.0, x.constant(0.0), x.constant(6.0))


def _exponential(x: Vector) -> Vector:
    """Return e**x as SLEEF's ``expf_u10`` does, from -86 to 89; from 89 on it is infinity."""
    x = _clamped(x, x.constant(-86.0), x.constant(89.0))
    moved = x * _LOG2_E + _WHOLE
    whole = moved - _WHOLE  # rounded to even, as SLEEF's
    rest = whole.fused(x.constant(-0.693145751953125), x)
    rest = whole.fused(x.constant(-1.428606765330187045e-06), rest)
    series = x.constant(_SERIES[0])
    for term in _SERIES[1:]:
        series = series.fused(rest, x.constant(term))
    mantissa = (rest * rest).fused(series, rest) + 1.0
    if has_avx512():
        return mantissa.scaled(whole)
    # of 2 to the power of ``whole``, which is 128 at most, the half is a float32
    half = (moved.viewed(I32) << 23) + (126 << 23)
    return (mantissa + mantissa) * half.viewed(F32)


def _below_sigmoid(x: Vector) -> Vector:
    """Return 1 + e**-x: where e**-x is less than 1e-37, that is 1."""
    return _exponential(-x) + 1.0


def _tanh(x: Vector) -> Vector:
    size, sign = (x.viewed(I32) & 0x7FFFFFFF).viewed(F32), x.viewed(I32) & 0x80000000
    value = _tanh_by_pieces(size) if has_avx512() else _tanh_by_exponential(size)
    return (value.viewed(I32) | sign).viewed(F32)


def _tanh_by_exponential(x: Vector) -> Vector:
    """Return tanh as 1 - 2 / (1 + e**2x), and near 0, where that loses digits, by a series."""
    far = x.constant(1.0) - x.constant(2.0) / (_exponential(x + x) + 1.0)
    square, factor = x * x, x.constant(_SERIES_NEAR[0])
    for term in _SERIES_NEAR[1:]:
        factor = factor.fused(square, x.constant(term))
    return (x >= _NEAR).where(far, (square * x).fused(factor, x))  # NaN is near


def _tanh_by_pieces(x: Vector) -> Vector:
    """Return tanh as a polynomial for each quarter of an octave, and one for all below the first.

    Permutations find its factors: an exponential and a quotient take twice as long.
    """
    is_below, last = x < _FIRST, x.constant(_LAST)
    x = (last < x).where(last, x)  # NaN stays
    number = x.viewed(I32) >> 21  # of the piece, in its 5 lowest bits
    number = is_below.where(number.constant(_FIRST_NUMBER - 1), number)
    middle = (x.viewed(I32) & 0xFFE00000) | 0x00100000
    middle = is_below.where(middle.constant(0), middle)
    rest = x - middle.viewed(F32)
    value, *others = [
        x.constant(own[:16]).permuted(x.constant(own[16:]), number) for own in _tanh_pieces()
    ]
    for factor in others:
        value = value.fused(rest, factor)
    return value


def _tanh_pieces() -> list[list[float]]:
    """Return the factors of each power, the highest first: 32, at the piece's number modulo 32."""
    found = [[0, 1, 0, -1 / 3, 0, 2 / 15]]  # below the first: Taylor's, around 0
    for start in _FIRST * np.exp2(np.arange(8)):
        for quarter in range(4):
            half = start / 8
            middle = start + half * (1 + 2 * quarter)
            polynomial = Chebyshev.interpolate(
                lambda rest, middle=middle: np.tanh(middle + rest), 5, [-half, half]
            )
            found.append([*map(float, polynomial.convert(kind=Polynomial).coef)])
    del found[-1]  # above _LAST: its place is that of what is below the first
    rows = np.roll(np.array(found, np.float32), _FIRST_NUMBER - 1, axis=0).T[::-1]
    return [[float(factor) for factor in row] for row in rows]


_FIRST, _LAST = 2.0**-4, 13.0  # the first piece starts, and the last one ends, where tanh is 1
_FIRST_NUMBER = int(np.float32(_FIRST).view(np.uint32)) >> 21
_NEAR = 0.625
_SERIES_NEAR = [  # of least relative error below _NEAR: 5e-9
    float(np.float32(term))
    for term in (-0.005704987202, 0.02063908743, -0.05373971514, 0.133314422, -0.3333328194)
]
_LOG2_E = float(np.float32(1.442695040888963407359924681001892137))
_WHOLE = 1.5 * 2.0**23  # floats near it are whole numbers, and end in their lowest bits
_SERIES = [
    float(np.float32(term))
    for term in (
        0.000198527617612853646278381,
        0.00139304355252534151077271,
        0.00833336077630519866943359,
        0.0416664853692054748535156,
        0.166666671633720397949219,
        0.5,
    )
]

_VALUES: dict[str, Callable[[Vector, Vector, Vector], Vector]] = {
    "hardshrink": lambda x, a, b: ((x >= -a) & (x <= a)).where(x.constant(0.0), x),
    "hardsigmoid": lambda x, a, b: _sixth(x) / 6.0,
    "hardswish": lambda x, a, b: x * _sixth(x) / 6.0,
    "hardtanh": _clamped,
    "leaky_relu": lambda x, a, b: (x > 0.0).where(x, x * a),
    "sigmoid": lambda x, a, b: x.constant(1.0) / _below_sigmoid(x),
    "silu": lambda x, a, b: x / _below_sigmoid(x),
    "softshrink": lambda x, a, b: (x > a).where(x - a, (x < -a).where(x + a, x * 0.0 + 0.0)),
    "softsign": lambda x, a, b: x / ((x < 0.0).where(-x, x) + 1.0),
    "tanh": lambda x, a, b: _tanh(x),
    "threshold": lambda x, a, b: (x <= a).where(b, x),
}


@lru_cache(maxsize=256)
def formula_of(fused: Fused) -> tuple[np.float32, ...]:
    """Return what a kernel is compiled for, and gets: the numbers of a formula of ``ON_CPU``.

    Numba compiles a kernel for each type, and the type of a tuple is its length, which so says the
    kind. A class of our own would be named in Numba's files, which could not be read without it.
    """
    kind, a, b, _ = fused
    return (np.float32(a), np.float32(b), *(np.float32(0),) * ON_CPU.index(kind))


def value_of(x: Vector, formula: Sequence[Vector]) -> Vector:
    """Append the instructions of the value at ``x`` to its builder, in torch's order."""
    a, b, *others = formula
    return _VALUES[ON_CPU[len(others)]](x, a, b)
