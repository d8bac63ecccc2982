"""Compression and decompression: three executions, the same bits, on poisoned memory."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fixedpoint_kernels import division
from fixedpoint_kernels.division import cpu, gpu, reference
from fixedpoint_kernels.division.layout import Layout
from fixedpoint_kernels.philox import Key

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN, INF = float("nan"), float("inf")
SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 3e38, -3e38, INF, -INF, NAN]
KEY = Key(3, 5)
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def parts_of(x, layout, implementation, key):
    shapes = layout.means_shape, layout.codes_shape, layout.ranges_shape
    dtypes = torch.bfloat16, torch.uint8, torch.bfloat16
    parts = [torch.empty(s, dtype=d, device=x.device) for s, d in zip(shapes, dtypes, strict=True)]
    implementation.compress(x, *parts, layout, key)
    return parts


def restored(parts, x, layout, implementation):
    out = torch.empty(layout.shape, dtype=layout.dtype, device=x.device)
    implementation.decompress(*parts, out, layout)
    return out


def assert_same(x, *, block=8, bits=2, spatial=None, key=KEY, executions=(cpu, gpu)):
    """Compare kernels with the reference: what is kept, and what comes back."""
    layout = Layout.checked(x, block, bits, spatial)
    expected = parts_of(x, layout, reference, key)
    values = restored(expected, x, layout, reference)
    for implementation in executions:
        there = x.to(DEVICE) if implementation is gpu else x
        parts = parts_of(there, layout, implementation, key)
        for part, other in zip(parts, expected, strict=True):
            torch.testing.assert_close(part.cpu(), other, rtol=0, atol=0, equal_nan=True)
        again = restored(parts, there, layout, implementation).cpu()
        torch.testing.assert_close(again, values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bits", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("shape", [(2, 3, 32, 32), (3, 5, 7, 7), (2, 2, 14, 9), (9, 130)], ids=str)
def test_bits_and_shapes(bits, shape):
    assert_same(torch.randn(shape), bits=bits)


@pytest.mark.parametrize("block", [1, 2, 3, 4, 5, 12, 16, 17, 64, 1000, None])
def test_blocks(block):
    assert_same(torch.randn(2, 1, 18, 35), block=block)
    assert_same(torch.randn(2, 290), block=block)


@pytest.mark.parametrize("shape", [(2, 3, 5, 6, 9), (1, 1, 17, 3, 20), (2, 2, 16, 8, 1)], ids=str)
@pytest.mark.parametrize("block", [2, 8])
def test_volumes(shape, block):
    assert_same(torch.randn(shape), block=block)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((5, 70, 4, 4), 8),  # more than one task
        ((3, 50, 8, 8), 8),
        ((3, 3, 2, 8), 9),
        ((2, 5, 8, 4), 8),
        ((2, 3, 2, 4, 4), 8),
        ((2, 3, 3, 16), 16),
        ((2, 3, 3, 8), 8),  # no whole vectors
        ((2, 3, 2, 2), 8),
    ],
    ids=str,
)
def test_planes_of_one_block(shape, block, bits):
    x = torch.randn(shape)
    x[0, 1] = 1.5
    x[1, 0].view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL[: x[1, 0].numel()])
    x[1, 1].view(-1)[2] = -0.0
    assert_same(x, block=block, bits=bits, executions=[cpu])
    assert_same(x.bfloat16(), block=block, bits=bits, executions=[cpu])


def test_a_mean_of_minus_zero_keeps_its_sign():
    x = torch.full((2, 1, 4, 4), -0.0)
    layout = Layout.checked(x, 4, 0, None)
    for implementation in (reference, cpu, gpu):
        there = x.to(DEVICE) if implementation is gpu else x
        parts = parts_of(there, layout, implementation, KEY)
        parts[0].fill_(-0.0)
        assert restored(parts, there, layout, implementation).signbit().all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dtypes(dtype):
    assert_same(torch.randn(2, 3, 9, 13).to(dtype))


@pytest.mark.parametrize("special", SPECIAL)
def test_special_values(special):
    x = torch.randn(3, 2, 9, 9)
    x[1, 0, 4, 3] = special
    x[2] = special
    assert_same(x)
    assert_same(x, block=None)


@settings(max_examples=30 * settings().max_examples // 100)
@given(data=st.data())
def test_everywhere(data):
    sides = data.draw(st.lists(st.integers(1, 19), min_size=1, max_size=4))
    if math.prod(sides) > 700:
        sides = sides[:2]
    spatial = data.draw(st.integers(1, min(3, len(sides))))
    width = data.draw(st.sampled_from([32, 16]))
    values = st.one_of(st.floats(width=width), st.sampled_from(SPECIAL), st.integers(-9, 9))
    few = data.draw(st.lists(values, min_size=1, max_size=40))
    x = torch.tensor(few, dtype=torch.float32).repeat(math.prod(sides))[: math.prod(sides)]
    layout = Layout(tuple(sides), torch.float32, 8, 2, spatial)
    if layout.elements == 1:
        return  # kept as bfloat16, without a kernel
    key = Key(data.draw(st.integers(0, 2**63 - 1)), data.draw(st.integers(0, 2**63 - 1)))
    block = data.draw(st.one_of(st.integers(1, 20), st.none()))
    bits = data.draw(st.sampled_from([1, 2, 4, 8]))
    assert_same(x.view(sides), block=block, bits=bits, spatial=spatial, key=key)


@pytest.mark.parametrize("shape", [(64, 17, 7, 7), (3, 5, 61, 67), (8, 1, 96, 96)], ids=str)
def test_the_parallel_kernel_equals_the_reference(shape):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_same(torch.randn(shape), executions=(cpu,))
    finally:
        torch.set_num_threads(threads)


def test_a_large_plane():
    assert_same(torch.randn(1, 1, 230, 231), executions=(cpu,))
    assert_same(torch.randn(60_001), executions=(cpu,), block=300)


def test_layout_of_the_codes():
    """Two bits an element, the first lowest, through the whole map."""
    x = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 3.0]])
    kept = division.compress(x, block=None)
    assert kept.ranges.tolist() == [[0, 1], [0, 1]]
    assert kept.codes.tolist() == [0 | 3 << 2 | 1 << 4 | 2 << 6, 0 | 3 << 2]


def test_planes_too_large_for_a_gpu_are_refused():
    layout = Layout((3, 2**30), torch.float32, 8, 2, 1)
    with pytest.raises(ValueError, match=r"fewer than 2\*\*31 bits, got 1 of 1073741824 elements"):
        gpu.compress(torch.empty(0), *[torch.empty(0)] * 3, layout, KEY)


@pytest.mark.gpu
def test_same_bits_on_both_devices():
    for shape in [(8, 16, 56, 56), (16, 32, 7, 7), (64, 1000)]:
        x = torch.randn(shape)
        here, there = division.compress(x, seed=1), division.compress(x.cuda(), seed=1)
        for part, other in zip(here.tensors, there.tensors, strict=True):
            assert torch.equal(part, other.cpu())
        assert torch.equal(division.decompress(here), division.decompress(there).cpu())
