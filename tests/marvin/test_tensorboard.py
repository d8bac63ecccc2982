from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
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
