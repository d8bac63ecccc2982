from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import marvin


def test_curves_and_their_charts(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = marvin.MSGD(model.named_parameters(), init_wl=9, init_fl=5)
    with SummaryWriter(str(tmp_path)) as writer:
        marvin.tensorboard.log_layout(writer)
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
    (layout,) = events.Tensors("custom_scalars__config__")
    (content,) = layout.tensor_proto.string_val
    charts = layout_pb2.Layout.FromString(content).category[0].chart
    assert [list(chart.multiline.tag) for chart in charts] == [
        ["word_length/.*"],
        ["fractional_length/.*"],
    ]
