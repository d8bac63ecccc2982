"""Checkpoints: read without running code, and compared with the run before they are loaded."""

import dataclasses
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import marvin
from perfmodel.files import shown
from train.errors import UserError

if TYPE_CHECKING:
    from train.loop import Training

__all__ = ["VERSION", "load", "read"]

VERSION = 1  # of checkpoints; those without one are of version 0, and otherwise the same
PARTS = {"model": dict, "optimizer": dict, "scheduler": dict, "progress": dict, "data": str}
OPTIONAL = {"forward_save": dict}
OF_THE_SCHEDULE = "best", "num_bad_epochs", "cooldown_counter", "last_epoch"
FREE = "lr", "initial_lr", "batch_size"  # settings that may differ from those the run began with
MOST = 2**53  # numbers up to here are exact as floats, too


def read(path: Path) -> dict[str, Any]:
    """Return the parts of a checkpoint.

    Raises:
        UserError: The file is damaged, of something else, or of a later version.
    """
    try:
        if not path.is_file():  # reading a pipe would never end
            raise TypeError("a folder or a device")
        _check_sums(path)
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
            f"{path} must hold a whole checkpoint, got a damaged file ({reason}); "
            "delete it to begin this run anew"
        ) from error
    if version > VERSION:
        raise UserError(
            f"{path} must have version {VERSION} or less, got {version}: "
            "a later version of this package wrote it"
        )
    return state


def load(training: "Training", state: dict[str, Any], path: Path) -> None:
    """Continue a run from the checkpoint that ``read`` returned.

    Raises:
        UserError: The checkpoint is whole, and not of this run.
    """
    try:
        _check(training, state)
        training.load(state)
        _check_tensors(training.optimizer.state)
        if isinstance(training.optimizer, marvin.Quantized):
            _check_tensors(training.optimizer.optimizer.state)
        if training.policy is not None:  # a policy that stands nowhere says so
            training.policy.start(training.optimizer.param_groups[0])
    except Exception as error:  # what foreign values make of a model's or an optimizer's loading
        reason = " ".join(str(error).split())
        raise UserError(
            f"{path} must hold a checkpoint of this run, got a foreign one: {reason:.300}"
        ) from error


def _check_sums(path: Path) -> None:
    """Compare each record of a checkpoint with its checksum, which ``torch.load`` does not."""
    with zipfile.ZipFile(path) as records:
        damaged = records.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"wrong checksum of {damaged}")


def _check(training: "Training", state: Mapping[str, Any]) -> None:
    want = training.state()
    _same_keys("model", want["model"], state["model"])
    _alike("model", want["model"], state["model"])
    _check_progress(training, state["progress"])
    _check_schedule(training.scheduler, want["scheduler"], state["scheduler"])
    steps = state["optimizer"].get("marvin", {}).get("step", state["progress"]["total_steps"])
    _check_optimizer(want["optimizer"], state["optimizer"], steps)
    if isinstance(training.optimizer, marvin.Quantized):
        _check_optimizer(want["optimizer"]["optimizer"], state["optimizer"]["optimizer"], steps)
    _alike("forward_save", want.get("forward_save", {}), state.get("forward_save", {}))


def _check_progress(training: "Training", got: Mapping[str, Any]) -> None:
    from train.loop import METRICS

    want = dataclasses.asdict(training.progress)
    _same_keys("progress", want, got)
    _alike("progress", want, got)
    whole = training.steps * got["epoch"] + got["step"]
    images = len(training.parts.train)
    if not 0 <= got["step"] < training.steps or got["total_steps"] != whole or got["epoch"] < 0:
        raise ValueError(
            f"it is at step {got['step']} of {training.steps} in epoch {got['epoch'] + 1}, "
            f"after {got['total_steps']}"
        )
    if not 0 <= got["correct"] <= got["seen"] <= images or got["step"] > got["seen"]:
        raise ValueError(f"it has {got['correct']} right of {got['seen']} of {images} images")
    if len(got["rows"]) != got["epoch"]:
        raise ValueError(f"it has metrics of {len(got['rows'])} of {got['epoch']} epochs")
    for row in got["rows"]:
        _same_keys("metrics", dict.fromkeys(METRICS), row)
        known = {name: value for name, value in row.items() if value is not None}
        _alike("metrics", dict.fromkeys(known, 0.0), known)


