import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

import marvin
import perfmodel
from perfmodel.cost import (
    check_match,
    ebops,
    float32_cost,
    inference_speedup,
    layer_cost,
    memory_ratio,
    pushdown_ops,
    pushup_ops,
    run_cost,
    schedule_cost,
    size_ratio,
    speedup,
    weights_of,
)
from perfmodel.layers import Layer
from perfmodel.meter import Meter
from perfmodel.trace import MUPPET_ALEXNET, MUPPET_RESNET20, Schedule, Segment, Trace
from train.alexnet import alexnet
from train.resnet20 import resnet20

STEPS = 100


@dataclass(frozen=True)
class Change:
    """A switch of format."""

    step: int
    layer: str
    wl: int
    lookback: int = 25
    input_wl: int = 0
    input_signed: bool = True


def layer(weight, madds, elements):
    name = weight.removesuffix(".weight")
    return Layer(name, "linear", madds, elements, (), (), weight, elements)


def always(wl, steps=STEPS):
    return Trace((), steps, wl)


def test_equations_6_and_7_on_the_second_layer_of_alexnet():
    assert pushdown_ops(307_200) == pytest.approx(1267.7e6, rel=1e-4)
    assert pushup_ops(307_200) == 31_027_201
    assert pushdown_ops(307_200, overhead="linear") * 150 == pytest.approx(pushdown_ops(307_200))
    assert pushdown_ops(10, overhead="none") == pushup_ops(10, overhead="none") == 0


def test_equation_8_by_hand(two_layers, changes):
    trace = Trace(changes, STEPS)
    a = weights_of(two_layers)[0]
    passes, search = layer_cost(a, trace, samples=4)
    assert passes == 4 * 1000 * (30 * (8 + 32) + 20 * (12 + 32) + 50 * (20 + 32))
    once = 2 * math.log2(24) * 150 * 3 * 10 + 101 * 10 + 1
    assert search == pytest.approx(32 * once * (30 / 30 + 20 / 20 + 50 / 20))


@pytest.mark.parametrize(
    ("wl", "wanted"), [(8, 1.6), (16, 4 / 3), (20, 1.2308), (24, 1.1429), (32, 1.0)]
)
def test_speedup_without_a_search_depends_on_the_word_length_alone(two_layers, wl, wanted):
    assert speedup(always(wl), two_layers, 64, 2, "none") == pytest.approx(wanted, abs=5e-5)


@pytest.mark.parametrize(
    ("build", "lookback", "share"),
    [(alexnet, 25, 0.055), (alexnet, 100, 0.014), (resnet20, 25, 0.002), (resnet20, 100, 0.0006)],
)
def test_the_search_is_charged_once_a_step(build, lookback, share):
    found = perfmodel.layers(build(), (3, 32, 32))
    trace = Trace((), STEPS, 8, (lookback, 100))
    search = run_cost(trace, found, 256) - run_cost(trace, found, 256, "none")
    assert search / float32_cost(found, 256, STEPS) == pytest.approx(share, rel=0.1)


def test_muppets_schedules():
    assert MUPPET_ALEXNET.memory_ratio == pytest.approx(0.665, abs=5e-4)
    assert MUPPET_RESNET20.memory_ratio == pytest.approx(0.6195, abs=5e-5)
    assert (MUPPET_ALEXNET.epochs, MUPPET_RESNET20.epochs) == (99, 114)


def test_a_baseline_has_its_own_steps_and_batches(two_layers):
    baseline = Schedule(((8, 1), (32, 1)), 50, batch_size=128, accumulation_steps=2)
    cost = 4000 * 256 * 50 * (8 + 32 + 32 + 32)
    assert schedule_cost(baseline, two_layers) == cost
    ours = run_cost(always(16), two_layers, 64, "none")
    assert speedup(always(16), two_layers, 64, 1, "none", baseline) == pytest.approx(cost / ours)
    same = Schedule(((32, 1),), STEPS, 64)
    got = speedup(always(16), two_layers, 64, 1, "paper", same)
    assert got == pytest.approx(speedup(always(16), two_layers, 64))


