"""Which values a configuration may have, whether it comes from flags or from a file."""

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal

from perfmodel.files import shown

__all__ = ["MODELS", "check", "flag", "in_flags", "refuse"]

MODELS = "resnet20", "alexnet", "vit"
MOST = 10**9  # of what is counted
KINDS = {
    int: "a whole number",
    float: "a number",
    str: "text without zero bytes",
    bool: "true or false",
}
MAY_BE_INFINITE = "kl_eps", "strategy_margin"  # never more bits, never another strategy
# name: smallest, largest
RANGES = {
    **dict.fromkeys(("epochs", "batch_size", "accumulation_steps"), (1, MOST)),
    **dict.fromkeys(
        ("limit", "checkpoint_steps", "plateau_patience", "plateau_threshold"), (0, MOST)
    ),
    **dict.fromkeys(("batch_norm_batches", "target_bits"), (0, MOST)),
    "target_ebops": (0, 10**18),
    "loss_floor": (0, 1),
    **dict.fromkeys(("lr", "weight_decay", "l1", "init_scale"), (0, 10**6)),
    **dict.fromkeys(("kappa", "max_noise", "kl_smoothing"), (0, MOST)),
    **dict.fromkeys(MAY_BE_INFINITE, (0, math.inf)),
    "lookback_momentum": (0, 1),
    **dict.fromkeys(("lookback", "resolution"), (1, 10**6)),
    **dict.fromkeys(("init_wl", "max_wl"), (2, 32)),
    **dict.fromkeys(("init_fl", "min_fl"), (0, 31)),
    **dict.fromkeys(("policy_bits", "ends_bits"), (0, 32)),
    "buffer_bits": (1, 32),
    "width": (1, 2**16),
    "seed": (0, 2**63 - 1),
    "block": (1, 2**16),
}


def check(config: Any) -> None:
    """Refuse values that no field of a configuration, a dataclass, may have.

    Raises:
        ValueError: A value is of another type or out of range; says which flag, what is required
            and what came.
    """
    hints = _hints(type(config))
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        numbers = value if isinstance(value, tuple) else (value,)
        for number in numbers:
            if type(number) is int:  # also one too large for its kind: its range says more
                _check_number(f.name, number)
        if not _fits(value, hints[f.name]):
            refuse(f.name, _kind(hints[f.name]), shown_value(value))
        for number in numbers:
            _check_number(f.name, number)
        choices = MODELS if f.name == "model" else f.metadata.get("choices")
        if choices and value not in choices:
            refuse(f.name, f"one of {', '.join(choices)}", shown(value))


def _check_number(name: str, value: object) -> None:
    if isinstance(value, float):
        is_fine = math.isfinite(value) or (name in MAY_BE_INFINITE and not math.isnan(value))
        if not is_fine:
            refuse(name, "a finite number", value)
    if name in RANGES and value != "noise":
        low, high = RANGES[name]
        if value < low:
            refuse(name, f"at least {low}", value)
        if value > high:
            refuse(name, f"at most {high}", value)


def flag(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


def in_flags(message: str, names: Iterable[str]) -> str:
    """Return a message about arguments in which those of ``names`` are called as their flags are."""
    words = re.compile(r"^\w+(?= must be )|\b[a-z\d]+(?:_[a-z\d]+)+\b")
    known = frozenset(names)
    return words.sub(lambda word: flag(word[0]) if word[0] in known else word[0], message)


def shown_value(value: object) -> str:
    """Return a value as a message shows it."""
    return f"{list(value)!r:.60}" if isinstance(value, tuple) else shown(value)


def refuse(name: str, required: str, got: object) -> None:
    """Raise ``ValueError``, with the flag of a field.

    Raises:
        ValueError: Always.
    """
    raise ValueError(f"{flag(name)} must be {required}, got {got!s:.60}")


@functools.cache
def _hints(kind: type) -> dict[str, object]:
    return typing.get_type_hints(kind)


def _fits(value: Any, hint: Any) -> bool:
    """Say whether a value is of a field's type; a whole number is a number."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in parts
    if origin is types.UnionType:
        return value == "noise" or any(_fits(value, part) for part in parts if part is not str)
    if origin is tuple:
        same = isinstance(value, tuple) and len(value) == len(parts)
        return same and all(map(_fits, value, parts))
    if hint in (int, float):
        if hint is float and isinstance(value, float):
            return True
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, hint) and not (hint is str and "\0" in value)


def _kind(hint: object) -> str:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(parts)}"
    if origin is types.UnionType:
        return "a number or 'noise'"
    return f"{KINDS[parts[0]]}, twice" if origin is tuple else KINDS[hint]
