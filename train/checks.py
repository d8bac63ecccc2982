"""Which values a configuration may have, whether it comes from flags or from a file."""

import dataclasses
import functools
import math
import re
import types
import typing
from typing import TYPE_CHECKING, Any, Literal

from perfmodel.files import shown

if TYPE_CHECKING:
    from train.config import Config

__all__ = ["MODELS", "check", "flag"]

MODELS = "resnet20", "alexnet", "vit"
MOST = 10**9  # of what is counted
KINDS = {
    int: "a whole number",
    float: "a number",
    str: "text without zero bytes",
    bool: "true or false",
}
MAY_BE_INFINITE = "kl_eps", "strategy_margin"  # never a longer word, never another strategy
# name: smallest, largest
RANGES = {
    **dict.fromkeys(("epochs", "batch_size", "accumulation_steps"), (1, MOST)),
    **dict.fromkeys(
        ("limit", "checkpoint_steps", "plateau_patience", "plateau_threshold"), (0, MOST)
    ),
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
POLICY = re.compile(r"marvin|muppet|loss-budget|static|none|fixed:\d{1,3},-?\d{1,3}", re.ASCII)


def check(config: "Config") -> None:
    """Refuse what no run can be made of, before anything is read or written.

    Raises:
        ValueError: A value is of another type or out of range; says which flag, what is required
            and what came.
    """
    hints = _hints(type(config))
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if not _fits(value, hints[f.name]):
            _refuse(f.name, _kind(hints[f.name]), shown_value(value))
        numbers = value if isinstance(value, tuple) else (value,)
        for number in numbers:
            _check_number(f.name, number)
        choices = MODELS if f.name == "model" else f.metadata.get("choices")
        if choices and value not in choices:
            _refuse(f.name, f"one of {', '.join(choices)}", shown(value))
    _check_rules(config)


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, float):
        is_fine = math.isfinite(value) or (name in MAY_BE_INFINITE and not math.isnan(value))
        if not is_fine:
            _refuse(name, "a finite number", value)
    if name in RANGES and value != "noise":
        low, high = RANGES[name]
        if value < low:
            _refuse(name, f"at least {low}", value)
        if value > high:
            _refuse(name, f"at most {high}", value)


def _check_rules(config: "Config") -> None:
    rules = (
        ("validation_share", 0 <= config.validation_share < 1, "0 to below 1"),
        ("plateau_factor", 0 < config.plateau_factor < 1, "between 0 and 1"),
        ("momentum", 0 <= config.momentum < 1, "0 to below 1"),
        ("bits", 1 <= config.bits <= 8, "1 to 8"),
        ("init_scale", config.init_scale > 0, "above 0"),
        ("division_bits", config.division_bits in (1, 2, 4, 8), "1, 2, 4 or 8"),
        (
            "policy",
            POLICY.fullmatch(config.policy) is not None,
            "marvin, muppet, loss-budget, static, none or fixed:WL,FL",
        ),
    )
    for name, is_met, required in rules:
        if not is_met:
            _refuse(name, required, getattr(config, name))
    if config.optimizer == "sgd" and config.policy not in ("marvin", "none"):
        raise ValueError(
            f"--policy {config.policy} must be without --optimizer sgd, which trains in float32: "
            f"write --policy {config.policy} alone, or --optimizer sgd alone"
        )
    if config.execution == "int8" and (
        config.method == "sgd" or config.policy == "none" or not config.quantize_activations
    ):
        raise ValueError(
            "--execution int8 must be with fixed point and --quantize-activations: write for "
            "example --policy loss-budget --execution int8"
        )


def flag(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


def shown_value(value: Any) -> str:
    """Return a value as a message shows it."""
    return f"{list(value)!r:.60}" if isinstance(value, tuple) else shown(value)


def _refuse(name: str, required: str, got: Any) -> None:
    raise ValueError(f"{flag(name)} must be {required}, got {got!s:.60}")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
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


def _kind(hint: Any) -> str:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(parts)}"
    if origin is types.UnionType:
        return "a number or 'noise'"
    return f"{KINDS[parts[0]]}, twice" if origin is tuple else KINDS[hint]
