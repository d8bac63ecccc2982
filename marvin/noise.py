"""Which noise stream belongs to what: no two draws of one optimizer share one.

Two optimizers with one seed have the same streams, so each needs a seed of its own.
"""

from enum import IntEnum

__all__ = ["Purpose", "stream"]


class Purpose(IntEnum):
    """What a draw is for."""

    INITIAL = 0  # and what is written between two steps
    WEIGHTS = 1
    GRADIENTS = 2
    PUSH_DOWN = 3
    ACTIVATIONS = 4
    PRODUCTS = 5
    STATES = 6
    QUANTIZER = 7  # and, from index 2**19 on, ``round_state``


NEXT = 1 << 20
"""From a stream to that of the next step."""


def stream(purpose: Purpose, step: int, index: int = 0) -> int:
    """Return the stream of tensor ``index`` (below 2**20) at ``step`` (below 2**40)."""
    return purpose << 60 | step << 20 | index
