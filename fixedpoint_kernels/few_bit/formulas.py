"""Activations that a CPU computes in the pass that makes their codes, with torch's bits.

Here are those made of sums, comparisons, products and quotients, which every processor rounds
alike. For exponentials torch calls other packages, so there torch's operator computes the value.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from fixedpoint_kernels.few_bit.fused import ON_CPU, Fused
from fixedpoint_kernels.llvm.vectors import Vector

__all__ = ["formula_of", "value_of"]


def _clamped(x: Vector, low: Vector, high: Vector) -> Vector:
    x = (x < low).where(low, x)  # NaN stays, and the sign of 0
    return (x > high).where(high, x)


def _sixth(x: Vector) -> Vector:
    return _clamped(x + 3.0, x.constant(0.0), x.constant(6.0))


_VALUES: dict[str, Callable[[Vector, Vector, Vector], Vector]] = {
    "hardshrink": lambda x, a, b: ((x >= -a) & (x <= a)).where(x.constant(0.0), x),
    "hardsigmoid": lambda x, a, b: _sixth(x) / 6.0,
    "hardswish": lambda x, a, b: x * _sixth(x) / 6.0,
    "hardtanh": _clamped,
    "leaky_relu": lambda x, a, b: (x > 0.0).where(x, x * a),
    "softsign": lambda x, a, b: x / ((x < 0.0).where(-x, x) + 1.0),
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
