"""What happened at each switch."""

import math
from dataclasses import dataclass

from marvin.push_up import Level

__all__ = ["Switch"]


@dataclass(frozen=True)
class Switch:
    """One layer's change of format, with everything that led to it.

    What a policy has no use for keeps its default.

    Args:
        step: Optimizer step, from 1.
        layer: Parameter name, or position where it has none.
        wl: Word length chosen, bits.
        fl: Fractional length chosen, bits.
        wl_before: Word length of the window that ended.
        fl_before: Fractional length of the window that ended.
        wl_min: Word length found by PushDown.
        fl_min: Fractional length found by PushDown.
        kl: Divergence at ``<wl_min, fl_min>``, nats; NaN where the weights have no distribution
            and PushDown was left out, infinity where it was too fine to be looked at.
        diversity: Gradient diversity of the window.
        window: Gradients in the window.
        lookback: Lookback at the switch.
        resolution: Bins of the histograms.
        strategy: ``"min"``, ``"mean"`` or ``"max"``.
        first: PushUp's first suggestion, bits.
        second: PushUp's second suggestion, bits.
        bits: What the strategy made of them.
    """

    step: int
    layer: str
    wl: int
    fl: int = 0
    wl_before: int = 0
    fl_before: int = 0
    wl_min: int = 0
    fl_min: int = 0
    kl: float = math.nan
    diversity: float = math.nan
    window: int = 0
    lookback: int = 0
    resolution: int = 0
    strategy: Level = "min"
    first: int = 0
    second: int = 0
    bits: int = 0
