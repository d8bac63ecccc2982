"""Other tasks than classification: each trains, is written once, and has a row."""

import math

import pytest

from benchmarks import runs
from benchmarks.tasks import __main__ as tasks
from benchmarks.tasks import parts
from benchmarks.tasks.__main__ import Run
from benchmarks.tasks.catalogue import TASKS
from benchmarks.tasks.parts import classify
from benchmarks.tasks.training import WAYS, Training


@pytest.fixture
def few_steps(monkeypatch, tmp_path):
    """Let every task end after two steps, and write to a file of the test's own."""
    for name, task in TASKS.items():
        monkeypatch.setitem(TASKS, name, task._replace(steps=2))
    monkeypatch.setitem(TASKS, "cosine restarts", TASKS["cosine restarts"]._replace(steps=8))
    monkeypatch.setattr(tasks, "RESULTS", tmp_path / "tasks.csv")


@pytest.mark.parametrize("name", TASKS)
def test_a_task_trains_in_fixed_point_and_in_float32(name, few_steps):
    way = "advised" if TASKS[name].advice else "static 8"
    exact, rounded = (tasks.run(name, own, seed=0) for own in ("float32", way))
    assert math.isfinite(exact.figure), exact.said
    assert math.isfinite(rounded.figure), rounded.said
    assert exact.bits == 32
    assert rounded.bits == 8 or way == "advised"


def test_runs_are_written_once(few_steps, monkeypatch, capsys):
    words = ["--tasks", "tabular, embeddings", "U-Net", "--seeds", "1"]
    tasks.main([*words, "--ways", "float32", "advised"])
    found = [run[:3] for run in runs.read(Run, tasks.RESULTS)]
    own = "tabular, embeddings"  # has no advice
    assert found == [(own, "float32", 0), ("U-Net", "float32", 0), ("U-Net", "advised", 0)]
    monkeypatch.setattr(tasks, "run", None)  # nothing is made again
    tasks.main([*words, "--ways", "float32", "advised"])
    assert "| U-Net | overlap, %, more is better |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tasks", "U-Net", "regresion"], "--tasks must be of regression, targets 1; "),
        (["--ways", "MSGD", "foo"], "--ways must be of float32; MSGD; "),
    ],
)
def test_names_that_are_none_are_refused(words, said, few_steps, capsys):
    with pytest.raises(SystemExit) as end:
        tasks.main(words)
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert f"error: {said}" in error
    assert f"got {words[-1]} (" in error


def test_an_error_ends_a_run_and_is_told(few_steps, monkeypatch):
    def refused(training):
        classify(training, parts.digit_net())
        raise RuntimeError("no second derivative")

    monkeypatch.setitem(TASKS, "digits", TASKS["digits"]._replace(run=refused))
    found = tasks.run("digits", "static 8", seed=0)
    assert math.isnan(found.figure)
    assert found.said.endswith("RuntimeError: no second derivative")
    *_, row = tasks.table([found])
    assert row.count("| refused |") == 1


def test_a_row_has_means_their_spread_and_bits():
    figures = {"float32": ((98.0, 32.0), (99.0, 32.0)), "MSGD": ((97.0, 14.0),)}
    found = [
        Run("digits", way, seed, figure, bits, "", 1.0)
        for way, own in figures.items()
        for seed, (figure, bits) in enumerate(own)
    ]
    *_, row = tasks.table(found)
    assert row == "| digits | accuracy, %, more is better | 98.5 ± 0.71 | 97 (14.0) |" + 5 * "  |"
    assert [*WAYS][:2] == ["float32", "MSGD"]


@pytest.mark.parametrize(("way", "kind"), [("integer", "IntegerLinear"), ("static 8", "Linear")])
def test_layers_multiply_integers_where_a_way_says_so(way, kind):
    model = parts.mlp(8, 4, 2)
    Training(way, 0, 2).learner(model, 1e-3)
    assert [type(layer).__name__ for layer in model] == [kind, "ReLU", kind]
