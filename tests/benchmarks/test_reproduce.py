import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from torch.utils.tensorboard import SummaryWriter

from benchmarks import comparison, figure, reproduce
from benchmarks.experiments import EXPERIMENTS, POLICIES
from perfmodel.files import RunError, UserError
from train import resnet20
from train.arguments import parse
from train.config import Config, to_dict

ROOT = Path(__file__).parents[2]
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
    assert "\nNo run finished: float32; MARViN.\n" in results.read_text()
    reproduce.main(command)
    text = results.read_text()
    assert text.startswith("# Results\n\n<!-- marvin-digits-resnet20: begin -->\n### marvin")
    assert "No run finished" not in text
    result = json.loads((tmp_path / "runs/marvin-seed0/result.json").read_text())
    assert f"| MARViN | 0 | {100 * result['test_accuracy']:.2f} |" in text
    first_line = "    python -m benchmarks.reproduce marvin " + " ".join(SMALL)
    assert first_line in text.splitlines()
    capfd.readouterr()
    reproduce.main(command)
    assert "seed 0" not in capfd.readouterr().out  # what is finished is not run again
    assert results.read_text() == text


@pytest.mark.slow
def test_policies_in_parts(tmp_path, capfd):
    results = tmp_path / "docs/results.md"
    results.parent.mkdir()
    command = ["policies", *SMALL, "--folder", str(tmp_path / "runs"), "--results", str(results)]
    command += ["--name", "policies-small"]
    only = "muppet,loss-budget-0-01"
    reproduce.main([*command, "--plain-lr", "0.1", "--only", only])
    rows = {line.split(" | ")[0]: line for line in results.read_text().splitlines()}
    assert [name for name in POLICIES if f"| {name}" in rows] == ["MuPPET", "loss budget 0.01"]
    assert "\nNo run finished: float32; float32, plain; MARViN; fixed:8,4; " in results.read_text()
    assert "8.00 (8.00) | 8.00 (8.00) |" in rows["| MuPPET"]
    result = json.loads((tmp_path / "runs/loss-budget-0-01-seed0/result.json").read_text())
    bits = f"{result['mean_word_length']:.2f} ({result['mean_word_length_by_size']:.2f})"
    assert bits in rows["| loss budget 0.01"]
    clamped = comparison.clamped(tmp_path / "runs/loss-budget-0-01-seed0")
    assert clamped is not None
    assert rows["| loss budget 0.01"].endswith(f" {100 * clamped:.2f} |")
    picture = results.parent / "images/policies-small.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"](images/{picture.name})" in results.read_text()
    rates = {
        path.parent.name: json.loads(path.read_text())["lr"]
        for path in tmp_path.glob("runs/*/config.json")
    }
    default = resnet20.DEFAULTS.lr
    assert rates == {"muppet-seed0": 0.1, "loss-budget-0-01-seed0": default}


def test_results_are_utf_8_whatever_the_locale(tmp_path):
    results = tmp_path / "results.md"
    results.write_text("86.4 \u00b1 0.2\n", encoding="utf-8")
    words = ["marvin", *SMALL, "--minutes", "0", "--folder", str(tmp_path / "runs")]
    ascii_ = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.reproduce", *words, "--results", str(results)],
        cwd=ROOT,
        env={**os.environ, **ascii_},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert results.read_text(encoding="utf-8").startswith("86.4 \u00b1 0.2\n\n<!-- marvin-digits-")


def test_only_known_variants(capsys):
    with pytest.raises(SystemExit):
        reproduce.main(["muppet", "--only", "float32,marvin,magic"])
    assert "fixed-8-4, got magic" in capsys.readouterr().err


def planned(folder: Path, *flags: str, variant: str = "exact", seed: int = 0):
    return comparison.PlannedRun(variant, seed, folder, "resnet20", flags)


def finish(run: comparison.PlannedRun, **result: float):
    """Write what a run was asked and what came of it, as its trainer does."""
    run.folder.mkdir(exist_ok=True)
    (run.folder / "config.json").write_text(json.dumps(to_dict(run.asked())))
    (run.folder / "result.json").write_text(json.dumps(result))


def test_a_policy_may_end_a_run_early(tmp_path):
    run = planned(tmp_path, "--epochs", "9")
    assert run.result() is None
    finish(run, epochs=5)
    assert run.result() == {"epochs": 5}
    assert planned(tmp_path, "--epochs", "10").result() is None  # it was asked for 9


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        (["--width", "2"], "width was 4, got 2"),
        (["--lr", "3", "--limit", "50"], "limit was 60, got 50, lr was 0.05, got 3.0"),
        (["--model", "vit"], "model was resnet20, got vit"),
        (["--epochs", "3"], "epochs was 4, got 3"),
    ],
)
def test_finished_runs_of_other_flags_are_refused(tmp_path, flags, changed, capsys):
    command = ["few-bit", *SMALL, "--epochs", "4", "--folder", str(tmp_path), "--minutes", "0"]
    arguments, passed_on = reproduce.PARSER.parse_known_args(command)
    for run in reproduce.plan(EXPERIMENTS["few-bit"], arguments, tmp_path, passed_on):
        finish(run, test_accuracy=0.5, test_loss=1.0)
        (run.folder / "metrics.csv").write_text("train_loss\n1\n")
    reproduce.main([*command, "--checkpoint-steps", "7"])  # of no consequence
    assert "| exact | 0 | 50.00 |" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        reproduce.main([*command, *flags])
    assert f"{tmp_path / 'exact-seed0'} must hold a run of these flags" in str(end.value)
    assert changed in str(end.value)


