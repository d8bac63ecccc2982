"""One process writes a run folder."""

import dataclasses
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from marvin import files
from marvin.files import lock_folder
from train import main, resnet20, table
from train.config import Config
from train.errors import UserError
from train.records import RunFolder

ROOT = Path(__file__).parents[2]
FLAGS = "--dataset digits --width 2 --limit 60 --batch-size 10 --epochs 2 --device cpu"
pytestmark = pytest.mark.skipif(files.fcntl is None, reason="needs locks that the system ends")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_second_process_is_told_who_writes_and_changes_nothing(tiny, tmp_path):
    folder = tmp_path / "run"
    RunFolder(folder).prepare(tiny)
    (folder / ".metrics.csv.x.tmp").write_text("hal")
    with lock_folder(folder):
        before = files_of(folder)
        for resume in (False, True):
            config = dataclasses.replace(tiny, resume=resume)
            with pytest.raises(UserError) as caught:
                main.run(config, resnet20.resnet20, resnet20.MIN_SIDE)
            who = f"process {os.getpid()} on {platform.node()}, since "
            assert f"{folder} is being written by {who}" in str(caught.value)
        assert files_of(folder) == before
        assert RunFolder(folder).read_config() == tiny  # readers need no lock
        with pytest.raises(UserError, match="must be a finished run"):
            table.table([folder])


@pytest.mark.parametrize(
    ("name", "why"), [("file/run", "Not a dir"), ("n" * 300, "File name too long")]
)
def test_a_folder_that_cannot_be_made_is_named(tiny, tmp_path, name, why):
    (tmp_path / "file").touch()
    folder = tmp_path / name
    message = f"got {folder} \\({why}.*: choose another with --run"
    with pytest.raises(UserError, match=message), RunFolder(folder).claim(tiny):
        pass


@pytest.mark.slow
def test_two_fresh_trainers_on_one_folder(tmp_path):
    command = [sys.executable, "-m", "train.resnet20", "--run", str(tmp_path / "run")]
    processes = [
        subprocess.Popen(
            [*command, *FLAGS.split()],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate() for process in processes]
    assert sorted(process.returncode for process in processes) == [0, 1], outputs
    (loser,) = [n for n, process in enumerate(processes) if process.returncode]
    errors = outputs[loser][1].strip()
    assert "\n" not in errors
    assert "is being written by process" in errors or "holds a run: add --resume" in errors
    assert "epoch 1/2" not in outputs[loser][0]
    assert RunFolder(tmp_path / "run").read_result()["epochs"] == 2


def test_a_run_that_failed_holds_nothing(tmp_path):
    config = Config(dataset="digits", run=str(tmp_path / "run"), resume=True)
    with pytest.raises(UserError, match="must be the folder of a run"), lock(config):
        pass
    assert not (tmp_path / "run").exists()
    with lock(dataclasses.replace(config, resume=False)):
        pass
    with lock(config):
        pass


def test_without_locks_a_run_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(files, "fcntl", None)
    with lock(Config(run=str(tmp_path / "run"))):
        assert "no locks here: let no other process write to" in capsys.readouterr().out


def lock(config):
    return RunFolder(Path(config.run)).claim(config)
