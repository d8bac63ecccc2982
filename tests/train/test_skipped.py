"""Steps that --nonfinite skip skips: tables count steps of the run, and losses leave them out."""

import csv
import dataclasses
import math

import pytest
import torch

from perfmodel.cost import ebops
from perfmodel.run import read_run
from tests.train.test_resume import Stop, assert_same_run, curves, stop_after
from train import loop, plot
from train.config import Config
from train.front import candidates_of
from train.records import RunFolder, read_csv

SKIPPED = 2, 3, 6


@pytest.fixture
def skipping(tiny) -> Config:
    return dataclasses.replace(tiny, nonfinite="skip", lookback=(2, 3), resolution=(10, 20))


@pytest.fixture
def nan_losses(monkeypatch):
    """Let losses of training be NaN in some steps of the run, from 1."""

    def begin(steps):
        step, loss = loop.train_step, torch.nn.functional.cross_entropy

        def train_step(training, indices):
            with monkeypatch.context() as patch:
                if training.progress.total_steps + 1 in steps:
                    nan = lambda logits, labels: math.nan * loss(logits, labels)  # noqa: E731
                    patch.setattr(loop.F, "cross_entropy", nan)
                return step(training, indices)

        monkeypatch.setattr(loop, "train_step", train_step)

    return begin


def taken(step):
    """Return the step of the run in which the optimizer takes a step of its own, both from 1."""
    return [n for n in range(1, 100) if n not in SKIPPED][step - 1]


def test_tables_count_the_steps_of_the_run(run, prepare, skipping, tmp_path, nan_losses, capsys):
    nan_losses(SKIPPED)
    run(dataclasses.replace(skipping, keep_front=True))
    folder = tmp_path / "run"
    with (folder / "trace.csv").open(newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    state = RunFolder(folder).load_checkpoint()
    own = [row["step"] for row in state["optimizer"]["marvin"]["trace"]]
    assert steps == [taken(step) for step in own] != own
    read, total = read_run(folder), 15
    layer = read.trace.switches[0].layer
    first = min(s.step for s in read.trace.switches if s.layer == layer)
    assert read.trace.word_lengths(layer)[: first + 1].count(8) == first
    assert plot.read(folder).word_lengths.shape[1] == read.trace.steps == total
    drawn = curves(folder)
    assert drawn["ebops_modelled"][-1] == (total, pytest.approx(ebops(read.trace, read.layers)))
    changed = {step for tag, values in drawn.items() if tag.endswith("/wl") for step, _ in values}
    assert changed <= {*steps, 1}
    names = {own.checkpoint.name for own in candidates_of(folder) if own.checkpoint.exists()}
    assert names == {path.name for path in (folder / "front").iterdir()}
    assert capsys.readouterr().out.count("3 of 15 steps skipped") == 1


def test_losses_leave_skipped_steps_out(run, skipping, tmp_path, nan_losses):
    nan_losses(SKIPPED)
    run(dataclasses.replace(skipping, validation_share=0.0))
    rows = read_csv(tmp_path / "run" / "metrics.csv")
    assert all(math.isfinite(float(row["train_loss"])) for row in rows)
    best = RunFolder(tmp_path / "run").load_checkpoint()["scheduler"]["best"]
    assert best == min(float(row["train_loss"]) for row in rows)


def test_an_epoch_of_skipped_steps_has_no_loss(run, skipping, tmp_path, nan_losses, capsys):
    nan_losses(range(1, 6))
    run(dataclasses.replace(skipping, validation_share=0.0, epochs=1))
    assert read_csv(tmp_path / "run" / "metrics.csv")[0]["train_loss"] == ""
    state = RunFolder(tmp_path / "run").load_checkpoint()
    assert state["scheduler"]["num_bad_epochs"] == 0
    assert "5 of 5 steps skipped" in capsys.readouterr().out
    assert read_run(tmp_path / "run").trace.steps == 5


@pytest.mark.parametrize("calls", [2, 6])
def test_stopped_and_resumed(run, skipping, tmp_path, monkeypatch, nan_losses, calls):
    nan_losses(SKIPPED)
    run(dataclasses.replace(skipping, run=str(tmp_path / "whole")))
    config = dataclasses.replace(skipping, run=str(tmp_path / "stopped"), checkpoint_steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", stop_after(calls, loop.train_step))
        with pytest.raises(Stop):
            run(config)
    run(dataclasses.replace(config, resume=True))
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")
    assert str(curves(tmp_path / "stopped")) == str(curves(tmp_path / "whole"))  # some are NaN


def test_a_checkpoint_of_an_earlier_version_is_continued(run, prepare, skipping, tmp_path):
    run(dataclasses.replace(skipping, run=str(tmp_path / "whole")))
    run(dataclasses.replace(skipping, epochs=1))
    folder = RunFolder(tmp_path / "run")
    state = folder.load_checkpoint()
    for name in ("left_out", "switch_steps"):
        del state["progress"][name]
    torch.save({**state, "version": 1}, folder.checkpoint)
    run(dataclasses.replace(skipping, resume=True))
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("switch_steps", [1]),
        ("switch_steps", "late"),
        ("switch_steps", "half"),
        ("left_out", 9999),
    ],
)
def test_foreign_numbers_are_refused(run, skipping, tmp_path, name, value):
    run(dataclasses.replace(skipping, epochs=1))
    folder = RunFolder(tmp_path / "run")
    state = folder.load_checkpoint()
    steps = state["progress"]["switch_steps"]
    assert steps
    made = {"late": [*steps[:-1], 7], "half": [0.5, *steps[1:]]}
    state["progress"][name] = made.get(value, value) if isinstance(value, str) else value
    folder.save_checkpoint(state)
    with pytest.raises(ValueError, match="must hold a checkpoint of this run, got a foreign one"):
        run(dataclasses.replace(skipping, resume=True))
