"""A run stopped anywhere and resumed is the run that was never stopped, to the bit."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from marvin.rounder import BUFFER
from tests.same import assert_same
from train import loop
from train.config import Config
from train.errors import UserError
from train.records import RunFolder

TABLES = ("metrics.csv", "trace.csv", "layers.csv", "result.json")


class Stop(Exception):
    """Stands for the end of the process."""


def stop_after(calls: int, function):
    """Return ``function``, which raises ``Stop`` in place of the call after ``calls``."""
    left = [calls]

    def stopping(*args, **kwargs):
        if left[0] == 0:
            raise Stop
        left[0] -= 1
        return function(*args, **kwargs)

    return stopping


def assert_same_run(got: Path, want: Path) -> None:
    assert_same(RunFolder(got).load_checkpoint(), RunFolder(want).load_checkpoint())
    for name in TABLES:
        if (want / name).exists():
            assert (got / name).read_bytes() == (want / name).read_bytes(), name


def curves(folder: Path, *, saturation: bool = False) -> dict[str, list[tuple[int, float]]]:
    """Return every TensorBoard curve that is a function of the seed.

    Those of saturation lack epochs that were resumed in the middle, and are left out by default.

    Files are read in the order of their names, which end in a number without leading zeros: within
    one second of one process 10 comes before 9. Hence links whose names are in order.
    """
    files = sorted((folder / "tensorboard").iterdir(), key=lambda file: file.stat().st_mtime_ns)
    with TemporaryDirectory() as ordered:
        for number, file in enumerate(files):
            (Path(ordered) / f"{number:04}.tfevents").symlink_to(file)
        events = EventAccumulator(ordered, size_guidance={"scalars": 0})
        events.Reload()
    found = defaultdict(list)
    for tag in events.Tags()["scalars"]:
        if tag != "images_per_s" and (saturation or not tag.startswith("saturation")):
            found[tag] = [(event.step, event.value) for event in events.Scalars(tag)]
    return dict(found)


@pytest.mark.parametrize("optimizer", ["msgd", "sgd"])
def test_stopped_in_any_step_and_resumed(run, tiny, tmp_path, monkeypatch, optimizer):
    tiny = dataclasses.replace(tiny, optimizer=optimizer, batch_size=16, accumulation_steps=2)
    run(dataclasses.replace(tiny, run=str(tmp_path / "whole")))
    whole = curves(tmp_path / "whole")
    for stops in ([1, 4, 9], [6], [14]):
        folder = tmp_path / f"stopped{stops[0]}"
        config = dataclasses.replace(tiny, run=str(folder))
        for calls in stops:
            with monkeypatch.context() as patch:
                patch.setattr(loop, "train_step", stop_after(calls, loop.train_step))
                with pytest.raises(Stop):
                    run(config)
            config = dataclasses.replace(config, resume=True)
        run(config)
        assert_same_run(folder, tmp_path / "whole")
        assert curves(folder) == whole


def test_switches_of_an_epochs_end_are_drawn_where_the_run_goes_on_from_there(
    run, tiny, tmp_path, monkeypatch
):
    """MuPPET's level rises at the end of epoch 6."""
    monkeypatch.setattr("marvin.policies.muppet.threshold", lambda epoch: 0.5)
    tiny = dataclasses.replace(tiny, policy="muppet", normalize_gradients=False, epochs=9, lr=0.01)
    tiny = dataclasses.replace(tiny, limit=60, batch_size=60, width=2)
    run(dataclasses.replace(tiny, run=str(tmp_path / "whole")))
    run(dataclasses.replace(tiny, run=str(tmp_path / "longer"), epochs=6))
    run(dataclasses.replace(tiny, run=str(tmp_path / "longer"), resume=True))
    whole = curves(tmp_path / "whole", saturation=True)
    assert whole["word_length/conv.weight"][1:] == [(6, 8), (6, 12)]
    assert curves(tmp_path / "longer", saturation=True) == whole


