"""The trainer's speedup is that of ``python -m perfmodel`` on its run folder."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from perfmodel.cost import speedup
from perfmodel.report import one_line
from perfmodel.run import read_run
from perfmodel.summary import totals
from perfmodel.trace import Trace
from train import demo, main, resnet20
from train.config import Config
from train.monitor import Monitor
from train.records import read_csv


@pytest.fixture
def config(tmp_path):
    return Config(
        model="resnet20",
        width=4,
        dataset="digits",
        limit=180,
        run=str(tmp_path / "run"),
        device="cpu",
        epochs=3,
        batch_size=32,
        lookback=(3, 6),
        lr=0.02,
    )


def run(config):
    return main.run(config, resnet20.resnet20, resnet20.MIN_SIDE)


def logged(path):
    events = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    return events.Scalars("speedup/so_far_modelled")


def logged_ebops(path):
    events = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    return events.Scalars("ebops_modelled")


def test_speedup_on_tensorboard_and_in_the_summary(config, tmp_path):
    summary = run(config)
    found = read_run(tmp_path / "run")
    last = logged(tmp_path / "run")[-1]
    su = {t.name: t.value for t in totals(found)}["SU"]
    assert len(found.trace.switches) > 20
    assert (last.step, last.value) == (found.trace.steps, pytest.approx(su, rel=1e-6))
    assert one_line(found) in summary
    ebops = {t.name: t.value for t in totals(found)}["EBOPs"]
    assert logged_ebops(tmp_path / "run")[-1].value == pytest.approx(1e6 * ebops, rel=1e-6)
    assert f"EBOPs {ebops:.3g} M" in summary
    rows = read_csv(tmp_path / "run" / "trace.csv")
    last = {row["layer"]: int(row["ebops"]) for row in rows}
    assert sum(last.values()) == pytest.approx(1e6 * ebops, rel=1e-12)
    assert {row.kind for row in found.layers} >= {"4x1x3x3", "10x16"}


def test_speedup_after_a_resume(config, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Monitor, "epoch", stop)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    monkeypatch.undo()
    values = Config(**{**vars(config), "resume": True})
    run(values)
    su = {t.name: t.value for t in totals(read_run(tmp_path / "run"))}["SU"]
    assert logged(tmp_path / "run")[-1].value == pytest.approx(su, rel=1e-6)


def test_the_progress_bar_shows_it(config):
    class Bar:
        disable = False
        n = 0

        def __init__(self):
            self.shown = {}

        def set_postfix(self, shown, refresh):
            self.shown.update(shown)

        def update(self, count):
            pass

    training = main.prepare(config, resnet20.resnet20, resnet20.MIN_SIDE)
    monitor, bar = Monitor(training), Bar()
    monitor._bar = bar
    training.progress.add(1.0, 1, 32)
    monitor.step(training, 1.0)
    su = speedup(Trace((), 1, 8, (3, 6)), training.layers, 32)
    assert bar.shown["SU modelled"] == f"{su:.2f}"


def test_the_demo_prints_it(config, tmp_path):
    own = Config(**{**vars(config), "run": str(tmp_path / "demo-msgd")})
    run(own)
    modelled = demo.modelled(own)
    sgd = {"test_accuracy": 0.9}
    msgd = {"test_accuracy": 0.8, "mean_word_length": 12.0, "test_images": 9, "epochs": 3}
    text = demo.comparison({"sgd": sgd, "msgd": msgd | modelled})
    lines = [line for line in text.splitlines() if "SU, modelled" in line]
    assert lines[0].split()[-2:] == ["1", f"{modelled['SU']:.2f}"]