@pytest.mark.parametrize(
    "flags", [["--seed", "3"], ["--seed=3"], ["--run", "x"], ["--resume"], ["--optimizer", "sgd"]]
)
def test_what_tells_runs_apart_is_not_passed_on(flags, tmp_path, capsys):
    command = ["marvin", *SMALL, "--folder", str(tmp_path), "--minutes", "0", "--seeds", "0", "1"]
    with pytest.raises(SystemExit) as end:
        reproduce.main([*command, *flags])
    name = flags[0].partition("=")[0]
    assert end.value.code == 2
    assert f"error: {name} must be left out: each run has its own" in capsys.readouterr().err


def test_the_command_is_shown_without_where_and_how_long(tmp_path, capsys):
    command = ["marvin", *SMALL, f"--folder={tmp_path}", "--minutes=0", "--only", "float32"]
    reproduce.main([*command, "--lr=1"])
    shown = f"    python -m benchmarks.reproduce marvin {' '.join(SMALL)} --lr=1"
    assert shown in capsys.readouterr().out.splitlines()


def test_differences_are_paired_and_say_what_they_show(tmp_path):
    experiment = dataclasses.replace(EXPERIMENTS["marvin"], has_word_lengths=False)
    runs = []
    for variant, accuracies in (("float32", (0.9, 0.92, 0.91)), ("MARViN", (0.85, 0.86, 0.9, 0.1))):
        for seed, accuracy in enumerate(accuracies):
            folder = tmp_path / f"{variant}-{seed}"
            runs.append(planned(folder, variant=variant, seed=seed))
            finish(runs[-1], test_accuracy=accuracy, test_loss=1.0)
            (folder / "metrics.csv").write_text(f"train_loss\n9\n{2 - accuracy}\n")
    # -5, -6 and -1 points: a deviation of sqrt(7), over sqrt(3); Student's t of 2: 2.92
    finished = comparison.finished_runs(experiment, runs)
    assert "seed by seed, with their standard error" in comparison.meaning(finished)
    header, _, first, second = comparison.table(experiment, finished)
    assert header == (
        "|  | seeds | test accuracy, % | points above float32 | no worse by 0.5? | training loss "
        "above float32 | test loss |"
    )
    assert first.startswith("| float32 | 0, 1, 2 | 91.00 ± 1.00 |  |  |  | 1.000")
    assert second.startswith(
        "| MARViN | 0, 1, 2, 3 | 67.75 ± 38.56 | -4.00 ± 1.53 | not decided (bound -8.46) | "
        "+0.040 ± 0.015 | 1.000"
    )
    singles = comparison.finished_runs(experiment, [runs[0], runs[3]])
    assert "-5.00 | one seed: not decided |" in comparison.table(experiment, singles)[3]
    alone = comparison.finished_runs(experiment, runs[:3])
    assert comparison.meaning(alone) == ""


def test_the_picture_has_every_variant():
    points = [
        figure.Point("float32", [32.0, 32.0], [90.0, 91.0]),
        figure.Point("static 8", [8.0], [90.1]),
        figure.Point("static 4", [4.0], [89.0]),
        figure.Point("fixed:8,4", [8.0], [10.0]),
    ]
    (axes,) = figure.draw(points, "title").axes
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["float32", "8", "4", "fixed:8,4: 10.0 %"]
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["static, bits"]
    assert axes.get_ylim()[0] > 80


def test_clamped_is_of_the_last_epoch_or_nothing(tmp_path):
    """A run that was stopped within an epoch has no share of it."""
    (tmp_path / "metrics.csv").write_text("epoch,step\n1,10\n2,20\n")
    with SummaryWriter(str(tmp_path / "tensorboard")) as writer:
        for layer, share in (("a", 0.25), ("b", 0.75)):
            writer.add_scalar(f"saturation/{layer}", 0.125, 10)
            writer.add_scalar(f"saturation/{layer}", share, 20)
    assert comparison.clamped(tmp_path) == 0.5
    (tmp_path / "metrics.csv").write_text("epoch,step\n1,10\n2,20\n3,30\n")
    assert comparison.clamped(tmp_path) is None


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
    runs = [planned(tmp_path / name, "--width", "4", variant=name) for name in "abc"]
    finish(runs[0], epochs=1)
    finish(runs[1])
    (tmp_path / "b/result.json").unlink()
    monkeypatch.setattr(reproduce.subprocess, "Popen", Slow)
    reproduce.go_on(runs, 5.0)
    (command,) = Slow.started  # "a" is finished, "b" goes on, and "c" waits for the next call
    assert command[1:] == [
        *("-m", "train.resnet20", "--run", str(tmp_path / "b"), "--width", "4", "--resume")
    ]


