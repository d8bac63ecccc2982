import re

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import marvin


def test_a_curve_a_layer(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = marvin.MSGD(model.named_parameters(), init_wl=9, init_fl=5)
    with SummaryWriter(str(tmp_path)) as writer:
        marvin.tensorboard.log_formats(writer, optimizer, step=7)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    values = {tag: events.Scalars(tag)[0] for tag in events.Tags()["scalars"]}
    assert {tag: (event.step, event.value) for tag, event in values.items()} == {
        "word_length/0.weight": (7, 9),
        "word_length/1.weight": (7, 9),
        "fractional_length/0.weight": (7, 5),
        "fractional_length/1.weight": (7, 5),
        "mean_word_length": (7, 9),
    }


def test_curves_of_inputs_go_on_where_all_formats_are_those_of_weights(monkeypatch):
    model = nn.Sequential(nn.Linear(3, 4))
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.01)
    optimizer = marvin.Quantized(sgd, marvin.StaticPolicy(8, 5))
    marvin.quantize_activations(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        optimizer.step(loss=loss)
    names = [*marvin.tensorboard.scalars_of(optimizer)]
    assert "input_word_length/0.weight" in names
    monkeypatch.setattr(optimizer, "input_formats", lambda: optimizer.formats())
    assert [*marvin.tensorboard.scalars_of(optimizer)] == names


def test_charts_have_the_curves_of_all_layers(tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        marvin.tensorboard.add_layout(writer)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (tag,) = [tag for tag in events.Tags()["tensors"] if "custom_scalars" in tag]
    layout = layout_pb2.Layout()
    layout.ParseFromString(events.Tensors(tag)[0].tensor_proto.string_val[0])
    charts = {chart.title: [*chart.multiline.tag] for c in layout.category for chart in c.chart}
    optimizer = marvin.Quantized(
        torch.optim.SGD(nn.Linear(3, 4).named_parameters(), lr=0.1), marvin.LossBudgetPolicy()
    )
    shown = {
        name: [title for title, tags in charts.items() if any(re.search(t, name) for t in tags)]
        for name in [*marvin.tensorboard.scalars_of(optimizer), "input_word_length/x"]
    }
    assert shown["word_length/weight"] == ["weights, bits"]
    assert shown["input_word_length/x"] == ["inputs, bits"]
    assert shown["mean_word_length"] == ["means, bits"]
