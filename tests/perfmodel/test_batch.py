"""The largest batch that fits, and what a step really takes."""

import json
from itertools import pairwise

import pytest
import torch
from torch import nn

from perfmodel import batch, trial
from perfmodel.__main__ import main
from perfmodel.batch import Found, Trial

MIB = 2**20
TRIAL = Trial("a:b", (1,), "float32", "exact", 0)


def model(widths=(256, 256, 256)):
    """Return a perceptron with a batch norm; used by name."""
    layers = [part(n, m) for n, m in pairwise(widths)]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1))


def part(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.GELU())


def taking(peak_of):
    """Return a process by its memory."""
    tried = []

    def run(trial):
        tried.append(trial.batch)
        return Found(trial.way, trial.batch, peak_of(trial.batch), 0, 0, 0, 1.0)

    return run, tried


@pytest.mark.parametrize("memory", [300 * MIB, 777 * MIB, 5000 * MIB])
@pytest.mark.parametrize(
    "peak_of",
    [
        lambda n: 200 * MIB + n * MIB,
        lambda n: 200 * MIB + n * MIB // 7 + (n > 300) * 50 * MIB,  # another kernel
        lambda n: 250 * MIB + int(MIB * n**0.8),
        lambda n: 200 * MIB + max(0, n - 100) * MIB,  # the first trials tell nothing
    ],
)
def test_the_largest_that_fits(memory, peak_of):
    run, tried = taking(peak_of)
    found = batch.largest(TRIAL, memory, run)
    assert found.peak_bytes == peak_of(found.batch) <= memory
    more = found.batch + max(1, round(0.02 * found.batch))
    assert min(peak_of(n) for n in tried if n > found.batch) > memory
    assert min(n for n in tried if n > found.batch) <= more
    assert len(tried) < 40


def test_counted_bytes_save_trials():
    """From 16 samples, which tell nothing, to 4,800 at once; a real slope that is a fifth larger."""
    tried = []

    def run(trial):
        tried.append(trial.batch)
        peak = 200 * MIB + max(0, trial.batch - 16) * MIB * 6 // 5
        return Found(trial.way, trial.batch, peak, 0, 7 * MIB + trial.batch * MIB, 0, 1.0)

    found = batch.largest(TRIAL, 5000 * MIB, run, precision=0.05)
    assert found.peak_bytes <= 5000 * MIB
    assert found.batch >= 0.95 * 4000
    assert tried[:4] == [2, 16, 2, pytest.approx(4800, rel=0.01)]
    assert len(tried) <= 7


def test_the_first_process_compiles_kernels_which_does_not_count():
    tried = []

    def run(trial):
        tried.append(trial.batch)
        peak = 200 * MIB + trial.batch * MIB + (len(tried) == 1) * 900 * MIB
        return Found(trial.way, trial.batch, peak, 0, trial.batch * MIB, 0, 1.0)

    assert batch.largest(TRIAL, 600 * MIB, run).batch == 400


def test_what_fits_always():
    run, _ = taking(lambda n: 200 * MIB)
    with pytest.raises(ValueError, match="memory must grow with the batch"):
        batch.largest(TRIAL, 300 * MIB, run)


def test_what_never_fits():
    run, _ = taking(lambda n: 200 * MIB + n * MIB)
    with pytest.raises(
        ValueError, match=r"exact: a batch of 2 takes 202.0 MiB, more than 100.0 MiB"
    ):
        batch.largest(TRIAL, 100 * MIB, run)


@pytest.mark.slow
def test_the_process_takes_what_was_counted():
    """Twice: 32 MiB of batch, and what a step makes of it, which dwarfs all else."""
    kept = Trial(f"{__name__}:model", (256,), "float32", "exact", 2**15)
    small, large = (batch.run(kept._replace(batch=n)) for n in (2**13, 2**15))
    more = large.peak_bytes - small.peak_bytes
    batches = (2**15 - 2**13) * 256 * 4
    counted = large.counted_peak_bytes - small.counted_peak_bytes + batches
    assert counted > 150 * MIB
    assert more == pytest.approx(counted, rel=0.05)  # malloc's pages, and what kernels work with
    assert large.kept_bytes == 4 * small.kept_bytes - 3 * 2 * 2 * 256 * 4  # statistics are no rows


