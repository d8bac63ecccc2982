"""Dropout by Philox noise: which numbers become 0 is the same on every path, for any number of threads."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fixedpoint_kernels.philox import Key, words

__all__ = ["Odds", "keeps"]

_ALL = 2**16


@dataclass(frozen=True)
class Odds:
    """Of 0, in steps of 2**-16.

    Args:
        p: A probability above 0 and below 1; the next step is taken, 0 and 1 left out.
    """

    p: float

    @property
    def threshold(self) -> int:
        """Below this, 16 random bits make a 0."""
        return min(max(round(self.p * _ALL), 1), _ALL - 1)

    @property
    def factor(self) -> float:
        """By which the others are multiplied, so that their mean stays."""
        return _ALL / (_ALL - self.threshold)


def keeps(count: int, odds: Odds, seed: int, stream: int) -> Tensor:
    """Return which of ``count`` numbers stay, bool: the low half of a word of noise decides first, then its high half."""
    found = words(-(count // -2), Key(seed, stream))
    halves = torch.stack([found & (_ALL - 1), found >> 16], 1).flatten()[:count]
    return halves >= odds.threshold
