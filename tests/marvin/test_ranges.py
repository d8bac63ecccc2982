import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fixedpoint_kernels import FixedPoint, quantize
from fixedpoint_kernels.observer import round_and_observe
from marvin.policies.observer import Observer, inputs_of, weight_ranges
from marvin.policies.ranges import (
    Limits,
    Range,
    budget_noise,
    headroom,
    integer_bits_of,
    next_integer_bits,
    next_largest,
)
from marvin.shards import Shard, shard_of


@pytest.mark.parametrize(
    ("values", "tolerance", "expected"),
    [
        ([0.5], 0, -1),
        ([0.500001], 0, 0),
        ([-3.0, 1.0], 0, 2),
        ([4.0, -4.0], 0, 2),
        ([2.0**-9], 0, -9),
        ([1.0] * 99 + [100.0], 0.01, 0),
        ([1.0] * 98 + [100.0] * 2, 0.01, 7),
        ([0.0] * 9 + [3.0], 0, 2),
        ([0.0] * 9 + [3.0], 0.1, 2),  # zeros cannot be clamped
        ([0.0] * 900 + [3.0] * 99 + [100.0], 0.01, 2),
        ([0.0], 0, None),
        ([1.0, math.inf], 0.9, None),
        ([1.0, math.nan], 0.9, None),
        ([3e38], 0, None),
    ],
)
def test_integer_bits_are_the_power_of_two_above_the_quantile(values, tolerance, expected):
    counts = round_and_observe(torch.tensor(values), None)[2]
    assert integer_bits_of(counts.tolist(), tolerance) == expected


@pytest.mark.parametrize(
    ("before", "clamping", "needed", "saturated", "after"),
    [
        (2, None, 5, 0.0, (5, None)),  # up at once
        (2, None, 2, 0.0021, (3, 2)),  # more than twice the tolerance
        (2, None, 1, 0.0021, (3, 2)),
        (2, None, 2, 0.0020, (2, None)),
        (2, None, -1, 0.0, (1, None)),  # down by one
        (2, None, -3, 0.0, (-1, None)),  # but to two more than are needed at most
        (3, 2, 2, 0.0, (3, 2)),  # not to what clamped too many
        (6, 2, 2, 0.0, (5, 2)),
        (3, 2, 3, 0.0, (3, 2)),
        (3, 2, 6, 0.0, (6, 2)),
        (2, 2, 2, 0.0, (3, 2)),
        (3, 2, 1, 0.0, (2, None)),  # before the data need fewer
    ],
)
def test_integer_bits_follow_the_data(before, clamping, needed, saturated, after):
    measured = Range(True, needed, 1.0, saturated)
    assert next_integer_bits(FixedPoint(8, 7 - before), clamping, measured, 1e-3) == after


@given(
    st.integers(2, 8), st.integers(-6, 9), st.sets(st.integers(1, 2**8), min_size=1), st.booleans()
)
@example(4, 0, {2**5}, False)  # a power of two
@example(4, 3, {2**5 - 1}, True)  # and less than half a step below
def test_integer_bits_settle_and_clamp_no_more_than_is_tolerated(wl, bits, values, signed):
    x = torch.tensor(sorted(values)).div(2**5).repeat(100)
    x = torch.cat([x, -x]) if signed else x
    clamping, found = None, []
    for _ in range(30):
        fmt, seen = FixedPoint(wl, wl - signed - bits, signed=signed), Observer()
        seen.round(x, fmt, clip=True)
        measured = inputs_of({0: seen}, 1)[0].range(1e-3)
        found.append((bits, measured.saturated))
        bits, clamping = next_integer_bits(fmt, clamping, measured, 1e-3)
    assert len({*found[-8:]}) == 1
    assert found[-1][1] <= 2e-3


def test_values_below_0_without_a_sign_do_not_tell_of_the_integer_bits():
    measured = Range(True, 2, 1.0, 0.5)
    assert next_integer_bits(FixedPoint(8, 6, signed=False), None, measured, 1e-3) == (3, None)


def test_words_from_12_bits_on_have_headroom():
    assert [headroom(wl) for wl in range(2, 17)] == [0] * 10 + [1] * 4 + [2]


