"""Checkpoints are compared with the run before they are loaded."""

import dataclasses
import math
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

import marvin
from marvin.averaging import AverageState
from marvin.compact import SUFFIXES
from marvin.policies.push_up import Level
from marvin.rounder import BUFFER
from marvin.state import of_wrapped
from perfmodel.files import UserError, shown
from train.alike import check_alike, check_names
from train.training import COLUMNS, Training

__all__ = ["load"]

CODES = SUFFIXES[0]
OF_THE_SCHEDULE = "best", "num_bad_epochs", "cooldown_counter", "last_epoch"
SINCE_VERSION_2 = "left_out", "switch_steps"
# of what a policy shares; states of version 2 have the other names since they have any
LATER_SHARED = "lr", "highest_lr", "was_negative", "was_missed", "was_scaled"
LATER_SHARED += "was_unseen", "was_clamped", "begun"
EARLIER = {"sat_tol": 1e-3}  # what was the default: a run goes on as it began
# of the metrics of an epoch: smallest, largest
RANGES = {
    **dict.fromkeys(("train_accuracy", "validation_accuracy"), (0.0, 1.0)),
    "mean_word_length": (0.0, 32.0),
    "lr": (0.0, sys.float_info.max),
}
FREE = "lr", "initial_lr", "batch_size"  # settings that may differ from those the run began with


def load(training: Training, state: dict[str, Any], path: Path) -> None:
    """Continue a run from the checkpoint that ``RunFolder.load_checkpoint`` returned.

    Raises:
        UserError: The checkpoint is whole, and not of this run.
    """
    try:
        _check(training, state)
        training.load(state)
        _check_tensors(training.optimizer.state)
        if isinstance(training.optimizer, marvin.Quantized):
            _check_tensors(training.optimizer.optimizer.state)
    except Exception as error:  # what foreign values make of a model's or an optimizer's loading
        reason = " ".join(str(error).split())
        raise UserError(
            f"{path} must hold a checkpoint of this run, got a foreign one: {reason:.300}"
        ) from error


def _check(training: Training, state: Mapping[str, Any]) -> None:
    want = training.state()
    of_model = {n: v for n, v in want["model"].items() if n in state["model"] or not _is_format(n)}
    check_names("model", of_model, state["model"])  # earlier versions kept no formats in it
    check_alike("model", want["model"], state["model"])
    _check_progress(training, state["progress"])
    _check_schedule(training.scheduler, want["scheduler"], state["scheduler"])
    common = state["optimizer"].get("marvin", {})
    steps = common.get("step", state["progress"]["total_steps"])
    names = [name for name, _ in training.model.named_parameters()]
    _check_trace(common.get("trace", ()), names, steps)
    if min(common.get(name, 0) for name in ("step", "skipped", "forwards", "gradients")) < 0:
        raise ValueError("it counts below 0")
    _check_optimizer(want["optimizer"], state["optimizer"], steps)
    if isinstance(training.optimizer, marvin.Quantized):
        _check_policy(want["optimizer"]["marvin"]["policy"], common)
        _check_optimizer(want["optimizer"]["optimizer"], of_wrapped(state["optimizer"]), steps)
    if "switch_steps" in state["progress"]:
        total = state["progress"]["total_steps"]
        _check_switch_steps(state["progress"]["switch_steps"], len(common.get("trace", ())), total)
    check_names("parts", {**want, "forward_save": 0}, {**state, "forward_save": 0})
    _check_average(want.get("average"), state.get("average"))
    check_alike("forward_save", want.get("forward_save", {}), state.get("forward_save", {}))


def _check_average(want: AverageState | None, got: AverageState | None) -> None:
    """Refuse averages of other parameters or of another decay."""
    if want is None or got is None:
        return
    check_names("average", want, got)
    check_alike("average", want, got)
    check_names("average", want["masters"], got["masters"])
    if got["decay"] != want["decay"] or got["steps"] < 0:
        raise ValueError(f"its average has decay {got['decay']} after {got['steps']} steps")


def _is_format(name: str) -> bool:
    return name.rpartition(".")[2] == BUFFER