def test_ctrl_c_waits_for_the_script_and_is_one_line(tmp_path, monkeypatch, capsys):
    waits = []

    class Interrupted:
        def __init__(self, command):
            pass

        def wait(self, timeout=None):
            waits.append(timeout)
            if len(waits) == 1:
                raise KeyboardInterrupt
            return 130

    monkeypatch.setattr(reproduce.subprocess, "Popen", Interrupted)
    with pytest.raises(SystemExit) as end:
        reproduce.main(["marvin", *SMALL, "--folder", str(tmp_path)])
    assert (end.value.code, waits) == (130, [None, None])
    said = "\nstopped; the same command, without --resume, goes on where it stopped\n"
    assert capsys.readouterr().err == said


def test_the_picture_of_a_comparison_without_word_lengths_has_losses(tmp_path):
    folder = tmp_path / "exact-seed0"
    folder.mkdir()
    (folder / "metrics.csv").write_text("train_loss,validation_loss\n2.0,2.5\n1.0,\n")
    run = planned(folder)
    curve = reproduce.curve("exact", [(run, {})])
    assert curve == figure.Curve("exact", [[2.0, 1.0]], [[2.5]])
    other = figure.Curve("2 bits", [[3.0, 2.0], [1.0, 0.0]], [[2.0, 2.0], [1.0, 3.0]])
    train, validation = figure.draw_curves([curve, other], "title").axes
    assert [list(line.get_ydata()) for line in train.lines] == [[2.0, 1.0], [2.0, 1.0]]
    assert [list(line.get_ydata()) for line in validation.lines] == [[2.5], [1.5, 2.5]]
    assert [t.get_text() for t in train.get_legend().get_texts()] == ["exact", "2 bits"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("result.json", "[" * 100_000),
        ("result.json", '{"test_accuracy": "high"}'),
        ("config.json", '{"epochs": "many"}'),
    ],
)
def test_a_damaged_run_is_named(tmp_path, name, content):
    run = planned(tmp_path)
    finish(run, test_accuracy=0.5, test_loss=1.0)
    experiment = reproduce.EXPERIMENTS["few-bit"]
    assert len(comparison.finished_runs(experiment, [run])["exact"]) == 1
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=name):
        comparison.finished_runs(experiment, [run])


def test_a_section_without_its_end_does_not_swallow_what_follows():
    with pytest.raises(RunError, match="must end with <!-- x: end -->, found only"):
        reproduce.put("<!-- x: begin -->\nold\n\nother text\n", "x", "new")


def test_labels_of_points_that_are_close_stand_apart():
    near = {"loss budget 0.003": 6.0, "loss budget 0.01": 5.7, "loss budget 0.03": 5.8}
    points = [figure.Point(name, [bits], [8 * bits]) for name, bits in near.items()]
    points += [figure.Point("static 6", [6.0], [47.0]), figure.Point("MARViN", [21.0], [45.0])]
    labels = [t for t in figure.draw(points, "close").axes[0].texts if t.get_text()]
    boxes = [label.get_window_extent() for label in labels]
    assert len(boxes) == 5
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_a_label_stands_beside_a_line_and_not_on_it():
    points = [figure.Point("float32", [32.0], [84.4]), figure.Point("target 4 bits", [4.0], [83.6])]
    points += [figure.Point("static 5", [5.3], [84.0]), figure.Point("static 4", [4.4], [83.4])]
    axes = figure.draw(points, "line").axes[0]
    (label,) = (text for text in axes.texts if text.get_text() == "target 4 bits")
    box = label.get_window_extent()
    words = [axes.yaxis.label, *axes.get_yticklabels()]
    assert not any(box.overlaps(word.get_window_extent()) for word in words)
    for line in axes.lines:
        path = line.get_transform().transform_path(line.get_path())
        assert not path.intersects_bbox(box, filled=False)


@pytest.mark.parametrize(("highest", "scale"), [(2.3, "linear"), (2.4e7, "log")])
def test_one_large_loss_hides_no_other(highest, scale):
    curves = [figure.Curve("exact", [[2.0, 1.6]], [[1.9, 1.7]])]
    curves.append(figure.Curve("low", [[2.3, 2.1]], [[highest, 2.2]]))
    left, right = figure.draw_curves(curves, "losses").axes
    assert (left.get_yscale(), right.get_yscale()) == ("linear", scale)
