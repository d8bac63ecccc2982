"""The paper's policy: windows of gradients, PushDown and PushUp, and the strategy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fixedpoint_kernels import FixedPoint
from marvin.compact import add_to_tensors
from marvin.noise import Purpose, stream
from marvin.policies import push_down, push_up
from marvin.policies.adaptation import LayerState, LookbackRounding, adapt_strategy, observe
from marvin.policies.base import Policy
from marvin.policies.push_up import Level
from marvin.policies.records import Layer, Measured, PlainRecord, Rules, Step, Update
from marvin.policies.trace import Switch
from marvin.settings import MARVIN, Settings, check_settings
from marvin.shards import Spread, spread
from marvin.warned import warn_user

__all__ = ["Losses", "MarvinPolicy"]


@dataclass(frozen=True)
class Losses(PlainRecord):
    """What is common to all layers.

    Args:
        level: Where the adaptive strategy stands.
        losses: Of the last steps, oldest first, as many as the longest lookback.
    """

    level: Level = "min"
    losses: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MarvinPolicy(Policy):
    """Each layer's format from its weights' distribution and its gradients' diversity.

    A layer's window collects gradients; their diversity adapts the window's length (lookback) and
    the histograms' resolution. Where the window is full, PushDown finds the smallest format that
    keeps the distribution of the master, PushUp raises it by what the diversity and the strategy
    ask for, and the window starts anew. See ``marvin.MSGD`` for the arguments.

    Raises:
        TypeError: A setting that must be a number is not one.
        ValueError: An argument is out of range.
        FloatingPointError: In ``step``, at the end of a window: a layer's weights are not finite.

    Source:
        MARViN, Algorithms 1 to 4.
    """

    init_wl: int = 8
    init_fl: int = 4
    max_wl: int = 32
    min_fl: int = 4
    buffer_bits: int = 4
    resolution: tuple[int, int] = (50, 150)
    lookback: tuple[int, int] = (25, 100)
    lookback_momentum: float = 0.9
    lookback_rounding: LookbackRounding = "ceil"
    strategy: Literal["adaptive"] | Level = "adaptive"
    strategy_loss: Literal["last", "short"] = "last"
    strategy_margin: float = 0.0
    kl_eps: float | Literal["noise"] = 0.01
    kl_smoothing: float = 0.5
    kl_direction: push_down.Direction = "pq"
    kl_counts: Literal["expected", "sampled"] = "expected"
    pushdown_range: Literal["current", "full"] = "current"
    pushup: push_up.PushUp = "adapt"
    symmetric: bool = False

    rules = Rules(tensors=("grad_sum",), common=("strategy_loss", "strategy_margin"))

    def __post_init__(self) -> None:
        self.check(self.settings())

    def check(self, settings: Settings) -> None:
        """See ``Policy``."""
        check_settings(settings, MARVIN)

    def init_shared(self) -> Losses:
        """See ``Policy``."""
        return Losses()

    def init(self, settings: Settings, shared: Losses) -> LayerState:
        """See ``Policy``."""
        fmt = FixedPoint(settings["init_wl"], settings["init_fl"], settings["symmetric"])
        return LayerState(fmt, settings["lookback"][0], settings["resolution"][0])

    def measure(
        self, shared: Losses, tensors: Sequence[Mapping[str, Tensor]], grads: Sequence[Tensor]
    ) -> Measured:
        """Add the gradients to their windows, and take the norms of the sums."""
        if not tensors:
            return Measured()
        sums, norms = add_to_tensors(tensors, "grad_sum", grads)
        return Measured({"grad_sum": sums}, norms)

    def update(self, shared: Losses, layers: Sequence[Layer], step: Step) -> Update:
        """Adapt the strategy, then each layer; full windows switch.

        Raises:
            FloatingPointError: A weight of a layer that switches is not finite.
        """
        shared = self._adapted(shared, layers, step)
        after = [_observed(layer) for layer in layers]
        due = [i for i, layer in enumerate(after) if layer.norm is not None and layer.record.is_due]
        masters = spread([after[i].master for i in due], [after[i].shard for i in due])
        rows = []
        for i, master in zip(due, masters, strict=True):
            if not (master.low > -math.inf and master.high < math.inf):
                raise FloatingPointError(
                    f"weights must be finite, got {after[i].name} from {master.low} to "
                    f"{master.high} in step {step.number}"
                )
            after[i], row = self._switched(shared.level, after[i], master, step)
            rows.append(row)
        return Update(shared, after, rows)

    def _adapted(self, shared: Losses, layers: Sequence[Layer], step: Step) -> Losses:
        """Compare the loss with the mean over the last steps, as many as the mean lookback.

        Source:
            MARViN, section 3.3.
        """
        settings, loss, losses = step.settings, step.loss, shared.losses
        if loss is None:
            if step.number == 1 and settings["strategy"] == "adaptive":
                message = "the adaptive strategy needs step(loss=loss); it stays at 'min'"
                warn_user(message)
            return shared
        current = loss
        if settings["strategy_loss"] == "short":
            short = min((own.settings["lookback"][0] for own in (*layers, *step.frozen)), default=1)
            recent = [*losses, loss][-short:]
            current = math.fsum(recent) / len(recent)
        lookbacks = [layer.record.lookback for layer in layers]
        window = max(sum(lookbacks) // max(len(lookbacks), 1), 1)
        margin = settings["strategy_margin"]
        level = adapt_strategy(shared.level, losses, current, window, margin=margin)
        longest = [layer.settings["lookback"][1] for layer in (*layers, *step.frozen)]
        return Losses(level, (*losses, loss)[-max([window, *longest]) :])

    def _switched(
        self, level: Level, layer: Layer, master: Spread, step: Step
    ) -> tuple[Layer, Switch]:
        """Choose a layer's format, and empty its window."""
        settings, record = layer.settings, layer.record
        if settings["strategy"] != "adaptive":
            level = settings["strategy"]
        key = step.seed, stream(Purpose.PUSH_DOWN, step.number, layer.index)
        lowest = _lowest(record, master, settings, key)
        first, second = push_up.suggestions(record.diversity, lowest.fl, settings["pushup"])
        bits = push_up.choose(first, second, level)
        limits = {name: settings[name] for name in ("buffer_bits", "max_wl")}
        wl, fl = push_up.push_up(lowest.wl, lowest.fl, bits, **limits)
        row = Switch(
            step=step.number,
            layer=layer.name,
            wl=wl,
            fl=fl,
            wl_before=record.fmt.wl,
            fl_before=record.fmt.fl,
            wl_min=lowest.wl,
            fl_min=lowest.fl,
            kl=lowest.kl,
            diversity=record.diversity,
            window=record.count,
            lookback=record.lookback,
            resolution=record.resolution,
            strategy=level,
            first=first,
            second=second,
            bits=bits,
        )
        fmt = replace(record.fmt, wl=wl, fl=fl)
        emptied = LayerState(fmt, record.lookback, record.resolution)
        window = {"grad_sum": torch.zeros_like(layer.tensors["grad_sum"])}
        return layer.but(record=emptied, tensors=window), row