def _check_schedule(scheduler: Any, want: Mapping[str, Any], got: Mapping[str, Any]) -> None:
    missing = [name for name in OF_THE_SCHEDULE if name not in got]
    strange = [n for n in got if not isinstance(n, str) or hasattr(type(scheduler), n)]
    if missing or strange:
        raise ValueError(f"its schedule misses {missing}, and has {strange[:3]}")
    _alike("scheduler", want, got)


def _check_optimizer(want: Mapping[str, Any], got: Any, steps: int) -> None:
    """Compare groups with those of the run, and what each parameter has after ``steps`` steps."""
    groups = want["param_groups"]
    _alike("param_groups", groups, got["param_groups"])
    if len(got["param_groups"]) != len(groups):
        raise ValueError(f"it has {len(got['param_groups'])} parameter groups, not {len(groups)}")
    for mine, theirs in zip(groups, got["param_groups"], strict=True):
        for name, value in mine.items():
            if name in theirs and name not in FREE and theirs[name] != value:
                raise ValueError(f"{name} is {shown(theirs[name])}, not {shown(value)}")
        if theirs.get("params") != mine["params"] or not 0 <= theirs["lr"] < math.inf:
            raise ValueError("its parameters or learning rate are no run's")
    _alike("optimizer", {n: want[n] for n in want if n != "param_groups"}, got)
    indices = [index for group in groups for index in group["params"]]
    if strange := set(got["state"]) - set(indices):
        raise ValueError(f"it has states of parameters {sorted(map(str, strange))[:3]}")
    needs_momentum = steps > 0 and groups[0]["momentum"] and "marvin" not in want
    for index in indices:
        needed, has = set(want["state"].get(index, ())), got["state"].get(index, {})
        needed |= {"momentum_buffer"} if needs_momentum else set()
        if missing := needed - set(has):
            raise ValueError(f"parameter {index} has no {', '.join(sorted(missing))}")
        _check_bounds(groups[0], has.get("layer", {}))


def _check_bounds(settings: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    for name in ("lookback", "resolution"):
        if name in record and name in settings:
            low, high = settings[name]
            if not low <= record[name] <= high:
                raise ValueError(f"{name} is {record[name]}, not {low} to {high}")


def _check_tensors(state: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Refuse tensors that are not float32 of their parameter's shape, or several of that."""
    for p, values in state.items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                fits = value.shape == p.shape or value.shape[1:] == p.shape
                if not fits or value.dtype != torch.float32 or value.layout != torch.strided:
                    got = f"{tuple(value.shape)}, {value.dtype}"
                    raise ValueError(f"{name} must be float32 of {tuple(p.shape)}, got {got}")


def _same_keys(what: str, want: Mapping[str, Any], got: Mapping[str, Any]) -> None:
    differing = sorted(map(str, set(want) ^ set(got)))
    if differing:
        raise ValueError(f"{what} must have {len(want)} names, others are {differing[:3]}")


def _alike(where: str, want: Any, got: Any) -> None:
    """Compare kinds, and shapes of tensors; what ``want`` does not have yet may be anything."""
    if isinstance(want, Tensor):
        _alike_tensor(where, want, got)
    elif isinstance(want, Mapping):
        if got is None and "wl" in want:
            return  # a format: float32
        if not isinstance(got, Mapping):
            raise ValueError(f"{where} must be a dictionary, got {shown(got)}")
        for name in want.keys() & got.keys():
            _alike(f"{where}.{name}", want[name], got[name])
    elif isinstance(want, list | tuple):
        if not isinstance(got, list | tuple):
            raise ValueError(f"{where} must be a list, got {shown(got)}")
        for value in got:
            _alike(where, want[0] if want else None, value)
    elif want is not None:
        _alike_number(where, want, got)


def _alike_tensor(where: str, want: Tensor, got: Any) -> None:
    same = isinstance(got, Tensor) and got.shape == want.shape and got.dtype == want.dtype
    if not same or got.layout != torch.strided or got.device != torch.device("cpu"):
        what = f"{tuple(got.shape)}, {got.dtype}" if isinstance(got, Tensor) else shown(got)
        raise ValueError(f"{where} must be {tuple(want.shape)}, {want.dtype}, got {what}")


def _alike_number(where: str, want: Any, got: Any) -> None:
    """Compare two numbers, words or truths; a whole number is a number, too."""
    numbers = (int,) if isinstance(want, int) else (int, float)
    kinds = type(want) if isinstance(want, bool | str) else numbers
    is_alike = isinstance(got, kinds) and isinstance(got, bool) == isinstance(want, bool)
    if not is_alike or (isinstance(got, int) and abs(got) > MOST):
        raise ValueError(f"{where} must be like {shown(want)}, got {shown(got)}")
