"""What a notebook shows of an optimizer, its activations and reports."""

import builtins

import pytest
import torch
from torch import nn

import marvin
from fixedpoint_kernels import FixedPoint, forward_save
from marvin.display import columns
from marvin.policies.trace import Switch


def trained(policy=None, steps=0):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    if policy is None:
        optimizer = marvin.MSGD(model.named_parameters(), lr=0.125)
    else:
        adam = torch.optim.Adam(model.named_parameters(), lr=0.125)
        optimizer = marvin.Quantized(adam, policy)
    handle = marvin.quantize_activations(model, optimizer)
    for _ in range(steps):
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(loss=loss)
    return model, optimizer, handle


def test_an_optimizer_is_a_short_table():
    _, optimizer, _ = trained(steps=2)
    assert repr(optimizer).splitlines() == [
        "MSGD with MarvinPolicy, 2 steps, lr 0.125",
        "2 layers, 8.0 bits on average",
        "layer     weight  inputs",
        "0.weight  <8, 4>  <8, 4>",
        "2.weight  <8, 4>  <8, 4>",
    ]
    _, optimizer, _ = trained(marvin.FixedPolicy(6, 3))
    assert repr(optimizer).startswith("Quantized(Adam) with FixedPolicy, 0 steps, lr 0.125\n")


def test_many_layers_leave_out_the_middle():
    rows = [(str(i), "a") for i in range(100)]
    lines = columns(("layer", "x"), rows).splitlines()
    assert len(lines) == 41
    assert lines[1].split() == ["0", "a"]
    assert lines[21] == "... 61 more"
    assert lines[22].split() == ["81", "a"]
    assert lines[-1].split() == ["99", "a"]
    assert len(columns(("layer", "x"), rows[:40]).splitlines()) == 41


def test_activations_and_reports_are_what_they_print():
    model, _, handle = trained(marvin.LossBudgetPolicy())
    assert repr(handle) == str(handle.report) == repr(handle.report)
    report = marvin.integer.convert(model)
    assert repr(report) == str(report)
    converted = forward_save.convert(nn.Sequential(nn.GELU()), few_bit=3)
    assert repr(converted) == str(converted)


def test_word_lengths_are_drawn_as_steps():
    _, optimizer, _ = trained(steps=3)
    optimizer.trace += [
        Switch(step=1, layer="0.weight", wl=12, wl_before=8),
        Switch(step=2, layer="0.weight", wl=10, wl_before=12),
    ]
    (axes,) = optimizer.plot().axes
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines["0.weight"].get_xdata()) == [0, 1, 2, 3]
    assert list(lines["0.weight"].get_ydata()) == [8, 12, 10, 10]
    assert list(lines["2.weight"].get_xdata()) == [0, 3]
    assert list(lines["2.weight"].get_ydata()) == [8, 8]
    assert {line.get_drawstyle() for line in lines.values()} == {"steps-post"}


def test_inputs_have_axes_of_their_own_where_they_have_formats_of_their_own():
    _, optimizer, _ = trained(marvin.LossBudgetPolicy(window=2), steps=5)
    assert any(row.input_wl for row in optimizer.trace)
    weights, inputs = optimizer.plot().axes
    assert (weights.get_ylabel(), inputs.get_ylabel()) == ("weights, bits", "inputs, bits")
    drawn = {line.get_label(): line.get_ydata()[-1] for line in inputs.lines}
    formats = optimizer.input_formats()
    assert drawn
    assert all(formats[name].wl == wl for name, wl in drawn.items())
    assert all(isinstance(fmt, FixedPoint) for fmt in formats.values())


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch):
    _, optimizer, _ = trained()
    real = builtins.__import__

    def missing(name, *arguments, **keywords):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        optimizer.plot()
