"""EBOPs of one network, beside what HGQ2 itself counted for it; see ``data/make_hgq2_ebops.py``."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import marvin
import perfmodel
from perfmodel.cost import ebops
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
