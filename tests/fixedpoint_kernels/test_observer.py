import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fixedpoint_kernels import FixedPoint, quantize_with_mask
from fixedpoint_kernels.observer import (
    MAGNITUDES,
    cpu,
    gpu,
    mask_and_observe,
    observe,
    reference,
    round_and_observe,
)

FORMATS = None, FixedPoint(6, 3), FixedPoint(4, 2, signed=False), FixedPoint(3, -4)
FLOATS = torch.float32, torch.bfloat16, torch.float16


def observed(implementation, x, fmt, device="cpu"):
    x = x.to(device)
    y = None if fmt is None else torch.empty_like(x)
    ste_mask = torch.empty_like(x, dtype=torch.uint8)
    found = implementation.observe(x, y, ste_mask, fmt)
    return [None if part is None else part.cpu() for part in (y, ste_mask, *found)]


def assert_same_observations(x, fmt, device):
    expected = observed(reference, x, fmt)
    for actual in (observed(cpu, x, fmt), observed(gpu, x, fmt, device)):
        *exact, sums = zip(actual, expected, strict=True)
        for pair in exact:
            torch.testing.assert_close(*pair, rtol=0, atol=0, equal_nan=True)
        if not x.isnan().any():
            # squares are added up as float32 before they are as float64
            torch.testing.assert_close(*sums, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("n", [1, 63, 64, 1000, 16_385, 60_001])
def test_kernels_equal_the_reference(n, fmt, dtype, device):
    x = 5 * torch.randn(n)
    x[::3] = -0.0
    assert_same_observations(x.to(dtype), fmt, device)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("n", [1, 65, 16_385])
def test_values_that_are_rounded_elsewhere_are_measured_alike(n, fmt, dtype, device):
    x = (5 * torch.randn(n)).to(dtype)
    for actual, expected in zip(observe(x, fmt), round_and_observe(x, fmt)[1:], strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    for own, place in ((reference, "cpu"), (gpu, device)):
        _, expected, *_ = observed(own, x, fmt, place)
        ste_mask = torch.empty(n, dtype=torch.uint8, device=place)
        own.observe(x.to(place), None, ste_mask, fmt)
        torch.testing.assert_close(ste_mask.cpu(), expected, rtol=0, atol=0)


@settings(max_examples=50 * settings().max_examples // 100)
@given(
    x=st.lists(st.floats(width=32), min_size=1, max_size=9),
    fmt=st.sampled_from(FORMATS),
)
def test_kernels_equal_the_reference_everywhere(x, fmt):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert_same_observations(torch.tensor(x), fmt, device)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("n", [1, 65, 16_385, 60_001])
def test_gradients_are_masked_as_by_the_reference(n, writes, dtype, device):
    grad = torch.randn(n).to(dtype)
    grad[::5] = math.inf
    ste_mask = torch.tensor([0, 1, 3], dtype=torch.uint8)[torch.randint(3, (n,))]
    ste_mask[::5] = 0
    outs = [torch.empty_like(grad) if writes else None for _ in range(2)]
    expected = reference.observe_gradient(grad, ste_mask, outs[0])
    squares = cpu.observe_gradient(grad, ste_mask, outs[1])
    torch.testing.assert_close(squares, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(outs[1], outs[0], rtol=0, atol=0)
    out = torch.empty_like(grad, device=device) if writes else None
    squares = gpu.observe_gradient(grad.to(device), ste_mask.to(device), out).cpu()
    torch.testing.assert_close(squares, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(None if out is None else out.cpu(), outs[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 8, 5, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(64, 1, 4, 4).as_strided((64, 1, 4, 4), (16, 1, 4, 1)),
        torch.randn(6, 4).t(),
        torch.randn(6, 8)[:, ::2],
    ],
    ids=["channels_last", "one channel, last", "transposed", "gaps"],
)
def test_values_strides_and_clamped_ones_are_those_of_quantize_with_mask(x):
    fmt = FixedPoint(4, 3)
    y, ste_mask, _, sums = round_and_observe(x, fmt)
    expected, inside = quantize_with_mask(x, fmt, rounding="nearest")
    assert torch.equal(y, expected)
    assert y.stride() == expected.stride()
    assert torch.equal(ste_mask % 2 == 1, inside)
    assert sums[2] == (~inside).sum() > 0
    grad = torch.empty_like(y).copy_(torch.randn(y.shape))
    masked, squares = mask_and_observe(grad, ste_mask, clip=True)
    assert torch.equal(masked, torch.where(inside, grad, 0))
    assert masked.stride() == grad.stride()
    torch.testing.assert_close(squares, masked.double().square().sum(), rtol=1e-6, atol=0)


def test_without_a_format_nothing_is_rounded_or_clamped():
    x = torch.tensor([0.0, -3.0, 1e30])
    y, ste_mask, _, sums = round_and_observe(x, None)
    assert y is x
    assert ste_mask.tolist() == [1, 3, 3]
    assert sums[2] == 0


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=9))
def test_magnitudes_are_the_logarithms_rounded_up(values):
    counts = round_and_observe(torch.tensor(values), None)[2]
    expected = torch.zeros(MAGNITUDES, dtype=torch.int64)
    for value in values:
        if math.isinf(value):
            expected[255] += 1
            continue
        mantissa, exponent = math.frexp(abs(value))
        place = exponent - (mantissa == 0.5) + 127 if abs(value) >= 2.0**-126 else int(value != 0)
        expected[place] += 1
    assert counts.tolist() == expected.tolist()


def test_what_is_not_a_number_is_counted_last():
    assert round_and_observe(torch.tensor([math.nan, 1.0]), None)[2][-1] == 1


def test_sums_do_not_depend_on_the_number_of_threads(monkeypatch):
    x, fmt = torch.randn(300_000), FixedPoint(6, 3)
    grad, ste_mask = torch.randn(300_000), round_and_observe(x, fmt)[1]
    results = []
    for parallel in (False, True):
        monkeypatch.setattr(cpu, "is_parallel", lambda n, parallel=parallel: parallel)
        sums = round_and_observe(x, fmt)[3]
        results.append([*sums.tolist(), mask_and_observe(grad, ste_mask, clip=True)[1].item()])
    assert results[0] == results[1]


def test_a_gradient_is_returned_as_it_is_without_clipping():
    ste_mask = torch.tensor([0, 1, 3], dtype=torch.uint8)
    grad = torch.tensor([2.0, 3.0, 4.0])
    masked, squares = mask_and_observe(grad, ste_mask, clip=False)
    assert masked is grad
    assert squares == 16
    masked, squares = mask_and_observe(grad, ste_mask, clip=True)
    assert masked.tolist() == [0, 3, 4]
    assert squares == 16


@pytest.mark.parametrize("lay", [Tensor.contiguous, lambda grad: grad.t().contiguous().t()])
@pytest.mark.parametrize("clip", [True, False])
def test_gradients_of_other_strides_meet_their_own_mask(lay, clip):
    x = torch.tensor([[1.0, 9.0], [0.0, 2.0], [-9.0, 3.0]])
    grad = lay(torch.tensor([[1.0, 100.0, 7.0], [10.0, 1000.0, 70.0]]))
    strides = set()
    for values in (x.t(), x.t().contiguous()):
        ste_mask = round_and_observe(values, FixedPoint(4, 1))[1]
        strides.add(ste_mask.stride() == grad.stride())
        masked, squares = mask_and_observe(grad, ste_mask, clip=clip)
        assert masked.tolist() == ([[1, 100, 0], [0, 1000, 70]] if clip else grad.tolist())
        assert squares == 1 + 1000**2 + 70**2
    assert strides == {True, False}
