"""The run folder: what a run was asked, where it ran, what came of it, and where it stands."""

import csv
import io
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from marvin.files import (
    LOCK,
    Locked,
    lock_folder,
    remove_leftovers,
    write_atomic,
)
from marvin.saved_file import check_calls, check_records
from perfmodel.files import (
    CHECKPOINT,
    CONFIG,
    ENVIRONMENT,
    FILES,
    RESULT,
    TIMING,
    UserError,
    read_config,
    read_json,
    read_result,
    read_rows,
    shown,
)
from train import distributed
from train.config import Config, from_dict, to_dict

__all__ = ["TIMES", "RunFolder", "SilentFolder", "differences", "environment", "read_csv"]

PACKAGES = ("marvin-fixedpoint", "torch", "numpy", "numba", "triton")
FREE_TO_CHANGE = ("run", "resume", "data_dir", "device", "epochs", "checkpoint_steps")
TIMES = ("epoch", "images", "train_s", "epoch_s", "images_per_s")
FRONT = "front"  # the folder of what --keep-front keeps
VERSION = 2  # of checkpoints; those of 0, which have none, and 1 do not tell skipped steps
PARTS = {"model": dict, "optimizer": dict, "scheduler": dict, "progress": dict, "data": str}
OPTIONAL = {"forward_save": dict, "average": dict}

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """The files of one run; each is replaced as a whole, never half written.

    ``config.json``, ``environment.json`` and ``layers.csv`` are written at the start;
    ``metrics.csv``, ``trace.csv`` and ``timing.csv`` at the end of each epoch; ``checkpoint.pt``
    also between; ``result.json`` at the end. All but ``environment.json``, ``timing.csv`` and
    ``checkpoint.pt`` are the same to the bit whether the run was interrupted or not; of the
    checkpoint the values are, not the bytes of the file.
    """

    path: Path

    @property
    def checkpoint(self) -> Path:
        """Everything needed to continue."""
        return self.path / CHECKPOINT

    @property
    def tensorboard(self) -> Path:
        """Folder of the TensorBoard files."""
        return self.path / "tensorboard"

    @contextmanager
    def claim(self, config: Config) -> Iterator[None]:
        """``prepare``, as the only process that writes to the folder until the block ends.

        Raises:
            UserError: Another process writes to the folder, it cannot be made or written, or as
                ``prepare``.
        """
        with ExitStack() as held:
            try:
                if not (self.path / LOCK).exists():
                    self._check(config)  # no folder is made for what is then refused
                word = held.enter_context(lock_folder(self.path))
            except Locked as error:
                raise UserError(str(error)) from error
            except OSError as error:
                raise UserError(
                    f"the run folder must be one that can be made and written, got {self.path} "
                    f"({error.strerror}): choose another with --run"
                ) from error
            if word:
                print(word)
            self.prepare(config)
            yield

    def accept(self, config: Config) -> None:
        """Store the configuration of the run that goes on from here; its result is of before."""
        (self.path / RESULT).unlink(missing_ok=True)  # it is of fewer epochs
        write_atomic(self.path / CONFIG, _to_json(to_dict(config) | {"resume": False}))

    def prepare(self, config: Config) -> None:
        """Make the folder, or check that it may be continued; what a run left there stays.

        Raises:
            UserError: The folder holds a run and ``config.resume`` is off, or it holds none and
                ``config.resume`` is on, or the run was asked something else, or what is in the
                folder is no file of a run.
        """
        self._check(config)
        self.path.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.path)
        if not config.resume:
            self.accept(config)  # so that it may be resumed, however early it ends

    def _check(self, config: Config) -> None:
        try:
            os.fsencode(self.path)
            str(self.path).encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"--run must be a name that can be written in UTF-8 and in this system's encoding "
                f"({sys.getfilesystemencoding()}), got {str(self.path)!a}: write ASCII letters, or "
                "set LC_ALL=C.UTF-8"
            ) from error
        stored = self.path / CONFIG
        if stored.exists() and not config.resume:
            raise UserError(f"{self.path} holds a run: add --resume, or choose another with --run")
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} must be a folder, got a file")
        for path in (self.path / name for name in FILES):
            if path.exists() and not path.is_file():
                raise UserError(f"{path} must be a file, got a folder or a device: move it away")
        if self.tensorboard.is_symlink() or self.tensorboard.is_file():
            raise UserError(
                f"{self.tensorboard} must be a folder of this run, got a link or a file"
            )
        if config.resume:
            self._agree(config)
            self._check_times()

    def _check_times(self) -> None:
        if not (self.path / TIMING).exists():
            return
        try:
            read_csv(self.path / TIMING, TIMES)
        except UserError as error:
            raise UserError(
                f"{error}: the run does not need this file, delete it to resume without the times of "
                "the epochs before"
            ) from error

    def read_config(self) -> Config:
        """Return the configuration of the run in this folder.

        Raises:
            UserError: There is none, or it is damaged.
        """
        values = read_config(self.path)
        try:
            return from_dict(values)
        except (ValueError, TypeError) as error:
            path = self.path / CONFIG
            raise UserError(f"{path} must hold a run's configuration: {error}") from error

    def read_result(self) -> dict[str, Any]:
        """Return what came of the run.

        Raises:
            UserError: It is not finished, or the file is damaged.
        """
        return read_result(self.path)

    def _agree(self, config: Config) -> None:
        old = self.read_config()
        changed = differences(old, config)
        if changed:
            raise UserError(f"{self.path} can be resumed as it was begun only: {changed}")
        if config.epochs < old.epochs:
            raise UserError(f"--epochs must be {old.epochs} or more to resume, got {config.epochs}")
        if config.epochs != old.epochs and config.schedule != "plateau":
            raise UserError(
                f"--epochs must be {old.epochs} to resume --schedule {config.schedule}, which ends "
                f"there, got {config.epochs}"
            )

    def save_environment(self, values: Mapping[str, object]) -> list[str]:
        """Store where the run began; later, return what has changed since then."""
        path = self.path / ENVIRONMENT
        if not path.exists():
            write_atomic(path, _to_json(values))
            return []
        old = read_json(path)
        now = json.loads(json.dumps(values))
        names = [name for name in now if name in old and old[name] != now[name]]
        return [f"{name} was {shown(old[name])}, is {shown(now[name])}" for name in names]

    def save_checkpoint(self, state: Mapping[str, object], path: Path | None = None) -> None:
        """Replace the checkpoint at once, or a file at ``path``."""
        buffer = io.BytesIO()
        torch.save({"version": VERSION, **state}, buffer)
        write_atomic(path or self.checkpoint, buffer.getvalue())

    def kept(self, epoch: int) -> Path:
        """Return where ``--keep-front`` keeps the checkpoint of an epoch, from 1."""
        return self.path / FRONT / f"epoch-{epoch:04}.pt"

    def load_checkpoint(self, path: Path | None = None) -> dict[str, Any] | None:
        """Return the checkpoint, or the one at ``path``; None where there is none.

        Raises:
            UserError: The file is damaged, or of a later version.
        """
        if path in (None, self.checkpoint):
            path, remedy = self.checkpoint, "delete it to begin this run anew"
        else:
            remedy = "the run's other checkpoints do not need it"
        return _read_checkpoint(path, remedy) if path.exists() else None

    def save_rows(self, name: str, rows: Iterable[Row], columns: Sequence[str]) -> None:
        """Replace a table such as ``metrics.csv`` at once."""
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomic(self.path / name, text.getvalue())

    def add_row(self, name: str, row: Row) -> None:
        """Add one row to a table."""
        path = self.path / name
        rows = read_csv(path, tuple(row)) if path.exists() else []
        self.save_rows(name, [*rows, row], list(row))

    def save_result(self, values: Row) -> None:
        """Store what came of the run."""
        write_atomic(self.path / RESULT, _to_json(values))


