"""Policies for integer hardware: word lengths from a loss budget, or given; ranges from data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from marvin.policies.range_policy import (
    LayerBudget,
    Observation,
    RangePolicy,
    Window,
    is_word_length,
)
from marvin.policies.ranges import Limits, budget_noise
from marvin.policies.records import Layer, Step, Update
from marvin.settings import Checks, Settings

__all__ = ["LossBudgetPolicy", "StaticPolicy"]


@dataclass(frozen=True)
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
        sat_tol: Share of a layer's inputs that may saturate.
        min_wl: Shortest word length.
        max_wl: Longest word length.
        ends_wl: Word length of the first and the last layer, in parameter order; None: as of the
            others.
        per_channel: Weights have a fractional length for each entry of their first dimension: channels
            use the integer bits that they do not need as fractional ones.
        batch_size: Samples of a step, in each process. None: the first dimension of what the first layer sees,
            summed over a step's forward passes; needs ``marvin.quantize_activations``.

    Raises:
        ValueError: An argument is out of range; in ``step``, loss or batch size is not known.
    """

    kappa: float = 0.01
    max_noise: tuple[float, float] = (0.01, 0.001)
    window: int = 25
    sat_tol: float = 1e-3
    min_wl: int = 4
    max_wl: int = 8
    ends_wl: int | None = None
    per_channel: bool = False
    batch_size: int | None = None

    checks: ClassVar[Checks] = Checks(
        rules=(
            ("kappa", lambda s: 0 < s["kappa"] < math.inf, "above 0"),
            ("max_noise", lambda s: _is_pair(s["max_noise"]), "two numbers above 0"),
            ("max_wl", lambda s: is_word_length(s["max_wl"]), "2 to 16 bits"),
            ("min_wl", lambda s: 2 <= s["min_wl"] <= s["max_wl"], "2 bits to max_wl"),
            (
                "batch_size",
                lambda s: s["batch_size"] is None or s["batch_size"] >= 1,
                "1 or more",
            ),
        )
    )

    def samples(self, settings: Settings, counted: int) -> int:
        """See ``Policy``."""
        return settings["batch_size"] or counted

    def limits(self, settings: Settings) -> tuple[Limits, Limits]:
        """See ``RangePolicy``."""
        lengths = settings["min_wl"], settings["max_wl"]
        weights, inputs = settings["max_noise"]
        return Limits(*lengths, weights), Limits(*lengths, inputs)

    def noise(self, settings: Settings, observation: Observation, share: float) -> float | None:
        """See ``RangePolicy``; after the first step there is no window, and no budget."""
        if observation.before is None:
            return math.inf
        return budget_noise(settings["kappa"] * share, observation.gradient or 0.0)

    def update(self, shared: Window, layers: Sequence[Layer], step: Step) -> Update:
        """Add to the window; at its end, change formats.

        Raises:
            ValueError: The loss or the number of samples is not known.
        """
        if step.loss is None or not step.samples:
            raise ValueError(
                "LossBudgetPolicy needs step(loss=loss), and batch_size or quantize_activations "
                f"to know the batch, got loss={step.loss} and {step.samples} samples"
            )
        shared = Window(shared.loss_sum + step.loss, shared.losses + 1)
        return super().update(shared, [_with_gradient(layer, step) for layer in layers], step)


@dataclass(frozen=True)
class StaticPolicy(RangePolicy):
    """Words of given lengths, whose ranges follow the data: what other policies must beat.

    Args:
        weights: Word length of weights, bits.
        activations: Word length of layers' inputs, bits.
        window: Steps between switches.
        sat_tol: Share of a layer's inputs that may saturate.
        ends_wl: As of ``LossBudgetPolicy``.
        per_channel: As of ``LossBudgetPolicy``.

    Raises:
        ValueError: An argument is out of range.
    """

    weights: int = 6
    activations: int = 6
    window: int = 25
    sat_tol: float = 1e-3
    ends_wl: int | None = None
    per_channel: bool = False

    checks: ClassVar[Checks] = Checks(
        rules=(
            ("weights", lambda s: is_word_length(s["weights"]), "2 to 16 bits"),
            ("activations", lambda s: is_word_length(s["activations"]), "2 to 16 bits"),
        )
    )

    def limits(self, settings: Settings) -> tuple[Limits, Limits]:
        """See ``RangePolicy``."""
        weights, activations = settings["weights"], settings["activations"]
        return Limits(weights, weights), Limits(activations, activations)

    def noise(self, settings: Settings, observation: Observation, share: float) -> float | None:
        """See ``RangePolicy``; the limits leave no choice."""
        return 0.0


def _with_gradient(layer: Layer, step: Step) -> Layer:
    """Add this step's gradient to the window's, if there is one."""
    if layer.norm is None:
        return layer
    old: LayerBudget = layer.record
    total = old.weight_sum + step.samples * layer.norm**2
    return layer.but(
        record=LayerBudget(old.fmt, old.inputs, total, old.count + 1, old.input_gradient)
    )


def _is_pair(values: object) -> bool:
    return isinstance(values, (tuple, list)) and len(values) == 2 and all(v > 0 for v in values)
