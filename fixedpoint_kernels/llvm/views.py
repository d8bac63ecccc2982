"""Memory as arrays, in compiled code; addresses are int64."""

import numpy as np
from numba import carray

from fixedpoint_kernels.llvm.calls import inner
from fixedpoint_kernels.llvm.vectors import pointer_to

__all__ = ["doubles", "floats"]


@inner
def floats(address, n):
    """Return ``n`` float32."""
    return carray(pointer_to(address), n, np.float32)


@inner
def doubles(address, n):
    """Return ``n`` float64."""
    return carray(pointer_to(address), n, np.float64)
