"""What happened at each switch."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from marvin.policies.push_up import Level

__all__ = ["Switch", "merged"]

_CHOSEN = "wl", "fl", "input_wl", "input_fl", "input_signed"


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
        input_wl: Word length chosen for the layer's inputs, bits; 0 where it is the weight's.
        input_fl: Fractional length chosen for them, bits.
        input_signed: Whether that format has a sign.
        has_float_inputs: Whether ``input_wl`` is 0 and the layer's inputs stay float32. The
            optimizer says so.
        saturated: Share of inputs that were clamped, of those that are not 0.
        weight_gradient: Squared norm of a sample's gradient to the weight.
        input_gradient: Squared norm of a sample's gradient to the inputs.
        note: What kept a format from changing, or changed it before its time.
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
    input_wl: int = 0
    input_fl: int = 0
    input_signed: bool = True
    saturated: float = math.nan
    weight_gradient: float = math.nan
    input_gradient: float = math.nan
    note: str = ""
    has_float_inputs: bool = False


def merged(rows: Iterable[Switch]) -> list[Switch]:
    """Return one row a layer of those of one step: the formats of its last, and what led to its first."""
    found: dict[str, Switch] = {}
    for row in rows:
        if (first := found.get(row.layer)) is not None:
            formats = {name: getattr(row, name) for name in _CHOSEN}
            notes = "; ".join(filter(None, (first.note, row.note)))
            found[row.layer] = replace(first, **formats, note=notes)
        else:
            found[row.layer] = row
    return list(found.values())