def test_word_lengths_change_after_the_step_of_the_switch(changes):
    trace = Trace(changes, STEPS)
    assert trace.segments("a.weight") == [
        Segment(8, 30, 30, 8),
        Segment(12, 20, 20, 12),
        Segment(20, 50, 20, 20),
    ]
    assert trace.word_lengths("b.weight") == [8] * 50 + [16] * 50
    assert trace.segments("never") == [Segment(8, 100, 25, 8)]
    assert (trace.lowest("a.weight"), trace.final("a.weight")) == (8, 20)
    last = Trace([Change(100, "a", 30)], 100)
    assert (last.mean("a"), last.final("a")) == (8, 30)


def test_a_product_costs_what_its_longer_factor_does(two_layers):
    rows = [Change(1, "a.weight", 4, 0, 6), Change(1, "b.weight", 6, 0, 5)]
    trace = Trace(rows, STEPS, 32, searches=False)
    assert trace.segments("a.weight") == [Segment(32, 1, math.inf, 32), Segment(4, 99, math.inf, 6)]
    cost = 4000 * (1 * 64 + 99 * (6 + 32))
    assert speedup(trace, two_layers, 1) == pytest.approx(4000 * 64 * STEPS / cost)
    assert inference_speedup(trace, two_layers) == 32 / 6
    assert trace.input_mean("b.weight") == (32 + 99 * 5) / 100
    assert size_ratio(trace, two_layers) == (4 + 6) / 64
    assert trace.has_inputs
    assert not trace.keeping(8).has_inputs


def test_memory_and_size(two_layers, changes):
    trace = Trace(changes, STEPS)
    a, b = (30 * 8 + 20 * 12 + 50 * 20) / 100, 12
    assert memory_ratio(trace, two_layers) == pytest.approx((a + b) / 64)
    weighted = (10 * a + 90 * b) / 100 / 32
    assert memory_ratio(trace, two_layers, weighted=True) == pytest.approx(weighted)
    assert size_ratio(trace, two_layers) == (20 + 16) / 64
    assert size_ratio(trace, two_layers, weighted=True) == (10 * 20 + 90 * 16) / 100 / 32
    assert inference_speedup(trace, two_layers) == 32 * 4000 / (1000 * 20 + 3000 * 16)


def test_had_every_layer_kept_8_bits(two_layers, changes):
    trace = Trace(changes, STEPS).keeping(8)
    assert speedup(trace, two_layers, 1) == pytest.approx(1.6)
    assert memory_ratio(trace, two_layers) == size_ratio(trace, two_layers) == 0.25
    half = Trace(changes, STEPS).keeping(8, ["a.weight"])
    assert (half.final("a.weight"), half.final("b.weight")) == (8, 16)
    assert half.segments("a.weight") == [Segment(8, 100, math.inf, 8)]
    assert Trace(changes, STEPS).keeping(8, "a.weight") == half


def test_a_switch_without_a_search_is_charged_none(two_layers):
    rows = [Change(1, "a.weight", 6, 0), Change(1, "b.weight", 6, 0)]
    wanted = speedup(Trace(rows, STEPS, 32, searches=False), two_layers, 4)
    assert speedup(Trace(rows, STEPS, 32), two_layers, 4) == wanted


def test_layers_may_come_one_by_one(two_layers):
    assert speedup(always(8), iter(two_layers), 4) == speedup(always(8), two_layers, 4)


def test_products_of_activations_stay_in_32_bits(two_layers):
    loose = Layer("attention", "attention", 4000, 0, (), ())
    both = speedup(always(8), [*two_layers, loose], 1, 1, "none")
    assert both == pytest.approx(2 * 64 / (40 + 64))
    assert size_ratio(always(8), [*two_layers, loose]) == 0.25
    assert inference_speedup(always(8), [*two_layers, loose]) == 2 * 32 / (8 + 32)


def test_a_weight_used_twice_is_one_weight():
    row = layer("a.weight", 10, 5)
    (w,) = weights_of([row, row])
    assert (w.madds, w.elements) == (20, 5)


