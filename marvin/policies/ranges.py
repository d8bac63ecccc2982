"""From what was measured of a tensor to its fixed-point format: pure functions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fixedpoint_kernels import FixedPoint
from fixedpoint_kernels.formats import LONGEST_FL

__all__ = ["SAT_TOL", "Limits", "Range", "budget_noise", "headroom", "integer_bits_of"]
__all__ += ["next_integer_bits", "next_largest"]

SAT_TOL = 1e-3
"""Share of inputs that may saturate in words without headroom, where the user does not say."""


def headroom(wl: int) -> int:
    """Return how many integer bits words have beyond the largest input: 1 from 12 bits on, 2 with 16.

    There a value that is clamped costs more than the rounding of all others. In shorter words, which have
    none, rounding costs more.
    """
    return max(wl // 4 - 2, 0)


@dataclass(frozen=True)
class Range:
    """What was measured of one tensor.

    Args:
        signed: Whether a value was below 0.
        integer_bits: Fewest bits before the binary point, without the sign, that hold all values
            but those the tolerance lets saturate; None where all are 0 or some are not finite.
        power: Mean square.
        saturated: Share of values that the format before clamped, of those that are not 0.
        channels: ``integer_bits`` of each channel, where they have fractional lengths of their own.
        clipping: Mean square of what clipping takes away with 1, 2, ... integer bits fewer than
            ``integer_bits``, as far as that may be.
        rounded: Share of values that rounding can change: those that are not 0.
        largest: ``integer_bits`` that hold all values, for words with headroom; None where these have
            those of the others, and no headroom.
    """

    signed: bool
    integer_bits: int | None
    power: float
    saturated: float = 0.0
    channels: tuple[int | None, ...] = ()
    clipping: tuple[float, ...] = ()
    rounded: float = 1.0
    largest: int | None = None

    @property
    def noise_share(self) -> float:
        """Power of rounding noise, over that with one fractional length for all channels."""
        bits = self.integer_bits
        spare = [0 if n is None or bits is None else bits - n for n in self.channels]
        return sum(4.0**-n for n in spare) / len(spare) if spare else 1.0


@dataclass(frozen=True)
class Limits:
    """What a tensor's format must keep to.

    Args:
        min_wl: Shortest word length, sign included where there is one.
        max_wl: Longest word length.
        max_noise: Largest power of noise, over the tensor's own; at ``max_wl`` it may be more.
    """

    min_wl: int
    max_wl: int
    max_noise: float = math.inf

    def format(
        self,
        signed: bool,
        integer_bits: int,
        noise: float,
        clipping: Sequence[float] = (),
        largest: int | None = None,
    ) -> FixedPoint:
        """Return the shortest format whose noise is allowed, or the longest there is.

        Steps of ``h`` make noise of power ``h**2 / 12``. Each word length takes the number of
        integer bits with the least noise.

        Args:
            signed: Whether there is a sign.
            integer_bits: Moved to the nearest number for which ``FixedPoint`` has a fractional
                length at every word length.
            noise: Largest noise, mean square.
            clipping: Noise that 1, 2, ... integer bits fewer add.
            largest: See ``Range``.
        """
        fewest, limit = self.max_wl - LONGEST_FL, self.min_wl - 1 + LONGEST_FL

        def with_least_noise(wl: int) -> tuple[float, int]:
            wanted, spare = integer_bits, headroom(wl)
            if largest is not None and spare:
                wanted = largest + spare
            most = min(max(wanted, fewest), limit)
            lengths = [(most - i, power) for i, power in enumerate((0.0, *clipping))]
            fls = [(wl - signed - n, power) for n, power in lengths if n >= fewest]
            return min((power + 4.0**-fl / 12, fl) for fl, power in fls)

        for wl in range(self.min_wl, self.max_wl):
            power, fl = with_least_noise(wl)
            if power <= noise:
                return FixedPoint(wl, fl, signed=signed)
        return FixedPoint(self.max_wl, with_least_noise(self.max_wl)[1], signed=signed)


def integer_bits_of(counts: Sequence[int], tolerance: float) -> int | None:
    """Return the integer bits of the ``1 - tolerance`` quantile of magnitudes.

    Args:
        counts: How many values have which magnitude, see ``fixedpoint_kernels.observer``.
        tolerance: Share of those that are not 0 that may be larger.

    Returns:
        ``ceil(log2(q))``, where ``q`` is the smallest value such that at most the tolerated share
        lies above; None where all are 0, or some values are not finite.
    """
    if counts[-1] or counts[-2]:
        return None
    left = math.floor(tolerance * sum(counts[1:]))
    for place in range(len(counts) - 1, 0, -1):
        left -= counts[place]
        if left < 0:
            return place - 127
    return None


def next_integer_bits(
    before: FixedPoint, clamping: int | None, measured: Range, tolerance: float
) -> tuple[int, int | None]:
    """Return the next number of integer bits of activations, and the next ``clamping``.

    It follows the data up at once. It goes down by single bits, or to two above what is needed, and up by one
    where more than twice the tolerated share was clamped though the quantile fits (values within half a step of
    the end are clamped too, and so is the power of two itself). It does not go down to that number
    again before the data need fewer. A format with headroom tells nothing of those without.

    Args:
        before: Format until now.
        clamping: The number of integer bits that clamped too many; None where there is none, or the
            data have needed fewer since.
        measured: Where the data are.
        tolerance: Share of values that may saturate, of those that are not 0.
    """
    needed = measured.integer_bits
    assert needed is not None
    if clamping is not None and needed < clamping:
        clamping = None
    if needed == clamping:
        needed += 1
    if measured.largest is not None and headroom(before.wl):
        return needed, clamping
    if needed > before.il:
        return needed, clamping
    if measured.saturated > 2 * tolerance:
        lacked_sign = measured.signed and not before.signed
        return before.il + 1, clamping if lacked_sign else before.il
    return max(needed, min(before.il - 1, needed + 2)), clamping


def next_largest(before: FixedPoint, needed: int) -> int:
    """Return the next number of integer bits, without headroom, of words that have it.

    It goes up and down as ``next_integer_bits`` has it. Within the headroom nothing is clamped.

    Args:
        before: Format until now.
        needed: Integer bits that hold all values.
    """
    spare = headroom(before.wl)
    if not spare or needed > before.il - spare:
        return needed
    return max(needed, min(before.il - spare - 1, needed + 2))


def budget_noise(budget: float, gradient: float) -> float | None:
    """Return the power of rounding noise that costs ``budget``, about.

    Noise of power ``p`` in each element of a tensor costs about ``gradient / 2 * p`` of loss.

    Args:
        budget: Loss that this tensor's rounding may cost.
        gradient: Squared 2-norm of the loss's gradient to the tensor, mean over the samples.

    Returns:
        None where one of the two is not positive and finite.
    """
    if not (0 < budget < math.inf and 0 < gradient < math.inf):
        return None
    return 2 * budget / gradient
