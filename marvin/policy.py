"""How a layer whose window is full gets its new format: PushDown, then PushUp."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from marvin import push_down, push_up
from marvin.adaptation import LayerState
from marvin.push_up import Level

__all__ = ["switch_format"]


def switch_format(
    state: LayerState,
    master: Tensor,
    settings: Mapping[str, Any],
    level: Level,
    noise: tuple[int, int],
) -> tuple[LayerState, dict[str, Any]]:
    """Choose a layer's format and empty its window.

    Args:
        state: The layer with its full window.
        master: Its float32 weights.
        settings: MSGD's hyper-parameters.
        level: The strategy of this step.
        noise: Seed and stream, for sampled counts.

    Returns:
        The layer after the switch, and the fields of ``Switch`` but for step and layer.
    """
    lowest = _lowest(state, master, settings, noise)
    first, second = push_up.suggestions(state.diversity, lowest.fl, settings["pushup"])
    bits = push_up.choose(first, second, level)
    wl, fl = push_up.push_up(
        lowest.wl,
        lowest.fl,
        bits,
        buffer_bits=settings["buffer_bits"],
        max_wl=settings["max_wl"],
    )
    row = {
        "wl": wl,
        "fl": fl,
        "wl_before": state.fmt.wl,
        "fl_before": state.fmt.fl,
        "wl_min": lowest.wl,
        "fl_min": lowest.fl,
        "kl": lowest.kl,
        "diversity": state.diversity,
        "window": state.count,
        "lookback": state.lookback,
        "resolution": state.resolution,
        "strategy": level,
        "first": first,
        "second": second,
        "bits": bits,
    }
    return LayerState(replace(state.fmt, wl=wl, fl=fl), state.lookback, state.resolution), row


def _lowest(
    state: LayerState, master: Tensor, settings: Mapping[str, Any], noise: tuple[int, int]
) -> push_down.Lowest:
    """Run PushDown; weights that are all equal have no distribution and keep their format."""
    low, high = master.aminmax()
    if not low < high:
        return push_down.Lowest(state.fmt.wl, state.fmt.fl, math.nan)
    upper = state.fmt
    if settings["pushdown_range"] == "full":
        upper = replace(
            upper, wl=settings["max_wl"], fl=settings["max_wl"] - settings["buffer_bits"]
        )
    options = {"smoothing": settings["kl_smoothing"], "direction": settings["kl_direction"]}
    if settings["kl_counts"] == "expected":
        divergence = push_down.expected_divergence(master, state.resolution, **options)
    else:
        seed, stream = noise
        divergence = push_down.sampled_divergence(
            master, state.resolution, seed=seed, stream=stream, **options
        )
    kl_eps = settings["kl_eps"]
    if kl_eps == "noise":
        kl_eps = (state.resolution - 1) / (2 * master.numel())
    return push_down.push_down(divergence, upper, kl_eps=kl_eps, min_fl=settings["min_fl"])