def test_a_trace_of_another_model_names_the_layers(two_layers, changes):
    trace = Trace([*changes, Change(10, "stem.weight", 9)], STEPS)
    with pytest.raises(ValueError, match=r"got layers it has not: stem.weight$"):
        speedup(trace, two_layers, 1)
    with pytest.raises(ValueError, match=r"not: a.weight; layers of the model that never .*: c$"):
        check_match(Trace(changes, STEPS), [two_layers[1], layer("c", 1, 1)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "batch_size must be at least 1, got 0"),
        ((1, -1), "accumulation_steps must be at least 1, got -1"),
        ((1, 1, "free"), "overhead must be 'paper', 'linear' or 'none', got 'free'"),
    ],
)
def test_bad_values(two_layers, arguments, message):
    with pytest.raises(ValueError, match=message):
        speedup(always(8), two_layers, *arguments)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda rows: Trace((), -1), ValueError, "steps must be at least 0, got -1"),
        (lambda rows: Trace((), 1, 0), ValueError, "init_wl must be 1 to 32, got 0"),
        (lambda rows: Trace((), 2.5), TypeError, r"steps must be a whole number, got 2\.5"),
        (lambda rows: always(8).keeping(33), ValueError, "wl must be 1 to 32, got 33"),
        (lambda rows: Schedule(8), TypeError, r"levels must be pairs of bits and .* got 8"),
        (lambda rows: Schedule(((8, -1),)), ValueError, "epochs must be at least 0, got -1"),
        (lambda rows: Schedule(()), ValueError, "epochs must be at least 1, got 0"),
        (lambda rows: float32_cost(rows, -1, 10), ValueError, "samples must be at least 1"),
        (lambda rows: float32_cost(rows, 1, -10), ValueError, "steps must be at least 0"),
        (lambda rows: run_cost(always(8), rows, -3), ValueError, "samples must be at least 1"),
        (lambda rows: pushdown_ops(-1), ValueError, "elements must be at least 0, got -1"),
        (lambda rows: pushup_ops(1, overhead="x"), ValueError, "overhead must be 'paper'"),
        (lambda rows: pushdown_ops(1, overhead="x"), ValueError, "overhead must be 'paper'"),
        (lambda rows: speedup(always(8), rows, "32"), TypeError, "batch_size must be a whole"),
        (lambda rows: speedup(always(8), rows, True), TypeError, "batch_size must be a whole"),
        (lambda rows: size_ratio([], rows), TypeError, r"got list: write Trace\.of\(optimizer"),
        (lambda rows: memory_ratio([], rows), TypeError, r"got list: write Trace\.of\(optimizer"),
        (lambda rows: ebops([], rows), TypeError, r"got list: write Trace\.of\(optimizer"),
        (lambda rows: inference_speedup([], rows), TypeError, "got list: write Trace"),
        (lambda rows: layer_cost(weights_of(rows)[0], [], 1), TypeError, "got list: write Trace"),
    ],
)
def test_what_is_no_run_is_refused(two_layers, call, error, message):
    with pytest.raises(error, match=message):
        call(two_layers)


@pytest.mark.parametrize(
    "call",
    [
        lambda rows: speedup(always(8), rows, 1),
        lambda rows: run_cost(always(8), rows, 1),
        lambda rows: size_ratio(always(8), rows),
        lambda rows: memory_ratio(always(8), rows),
        lambda rows: inference_speedup(always(8), rows),
        lambda rows: ebops(always(8), rows),
        lambda rows: float32_cost(rows, 1, 1),
        lambda rows: schedule_cost(MUPPET_RESNET20, rows),
    ],
)
def test_layers_are_those_of_a_model(call):
    with pytest.raises(ValueError, match=r"got none: write perfmodel\.layers\(model, \(3, 32"):
        call([])
    for wrong, got in ((["model"], "'model'"), (None, "None"), (5, "5")):
        with pytest.raises(TypeError, match=rf"got {got}: write perfmodel\.layers\(model, \(3, 32"):
            call(wrong)


