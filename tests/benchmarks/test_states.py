"""Runs with compact states: written once, beside float32 ones, by a model that reads no later byte."""

import csv

import torch

from benchmarks import states


def test_runs_are_written_once(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(states, "RESULTS", tmp_path / "results/states.csv")
    made = []

    def run(compact, seed, steps):
        made.append((compact, seed, steps))
        return 1.0, 0.5 + compact / 8, 2.0, 4.0, 6.0

    monkeypatch.setattr(states, "text_run", run)
    words = ["--tasks", "text", "--steps", "9", "--threads", "1"]
    states.main([*words, "--seeds", "1"])
    states.main([*words, "--seeds", "2"])
    assert made == [(False, 0, 9), (True, 0, 9), (False, 1, 9), (True, 1, 9)]
    with states.RESULTS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == 2 * ["text-9-float32-states", "text-9-compact-states"]
    assert rows[1]["test_accuracy"] == "0.625"
    assert "seed 1: right 62.50 %" in capsys.readouterr().out


def test_a_transformer_reads_no_later_byte():
    torch.manual_seed(0)
    model, x = states.Transformer(), torch.randint(256, (2, states.LENGTH))
    other = x.clone()
    other[:, 50:] += 1
    other %= 256
    a, b = model(x), model(other)
    assert a.shape == (2, states.LENGTH, 256)
    torch.testing.assert_close(a[:, :50], b[:, :50])
    assert (a[:, 50:] - b[:, 50:]).abs().amax() > 0.1
