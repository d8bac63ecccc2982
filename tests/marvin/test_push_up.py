import math

import pytest

from marvin.policies.push_up import choose, diversity, push_up, suggestions

# diversity -> the two suggestions at fl_min = 8 (MARViN, section 3.4, guarded)
ADAPT = {2.7: (1, 1), 3: (32, 1), 4: (7, 1), 5: (3, 4), 6: (2, 13), 7.4: (1, 24), 10: (1, 24)}


@pytest.mark.parametrize(("ds", "expected"), ADAPT.items())
def test_suggestions(ds, expected):
    assert suggestions(ds, 8) == expected


@pytest.mark.parametrize(
    ("ds", "first", "second"), [(1.5, 1, 1), (2, 1, 7), (3, 11, 24), (2.72, 32, 24)]
)
def test_suggestions_as_printed(ds, first, second):
    assert suggestions(ds, 8, "marvin") == (first, second)


@pytest.mark.parametrize("variant", ["adapt", "marvin"])
@pytest.mark.parametrize("ds", [math.nan, math.inf, 0.0, 1.0, -1.0])
def test_no_diversity_suggests_one_bit(ds, variant):
    assert suggestions(ds, 8, variant) == (1, 1)


@pytest.mark.parametrize("variant", ["adapt", "marvin"])
def test_poles_are_guarded(variant):
    for ds in (math.e, math.nextafter(math.e, 9), math.nextafter(math.e, 0), 2.72):
        first, second = suggestions(ds, 4, variant)
        assert 1 <= first <= 32
        assert 1 <= second <= 32


@pytest.mark.parametrize(
    ("ds", "level", "expected"),
    [
        (5, "min", (15, 11)),
        (5, "mean", (16, 12)),
        (5, "max", (16, 12)),
        (6, "min", (14, 10)),
        (6, "mean", (20, 16)),
        (6, "max", (25, 21)),
        (8, "min", (13, 9)),
        (8, "mean", (25, 21)),
        (8, "max", (32, 28)),
    ],
)
def test_new_format_with_four_buffer_bits(ds, level, expected):
    bits = choose(*suggestions(ds, 8), level)
    assert push_up(10, 8, bits, buffer_bits=4) == expected


def test_buffer_bits_at_the_widest_word():
    assert push_up(31, 30, 5, buffer_bits=4) == (32, 28)
    assert push_up(31, 30, 5, buffer_bits=8) == (32, 24)


@pytest.mark.parametrize("buffer_bits", [1, 4, 8])
@pytest.mark.parametrize("max_wl", [16, 32])
def test_invariants_of_every_new_format(buffer_bits, max_wl):
    for fl_min in range(4, max_wl - buffer_bits + 1):
        for wl_min in range(fl_min + 1, max_wl + 1):
            for bits in (1, 5, 32):
                wl, fl = push_up(wl_min, fl_min, bits, buffer_bits=buffer_bits, max_wl=max_wl)
                assert wl - fl >= buffer_bits
                assert fl <= max_wl - buffer_bits
                assert fl < wl <= max_wl
                assert fl > fl_min or fl == max_wl - buffer_bits


def test_diversity():
    assert diversity(3.0, 3.0) == 1
    assert diversity(25.0, 5.0) == 5  # 25 orthonormal gradients
    assert diversity(2.0, 0.0) == math.inf  # g and -g
    assert math.isnan(diversity(0.0, 0.0))
