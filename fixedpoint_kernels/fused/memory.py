"""Memory that forward leaves for backward."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from fixedpoint_kernels.scratch import LINE, Scratch, new_bytes

__all__ = ["Memory", "aligned", "bytes_of", "room"]


class Memory:
    """What programs keep for backward that run one after the other, as formats and sizes of batches change.

    New memory costs as much time as the layers that fill it: the system clears each page.

    Attributes:
        lock: To be held while a program runs.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self._free: list[np.ndarray] = []

    def lend(self, size: int) -> Tensor:
        """Return a tensor of so many uint8, of any content, whose memory comes back when nobody holds it.

        Its address is a multiple of 64.
        """
        try:
            memory = self._free.pop()
        except IndexError:
            memory = new_bytes(0)
        if memory.size < size:
            memory = new_bytes(size)
        lease = memory[:size]
        weakref.finalize(lease, _take_back, self._free, memory).atexit = False
        return torch.from_numpy(lease)


@contextmanager
def room(sizes: Mapping[int, int]) -> Iterator[dict[int, Tensor]]:
    """Yield float32 tensors of so many elements that nobody reads later, at multiples of 64 bytes, by number."""
    if not sizes:
        yield {}
        return
    whole = [-(size * 4 // -LINE) * LINE // 4 for size in sizes.values()]
    with Scratch(4 * sum(whole)) as (memory, _):
        parts = torch.from_numpy(memory).view(torch.float32).split(whole)
        yield {i: own[:size] for (i, size), own in zip(sizes.items(), parts, strict=True)}


def aligned(kept: Tensor, size: int) -> Tensor:
    """Return what was lent, at a multiple of 64 again: hooks on saved tensors give back copies.

    Args:
        kept: As they gave it back.
        size: Of what was lent.

    Raises:
        ValueError: It is not so many uint8 on a CPU.
    """
    if kept.shape != (size,) or kept.dtype is not torch.uint8 or not kept.is_cpu:
        raise ValueError(
            f"hooks on saved tensors must give back what they got, uint8 of shape ({size},), got "
            f"{kept.dtype} of shape {tuple(kept.shape)} on {kept.device}"
        )
    if kept.is_contiguous() and kept.data_ptr() % LINE == 0:
        return kept
    return Memory().lend(len(kept)).copy_(kept)


def bytes_of(held: object) -> int:
    """Return how many bytes arrays have, also those in tuples and lists."""
    if isinstance(held, np.ndarray):
        return held.nbytes
    return sum(map(bytes_of, held)) if isinstance(held, tuple | list) else 0


def _take_back(free: list[np.ndarray], memory: np.ndarray) -> None:
    if not free:  # one is enough for a step after the other
        free.append(memory)
    elif free[0].size < memory.size:
        free[0] = memory
