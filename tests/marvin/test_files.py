"""The lock on a folder, and temporary files of processes that live or do not."""

import errno
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from marvin import files
from marvin.files import LOCK, Locked, lock_folder, new_folder, remove_leftovers, write_atomic

ROOT = Path(__file__).parents[2]
needs_flock = pytest.mark.skipif(files.fcntl is None, reason="needs locks that the system ends")


@needs_flock
def test_one_process_holds_a_folder_and_others_are_told_who(tmp_path):
    folder = tmp_path / "a/b"
    with lock_folder(folder) as word:
        assert word == ""
        with pytest.raises(Locked) as caught, lock_folder(folder):
            pass
        who = f"{folder} is being written by process {os.getpid()} on {platform.node()}, since 20"
        assert str(caught.value).startswith(who)
    with lock_folder(folder):
        pass
    assert [path.name for path in folder.iterdir()] == [LOCK]


@needs_flock
def test_the_lock_ends_with_the_process(tmp_path):
    code = f"""
import pathlib, time
from marvin.files import lock_folder
with lock_folder(pathlib.Path({str(tmp_path)!r})):
    print("held", flush=True)
    time.sleep(60)
"""
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(Locked, match=f"process {process.pid} on "), lock_folder(tmp_path):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with lock_folder(tmp_path) as word:
        assert word == ""


@pytest.mark.parametrize("taken", [False, True, "file"])
def test_where_a_locked_folder_was_moved_nothing_is_written(tmp_path, taken):
    folder = tmp_path / "run"
    with lock_folder(folder):
        write_atomic(folder / "a", "1")
        folder.rename(tmp_path / "moved")
        if taken == "file":
            folder.touch()
        elif taken:
            folder.mkdir()
            (folder / LOCK).touch()
        for path in (folder / "a", folder / "inner" / "b"):
            with pytest.raises(FileNotFoundError, match="it was moved or removed while") as caught:
                write_atomic(path, "2")
            assert caught.value.filename == str(folder)
        assert taken is not True or [path.name for path in folder.iterdir()] == [LOCK]
        write_atomic(tmp_path / "other", "3")
    if taken != "file":
        write_atomic(folder / "a", "4")


@needs_flock
def test_an_error_ends_the_lock(tmp_path):
    with pytest.raises(KeyError), lock_folder(tmp_path):
        raise KeyError
    with lock_folder(tmp_path):
        pass


@needs_flock
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_without_locks_there_is_a_word(tmp_path, monkeypatch, number):
    def refuse(*_: object) -> None:
        raise OSError(number, "no locks")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    with lock_folder(tmp_path) as word:
        assert word == f"no locks here: let no other process write to {tmp_path}"
    write_atomic(tmp_path / "file", "x")
    assert (tmp_path / "file").read_text() == "x"


def test_a_system_without_locks_has_a_word(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "fcntl", None)
    with lock_folder(tmp_path) as word:
        assert "no locks here" in word
    write_atomic(tmp_path / "file", "x")
    (tmp_path / ".file.x.tmp").write_text("hal")
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, "file"]


@pytest.mark.parametrize("kind", ["symlink", "hard link", "folder"])
def test_a_lock_writes_to_no_other_file(tmp_path, kind):
    thesis, folder = tmp_path / "thesis.txt", tmp_path / "run"
    thesis.write_text("years of work")
    folder.mkdir()
    if kind == "folder":
        (folder / LOCK).mkdir()
    elif kind == "symlink":
        (folder / LOCK).symlink_to(thesis)
    else:
        (folder / LOCK).hardlink_to(thesis)
    advice = r"\.lock must be a file of its own, got .*, so delete .*\.lock$"
    with pytest.raises(Locked, match=advice) as caught, lock_folder(folder):
        pass
    assert ("2 names" in str(caught.value)) == (kind == "hard link")
    assert thesis.read_text() == "years of work"


def test_what_the_holder_wrote_is_one_line(tmp_path):
    with lock_folder(tmp_path):
        (tmp_path / LOCK).write_bytes(b"\x1b[2Jme\nand \xff others" + 500 * b"x")
        with pytest.raises(Locked) as caught, lock_folder(tmp_path):
            pass
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600 + len(str(tmp_path))


@needs_flock
def test_a_file_that_is_being_written_is_no_leftover(tmp_path, monkeypatch):
    path = tmp_path / "table.csv"
    for name in ("fsync", "chmod", "replace"):
        real = getattr(os, name)

        def interrupted(*args: object, real=real) -> None:
            remove_leftovers(tmp_path)  # what another process does at this moment
            real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(os, name, interrupted)
            write_atomic(path, name)
        assert path.read_text() == name
        assert [p.name for p in tmp_path.iterdir()] == ["table.csv"]


@needs_flock
def test_a_file_that_was_taken_for_a_leftover_is_begun_again(tmp_path, monkeypatch):
    real, calls = files.tempfile.mkstemp, []

    def interrupted(**options):
        handle, name = real(**options)
        calls.append(name)
        if len(calls) == 1:
            remove_leftovers(tmp_path)  # before it is locked
            assert not os.path.exists(name)
        return handle, name

    monkeypatch.setattr(files.tempfile, "mkstemp", interrupted)
    write_atomic(tmp_path / "table.csv", "whole")
    assert len(calls) == 2
    assert (tmp_path / "table.csv").read_text() == "whole"


def test_leftovers_that_are_no_files_stay_and_block_nothing(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("stays")
    folder = tmp_path / "run"
    (folder / ".x.tmp").mkdir(parents=True)
    (folder / ".x.tmp/inside").write_text("stays")
    (folder / ".y.tmp").symlink_to(outside)
    (folder / ".z.tmp").write_text("hal")
    names = {".x.tmp"}
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / ".p.tmp")
        names.add(".p.tmp")
    remove_leftovers(folder)
    assert {path.name for path in folder.iterdir()} == names
    assert (folder / ".x.tmp/inside").read_text() == outside.read_text() == "stays"


def test_a_folder_that_cannot_take_its_place_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "export"
    path.mkdir()
    (path / "network").write_text("old")
    real, calls = os.replace, []

    def failing(*args: object) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise OSError("no room")
        real(*args)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="no room"), new_folder(path) as folder:
        (folder / "network").write_text("new")
    assert (path / "network").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


def test_a_drive_whose_files_are_another_users_is_written(tmp_path, monkeypatch):
    def refuse(*_args):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", refuse)
    write_atomic(tmp_path / "table.csv", "whole")
    with new_folder(tmp_path / "export") as folder:
        (folder / "network").write_text("new")
    assert (tmp_path / "table.csv").read_text() == "whole"
    assert (tmp_path / "export/network").read_text() == "new"


def test_a_full_disk_leaves_the_old_file_and_is_told_of_which(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    write_atomic(path, "old")

    def full(_handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*checkpoint.pt'"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [*tmp_path.iterdir()] == [path]
