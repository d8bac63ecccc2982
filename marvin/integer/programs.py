"""Programs of a chain, each made for some formats and some size of batch."""

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, Protocol, TypeVar

from fixedpoint_kernels.fused.memory import Memory

__all__ = ["Programs"]

_FEW, _MOST = 4, 64  # that a chain keeps: formats, batches and texts' lengths change
_MOST_BYTES = 2**26  # of those above the few


class _Sized(Protocol):
    held_bytes: int


_Program = TypeVar("_Program", bound=_Sized)


class Programs(Generic[_Program]):
    """The programs that were used last, and the memory that they share: one runs at a time."""

    def __init__(self) -> None:
        self._made: dict[Hashable, _Program] = {}
        self._memory = Memory()
        self._bytes = 0
        self._lock = Lock()  # threads may come at once

    def get(self, key: Hashable, make: Callable[[Memory], _Program]) -> _Program:
        """Return a program that was kept, or make it; of those kept, the one not used longest goes."""
        with self._lock:
            program = self._made.pop(key, None)
            if program is None:
                program = make(self._memory)
                self._bytes += program.held_bytes
                while len(self._made) >= (_FEW if self._bytes > _MOST_BYTES else _MOST):
                    self._bytes -= self._made.pop(next(iter(self._made))).held_bytes
            self._made[key] = program
            return program
