import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fixedpoint_kernels import FixedPoint, decode, encode, pack, quantize, unpack
from fixedpoint_kernels.packing import cpu, gpu, reference

INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64]
INTEGERS += [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def codes_of(n, bits, *, signed=True, dtype=torch.int64):
    low = -(2 ** (bits - 1)) if signed else 0
    return torch.randint(low, low + 2**bits, (n,)).to(dtype)


def assert_same(codes, bits, signed):
    """Compare both kernels with the reference, on poisoned memory; unpacking gives the codes."""
    expected = torch.empty((len(codes) * bits + 7) // 8, dtype=torch.uint8)
    reference.pack(codes, expected, bits)
    unpacked = unpack(expected, bits, len(codes), signed=signed)
    torch.testing.assert_close(unpacked.to(codes.dtype), codes, rtol=0, atol=0)
    for implementation, device in ((cpu, "cpu"), (gpu, DEVICE)):
        packed = torch.empty_like(expected, device=device)
        implementation.pack(codes.to(device), packed, bits)
        torch.testing.assert_close(packed.cpu(), expected, rtol=0, atol=0)
        again = torch.empty_like(unpacked, device=device)
        implementation.unpack(packed, again, bits, signed)
        torch.testing.assert_close(again.cpu(), unpacked, rtol=0, atol=0)


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
@pytest.mark.parametrize("bits", range(1, 33))
def test_kernels_equal_the_reference(bits, signed):
    assert_same(codes_of(1027, bits, signed=signed), bits, signed)


@settings(max_examples=60 * settings().max_examples // 100)
@given(data=st.data(), bits=st.integers(1, 32), signed=st.booleans())
def test_kernels_equal_the_reference_everywhere(data, bits, signed):
    low = -(2 ** (bits - 1)) if signed else 0
    codes = data.draw(st.lists(st.integers(low, low + 2**bits - 1), min_size=1, max_size=40))
    assert_same(torch.tensor(codes), bits, signed)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_every_integer_dtype(dtype):
    codes = codes_of(1003, 7, signed=dtype.is_signed, dtype=dtype)
    expected = pack(codes.to(torch.int64), 7)
    assert torch.equal(pack(codes, 7), expected)
    packed = torch.empty_like(expected, device=DEVICE)
    gpu.pack(codes.view(INTEGERS[INTEGERS.index(dtype) % 4]).to(DEVICE), packed, 7)
    assert torch.equal(packed.cpu(), expected)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_codes_may_be_shorter_than_their_bits(dtype):
    numbers = torch.iinfo(dtype)
    codes = [numbers.min, numbers.max, 3]
    for bits in (9, 17, 32):
        want = [code % 2**bits for code in codes]
        packed = pack(torch.tensor(codes, dtype=dtype), bits)
        assert unpack(packed, bits, 3, signed=False).tolist() == want


@pytest.mark.parametrize("bits", [1, 5, 8, 31])
def test_the_parallel_kernel_equals_the_reference(bits):
    assert_same(codes_of(60_001, bits), bits, True)


@pytest.mark.parametrize("bits", [1, 3, 11, 32])
def test_numpy_agrees_on_the_bit_order(bits):
    codes = codes_of(21, bits)
    stream = (codes.numpy()[:, None] >> np.arange(bits)) & 1
    expected = np.packbits(stream.astype(np.uint8).ravel(), bitorder="little")
    assert pack(codes, bits).tolist() == expected.tolist()


@pytest.mark.parametrize("bits", [7, 8, 9, 15, 16, 17, 32])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_bits_above_a_dtype_repeat_its_sign_and_nothing_else(dtype, bits):
    """Against Python's integers, whatever the width of the dtype."""
    info = torch.iinfo(dtype)
    codes = [info.min, info.max, info.max // 2 + 1, 1, 0, info.max - 5]
    stream = sum((code & (1 << bits) - 1) << i * bits for i, code in enumerate(codes))
    expected = stream.to_bytes((len(codes) * bits + 7) // 8, "little")
    assert pack(torch.tensor(codes, dtype=dtype), bits).tolist() == list(expected)


def test_golden_bytes():
    assert pack(torch.tensor([1, 2, 3, -1]), 3).tolist() == [0b11_010_001, 0b1110]
    assert (
        pack(torch.tensor([0x12345678, -2]), 32).tolist()
        == [0x78, 0x56, 0x34, 0x12, 254] + [255] * 3
    )
    assert unpack(torch.tensor([0b11_010_001, 0b1110], dtype=torch.uint8), 3, 4).tolist() == [
        1,
        2,
        3,
        -1,
    ]


def test_spare_bits_are_zero_and_high_bits_are_dropped():
    assert pack(torch.tensor([-1]), 5).tolist() == [0b11111]
    codes = codes_of(100, 32)
    assert torch.equal(pack(codes, 5), pack(codes & 31, 5))


@pytest.mark.parametrize(
    ("bits", "signed", "dtype"),
    [
        (8, True, torch.int8),
        (9, True, torch.int16),
        (17, True, torch.int32),
        (32, True, torch.int32),
        (8, False, torch.uint8),
        (15, False, torch.int16),
        (16, False, torch.int32),
        (31, False, torch.int32),
        (32, False, torch.int64),
    ],
)
def test_the_smallest_dtype_is_returned(bits, signed, dtype):
    top = torch.tensor([2 ** (bits - signed) - 1])
    codes = unpack(pack(top, bits), bits, 1, signed=signed)
    assert codes.dtype is dtype
    assert codes.item() == top.item()


def test_strides_shapes_and_empty_tensors():
    codes = codes_of(60, 6).view(3, 4, 5)
    assert torch.equal(pack(codes.transpose(0, 2), 6), pack(codes.transpose(0, 2).contiguous(), 6))
    assert torch.equal(unpack(pack(codes, 6), 6, (3, 4, 5)), codes.to(torch.int8))
    assert torch.equal(
        unpack(pack(codes, 6).repeat_interleave(2)[::2], 6, codes.shape), codes.char()
    )
    expanded = torch.tensor([[3]]).expand(2, 3)
    assert torch.equal(unpack(pack(expanded, 6), 6, [2, 3]), expanded.char())
    assert unpack(pack(torch.empty(0, 3, dtype=torch.int8), 6), 6, (0, 3)).shape == (0, 3)
    assert unpack(pack(torch.tensor(5), 4), 4, ()).item() == 5


def test_a_quantised_tensor_survives():
    x, fmt = torch.randn(3, 7), FixedPoint(5, 3)
    codes = unpack(pack(encode(x, fmt, seed=1), fmt.wl), fmt.wl, x.shape)
    torch.testing.assert_close(decode(codes, fmt), quantize(x, fmt, seed=1), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: pack(torch.ones(2), 3), TypeError, r"tensor of integers, got torch\.float32"),
        (lambda: pack([1], 3), TypeError, "tensor of integers, got list"),
        (lambda: pack(torch.ones(2).bool(), 1), TypeError, r"got torch\.bool"),
        (lambda: pack(torch.ones(2).int(), 0), ValueError, "bits must be 1 to 32, got bits=0"),
        (lambda: pack(torch.ones(2).int(), 33), ValueError, "got bits=33"),
        (lambda: pack(torch.ones(2).int(), 2.0), TypeError, "bits must be an integer, got 2.0"),
        (lambda: unpack(torch.ones(1).int(), 3, 2), TypeError, r"uint8 tensor, got torch\.int32"),
        (lambda: unpack(torch.ones(2).byte(), 3, 2), ValueError, r"take 1 bytes, .*shape \(2,\)"),
        (lambda: unpack(torch.ones(1, 1).byte(), 3, 2), ValueError, r"got shape \(1, 1\)"),
        (lambda: unpack(torch.ones(1).byte(), 3, -2), ValueError, "no negative size"),
        (lambda: unpack(torch.ones(1).byte(), 3, 1.5), TypeError, "count or integer sizes"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.gpu
def test_same_bits_on_both_devices():
    codes = codes_of(100_000, 11)
    packed = pack(codes.cuda(), 11)
    assert torch.equal(packed.cpu(), pack(codes, 11))
    assert torch.equal(unpack(packed, 11, len(codes)).cpu(), codes.short())
