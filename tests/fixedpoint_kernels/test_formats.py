import dataclasses

import numpy as np
import pytest

from fixedpoint_kernels import FixedPoint


def test_values_of_a_format():
    fmt = FixedPoint(8, 4)
    assert (fmt.lsb, fmt.scale) == (1 / 16, 16)
    assert (fmt.min_code, fmt.max_code, fmt.min, fmt.max) == (-128, 127, -8, 7.9375)
    assert str(fmt) == "<8, 4>"


def test_negative_fractional_length_means_coarse_steps():
    assert FixedPoint(4, -3).max == 7 * 8
    assert FixedPoint(4, -3).lsb == 8


def test_symmetric_drops_the_smallest_code():
    assert FixedPoint(8, 4, symmetric=True).min_code == -127


def test_unsigned_formats_have_no_sign_bit():
    fmt = FixedPoint(4, 3, signed=False)
    assert (fmt.min_code, fmt.max_code, fmt.min, fmt.max) == (0, 15, 0, 1.875)
    assert (fmt.il, FixedPoint(4, 3).il) == (1, 0)
    assert str(fmt) == "unsigned <4, 3>"
    assert FixedPoint(1, 0, signed=False).max == 1
    assert FixedPoint(31, 0, signed=False).max_code == 2**31 - 1


def test_integer_lengths_may_be_negative():
    fmt = FixedPoint(6, 9, signed=False)  # 0 to almost 1/8
    assert (fmt.il, fmt.max) == (-3, 63 / 512)


def test_old_saved_formats_load_and_look_as_before():
    old = {"wl": 8, "fl": 4, "symmetric": True}
    fmt = FixedPoint(**old)
    assert dataclasses.asdict(fmt) == {**old, "signed": True}
    assert repr(fmt) == "FixedPoint(wl=8, fl=4, symmetric=True)"
    fmt = FixedPoint(8, 4, signed=False)
    assert FixedPoint(**dataclasses.asdict(fmt)) == fmt == eval(repr(fmt))


def test_formats_are_values():
    assert len({FixedPoint(8, 4), FixedPoint(np.int64(8), 4), FixedPoint(8, 5)}) == 2
    assert FixedPoint(8, 4) != FixedPoint(8, 4, signed=False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        FixedPoint(8, 4).wl = 9  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("wl", "fl", "message"),
    [
        (1, 0, "word length must be 2 to 32 bits, got wl=1"),
        (40, 4, "word length must be 2 to 32 bits, got wl=40"),
        (8, 32, "fractional length must be -31 to 31 bits, got fl=32"),
    ],
)
def test_out_of_range_is_refused(wl, fl, message):
    with pytest.raises(ValueError, match=message):
        FixedPoint(wl, fl)


@pytest.mark.parametrize("wl", [0, 32])
def test_out_of_range_is_refused_where_unsigned(wl):
    message = f"word length must be 1 to 31 bits where unsigned, got wl={wl}"
    with pytest.raises(ValueError, match=message):
        FixedPoint(wl, 0, signed=False)


def test_an_unsigned_format_is_not_symmetric():
    with pytest.raises(ValueError, match="a symmetric format must be signed, got signed=False"):
        FixedPoint(8, 0, symmetric=True, signed=False)


def test_a_float_is_no_word_length():
    with pytest.raises(TypeError, match=r"wl must be an integer, got 8\.0"):
        FixedPoint(8.0, 4)  # pyright: ignore[reportArgumentType]
