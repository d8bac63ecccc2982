"""Learning rates that are functions of the step alone, so that nothing of them need be saved."""

import math

from train.config import Config

__all__ = ["rate"]

RISE, FIRST, LAST = 0.3, 1 / 25, 1 / 250_000  # of one-cycle: share of steps; shares of lr


def rate(config: Config, step: int, steps: int) -> float | None:
    """Return the learning rate of one step; None where validation losses decide.

    ``cosine`` falls from ``lr`` to 0 along half a cosine. ``one-cycle`` rises from a 25th of ``lr``
    in the first 30 % of the steps and then falls to nearly 0, both along half a cosine.

    Args:
        config: Has ``schedule`` and ``lr``.
        step: Number of the step, from 0.
        steps: Of the whole run.

    Source:
        Cosine: Loshchilov and Hutter, SGDR. One-cycle: Smith and Topin, Super-Convergence, with the
        numbers of torch's ``OneCycleLR``; momentum stays.
    """
    if config.schedule == "plateau":
        return None
    if config.schedule == "cosine":
        return config.lr * _between(1.0, 0.0, step / steps)
    peak, last = RISE * steps - 1, steps - 1
    if step <= peak:
        return config.lr * _between(FIRST, 1.0, step / peak)
    return config.lr * _between(1.0, LAST, (step - peak) / (last - peak))


def _between(first: float, last: float, share: float) -> float:
    return last + (first - last) * (1 + math.cos(math.pi * share)) / 2
