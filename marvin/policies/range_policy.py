"""What policies share that measure the ranges of weights and activations."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fixedpoint_kernels import FixedPoint
from marvin.channels import ChannelFormat, channel_format, scale_of
from marvin.policies.base import Policy
from marvin.policies.observer import weight_ranges
from marvin.policies.ranges import (
    SAT_TOL,
    Limits,
    Range,
    integer_bits_of,
    next_integer_bits,
    next_largest,
)
from marvin.policies.records import (
    ActivationFormats,
    Layer,
    PlainRecord,
    Rules,
    Step,
    Update,
    fractional_length,
    word_length,
)
from marvin.policies.trace import Switch
from marvin.ranks import Processes
from marvin.settings import Checks, Settings, check_settings
from marvin.shards import spread
from marvin.warned import listed, warn_user

__all__ = ["LayerBudget", "Observation", "Observed", "RangePolicy", "TensorFormat", "Window"]
__all__ += ["is_count", "is_word_length"]

TensorFormat = FixedPoint | ChannelFormat
_LOOKS = 25  # a weight is looked at again before one that grows steadily has grown by a twelfth
_GROWN = "weight: it grew beyond its format"
_UNSEEN = "inputs: not observed"
_POSITIVE = 4  # switches without an input below 0 that end a sign
_MISSED = 8  # observed steps in a row without a layer: one that runs by chance is rarely named
_CLAMPED = 0.25  # a share of clamped inputs that is named
_EARLY = 1, 2, 5, 12  # formats change at the end of these steps too: weights move fast then


@dataclass(frozen=True)
class LayerBudget(PlainRecord):
    """What is remembered of one layer.

    Args:
        fmt: Format of the weight; None before the first step.
        inputs: Format of the layer's inputs; None before the first step.
        weight_sum: Sum over the window of samples times squared norm of the weight's gradient.
        count: Gradients in the window.
        window: Which one: step at whose end it began. A layer that is frozen at a switch stays behind.
        input_gradient: Running mean of the squared norm of a sample's gradient to the inputs.
        first: Step at whose end the weight got its first format; 0 before.
        clamping: Integer bits of inputs that clamped too many; None where there are none, or the
            inputs have needed fewer since.
        positive: Switches in a row that saw no input below 0, while the format has a sign.
        unseen: Switches in a row whose step did not run the layer, though others showed their inputs.
    """

    fmt: TensorFormat | None = None
    inputs: TensorFormat | None = None
    weight_sum: float = 0.0
    count: int = 0
    input_gradient: float | None = None
    window: int = 0
    first: int = 0
    clamping: int | None = None
    positive: int = 0
    unseen: int = 0

    def is_watched(self, step: int) -> bool:
        """Say whether a step looks if the weight has grown beyond its format: often at first, then more rarely."""
        steps = step - self.first + 1
        return self.fmt is not None and steps % max(steps // _LOOKS, 1) == 0

    def within(self, window: int) -> "LayerBudget":
        """Return it without gradients of windows before ``window``."""
        if self.window == window:
            return self
        return replace(self, weight_sum=0.0, count=0, window=window)


@dataclass(frozen=True)
class Window(PlainRecord):
    """What is common to all layers.

    Args:
        loss_sum: Sum of the window's losses.
        losses: How many there were.
        first_loss: Mean loss of the first window of several steps; 0 before.
        lr: Learning rate of the first group, where the policy asks for it.
        highest_lr: Highest of these so far.
        was_negative: Whether the mean loss of a window was below 0; a warning has said so.
        was_missed: Whether formats did not meet a target; a warning has said so.
        was_scaled: Whether a gradient scaler did a step; a warning has said so.
        was_unseen: Whether layers did not run in observed steps; a warning has said so.
        was_clamped: Whether much of the first layer's inputs was clamped at a switch; a warning has said so.
        begun: Step at whose end the window began.
    """

    loss_sum: float = 0.0
    losses: int = 0
    first_loss: float = 0.0
    lr: float = 0.0
    highest_lr: float = 0.0
    was_negative: bool = False
    was_missed: bool = False
    was_scaled: bool = False
    was_unseen: bool = False
    was_clamped: bool = False
    begun: int = 0

    @property
    def mean_loss(self) -> float:
        """Mean loss of the window; 0 where it has none."""
        return self.loss_sum / self.losses if self.losses else 0.0

    @property
    def has_high_rate(self) -> bool:
        """Whether the learning rate is above half of its highest so far, or that is not known."""
        has_begun = self.highest_lr > 0  # a warm-up may begin at 0
        return not (has_begun and self.lr <= self.highest_lr / 2)

    def emptied(self, step: int) -> "Window":
        """Return the next window, which begins at the end of ``step``."""
        first = self.first_loss or (self.mean_loss if self.losses > 1 else 0.0)
        return replace(self, loss_sum=0.0, losses=0, first_loss=first, begun=step)


@dataclass(frozen=True)
class Observation:
    """What is known of one tensor at a switch.

    Args:
        before: Its format until now.
        range: Where its values are; the integer bits are those that the next format is to have.
        gradient: Squared norm of a sample's gradient to it; None where none came.
        limits: What its format must keep to.
        clamping: See ``LayerBudget``.
        positive: See ``LayerBudget``.
    """

    before: TensorFormat | None
    range: Range
    gradient: float | None
    limits: Limits
    clamping: int | None = None
    positive: int = 0

    def scaled(self, factor: float) -> "Observation":
        """Return it with other limits of noise."""
        limits = replace(self.limits, max_noise=self.limits.max_noise * factor)
        return replace(self, limits=limits)


Observed = tuple[Layer, Observation, Observation | None]  # a layer, its weight, its inputs


class RangePolicy(Policy):
    """What ``LossBudgetPolicy`` and ``StaticPolicy`` share: measured ranges.

    They differ in the noise that they allow. The first step is in float32. At its end, at that of steps 2, 5 and 12, and of every
    ``window``-th step all layers switch. Weights that grow beyond their formats reach further at once, with the
    same word length. Weights and inputs of layers are rounded to nearest,
    outputs are left to the layer that takes them; biases and normalisation stay float32.

    Raises:
        TypeError: A setting that must be a number is not one.
        ValueError: A setting is out of range.
    """

    rules = Rules(
        weight_rounding="nearest",
        activation_rounding="nearest",
        quantizes_norms=False,
        quantizes_pools=False,
        one_dim="float",
        observes_inputs=True,
        common=("window",),
    )
    checks: ClassVar[Checks] = Checks(
        choices={"per_channel": (False, True)},
        rules=(
            ("window", lambda s: is_count(s["window"]), "a whole number of steps from 1 on"),
            (
                "sat_tol",
                lambda s: s["sat_tol"] is None or 0 <= s["sat_tol"] < 1,
                "0 or more and below 1",
            ),
            (
                "ends_wl",
                lambda s: s["ends_wl"] is None or is_word_length(s["ends_wl"]),
                "an int, 2 to 16 bits",
            ),
        ),
    )

    def __post_init__(self) -> None:
        self.check(self.settings())

    @abstractmethod
    def limits(self, settings: Settings, shared: Window) -> tuple[Limits, Limits]:
        """Return what the formats of a layer's weights and of its inputs must keep to."""

    @abstractmethod
    def noise(self, settings: Settings, observation: Observation, share: float) -> float | None:
        """Return the noise, mean square, that is allowed beside the limits; None to keep the format.

        Args:
            settings: Of the layer's group.
            observation: What is known of the tensor.
            share: Mean loss of the window, divided by the number of tensors.
        """

    def share(self, shared: Window, tensors: int, settings: Settings) -> float:
        """Return the loss that the budget follows, divided by the number of tensors."""
        return shared.mean_loss / max(tensors, 1)

    def factor(self, layers: Sequence[Observed], share: float, step: Step) -> float:
        """Return by what all noise that is allowed is multiplied."""
        return 1.0

    def check(self, settings: Settings) -> None:
        """See ``Policy``."""
        check_settings(settings, RangePolicy.checks)
        check_settings(settings, self.checks)

    def init_shared(self) -> Window:
        """See ``Policy``."""
        return Window()

    def init(self, settings: Settings, shared: Window) -> LayerBudget:
        """See ``Policy``."""
        return LayerBudget()

    def activation_formats(self, record: LayerBudget) -> ActivationFormats:
        """See ``Policy``."""
        return ActivationFormats(inputs=record.inputs)

    def observes(self, step: int, settings: Settings) -> bool:
        """See ``Policy``."""
        return step in _EARLY or step % settings["window"] == 0

    def update(self, shared: Window, layers: Sequence[Layer], step: Step) -> Update:
        """Change formats at the end of a window."""
        if not self.observes(step.number, step.settings):
            return Update(shared, layers)
        masters, shards = [layer.master for layer in layers], [layer.shard for layer in layers]
        wanted = [layer.settings["per_channel"] for layer in layers]
        weights = zip(
            weight_ranges(masters, shards, wanted), _gradients(layers, step.processes), strict=True
        )
        observed: list[Observed] = []
        places = [layer.index for layer in (*layers, *step.frozen)]
        for layer, (measured, gradient) in zip(layers, weights, strict=True):
            limits = self.limits(layer.settings, shared)
            is_end = layer.index in (min(places), max(places))
            if is_end and (wl := layer.settings["ends_wl"]) is not None:
                limits = Limits(wl, wl), Limits(wl, wl)
            of_weight = Observation(layer.record.fmt, measured, gradient, limits[0])
            observed.append((layer, of_weight, _observed_inputs(layer, limits[1])))
        share = self.share(shared, 2 * len(places), step.settings)
        factor = self.factor(observed, share, step)
        after, rows = [], []
        shows = any(of_inputs for *_, of_inputs in observed)
        for layer, of_weight, of_inputs in observed:
            own = of_weight.scaled(factor), of_inputs and of_inputs.scaled(factor)
            record, row = self._switched(layer, own, share * factor, step.number)
            if shows and of_inputs is None:
                record = replace(record, unseen=layer.record.unseen + 1)
                row = replace(row, note="; ".join(filter(None, (row.note, _UNSEEN))))
            after.append(layer.but(record=record))
            rows.append(row)
        first = [row for own, row in zip(layers, rows, strict=True) if own.index == min(places)]
        shared = _with_clamped(_with_unseen(shared, after), first, step)
        return Update(shared.emptied(step.number), after, rows)

    def after_move(self, shared: Window, layers: Sequence[Layer], step: Step) -> Update | None:
        """Let weights that have grown beyond their formats reach further, with the same word lengths."""
        watched = [layer for layer in layers if layer.record.is_watched(step.number)]
        if not watched:
            return None
        fmts: list[TensorFormat] = [layer.record.fmt for layer in watched]
        masters, shards = [layer.master for layer in watched], [layer.shard for layer in watched]
        sizes = [
            x * scale_of(fmt, x, shard.offset) if isinstance(fmt, ChannelFormat) else x
            for x, fmt, shard in zip(masters, fmts, shards, strict=True)
        ]
        largest = [max(-one.low, one.high) for one in spread(sizes, shards)]
        grown = [
            i for i, fmt in enumerate(fmts) if 2.0 ** (fmt.wl - 1 - fmt.fl) < largest[i] < math.inf
        ]
        ranges = weight_ranges(
            [masters[i] for i in grown],
            [shards[i] for i in grown],
            [isinstance(fmts[i], ChannelFormat) for i in grown],
        )
        after, rows = [], []
        wider = {
            watched[i].index: _wider(fmts[i], measured)
            for i, measured in zip(grown, ranges, strict=True)
        }
        for layer in layers:
            record: LayerBudget = layer.record
            new = replace(record, fmt=wider.get(layer.index, record.fmt))
            if new != record:
                rows.append(replace(_row(layer, new, step.number), note=_GROWN))
            after.append(layer if new == record else layer.but(record=new))
        return Update(shared, after, rows) if rows else None

    def _switched(
        self,
        layer: Layer,
        observations: tuple[Observation, Observation | None],
        share: float,
        step: int,
    ) -> tuple[LayerBudget, Switch]:
        """Give a layer its formats, and begin a window."""
        record: LayerBudget = layer.record
        of_weight, of_inputs = observations
        fmt, note = self.next_format(layer.settings, of_weight, share)
        notes, inputs, mean = [f"weight: {note}"] if note else [], record.inputs, None
        clamping, positive = record.clamping, record.positive
        if of_inputs is not None:
            inputs, note = self.next_format(layer.settings, of_inputs, share)
            notes += [f"inputs: {note}"] if note else []
            mean = of_inputs.gradient
            clamping, positive = of_inputs.clamping, of_inputs.positive
        if mean is None or not math.isfinite(mean):
            mean = record.input_gradient
        first = record.first or (0 if fmt is None else step)
        own = {"clamping": clamping, "positive": positive}
        after = LayerBudget(fmt, inputs, input_gradient=mean, window=step, first=first, **own)
        row = replace(
            _row(layer, after, step),
            saturated=0.0 if of_inputs is None else of_inputs.range.saturated,
            weight_gradient=math.nan if of_weight.gradient is None else of_weight.gradient,
            input_gradient=math.nan if mean is None else mean,
            note="; ".join(notes),
        )
        return after, row

    def next_format(
        self, settings: Settings, observation: Observation, share: float
    ) -> tuple[TensorFormat | None, str]:
        """Return a tensor's next format, and why it is the one before where it had to stay."""
        measured, before = observation.range, observation.before
        if (integer_bits := measured.integer_bits) is None:
            return before, "all 0, or not finite"
        if (noise := self.noise(settings, observation, share)) is None:
            return before, "loss or gradient 0, or not finite"
        noise = min(noise, observation.limits.max_noise * measured.power) / measured.noise_share
        if settings.get("free_zeros"):
            noise /= max(measured.rounded, 1e-3)
        fmt = observation.limits.format(
            measured.signed, integer_bits, noise, measured.clipping, measured.largest
        )
        return (channel_format(fmt, measured.channels) if measured.channels else fmt), ""


