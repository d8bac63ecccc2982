"""What the tests of ``perfmodel`` share."""

import csv
import json
from dataclasses import dataclass

import pytest

from perfmodel.layers import Layer


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
    """Return a record with what costs depend on."""
    return Layer(
        weight.removesuffix(".weight"), "linear", madds, elements, (), (), weight, elements
    )


@pytest.fixture
def two_layers():
    return [layer("a.weight", 1000, 10), layer("b.weight", 3000, 90)]


@pytest.fixture
def changes():
    """Layer a: 8 bits for 30 steps, 12 for 20, 20 for 50; layer b: 8 for 50, 16 for 50."""
    return [
        Change(30, "a.weight", 12, 30),
        Change(50, "a.weight", 20, 20),
        Change(50, "b.weight", 16, 50),
    ]


CONFIG = {
    "model": "net",
    "dataset": "digits",
    "optimizer": "msgd",
    "batch_size": 64,
    "accumulation_steps": 2,
    "init_wl": 8,
    "lookback": [25, 100],
    "resolution": [50, 150],
}


def write(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def folder(tmp_path, two_layers, changes):
    """A whole run folder."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    rows = [
        {"layer": r.weight, "shape": "1x1", "elements": r.elements, "madds": r.madds}
        for r in two_layers
    ]
    write(path / "layers.csv", rows)
    write(path / "trace.csv", [vars(change) | {"kl": 0.1} for change in changes])
    write(path / "metrics.csv", [{"epoch": 1, "step": 50}, {"epoch": 2, "step": 100}])
    write(
        path / "timing.csv", [{"epoch": e, "images_per_s": s} for e, s in ((1, 90.0), (2, 100.0))]
    )
    place = {"cpu": "A processor", "threads": 1, "gpu": None}
    (path / "environment.json").write_text(json.dumps(place))
    return path
