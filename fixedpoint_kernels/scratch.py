"""Memory that kernels write to and nobody reads after them, kept from call to call.

New memory costs more than some products: the system maps and clears its pages, and takes them back.
"""

import numpy as np

__all__ = ["Scratch"]

_MOST = 2**26  # bytes that are kept
_CALLS = 4  # at the same time that find some
_spare: list[np.ndarray] = []


class Scratch:
    """Bytes for the time of a ``with``, at a multiple of 64; they may hold anything.

    Args:
        size: How many.
    """

    def __init__(self, size: int) -> None:
        self._size = size

    def __enter__(self) -> np.ndarray:
        try:
            self._held = _spare.pop()
        except IndexError:
            self._held = np.empty(0, np.uint8)
        if self._held.size < self._size + 64:
            self._held = np.empty(self._size + 64, np.uint8)
        start = -self._held.ctypes.data % 64
        return self._held[start : start + self._size]

    def __exit__(self, *_error: object) -> None:
        if self._held.size <= _MOST and len(_spare) < _CALLS:
            _spare.append(self._held)
        del self._held
