import itertools
import math

import numpy as np
import pytest
import torch

import marvin
from fixedpoint_kernels import FixedPoint, histogram_candidates
from fixedpoint_kernels.histogram import Expected
from marvin.policies.push_down import Lowest, expected_divergence, kl, push_down, sampled_divergence

RESOLUTION = 50


def divergences(weights, *, kind=expected_divergence):
    return lambda fmts: np.array(list(kind(weights, RESOLUTION)(fmts)))


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
    found = divergences(weights, kind=kind)([FixedPoint(20, fl) for fl in (2, 3, 4, 5, 6)])
    assert found[0] > 0.5
    assert 0.1 < found[1] < 0.5
    assert 0.02 < found[2] < 0.12
    assert 0.0005 < found[3] < 0.02
    assert found[4] < found[3]


def test_divergence_falls_with_the_word_until_the_weights_fit():
    weights = torch.randn(20_000) / 4
    found = divergences(weights)([FixedPoint(wl, 8) for wl in range(5, 14)])
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


class Exact:
    """PushDown from its description, with float64 and the documented formula for bins alone."""

    def __init__(self, weights, resolution):
        self.weights, self.resolution = weights.double().numpy(), resolution
        self.low, self.high = np.float32(self.weights.min()), np.float32(self.weights.max())
        self.own = self.counts(self.weights, np.ones(len(self.weights)))

    def counts(self, values, shares):
        width = np.float32(self.resolution) / (self.high - self.low)
        places = np.floor((values.astype(np.float32) - self.low) * width)
        return np.bincount(
            np.clip(places, 0, self.resolution - 1).astype(int), shares, self.resolution
        )

    def kl(self, wl, fl):
        scaled = self.weights * 2.0**fl
        below = np.floor(scaled)
        share, rounded = scaled - below, np.zeros(self.resolution)
        for codes, shares in ((below, 1 - share), (below + 1, share)):
            values = np.clip(codes, -(2.0 ** (wl - 1)), 2.0 ** (wl - 1) - 1) / 2.0**fl
            rounded += self.counts(values, shares)
        p, q = rounded + 0.5, self.own + 0.5
        return float((p / p.sum() * np.log((p / p.sum()) / (q / q.sum()))).sum())

    def push_down(self, wl, fl, kl_eps, min_fl=4):
        lengths = range(min_fl, fl + 1)
        fl = next((f for f in lengths if self.kl(wl, f) <= kl_eps), fl)
        return next((w for w in range(fl + 1, wl + 1) if self.kl(w, fl) <= kl_eps), wl), fl


def layers_of_weights():
    """280 cases: 5 sizes, 4 distributions, 2 resolutions, 7 scales with as many formats."""
    generator = torch.Generator().manual_seed(7)
    for n, resolution in itertools.product((144, 300, 432, 700, 2304), (50, 150)):
        for case in range(7):
            normal = torch.randn(n, generator=generator)
            uniform = torch.rand(n, generator=generator)
            mask = torch.rand(n, generator=generator) < 0.2
            scale = 10.0 ** (case / 3 - 2)  # 0.01 to 1
            fmt = FixedPoint(20 + case, 14 + case)
            for weights in (normal, uniform - 0.5, normal**3, normal * mask):
                yield (weights * scale), resolution, fmt


def test_small_tolerances_find_the_format_of_exact_counts():
    wrong, cases = [], 0
    for weights, resolution, fmt in layers_of_weights():
        found = push_down(expected_divergence(weights, resolution), fmt, kl_eps=1e-4)
        want = Exact(weights, resolution).push_down(fmt.wl, fmt.fl, 1e-4)
        cases += 1
        if (found.wl, found.fl) != want:
            wrong.append((len(weights), resolution, str(fmt), found, want))
    assert cases == 280
    assert not wrong, f"{len(wrong)} of {cases}: {wrong[:3]}"


@pytest.mark.parametrize("n", [100, 3000])
def test_every_format_has_the_divergence_of_exact_counts(n):
    weights = torch.randn(n) / 5
    fmts = [FixedPoint(wl, fl) for wl in (6, 14, 28) for fl in range(1, 25)]
    exact = Exact(weights, RESOLUTION)
    want = [exact.kl(fmt.wl, fmt.fl) for fmt in fmts]
    # counts are off by n * 2**-24 at most, of n: the divergence by about as much
    np.testing.assert_allclose(divergences(weights)(fmts), want, rtol=1e-5, atol=1e-7)


def test_fine_formats_are_counted_only_where_coarse_ones_lose(monkeypatch):
    weights = torch.randn(2304) / 20

    def refuse(self, fmts):
        raise AssertionError(f"{list(map(str, fmts))} need not be counted")

    monkeypatch.setattr(Expected, "_fine", refuse)
    assert push_down(expected_divergence(weights, RESOLUTION), FixedPoint(32, 28)).fl < 14
    with pytest.raises(AssertionError, match="need not be counted"):
        push_down(expected_divergence(weights, RESOLUTION), FixedPoint(32, 28), kl_eps=1e-9)


@pytest.mark.parametrize("fmt", [FixedPoint(4, 6), FixedPoint(2, 5)])
def test_words_may_be_shorter_than_their_fraction(fmt):
    found = push_down(divergences(torch.randn(500)), fmt)
    assert (found.wl, found.fl) == (fmt.wl, fmt.fl)


@pytest.mark.filterwarnings("ignore:most weights are clamped")
@pytest.mark.parametrize("scale", [2.0**-149, 1e-44, 1e-38, 1e-30, 1e30, 1e38, 3.4e38])
@pytest.mark.parametrize("pushdown_range", ["current", "full"])
def test_weights_of_any_size_train(scale, pushdown_range):
    rows = []
    for kl_counts in ("expected", "sampled"):
        torch.manual_seed(0)
        weight = torch.nn.Parameter((torch.rand(40, 30) * 2 - 1) * scale)
        options = {"kl_counts": kl_counts, "pushdown_range": pushdown_range, "lookback": (2, 5)}
        optimizer = marvin.MSGD([weight], lr=min(scale, 0.1), **options)
        for step in range(8):
            weight.grad = torch.randn_like(weight)
            optimizer.step(loss=1 / (step + 1))
        assert len(optimizer.trace) == 2
        assert all(math.isfinite(row.kl) for row in optimizer.trace)
        rows.append([(row.wl, row.fl, row.wl_min, row.fl_min) for row in optimizer.trace])
    assert rows[0] == rows[1]  # all values round to the same few: nothing is left to chance


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kl_counts", ["expected", "sampled"])
def test_weights_that_are_not_finite_are_named(wrong, kl_counts):
    good, bad = (torch.nn.Parameter(torch.randn(3, 3)) for _ in range(2))
    named = [("first", good), ("second", bad)]
    optimizer = marvin.MSGD(named, lr=0.1, kl_counts=kl_counts, lookback=(1, 1))
    good.grad = bad.grad = torch.ones(3, 3)
    for _ in range(2):  # the second step looks at all masters by itself
        optimizer.step(loss=1.0)
    optimizer.state[bad]["master"][0, 0] = wrong
    with pytest.raises(FloatingPointError, match="weights must be finite, got second from"):
        optimizer.step(loss=1.0)


def test_empty_layers_keep_their_format():
    empty = torch.nn.Parameter(torch.empty(0, 3))
    optimizer = marvin.MSGD([empty], lr=0.1, lookback=(1, 1))
    empty.grad = torch.empty(0, 3)
    optimizer.step(loss=1.0)
    assert (optimizer.trace[0].wl_min, optimizer.trace[0].fl_min) == (8, 4)


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
