"""EBOPs of one network, beside what HGQ2 itself counted for it; see ``data/make_hgq2_ebops.py``."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import marvin
import perfmodel
from perfmodel.cost import ebops, run_cost
from perfmodel.trace import Trace

HGQ2 = json.loads((Path(__file__).parent / "data" / "hgq2_ebops.json").read_text())


@pytest.fixture
def layers():
    model = nn.Sequential()
    model.add_module("first", nn.Conv2d(3, 4, 3, bias=False))
    model.add_module("second", nn.Conv2d(4, 6, 3, padding=1, bias=False))
    model.add_module("flat", nn.Flatten())
    model.add_module("dense", nn.Linear(216, 5, bias=False))
    return perfmodel.layers(model, (3, 8, 8))


def trace_of(formats):
    changes = [
        marvin.Switch(
            1,
            f"{name}.weight",
            own["weight_bits"] + 1,
            input_wl=own["input_bits"] + own["input_signed"],
            input_signed=own["input_signed"],
        )
        for name, own in formats.items()
    ]
    return Trace(changes, 10, 32, searches=False)


def test_they_are_those_of_hgq2_but_for_borders(layers):
    trace, want = trace_of(HGQ2["formats"]), HGQ2["ebops"]
    for name in ("first", "dense"):
        (own,) = [row for row in layers if row.weight == f"{name}.weight"]
        assert ebops(trace, [own]) == want[name]
    (second,) = [row for row in layers if row.weight == "second.weight"]
    # HGQ2 leaves products with the border's zeros out, which we count
    inside = F.conv2d(torch.ones(1, 4, 6, 6), torch.ones(6, 4, 3, 3), padding=1).sum().item()
    assert ebops(trace, [second]) * inside / second.madds == want["second"]
    assert ebops(trace, layers) == 163_296 + 36 * 6 * 36 * 20 + want["dense"]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x)


def trained(model, policy, *shape, rounds_inputs=True, steps=12):
    """Train a model, and return its trace and its layers."""
    optimizer = marvin.Quantized(torch.optim.SGD(model.named_parameters(), lr=0.05), policy)
    if rounds_inputs:
        marvin.quantize_activations(model, optimizer)
    torch.manual_seed(0)
    x = torch.randn(16, *shape)
    for _ in range(steps):
        optimizer.zero_grad()
        y = model(x)
        loss = (y[0] if isinstance(y, tuple) else y).square().mean() + 1
        loss.backward()
        optimizer.step(loss=loss)
    return Trace(optimizer.trace, steps, 8), perfmodel.layers(model, shape), optimizer


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        (
            marvin.MarvinPolicy(init_wl=16, init_fl=8, lookback=(5, 20), resolution=(60, 70)),
            {"init_wl": 16, "lookback": (5, 20), "resolution": (60, 70)},
        ),
        (marvin.FixedPolicy(6, 4), {"init_wl": 6, "searches": False}),
        (marvin.MuppetPolicy(), {"init_wl": 8, "searches": False}),
        (marvin.LossBudgetPolicy(), {"init_wl": 32, "searches": False}),
    ],
    ids=lambda own: type(own).__name__,
)
def test_the_trace_of_an_optimizer_has_its_settings(policy, settings):
    _, _, optimizer = trained(network(), policy, 16)
    trace = Trace.of(optimizer, 12)
    assert trace == Trace((*optimizer.trace,), 12, **settings)
    assert Trace.of(optimizer, 12, rounds_inputs=False) == replace(trace, rounds_inputs=False)


def test_traces_of_other_optimizers_are_refused():
    first, second = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    with pytest.raises(TypeError, match=r"must be marvin\.MSGD or .*, got SGD"):
        Trace.of(torch.optim.SGD([first], lr=0.1), 12)
    groups = [{"params": [first]}, {"params": [second], "lookback": (5, 20)}]
    with pytest.raises(ValueError, match="groups must begin with one word length, lookback"):
        Trace.of(marvin.MSGD(groups), 12)


@pytest.mark.parametrize("rounds_inputs", [True, False])
def test_inputs_that_marvin_leaves_in_float32_count_as_such(rounds_inputs):
    policy = marvin.MarvinPolicy(lookback=(3, 10))
    trace, found, optimizer = trained(network(), policy, 16, rounds_inputs=rounds_inputs)
    bits = {name: fmt.wl for name, fmt in optimizer.formats().items()}
    assert {row.layer for row in trace.switches} == {"0.weight", "2.weight"}
    wanted = sum(
        row.madds * (bits[row.weight] - 1) * (bits[row.weight] - 1 if rounds_inputs else 31)
        for row in found
    )
    assert ebops(trace, found) == wanted
    as_weights = Trace([replace(row, has_float_inputs=False) for row in optimizer.trace], 12, 8)
    assert run_cost(trace, found, 16) == run_cost(as_weights, found, 16)


@pytest.mark.parametrize("policy", ["marvin", "static"])
@pytest.mark.parametrize(
    ("build", "shape", "rounded"),
    [
        (lambda: nn.LSTM(8, 8, 2, batch_first=True), (5, 8), "weight_ih_l0"),
        (Attention, (5, 8), "inner.in_proj_weight"),
    ],
    ids=["recurrent", "attention"],
)
@pytest.mark.filterwarnings("ignore:activations are not rounded where")
def test_single_layers_whose_inputs_stay_float32(build, shape, rounded, policy):
    static = policy == "static"
    chosen = (
        marvin.StaticPolicy(6, 6, window=5) if static else marvin.MarvinPolicy(lookback=(3, 10))
    )
    trace, found, optimizer = trained(build(), chosen, *shape)
    bits = {name: fmt.wl - 1 for name, fmt in optimizer.formats().items()}
    assert len(bits) > 1
    wanted = sum(
        row.madds * (bits[row.weight] * (bits[row.weight] if row.weight == rounded else 31))
        for row in found
        if row.weight
    )
    loose = sum(row.madds for row in found if not row.weight)
    assert ebops(trace, found) == wanted + loose * 31 * 31


@pytest.mark.filterwarnings("ignore:target_ebops")
@pytest.mark.parametrize("rounds_inputs", [True, False])
def test_report_and_target_count_alike(rounds_inputs):
    target = 4 * 31 * 608 if not rounds_inputs else 25 * 608
    madds = (("0.weight", 512), ("2.weight", 96))
    policy = marvin.LossBudgetPolicy(
        window=4, batch_size=16, target_ebops=target, madds=madds, min_wl=2, max_wl=12
    )
    trace, found, _ = trained(network(), policy, 16, rounds_inputs=rounds_inputs)
    assert ebops(trace, found) == pytest.approx(target, rel=0.1)
    if not rounds_inputs:
        assert ebops(trace, found) == ebops(Trace(trace.switches, 12, rounds_inputs=False), found)
