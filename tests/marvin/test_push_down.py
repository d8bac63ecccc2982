import math

import numpy as np
import pytest
import torch

from fixedpoint_kernels import FixedPoint, histogram_candidates
from marvin.push_down import Lowest, expected_divergence, kl, push_down, sampled_divergence

RESOLUTION = 50


def divergences(weights, *, kind=expected_divergence):
    return lambda fmts: kind(weights, RESOLUTION)(fmts)


def test_kl_of_two_bins():
    p, q = np.array([4.5, 2.5]) / 7, np.array([2.5, 4.5]) / 7
    expected = (p * np.log(p / q)).sum()
    assert kl(np.array([4, 2]), np.array([2, 4])) == pytest.approx(expected)
    assert kl(np.array([4, 2]), np.array([4, 2])) == 0


def test_kl_directions_differ_and_stay_finite():
    rounded, own = np.array([9.0, 0.0, 0.0]), np.array([3.0, 4.0, 2.0])
    pq, qp = (kl(rounded, own, direction=d) for d in ("pq", "qp"))
    assert pq != pytest.approx(qp)
    assert kl(own, rounded) == pytest.approx(qp)
    assert math.isfinite(pq)
    assert math.isfinite(qp)


@pytest.mark.parametrize("kind", [expected_divergence, sampled_divergence])
def test_divergence_falls_with_the_step(kind):
    # steps in units of a bin: about 0.96 at 2.6, 0.27 at 1.3, 0.06 at 0.65, 0.004 at 0.33 nats
    weights = torch.randn(60_000).clamp(-3, 3)
    width = (weights.max() - weights.min()).item() / RESOLUTION
    weights = weights * (2**-4 / 0.65 / width)
    found = kind(weights, RESOLUTION)([FixedPoint(20, fl) for fl in (2, 3, 4, 5, 6)])
    assert found[0] > 0.5
    assert 0.1 < found[1] < 0.5
    assert 0.02 < found[2] < 0.12
    assert 0.0005 < found[3] < 0.02
    assert found[4] < found[3]


def test_divergence_falls_with_the_word_until_the_weights_fit():
    weights = torch.randn(20_000) / 4
    found = expected_divergence(weights, RESOLUTION)([FixedPoint(wl, 8) for wl in range(5, 14)])
    fits = next(
        i for i, wl in enumerate(range(5, 14)) if FixedPoint(wl, 8).max >= weights.abs().max()
    )
    assert (np.diff(found[: fits + 1]) < 0).all()
    assert np.ptp(found[fits:]) == 0


@pytest.mark.parametrize("n", [2000, 30_000])
@pytest.mark.parametrize("scale", [0.01, 0.05, 0.3])
def test_fractional_length_follows_the_range(n, scale):
    weights = torch.randn(n) * scale
    expected = math.log2(RESOLUTION / (weights.max() - weights.min()).item()) + 2
    for kind in (expected_divergence, sampled_divergence):
        found = push_down(divergences(weights, kind=kind), FixedPoint(28, 20), min_fl=1)
        assert abs(found.fl - expected) <= 1.5
        assert found.kl <= 0.01


def test_word_is_the_shortest_that_holds_the_weights():
    weights = torch.randn(5000) * 2
    found = push_down(divergences(weights), FixedPoint(24, 12))
    assert FixedPoint(found.wl, found.fl).max >= 0.9 * weights.abs().max()
    shorter = FixedPoint(found.wl - 1, found.fl)
    assert divergences(weights)([shorter])[0] > 0.01


def test_all_lossy_keeps_the_format():
    weights = torch.randn(5000) * 0.01
    found = push_down(divergences(weights), FixedPoint(8, 4))
    assert (found.wl, found.fl) == (8, 4)
    assert found.kl > 0.01


def test_a_format_below_min_fl_is_not_raised():
    weights = torch.randn(5000)
    assert push_down(divergences(weights), FixedPoint(8, 2), min_fl=4).fl == 2


def test_an_infinite_tolerance_finds_the_bottom_and_zero_the_top():
    weights, fmt = torch.randn(5000), FixedPoint(20, 12)
    bottom = push_down(divergences(weights), fmt, kl_eps=math.inf)
    assert (bottom.wl, bottom.fl) == (5, 4)
    assert push_down(divergences(weights), fmt, kl_eps=0).fl == 12


def test_too_fine_formats_are_not_looked_at():
    found = expected_divergence(torch.randn(100), RESOLUTION)(
        [FixedPoint(30, 4), FixedPoint(30, 25)]
    )
    assert math.isfinite(found[0])
    assert found[1] == math.inf


def test_expected_search_is_exact_and_repeats():
    weights = torch.randn(700) / 3
    results = {push_down(divergences(weights), FixedPoint(24, 14)) for _ in range(3)}
    assert len(results) == 1


def test_a_divergence_of_just_the_tolerance_loses_nothing():
    by_fl, by_wl = {4: 0.3, 5: 0.25, 6: 0.2}, {6: 0.4, 7: 0.25}

    def divergence(fmts):
        is_word = len({fmt.fl for fmt in fmts}) == 1
        return np.array([by_wl.get(f.wl, 0.0) if is_word else by_fl.get(f.fl, 0.0) for f in fmts])

    assert push_down(divergence, FixedPoint(12, 9), kl_eps=0.25) == Lowest(7, 5, 0.25)


@pytest.mark.parametrize("stream", [0, 3])
def test_a_sample_has_the_noise_it_was_given(stream):
    weights, fmt = torch.randn(500), FixedPoint(6, 1)
    counts = histogram_candidates(weights, [fmt], RESOLUTION, seed=5, stream=stream)
    own, rounded = counts.numpy().astype(np.float64)
    (found,) = sampled_divergence(weights, RESOLUTION, seed=5, stream=stream)([fmt])
    assert found == kl(rounded, own)


def test_constant_weights_have_no_distribution():
    with pytest.raises(ValueError, match="two different finite values"):
        expected_divergence(torch.ones(9), RESOLUTION)
