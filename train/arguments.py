"""The command line of the trainers: a flag for each field of the configuration."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from perfmodel.arguments import Parser
from train.checks import flag
from train.config import Config

__all__ = ["READ_BY", "parse"]

FIXED = "fixed:WL,FL"
READ_BY = {  # which policies read a flag; others are common to all
    ("kappa", "max_noise"): ("loss-budget",),
    ("policy_bits", "per_channel", "ends_bits"): ("loss-budget", "static"),
    (
        *("init_wl", "init_fl", "max_wl", "min_fl", "buffer_bits", "resolution", "lookback"),
        *("lookback_momentum", "lookback_rounding", "strategy", "strategy_loss", "strategy_margin"),
        *("kl_eps", "kl_smoothing", "kl_direction", "kl_counts", "pushdown_range", "pushup"),
    ): ("marvin",),
    ("symmetric",): ("marvin", FIXED),
    ("one_dim",): ("marvin", "muppet", FIXED),
}
_DIVIDED = "forward_save", ("division", "few-bit+division")
READ_WITH = {  # another flag, and with which values of it a flag is read
    "bits": ("forward_save", ("few-bit", "few-bit+division")),
    **dict.fromkeys(("block", "division_bits", "division_method"), _DIVIDED),
    "gradient_bits": ("execution", ("int8",)),
}
_NOT_BITS = "; for word lengths write --policy-bits, --target-bits or --max-wl"


def parse(defaults: Config, argv: Sequence[str] | None = None) -> Config:
    """Read a configuration from command-line flags.

    Args:
        defaults: Values of the flags that are not given.
        argv: Arguments; default: those of the process.

    Returns:
        The configuration. Bad values end the process with a message and status 2.
    """
    parser = Parser(
        f"python -m train.{defaults.model}",
        f"Train {defaults.model} in fixed point, or in float32 to compare.",
    )
    for f in dataclasses.fields(Config):
        if f.name != "model":
            flags = [flag(f.name)]
            if f.name == "run":  # torchrun takes --run for an abbreviation of its own --run-path
                flags.append("--run-folder")
            parser.add_argument(*flags, **_argument(f, getattr(defaults, f.name)))
    given = vars(parser.parse_args(argv))
    if (given.get("optimizer"), given.get("policy")) in (("sgd", "marvin"), ("msgd", "none")):
        parser.error(
            "--optimizer sgd and --policy none are float32, --optimizer msgd and --policy marvin "
            f"fixed point, got --optimizer {given['optimizer']} --policy {given['policy']}: "
            "leave one of them out"
        )
    try:
        config = dataclasses.replace(defaults, **given)
        _check_read(config, given)
    except ValueError as error:
        parser.error(str(error))
    return config


def _check_read(config: Config, given: Mapping[str, object]) -> None:
    """Refuse flags that are given and not read; float32 compares, so it may have those of policies.

    Raises:
        ValueError: With the flag, and what reads it.
    """
    for name in given:
        of, values = READ_WITH.get(name, ("", ()))
        if of and (value := getattr(config, of)) not in values:
            others = " or ".join(f"{flag(of)} {one}" for one in values)
            hint = _NOT_BITS if name == "bits" else ""
            raise ValueError(f"{flag(name)} must be with {others}, got {flag(of)} {value}{hint}")
    if config.method == "sgd":
        return
    if config.policy == "muppet" and given.get("quantize_gradients") is False:
        raise ValueError(
            "--no-quantize-gradients must be without --policy muppet, which rounds gradients: leave "
            "one of them out"
        )
    policy = FIXED if config.policy.startswith("fixed:") else config.policy
    for name in given:
        readers = next((own for names, own in READ_BY.items() if name in names), ())
        if readers and policy not in readers:
            others = " or ".join(f"--policy {reader}" for reader in readers)
            raise ValueError(f"{flag(name)} must be with {others}, got --policy {config.policy}")


def _argument(f: dataclasses.Field[Any], default: object) -> dict[str, Any]:
    """Return what argparse needs to know about one field."""
    shown = "runs/MODEL-DATASET-OPTIMIZER-seedSEED" if f.name == "run" else _words(default)
    argument: dict[str, Any] = {
        "default": argparse.SUPPRESS,  # so that what is given is known
        "help": f"{f.metadata['help']} (default: {shown})",
    }
    if isinstance(default, bool):
        return argument | {"action": argparse.BooleanOptionalAction}
    if isinstance(default, tuple):
        metavar = ("WEIGHTS", "INPUTS") if f.name == "max_noise" else ("LOWER", "UPPER")
        kind = type(default[0])
        return argument | {"nargs": 2, "type": kind, "metavar": metavar, "action": _Pair}
    if f.name == "kl_eps":
        return argument | {"type": _float_or_noise, "metavar": "NATS|noise"}
    if f.metadata["choices"]:
        return argument | {"choices": f.metadata["choices"]}
    if f.name == "run":
        return argument | {"metavar": "DIR"}
    return argument | {"type": type(default), "metavar": type(default).__name__.upper()}


def _words(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


class _Pair(argparse.Action):
    """Store two values as a tuple."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, tuple(values))


def _float_or_noise(text: str) -> float | str:
    if text == "noise":
        return text
    try:
        return float(text)
    except ValueError:
        message = f"must be a number or 'noise', got {text!r}"
        raise argparse.ArgumentTypeError(message) from None
