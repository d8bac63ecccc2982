"""Programs of a chain, each made for some formats and some size of batch."""

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

from fixedpoint_kernels.fused.memory import Memory

__all__ = ["Programs"]

_MOST = 4  # that a chain keeps: formats and batches change

_Program = TypeVar("_Program")


class Programs(Generic[_Program]):
    """The programs that were used last, and the memory that they share: one runs at a time."""

    def __init__(self) -> None:
        self._made: dict[Hashable, _Program] = {}
        self._memory = Memory()
        self._lock = Lock()  # threads may come at once

    def get(self, key: Hashable, make: Callable[[Memory], _Program]) -> _Program:
        """Return a program that was kept, or make it; of those kept, the one not used longest goes."""
        with self._lock:
            program = self._made.pop(key, None)
            if program is None:
                program = make(self._memory)
                while len(self._made) >= _MOST:
                    del self._made[next(iter(self._made))]
            self._made[key] = program
            return program
