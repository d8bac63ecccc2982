"""Hyper-parameters: what they must be."""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

import torch

__all__ = [
    "MARVIN",
    "OPTIONS",
    "SGD",
    "Checks",
    "Group",
    "Settings",
    "check_settings",
    "meant",
    "unread",
]

# hyper-parameters by name, each of its own type: what torch gives for a parameter group
Group = dict[str, Any]
Settings = Mapping[str, Any]
_Rule = tuple[str, Callable[[Settings], bool], str]

_WORD_LENGTHS = "wl", "init_wl", "min_wl", "max_wl", "weights", "activations", "levels"
_MEANT = {"bits": _WORD_LENGTHS, "wl": _WORD_LENGTHS, "fl": ("fl", "init_fl", "min_fl")}


def _whole(name: str) -> _Rule:
    return name, lambda s: isinstance(s[name], Integral), "a whole number of bits"


@dataclass(frozen=True)
class Checks:
    """What some hyper-parameters must be.

    Args:
        at_least_0: Names of numbers that are 0 or more.
        choices: Names, and the values allowed.
        rules: Name, test of all settings, and the requirement in words.
    """

    at_least_0: tuple[str, ...] = ()
    choices: Mapping[str, tuple[str | bool, ...]] = field(default_factory=dict)
    rules: tuple[_Rule, ...] = ()


OPTIONS = Checks(
    ("l1", "seed"),
    {
        "l1_params": ("weights", "all"),
        "one_dim": ("previous", "float"),
        "master_init": ("float", "quantized"),
        "nonfinite": ("raise", "skip"),
        "compact_state": (False, True),
        "normalize_gradients": (False, True),
        "quantize_gradients": (False, True),
    },
)
SGD = Checks(
    ("lr", "weight_decay"),
    rules=(("momentum", lambda s: 0 <= s["momentum"] < 1, "0 or more and below 1"),),
)
MARVIN = Checks(
    ("strategy_margin",),
    {
        "lookback_rounding": ("ceil", "nearest"),
        "strategy": ("adaptive", "min", "mean", "max"),
        "strategy_loss": ("last", "short"),
        "kl_direction": ("pq", "qp"),
        "kl_counts": ("expected", "sampled"),
        "pushdown_range": ("current", "full"),
        "pushup": ("adapt", "marvin"),
        "symmetric": (False, True),
    },
    (
        ("max_wl", lambda s: 3 <= s["max_wl"] <= 32, "3 to 32 bits"),
        ("init_wl", lambda s: 2 <= s["init_wl"] <= s["max_wl"], "2 bits to max_wl"),
        ("init_fl", lambda s: 0 <= s["init_fl"] < s["init_wl"], "0 or more and below init_wl"),
        ("min_fl", lambda s: 0 <= s["min_fl"] < s["max_wl"], "0 or more and below max_wl"),
        (
            "buffer_bits",
            lambda s: 1 <= s["buffer_bits"] <= s["max_wl"] - s["min_fl"],
            "1 to max_wl - min_fl bits",
        ),
        (
            "lookback",
            lambda s: _is_range(s["lookback"], 1),
            "two step counts, 1 <= lower <= upper",
        ),
        (
            "resolution",
            lambda s: _is_range(s["resolution"], 2),
            "two bin counts, 2 <= lower <= upper",
        ),
        ("lookback_momentum", lambda s: 0 < s["lookback_momentum"] <= 1, "above 0 and at most 1"),
        ("kl_smoothing", lambda s: 0 < s["kl_smoothing"] < math.inf, "above 0 and finite"),
        (
            "kl_eps",
            lambda s: (
                s["kl_eps"] == "noise" or (_is_number(s["kl_eps"]) and s["kl_eps"] < math.inf)
            ),
            'finite and >= 0, or "noise"',
        ),
        *map(_whole, ("max_wl", "init_wl", "init_fl", "min_fl", "buffer_bits")),
    ),
)


def check_settings(settings: Settings, checks: Checks) -> None:
    """Refuse settings that are out of range.

    Raises:
        TypeError: A setting that must be a number is not one.
        ValueError: With the name, what is required and what came.
    """
    for name in checks.at_least_0:
        value = settings[name]
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise ValueError(f"{name} must be one number, got a tensor of {value.numel()}")
        if not isinstance(value, Real | torch.Tensor):
            raise TypeError(f"{name} must be a number, got {name}={value!r}")
        if not float(value) >= 0:
            raise ValueError(f"{name} must be 0 or more, got {name}={value}")
        if value == math.inf:
            raise ValueError(f"{name} must be finite, got {name}={value}")
    for name, choices in checks.choices.items():
        if settings[name] not in choices:
            raise ValueError(f"{name} must be one of {choices}, got {settings[name]!r}")
    for rule in checks.rules:
        _check_rule(settings, rule)


def _check_rule(settings: Settings, rule: _Rule) -> None:
    try:
        is_met = rule[1](settings)
    except TypeError as error:  # of comparing it, or taking it apart
        raise TypeError(_refusal(settings, rule)) from error
    if not is_met:
        raise ValueError(_refusal(settings, rule))


def _refusal(settings: Settings, rule: _Rule) -> str:
    """Return what is required and what came, with the settings that the requirement names."""
    name, _, requirement = rule
    message = f"{name} must be {requirement}, got {name}={settings[name]!r:.200}"
    words = dict.fromkeys(re.findall(r"\w+", requirement))
    if others := [f"{n}={settings[n]!r:.200}" for n in words if n in settings and n != name]:
        message += f" with {', '.join(others)}"
    return message


def meant(name: str, settings: Collection[str]) -> str:
    """Return the settings that a name looks like, such as ``"min_wl or max_wl"``; ``""`` where there is none.

    It looks like one that it nearly is, or if it begins as one and ends as another.

    Args:
        name: What somebody wrote.
        settings: Names of settings.
    """
    if found := [own for own in _MEANT.get(name, ()) if own in settings]:
        return " or ".join(found)
    words = name.split("_")
    related = [own for own in sorted(settings) if own.split("_")[0] == words[0]]
    if len(words) > 1 and any(own.endswith(f"_{words[-1]}") for own in settings) and related:
        if (as_wl := name.removesuffix("bits") + "wl") in settings:
            return as_wl
        return get_close_matches(name, related, 1, 0.0)[0]
    return "".join(get_close_matches(name, sorted(settings), 1, 0.85))


def unread(
    group: Group, known: Collection[str], settings: Collection[str], others: Settings
) -> dict[str, str]:
    """Return what a parameter group has that nobody reads and that looks like a setting, with a remark on each.

    A group may have more than settings: ``initial_lr`` and ``max_momentum`` of schedulers, names.

    Args:
        group: A parameter group.
        known: What is read.
        settings: Names of settings.
        others: Settings of other policies, and the names of these.
    """
    found: dict[str, str] = {}
    for name in sorted(group.keys() - {"params", "param_names", *known}):
        near = meant(name, settings)
        if name in others and not (name in _MEANT and near):
            found[name] = f"of {others[name]}"
        elif near and not {"lr", "momentum"}.intersection(name.split("_")):
            found[name] = f"is {near} meant?"
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and float(value) >= 0


def _is_range(bounds: Any, least: int) -> bool:
    lower, upper = bounds
    are_whole = isinstance(lower, int) and isinstance(upper, int)
    return isinstance(bounds, list | tuple) and are_whole and least <= lower <= upper
