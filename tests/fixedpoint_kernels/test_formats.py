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


def test_formats_are_values():
    assert len({FixedPoint(8, 4), FixedPoint(np.int64(8), 4), FixedPoint(8, 5)}) == 2
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


def test_a_float_is_no_word_length():
    with pytest.raises(TypeError, match=r"wl must be an integer, got 8\.0"):
        FixedPoint(8.0, 4)  # pyright: ignore[reportArgumentType]
