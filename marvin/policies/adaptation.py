"""What a layer remembers between switches, and how lookback, resolution and strategy adapt.

Pure functions: a frozen record in, a frozen record out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fixedpoint_kernels import FixedPoint
from marvin.policies.push_up import Level, diversity
from marvin.policies.records import PlainRecord
from marvin.settings import Settings

__all__ = ["LayerState", "adapt_lookback", "adapt_resolution", "adapt_strategy", "observe"]

LookbackRounding = Literal["ceil", "nearest"]
_TOLERANCE = 1e-9  # 0.33 * 100 + 0.67 * 100 is not exactly 100


@dataclass(frozen=True)
class LayerState(PlainRecord):
    """The adaptive part of one layer.

    Args:
        fmt: Its format.
        lookback: Gradients in a full window, optimizer steps.
        resolution: Bins of the histograms.
        count: Gradients in the window so far.
        norm_sum: Sum of their 2-norms.
        diversity: Of the window so far; NaN while it is empty.
    """

    fmt: FixedPoint
    lookback: int
    resolution: int
    count: int = 0
    norm_sum: float = 0.0
    diversity: float = math.nan

    @property
    def is_due(self) -> bool:
        """Whether the window is full, so that the format is chosen anew."""
        return self.count >= self.lookback


def observe(state: LayerState, norm: float, sum_norm: float, settings: Settings) -> LayerState:
    """Take one gradient into the window, and adapt lookback and resolution to its diversity.

    Args:
        state: Before the gradient.
        norm: 2-norm of the gradient.
        sum_norm: 2-norm of the sum of the window's gradients, this one included.
        settings: MSGD's ``lookback``, ``lookback_momentum``, ``lookback_rounding`` and
            ``resolution``.

    Source:
        MARViN, Algorithm 2, line 4.
    """
    norm_sum = state.norm_sum + norm
    spread = diversity(norm_sum, sum_norm)
    bounds = settings["lookback"]
    lookback = adapt_lookback(
        state.lookback,
        spread,
        bounds,
        momentum=settings["lookback_momentum"],
        rounding=settings["lookback_rounding"],
    )
    resolution = adapt_resolution(state.resolution, lookback, bounds, settings["resolution"])
    return LayerState(state.fmt, lookback, resolution, state.count + 1, norm_sum, spread)


def adapt_lookback(
    lookback: int,
    diversity: float,
    bounds: tuple[int, int],
    *,
    momentum: float = 0.9,
    rounding: LookbackRounding = "ceil",
) -> int:
    """Return the next lookback: short windows where gradients differ, long where they agree.

    ``new = ceil(upper / diversity)`` within ``bounds`` (``upper`` where the diversity is not
    above 0), then ``momentum * new + (1 - momentum) * lookback``, rounded, within ``bounds``.

    Source:
        MARViN, section 3.3. Differs: the rounding has a tolerance of 1e-9. ``"ceil"`` as printed
        never comes down to the lower bound; ``"nearest"`` does.
    """
    lower, upper = bounds
    new = upper
    if diversity > 0:
        new = max(math.ceil(min(upper / diversity, upper) - _TOLERANCE), lower)
    mixed = momentum * new + (1 - momentum) * lookback
    rounded = math.ceil(mixed - _TOLERANCE) if rounding == "ceil" else math.floor(mixed + 0.5)
    return min(max(rounded, lower), upper)


def adapt_resolution(
    resolution: int, lookback: int, lookbacks: tuple[int, int], bounds: tuple[int, int]
) -> int:
    """Return the next resolution: one more at the longest lookback, one less at the shortest.

    Source:
        MARViN, section 3.3. Differs: between the bounds of the lookback, which the paper leaves
        out, it stays.
    """
    lower, upper = lookbacks
    step = (lookback == upper) - (lookback == lower)
    return min(max(resolution + step, bounds[0]), bounds[1])


def adapt_strategy(
    strategy: Level, losses: Sequence[float], loss: float, lookback: int, *, margin: float = 0.0
) -> Level:
    """Return the next strategy: back to ``"min"`` while the loss falls, one level up otherwise.

    Args:
        strategy: The current one.
        losses: Losses of the steps before, oldest first.
        loss: Of this step.
        lookback: How many of ``losses`` to average; with fewer, the strategy stays.
        margin: Go up only from ``margin`` times the average's size above it on.

    Source:
        MARViN, section 3.3. Differs: both branches compare the current loss; losses keep their
        signs; ``"max"`` stays.
    """
    if len(losses) < lookback:
        return strategy
    average = math.fsum(losses[-lookback:]) / lookback
    if average > loss:
        return "min"
    if loss < (1 + math.copysign(margin, average)) * average:
        return strategy
    return "max" if strategy in ("mean", "max") else "mean"
