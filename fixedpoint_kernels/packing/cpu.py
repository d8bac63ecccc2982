"""Bit packing in Numba: a shift register a task; 8 codes fill ``bits`` bytes, so tasks meet there.

Each kernel is compiled twice from one definition, serial and parallel: a parallel region costs
more than it gains on small tensors.
"""

import numpy as np
from numba import njit, prange
from torch import Tensor

from fixedpoint_kernels.threads import compile_both, is_parallel

_TASK = 4096  # codes that a thread takes at a time, a multiple of 8
_BYTE = np.uint64(8)


@njit(inline="always")
def _pack_task(codes, packed, bits, start):
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    register, filled, at = np.uint64(0), 0, start // 8 * bits
    for i in range(start, min(start + _TASK, codes.size)):
        register |= (np.uint64(codes[i]) & mask) << np.uint64(filled)
        filled += bits
        while filled >= 8:
            packed[at] = np.uint8(register)
            register >>= _BYTE
            filled -= 8
            at += 1
    if filled:
        packed[at] = np.uint8(register)


@njit(inline="always")
def _unpack_task(packed, codes, bits, signed, start):
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    sign = np.int64(1) << (bits - 1) if signed else np.int64(0)
    register, filled, at = np.uint64(0), 0, start // 8 * bits
    for i in range(start, min(start + _TASK, codes.size)):
        while filled < bits:
            register |= np.uint64(packed[at]) << np.uint64(filled)
            filled += 8
            at += 1
        codes[i] = (np.int64(register & mask) ^ sign) - sign
        register >>= np.uint64(bits)
        filled -= bits


def _pack(codes, packed, bits):  # (n,) integers, (ceil(n * bits / 8),) uint8
    for task in prange((codes.size + _TASK - 1) // _TASK):
        _pack_task(codes, packed, bits, task * _TASK)


def _unpack(packed, codes, bits, signed):  # (ceil(n * bits / 8),) uint8, (n,) integers
    for task in prange((codes.size + _TASK - 1) // _TASK):
        _unpack_task(packed, codes, bits, signed, task * _TASK)


_pack_serial, _pack_parallel = compile_both(_pack)
_unpack_serial, _unpack_parallel = compile_both(_unpack)


def pack(codes: Tensor, packed: Tensor, bits: int) -> None:
    """See ``fixedpoint_kernels.packing.pack``; ``codes`` is flat and signed."""
    kernel = _pack_parallel if is_parallel(codes.numel()) else _pack_serial
    kernel(codes.numpy(), packed.numpy(), bits)


def unpack(packed: Tensor, codes: Tensor, bits: int, signed: bool) -> None:
    """See ``fixedpoint_kernels.packing.unpack``; ``codes`` is flat."""
    kernel = _unpack_parallel if is_parallel(codes.numel()) else _unpack_serial
    kernel(packed.numpy(), codes.numpy(), bits, signed)