def test_ways():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stages = nn.Sequential(*(part(8, 8) for _ in range(2)))

    assert trial.checkpointed(Net()) == ["stages"]
    assert trial.checkpointed(nn.Sequential(*(nn.TransformerEncoderLayer(8, 2) for _ in "ab"))) == [
        "0",
        "1",
    ]
    with pytest.raises(ValueError, match="needs blocks"):
        trial.convert(nn.Sequential(nn.Linear(1, 1)), "checkpointing")
    with pytest.raises(ValueError, match="must be known, or the file of a plan, got 'fast'"):
        trial.convert(nn.Sequential(nn.Linear(1, 1)), "fast")
    exact, x = model(), torch.randn(4, 256)
    for way in ("checkpointing", "few-bit", "few-bit+division"):
        other = model()
        other.load_state_dict(exact.state_dict())
        trial.convert(other, way)
        torch.testing.assert_close(other(x), exact(x), rtol=0, atol=0)


def test_a_command_says_in_a_line_what_is_wrong(capsys):
    with pytest.raises(SystemExit, match="dtype must be one of torch's, got 'float33'"):
        main(
            [
                "batch",
                f"{__name__}:model",
                "--input",
                "256",
                "--dtype",
                "float33",
                "--ways",
                "exact",
            ]
        )
    model = "torch.nn:Embedding(num_embeddings=3,embedding_dim=2)"
    with pytest.raises(SystemExit, match=r"tokens are of torch\.int64 \(--dtype int64\)"):
        main(["batch", model, "--input", "3", "--ways", "exact", "--batch", "2"])
    with pytest.raises(SystemExit):
        main(["batch", "x:y"])
    assert "--input" in capsys.readouterr().err


def test_a_way_that_does_not_suit_the_model_leaves_the_others(capsys, monkeypatch):
    def largest(trial, memory):
        if trial.way == "checkpointing":
            raise ValueError("checkpointing, batch 2: checkpointing needs blocks")
        return Found(trial.way, 7, memory, 1, 2, 3, 3.5)

    monkeypatch.setattr(batch, "largest", largest)
    command = ["batch", "x:y", "--input", "3,4"]
    main([*command, "--json"])
    out, err = capsys.readouterr()
    assert [row["way"] for row in json.loads(out)] == ["exact", *batch.WAYS[2:]]
    assert err == "left out: checkpointing, batch 2: checkpointing needs blocks\n"
    with pytest.raises(SystemExit, match="error: checkpointing, batch 2: checkpointing needs"):
        main([*command, "--ways", "checkpointing"])


@pytest.mark.parametrize("way", ["fast", ""])
def test_an_unknown_way_is_refused_before_any_is_tried(way, monkeypatch):
    monkeypatch.setattr(batch, "largest", lambda *_: pytest.fail("tried"))
    with pytest.raises(SystemExit, match=rf"few-bit, .*, or the file of a plan, got '{way}'"):
        main(["batch", "x:y", "--input", "3,4", "--ways", f"exact,{way}"])


def test_a_command_prints_what_was_found(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(
        batch, "largest", lambda trial, memory: Found(trial.way, 7, memory, 1, 2, 3, 3.5)
    )
    command = ["batch", "x:y", "--input", "3,4", "--memory", "0.5"]
    plan = tmp_path / "plan.json"
    plan.touch()
    main([*command, "--ways", f"exact,{plan}", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [row["way"] for row in found] == ["exact", str(plan)]
    assert found[0]["peak_bytes"] == 2**29
    main(command)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == list(batch.WAYS)
    assert "512.0 MiB" in lines[1]
    assert lines[1].endswith(" 2.0")
    monkeypatch.setattr(batch, "run", lambda trial: Found(trial.way, trial.batch, 5, 1, 2, 3, 3.5))
    main([*command, "--batch", "33", "--json"])
    assert [row["batch"] for row in json.loads(capsys.readouterr().out)] == [33] * 4
    assert "MALLOC_MMAP_THRESHOLD_=65536" in lines[-1]
