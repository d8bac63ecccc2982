import dataclasses
import io
import json
import os
import zipfile

import pytest
import torch

from marvin.files import remove_leftovers, write_atomic
from train.config import Config
from train.errors import UserError
from train.records import TIMES, RunFolder, differences, environment, read_csv

STATE = {
    "model": {"w": torch.arange(1000.0)},
    "optimizer": {"lr": 0.1, "pairs": [(1, 2)]},
    "scheduler": {"best": float("inf")},
    "progress": {"rows": [{"loss": 0.5, "word": None}]},
    "data": "abc",
}


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "run")


@pytest.fixture
def begun(folder) -> RunFolder:
    folder.prepare(Config())
    return folder


def test_a_file_is_old_or_new_whatever_breaks(tmp_path, monkeypatch):
    path = tmp_path / "table.csv"
    write_atomic(path, "old")
    for call in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, _break)
            with pytest.raises(OSError, match="no room"):
                write_atomic(path, "new and longer")
        assert path.read_text() == "old"
        assert [p.name for p in tmp_path.iterdir()] == ["table.csv"]
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"


def _break(*_: object) -> None:
    raise OSError("no room")


def test_files_have_the_users_permissions(tmp_path):
    write_atomic(tmp_path / "atomic", "x")
    (tmp_path / "plain").write_text("x")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_what_a_killed_process_left_is_removed(tmp_path):
    write_atomic(tmp_path / "checkpoint.pt", "whole")
    (tmp_path / ".checkpoint.pt.x7a.tmp").write_text("hal")
    remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_run_is_not_overwritten(begun):
    with pytest.raises(UserError, match="holds a run: add --resume"):
        begun.prepare(Config())


def test_a_folder_whose_name_cannot_be_written_is_refused(tmp_path):
    """Under LC_ALL=C, bytes of a name that are not ASCII come as surrogates."""
    folder = RunFolder(tmp_path / "loc_\udcc3\udcbc")
    with (
        pytest.raises(UserError, match=r"--run must be a name that can be .*loc_.udcc3.udcbc"),
        folder.claim(Config()),
    ):
        pass
    assert not [*tmp_path.iterdir()]


def test_there_must_be_something_to_resume(folder):
    with pytest.raises(UserError, match="must be the folder of a run"):
        folder.prepare(Config(resume=True))
    assert not folder.path.exists()


def test_resume_names_what_differs(begun):
    changed = Config(resume=True, momentum=0.5, lookback=(3, 9))
    with pytest.raises(UserError) as caught:
        begun.prepare(changed)
    assert "momentum was 0.9, got 0.5" in str(caught.value)
    assert "lookback was [25, 100], got [3, 9]" in str(caught.value)
    assert begun.read_config() == Config()


def test_a_run_that_began_before_an_option_was_there_is_not_given_its_default(begun):
    path = begun.path / "config.json"
    values = json.loads(path.read_text())
    del values["batch_norm_batches"], values["channels_last"]
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match="batch_norm_batches was 0, got 16"):
        begun.prepare(Config(resume=True))
    begun.prepare(Config(resume=True, batch_norm_batches=0))
    assert begun.read_config() == Config(batch_norm_batches=0)


def test_epochs_may_grow_but_not_shrink(begun):
    longer = Config(resume=True, epochs=150, data_dir="elsewhere")
    begun.prepare(longer)
    begun.accept(longer)
    assert begun.read_config() == Config(epochs=150, data_dir="elsewhere")
    with pytest.raises(UserError, match="--epochs must be 150 or more to resume, got 100"):
        begun.prepare(Config(resume=True))


def test_differences_ignores_what_no_result_hangs_on():
    free = Config(run="x", resume=True, checkpoint_steps=3, device="cuda:1")
    assert differences(Config(), free) == ""
    assert differences(Config(), Config(seed=1)) == "seed was 0, got 1"


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"colour": 1}', '{"epochs": 0}', "null"])
def test_a_damaged_configuration_is_named(begun, content):
    (begun.path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config.json must hold a run's configuration"):
        begun.read_config()


def test_a_checkpoint_comes_back_as_it_was(begun):
    assert begun.load_checkpoint() is None
    begun.save_checkpoint(STATE)
    got = begun.load_checkpoint()
    torch.testing.assert_close(got.pop("model"), STATE["model"])
    assert got == {k: v for k, v in STATE.items() if k != "model"}


def test_a_damaged_checkpoint_is_named(begun):
    begun.save_checkpoint(STATE)
    good = begun.checkpoint.read_bytes()
    middle = len(good) // 2
    flipped = good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :]
    for damaged in (b"", good[:100], good[:-1], good[:middle], flipped, b"text"):
        begun.checkpoint.write_bytes(damaged)
        with pytest.raises(UserError, match=r"checkpoint.pt must hold a whole checkpoint"):
            begun.load_checkpoint()