def test_the_saturation_of_an_epoch_is_of_all_its_steps(run, tiny, tmp_path, monkeypatch):
    """What was clamped before the stop is not counted any more."""
    tiny = dataclasses.replace(tiny, batch_size=16, buffer_bits=1)
    run(dataclasses.replace(tiny, run=str(tmp_path / "whole")))
    config = dataclasses.replace(tiny, run=str(tmp_path / "stopped"))
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", stop_after(15, loop.train_step))  # of 30
        with pytest.raises(Stop):
            run(config)
    run(dataclasses.replace(config, resume=True))
    whole = curves(tmp_path / "whole", saturation=True)
    names = [name for name in whole if name.startswith("saturation/")]
    assert max(value for name in names for _, value in whole[name]) > 0
    stopped = curves(tmp_path / "stopped", saturation=True)
    for name in names:
        assert stopped[name] == [whole[name][0], whole[name][2]]


@pytest.mark.parametrize("function", ["save_tables", "save_timing", "end_epoch"])
def test_stopped_between_two_files_and_resumed(run, tiny, tmp_path, monkeypatch, function):
    run(dataclasses.replace(tiny, run=str(tmp_path / "whole")))
    config = dataclasses.replace(tiny, run=str(tmp_path / "stopped"))
    with monkeypatch.context() as patch:
        patch.setattr(loop, function, stop_after(1, getattr(loop, function)))
        with pytest.raises(Stop):
            run(config)
    run(dataclasses.replace(config, resume=True))
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")
    assert curves(tmp_path / "stopped") == curves(tmp_path / "whole")


def test_more_epochs_continue_a_finished_run(run, tiny, tmp_path):
    run(dataclasses.replace(tiny, run=str(tmp_path / "whole")))
    config = dataclasses.replace(tiny, run=str(tmp_path / "longer"), epochs=1)
    run(config)
    run(dataclasses.replace(config, epochs=3, resume=True))
    assert_same_run(tmp_path / "longer", tmp_path / "whole")


def test_a_finished_run_may_be_resumed_without_effect(run, tiny, tmp_path):
    first = run(tiny)
    files = {name: (tmp_path / "run" / name).read_bytes() for name in TABLES}
    assert run(dataclasses.replace(tiny, resume=True)) == first
    assert files == {name: (tmp_path / "run" / name).read_bytes() for name in TABLES}


@pytest.mark.parametrize("how", ["damaged", "other data", "fewer epochs"])
def test_a_finished_run_whose_resume_is_refused_stays_as_it_is(
    run, tiny, tmp_path, monkeypatch, how
):
    run(tiny)
    folder = tmp_path / "run"
    files = {name: (folder / name).read_bytes() for name in ("result.json", "config.json")}
    if how == "damaged":
        (folder / "checkpoint.pt").write_bytes(b"PK")
    if how == "other data":
        monkeypatch.setattr("train.dataset.Dataset.fingerprint", lambda self: "0" * 16)
    epochs = 1 if how == "fewer epochs" else 4
    with pytest.raises(UserError):
        run(dataclasses.replace(tiny, resume=True, epochs=epochs))
    assert {name: (folder / name).read_bytes() for name in files} == files


def test_other_data_is_refused(run, tiny, monkeypatch):
    run(dataclasses.replace(tiny, epochs=1))
    monkeypatch.setattr("train.dataset.Dataset.fingerprint", lambda self: "0" * 16)
    with pytest.raises(UserError, match=r"must have fingerprint .* to resume, got 0000"):
        run(dataclasses.replace(tiny, resume=True))


def command(folder: Path, *more: str) -> list[str]:
    flags = "--dataset digits --width 4 --limit 180 --batch-size 8 --epochs 4 --lr 0.02"
    flags += " --checkpoint-steps 3 --lookback 5 9 --device cpu"
    script = [sys.executable, "-m", "train.resnet20", "--run", str(folder)]
    return [*script, *flags.split(), *more]


