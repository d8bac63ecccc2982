import json
import sys

import pytest
import torch

from benchmarks import reproduce, soak
from benchmarks.gpu import __main__ as gpu


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


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (soak.main, "--kills -1"),
        (soak.main, "--damages x"),
        (reproduce.main, "marvin --minutes -3"),
        (reproduce.main, "marvin --epochs 0"),
        (reproduce.main, "marvin --seeds 1 -1"),
        (reproduce.main, "marvin --plain-lr nan"),
        (gpu.main, "--minutes nan"),
    ],
)
def test_numbers_out_of_range_are_one_line(command, words, capsys):
    with pytest.raises(SystemExit) as caught:
        command(words.split())
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    flag = next(word for word in words.split() if word.startswith("--"))
    assert f"error: argument {flag}: must be " in shown
    assert shown.count("\n") == 1
