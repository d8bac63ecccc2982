"""EBOPs beside HGQ2's own count, and the choice of what counts for a target."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from torch import nn

from benchmarks import hgq2
from perfmodel import cost, layers
from perfmodel.trace import Trace

ROOT = Path(__file__).parents[2]
# large packages that nothing else needs, so they have an environment of their own: make .venv-hgq/installed
PYTHON = Path(os.environ.get("HGQ_PYTHON", ROOT / ".venv-hgq/bin/python"))
needs_hgq2 = pytest.mark.skipif(not PYTHON.exists(), reason="needs HGQ2")


class Switch:
    """A format of ``wl`` bits for the weight, and ``input_wl`` for what it multiplies."""

    step, lookback, resolution, note = 1, 1, 1, ""

    def __init__(self, layer, wl, input_wl, input_signed):
        self.layer, self.wl, self.input_wl, self.input_signed = layer, wl, input_wl, input_signed


@needs_hgq2
@pytest.mark.slow
def test_ebops_are_hgq2s(tmp_path):
    """Weights of 6 bits with a sign, inputs of 5 without; HGQ2 leaves out products with a border's zeros."""
    nets = [
        (nn.Linear(7, 5), (7,), {"kind": "linear", "out": 5, "shape": [7]}),
        (nn.Conv2d(3, 4, 3), (3, 8, 8), {"kind": "conv", "padding": "valid", "shape": [8, 8, 3]}),
        (
            nn.Conv2d(3, 4, 3, padding=1),
            (3, 8, 8),
            {"kind": "conv", "padding": "same", "shape": [8, 8, 3]},
        ),
    ]
    asked = [
        {"out": 4, "kernel": 3, "stride": 1, "weight": 5, "input": 5, **own} for *_, own in nets
    ]
    out = tmp_path / "out.json"
    words = [
        PYTHON,
        ROOT / "benchmarks/hgq2_runner.py",
        "count",
        out,
        json.dumps({"layers": asked}),
    ]
    subprocess.run([str(word) for word in words], check=True, capture_output=True)
    theirs = json.loads(out.read_text())["rows"]
    ours = []
    for net, shape, _ in nets:
        trace = Trace([Switch("weight", 6, 5, False)], 2, 32, searches=False)
        ours.append(cost.ebops(trace, layers(net, shape)))
    assert ours[:2] == theirs[:2] == [7 * 5 * 25, 4 * 36 * 27 * 25]
    touched = sum((3 - (i in (0, 7))) * (3 - (j in (0, 7))) for i in range(8) for j in range(8))
    assert (ours[2], theirs[2]) == (4 * 64 * 27 * 25, 4 * touched * 3 * 25)


def test_the_best_epoch_of_so_many_ebops():
    rows = [
        {"epoch": 1, "ebops": 90, "held": 0.9},
        {"epoch": 2, "ebops": 50, "held": 0.7},
        {"epoch": 3, "ebops": 40, "held": 0.7},
        {"epoch": 4, "ebops": 10, "held": 0.2},
    ]
    assert hgq2.best(rows, 100)["epoch"] == 1
    assert hgq2.best(rows, 60)["epoch"] == 3
    assert hgq2.best(rows, 10)["epoch"] == 4
    assert hgq2.best(rows, 9) is None
