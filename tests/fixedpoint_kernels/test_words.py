import numpy as np
import pytest
import torch
from llvmlite import ir
from numba import njit

from fixedpoint_kernels.llvm import tiles, vectors, words
from fixedpoint_kernels.llvm.vectors import has_avx512, has_bfloat16
from fixedpoint_kernels.llvm.words import Words
from fixedpoint_kernels.products.reference import to_bfloat16


@pytest.mark.parametrize("lanes", [16, 64])
@pytest.mark.parametrize("has_masks", [True, False])
def test_masks_with_and_without_avx512(monkeypatch, has_masks, lanes):
    """Masks go to lanes and back: in one register of AVX-512, or through vectors of any processor."""
    if has_masks and not has_avx512():
        pytest.skip("needs AVX-512")
    monkeypatch.setattr(words, "has_avx512", lambda: has_masks)

    def body(builder, masks, x, out, found):
        to = Words(builder, lanes)
        flags = to.flags(to.one(masks, ir.IntType(lanes)))
        to.store(flags.where(to.load(x), to.zero), out)
        above = to.load(x) > 0.0
        builder.store(to.bits(above), to.place(found, ir.IntType(lanes)))

    run = tiles.addressed(4, body)

    @njit
    def go(masks, x, out, found, count):
        for i in range(count):
            run(
                masks + i * lanes // 8,
                x + 4 * i * lanes,
                out + 4 * i * lanes,
                found + i * lanes // 8,
            )

    rng = np.random.default_rng(0)
    count = 40
    kept = rng.integers(0, 2, (count, lanes)).astype(bool)
    kept[:2] = [[False], [True]]
    x = rng.standard_normal((count, lanes)).astype(np.float32)
    x[:2] = [[1], [-1]]
    masks, found = (
        np.packbits(kept, axis=1, bitorder="little"),
        np.zeros((count, lanes // 8), np.uint8),
    )
    out = np.empty_like(x)
    go(masks.ctypes.data, x.ctypes.data, out.ctypes.data, found.ctypes.data, count)
    assert np.array_equal(out, np.where(kept, x, np.float32(0)))
    assert np.array_equal(found, np.packbits(x > 0, axis=1, bitorder="little"))


def rounded(x):
    """Round float32 to bfloat16 by whole numbers, one at a time; what is below 2**-126 becomes 0."""
    found = []
    for bits in x.view(np.uint32).tolist():
        sign, rest = bits & 0x80000000, bits & 0x7FFFFFFF
        if rest > 0x7F800000:
            found.append(0x7FC0)  # NaN, of any kind
        elif rest < 0x800000:
            found.append(sign >> 16)
        else:
            low, high = rest & 0xFFFF, rest >> 16
            up = low > 0x8000 or (low == 0x8000 and high & 1)
            found.append(sign >> 16 | high + up)
    return np.array(found, np.uint16)


@pytest.mark.parametrize("lanes", [16, 64])
@pytest.mark.parametrize("has_instruction", [True, False])
def test_bfloat16_with_and_without_the_instruction(monkeypatch, has_instruction, lanes):
    """Nearest, ties to even; NaN stays NaN, and what rounding goes on with is what was written."""
    if has_instruction and not has_bfloat16():
        pytest.skip("needs AVX512-BF16")
    for module in (vectors, words):
        monkeypatch.setattr(module, "has_bfloat16", lambda: has_instruction)

    def body(builder, x, out, found):
        to = Words(builder, lanes)
        to.store(to.store_bfloat16(to.load(x), out), found)

    run = tiles.addressed(3, body)

    @njit
    def go(x, out, found, count):
        for i in range(0, count, lanes):
            run(x + 4 * i, out + 2 * i, found + 4 * i)

    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 64 * 200, dtype=np.uint32)
    ends = [0, 1, 0x7FFFFF, 0x800000, 0x800001, 0x7F7FFFFF, 0x7F7F7FFF, 0x7F800000, 0x7F800001]
    ends += [0x7FC00000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F817FFF, 0x007F8000, 0x00807FFF]
    bits[:16], bits[16:32] = ends, np.array(ends, np.uint32) | 0x80000000
    bits[64:128] &= 0x807FFFFF  # small
    bits[128:192] = bits[128:192] & 0xFFFF0000 | 0x8000  # ties
    x = bits.view(np.float32)
    out, found = np.zeros(len(x), np.uint16), np.zeros_like(x)
    go(x.ctypes.data, out.ctypes.data, found.ctypes.data, len(x))
    nan, wanted = np.isnan(x), rounded(x)
    assert np.isnan(found[nan]).all()
    assert np.array_equal(out[~nan], wanted[~nan])
    assert np.array_equal(found.view(np.uint32), out.astype(np.uint32) << 16)
    own = to_bfloat16(torch.from_numpy(x.copy())).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(own[~nan], wanted[~nan])
