import math

import pytest
import torch

from fixedpoint_kernels import BlockFloat, FixedPoint, quantize, quantize_block
from fixedpoint_kernels.block import block_fl


@pytest.mark.parametrize(
    ("values", "fl", "codes"),
    [
        ([1.0, -0.5], 6, [64, -32]),  # ratios 127.5 and 257
        ([2.0, -4.0], 5, [64, -128]),  # 63.75 and 32.125
        ([0.0, 0.0], 0, [0, 0]),
        ([-1.0, -0.25], 7, [-128, -32]),  # 128.5 alone counts
        ([1e-30, 0.0], 106, [None, 0]),
        ([3e30, -3e30], -95, [None, None]),
    ],
)
def test_golden_values_of_eight_bits(values, fl, codes):
    x, fmt = torch.tensor(values), BlockFloat(8)
    assert fmt.fl(min(values), max(values)) == fl
    assert block_fl(x, fmt).item() == fl
    rounded = quantize_block(x, fmt, rounding="nearest").double() * 2.0**fl
    for value, code, exact in zip(rounded.tolist(), codes, values, strict=True):
        assert value == (round(exact * 2.0**fl) if code is None else code)


def test_the_largest_value_may_not_become_a_code_too_many():
    x = torch.full((2000,), 127.5)  # fl = 0: half of the draws would be 128
    rounded = quantize_block(x, BlockFloat(8), seed=1)
    assert rounded.unique().tolist() == [127.0]


def test_rounding_is_that_of_fixed_point():
    x = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(0))
    fl = BlockFloat(10).fl(x.min().item(), x.max().item())
    for rounding in ("stochastic", "nearest"):
        ours = quantize_block(x, BlockFloat(10), rounding=rounding, seed=3, stream=4)
        theirs = quantize(x, FixedPoint(10, fl), rounding=rounding, seed=3, stream=4)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert not torch.equal(ours, x)


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**40])
def test_powers_of_two_do_not_matter(scale):
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    rounded = quantize_block(x, BlockFloat(8), seed=3)
    torch.testing.assert_close(
        quantize_block(x * scale, BlockFloat(8), seed=3), rounded * scale, rtol=0, atol=0
    )


def test_each_number_of_a_vector_is_a_sample():
    x = torch.tensor([100.0, 0.01, -3.0, 0.0])
    rounded = quantize_block(x, BlockFloat(8), rounding="nearest", per_sample=True)
    alone = [quantize_block(value, BlockFloat(8), rounding="nearest") for value in x]
    torch.testing.assert_close(rounded, torch.stack(alone), rtol=0, atol=0)
    assert rounded[1] != 0


def test_each_sample_may_have_its_own_power():
    x = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0))
    x = x * torch.tensor([1.0, 1e-3, 1e3, 0.0]).view(4, 1, 1)
    rounded = quantize_block(x, BlockFloat(8), rounding="nearest", per_sample=True)
    for i in range(4):
        alone = quantize_block(x[i], BlockFloat(8), rounding="nearest")
        torch.testing.assert_close(rounded[i], alone, rtol=0, atol=0)
    assert quantize_block(x, BlockFloat(8), rounding="nearest")[1].abs().max() == 0


def test_what_is_not_a_number_stays():
    x = torch.tensor([math.nan, 0.25, 2.0])
    rounded = quantize_block(x, BlockFloat(8), rounding="nearest")
    assert math.isnan(rounded[0])
    assert rounded[1:].tolist() == [0.0, 2.0]
    assert quantize_block(torch.empty(0, 3), BlockFloat(8)).shape == (0, 3)
    assert quantize_block(x.bfloat16(), BlockFloat(8)).dtype is torch.bfloat16


def test_per_sample_is_true_or_false():
    with pytest.raises(TypeError, match="per_sample must be True or False, got 'yes'"):
        quantize_block(torch.ones(2, 3), BlockFloat(8), per_sample="yes")


def test_bad_formats_are_named():
    with pytest.raises(ValueError, match="word length must be 2 to 24 bits, got wl=32"):
        BlockFloat(32)
    with pytest.raises(TypeError, match="wl must be an integer"):
        BlockFloat(8.5)  # pyright: ignore[reportArgumentType]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traces_find_the_same_power_of_two():
    fmt = BlockFloat(8)
    traced = torch.jit.trace(lambda x: block_fl(x, fmt), torch.ones(2))
    values = [0.0, 1e-45, 3.4e38, math.inf, math.nan]
    values += [2.0**n * m for n in (-149, -126, -3, 0, 7, 126) for m in (1, 127.5 / 128, 257 / 256)]
    for value in values:
        for x in (torch.tensor([value, 0]), torch.tensor([0, -value])):
            assert traced(x).item() == block_fl(x, fmt).item()
            assert traced(x).dtype == block_fl(x, fmt).dtype
