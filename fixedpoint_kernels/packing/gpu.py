"""Bit packing in Triton: one program writes a block of bytes, or of codes."""

# Rules that kernels break, for they are Triton's language; launchers keep all others.
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from torch import Tensor

from fixedpoint_kernels.philox.gpu import jit

_BLOCK = 1024  # a multiple of 8, so that a block of codes starts at a byte


@jit
def _pack_kernel(
    codes_ptr,  # (n,) int8, int16, int32 or int64
    packed_ptr,  # (size,) uint8
    n,
    size,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    byte = tl.arange(0, BLOCK)
    first_byte = tl.program_id(0).to(tl.int64) * BLOCK
    first_code = 8 * first_byte // BITS
    bit = (8 * first_byte - first_code * BITS).to(tl.int32) + 8 * byte  # of the byte's lowest bit
    code, shift = bit // BITS, bit % BITS
    value = tl.full((BLOCK,), 0, tl.uint32)
    for j in tl.static_range(1 + (BITS + 6) // BITS):
        at = j * BITS - shift  # where the code starts in the byte; the first may start before it
        index = first_code + code + j
        c = tl.load(codes_ptr + index, mask=(index < n) & (at < 8), other=0).to(tl.uint32)
        c = c & ((1 << BITS) - 1)
        value = value | (c >> shift if j == 0 else c << (at & 7))
    offsets = first_byte + byte
    tl.store(packed_ptr + offsets, (value & 255).to(tl.uint8), mask=offsets < size)


@jit
def _unpack_kernel(
    packed_ptr,  # (size,) uint8
    codes_ptr,  # (n,) int8, int16, int32; uint8 or int64 where SIGNED is false
    n,
    size,
    BITS: tl.constexpr,
    SIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # holds a code and 7 bits more
    WORD: tl.constexpr = tl.int32 if BITS <= 25 else tl.int64  # pyright: ignore[reportAssignmentType]
    code = tl.arange(0, BLOCK)
    first_byte = tl.program_id(0).to(tl.int64) * (BLOCK // 8 * BITS)
    shift = code * BITS & 7
    word = tl.full((BLOCK,), 0, WORD)
    for j in tl.static_range((BITS + 14) // 8):
        index = first_byte + (code * BITS >> 3) + j
        is_used = (index < size) & (8 * j < shift + BITS)
        word = word | (tl.load(packed_ptr + index, mask=is_used, other=0).to(WORD) << 8 * j)
    value = (word >> shift) & ((1 << BITS) - 1)
    if SIGNED:
        value = (value ^ (1 << BITS - 1)) - (1 << BITS - 1)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + code
    tl.store(codes_ptr + offsets, value.to(codes_ptr.dtype.element_ty), mask=offsets < n)


def pack(codes: Tensor, packed: Tensor, bits: int) -> None:
    """See ``fixedpoint_kernels.packing.pack``; ``codes`` is flat and signed."""
    _pack_kernel[(triton.cdiv(packed.numel(), _BLOCK),)](
        codes,
        packed,
        codes.numel(),
        packed.numel(),
        BITS=bits,
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )


def unpack(packed: Tensor, codes: Tensor, bits: int, signed: bool) -> None:
    """See ``fixedpoint_kernels.packing.unpack``; ``codes`` is flat."""
    _unpack_kernel[(triton.cdiv(codes.numel(), _BLOCK),)](
        packed,
        codes,
        codes.numel(),
        packed.numel(),
        BITS=bits,
        SIGNED=signed,
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )
