"""Floating point of few bits, beside all its numbers as fractions, and beside others' formats."""

import itertools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fixedpoint_kernels import (
    FixedPoint,
    Minifloat,
    encode,
    philox,
    quantize,
    quantize_many,
    quantize_with_mask,
)
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.rounding import cpu, gpu, reference

FORMATS = [Minifloat(4, 3, "nan"), Minifloat(5, 2, "ieee"), Minifloat(2, 1), Minifloat(1, 2)]
FORMATS += [Minifloat(8, 7, "ieee"), Minifloat(5, 10, "ieee"), Minifloat(8, 23), Minifloat(6, 1)]
SMALL = [fmt for fmt in FORMATS if fmt.wl <= 8]
SPECIAL = [
    math.nan,
    math.inf,
    -math.inf,
    0.0,
    -0.0,
    1e-40,
    -1e-40,
    3.4e38,
    -3.4e38,
    0.5,
    1.5,
    1e-30,
]
OTHERS = {
    Minifloat(4, 3, "nan"): ml_dtypes.float8_e4m3fn,
    Minifloat(4, 3, "ieee"): ml_dtypes.float8_e4m3,
    Minifloat(3, 4, "ieee"): ml_dtypes.float8_e3m4,
    Minifloat(5, 2, "ieee"): ml_dtypes.float8_e5m2,
    Minifloat(2, 1): ml_dtypes.float4_e2m1fn,
    Minifloat(2, 3): ml_dtypes.float6_e2m3fn,
    Minifloat(3, 2): ml_dtypes.float6_e3m2fn,
    Minifloat(5, 10, "ieee"): np.float16,
}
formats = st.builds(
    Minifloat, st.integers(2, 8), st.integers(1, 23), st.sampled_from(["none", "nan", "ieee"])
)


def numbers_of(fmt):
    """Return all numbers from 0 up, in the order of their codes."""
    found = []
    for code in range(2 ** (fmt.exp + fmt.man)):
        stored, mantissa = divmod(code, 2**fmt.man)
        is_special = {
            "none": False,
            "nan": code == 2 ** (fmt.exp + fmt.man) - 1,
            "ieee": stored == 2**fmt.exp - 1,
        }[fmt.specials]
        if not is_special:
            significand = mantissa + (2**fmt.man if stored else 0)
            exponent = max(stored, 1) - (2 ** (fmt.exp - 1) - 1) - fmt.man
            found.append(significand * Fraction(2) ** exponent)
    return found


def nearest(x, numbers):
    """Return the closest number; of two, the one with the even code."""
    code = min(range(len(numbers)), key=lambda c: (abs(abs(x) - numbers[c]), c % 2))
    return math.copysign(1, x) * float(numbers[code])


def values(shape):
    x = torch.randn(shape) * torch.randn(shape).mul(6).exp2()
    x.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)[: x.numel()]
    return x


@pytest.mark.parametrize("fmt", SMALL, ids=str)
def test_a_format_knows_its_ends(fmt):
    numbers = numbers_of(fmt)
    assert (fmt.max, fmt.min, fmt.lsb) == (numbers[-1], -numbers[-1], numbers[1])


def test_known_formats():
    assert Minifloat(4, 3, "nan").max == torch.finfo(torch.float8_e4m3fn).max == 448
    assert Minifloat(5, 2, "ieee").max == torch.finfo(torch.float8_e5m2).max == 57344
    assert Minifloat(8, 7, "ieee").max == torch.finfo(torch.bfloat16).max
    assert Minifloat(8, 23).max == Minifloat(8, 23, "ieee").max == torch.finfo(torch.float32).max
    assert Minifloat(2, 1).max == 6
    assert [str(fmt) for fmt in FORMATS[:3]] == ["e4m3fn", "e5m2 ieee", "e2m1"]


@pytest.mark.parametrize("fmt", SMALL, ids=str)
def test_nearest_is_the_closest_number(fmt):
    """Numbers, the middles between them and what lies beside these."""
    numbers = [float(n) for n in numbers_of(fmt)]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(numbers)]
    exact = torch.tensor([*numbers, *middles, 2 * numbers[-1]])
    beside = [exact.nextafter(torch.tensor(math.inf)), exact.nextafter(torch.tensor(-math.inf))]
    x = torch.cat([exact, -exact, *beside, torch.randn(99)])
    expected = [nearest(Fraction(v), numbers_of(fmt)) for v in x.tolist()]
    actual = quantize(x, fmt, rounding="nearest")
    torch.testing.assert_close(actual, torch.tensor(expected) + 0.0, rtol=0, atol=0)


