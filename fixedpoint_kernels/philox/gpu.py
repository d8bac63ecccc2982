"""Philox-4x32-10 for Triton kernels."""

# Rules that kernels break, for they are Triton's language; launchers keep all others.
# pyright: reportGeneralTypeIssues=false

from typing import Any

import triton
import triton.language as tl

jit: Any = triton.jit  # of any type: a launch takes a grid and options beside the parameters


@jit
def uniform(
    block,  # (BLOCKS,) int64: element index >> 2
    seed,  # int64
    stream,  # int64
    BLOCKS: tl.constexpr,
):
    """Return the float32 noise of elements ``4 * block + lane``, shape ``(4 * BLOCKS,)``."""
    return (words(block, seed, stream, BLOCKS) >> 8).to(
        tl.float32
    ) * 5.9604644775390625e-08  # 2**-24


@jit
def words(
    block,  # (BLOCKS,) int64: word index >> 2
    seed,  # int64
    stream,  # int64
    BLOCKS: tl.constexpr,
):
    """Return the uint32 words ``4 * block + lane``, shape ``(4 * BLOCKS,)``."""
    c0, c1 = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    c2 = tl.full((BLOCKS,), 0, tl.uint32) + stream.to(tl.uint32)
    c3 = tl.full((BLOCKS,), 0, tl.uint32) + (stream >> 32).to(tl.uint32)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        hi0, lo0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        hi1, lo1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return tl.join(tl.join(c0, c2), tl.join(c1, c3)).reshape(4 * BLOCKS)
