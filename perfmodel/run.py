"""Read a run folder of ``train``; no torch, nothing is written."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perfmodel.files import (
    CONFIG,
    ENVIRONMENT,
    LAYERS,
    METRICS,
    TIMING,
    TRACE,
    RunError,
    number,
    read_config,
    read_json,
    read_rows,
    shown,
    whole,
)
from perfmodel.layers import Layer
from perfmodel.trace import Trace

__all__ = ["LACKS_PRODUCTS", "Run", "RunError", "compare", "read_run", "start_of"]

FIXED_LENGTH = re.compile("0*([2-9]|[12][0-9]|3[0-2])")  # bits, 2 to 32
MARVIN_ONLY = "init_wl", "lookback", "resolution"
METHODS = "sgd", "msgd", "fixed", "muppet", "static", "loss-budget"
NO_WEIGHT = "0"  # elements of a product of two activations in layers.csv
HAVE_PRODUCTS = ("vit",)  # of our models; their runs did not always record them
LACKS_PRODUCTS = (
    "Products of activations, such as attention's, are missing: an earlier version recorded this run. "
    "To count them: python -m perfmodel RUN --model module:function --input shape"
)
MOST = 10**15  # of what is counted: sums of such numbers are exact
MOST_STEPS = 10**7  # a figure has a value for each


@dataclass(frozen=True)
class Switch:
    """The columns of ``trace.csv`` that costs depend on."""

    step: int
    layer: str
    wl: int
    lookback: int
    input_wl: int
    input_signed: bool = True
    has_float_inputs: bool = False


@dataclass(frozen=True)
class Run:
    """What costs depend on.

    Args:
        path: The folder.
        title: What was trained on what, by which optimiser.
        layers: Of the model.
        trace: Word lengths; 32 bits throughout where the run was in float32.
        batch_size: Samples of a forward pass.
        accumulation_steps: Forward passes of an optimiser step.
        images_per_s: Measured in training, the median epoch; None where there is no record.
        machine: Where that was measured.
        lacks_products: Whether its model multiplies activations with each other, as attention does,
            and ``layers`` leave that out: the run is of an earlier version.
    """

    path: Path
    title: str
    layers: list[Layer]
    trace: Trace
    batch_size: int
    accumulation_steps: int
    images_per_s: float | None
    machine: str
    lacks_products: bool = False

    @property
    def samples(self) -> int:
        """Samples of an optimiser step."""
        return self.batch_size * self.accumulation_steps


def read_run(path: Path, model: Sequence[Layer] | None = None) -> Run:
    """Read a run folder.

    Args:
        path: With ``config.json``, ``layers.csv``, ``metrics.csv`` and, of MSGD, ``trace.csv``.
        model: Layers of the model, where ``layers.csv`` has no multiply-adds.

    Raises:
        RunError: A file is missing or damaged, or the run and ``model`` differ.
    """
    config, table = _config(path), path / LAYERS
    rows = read_rows(table, ("layer", "elements"))
    layers = list(model) if model is not None else _layers(table, rows)
    names = {row["layer"] for row in rows if row["elements"] != NO_WEIGHT}
    if model is not None:
        compare(rows, model, table)
    trace = _trace(path, config, names)
    return Run(
        path,
        f"{config['model']} on {config['dataset']}, {_method(config)}",
        layers,
        trace,
        config["batch_size"],
        config["accumulation_steps"],
        *_measured(path),
        config["model"] in HAVE_PRODUCTS and all(own.weight for own in layers),
    )


def start_of(config: Mapping[str, Any]) -> Trace:
    """Return the trace of a run before its first step.

    Args:
        config: Of the run: ``optimizer``, ``policy`` (without one: MARViN's) and its settings.
    """
    name, _, arguments = _method(config).partition(":")
    start = Trace((), 0, rounds_inputs=config.get("quantize_activations", True))
    if name == "msgd":
        bounds = {name: tuple(config[name]) for name in ("lookback", "resolution")}
        return replace(start, init_wl=config["init_wl"], **bounds)
    lengths = {"fixed": arguments.partition(",")[0], "muppet": 8}
    # others begin with a step in float32
    return replace(start, init_wl=int(lengths.get(name, 32)), searches=False)


def _method(config: Mapping[str, Any]) -> str:
    """Return what chose the formats: a policy; ``"msgd"``, which is MARViN's; or ``"sgd"``, none."""
    policy = config.get("policy", "marvin")
    if config["optimizer"] != "msgd" or policy == "none":
        return "sgd"
    return "msgd" if policy == "marvin" else policy


def compare(rows: Sequence[Mapping[str, str]], model: Sequence[Layer], path: Path) -> None:
    """Check that a run's layers are those of a model.

    Raises:
        RunError: They are not; names the layers that differ.
    """
    ran = {
        row["layer"]: whole(path, row, "elements", 1, MOST)
        for row in rows
        if row["elements"] != NO_WEIGHT
    }
    has = {row.weight: row.elements for row in model if row.weight}
    groups = {
        "only in the run": sorted(set(ran) - set(has)),
        "only in the model": sorted(set(has) - set(ran)),
        "of another size": sorted(n for n in set(ran) & set(has) if ran[n] != has[n]),
    }
    wrong = "; ".join(f"{what}: {', '.join(names)}" for what, names in groups.items() if names)
    if wrong:
        raise RunError(f"{path} must have the layers of the model, got {wrong}")


def _config(folder: Path) -> dict[str, Any]:
    path, values = folder / CONFIG, read_config(folder)
    needed = ["model", "dataset", "optimizer", "batch_size", "accumulation_steps"]
    if missing := [name for name in needed if name not in values]:
        raise RunError(f"{path} must have {', '.join(needed)}, missing {', '.join(missing)}")
    for name in ("model", "dataset", "optimizer", "policy"):
        if not isinstance(values.get(name, ""), str):
            raise RunError(f"{path}: {name} must be a word, got {shown(values[name])}")
    for name in ("batch_size", "accumulation_steps"):
        whole(path, values, name, 1, MOST_STEPS)
    method, _, arguments = _method(values).partition(":")
    if method not in METHODS:
        known = f"marvin, none, {', '.join(METHODS[2:])}"
        raise RunError(f"{path}: policy must be one of {known}, got {shown(values['policy'])}")
    if method == "msgd":
        _check_marvin(path, values)
    length = arguments.partition(",")[0]
    if method == "fixed" and not FIXED_LENGTH.fullmatch(length):
        raise RunError(f"{path}: policy fixed must be of 2 to 32 bits, got {shown(length)}")
    return values


def _check_marvin(path: Path, values: Mapping[str, object]) -> None:
    if missing := [name for name in MARVIN_ONLY if name not in values]:
        raise RunError(f"{path} must have {', '.join(MARVIN_ONLY)}, missing {', '.join(missing)}")
    whole(path, values, "init_wl", 2, 32)
    for name in ("lookback", "resolution"):
        bounds = values[name]
        if not isinstance(bounds, list) or len(bounds) != 2:
            raise RunError(f"{path}: {name} must be two whole numbers, got {shown(bounds)}")
        for bound in bounds:
            whole(path, {name: bound}, name, 1, MOST_STEPS)


def _layers(path: Path, rows: Sequence[Mapping[str, str]]) -> list[Layer]:
    if rows and "madds" not in rows[0]:
        raise RunError(
            f"{path} must have a column madds, got {', '.join(rows[0])}: name the model with "
            "--model module:function --input shape"
        )
    found = []
    for row in rows:
        madds, elements = whole(path, row, "madds", 0, MOST), whole(path, row, "elements", 0, MOST)
        name, shape = row["layer"], row.get("shape", "")
        module, weight = name.removesuffix(".weight"), name if elements else ""
        found.append(Layer(module, shape, madds, elements, (), (), weight, elements))
    return found


def _trace(path: Path, config: Mapping[str, object], names: set[str]) -> Trace:
    steps = _steps(path / METRICS)
    if _method(config) == "sgd":
        return Trace((), steps, 32, kept={"*": 32})
    start, table = start_of(config), path / TRACE
    switches = [
        _switch(table, row, start.searches)
        for row in read_rows(table, ("step", "layer", "wl", "lookback"))
    ]
    strange = sorted({s.layer for s in switches} - names)
    if strange:
        raise RunError(f"{table} must have the layers of layers.csv, got {', '.join(strange)}")
    try:
        return replace(start, switches=switches, steps=steps)
    except ValueError as error:
        raise RunError(f"{table}: {error}") from error


def _switch(path: Path, row: Mapping[str, str], searches: bool) -> Switch:
    step, wl = whole(path, row, "step", 0, MOST), whole(path, row, "wl", 2, 32)
    lookback = whole(path, row, "lookback", int(searches), MOST)
    input_wl = whole(path, row, "input_wl", 0, 32) if "input_wl" in row else 0
    flags = {"input_signed": "True", "has_float_inputs": "False"}
    for name, default in flags.items():
        flags[name] = row.get(name, default)
        if flags[name] not in ("True", "False"):
            raise RunError(f"{path}: {name} must be True or False, got {shown(flags[name])}")
    signed, floats = (value == "True" for value in flags.values())
    return Switch(step, row["layer"], wl, lookback, input_wl, signed, floats)


def _steps(path: Path) -> int:
    rows = read_rows(path, ("step",))
    if not rows:
        raise RunError(f"{path} must have one whole epoch, got none")
    return whole(path, rows[-1], "step", 1, MOST_STEPS)


def _measured(path: Path) -> tuple[float | None, str]:
    """Return the images a second and the machine, where the run recorded them."""
    timing, environment = path / TIMING, path / ENVIRONMENT
    if not timing.exists() or not environment.exists():
        return None, ""
    rows, place = read_rows(timing, ("images_per_s",)), read_json(environment)
    speeds = sorted(number(timing, row, "images_per_s") for row in rows)
    if not speeds:
        return None, ""
    cpu = f"{place.get('cpu')}, threads: {place.get('threads')}"
    return speeds[len(speeds) // 2], str(place.get("gpu") or cpu)
