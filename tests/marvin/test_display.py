"""What a notebook shows of an optimizer, its activations and reports."""

import builtins
import sys

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


def test_an_exported_network_is_a_short_table():
    model, optimizer, _ = trained()
    network = marvin.export.describe(model.eval(), torch.randn(8, 4), optimizer.formats())
    head, *table = repr(network).splitlines()
    assert head == "6 operations on samples of shape (4,), formats trained"
    lines = [line.split() for line in table]
    assert [line[:2] for line in lines[1:]] == [
        [op.name, type(op).__name__] for op in network.operations[1:]
    ]
    assert [line[-1] for line in lines[1:]] == ["(4,)", *["(8,)"] * 3, *["(2,)"] * 2]
    assert all("<8, 4>" in " ".join(line) for line in lines[1:] if line[1] != "Relu")


def test_stored_codes_say_what_they_save():
    model, optimizer, _ = trained()
    stored = marvin.store_codes(model, optimizer)
    assert repr(stored) == "2 of 2 weights are kept as codes: 48 bytes in place of 192"


def test_one_layer_is_no_layers():
    optimizer = marvin.MSGD(nn.Linear(3, 3).named_parameters(), lr=0.125)
    assert "\n1 layer, on average 8.0 bits of weights" in repr(optimizer)


def test_an_optimizer_without_layers_says_so():
    layer = nn.Linear(3, 3).requires_grad_(False)
    optimizer = marvin.MSGD(layer.named_parameters(), lr=0.125)
    wanted = "\n0 layers: no parameter of two or more dimensions is trained"
    assert repr(optimizer) == f"MSGD with MarvinPolicy, 0 steps, lr 0.125{wanted}"


def test_an_optimizer_is_a_short_table():
    _, optimizer, _ = trained(steps=2)
    assert repr(optimizer).splitlines() == [
        "MSGD with MarvinPolicy, 2 steps, lr 0.125",
        "2 layers, on average 8.0 bits of weights, 8.0 of inputs",
        "layer     weight  inputs",
        "0.weight  <8, 4>  <8, 4>",
        "2.weight  <8, 4>  <8, 4>",
    ]
    _, optimizer, _ = trained(marvin.FixedPolicy(6, 3))
    assert repr(optimizer).startswith("Quantized(Adam) with FixedPolicy, 0 steps, lr 0.125\n")


def test_weights_and_inputs_have_a_mean_each():
    _, optimizer, handle = trained(marvin.StaticPolicy(weights=4, activations=7), steps=2)
    assert "on average 4.0 bits of weights, 7.0 of inputs" in repr(optimizer)
    handle.remove()
    lines = repr(optimizer).splitlines()
    assert "inputs are float32 without marvin.quantize_activations" in lines[1]
    assert lines[2].split() == ["layer", "weight"]
    assert lines[3].split()[0] == "0.weight"


def test_what_was_not_called_is_told_once_something_was():
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    handle = marvin.quantize_activations(model, marvin.MSGD(model.named_parameters()))
    assert "not called" not in repr(handle)
    model[1](torch.ones(1, 4))
    assert "not 0: not called yet" in repr(handle)


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


def cells_of(figure):
    """Return the texts of a drawn table with their colours, row by row, by the row's name."""
    (axes,) = figure.axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    rows = {name: [] for name in names}
    for text, bar in zip(axes.texts, axes.patches, strict=True):
        assert bar.get_x() < text.get_position()[0] < bar.get_x() + bar.get_width()
        rows[names[round(text.get_position()[1])]].append((text.get_text(), bar.get_facecolor()))
    return rows


def test_reports_draw_what_they_say():
    model, _, handle = trained(marvin.LossBudgetPolicy(window=1), steps=2)
    drawn = cells_of(handle.report.plot())
    assert [text for text, _ in drawn["0"]] == ["rounds"]

    model.append(nn.Linear(2, 2))  # which has no formats
    report = marvin.integer.convert(model, fused=False)
    drawn = cells_of(report.plot())
    assert [*drawn] == [row.name for row in report.rows] == ["0", "2", "3"]
    assert [row.is_integer for row in report.rows] == [True, True, False]
    for row in report.rows:
        texts = [text for text, _ in drawn[row.name]]
        assert texts[:3] == [row.forward, row.input_gradient, row.weight_gradient]
        assert (drawn[row.name][0][1] == drawn["0"][0][1]) == row.is_integer

    own = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Softmax(1), nn.ReLU())
    converted = forward_save.convert(own, few_bit=3)
    drawn = cells_of(converted.plot())
    kept = {row.layer: row.reason for row in converted.kept}
    assert kept
    for name, reason in kept.items():
        assert drawn[name][1][0] == reason
        assert drawn[name][1][1] != drawn["1"][1][1]


def test_reports_of_activations_name_a_reason_once():
    model = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(30)), nn.Linear(4, 2))
    adam = torch.optim.Adam(model.named_parameters())
    handle = marvin.quantize_activations(model, marvin.Quantized(adam, marvin.LossBudgetPolicy()))
    lines = repr(handle).splitlines()
    assert max(map(len, lines)) <= 100
    assert " ".join(repr(handle).split()).count("normalisation in float32") == 1
    drawn = cells_of(handle.report.plot())
    assert len(drawn) == 31
    assert drawn["7"][1][0] == handle.report.left["7"]


def test_a_plan_is_drawn():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    plan = forward_save.plan(model, torch.randn(64, 64), budget_bytes=10_000)
    drawn = cells_of(plan.plot())
    assert {row.layer: row.keeps for row in plan.layers} == {
        name: row[1][0] for name, row in drawn.items()
    }
    assert repr(plan) == str(plan)


def test_a_notebook_shows_a_figure_where_it_stands():
    """Without ``%matplotlib inline`` a figure of matplotlib's is a line of text."""
    _, optimizer, handle = trained(steps=1)
    for figure in (optimizer.plot(), handle.report.plot()):
        assert figure._repr_png_().startswith(b"\x89PNG")


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch):
    _, optimizer, _ = trained()
    real = builtins.__import__

    def missing(name, *arguments, **keywords):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", missing)
    monkeypatch.delitem(sys.modules, "fixedpoint_kernels.figure", raising=False)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        optimizer.plot()
