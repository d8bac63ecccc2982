"""Memory as arrays, in compiled code; addresses are int64."""

import numpy as np
from numba import carray, njit

from fixedpoint_kernels.llvm.vectors import pointer_to

__all__ = ["doubles", "floats", "of_image"]


@njit
def floats(address, n):
    """Return ``n`` float32."""
    return carray(pointer_to(address), n, np.float32)


@njit
def doubles(address, n):
    """Return ``n`` float64."""
    return carray(pointer_to(address), n, np.float64)


@njit
def of_image(address, n, size, kind):
    """Return the elements of image ``n``, of ``size`` each."""
    return carray(pointer_to(address), (n + 1) * size, kind)[n * size :]
