"""What the trainer says of a busy machine."""

import os
import subprocess
import sys
import time

import pytest
import torch

from train import busy
from train.main import main
from train.resnet20 import DEFAULTS, MIN_SIDE, resnet20

LINE = "cpu  {} 20 30 4000 5 6 7 8 0 0\ncpu0 1 2 3 4\n"


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """A machine of two cores; returns what moves its time, and what others do meanwhile."""
    stat, now = tmp_path / "stat", [0.0]
    stat.write_text(LINE.format(0))
    own = os.times_result((3.0, 2.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr(busy, "STAT", stat)
    monkeypatch.setattr(os, "times", lambda: own)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_CLK_TCK": 100}[name])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)

    def go(seconds, others, mine=0.0):
        nonlocal own
        now[0] += seconds
        own = os.times_result((own.user + mine, 2.0, 0.0, 0.0, 0.0))
        done = busy.busy_seconds(stat.read_text()) - 0.5
        stat.write_text(LINE.format(round(100 * (done + others + mine))))

    return go


def test_others_that_take_a_core_are_named_once(clock):
    watch = busy.Watch()
    clock(19.0, others=19.0, mine=19.0)
    assert watch.look() == ""  # too early
    clock(2.0, others=2.0, mine=2.0)
    said = watch.look()
    assert "other processes take 1.0 of 2 cores, and PyTorch's 2 threads wait" in said
    assert "OMP_NUM_THREADS=1 before the command" in said
    clock(30.0, others=60.0)
    assert watch.look() == ""


def test_own_work_is_not_taken_for_that_of_others(clock):
    watch = busy.Watch()
    clock(30.0, others=3.0, mine=57.0)
    assert watch.look() == ""


@pytest.mark.parametrize(
    ("taken", "cores", "threads", "policy", "is_said"),
    [
        (0.4, 2, 2, None, True),
        (0.2, 2, 2, None, False),
        (1.0, 2, 1, None, False),  # nobody waits
        (1.0, 4, 2, None, False),  # there is room
        (1.0, 2, 2, "PASSIVE", False),
        (1.0, 2, 2, "ACTIVE", True),
    ],
)
def test_when_it_is_said(monkeypatch, taken, cores, threads, policy, is_said):
    if policy is None:
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    else:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    assert bool(busy.hint(taken, cores, threads)) == is_said


@pytest.mark.parametrize("content", [None, "", "cpu a b c d"])
def test_where_it_cannot_be_told_nothing_is_said(clock, content):
    watch = busy.Watch()
    clock(30.0, others=30.0)
    if content is None:
        busy.STAT.unlink()
    else:
        busy.STAT.write_text(content)
    assert watch.look() == ""
    assert busy.Watch().look() == ""


@pytest.mark.skipif(not busy.STAT.exists(), reason="needs Linux")
def test_a_process_beside_is_seen(monkeypatch):
    monkeypatch.setattr(busy, "SECONDS", 0.5)
    monkeypatch.setattr(busy, "hint", lambda taken, cores, threads: f"{taken:.2f}")
    watch = busy.Watch()
    code = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass"
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    time.sleep(max(0.0, 0.5 - (time.perf_counter() - begun)))
    wall = time.perf_counter() - begun
    assert float(watch.look()) * wall > 0.35


def test_a_training_says_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(busy, "SECONDS", 0.0)
    monkeypatch.setattr(busy, "hint", lambda *told: f"hint {told[2]}")
    words = ["--dataset", "digits", "--width", "2", "--limit", "50", "--epochs", "1"]
    main(DEFAULTS, resnet20, MIN_SIDE, [*words, "--device", "cpu", "--run", str(tmp_path / "a")])
    assert capsys.readouterr().out.count(f"hint {torch.get_num_threads()}\n") == 1
