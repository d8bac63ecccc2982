"""Philox-4x32-10 for Numba kernels."""

from typing import Any

import numpy as np
from numba import njit, types
from numba.core import cgutils

from fixedpoint_kernels.llvm.vectors import F32, I16, I32, Vector, intrinsic

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


def uniform(builder: Any, block: Any, seed: Any, stream: Any, blocks: int) -> Vector:
    """Return the noise of ``4 * blocks`` elements as a float32 vector; see ``words``."""
    return (words(builder, block, seed, stream, blocks) >> 8).converted(F32) * 2.0**-24


def words(builder: Any, block: Any, seed: Any, stream: Any, blocks: int) -> Vector:
    """Return ``4 * blocks`` words of noise as an int32 vector, inside a Numba intrinsic.

    Args:
        builder: Where code is being generated.
        block: Element index >> 2 of the first, a multiple of ``blocks``; 64 bits, as the key is.
        seed: The key's.
        stream: The key's.
        blocks: A power of two.
    """
    # of each 64-bit lane, what is above the low 32 bits is ignored
    index, k0, c2 = (Vector.splat(builder, word, blocks) for word in (block, seed, stream))
    c0, c1, c3, k1 = index + index.constant(range(blocks)), index >> 32, c2 >> 32, k0 >> 32
    for _ in range(10):
        p0, p1 = (c0 & 0xFFFFFFFF) * int(_M0), (c2 & 0xFFFFFFFF) * int(_M1)
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1, (p0 >> 32) ^ c3 ^ k1, p0
        k0, k1 = k0 + int(_W0), k1 + int(_W1)
    w0, w1, w2, w3 = (c.viewed(I32) for c in (c0, c1, c2, c3))
    n = 2 * blocks  # each word of a block in the lower half of a pair
    low = [word for i in range(0, n, 2) for word in (i, n + i)]
    pairs = [word for i in range(0, n, 2) for word in (i, i + 1, n + i, n + i + 1)]
    return w0.shuffled(w1, low).shuffled(w2.shuffled(w3, low), pairs)


DRAWN = 256
"""Bits that ``draw`` writes."""
_PART = 32  # of them at a time


@intrinsic
def draw(_context, address, block, key, threshold):
    """Write which of ``DRAWN`` numbers stay, a bit each: those whose 16 bits of noise are not below a threshold.

    address: int64; block: number of the first, divided by 8, int64; key (seed, stream); threshold int64.
    """
    signature = types.void(address, block, key, threshold)

    def codegen(context, builder, signature, args):
        seed, stream = cgutils.unpack_tuple(builder, args[2])
        halves = words(builder, args[1], seed, stream, DRAWN // 8).viewed(I16)
        limit = Vector.splat(builder, builder.trunc(args[3], I16), _PART)
        target = builder.inttoptr(args[0], I32.as_pointer())
        for i in range(DRAWN // _PART):
            part = halves.shuffled(halves, range(_PART * i, _PART * (i + 1)))
            stays = builder.icmp_unsigned(">=", part.value, limit.value)
            place = builder.gep(target, [I32(i)])
            builder.store(builder.bitcast(stays, I32), place, align=1)
        return context.get_dummy_value()

    return signature, codegen
