import json
import sys

import pytest
import torch

from benchmarks import soak


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs SIGKILL and limits of file sizes")
def test_nothing_is_lost(capsys):
    soak.main(["--kills", "2", "--damages", "60"])
    counts = json.loads(capsys.readouterr().out)
    assert counts["kills"] >= 2
    assert counts["runs that ended equal"] >= 1
    assert counts["of these refused by name"] >= 40


@pytest.mark.parametrize(
    "other",
    [
        {"a": [torch.tensor([1.0, 3.0])], "b": float("nan")},
        {"a": [torch.tensor([1.0, 2.0], dtype=torch.float64)], "b": float("nan")},
        {"a": [torch.tensor([1.0, 2.0])], "b": 1.0},
        {"a": [torch.tensor([1.0, 2.0])]},
        {"a": [], "b": float("nan")},
    ],
)
def test_a_difference_is_seen(other):
    state = {"a": [torch.tensor([1.0, 2.0])], "b": float("nan")}
    assert soak.is_same(state, {**state})
    assert not soak.is_same(state, other)