@pytest.mark.parametrize(
    ("before", "needed", "after"),
    [
        (FixedPoint(8, 7), 5, 5),  # has no headroom: nothing is known
        (FixedPoint(12, 7), 5, 5),  # il 4, one of which is to spare
        (FixedPoint(12, 7), 4, 4),  # up at once, though nothing was clamped
        (FixedPoint(12, 7), 3, 3),
        (FixedPoint(12, 7), 1, 2),  # down by one
        (FixedPoint(16, 8), 2, 4),  # il 7, two to spare
        (FixedPoint(16, 8), -4, -2),  # or to two above
        (FixedPoint(16, 9, signed=False), 5, 5),
    ],
)
def test_headroom_is_no_part_of_what_the_data_need(before, needed, after):
    assert next_largest(before, needed) == after


def test_formats_with_headroom_tell_nothing_of_those_without():
    before, measured = FixedPoint(16, 6), Range(True, 0, 1.0, largest=7)
    assert next_integer_bits(before, None, measured, 1e-3) == (0, None)
    assert next_integer_bits(before, 0, measured, 1e-3) == (1, 0)
    given = Range(True, 0, 1.0)  # no headroom was wanted
    assert next_integer_bits(before, None, given, 1e-3) == (2, None)


@pytest.mark.parametrize("signed", [True, False])
def test_each_word_length_has_its_own_integer_bits(signed):
    for wl in range(2, 17):
        il = 3 if wl < 12 else 7 + headroom(wl)
        found = Limits(wl, wl).format(signed, 3, 0.0, largest=7)
        assert found == FixedPoint(wl, wl - signed - il, signed=signed)
    noise = 4.0**-7 / 12 if signed else 4.0**-8 / 12
    assert Limits(2, 16).format(signed, 3, noise, largest=7).wl == 11
    longer = Limits(2, 16).format(signed, 3, noise / 4, largest=2)
    assert (longer.wl, longer.il) == (12, 3)


def test_the_budget_by_hand():
    # 4 layers, kappa .01, loss 2: a tensor may cost .01 * 2 / 8 = .0025; noise = 2 * .0025 / G
    assert budget_noise(0.0025, 0.06) == pytest.approx(1 / 12)  # steps of 1
    assert budget_noise(0.0025, 0.06 * 4**5) == pytest.approx(1 / 4**5 / 12)  # of 1/32


@given(st.floats(1e-9, 1e3), st.floats(1e-9, 1e9))
def test_the_budget_is_kept_and_not_by_a_bit_too_much(budget, gradient):
    noise = budget_noise(budget, gradient)
    assert noise is not None
    bits = round(8 + math.log2(12 * noise) / 2)  # a word of about 9 bits, which no limit cuts
    fl = Limits(2, 16).format(True, bits, noise).fl

    def cost(fl):
        return gradient / 2 * 4.0**-fl / 12

    assert cost(fl) <= budget * (1 + 1e-9)  # products round
    assert cost(fl - 1) > budget * (1 - 1e-9)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_without_a_budget_or_a_gradient_there_is_no_answer(bad):
    assert budget_noise(bad, 1.0) is None
    assert budget_noise(1.0, bad) is None


def rounded(x, fmt):
    return (quantize(x, fmt, rounding="nearest") - x).square().mean().item()


@given(st.floats(1e-6, 1e-3), st.booleans())
def test_noise_is_allowed_and_the_word_is_the_shortest(noise, signed):
    x = 0.9 * torch.rand(10_000, generator=torch.Generator().manual_seed(0))  # nothing clamped
    fmt = Limits(2, 16).format(signed, 0, noise)
    assert fmt.il == 0
    shorter = FixedPoint(fmt.wl - 1, fmt.fl - 1, signed=signed)
    assert rounded(x, fmt) < 1.1 * noise  # of 10,000 values, so about the power of their law
    assert rounded(x, shorter) > 0.9 * noise


@pytest.mark.parametrize(
    ("signed", "integer_bits", "steps", "expected"),
    [
        (True, 1, 3, FixedPoint(5, 3)),
        (True, 1, 9, FixedPoint(8, 6)),  # too long: coarser
        (True, 1, -9, FixedPoint(4, 2)),  # too short: finer
        (False, 1, 3, FixedPoint(4, 3, signed=False)),
        (False, -3, 9, FixedPoint(6, 9, signed=False)),
        (True, 9, -4, FixedPoint(6, -4)),
        (True, -60, 70, FixedPoint(8, 30)),  # as small as there is
        (False, 90, 0, FixedPoint(8, -26, signed=False)),
    ],
)
def test_words_are_cut_to_their_limits(signed, integer_bits, steps, expected):
    assert Limits(4, 8).format(signed, integer_bits, 4.0**-steps / 12) == expected


