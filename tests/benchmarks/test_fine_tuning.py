"""Fine-tuning runs: written, resumed, and compared seed by seed."""

import pytest
import torch
from torch import nn

from benchmarks import fine_tuning, runs
from benchmarks.fine_tuning import Data, Run, Task


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


def data(part):
    g = torch.Generator().manual_seed(int(part == "before"))
    x = torch.randn(160, 8, generator=g)
    y = (x @ torch.randn(8, 3, generator=g)).argmax(1)
    return Data(x[:-32], y[:-32], x[-32:], y[-32:])


def build():
    return nn.Sequential(Block(), Block(), nn.Linear(8, 3))


@pytest.fixture
def one_task(monkeypatch, tmp_path):
    monkeypatch.setattr(fine_tuning, "TASKS", {"tiny": Task("torch", build, data, 16)})
    monkeypatch.setattr(fine_tuning, "RESULTS", tmp_path / "runs.csv")
    return ["--seeds", "2", "--steps", "8", "--threads", "1", "--folder", str(tmp_path)]


def test_runs_are_written_once(one_task, monkeypatch, capsys):
    fine_tuning.main(one_task)
    capsys.readouterr()
    found = {(run.way, run.seed): run for run in runs.read(Run, fine_tuning.RESULTS)}
    assert len(found) == 2 * len(fine_tuning.WAYS)
    for seed in (0, 1):
        exact = found["exact", seed]
        assert found["recompute", seed].loss == exact.loss  # the same batches, the same gradients
        assert found["both", seed].loss != exact.loss
        assert found["both", seed].kept_bytes < exact.kept_bytes / 3
    assert found["exact", 0].loss != found["exact", 1].loss
    monkeypatch.setattr(fine_tuning, "run", None)  # nothing is made again
    fine_tuning.main(one_task)
    assert "| tiny, 8 steps | recompute |" in capsys.readouterr().out


def test_bytes_are_those_of_the_batch():
    x = torch.randn(1000, 8)
    found = fine_tuning.converted(build(), "exact", x[:16], seed=0)
    assert found == 4 * 16 * (3 * 8 + 2 * 2 * 64)  # inputs of all layers, each once


def test_differences_are_taken_seed_by_seed():
    losses = {"exact": (1.0, 2.0, 3.0), "both": (1.1, 2.1, 3.4)}
    runs = [
        Run("text", way, seed, 9, loss, 0.5, 10**6, 1.0)
        for way, own in losses.items()
        for seed, loss in enumerate(own)
    ]
    *_, exact, both = fine_tuning.table(runs)
    assert exact == "| text, 9 steps | exact | 1.0 | 2.0000 |  | 50.00 | 3 |"
    assert both == "| text, 9 steps | both | 1.0 | 2.2000 | +0.2000 ± 0.1000 | 50.00 | 3 |"


def test_texts_are_followed_by_their_next_bytes():
    for part in ("before", "after"):
        found = fine_tuning.text(part)
        assert found.x.shape[1] == fine_tuning.LENGTH
        assert torch.equal(found.x[:, 1:], found.y[:, :-1])
        assert len(found.held_x) == fine_tuning.HELD_OUT
        assert len(found.x) > fine_tuning.HELD_OUT
