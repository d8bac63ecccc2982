"""What a run depends on: one frozen record, whose fields are the flags of the trainers."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from train.checks import check, refuse

__all__ = [
    "ACTIVATIONS",
    "DATASETS",
    "DIVISION_METHODS",
    "MSGD_KEYWORDS",
    "QUANTIZED_KEYWORDS",
    "SGD_KEYWORDS",
    "Config",
    "from_dict",
    "run_folder",
    "to_dict",
]


def option(default: object, meaning: str, *choices: str) -> Any:
    """Return a field with its meaning, and its values where they are words."""
    return field(default=default, metadata={"help": meaning, "choices": choices})


def keyword(default: object, meaning: str, *choices: str) -> Any:
    """Return an ``option`` that is also an argument of ``marvin.MSGD``."""
    metadata = {"help": meaning, "choices": choices, "msgd": True}
    return field(default=default, metadata=metadata)


# Names that packages with torch know too; a test compares them. Here they load no torch.
ACTIVATIONS = (
    *("relu", "celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish"),
    *("hardtanh", "leaky_relu", "logsigmoid", "mish", "relu6", "selu", "sigmoid"),
    *("silu", "softplus", "softshrink", "softsign", "tanh", "tanhshrink"),
)
BEFORE = {"batch_norm_batches": 0}  # of runs older than the option
POLICY = re.compile(r"marvin|muppet|loss-budget|static|none|fixed:\d{1,3},-?\d{1,3}", re.ASCII)
DATASETS = "auto", "cifar10", "cifar100", "fashion-mnist", "digits"
DIVISION_METHODS = "division", "low", "high", "fixed", "per_group"
FORWARD_SAVE = "none", "few-bit", "division", "few-bit+division"


@dataclass(frozen=True)
class Config:
    """What one run depends on; every field but ``model`` is a flag of the same name.

    Raises:
        ValueError: A value is out of range.
    """

    model: str = field(default="resnet20")
    width: int = option(
        16, "channels of the first stage (vit: numbers of a token); the paper's is the default"
    )
    activation: str = option("relu", "activation function of every layer", *ACTIVATIONS)
    forward_save: str = option(
        "none",
        "what is kept for backward: few-bit codes of activation functions, DIVISION, both",
        *FORWARD_SAVE,
    )
    channels_last: bool = option(
        False, "images lie channels last, which CPUs convolve faster in ResNets; AlexNet slower"
    )
    bits: int = option(3, "few-bit: bits of a code, 1 to 8")
    block: int = option(8, "division: edge of the blocks whose means are kept")
    division_bits: int = option(2, "division: bits of a residual: 1, 2, 4 or 8")
    division_method: str = option(
        "division", "division, or one of the methods it is compared with", *DIVISION_METHODS
    )

    dataset: str = option("auto", "what to learn; auto: the first that is present", *DATASETS)
    data_dir: str = option("data", "folder of data sets; cifar10 and cifar100 are downloaded to it")
    validation_share: float = option(0.1, "share of training images held out to drive the schedule")
    limit: int = option(0, "use only so many training and test images, for trials; 0: all")

    run: str = option("", "run folder")
    resume: bool = option(False, "continue the run in the run folder where it was stopped")
    checkpoint_steps: int = option(100, "optimiser steps between checkpoints; 0: epoch ends only")
    keep_front: bool = option(
        False, "keep checkpoints of epochs that none beats in accuracy and EBOPs, in RUN/front"
    )
    device: str = option("auto", "cpu, cuda, cuda:1, ...; auto: cuda where there is one")
    seed: int = keyword(0, "seed of weights, batches and rounding")

    epochs: int = option(100, "passes over the training images")
    batch_size: int = option(256, "images of a forward pass")
    accumulation_steps: int = option(1, "forward passes whose mean gradient makes one step")
    batch_norm_batches: int = option(
        16,
        "training batches over which batch norm's statistics are estimated anew before each "
        "validation and the test; 0: running averages",
    )
    schedule: str = option(
        "plateau",
        "learning rate: falls where validation stands still; or by step, to 0 at the last epoch",
        "plateau",
        "cosine",
        "one-cycle",
    )
    plateau_patience: int = option(10, "epochs without a lower validation loss before lr falls")
    plateau_factor: float = option(0.1, "what lr is then multiplied by")
    plateau_threshold: float = option(1e-6, "relative gain that counts as a lower loss")

    ema: float = option(
        0.0,
        "evaluate the moving average of masters, of which a step keeps so much, such as 0.999; 0: off",
    )

    optimizer: str = option("msgd", "msgd: fixed point; sgd: float32, to compare", "msgd", "sgd")
    policy: str = option(
        "marvin",
        "what chooses formats: marvin; muppet (made for --no-normalize-gradients); fixed:WL,FL; "
        "loss-budget or static, for integer hardware; or none, which is --optimizer sgd",
    )
    kappa: float = option(0.01, "loss-budget: share of the loss that rounding may cost")
    max_noise: tuple[float, float] = option(
        (0.01, 0.001),
        "loss-budget: power of noise in weights and in layers' inputs, at most, over the tensor's own",
    )
    target_bits: float = option(
        0.0, "loss-budget: mean of weights' and inputs' word lengths that formats keep to; 0: none"
    )
    target_ebops: float = option(
        0.0,
        "loss-budget: bits of weights times bits of inputs over multiply-adds with weights; products "
        "of activations (attention) do not count; 0: no target",
    )
    free_zeros: bool = option(False, "loss-budget: inputs that are 0 are charged no noise")
    loss_floor: float = option(
        0.0,
        "loss-budget: share of the first losses below which the budget does not follow the loss",
    )
    late: bool = option(False, "loss-budget: longest words while lr is above half of its highest")
    policy_bits: tuple[int, int] = option(
        (0, 0),
        "loss-budget: shortest and longest word length, 0 0 for 4 8; static: bits of weights and of "
        "layers' inputs, 0 0 for 6 6",
    )
    per_channel: bool = option(
        False, "loss-budget, static: weights have a fractional length for each channel"
    )
    ends_bits: int = option(
        0, "loss-budget, static: bits of the first and the last layer; 0: as the others"
    )
    lr: float = keyword(0.05, "learning rate to begin with")
    momentum: float = keyword(0.9, "share of the last update kept in the next")
    weight_decay: float = keyword(1e-4, "L2 regularisation, added after normalisation")
    l1: float = keyword(0.0, "L1 regularisation, part of the gradient that is normalised")
    l1_params: str = keyword("weights", "what l1 applies to: weights or all", "weights", "all")
    normalize_gradients: bool = keyword(True, "divide each parameter's gradient by its norm")
    execution: str = option(
        "float32",
        "what multiplies in layers of 8 bits or fewer: float32; or int8, integer units, for all "
        "three products of a layer",
        "float32",
        "int8",
    )
    gradient_bits: int = option(
        8, "with --execution int8: bits of a layer's gradient, 8; 0: its products in float32"
    )
    init_scale: float = option(0.5, "s of TNVS: weights have variance 0.66 * s / inputs")

    # From here on, fixed point alone.
    init_wl: int = keyword(8, "word length to begin with, in bits")
    init_fl: int = keyword(4, "fractional length to begin with, in bits")
    max_wl: int = keyword(32, "longest word")
    min_fl: int = keyword(4, "shortest fractional length that is searched")
    buffer_bits: int = keyword(4, "bits left of the binary point after a switch, sign included")
    resolution: tuple[int, int] = keyword((50, 150), "fewest and most bins of a distribution")
    lookback: tuple[int, int] = keyword((25, 100), "fewest and most steps between switches")
    lookback_momentum: float = keyword(0.9, "weight of the new suggestion in the next lookback")
    lookback_rounding: str = keyword("ceil", "how a lookback becomes whole", "ceil", "nearest")
    strategy: str = keyword(
        "adaptive", "which suggestion raises precision", "adaptive", "min", "mean", "max"
    )
    strategy_loss: str = keyword(
        "last", "loss compared with the mean: last, or mean of the last few", "last", "short"
    )
    strategy_margin: float = keyword(0.0, "how far above the mean a loss must be to escalate")
    kl_eps: float | str = keyword(0.01, "divergence a format may cost, in nats, or 'noise'")
    kl_smoothing: float = keyword(0.5, "added to every bin before comparing")
    kl_direction: str = keyword(
        "pq", "pq: KL(quantised, float); qp: KL(float, quantised)", "pq", "qp"
    )
    kl_counts: str = keyword(
        "expected", "counts of a candidate format: exact, or of one draw", "expected", "sampled"
    )
    pushdown_range: str = keyword(
        "current", "formats searched: up to the current one, or all", "current", "full"
    )
    pushup: str = keyword("adapt", "formula of the suggestions", "adapt", "marvin")
    quantize_gradients: bool = keyword(False, "round gradients to their layer's format")
    one_dim: str = keyword(
        "previous", "format of biases and norms: their layer's, or float32", "previous", "float"
    )
    master_init: str = keyword(
        "float", "masters begin unrounded, or at the rounded weights", "float", "quantized"
    )
    symmetric: bool = keyword(False, "leave out the most negative code")
    nonfinite: str = keyword("raise", "an infinite or NaN loss or gradient", "raise", "skip")
    compact_state: bool = keyword(False, "masters in 16 bits, momenta and windows in 8")
    quantize_activations: bool = option(True, "layers round their inputs and outputs too")
    ste: Literal["clip", "identity"] = option(
        "clip", "gradient of a saturated activation: none, or as if it fitted", "clip", "identity"
    )

    def __post_init__(self) -> None:
        check(self)
        _check_rules(self)
        name, _, lengths = self.policy.partition(":")
        if lengths:  # 008 is 8
            lengths = ",".join(str(int(length)) for length in lengths.split(","))
            object.__setattr__(self, "policy", f"{name}:{lengths}")
        if self.policy == "none":
            object.__setattr__(self, "optimizer", "sgd")

    @property
    def method(self) -> str:
        """What tells runs apart in tables: the policy where it is not MSGD's own."""
        return self.optimizer if self.optimizer == "sgd" or self.policy == "marvin" else self.policy

    @property
    def is_range(self) -> bool:
        """Whether the policy is one of those for integer hardware, which measure ranges."""
        return self.optimizer != "sgd" and self.policy in ("loss-budget", "static")