def _row(layer: Layer, after: LayerBudget, step: int) -> Switch:
    """Return what the trace says of a layer's formats."""
    record: LayerBudget = layer.record
    before, fmt, inputs = record.fmt, after.fmt, after.inputs
    return Switch(
        step=step,
        layer=layer.name,
        wl=word_length(fmt),
        fl=fractional_length(fmt),
        wl_before=word_length(before),
        fl_before=fractional_length(before),
        window=record.count,
        input_wl=word_length(inputs),
        input_fl=fractional_length(inputs),
        input_signed=inputs.signed if isinstance(inputs, FixedPoint) else True,
    )


def _wider(fmt: TensorFormat, measured: Range) -> TensorFormat:
    """Return a format of the same word length that reaches what was measured, as far as it pays; ``fmt`` where it does."""
    assert measured.integer_bits is not None
    limits = Limits(fmt.wl, fmt.wl)
    if isinstance(fmt, ChannelFormat):
        known = [fmt.channel(i).il for i in range(len(fmt.shifts))]
        found = [
            old if new is None else max(old, new)
            for old, new in zip(known, measured.channels, strict=True)
        ]
        return channel_format(limits.format(True, max(found), 0.0), found)
    wider = limits.format(True, measured.integer_bits, 0.0, measured.clipping)
    return wider if wider.fl < fmt.fl else fmt