@pytest.mark.parametrize("fmt", OTHERS, ids=str)
def test_nearest_is_that_of_other_packages_inside_the_range(fmt):
    x = values((20_000,))
    x = x[x.abs() <= fmt.max]
    expected = torch.from_numpy(x.numpy().astype(OTHERS[fmt]).astype(np.float32))
    actual = quantize(x, fmt, rounding="nearest")
    torch.testing.assert_close(actual, expected + 0.0, rtol=0, atol=0)


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_kernels_equal_the_reference(fmt, rounding, device):
    for implementation, where in ((cpu, "cpu"), (gpu, device)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x, key = values((3, 347)).to(dtype), Key(7, 2**40 + 3, 5)
            expected = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
            reference.quantize(x, *expected, fmt, rounding, key)
            actual = torch.empty_like(x, device=where), torch.empty_like(expected[1], device=where)
            implementation.quantize(x.to(where), *actual, fmt, rounding, key)
            torch.testing.assert_close(
                tuple(t.cpu() for t in actual), expected, rtol=0, atol=0, equal_nan=True
            )


def test_the_parallel_kernel_equals_the_reference():
    x, fmt, key = values((60_001,)), FORMATS[0], Key(3, 0)
    expected, actual = torch.empty_like(x), torch.empty_like(x)
    reference.quantize(x, expected, None, fmt, "stochastic", key)
    cpu.quantize(x, actual, None, fmt, "stochastic", key)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@given(
    fmt=formats, x=st.lists(st.floats(width=32), min_size=1, max_size=9), seed=st.integers(0, 99)
)
def test_kernels_equal_the_reference_everywhere(fmt, x, seed):
    values = torch.tensor(x)
    for rounding in ("stochastic", "nearest"):
        expected, actual = torch.empty_like(values), torch.empty_like(values)
        reference.quantize(values, expected, None, fmt, rounding, Key(seed, 1))
        cpu.quantize(values, actual, None, fmt, rounding, Key(seed, 1))
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fmt", SMALL, ids=str)
def test_numbers_of_the_format_stay(fmt):
    numbers = torch.tensor([float(n) for n in numbers_of(fmt)])
    x = torch.cat([numbers, -numbers])
    for seed in range(3):
        torch.testing.assert_close(quantize(x, fmt, seed=seed), x + 0.0, rtol=0, atol=0)


@pytest.mark.parametrize("fmt", SMALL, ids=str)
def test_stochastic_goes_up_where_the_noise_is_below_the_fraction(fmt):
    """Exactly: the fraction, and the noise of each element, as fractions."""
    numbers = [-n for n in reversed(numbers_of(fmt)[1:])] + numbers_of(fmt)
    x = (torch.rand(500) * 2 - 1) * min(fmt.max, 40)
    noise = philox.uniform(500, Key(4, 9))
    expected = []
    for value, u in zip(x.tolist(), noise.tolist(), strict=True):
        low = max(n for n in numbers if n <= value)
        high = min(n for n in numbers if n >= value)
        goes_up = low != high and Fraction(u) < (Fraction(value) - low) / (high - low)
        expected.append(float(high if goes_up else low))
    actual = quantize(x, fmt, seed=4, stream=9)
    torch.testing.assert_close(actual, torch.tensor(expected) + 0.0, rtol=0, atol=0)


def test_what_saturates_is_outside():
    fmt = Minifloat(4, 3, "nan")
    x = torch.tensor([448.0, 463.0, 465.0, -1e9, math.inf, math.nan, 0.1])
    y, inside = quantize_with_mask(x, fmt, rounding="nearest")
    assert y[:5].tolist() == [448.0, 448.0, 448.0, -448.0, 448.0]
    assert y[5].isnan()
    assert inside.tolist() == [True, True, False, False, False, True, True]


def test_many_take_formats_of_both_kinds():
    xs, fmts = [values((n,)) for n in (1, 700, 40)], [FORMATS[0], FixedPoint(8, 4), FORMATS[2]]
    for out in (None, [torch.empty_like(x) for x in xs]):
        ys = quantize_many(xs, fmts, seed=2, stream=5, offsets=(0, 3, 9), out=out)
        for j, (x, y) in enumerate(zip(xs, ys, strict=True)):
            expected = quantize(x, fmts[j], seed=2, stream=5 + j, offset=(0, 3, 9)[j])
            torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((9, 3), ValueError, "exp must be 1 to 8 bits, got exp=9"),
        ((4, 0), ValueError, "man must be 1 to 23 bits, got man=0"),
        ((4.0, 3), TypeError, "exp must be an integer, got 4.0"),
        ((4, 3, "fn"), ValueError, "specials must be one of"),
        ((1, 3, "ieee"), ValueError, "exp must be 2 bits or more"),
    ],
)
def test_bad_formats_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        Minifloat(*arguments)


def test_codes_are_of_fixed_point():
    with pytest.raises(TypeError, match="must be a FixedPoint"):
        encode(torch.ones(2), Minifloat(4, 3))
