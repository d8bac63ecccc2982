"""Which channels the outputs of a convolution in groups read.

Tiles compute 16 outputs at a time. In groups, these 16 read the channels of their own groups, which
lie side by side; weights between channels and outputs of different groups are 0. So groups of one
channel, as of groups of a hundred, are products like others, of fewer channels.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

__all__ = ["Spans", "spans"]


class Spans(NamedTuple):
    """The channels that outputs read, 16 outputs at a time."""

    firsts: np.ndarray  # (blocks of 16 outputs,) int64: first channel of each
    channels: int  # that a block reads from there on; what lies behind the last one meets weights of 0
    groups: int


@lru_cache(maxsize=256)
def spans(inputs: int, outputs: int, groups: int) -> Spans:
    """Return what outputs read; without groups, all channels.

    Args:
        inputs: Channels that come in.
        outputs: Channels that go out.
        groups: That divide both.
    """
    blocks = np.arange(0, outputs, 16)
    each, wide = outputs // groups, inputs // groups
    firsts = blocks // each * wide
    ends = (np.minimum(blocks + 15, outputs - 1) // each + 1) * wide
    return Spans(firsts.astype(np.int64), int((ends - firsts).max(initial=1)), groups)
