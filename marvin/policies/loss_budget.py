"""Policies for integer hardware: word lengths from a loss budget, or given; ranges from data."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

from fixedpoint_kernels import FixedPoint
from fixedpoint_kernels._torch_private.optimizers import calling_scaler
from marvin.policies.range_policy import (
    LayerBudget,
    Observation,
    Observed,
    RangePolicy,
    TensorFormat,
    Window,
    is_count,
    is_word_length,
)
from marvin.policies.ranges import Limits, budget_noise
from marvin.policies.records import Layer, Step, Update, word_length
from marvin.settings import Checks, Settings, check_settings
from marvin.warned import warn_user

__all__ = ["LossBudgetPolicy", "StaticPolicy"]


_Lengths = tuple[
    str, TensorFormat | None, TensorFormat | None
]  # of a weight, and its layer's inputs
_NEAR = 0.1  # a target is met; few layers cannot be nearer
_REACH, _HALVINGS = 16.0, 16  # powers of 4, each about a bit; to 1/2000 bit
_PAIRS = "tuple((own.weight, own.madds) for own in perfmodel.layers(model, shape))"


@dataclass(frozen=True, kw_only=True)
class LossBudgetPolicy(RangePolicy):
    """Words as short as a share of the loss allows: 4 to 8 bits for weights and activations.

    Rounding a tensor to steps of ``h`` adds noise of power ``h**2 / 12``. It costs about
    ``G / 2 * h**2 / 12`` of loss, where ``G`` is the squared norm of a sample's gradient to the
    tensor. A network of ``n`` layers rounds ``2 * n`` tensors, weights and inputs; each gets an
    equal part of ``kappa`` times the mean loss of the window:

        h**2 / 12 = 2 * kappa * loss / (2 * n) / G

    The format is the shortest whose noise is no larger, from ``min_wl`` to ``max_wl``. A tensor
    with small gradients would get so few bits that the layer cannot learn, and so keep them; hence
    noise must also be weak beside the signal. See ``docs/loss_budget.md``.

    Args:
        kappa: Share of the loss that all rounding together may cost.
        max_noise: Power of the noise in a weight, and in a layer's inputs, at most, over the
            tensor's own.
        window: Steps between switches.
        sat_tol: Share of a layer's inputs that may saturate, of those that are not 0. None: 1e-3 in words of
            fewer than 12 bits; longer ones hold the largest input with an integer bit to spare, two with 16 bits.
        min_wl: Shortest word length, 2 to ``max_wl`` bits.
        max_wl: Longest word length, 2 to 16 bits.
        ends_wl: Word length of the first and the last layer, in parameter order, 2 to 16 bits; None: as
            of the others.
        per_channel: Weights have a fractional length for each entry of their first dimension: channels
            use the integer bits that they do not need as fractional ones.
        batch_size: Samples of a step, in each process: how many terms the loss is the mean of. None: the
            first dimension of what the first layer sees, summed over a step's forward passes; needs
            ``marvin.quantize_activations``.
        target_bits: Mean of weights' and inputs' word lengths that the formats must have, ``min_wl`` to
            ``max_wl`` bits: at each switch ``kappa`` and ``max_noise`` are multiplied by what gives it, so that only their
            ratio matters. None: as ``kappa`` has it.
        target_ebops: The same for EBOPs: bits of weights times bits of inputs, without signs, over
            ``madds``. Products of two activations, as of attention, do not count: no format is
            theirs.
        madds: Pairs of a weight's name and its multiply-adds, ``(own.weight, own.madds)`` of each of
            ``perfmodel.layers``; those of modules that share a weight are added up.
        free_zeros: Only inputs that are not 0 are charged noise: zeros, as behind a ReLU, are not
            rounded.
        loss_floor: The budget follows the loss down to this share of the first window's.
        late: All words but those of ``ends_wl`` have ``max_wl`` bits while the learning rate of the
            first group is above half of its highest so far.

    A warning names a target that formats miss by more than a tenth.

    A loss below 0 has no share to spend: words get ``max_wl`` bits, and those with a target follow
    ``max_noise`` alone. A warning says so.

    Raises:
        TypeError: A setting that must be a number is not one.
        ValueError: An argument is out of range; in ``step``, loss or batch size is not known.
    """

    kappa: float = 0.01
    max_noise: tuple[float, float] = (0.01, 0.001)
    window: int = 25
    sat_tol: float | None = None
    min_wl: int = 4
    max_wl: int = 8
    ends_wl: int | None = None
    per_channel: bool = False
    batch_size: int | None = None
    target_bits: float | None = None
    target_ebops: float | None = None
    madds: tuple[tuple[str, int], ...] = ()
    free_zeros: bool = False
    loss_floor: float = 0.0
    late: bool = False

    rules = replace(
        RangePolicy.rules,
        common=(
            *("window", "batch_size", "target_bits", "target_ebops", "madds"),
            *("loss_floor", "late"),
        ),
        by_process=("batch_size",),
    )
    checks: ClassVar[Checks] = Checks(
        choices={"free_zeros": (False, True), "late": (False, True)},
        rules=(
            ("kappa", lambda s: 0 < s["kappa"] < math.inf, "above 0 and finite"),
            ("max_noise", lambda s: _is_pair(s["max_noise"]), "two finite numbers above 0"),
            ("max_wl", lambda s: is_word_length(s["max_wl"]), "an int, 2 to 16 bits"),
            (
                "min_wl",
                lambda s: is_word_length(s["min_wl"]) and s["min_wl"] <= s["max_wl"],
                "a whole number from 2 to max_wl bits",
            ),
            (
                "batch_size",
                lambda s: s["batch_size"] is None or is_count(s["batch_size"]),
                "a whole number from 1 on",
            ),
            (
                "target_bits",
                lambda s: s["target_bits"] is None or 2 <= s["target_bits"] <= 16,
                "2 to 16 bits",
            ),
            (
                "target_ebops",
                lambda s: s["target_ebops"] is None or s["target_ebops"] > 0,
                "above 0",
            ),
            (
                "target_ebops",
                lambda s: s["target_ebops"] is None or s["target_bits"] is None,
                "without target_bits",
            ),
            (
                "madds",
                lambda s: s["target_ebops"] is None or bool(s["madds"]),
                "given with target_ebops",
            ),
            (
                "madds",
                lambda s: (
                    isinstance(s["madds"], tuple | list) and all(map(_is_of_weight, s["madds"]))
                ),
                f"pairs of a weight's name and its multiply-adds ({_PAIRS})",
            ),
            ("loss_floor", lambda s: 0 <= s["loss_floor"] <= 1, "0 to 1"),
            (
                "loss_floor",
                lambda s: not s["loss_floor"] or s["window"] > 1,
                "0 where window is 1: it is a share of the first window of several steps",
            ),
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self.settings(), _TARGETS)  # a group may have words of its own

    def samples(self, settings: Settings, counted: int) -> int:
        """See ``Policy``."""
        return settings["batch_size"] or counted

    def limits(self, settings: Settings, shared: Window) -> tuple[Limits, Limits]:
        """See ``RangePolicy``."""
        shortest = "max_wl" if _is_early(settings, shared) else "min_wl"
        lengths = settings[shortest], settings["max_wl"]
        weights, inputs = settings["max_noise"]
        return Limits(*lengths, weights), Limits(*lengths, inputs)

    def noise(self, settings: Settings, observation: Observation, share: float) -> float | None:
        """See ``RangePolicy``; after the first step there is no window, and no budget."""
        if observation.before is None:
            return math.inf
        if share < 0:
            has_target = settings["target_bits"] or settings["target_ebops"]
            return math.inf if has_target else 0.0
        return budget_noise(settings["kappa"] * share, observation.gradient or 0.0)

    def share(self, shared: Window, tensors: int, settings: Settings) -> float:
        """See ``RangePolicy``."""
        loss = shared.mean_loss
        if floor := settings["loss_floor"]:
            loss = max(loss, floor * shared.first_loss)
        return loss / max(tensors, 1)

    def factor(self, layers: Sequence[Observed], share: float, step: Step) -> float:
        """Return what gives the formats that come nearest to the target; 1 without one."""
        bits, ebops = step.settings["target_bits"], step.settings["target_ebops"]
        if bits is None and ebops is None:
            return 1.0
        fixed = _lengths_of(step.frozen)

        def excess(power: float) -> float:
            found = fixed + [self._lengths(row, share, 4.0**power) for row in layers]
            return (
                _ebops(found, step.settings) - ebops if bits is None else _mean_bits(found) - bits
            )

        low, high = -_REACH, _REACH  # less noise, more bits; more noise, fewer bits
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if excess(middle) > 0 else (low, middle)
        return 4.0 ** min(low, high, key=lambda power: abs(excess(power)))

    def _lengths(self, row: Observed, share: float, factor: float) -> _Lengths:
        layer, of_weight, of_inputs = row
        own = of_weight.scaled(factor)
        weight, _ = self.next_format(layer.settings, own, share * factor)
        inputs = layer.record.inputs
        if of_inputs is not None:
            own = of_inputs.scaled(factor)
            inputs, _ = self.next_format(layer.settings, own, share * factor)
        return layer.name, weight, inputs

    def update(self, shared: Window, layers: Sequence[Layer], step: Step) -> Update:
        """Add to the window; at its end, change formats.

        Raises:
            ValueError: The loss, the number of samples, or with ``late`` the learning rate, is not
                known; with ``target_ebops``, the multiply-adds of a layer are not.
        """
        if step.loss is None:
            raise ValueError(
                "LossBudgetPolicy needs the loss, got none: write optimizer.step(loss=loss)"
            )
        if layers and not step.samples:
            raise ValueError(
                "LossBudgetPolicy needs the batch's size, got no samples: call "
                "marvin.quantize_activations(model, optimizer) and train in model.train(), leave out "
                "empty batches, or give LossBudgetPolicy(batch_size=...)"
            )
        shared = replace(shared, loss_sum=shared.loss_sum + step.loss, losses=shared.losses + 1)
        if step.settings["late"]:
            if "lr" not in step.settings:
                raise ValueError("late=True needs an optimizer with lr, got one without")
            lr = float(step.settings["lr"])
            shared = replace(shared, lr=lr, highest_lr=max(lr, shared.highest_lr))
        if self.observes(step.number, step.settings) and not shared.was_negative:
            shared = _with_warning(shared, self.share(shared, 1, step.settings))
        if any(layer.inputs for layer in layers) and not shared.was_scaled:
            shared = _with_scaler(shared)
        update = super().update(
            shared, [_with_gradient(layer, shared, step) for layer in layers], step
        )
        if self.observes(step.number, step.settings) and step.number >= step.settings["window"]:
            return replace(update, shared=self._with_target(update, step))
        return update

    def _with_target(self, update: Update, step: Step) -> Window:
        """Say that formats do not meet the target."""
        settings = step.settings
        shared, name = update.shared, "target_bits" if settings["target_bits"] else "target_ebops"
        target = settings[name]
        if target is None or shared.was_missed or _is_early(settings, shared):
            return shared
        found = _lengths_of([*update.layers, *step.frozen])
        met = _mean_bits(found) if name == "target_bits" else _ebops(found, settings)
        if abs(met / target - 1) <= _NEAR:
            return shared
        ends = settings["ends_wl"]
        at_ends = f", and of {ends} in the first and the last layer" if ends else ""
        warn_user(
            f"{name}={target:g} is not met: the nearest formats have {met:g}, with words of "
            f"{settings['min_wl']} to {settings['max_wl']} bits{at_ends}; set another {name}, "
            f"{'ends_wl, ' if ends else ''}min_wl or max_wl"
        )
        return replace(shared, was_missed=True)


@dataclass(frozen=True)
class StaticPolicy(RangePolicy):
    """Words of given lengths, whose ranges follow the data: what other policies must beat.

    Args:
        weights: Word length of weights, 2 to 16 bits.
        activations: Word length of layers' inputs, 2 to 16 bits.
        window: Steps between switches.
        sat_tol: As of ``LossBudgetPolicy``.
        ends_wl: As of ``LossBudgetPolicy``.
        per_channel: As of ``LossBudgetPolicy``.

    Raises:
        ValueError: An argument is out of range.
    """

    weights: int = 6
    activations: int = 6
    _: KW_ONLY
    window: int = 25
    sat_tol: float | None = None
    ends_wl: int | None = None
    per_channel: bool = False

    checks: ClassVar[Checks] = Checks(
        rules=(
            ("weights", lambda s: is_word_length(s["weights"]), "an int, 2 to 16 bits"),
            ("activations", lambda s: is_word_length(s["activations"]), "an int, 2 to 16 bits"),
        )
    )

    def limits(self, settings: Settings, shared: Window) -> tuple[Limits, Limits]:
        """See ``RangePolicy``."""
        weights, activations = settings["weights"], settings["activations"]
        return Limits(weights, weights), Limits(activations, activations)

    def noise(self, settings: Settings, observation: Observation, share: float) -> float | None:
        """See ``RangePolicy``; the limits leave no choice."""
        return 0.0


_TARGETS = Checks(
    rules=(
        (
            "target_bits",
            lambda s: s["target_bits"] is None or s["min_wl"] <= s["target_bits"] <= s["max_wl"],
            "min_wl to max_wl bits",
        ),
    )
)


def _with_warning(shared: Window, share: float) -> Window:
    """Say that a loss below 0 gives no budget."""
    if share >= 0:
        return shared
    warn_user(
        f"the loss budget is a share of the loss, got a mean loss of {shared.mean_loss:g}: words get "
        "max_wl bits where the loss is below 0; set target_bits, or add a constant to the loss that "
        "step(loss=...) gets"
    )
    return replace(shared, was_negative=True)


def _with_scaler(shared: Window) -> Window:
    """Say that gradients of inputs are those of a loss that a scaler has multiplied."""
    scaler = calling_scaler()
    if scaler is None or not scaler.is_enabled() or scaler.get_scale() == 1:
        return shared
    warn_user(
        "the loss budget observes gradients of inputs while a gradient scaler multiplies them: word lengths of "
        "inputs come out too long; use bfloat16 without a scaler, or StaticPolicy"
    )
    return replace(shared, was_scaled=True)


def _with_gradient(layer: Layer, shared: Window, step: Step) -> Layer:
    """Add this step's gradient to the window's, if there is one."""
    record: LayerBudget = layer.record
    old = record.within(shared.begun)
    if layer.norm is not None:
        total = old.weight_sum + step.samples * layer.norm**2
        old = replace(old, weight_sum=total, count=old.count + 1)
    return layer if old is record else layer.but(record=old)


def _lengths_of(layers: Sequence[Layer]) -> list[_Lengths]:
    return [(own.name, own.record.fmt, own.record.inputs) for own in layers]


def _mean_bits(found: Sequence[_Lengths]) -> float:
    """Return the mean of the mean word lengths of weights and of inputs, where there are some."""
    columns = zip(*((weight, inputs) for _, weight, inputs in found), strict=True)
    lengths = [[fmt.wl for fmt in column if fmt is not None] for column in columns]
    means = [sum(own) / len(own) for own in lengths if own]
    return sum(means) / max(len(means), 1)


def _ebops(found: Sequence[_Lengths], settings: Settings) -> int:
    """Return bits of weights times bits of inputs, over multiply-adds."""
    madds = Counter[str]()
    for name, count in settings["madds"]:  # several modules may share a weight
        madds[name] += count
    return sum(_madds_of(madds, name) * w * x for name, w, x in _magnitudes(found))


def _is_early(settings: Settings, shared: Window) -> bool:
    """Say whether ``late`` gives all words ``max_wl`` bits still."""
    return settings["late"] and shared.has_high_rate


def _magnitudes(found: Sequence[_Lengths]) -> Iterator[tuple[str, int, int]]:
    """Yield each layer's bits without signs, of weights and inputs; float32 counts as 32."""
    for name, weight, inputs in found:
        signed = inputs.signed if isinstance(inputs, FixedPoint) else True
        yield name, word_length(weight) - 1, word_length(inputs) - signed


def _madds_of(madds: Mapping[str, int], name: str) -> int:
    if name not in madds:
        raise ValueError(
            f"madds must have every layer with target_ebops, got none of {name}: write "
            f"madds={_PAIRS}"
        )
    return madds[name]


def _is_pair(values: object) -> bool:
    return (
        isinstance(values, (tuple, list))
        and len(values) == 2
        and all(0 < v < math.inf for v in values)
    )


def _is_of_weight(row: object) -> bool:
    if not isinstance(row, (tuple, list)) or len(row) != 2:
        return False
    return isinstance(row[0], str) and row[1] >= 0
