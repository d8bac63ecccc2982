"""Which channels the outputs of a convolution in groups read.

Tiles compute 16 outputs at a time. In groups, these 16 read the channels of their own groups, which
lie side by side; weights between channels and outputs of different groups are 0. So groups of a few
channels are products like others, of fewer channels. Where each output has a channel of its own, 15
of 16 weights would be 0: these products have tiles of their own (``llvm.alone``).
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fixedpoint_kernels.llvm.alone import EXACT

__all__ = ["Spans", "spans"]


class Spans(NamedTuple):
    """The channels that outputs read, 16 outputs at a time."""

    firsts: np.ndarray  # (blocks of 16 outputs,) int64: first channel of each
    channels: (
        int  # that a block reads from there on; what lies behind the last one meets weights of 0
    )
    groups: int
    is_alone: bool  # whether each output has a channel of its own
    rows: int  # of sums for weights, for each tap: a block's channels, up to a multiple of 16; 1 if alone
    starts: (
        np.ndarray
    )  # (outputs,) int64: which of these rows are of an output's own group: the first


@lru_cache(maxsize=256)
def spans(inputs: int, outputs: int, groups: int, taps: int) -> Spans:
    """Return what outputs read; without groups, all channels.

    Args:
        inputs: Channels that come in.
        outputs: Channels that go out.
        groups: That divide both.
        taps: Elements of the kernel.
    """
    blocks, each, wide = np.arange(0, outputs, 16), outputs // groups, inputs // groups
    firsts = (blocks // each * wide).astype(np.int64)
    ends = (np.minimum(blocks + 15, outputs - 1) // each + 1) * wide
    channels = int((ends - firsts).max(initial=1))
    if groups == inputs == outputs > 1 and taps <= EXACT:
        return Spans(firsts, channels, groups, True, 1, np.zeros(outputs, np.int64))
    starts = np.arange(outputs) // each * wide - firsts[np.arange(outputs) // 16]
    rows = -(channels // -16) * 16
    return Spans(firsts, channels, groups, False, rows, starts.astype(np.int64))