@pytest.mark.parametrize(
    ("wrong", "got"), [(None, "None"), ([1], "1"), ("abc", "'a'"), (Change(5, "a", 9), "Change")]
)
def test_switches_are_those_of_an_optimizer(wrong, got):
    with pytest.raises(TypeError, match=rf"got {got}.*: write Trace\.of\(optimizer, steps\)"):
        Trace(wrong, 100)


@pytest.mark.parametrize("steps", [(0,), (5, 5), (5, 4), (101,)])
def test_switches_out_of_order(steps):
    with pytest.raises(ValueError, match="switches of a must be in order and within 100 steps"):
        Trace([Change(step, "a", 9) for step in steps], 100)


def test_an_empty_run_costs_nothing(two_layers):
    assert speedup(always(8, steps=0), two_layers, 1) == 1
    assert memory_ratio(always(8, steps=0), two_layers) == 0.25


events = st.tuples(
    st.integers(1, 30),
    st.sampled_from(["a.weight", "b.weight"]),
    st.integers(2, 32),
    st.integers(1, 99),
    st.sampled_from([0, 2, 8, 32]),
)


@given(
    st.lists(events, max_size=12, unique_by=lambda e: e[:2]),
    st.sampled_from(["paper", "none"]),
    st.booleans(),
)
def test_the_meter_shows_what_speedup_returns(found, overhead, searches):
    layers_ = [
        layer("a.weight", 1000, 10),
        layer("b.weight", 3000, 90),
        Layer("", "matmul", 7, 0, (), ()),
    ]
    switches = [Change(*event) for event in sorted(found)]
    meter = Meter(layers_, 6, Trace((), 0, searches=searches), overhead)
    for step in range(1, 31):
        so_far = [s for s in switches if s.step <= step]
        wanted = speedup(Trace(so_far, step, searches=searches), layers_, 3, 2, overhead)
        assert meter.speedup(so_far, step) == pytest.approx(wanted, rel=1e-12)


def test_the_meter_refuses_another_models_layers(two_layers):
    with pytest.raises(ValueError, match="must have every layer, got c"):
        Meter(two_layers, 1, always(8)).speedup([Change(1, "c", 9)], 2)


def test_ebops_by_hand():
    """Magnitude bits of weights times those of inputs, over multiply-adds; the last formats count."""
    layers = [layer("a.weight", 1000, 10), layer("b.weight", 3000, 90), layer("", 7, 0)]
    changes = [
        Change(1, "a.weight", 7, input_wl=8, input_signed=True),
        Change(1, "b.weight", 5, input_wl=6, input_signed=False),
        Change(9, "a.weight", 4, input_wl=6, input_signed=True),
    ]
    trace = Trace(changes, STEPS, 32, searches=False)
    assert ebops(trace, layers) == 1000 * 3 * 5 + 3000 * 4 * 6 + 7 * 31 * 31
    floats = Trace(changes, STEPS, 32, searches=False, rounds_inputs=False)
    assert ebops(floats, layers[:2]) == (1000 * 3 + 3000 * 4) * 31
    assert [floats.segments("a.weight")[-1].product_wl] == [4]  # SU's, as the weight's
    assert ebops(floats.keeping(8), layers[:2]) == 4000 * 7 * 31
    assert ebops(Trace((), STEPS, 8, rounds_inputs=False), layers[:2]) == 4000 * 7 * 31
    assert ebops(Trace((), STEPS, 32, kept={"*": 32}), layers) == 4007 * 31 * 31


def test_the_meter_counts_ebops_as_the_trace_does():
    layers = [layer("a.weight", 1000, 10), layer("b.weight", 3000, 90), layer("", 7, 0)]
    changes = [
        Change(1, "a.weight", 7, input_wl=8),
        Change(2, "b.weight", 5, input_wl=6, input_signed=False),
        Change(9, "a.weight", 4, input_wl=6),
        marvin.Switch(10, "b.weight", 4, has_float_inputs=True),
    ]
    start = Trace((), 0, 32, searches=False)
    meter = Meter(layers, 16, start)
    for count in range(len(changes) + 1):
        meter.speedup(changes[:count], 10)
        so_far = Trace(changes[:count], 10, 32, searches=False)
        assert meter.ebops() == ebops(so_far, layers)