def test_a_small_checkpoint_takes_no_large_memory(begun):
    """torch unpacks what was packed."""
    begun.save_checkpoint({**STATE, "model": {"a": torch.zeros(1 << 22)}})
    repacked = io.BytesIO()
    with (
        zipfile.ZipFile(begun.checkpoint) as records,
        zipfile.ZipFile(repacked, "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in records.namelist():
            packed.writestr(name, records.read(name))
    begun.checkpoint.write_bytes(repacked.getvalue())
    assert torch.load(begun.checkpoint)["model"]["a"].numel() == 1 << 22
    with pytest.raises(UserError, match=r"BadZipFile: its \d+ bytes are said to be \d+"):
        begun.load_checkpoint()


def test_a_checkpoint_has_no_bytes_whose_number_it_tells(begun):
    begun.save_checkpoint(STATE)
    torch.save({**STATE, "data": bytearray(3)}, begun.checkpoint)
    with pytest.raises(UserError, match=r"it calls builtins\.bytearray"):
        begun.load_checkpoint()


def test_a_checkpoint_runs_no_code(begun):
    torch.save({**STATE, "data": begun}, begun.checkpoint)  # an object of a class
    with pytest.raises(UserError, match="must hold a whole checkpoint"):
        begun.load_checkpoint()


def test_a_checkpoint_of_something_else_is_refused(begun):
    torch.save({"weights": 1}, begun.checkpoint)
    with pytest.raises(UserError, match="must hold a whole checkpoint"):
        begun.load_checkpoint()


def test_a_checkpoint_without_a_version_loads_and_a_later_one_is_refused(begun):
    torch.save(STATE, begun.checkpoint)
    assert begun.load_checkpoint().keys() == STATE.keys()
    torch.save({**STATE, "version": 3}, begun.checkpoint)
    with pytest.raises(UserError, match="must have version 2 or less, got 3"):
        begun.load_checkpoint()


def test_tables_keep_every_bit_of_a_number(begun):
    rows = [{"a": 0.1 + 0.2, "b": None}, {"a": 1 / 3, "b": 2}]
    begun.save_rows("t.csv", rows, ["a", "b"])
    got = read_csv(begun.path / "t.csv")
    assert [float(row["a"]) for row in got] == [row["a"] for row in rows]
    assert [row["b"] for row in got] == ["", "2"]
    begun.add_row("timing.csv", {"s": 1})
    begun.add_row("timing.csv", {"s": 2})
    assert read_csv(begun.path / "timing.csv") == [{"s": "1"}, {"s": "2"}]


def test_a_cut_table_of_times_may_be_deleted(begun):
    path = begun.path / "timing.csv"
    begun.save_rows(path.name, [dict.fromkeys(TIMES, 1)], TIMES)
    path.write_text(path.read_text()[:-3])
    resumed = Config(resume=True)
    with pytest.raises(UserError, match=r"timing.csv must be whole, line 2 is cut off.* delete it"):
        begun.prepare(resumed)
    path.unlink()
    begun.prepare(resumed)


def test_a_missing_table_is_named(begun):
    with pytest.raises(UserError, match=r"looked for .*metrics.csv"):
        read_csv(begun.path / "metrics.csv")


def test_the_environment_is_that_of_the_beginning(begun):
    now = environment(torch.device("cpu"))
    assert now["torch"] == torch.__version__
    assert now["threads"] == torch.get_num_threads()
    assert now["cpu"]
    assert begun.save_environment(now) == []
    assert begun.save_environment({**now, "threads": 99}) == [
        f"threads was {now['threads']}, is 99"
    ]
    assert json.loads((begun.path / "environment.json").read_text()) == now


def test_a_result_of_fewer_epochs_does_not_stay(begun):
    begun.save_result({"epochs": 100})
    begun.accept(dataclasses.replace(Config(), resume=True, epochs=120))
    assert not (begun.path / "result.json").exists()
