"""The speedup of a run so far, brought up to date at every step."""

from collections.abc import Sequence

from perfmodel.cost import FLOAT_BITS, Overhead, Weight, pushdown_ops, pushup_ops, weights_of
from perfmodel.layers import Layer
from perfmodel.trace import Segment, SwitchLike, Trace

__all__ = ["Meter"]


class Meter:
    """Adds up equation 8 switch by switch; ``speedup`` gives what ``cost.speedup`` would.

    Args:
        layers: Of the model.
        samples: Of one optimiser step: batch size times accumulation steps.
        start: A trace without switches: word length to begin with, lookback and resolution.
        overhead: How the search for formats is charged.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        samples: int,
        start: Trace,
        overhead: Overhead = "paper",
    ):
        self._rows = {
            w.name: _Row(w, samples, start, overhead) for w in weights_of(layers) if w.name
        }
        loose = sum(row.madds for row in layers if not row.weight)
        self._loose_madds = loose
        self._loose_cost = loose * samples * 2 * FLOAT_BITS
        self._float32_cost = sum(row.madds for row in layers) * samples * 2 * FLOAT_BITS
        self._seen = 0

    def speedup(self, switches: Sequence[SwitchLike], steps: int) -> float:
        """Return SU of the first ``steps`` steps, modelled.

        Args:
            switches: All so far; those seen in earlier calls are not looked at again.
            steps: Optimiser steps done, at least those of the last switch.

        Raises:
            ValueError: A switch is of a layer that the model has not.
        """
        for switch in switches[self._seen :]:
            if switch.layer not in self._rows:
                raise ValueError(f"the model must have every layer, got {switch.layer}")
            self._rows[switch.layer].switch(switch)
        self._seen = len(switches)
        cost = steps * self._loose_cost + sum(row.cost(steps) for row in self._rows.values())
        return steps * self._float32_cost / cost if cost else 1.0

    def ebops(self) -> int:
        """Return what ``cost.ebops`` would, of the formats after the switches seen so far."""
        loose = self._loose_madds * Segment(FLOAT_BITS, 0, 1, FLOAT_BITS).ebops
        return loose + sum(row.ebops for row in self._rows.values())


class _Row:
    """One layer: what its closed windows cost, and what a step of the open one does."""

    def __init__(self, weight: Weight, samples: int, start: Trace, overhead: Overhead):
        self._madds, self._once = weight.madds * samples, weight.madds
        self._search = pushdown_ops(weight.elements, start.resolution[1], overhead)
        self._search += pushup_ops(weight.elements, start.lookback[1], overhead)
        self._closed, self._since = 0.0, 0
        self._start, self._last = start, start.segments(weight.name)[-1]

    def switch(self, switch: SwitchLike) -> None:
        self._closed += self._steps_cost(
            switch.step - self._since, self._start.spread(switch.lookback)
        )
        self._since = switch.step
        self._last = self._start.segment_after(switch)

    @property
    def ebops(self) -> int:
        return self._once * self._last.ebops

    def cost(self, steps: int) -> float:
        return self._closed + self._steps_cost(steps - self._since, self._last.lookback)

    def _steps_cost(self, steps: int, lookback: float) -> float:
        once = self._madds * (self._last.product_wl + FLOAT_BITS)
        once += FLOAT_BITS * self._search / lookback
        return steps * once
