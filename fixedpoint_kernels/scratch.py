"""Memory at multiples of 64, and such as kernels work in and nobody reads after them.

New memory costs more than some products: the system maps and clears its pages, and takes them back. So
what kernels work in is kept from call to call.
"""

from collections.abc import Callable

import numpy as np

__all__ = ["LINE", "Scratch", "new_bytes"]

LINE = 64
"""Bytes of a line of the cache."""

_MOST = 2**28  # bytes that are kept, in all


def new_bytes(size: int, make: Callable[..., np.ndarray] = np.empty) -> np.ndarray:
    """Return so many uint8 whose address is a multiple of 64; ``make`` may be ``numpy.zeros``."""
    whole = make(size + LINE, np.uint8)
    start = -whole.ctypes.data % LINE
    return whole[start : start + size]


_NOTHING = new_bytes(0), 0
_spare: list[tuple[np.ndarray, int]] = []


class Scratch:
    """Memory for the time of a ``with``: (bytes,) uint8, and its address, a multiple of 64.

    It may hold anything. Calls of many Python threads, or one within another, have their own.

    Args:
        size: Bytes.
    """

    def __init__(self, size: int) -> None:
        self._size = size

    def __enter__(self) -> tuple[np.ndarray, int]:
        try:
            self._held = _spare.pop()
        except IndexError:
            self._held = _NOTHING
        if self._held[0].size < self._size:
            memory = new_bytes(self._size)
            self._held = memory, memory.ctypes.data
        memory, address = self._held
        return memory[: self._size], address

    def __exit__(self, *_error: object) -> None:
        kept = sum(memory.size for memory, _ in _spare)
        if kept + self._held[0].size <= _MOST:
            _spare.append(self._held)
        del self._held