SGD_KEYWORDS = ("lr", "momentum", "weight_decay")
QUANTIZED_KEYWORDS = (
    "l1",
    "l1_params",
    "normalize_gradients",
    "one_dim",
    "master_init",
    "nonfinite",
    "compact_state",
    "seed",
)
MSGD_KEYWORDS = tuple(f.name for f in dataclasses.fields(Config) if f.metadata.get("msgd"))


def _check_rules(config: Config) -> None:
    rules = (
        ("validation_share", 0 <= config.validation_share < 1, "0 to below 1"),
        ("plateau_factor", 0 < config.plateau_factor < 1, "between 0 and 1"),
        ("momentum", 0 <= config.momentum < 1, "0 to below 1"),
        ("ema", 0 <= config.ema < 1, "0 to below 1"),
        ("bits", 1 <= config.bits <= 8, "1 to 8"),
        ("init_scale", config.init_scale > 0, "above 0"),
        ("gradient_bits", config.gradient_bits in (0, 8), "8, or 0 for float32"),
        ("division_bits", config.division_bits in (1, 2, 4, 8), "1, 2, 4 or 8"),
        (
            "policy",
            POLICY.fullmatch(config.policy) is not None,
            "marvin, muppet, loss-budget, static, none or fixed:WL,FL",
        ),
        *_rules_of_the_policy(config),
    )
    for name, is_met, required in rules:
        if not is_met:
            refuse(name, required, getattr(config, name))
    if config.optimizer == "sgd" and config.policy not in ("marvin", "none"):
        raise ValueError(
            f"--policy {config.policy} must be without --optimizer sgd, which trains in float32: "
            f"write --policy {config.policy} alone, or --optimizer sgd alone"
        )
    of_the_budget = "target_bits", "target_ebops", "free_zeros", "loss_floor", "late"
    given = [name for name in of_the_budget if getattr(config, name)]
    if given and config.policy != "loss-budget":
        raise ValueError(
            f"--{given[0].replace('_', '-')} must be with --policy loss-budget, got --policy "
            f"{config.policy}"
        )
    if config.schedule != "plateau" and config.policy == "muppet":
        raise ValueError(
            f"--schedule {config.schedule} must be without --policy muppet, which lowers the rate "
            "itself: leave one of them out"
        )
    if config.execution == "int8" and (
        config.method == "sgd" or config.policy == "none" or not config.quantize_activations
    ):
        raise ValueError(
            "--execution int8 must be with fixed point and --quantize-activations: write for "
            "example --policy loss-budget --execution int8"
        )