@pytest.mark.parametrize(
    ("noise", "clipping", "expected"),
    [
        (1 / 12, (), FixedPoint(5, 0)),
        (1 / 12, (1.0, 2.0), FixedPoint(5, 0)),  # clipping costs more than is allowed
        (1 / 12, (0.0, 9.0), FixedPoint(4, 0)),  # a bit less, and nothing lost
        (1 / 12, (0.0, 0.0), FixedPoint(4, 1)),  # min_wl: the bit is used as a fractional one
        (0.0, (1e-6, 1e-3), FixedPoint(8, 4)),  # the longest word, with the least noise of all
    ],
)
def test_integer_bits_are_given_up_where_that_makes_less_noise(noise, clipping, expected):
    assert Limits(4, 8).format(True, 4, noise, clipping) == expected


@given(
    st.booleans(),
    st.integers(-140, 140),
    st.floats(0, 1e9),
    st.integers(2, 16),
    st.lists(st.floats(0, 1e9), max_size=2),
)
def test_there_is_a_format_for_everything(signed, integer_bits, noise, min_wl, clipping):
    fmt = Limits(min_wl, 16).format(signed, integer_bits, noise, clipping)
    assert min_wl <= fmt.wl <= 16
    assert fmt.signed == signed


def test_ranges_of_weights():
    masters = [torch.tensor([[0.1, -0.6]]), torch.zeros(2, 2), torch.tensor([[math.inf, 1.0]])]
    found = weight_ranges(masters, [shard_of(m) for m in masters], [True, True, False])
    assert [r.integer_bits for r in found] == [0, None, None]
    assert [r.channels for r in found] == [(0,), (None, None), ()]
    assert Range(True, 3, 1.0, channels=(3, 2, None)).noise_share == (1 + 1 / 4 + 1) / 3
    assert all(r.signed for r in found)
    assert found[0].power == pytest.approx((0.01 + 0.36) / 2, rel=1e-6)  # float32
    assert [r.clipping for r in found[:2]] == [(), ()]  # channels have formats of their own


def test_what_clipping_weights_takes_away():
    (found,) = weight_ranges(
        [torch.tensor([[3.0, -1.5], [0.5, -5.0]])], [Shard(torch.Size((2, 2)))], [False]
    )
    assert found.integer_bits == 3
    assert found.clipping == pytest.approx((1 / 4, (1 + 9) / 4), rel=1e-6)  # float32


def watched(xs, weights, fmt):
    """Observe a product layer by layer, a micro-batch at a time."""
    seen = Observer()
    for x in xs:
        y, _ = seen.round(x, fmt, clip=True)
        (y @ weights).sum().div(4).backward()
    return seen


def test_observations_by_hand():
    x = torch.tensor([[0.0, 1.0, -9.0], [2.0, 0.0, 3.0]])
    weights = torch.tensor([[1.0], [2.0], [4.0]])
    seen = watched([x], weights, FixedPoint(4, 1))
    found = inputs_of({7: seen, 8: Observer()}, 2)[7]
    assert found.lowest == -9
    assert found.power == pytest.approx((1 + 81 + 4 + 9) / 6, rel=1e-6)  # float32
    assert found.saturated == pytest.approx(1 / 4, rel=1e-6)  # of four that are not 0
    # the gradient is weights / 4; not where x is 0, nor where -9 was clamped; if that is of a
    # mean over 2 samples, each has twice that gradient
    assert found.gradient == (2**2 + 1**2 + 4**2) / 16 * 4 / 2
    # two of six are 0, which rounding does not move
    # 9 is beyond the range, which ends at 4; 3 is counted as 4
    power = (1 + 4**2 + 2**2 + 4**2) / 6
    assert found.range(1 / 4) == Range(True, 2, power, found.saturated, rounded=1 - 2 / 6)
    assert found.range(0).power == found.power
    assert inputs_of({7: Observer()}, 0) == {}


def test_micro_batches_tell_what_their_batch_would():
    torch.manual_seed(0)
    x, weights, fmt = torch.randn(8, 5), torch.randn(5, 3), FixedPoint(3, 1)
    whole, parts = (watched(xs, weights, fmt) for xs in ([x], x.split(3)))
    one, two = (inputs_of({7: seen}, 8)[7] for seen in (whole, parts))
    assert (one.counts, one.lowest) == (two.counts, two.lowest)
    pairs = [(r.power, r.saturated, r.gradient) for r in (one, two)]
    assert pairs[0] == pytest.approx(pairs[1], rel=1e-5)  # sums of float32 in another order
