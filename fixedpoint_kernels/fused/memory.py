"""Memory that programs work in, and that forward leaves for backward."""

import weakref
from threading import Lock

import numpy as np
import torch
from torch import Tensor

__all__ = ["Memory", "aligned"]

_LINE = 64


class Memory:
    """Memory of programs that run one after the other, as formats and sizes of batches change.

    New memory costs as much time as the layers that fill it: the system clears each page.

    Attributes:
        lock: To be held while a program runs.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self._free: list[np.ndarray] = []
        self._work = np.empty(0, np.uint8)

    def lend(self, size: int) -> Tensor:
        """Return a tensor of so many uint8, of any content, whose memory comes back when nobody holds it.

        Its address is a multiple of 64.
        """
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(0, np.uint8)
        if memory.size < size + _LINE:
            memory = np.empty(size + _LINE, np.uint8)
        start = -memory.ctypes.data % _LINE
        lease = memory[start : start + size]
        weakref.finalize(lease, _take_back, self._free, memory).atexit = False
        return torch.from_numpy(lease)

    def work(self, size: int) -> int:
        """Return the address of so many bytes, of any content, for whoever holds the lock."""
        if self._work.size < size + _LINE:
            self._work = np.empty(size + _LINE, np.uint8)
        return -(self._work.ctypes.data // -_LINE) * _LINE


def aligned(kept: Tensor) -> Tensor:
    """Return what was lent, at a multiple of 64 again: hooks on saved tensors give back copies."""
    if kept.data_ptr() % _LINE == 0:
        return kept
    return Memory().lend(len(kept)).copy_(kept)


def _take_back(free: list[np.ndarray], memory: np.ndarray) -> None:
    if not free:  # one is enough for a step after the other
        free.append(memory)
    elif free[0].size < memory.size:
        free[0] = memory
