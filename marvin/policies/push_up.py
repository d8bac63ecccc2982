"""PushUp: gradient diversity, and how many bits it asks for. Pure functions."""

import math
from typing import Literal

__all__ = ["Level", "PushUp", "choose", "diversity", "push_up", "suggestions"]

Level = Literal["min", "mean", "max"]
PushUp = Literal["adapt", "marvin"]
_MOST = 32  # bits: the longest word length


def diversity(norm_sum: float, sum_norm: float) -> float:
    """Return the gradient diversity of a window: the sum of norms over the norm of the sum.

    Args:
        norm_sum: Sum of the 2-norms of the window's gradients.
        sum_norm: 2-norm of the sum of the same gradients.

    Returns:
        1 where all point the same way, ``sqrt(n)`` for ``n`` orthogonal unit gradients, infinity
        where they cancel, NaN where all are zero.

    Source:
        MARViN, equation 3. Differs: exactly the window's gradients, where the sum is printed over
        one more.
    """
    if sum_norm > 0:
        return norm_sum / sum_norm
    return math.inf if norm_sum > 0 else math.nan


def suggestions(diversity: float, fl_min: int, variant: PushUp = "adapt") -> tuple[int, int]:
    """Return the smaller-step and larger-step suggestion of bits to add, each 1 to 32.

    With ``u = ln(diversity) - 1``, ``"adapt"`` is ``ceil(1 / u**2)`` and
    ``min(ceil(32 u**2), 32) - fl_min``; ``"marvin"`` is ``ceil(1 / u)`` and
    ``min(ceil(32 ln(diversity)**2 - 1), 32) - fl_min``, as printed. Where the diversity is not
    finite, or is at most e (``"adapt"``) or 1 (``"marvin"``), both suggestions are 1.

    Args:
        diversity: Of the window.
        fl_min: Fractional length found by PushDown.
        variant: Which reading of the paper.

    Source:
        MARViN, section 3.4. Differs: guarded at the poles; ``"adapt"`` is what its authors'
        later public code shows of the intent.
    """
    if not math.isfinite(diversity) or diversity <= 0:
        return 1, 1
    u = math.log(diversity) - 1
    if variant == "adapt":
        if u <= 0:
            return 1, 1
        first, second = 1 / u**2, 32 * u**2
    else:
        if diversity <= 1:
            return 1, 1
        first = 1 / u if u > 0 else 1.0
        second = 32 * math.log(diversity) ** 2 - 1
    return _bits(min(first, _MOST)), _bits(min(math.ceil(second), _MOST) - fl_min)


def push_up(
    wl_min: int, fl_min: int, bits: int, *, buffer_bits: int = 4, max_wl: int = 32
) -> tuple[int, int]:
    """Return the new word length and fractional length: ``bits`` finer, with room above.

    Args:
        wl_min: Word length found by PushDown.
        fl_min: Fractional length found by PushDown.
        bits: How many fractional bits to add, at least 1.
        buffer_bits: Word length minus fractional length is at least this, so that weights and
            activations up to ``2**(buffer_bits - 1)`` fit.
        max_wl: Longest word length.

    Source:
        MARViN, Algorithm 4 and section 3.4. Differs: each line uses the values just updated; as
        printed, the buffer line would discard the raise.
    """
    fl = min(fl_min + bits, max_wl)
    wl = min(max(wl_min, fl) + 1, max_wl)
    fl = min(fl, max_wl - buffer_bits)
    return max(min(fl + buffer_bits, max_wl), wl), fl


def choose(first: int, second: int, level: Level) -> int:
    """Return the smaller, the rounded-up mean or the larger of two suggestions."""
    if level == "mean":
        return -(-(first + second) // 2)
    return min(first, second) if level == "min" else max(first, second)


def _bits(suggestion: float) -> int:
    return min(max(math.ceil(suggestion), 1), _MOST)