def _rules_of_the_policy(config: Config) -> Iterable[tuple[str, bool, str]]:
    """Yield what the policies for integer hardware ask, in the words of the flags."""
    if not config.is_range:
        return
    shortest, longest = (bits or own for bits, own in zip(config.policy_bits, (4, 8), strict=True))
    is_budget = config.policy == "loss-budget"
    if is_budget:
        yield "kappa", config.kappa > 0, "above 0"
        yield "max_noise", min(config.max_noise) > 0, "above 0, twice"
    lengths = "the shortest word length, then the longest" if is_budget else "weights, then inputs"
    is_ordered = shortest <= longest or not is_budget
    are_lengths = all(bits in (0, *range(2, 17)) for bits in config.policy_bits)
    yield "policy_bits", are_lengths and is_ordered, f"{lengths}: 2 to 16 bits, 0 for the default"
    yield "ends_bits", config.ends_bits in (0, *range(2, 17)), "2 to 16, or 0"
    if is_budget and config.target_bits:
        is_between = shortest <= config.target_bits <= longest
        yield "target_bits", is_between, f"{shortest} to {longest}, the lengths of --policy-bits"


def to_dict(config: Config) -> dict[str, object]:
    """Return the configuration as JSON knows it: tuples are lists."""
    items = dataclasses.asdict(config).items()
    return {name: list(value) if isinstance(value, tuple) else value for name, value in items}


def from_dict(values: Mapping[str, object]) -> Config:
    """Return the configuration that ``to_dict`` made ``values`` of.

    Options that are not in ``values`` are younger than the run: it did what they now name.

    Raises:
        ValueError: ``values`` has a name that no configuration has, or a value out of range.
    """
    known = {f.name for f in dataclasses.fields(Config)}
    unknown = sorted(set(values) - known)
    if unknown:
        got = ", ".join(f"{name:.40}" for name in unknown[:5])
        raise ValueError(f"configuration must have known names only, got {got}")
    pairs = values.items()
    given = {n: tuple(v) if isinstance(v, list) else v for n, v in pairs}
    arguments: dict[str, Any] = {**BEFORE, **given}
    return Config(**arguments)


def run_folder(config: Config) -> Path:
    """Return the run folder, named after the run where none was given."""
    method = config.method.replace(":", "-").replace(",", "-")
    name = f"{config.model}-{config.dataset}-{method}-seed{config.seed}"
    return Path(config.run or f"runs/{name}")
