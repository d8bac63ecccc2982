"""Memory that programs work in, and that forward leaves for backward."""

import weakref
from threading import Lock, local

import numpy as np
import torch
from torch import Tensor

__all__ = ["Memory", "aligned", "bytes_of", "work_memory"]

_LINE = 64
_WORK = local()


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
            memory = np.empty(0, np.uint8)
        if memory.size < size + _LINE:
            memory = np.empty(size + _LINE, np.uint8)
        start = -memory.ctypes.data % _LINE
        lease = memory[start : start + size]
        weakref.finalize(lease, _take_back, self._free, memory).atexit = False
        return torch.from_numpy(lease)


def work_memory(size: int) -> int:
    """Return the address of so many bytes, of any content, in which this thread of Python may work.

    All programs take the same memory: what it holds is lost when another one runs.
    """
    memory = getattr(_WORK, "memory", None)
    if memory is None or memory.size < size + _LINE:
        _WORK.memory = memory = np.empty(size + _LINE, np.uint8)
    return -(memory.ctypes.data // -_LINE) * _LINE


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
    if kept.is_contiguous() and kept.data_ptr() % _LINE == 0:
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