def _check_policy(want: Mapping[str, Any], common: Mapping[str, Any]) -> None:
    """Refuse a policy of other hyper-parameters, and one that stands nowhere."""
    saved = common.get("policy")
    if isinstance(saved, Mapping):  # earlier versions keep a name, and what is shared beside it
        check_names("policy", want, saved)
        check_alike("policy", want, saved)
        for name, value in want["settings"].items():
            if saved["settings"].get(name, value) not in (value, EARLIER.get(name, value)):
                raise ValueError(f"{name} is {shown(saved['settings'][name])}, not {shown(value)}")
        common = _checked_shared(want["shared"], saved["shared"])
    level = common.get("level", "min")
    if isinstance(level, str) and level not in get_args(Level):
        raise ValueError(f"its level is {shown(level)}")


def _checked_shared(
    want: Mapping[str, object] | None, got: Mapping[str, object] | None
) -> Mapping[str, object]:
    """Return what a policy shares; refuse one with other names, or with numbers that no run has."""
    own, theirs = want or {}, got or {}
    check_names("policy.shared", own, {**{n: 0 for n in LATER_SHARED if n in own}, **theirs})
    for name, value in theirs.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"policy.shared.{name} must be a finite number, got {value}")
    return theirs


def _check_progress(training: Training, got: Mapping[str, Any]) -> None:
    want = dataclasses.asdict(training.progress)
    check_names("progress", want, {**dict.fromkeys(SINCE_VERSION_2, 0), **got})
    check_alike("progress", want, got)
    whole = training.steps * got["epoch"] + got["step"]
    images = len(training.parts.train)
    if not 0 <= got["step"] < training.steps or got["total_steps"] != whole or got["epoch"] < 0:
        raise ValueError(
            f"it is at step {got['step']} of {training.steps} in epoch {got['epoch'] + 1}, "
            f"after {got['total_steps']}"
        )
    if not 0 <= got.get("left_out", 0) <= got["seen"]:
        raise ValueError(f"it left out {got['left_out']} of {got['seen']} images")
    if not 0 <= got["correct"] <= got["seen"] <= images or got["step"] > got["seen"]:
        raise ValueError(f"it has {got['correct']} right of {got['seen']} of {images} images")
    if len(got["rows"]) != got["epoch"]:
        raise ValueError(f"it has metrics of {len(got['rows'])} of {got['epoch']} epochs")
    for epoch, row in enumerate(got["rows"], start=1):
        check_names("metrics", dict.fromkeys(COLUMNS), row)
        known = {name: value for name, value in row.items() if value is not None}
        check_alike("metrics", dict.fromkeys(known, 0.0), known)
        if (row["epoch"], row["step"]) != (epoch, epoch * training.steps):
            raise ValueError(f"metrics of epoch {epoch} have {row['epoch']} and step {row['step']}")
        for name in RANGES.keys() & known.keys():
            low, high = RANGES[name]
            if not low <= known[name] <= high:
                raise ValueError(f"{name} must be {low:g} to {high:g}, got {shown(known[name])}")


def _check_switch_steps(steps: list[int], switches: int, total: int) -> None:
    """Refuse steps that are not those of as many switches, in order and within the run."""
    is_whole = all(type(step) is int for step in steps)
    if len(steps) != switches or not is_whole or steps != sorted(steps):
        raise ValueError(f"it has {len(steps)} steps of {switches} switches, {shown(steps)}")
    if steps and not 0 <= steps[0] <= steps[-1] <= total:
        raise ValueError(f"its switches came in steps {steps[0]} to {steps[-1]}")


def _check_schedule(
    scheduler: object, want: Mapping[str, object], got: Mapping[str, object]
) -> None:
    missing = [name for name in OF_THE_SCHEDULE if name not in got]
    strange = [n for n in got if not isinstance(n, str) or hasattr(type(scheduler), n)]
    if missing or strange:
        raise ValueError(f"its schedule misses {missing}, and has {strange[:3]}")
    check_alike("scheduler", want, got)
    for name, value in want.items():
        if name not in (*OF_THE_SCHEDULE, "_last_lr") and got.get(name, value) != value:
            raise ValueError(f"its schedule has {name} {shown(got[name])}, not {shown(value)}")


