"""Every execution of a product against the definition, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fixedpoint_kernels.philox import Key, words
from fixedpoint_kernels.products import gpu, operators, reference, round_per_sample
from fixedpoint_kernels.products.samples import cpu
from fixedpoint_kernels.products.shapes import Window

WINDOWS = (
    Window(padding=(1, 1)),
    Window((2, 1), (1, 0), (1, 2)),
    Window((3, 2), (0, 2), (1, 1), 2),
)


def codes(*shape, dtype=torch.int8):
    low = 0 if dtype is torch.uint8 else -128
    return torch.randint(low, low + 256, shape, dtype=torch.int16).to(dtype)


def on(device, *tensors):
    return [x.to(device) if isinstance(x, torch.Tensor) else x for x in tensors]


def assert_same(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("window", WINDOWS)
def test_triton_convolves_as_the_reference(window, dtype, device):
    x = codes(2, 3 * window.groups, 5, 6, dtype=dtype)
    weight = codes(5 * window.groups, 3, 3, 2)
    exponents = torch.randint(-9, 3, (len(weight),), dtype=torch.int32)
    for powers, result, statistics in (
        (None, torch.int32, True),
        (exponents, torch.float32, False),
        (exponents[:1], torch.bfloat16, False),
    ):
        numbers = x, weight, powers, window, result, statistics
        expected, sums = reference.convolve(*numbers)
        actual, own = gpu.convolve(*on(device, *numbers))
        assert_same([actual], [expected])
        if statistics:
            assert_same([own], [sums])


@pytest.mark.parametrize("window", WINDOWS)
def test_triton_has_the_gradients_of_the_reference(window, device):
    x = codes(3, 3 * window.groups, 5, 6, dtype=torch.uint8)
    weight = codes(5 * window.groups, 3, 3, 2)
    grad = codes(3, len(weight), *window.outputs((5, 6), (3, 2)))
    exponents = torch.tensor([-3, 128, -60], dtype=torch.int32)
    for powers, result in (
        (None, torch.int32),
        (exponents, torch.float32),
        (exponents[:1], torch.bfloat16),
    ):
        numbers = grad, weight, powers, (5, 6), window, result
        expected = reference.input_gradient(*numbers)
        assert_same([gpu.input_gradient(*on(device, *numbers))], [expected])
    for powers in (None, exponents, exponents.clamp(max=0), exponents[:1]):
        for inputs in (x, x.view(torch.int8)):
            numbers = inputs, grad, powers, (3, 2), window
            expected = reference.weight_gradient(*numbers)
            assert_same([gpu.weight_gradient(*on(device, *numbers))], [expected])


def test_triton_takes_more_than_one_tile(device):
    x, weight = codes(70, 130), codes(67, 130)
    maps = x[:, :, None, None], weight[:, :, None, None]
    y, _ = gpu.convolve(*on(device, *maps, None, Window(), torch.int32, False))
    assert torch.equal(y.cpu().flatten(1).double(), x.double() @ weight.double().T)


def test_triton_reads_exponents_as_they_lie(device):
    weight, grad = codes(5, 3, 1, 1), codes(4, 5, 2, 2)
    apart = torch.tensor([-9, 0, 3, 0, -2, 0, 5, 0], dtype=torch.int32)[::2]
    numbers = grad, weight, apart, (2, 2), Window(), torch.float32
    expected = reference.input_gradient(*numbers)
    own = gpu.input_gradient(*on(device, *numbers[:2]), apart.to(device), *numbers[3:])
    assert_same([own], [expected])
    same = torch.tensor([-4], dtype=torch.int32).expand(4)
    for powers in (apart, same):
        numbers = codes(4, 3, 2, 2), grad, powers, (1, 1), Window()
        expected = reference.weight_gradient(*numbers)
        assert_same([gpu.weight_gradient(*on(device, *numbers))], [expected])


def test_triton_holds_the_largest_sums(device, monkeypatch):
    """More positions than int32 holds products of, all at their extremes."""
    monkeypatch.setattr(gpu, "_POSITIONS", 4096)
    monkeypatch.setattr(gpu, "_PROGRAMS", 1)
    x = torch.full((132, 1, 1, 1000), -128, dtype=torch.int8)
    for exponents in (None, torch.full((132,), -3, dtype=torch.int32)):
        numbers = x, x, exponents, (1, 1), Window()
        actual = gpu.weight_gradient(*on(device, *numbers))
        assert_same([actual], [reference.weight_gradient(*numbers)])


def test_triton_lays_codes_in_parts(device, monkeypatch):
    """Memory for them has a bound."""
    monkeypatch.setattr(gpu, "_POSITIONS", 64)
    x, grad = codes(7, 3, 5, 4, dtype=torch.uint8), codes(7, 6, 5, 4)
    exponents = torch.tensor([3, -2, 3, -2, -2, 0, -20], dtype=torch.int32)
    numbers = x, grad, exponents, (3, 3), Window(padding=(1, 1))
    expected = reference.weight_gradient(*numbers)
    for blocks in (1, 2, 5):
        monkeypatch.setattr(gpu, "_WORKSPACE", blocks * 64 * (27 + 6))
        assert_same([gpu.weight_gradient(*on(device, *numbers))], [expected])


def test_triton_takes_exponents_outside_as_the_nearest(device):
    weight, grad = codes(5, 3, 1, 1), codes(3, 5, 1, 1)
    for powers in ([-300, 300, 5], [-300, -127, -126], [128, 127, 129]):
        exponents = torch.tensor(powers, dtype=torch.int32)
        numbers = grad, weight, exponents, (1, 1), Window(), torch.float32
        expected = reference.input_gradient(*numbers)
        assert_same([gpu.input_gradient(*on(device, *numbers))], [expected])
        numbers = codes(3, 3, 1, 1), grad, exponents, (1, 1), Window()
        expected = reference.weight_gradient(*numbers)
        assert_same([gpu.weight_gradient(*on(device, *numbers))], [expected])


@pytest.mark.parametrize("n", [1, 15, 512, 1000, 4097])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_samples_are_rounded_as_by_the_reference(n, dtype, device):
    x = (torch.randn(5, n) * torch.tensor([1.0, 2.0**-20, 2.0**9, 0.0, 1.0])[:, None]).to(dtype)
    x[4, n // 2] = torch.nan
    for key in (Key(1, 2), Key(2**40 + 5, 7, 2**33)):
        expected = reference.round_per_sample(x, key)
        assert_same(cpu.round_per_sample(x, key), expected)
        assert_same(gpu.round_per_sample(x.to(device), key), expected)


@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 3, 2)])
def test_samples_may_lie_apart(shape, device, monkeypatch):
    x = torch.randn(shape)
    apart = x.new_zeros(2 * x.numel()).as_strided(shape, [2 * n for n in x.stride()]).copy_(x)
    expected = round_per_sample(x, seed=3)
    assert_same(round_per_sample(apart, seed=3), expected)
    monkeypatch.setattr(operators, "kernels_of", lambda _: gpu)
    assert_same(round_per_sample(apart.to(device), seed=3), expected)


@settings(max_examples=50 * settings().max_examples // 100)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20)
)
def test_codes_are_neighbours_and_never_clamped(values):
    x = torch.tensor([values])
    codes, exponents = round_per_sample(x, seed=7)
    exponent = exponents.item()
    largest = max(map(abs, values))
    assert largest <= 127 * 2.0**exponent
    assert exponent == -126 or largest > 127 * 2.0 ** (exponent - 1)
    noise = words(4 * -(len(values) // -16), Key(7, 0)).tolist()
    for i, (value, code) in enumerate(zip(values, codes[0].tolist(), strict=True)):
        byte = noise[i >> 2] >> 8 * (i & 3) & 255
        assert code == (round(value * 2.0**-exponent * 256) + byte) // 256  # exact in float64
        assert abs(code) <= 127


def test_rounding_is_unbiased():
    x = torch.linspace(-1, 1, 1001).repeat(400, 1)
    codes, exponents = round_per_sample(x, seed=3)
    assert exponents.unique().tolist() == [-6]
    mean = codes.double().mean(0) / 64
    # five deviations of a mean of 400, and the nearest 1/256 of a code
    assert (mean - x[0]).abs().max() < (5 * 0.5 / 20 + 2**-9) / 64


def test_samples_do_not_know_each_other():
    x = torch.randn(6, 3, 7, 5).contiguous(memory_format=torch.channels_last)
    whole = round_per_sample(x, seed=9, stream=4)
    for first in (0, 2, 5):
        part = round_per_sample(x[first:].contiguous(), seed=9, stream=4, first=first)
        assert_same(part, [both[first:] for both in whole])
