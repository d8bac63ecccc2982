"""Philox-4x32-10 for Numba kernels."""

import numpy as np
from numba import njit

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_HALF = np.uint64(32)


@njit(inline="always")
def philox(c0, c1, c2, c3, k0, k1):
    """Return the four uint32 words of one counter; see ``fixedpoint_kernels.philox``."""
    for _ in range(10):
        p0 = np.uint64(c0) * _M0
        p1 = np.uint64(c2) * _M1
        c0, c1, c2, c3 = (
            np.uint32(p1 >> _HALF) ^ c1 ^ k0,
            np.uint32(p1),
            np.uint32(p0 >> _HALF) ^ c3 ^ k1,
            np.uint32(p0),
        )
        k0 = np.uint32(k0 + _W0)
        k1 = np.uint32(k1 + _W1)
    return c0, c1, c2, c3


@njit(inline="always")
def to_uniform(word):
    """Return the float32 in [0, 1) of a uint32 word."""
    # int32 converts faster than uint32
    return np.float32(np.int32(word >> np.uint32(8))) * np.float32(2.0**-24)