def start(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    """Start a run of 4 epochs of 20 steps with one thread."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        command(folder, *more), cwd=root, env=environ, stdout=subprocess.DEVNULL
    )


def kill_after_checkpoints(process: subprocess.Popen[bytes], folder: Path, count: int) -> None:
    """Send SIGKILL once the checkpoint has been replaced ``count`` times."""
    path, seen, deadline = folder / "checkpoint.pt", set(), time.monotonic() + 120
    if path.exists():
        seen.add(path.stat().st_mtime_ns)
        count += 1
    while len(seen) < count:
        assert process.poll() is None, "the run ended before it was killed"
        assert time.monotonic() < deadline
        if path.exists():
            seen.add(path.stat().st_mtime_ns)
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_killed_inside_an_epoch_and_resumed(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole).wait() == 0
    kill_after_checkpoints(start(killed), killed, 3)
    state = RunFolder(killed).load_checkpoint()
    assert 0 < state["progress"]["total_steps"] < 80
    kill_after_checkpoints(start(killed, "--resume"), killed, 8)
    assert RunFolder(killed).load_checkpoint()["progress"]["total_steps"] < 80
    assert start(killed, "--resume").wait() == 0
    assert_same_run(killed, whole)
    assert (killed / "word_lengths.png").exists()
    assert curves(killed) == curves(whole)


INTEGER = {"policy": "loss-budget", "execution": "int8"}
OPTIONS: dict[str, dict[str, object]] = {  # all that a run's future may depend on
    "marvin": {
        "normalize_gradients": False,
        "l1": 1e-3,
        "l1_params": "all",
        "init_wl": 12,
        "init_fl": 6,
        "max_wl": 20,
        "min_fl": 3,
        "buffer_bits": 6,
        "resolution": (20, 40),
        "lookback_momentum": 0.5,
        "lookback_rounding": "nearest",
        "strategy_loss": "short",
        "strategy_margin": 0.1,
        "kl_eps": "noise",
        "kl_smoothing": 0.25,
        "kl_direction": "qp",
        "kl_counts": "sampled",
        "pushdown_range": "full",
        "pushup": "marvin",
    },
    "activations": {
        "strategy": "max",
        "quantize_gradients": True,
        "one_dim": "float",
        "master_init": "quantized",
        "symmetric": True,
        "nonfinite": "skip",
        "quantize_activations": False,
        "init_scale": 1.0,
    },
    "fixed": {"policy": "fixed:12,8", "ste": "identity"},
    "compact": {"compact_state": True, "ema": 0.9},
    "compact-muppet": {"compact_state": True, "policy": "muppet", "normalize_gradients": False},
    "compact-front": {
        **INTEGER,
        "compact_state": True,
        "per_channel": True,
        "keep_front": True,
        "channels_last": True,
    },
    "compact-plain": {"policy": "static", "compact_state": True, "momentum": 0.0, "ends_bits": 8},
    "budget": {
        **INTEGER,
        "gradient_bits": 0,
        "kappa": 0.03,
        "max_noise": (0.1, 0.01),
        "policy_bits": (3, 7),
        "free_zeros": True,
        "loss_floor": 0.5,
        "late": True,
        "schedule": "cosine",
    },
    "bits": {**INTEGER, "target_bits": 5.0, "schedule": "one-cycle"},
    "ebops": {**INTEGER, "target_ebops": 2e6, "validation_share": 0.0, "batch_norm_batches": 0},
    "kept": {
        "activation": "gelu",
        "forward_save": "few-bit+division",
        "bits": 2,
        "block": 4,
        "division_bits": 4,
        "division_method": "low",
        "weight_decay": 0.0,
    },
    "float32": {
        "optimizer": "sgd",
        "accumulation_steps": 2,
        "plateau_patience": 0,
        "plateau_factor": 0.5,
        "plateau_threshold": 0.9,
    },
}
OF_EVERY_RUN = {  # what the fixture names, and what another test changes while a run is stopped
    *("model", "width", "dataset", "data_dir", "limit", "run", "resume", "checkpoint_steps"),
    *("device", "seed", "epochs", "batch_size", "lr", "lookback"),
}


def test_every_option_is_among_them():
    changed = {name for changes in OPTIONS.values() for name in changes}
    assert changed | OF_EVERY_RUN == {field.name for field in dataclasses.fields(Config)}
    assert not changed & OF_EVERY_RUN
    default = Config()
    for changes in OPTIONS.values():
        assert all(value != getattr(default, name) for name, value in changes.items())


@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_every_option_resumes_to_the_bit(run, tiny, tmp_path, monkeypatch, changes):
    tiny = dataclasses.replace(tiny, **changes)
    run(dataclasses.replace(tiny, run=str(tmp_path / "whole")))
    config = dataclasses.replace(tiny, run=str(tmp_path / "stopped"))
    stop = 4 if tiny.accumulation_steps > 1 else 8
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", stop_after(stop, loop.train_step))
        with pytest.raises(Stop):
            run(config)
    run(dataclasses.replace(config, resume=True))
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_a_run_goes_on_where_there_is_no_such_gpu(run, tiny, tmp_path, capsys):
    run(dataclasses.replace(tiny, run=str(tmp_path / "whole")))
    run(dataclasses.replace(tiny, epochs=1))
    for name in "config.json", "environment.json":  # as a GPU had written them
        path = tmp_path / "run" / name
        text = path.read_text()
        assert '"device": "cpu"' in text
        path.write_text(text.replace('"device": "cpu"', '"device": "cuda:0"'))
    run(dataclasses.replace(tiny, resume=True))
    assert "the last bits may differ: device was 'cuda:0', is 'cpu'" in capsys.readouterr().out
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_an_average_of_another_decay_is_refused(run, tiny, tmp_path):
    run(dataclasses.replace(tiny, ema=0.9, epochs=1))
    path = tmp_path / "run" / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    for value, reason in ((0.5, "its average has decay 0.5"), ("x", "average.decay must be like")):
        state["average"]["decay"] = value
        torch.save(state, path)
        with pytest.raises(UserError, match=reason):
            run(dataclasses.replace(tiny, ema=0.9, epochs=2, resume=True))
    del state["average"]
    torch.save(state, path)
    with pytest.raises(UserError, match="others are \\['average'\\]"):
        run(dataclasses.replace(tiny, ema=0.9, epochs=2, resume=True))


def test_a_checkpoint_of_before_models_carried_formats_goes_on(
    run, prepare, tiny, tmp_path, monkeypatch
):
    """What that version wrote, made of what this one writes."""
    whole = dataclasses.replace(tiny, run=str(tmp_path / "whole"))
    run(whole)
    config = dataclasses.replace(tiny, run=str(tmp_path / "old"))
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", stop_after(8, loop.train_step))
        with pytest.raises(Stop):
            run(config)
    folder = RunFolder(Path(config.run))
    state = folder.load_checkpoint()
    state["model"] = {n: v for n, v in state["model"].items() if not n.endswith(BUFFER)}
    optimizer = state["optimizer"]
    common, wrapped = optimizer["marvin"], optimizer.pop("optimizer")
    shared = {**common["policy"]["shared"], "losses": [*common["policy"]["shared"]["losses"]]}
    for name in ("version", "policy", "wrapped", "gradients"):
        del common[name]
    common |= {"policy": "MarvinPolicy", **shared}
    for index, own in optimizer["state"].items():
        del own["stream"]
        own |= wrapped["state"][index]
    folder.save_checkpoint(state)
    run(dataclasses.replace(config, resume=True))
    assert_same_run(Path(config.run), Path(whole.run))
