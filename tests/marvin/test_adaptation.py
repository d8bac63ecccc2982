import math

import pytest

from fixedpoint_kernels import FixedPoint
from marvin.policies.adaptation import (
    LayerState,
    adapt_lookback,
    adapt_resolution,
    adapt_strategy,
    observe,
)

SETTINGS = {
    "lookback": (25, 100),
    "resolution": (50, 150),
    "lookback_momentum": 0.9,
    "lookback_rounding": "ceil",
}


def lookbacks(start, ds, n, **kwargs):
    result = []
    for _ in range(n):
        start = adapt_lookback(start, ds, (25, 100), **kwargs)
        result.append(start)
    return result


def test_lookback_falls_with_diversity_and_sticks_above_its_bound():
    assert lookbacks(100, math.inf, 4) == [33, 26, 26, 26]


def test_lookback_rises_without_diversity():
    assert lookbacks(25, 1, 3) == [93, 100, 100]
    assert lookbacks(25, math.nan, 3) == [93, 100, 100]
    assert lookbacks(25, 2.0**-1074, 3) == [93, 100, 100]


def test_nearest_rounding_reaches_the_lower_bound():
    assert lookbacks(100, math.inf, 3, rounding="nearest")[-1] == 25


def test_lookback_tolerates_floating_point():
    assert lookbacks(100, 1, 1, momentum=0.33) == [100]  # 0.33 * 100 + 0.67 * 100 > 100


@pytest.mark.parametrize(
    ("lookback", "start", "expected"),
    [(100, 50, 51), (25, 60, 59), (60, 60, 60), (100, 150, 150), (25, 50, 50)],
)
def test_resolution(lookback, start, expected):
    assert adapt_resolution(start, lookback, (25, 100), (50, 150)) == expected


@pytest.mark.parametrize(
    ("level", "loss", "expected"),
    [
        ("min", 0.9, "min"),
        ("max", 0.9, "min"),
        ("min", 1.0, "mean"),
        ("mean", 1.1, "max"),
        ("max", 1.1, "max"),
        ("max", -1.1, "min"),
    ],
)
def test_strategy(level, loss, expected):
    assert adapt_strategy(level, [9.0, 1.0, 1.0], loss, 2) == expected


@pytest.mark.parametrize(
    ("loss", "margin", "expected"),
    [
        (-1.1, 0.0, "min"),
        (-0.9, 0.0, "max"),
        (0.5, 0.0, "max"),
        (-0.95, 0.1, "mean"),
        (-0.85, 0.1, "max"),
    ],
)
def test_strategy_of_losses_below_0(loss, margin, expected):
    assert adapt_strategy("mean", [-1.0, -1.0], loss, 2, margin=margin) == expected


def test_strategy_waits_for_enough_losses():
    assert adapt_strategy("mean", [1.0], 0.5, 2) == "mean"


def test_strategy_margin():
    assert adapt_strategy("min", [1.0, 1.0], 1.05, 2, margin=0.1) == "min"
    assert adapt_strategy("min", [1.0, 1.0], 1.15, 2, margin=0.1) == "mean"


def test_a_window_of_equal_gradients_has_diversity_one():
    state = LayerState(FixedPoint(8, 4), 25, 50)
    for n in range(1, 4):
        state = observe(state, 1.0, float(n), SETTINGS)
        assert (state.count, state.norm_sum, state.diversity) == (n, n, 1.0)
    assert state.lookback == 100
    assert state.resolution == 52  # the longest lookback twice
    assert not state.is_due


def test_cancelling_gradients_are_infinitely_diverse():
    state = observe(LayerState(FixedPoint(8, 4), 100, 50), 1.0, 1.0, SETTINGS)
    assert observe(state, 1.0, 0.0, SETTINGS).diversity == math.inf


def test_zero_gradients_ask_for_the_longest_lookback():
    state = observe(LayerState(FixedPoint(8, 4), 25, 50), 0.0, 0.0, SETTINGS)
    assert math.isnan(state.diversity)
    assert state.lookback == 93


def test_orthogonal_gradients_fill_a_window_in_26_steps():
    state = LayerState(FixedPoint(8, 4), 25, 50)
    while not state.is_due:
        state = observe(state, 1.0, math.sqrt(state.count + 1), SETTINGS)
    assert state.count == 26
