"""What is common to all layers: the step, the strategy and the losses it looks back on."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marvin.adaptation import adapt_strategy
from marvin.push_up import Level

__all__ = ["Progress"]


@dataclass
class Progress:
    """The common part of MSGD's state.

    Args:
        step: Steps done.
        level: Where the adaptive strategy stands.
        losses: Of the last steps, oldest first, as many as the longest lookback.
        skipped: Steps left out because something was not finite.
        forwards: Activations rounded in training so far; numbers their noise.
    """

    step: int = 0
    level: Level = "min"
    losses: list[float] = field(default_factory=list)
    skipped: int = 0
    forwards: int = 0

    def add_loss(self, loss: float, lookbacks: Sequence[int], settings: Mapping[str, Any]) -> None:
        """Adapt the strategy to the loss of a step.

        Args:
            loss: With the L1 penalty.
            lookbacks: Of all layers.
            settings: MSGD's hyper-parameters.

        Source:
            MARViN, section 3.6: the average is over the mean lookback.
        """
        current = loss
        if settings["strategy_loss"] == "short":
            recent = [*self.losses, loss][-settings["lookback"][0] :]
            current = math.fsum(recent) / len(recent)
        window = max(sum(lookbacks) // max(len(lookbacks), 1), 1)
        margin = settings["strategy_margin"]
        self.level = adapt_strategy(self.level, self.losses, current, window, margin=margin)
        self.losses = [*self.losses, loss][-max(settings["lookback"][1], window) :]