def _check_trace(rows: Any, layers: Collection[str], steps: int) -> None:
    """Refuse switches that no run made: its tables are written of them."""
    want = dataclasses.asdict(marvin.Switch(step=1, layer="", wl=2))
    for row in rows:
        check_alike("trace", want, row)
        switch = marvin.Switch(**row)
        if switch.layer not in layers or not 0 <= switch.step <= steps or not 2 <= switch.wl <= 32:
            raise ValueError(
                f"it has {switch.layer:.60} of {switch.wl} bits from step {switch.step} on"
            )


def _check_optimizer(want: Mapping[str, Any], got: Any, steps: int) -> None:
    """Compare groups with those of the run, and what each parameter has after ``steps`` steps."""
    groups = want["param_groups"]
    common = {n: v for n, v in want.get("marvin", {}).items() if n not in ("trace", "policy")}
    alike = {**want, "marvin": common, "state": _without_streams(want["state"])}
    own = {**got, "marvin": got.get("marvin", {})}
    own["state"] = _without_streams(got.get("state", {}))
    check_alike("optimizer", alike, own)
    if len(got["param_groups"]) != len(groups):
        raise ValueError(f"it has {len(got['param_groups'])} parameter groups, not {len(groups)}")
    for mine, theirs in zip(groups, got["param_groups"], strict=True):
        for name, value in mine.items():
            known = value, EARLIER.get(name, value)
            if name not in FREE and theirs.get(name, value) not in known:
                raise ValueError(f"{name} is {shown(theirs[name])}, not {shown(value)}")
        if theirs["params"] != mine["params"] or not 0 <= theirs["lr"] < math.inf:
            raise ValueError("its parameters or learning rate are no run's")
        size = theirs.get("batch_size")
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(f"batch_size must be a whole number from 1 on, got {shown(size)}")
    indices = [index for group in groups for index in group["params"]]
    if strange := set(got["state"]) - set(indices):
        raise ValueError(f"it has states of parameters {sorted(map(str, strange))[:3]}")
    momentum = {"momentum_buffer"} if steps and groups[0]["momentum"] else set[str]()
    new = {"stream"} if own["marvin"].get("version", 1) == 1 else set[str]()  # since version 2
    for index in indices:
        needed = set(want["state"].get(index, momentum if "marvin" not in want else ())) - new
        _check_state(f"parameter {index}", groups[0], got["state"].get(index, {}), needed)


def _without_streams(state: Mapping[Any, object]) -> dict[Any, Any]:
    """Return states without the numbers of their noise, which are longer than others."""
    return {
        index: {n: v for n, v in own.items() if n != "stream"} if isinstance(own, Mapping) else own
        for index, own in state.items()
    }


def _check_state(
    where: str, settings: Mapping[str, Any], state: Mapping[str, Any], needed: set[str]
) -> None:
    if missing := needed - {*state, *(name.removesuffix(CODES) for name in state)}:
        raise ValueError(f"{where} has no {', '.join(sorted(missing))}")
    for name, value in state.items():
        if name == "stream" and (type(value) is not int or not 0 <= value < 2**62):
            raise ValueError(f"stream of {where} is {shown(value)}")
        if name not in ("layer", "stream") and not isinstance(value, Tensor):
            raise ValueError(f"{name} of {where} must be a tensor, got {shown(value)}")
    record = state.get("layer", {})
    for name in ("lookback", "resolution"):
        if name in record and name in settings:
            low, high = settings[name]
            if not low <= record[name] <= high:
                raise ValueError(f"{name} of {where} is {record[name]}, not {low} to {high}")


def _check_tensors(state: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Refuse tensors that are not float32 of their parameter's shape, or several of that.

    Codes and their scales were looked at when they were loaded.
    """
    for p, values in state.items():
        for name, value in values.items():
            if name in ("layer", "stream") or name.endswith(SUFFIXES):
                continue
            fits = value.shape == p.shape or value.shape[1:] == p.shape
            if not fits or value.dtype != torch.float32 or value.layout != torch.strided:
                got = f"{tuple(value.shape)}, {value.dtype}"
                raise ValueError(f"{name} must be float32 of {tuple(p.shape)}, got {got}")
