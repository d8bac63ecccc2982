"""``python -m perfmodel model``: what a model costs and keeps, before it is trained; loads torch."""

import ast
import importlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn

from perfmodel.layers import Layer, layers, total_madds
from perfmodel.memory import Option, Row, Saved, division, few_bit, largest_batch, saved_bytes
from perfmodel.text import binary, metric, table

__all__ = ["Facts", "Question", "facts", "load_model", "model_report"]

OPTIONS: dict[str, Option] = {
    "exact": lambda kept: kept.size_bytes,
    **{f"few-bit, {bits} bit{'s' * (bits > 1)}": few_bit(bits) for bits in range(1, 5)},
    "DIVISION, B = 8, Q = 2": division(),
}


@dataclass(frozen=True)
class Question:
    """What to find out of a model.

    Args:
        model: ``module:name``, or ``module:name(argument=value)``.
        shape: Of one sample.
        dtype: Of the input, ``""`` for that of the parameters.
        memory_bytes: Of the device.
        copies: Of the parameters held in training.
    """

    model: str
    shape: tuple[int, ...]
    dtype: str = ""
    memory_bytes: float = 16 * 2**30
    copies: int = 4


@dataclass(frozen=True)
class Facts:
    """What was found.

    Args:
        layers: Of the model.
        saved: Kept for backward by a batch of two.
        parameter_bytes: Of all parameters.
        options: Bytes a sample and largest batch of each forward-save option.
    """

    layers: list[Layer]
    saved: Saved
    parameter_bytes: int
    options: dict[str, tuple[float, int]]


def load_model(name: str, device: str = "meta") -> nn.Module:
    """Return the model that ``module:name`` names; on ``"meta"``, without values.

    Raises:
        ValueError: There is no such thing, or it makes no module.
    """
    path, colon, call = name.partition(":")
    if not colon:
        raise ValueError(f"the model must be module:function, got {name!r}")
    attribute, arguments = _parse(call)
    try:
        thing = getattr(importlib.import_module(path), attribute)
        with torch.device(device):
            model = thing if isinstance(thing, nn.Module) else thing(**arguments)
    except Exception as error:  # whatever the code of the user raises
        raise ValueError(f"{name} must be a model or make one: {error}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} must make a torch module, got {type(model).__name__}")
    return model


def _parse(call: str) -> tuple[str, dict[str, object]]:
    """Return the name and the keyword arguments of ``name`` or ``name(argument=value)``."""
    try:
        tree = ast.parse(call, mode="eval").body
        if isinstance(tree, ast.Name):
            return tree.id, {}
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.args:
            return tree.func.id, {k.arg or "": ast.literal_eval(k.value) for k in tree.keywords}
    except (SyntaxError, ValueError):
        pass
    raise ValueError(f"must be name or name(argument=value), got {call!r}")


def facts(question: Question) -> Facts:
    """Count and predict; nothing is run.

    Raises:
        ValueError: The model cannot be made, or cannot run on shapes alone.
    """
    model = load_model(question.model)
    dtype = getattr(torch, question.dtype, None) if question.dtype else None
    if question.dtype and not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype must be one of torch's, got {question.dtype!r}")
    found = layers(model, question.shape, dtype=dtype, unknown="list")
    two, three = (_saved(model, question.shape, batch, dtype) for batch in (2, 3))
    parameters = sum(p.numel() * p.itemsize for p in model.parameters())
    options = {}
    for name, option in OPTIONS.items():
        sample = three.with_option(option) - two.with_option(option)
        fixed = question.copies * parameters + two.with_option(option) - 2 * sample
        options[name] = sample, largest_batch(question.memory_bytes, fixed, max(sample, 1))
    return Facts(found, two, parameters, options)


def _saved(
    model: nn.Module, shape: tuple[int, ...], batch: int, dtype: torch.dtype | None
) -> Saved:
    kind = dtype or next((p.dtype for p in model.parameters()), torch.float32)
    return saved_bytes(model, torch.empty((batch, *shape), dtype=kind, device="meta"))


def model_report(question: Question, found: Facts, *, by_layer: bool = False) -> str:
    """Return the tables of a model for people."""
    rows = found.saved.by_layer() if by_layer else found.saved.by_kind()
    unknown = [f"{r.name or 'model'}: {r.weight}" for r in found.layers if r.kind == "unknown"]
    lines = [
        f"{question.model} on one sample of {_times(question.shape)}. All modelled.",
        "",
        _layers([row for row in found.layers if row.kind != "unknown"]),
        "",
        *([f"NOT COUNTED, unknown operations: {', '.join(unknown)}", ""] if unknown else []),
        f"kept for backward, batch of 2 ({found.saved.source})",
        _kept(rows, found.saved),
        "",
        f"options: bytes kept a sample, and largest batch in {binary(question.memory_bytes)} beside "
        f"{question.copies} copies of {binary(found.parameter_bytes)} of parameters",
        _options(found),
    ]
    return "\n".join(lines)


def _times(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _layers(rows: Sequence[Layer]) -> str:
    total = total_madds(rows) or 1
    header = ("layer", "kind", "input", "output", "MAdds", "share", "weights, biases")
    lines = [
        (
            r.name or "(model)",
            r.kind,
            _times(r.input_shape),
            _times(r.output_shape),
            metric(r.madds),
            f"{r.madds / total:.1%}",
            f"{r.parameters:,}",
        )
        for r in rows
    ]
    biases = {(r.name, r.weight): r.parameters - r.elements for r in rows}
    parameters = sum({r.weight: r.elements for r in rows}.values()) + sum(biases.values())
    lines.append(("total", "", "", "", metric(total_madds(rows)), "100.0%", f"{parameters:,}"))
    return table(header, lines)


def _kept(rows: Sequence[Row], saved: Saved) -> str:
    lines = [
        (
            f"{row.layer} {row.kind}".strip(),
            binary(row.size_bytes),
            binary(row.alone_bytes),
            f"{row.size_bytes / max(saved.total_bytes, 1):.1%}",
        )
        for row in rows
    ]
    lines.append(("total", binary(saved.total_bytes), "", "100.0%"))
    return table(("", "kept", "by it alone", "share"), lines)


def _options(found: Facts) -> str:
    exact = found.options["exact"][0] or 1
    lines = [
        (f"  {name}", binary(sample), f"{exact / max(sample, 1):.2f}x", f"{batch:,}")
        for name, (sample, batch) in found.options.items()
    ]
    return table(("", "a sample", "smaller", "batch"), lines)


def as_dict(question: Question, found: Facts) -> dict[str, object]:
    """Return all of it for JSON."""
    options = {n: {"sample_bytes": s, "largest_batch": b} for n, (s, b) in found.options.items()}
    return {
        "question": asdict(question),
        "modelled": {
            "layers": [asdict(row) for row in found.layers],
            "madds": total_madds(found.layers),
            "parameter_bytes": found.parameter_bytes,
            "kept_by_batch_of_2": {
                "source": found.saved.source,
                "total_bytes": found.saved.total_bytes,
                "by_layer": [asdict(row) for row in found.saved.by_layer()],
                "by_kind": [asdict(row) for row in found.saved.by_kind()],
            },
            "options": options,
        },
    }