def _gradients(layers: Sequence[Layer], processes: Processes) -> list[float | None]:
    """Return squared norms of a sample's gradient to the weights, means over the window."""
    records: list[LayerBudget] = [layer.record for layer in layers]
    device = layers[0].master.device if layers else None
    sums = processes.sums([record.weight_sum for record in records], device)
    return [total / r.count if r.count else None for total, r in zip(sums, records, strict=True)]


def _observed_inputs(layer: Layer, limits: Limits) -> Observation | None:
    """Return what is known of a layer's inputs; None where they were not observed.

    Their sign and their integer bits follow from the format before, too.
    """
    if layer.inputs is None:
        return None
    record: LayerBudget = layer.record
    before, clamping, given = record.inputs, record.clamping, layer.settings["sat_tol"]
    tolerance = SAT_TOL if given is None else given
    largest = integer_bits_of(layer.inputs.counts, 0.0) if given is None else None
    measured = replace(layer.inputs.range(tolerance), largest=largest)
    positive, gradient, new = record.positive, record.input_gradient, layer.inputs.gradient
    if measured.integer_bits is None:  # all 0, or not finite: nothing is learnt
        return Observation(before, measured, gradient, limits, clamping, positive)
    if isinstance(before, FixedPoint):
        positive = positive + 1 if before.signed and not measured.signed else 0
        bits, clamping = next_integer_bits(before, clamping, measured, tolerance)
        largest = None if largest is None else next_largest(before, largest)
        signed = measured.signed or 0 < positive < _POSITIVE
        measured = replace(measured, integer_bits=bits, signed=signed, largest=largest)
    if new is not None:
        gradient = new if gradient is None else (gradient + new) / 2
    return Observation(before, measured, gradient, limits, clamping, positive)


