import json
import signal
import subprocess
from typing import ClassVar

import pytest

from benchmarks import reproduce
from benchmarks.experiments import EXPERIMENTS
from train.config import Config, parse

SMALL = [
    "--dataset",
    "digits",
    "--epochs",
    "1",
    "--width",
    "4",
    "--limit",
    "60",
    "--batch-size",
    "20",
    "--device",
    "cpu",
]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_flags_are_those_of_the_training_scripts(name):
    experiment = EXPERIMENTS[name]
    configs = {parse(Config(), [*experiment.common, *f]) for f in experiment.variants.values()}
    assert len(configs) == len(experiment.variants)


@pytest.mark.slow
def test_in_pieces_and_written_once(tmp_path, capfd):
    results = tmp_path / "results.md"
    results.write_text("# Results\n")
    command = ["marvin", *SMALL, "--folder", str(tmp_path / "runs"), "--results", str(results)]
    reproduce.main([*command, "--minutes", "0"])
    assert results.read_text().count("none finished") == 2
    reproduce.main(command)
    text = results.read_text()
    assert text.startswith("# Results\n\n<!-- marvin-digits-resnet20: begin -->\n### marvin")
    assert "none finished" not in text
    result = json.loads((tmp_path / "runs/marvin-seed0/result.json").read_text())
    assert f"| MARViN | 0 | {100 * result['test_accuracy']:.2f} |" in text
    first_line = "    python -m benchmarks.reproduce marvin " + " ".join(SMALL)
    assert first_line in text.splitlines()
    capfd.readouterr()
    reproduce.main(command)
    assert "seed 0" not in capfd.readouterr().out  # what is finished is not run again
    assert results.read_text() == text


def test_a_section_replaces_its_own_only():
    text = reproduce.put("# A\n", "x", "1")
    text = reproduce.put(text, "y", "2")
    text = reproduce.put(text, "x", "3")
    assert text == (
        "# A\n\n<!-- x: begin -->\n3\n<!-- x: end -->\n\n<!-- y: begin -->\n2\n<!-- y: end -->\n"
    )


class Slow:
    """A training script that only ends when it is interrupted."""

    started: ClassVar[list[list[str]]] = []

    def __init__(self, command):
        self.started.append(command)
        self.signals = []

    def wait(self, timeout=None):
        if not self.signals:
            assert timeout is not None
            raise subprocess.TimeoutExpired("train", timeout)
        assert self.signals == [signal.SIGINT]
        return 1

    def send_signal(self, number):
        self.signals.append(number)


def test_time_over_interrupts_and_the_next_call_goes_on(tmp_path, monkeypatch):
    runs = [reproduce.Run(name, 0, tmp_path / name, ("--width", "4")) for name in "abc"]
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    (tmp_path / "a/result.json").write_text('{"epochs": 1}')
    monkeypatch.setattr(reproduce.subprocess, "Popen", Slow)
    reproduce.go_on(runs, "resnet20", 1, 5.0)
    (command,) = Slow.started  # "a" is finished, "b" goes on, and "c" waits for the next call
    assert command[1:] == [
        *("-m", "train.resnet20", "--run", str(tmp_path / "b"), "--width", "4", "--resume")
    ]
    assert runs[0].result(1) == {"epochs": 1}
    assert runs[0].result(2) is None