def _observed(layer: Layer) -> Layer:
    """Take a layer's gradient into its window, if it has one."""
    if layer.norm is None or layer.measured is None:
        return layer
    norm = layer.norm
    if layer.settings["normalize_gradients"]:
        norm = float(norm > 0)
    return layer.but(record=observe(layer.record, norm, layer.measured, layer.settings))


def _lowest(
    record: LayerState, master: Spread, settings: Settings, key: tuple[int, int]
) -> push_down.Lowest:
    """Run PushDown; weights that are all equal have no distribution and keep their format."""
    if not master.low < master.high:
        return push_down.Lowest(record.fmt.wl, record.fmt.fl, math.nan)
    upper = record.fmt
    if settings["pushdown_range"] == "full":
        upper = replace(
            upper, wl=settings["max_wl"], fl=settings["max_wl"] - settings["buffer_bits"]
        )
    options = {"smoothing": settings["kl_smoothing"], "direction": settings["kl_direction"]}
    if settings["kl_counts"] == "expected":
        divergence = push_down.expected_divergence(master, record.resolution, **options)
    else:
        seed, stream = key
        divergence = push_down.sampled_divergence(
            master, record.resolution, seed=seed, stream=stream, **options
        )
    kl_eps = settings["kl_eps"]
    if kl_eps == "noise":
        kl_eps = (record.resolution - 1) / (2 * master.shard.numel)
    return push_down.push_down(divergence, upper, kl_eps=kl_eps, min_fl=settings["min_fl"])
