"""Rounding of samples in Numba: the largest value, then codes, while the sample is in the cache."""

import numpy as np
import torch
from numba import prange, types
from numba.core import cgutils
from torch import Tensor

from fixedpoint_kernels.llvm.arrays import empty, zeros
from fixedpoint_kernels.llvm.calls import inner
from fixedpoint_kernels.llvm.vectors import I8, I16, Vector, intrinsic
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.philox.cpu import words
from fixedpoint_kernels.threads import compile_both, is_parallel

_BLOCK = 512  # elements of one vector, from 32 blocks of noise
_MAGIC = 1.5 * 2**23  # added, whole numbers stand in the lowest bits


@intrinsic
def round_block(_context, x, codes, at, block, key, scale):
    """Round ``_BLOCK`` elements from ``x[at]`` on to ``codes``.

    x (m,) float32; codes (m,) int8; block: of the noise, int64; key (seed, stream); scale float32.
    """
    signature = types.void(x, codes, at, block, key, types.float32)

    def codegen(context, builder, signature, args):
        def pointer(i):
            array = context.make_array(signature.args[i])(context, builder, args[i])
            return builder.gep(array.data, [args[2]])

        seed, stream = cgutils.unpack_tuple(builder, args[4])
        noise = words(builder, args[3], seed, stream, _BLOCK // 16).viewed(I8).converted(I16)
        scaled = Vector.load(builder, pointer(0), _BLOCK) * Vector.splat(builder, args[5], _BLOCK)
        whole = (scaled * 256.0 + _MAGIC).viewed(I16)  # its low halves: at most 127 * 256
        low = whole.shuffled(whole, range(0, 2 * _BLOCK, 2)) + noise
        (low >> 8).truncated(I8).store(pointer(1))
        return context.get_dummy_value()

    return signature, codegen


@inner
def exponent_of(bits):
    """Return the exponent of a sample whose numbers have these bits, as ``reference`` has it."""
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & np.int32(0x7FFFFFFF))
    if largest >= 0x7F800000:
        return 128
    return max((largest >> 23) - 133 + ((largest & 0x7FFFFF) > 0x7E0000), -126)


def _round(x, bits, codes, exponents, powers, seed, stream, first):
    # x (n, elements) float32, and its bits; powers (255,) float32: 2**-e at e + 126
    n, elements = x.shape
    blocks = (elements + 15) // 16  # of noise, a sample
    whole = elements // _BLOCK * _BLOCK
    for sample in prange(n):
        exponent = exponent_of(bits[sample])
        exponents[sample] = exponent
        if exponent == 128:
            codes[sample] = 0
            continue
        scale, start, key = powers[exponent + 126], (first + sample) * blocks, (seed, stream)
        for at in range(0, whole, _BLOCK):
            round_block(x[sample], codes[sample], at, start + at // 16, key, scale)
        if whole < elements:
            padded_x, padded_codes = zeros(_BLOCK, np.float32), empty(_BLOCK, np.int8)
            padded_x[: elements - whole] = x[sample, whole:]
            round_block(padded_x, padded_codes, 0, start + whole // 16, key, scale)
            codes[sample, whole:] = padded_codes[: elements - whole]


_round_serial, _round_parallel = compile_both(_round)
POWERS = np.ldexp(np.float32(1), np.arange(126, -128, -1)).astype(np.float32)


def round_per_sample(x: Tensor, key: Key) -> tuple[Tensor, Tensor]:
    """See ``fixedpoint_kernels.products.round_per_sample``; x (n, elements), contiguous."""
    values = x.detach().float()
    codes = torch.empty(x.shape, dtype=torch.int8, device="cpu")
    exponents = torch.empty(len(x), dtype=torch.int32, device="cpu")
    kernel = _round_parallel if is_parallel(x.numel()) else _round_serial
    kernel(
        values.numpy(),
        values.view(torch.int32).numpy(),
        codes.numpy(),
        exponents.numpy(),
        POWERS,
        *(key.seed, key.stream, key.offset),
    )
    return codes, exponents
