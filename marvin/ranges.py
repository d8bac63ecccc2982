"""From what was measured of a tensor to its fixed-point format: pure functions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fixedpoint_kernels import FixedPoint

__all__ = ["Limits", "Range", "budget_fl", "integer_length", "need", "start_fl"]

_LONGEST_FL = 31
_START_NOISE = 0.01  # of the signal's power


@dataclass(frozen=True)
class Range:
    """What was measured of one tensor.

    Args:
        signed: Whether a value was below 0.
        need: Smallest integer length, without the sign, that holds all values but those the
            tolerance lets saturate; None where all are 0 or some are not finite.
        power: Mean square.
        saturated: Share of values that the format before clamped.
        channels: ``need`` of each channel, where they have points of their own.
    """

    signed: bool
    need: int | None
    power: float
    saturated: float = 0.0
    channels: tuple[int | None, ...] = ()

    @property
    def noise_share(self) -> float:
        """Power of rounding noise, over what it would be without points of the channels' own."""
        spare = [0 if n is None or self.need is None else self.need - n for n in self.channels]
        return sum(4.0**-bits for bits in spare) / len(spare) if spare else 1.0


@dataclass(frozen=True)
class Limits:
    """Shortest and longest word, in bits, sign included where there is one."""

    min_wl: int
    max_wl: int

    def format(self, signed: bool, il: int, fl: int) -> FixedPoint:
        """Return the format of ``il`` integer bits whose ``fl`` is the nearest to the one given.

        An integer length for which ``FixedPoint`` has no fractional length at every word length
        is moved to the nearest for which it has.
        """
        il = min(max(il, self.max_wl - _LONGEST_FL), self.min_wl - 1 + _LONGEST_FL)
        wl = min(max(signed + il + fl, self.min_wl), self.max_wl)
        return FixedPoint(wl, wl - signed - il, signed=signed)


def need(counts: Sequence[int], tolerance: float) -> int | None:
    """Return the integer length of the ``1 - tolerance`` quantile of magnitudes.

    Args:
        counts: How many values have which magnitude, see ``fixedpoint_kernels.survey``.
        tolerance: Share of values that may be larger.

    Returns:
        ``ceil(log2(q))``, where ``q`` is the smallest value such that at most the tolerated share
        lies above; None where that is 0, or some values are not finite.
    """
    if counts[-1] or counts[-2]:
        return None
    left = math.floor(tolerance * sum(counts))
    for place in range(len(counts) - 1, 0, -1):
        left -= counts[place]
        if left < 0:
            return place - 127
    return None


def integer_length(before: int, seen: Range, tolerance: float) -> int:
    """Return the next integer length of activations, which follows the data up at once.

    It goes down by single bits, and up by one where more than twice the tolerated share was
    clamped though the quantile fits (values within half a step of the end are clamped too).
    """
    assert seen.need is not None
    if seen.need > before:
        return seen.need
    if seen.saturated > 2 * tolerance:
        return before + 1
    return before - 1 if seen.need < before else before


def budget_fl(budget: float, gradient: float) -> int | None:
    """Return the smallest fractional length whose rounding noise costs at most ``budget``.

    Noise of power ``h**2 / 12`` in each element costs about ``gradient / 2 * h**2 / 12`` of loss.

    Args:
        budget: Loss that this tensor's rounding may cost.
        gradient: Squared 2-norm of the loss's gradient to the tensor, mean over the samples.

    Returns:
        ``ceil(-log2(h))``; None where one of the two is not positive and finite.
    """
    if not (0 < budget < math.inf and 0 < gradient < math.inf):
        return None
    return math.ceil((math.log2(gradient) - math.log2(24 * budget)) / 2)


def start_fl(power: float) -> int:
    """Return the smallest fractional length whose noise has at most 1 % of the signal's power."""
    return math.ceil(-math.log2(12 * _START_NOISE * power) / 2)
