import numpy as np
import pytest
from llvmlite import ir
from numba import njit

from fixedpoint_kernels.llvm import tiles, words
from fixedpoint_kernels.llvm.vectors import has_avx512
from fixedpoint_kernels.llvm.words import Words


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