class SilentFolder(RunFolder):
    """The folder of a run, for the processes that write nothing: the first one writes."""

    @contextmanager
    def claim(self, config: Config) -> Iterator[None]:
        """Leave this to the first process."""
        yield

    def accept(self, config: Config) -> None:
        """Leave this to the first process."""

    def prepare(self, config: Config) -> None:
        """Leave this to the first process."""

    def save_environment(self, values: Mapping[str, object]) -> list[str]:
        """Leave this to the first process."""
        return []

    def save_checkpoint(self, state: Mapping[str, object], path: Path | None = None) -> None:
        """Leave this to the first process."""

    def save_rows(self, name: str, rows: Iterable[Row], columns: Sequence[str]) -> None:
        """Leave this to the first process."""

    def add_row(self, name: str, row: Row) -> None:
        """Leave this to the first process."""

    def save_result(self, values: Row) -> None:
        """Leave this to the first process."""


def differences(old: Config, new: Config) -> str:
    """Return the flags in which two runs differ, ``""`` if in none that matters."""
    before, after = to_dict(old), to_dict(new)
    names = [n for n in before if n not in FREE_TO_CHANGE and before[n] != after[n]]
    return ", ".join(f"{name} was {before[name]}, got {after[name]}" for name in names)


def read_csv(path: Path, columns: Sequence[str] = ()) -> list[dict[str, str]]:
    """Return the rows of a table, their values as text.

    Args:
        path: Of the table.
        columns: If given, what it must have, all filled, and nothing else.

    Raises:
        UserError: There is no such file, or it is damaged.
    """
    if not path.exists():
        raise UserError(f"looked for {path}: the run has not come to the end of its first epoch")
    rows = read_rows(path, columns)
    if columns and rows and set(rows[0]) != set(columns):
        raise UserError(f"{path} must have columns {', '.join(columns)}, got {', '.join(rows[0])}")
    return rows


def _read_checkpoint(path: Path, remedy: str) -> dict[str, Any]:
    """Return the parts of a checkpoint, without running code.

    Args:
        path: Of the checkpoint.
        remedy: What to do about a damaged one.

    Raises:
        UserError: The file is damaged, of something else, or of a later version.
    """
    try:
        if not path.is_file():  # reading a pipe would never end
            raise TypeError("a folder or a device")
        with path.open("rb") as file:
            check_records(file)
            check_calls(file)
        saved = torch.load(path, map_location="cpu", weights_only=True)
        state = {name: saved[name] for name in PARTS}
        state |= {name: saved[name] for name in OPTIONAL if name in saved}
        version = saved.get("version", 0)
        for name, value in state.items():
            if not isinstance(value, (PARTS | OPTIONAL)[name]):
                raise TypeError(f"{name} is {shown(value)}")
        if type(version) is not int or version < 0:
            raise TypeError(f"version is {shown(version)}")
    except Exception as error:  # torch raises six kinds for six ways of damage
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
        raise UserError(
            f"{path} must hold a whole checkpoint, got a damaged file ({reason}); {remedy}"
        ) from error
    if version > VERSION:
        raise UserError(
            f"{path} must have version {VERSION} or less, got {version}: "
            "a later version of this package wrote it"
        )
    return state


def environment(device: torch.device) -> dict[str, object]:
    """Return what a run's last bits and its speed depend on."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "processes": distributed.world(),
        "device": str(device),
        "gpu": gpu,
        "cuda": torch.version.cuda,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _to_json(values: Mapping[str, object]) -> str:
    return json.dumps(values, indent=2) + "\n"