def _with_unseen(shared: Window, layers: Sequence[Layer]) -> Window:
    """Say that layers do not run in the steps that are observed."""
    names = [layer.name for layer in layers if layer.record.unseen == _MISSED]
    if shared.was_unseen or not names:
        return shared
    warn_user(
        f"layers must run in observed steps to get formats of inputs, got {_MISSED} in a row without "
        f"{listed(names)}: they keep the format that they have, or float32; set another window, one "
        "that has no factor in common with how often they run (26 in place of 25)"
    )
    return replace(shared, was_unseen=True)


def _with_clamped(shared: Window, rows: Sequence[Switch], step: Step) -> Window:
    """Say that data grew beyond their format, which follows them at switches alone.

    Args:
        shared: What is common to all layers.
        rows: Of the layer that takes the data; others' inputs may grow as weights do.
        step: The one that ends.
    """
    names = [row.layer for row in rows if row.saturated > _CLAMPED]
    if shared.was_clamped or not names or step.number <= _EARLY[-1]:
        return shared
    warn_user(
        "data must stay within their format between switches, got more than a quarter of the inputs of "
        f"{listed(names)} clamped in step {step.number}: formats follow at the end of each {step.settings['window']}. "
        "step, as its batch has it; set a smaller window, scale data alike in all steps, or take larger batches"
    )
    return replace(shared, was_clamped=True)


def is_count(value: float) -> bool:
    """Say whether ``value`` is a whole number from 1 on."""
    return value >= 1 and value % 1 == 0


def is_word_length(value: Any) -> bool:
    """Say whether ``value`` is one of the word lengths that these policies choose from."""
    return isinstance(value, int) and 2 <= value <= 16
