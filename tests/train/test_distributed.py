"""Runs on several processes: one result, one writer, and a process that dies loses nothing."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.soak import is_same
from train import alexnet, distributed, main
from train.arguments import parse
from train.augment import Augmentation, augment, private_generator
from train.errors import UserError
from train.loop import evaluate
from train.records import RunFolder, read_csv

ROOT = Path(__file__).parents[2]
FLAGS = """--dataset digits --width 4 --limit 80 --batch-size 9 --epochs 2 --lr 0.02
--checkpoint-steps 2 --lookback 3 6 --device cpu"""
pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or sys.platform != "linux", reason="needs torchrun, /proc"
)


def start(run, *more, model="resnet20", flags=FLAGS):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", f"train.{model}", "--run-folder", str(run)]
    return subprocess.Popen(
        [*command, *flags.split(), *more],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, errors = process.communicate()
    assert process.returncode == 0, errors[-3000:]
    return out


def child_of(process, rank):
    """Return the process of a rank, which torchrun has started."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            environ = (path / "environ").read_bytes().split(b"\0")
        except (OSError, IndexError):  # it has just ended
            continue
        if parent == process.pid and f"RANK={rank}".encode() in environ:
            return int(path.name)
    raise AssertionError(f"torchrun has no process of rank {rank}")


def wait_for_checkpoints(process, path, count):
    seen, end = set(), time.monotonic() + 120
    while len(seen) < count:
        assert process.poll() is None, "the run ended before it was killed"
        assert time.monotonic() < end
        if path.exists():
            seen.add(path.stat().st_mtime_ns)
        time.sleep(0.002)


def assert_same(got, want):
    for name in ("metrics.csv", "trace.csv", "layers.csv", "result.json"):
        assert (got / name).read_bytes() == (want / name).read_bytes(), name
    assert is_same(RunFolder(got).load_checkpoint(), RunFolder(want).load_checkpoint())


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE must be a whole number from 1 to .*, got 'abc'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be a whole number from 1"),
        (
            {"WORLD_SIZE": "2", "MASTER_PORT": "1"},
            "RANK must be a whole number from 0 to 1, got ''",
        ),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK must be a whole number from 0 to 1, got '2'"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_PORT must be"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "1"}, "MASTER_ADDR must be the name"),
    ],
)
def test_variables_of_others_are_one_line(environ, message, monkeypatch, tmp_path):
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(main, "own_process", lambda config: None)
    words = ["--dataset", "digits", "--run", str(tmp_path / "run")]
    with pytest.raises(SystemExit, match=rf"^python -m train\.alexnet: error: {message}.*torchrun"):
        main.main(alexnet.DEFAULTS, alexnet.alexnet, alexnet.MIN_SIDE, words)
    assert not (tmp_path / "run").exists()


def test_a_gpu_of_its_own_must_be_told(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(UserError, match="LOCAL_RANK must be a whole number"):
        distributed.own_device("cuda")


@pytest.mark.slow
def test_a_run_on_two_processes_and_one_that_a_killed_one_ended(tmp_path, tiny, prepare):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    out = finish(start(whole))
    assert out.count("epoch 1/2") == out.count("test accuracy") == out.count("run folder") / 2 == 1
    assert len(list((whole / "tensorboard").iterdir())) == 1
    assert json.loads((whole / "environment.json").read_text())["processes"] == 2
    assert len(read_csv(whole / "trace.csv")) > 20
    assert_evaluation_is_that_of_one_process(whole, prepare)

    process = start(killed)
    wait_for_checkpoints(process, killed / "checkpoint.pt", 2)
    os.kill(child_of(process, 1), signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode != 0
    assert "process 0 ends because another one has" in errors
    steps = RunFolder(killed).load_checkpoint()["progress"]["total_steps"]
    assert 0 < steps < 16
    finish(start(killed, "--resume"))
    assert_same(killed, whole)


def assert_evaluation_is_that_of_one_process(run, prepare):
    training = prepare(dataclasses.replace(RunFolder(run).read_config(), resume=True))
    training.load(RunFolder(run).load_checkpoint())
    score = evaluate(training.model, training.parts.test, training.dataset, 9)
    result = json.loads((run / "result.json").read_text())
    assert result["test_accuracy"] == score.accuracy
    assert result["test_loss"] == pytest.approx(score.loss, rel=1e-12)  # another order of adding


def test_two_processes_learn_what_one_does(tmp_path):
    """Without batch norm, which would see other batches: shares, augmentation, the mean loss."""
    flags = """--dataset digits --width 2 --limit 60 --batch-size 9 --accumulation-steps 2 --epochs 2
    --device cpu --optimizer sgd --no-normalize-gradients --lr 0.01"""
    finish(start(tmp_path / "two", model="alexnet", flags=flags))
    words = [*flags.split(), "--run", str(tmp_path / "one")]
    main.run(parse(alexnet.DEFAULTS, words), alexnet.alexnet, alexnet.MIN_SIDE)
    tables = [read_csv(tmp_path / n / "metrics.csv") for n in ("one", "two")]
    assert len(tables[0]) == 2
    for one, two in zip(*tables, strict=True):
        for name in ("train_loss", "validation_loss"):
            assert float(two[name]) == pytest.approx(float(one[name]), rel=1e-4), name  # float32


def test_more_processes_than_images_are_refused(tiny, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    main.check_shares(dataclasses.replace(tiny, batch_size=3), 90)
    main.check_shares(dataclasses.replace(tiny, batch_size=3, accumulation_steps=2), 6)
    with pytest.raises(UserError, match="for each of 3 processes, got one of 2"):
        main.check_shares(dataclasses.replace(tiny, batch_size=3, accumulation_steps=2), 5)


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [7, 32, 33])
def test_every_image_has_one_process(monkeypatch, world, count):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    seen = []
    for rank in range(world):
        monkeypatch.setenv("RANK", str(rank))
        own = list(range(count))[distributed.share(count)]
        assert len(own) in (count // world, -(-count // world))
        seen += own
    assert seen == list(range(count))


def test_a_share_of_images_changes_as_in_the_whole_batch():
    x = torch.arange(7 * 3 * 8 * 8).view(7, 3, 8, 8)
    how = Augmentation(2, True)
    whole = augment(x, how, private_generator(4))
    for part in (slice(0, 3), slice(3, 7)):
        got = augment(x[part], how, private_generator(4), part, 7)
        torch.testing.assert_close(got, whole[part], rtol=0, atol=0)
