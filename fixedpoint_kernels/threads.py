"""CPU kernels with and without threads, when to use which, and where they are kept compiled."""

import multiprocessing
import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

_PARALLEL_FROM = 50_000  # elements; below, a parallel region costs more than it saves
_is_forked = False
_has_warned = False


def is_parallel(elements: int) -> bool:
    """Say whether a kernel over ``elements`` should run in parallel.

    A forked child (a ``DataLoader`` worker, ``os.fork``) must not: GNU OpenMP kills it there.
    """
    parallel = (
        elements >= _PARALLEL_FROM
        and torch.get_num_threads() > 1
        and not _is_forked
        and multiprocessing.parent_process() is None
    )
    if parallel:
        _start()
    return parallel


def thread_count() -> int:
    """Return how many threads a parallel kernel has."""
    from numba import get_num_threads  # takes half a second to import

    _start()
    return get_num_threads()


@cache
def _start() -> None:
    """Start Numba's threads. Theirs may be torch's OpenMP, whose number of threads they set."""
    from numba import get_num_threads

    own = torch.get_num_threads()
    get_num_threads()  # starts them
    if torch.get_num_threads() != own:
        torch.set_num_threads(own)


def _note_fork() -> None:
    global _is_forked
    _is_forked = True


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_note_fork)


def compiled(**options: Any) -> Callable[[FunctionType], Any]:
    """Compile a function with Numba, and keep it on disk where there is a place for it.

    Without one (a package, home and cache that are read-only, a full disk), it is compiled in each
    process, and a warning says how to give it a place.

    Args:
        options: Of ``numba.njit``.
    """
    from numba import njit  # takes half a second to import

    return lambda function: kept(njit(**options)(function), function)


def kept(kernel: Any, function: FunctionType) -> Any:
    """Return what Numba makes of a function; once it is compiled, that is kept on disk."""
    try:
        kernel._cache = _cache_class()(function)
    except RuntimeError as error:  # no directory can be written to
        _warn(error)
    return kernel


@cache
def _cache_class() -> Any:
    """Return Numba's cache, but one that gives up where the disk refuses."""
    from numba.core.caching import FunctionCache

    class Cache(FunctionCache):
        def __init__(self, function: object) -> None:
            super().__init__(function)
            # Numba looks at the function's own file; kernels are made of others too
            self._cache_file._source_stamp = _stamp()

        def load_overload(self, sig: object, target_context: object) -> Any:
            return self._tried(super().load_overload, sig, target_context)

        def save_overload(self, sig: object, data: object) -> None:
            self._tried(super().save_overload, sig, data)

        def _tried(self, access: Callable[..., Any], *arguments: object) -> Any:
            try:
                return access(*arguments)
            except OSError as error:
                self.disable()
                _warn(error)
                return None

    return Cache


@cache
def _stamp() -> tuple[Any, ...]:
    """Return what changes when a file of this package does."""
    folder = Path(__file__).parent
    found = [(path.name, path.stat()) for path in sorted(folder.rglob("*.py"))]
    return tuple((name, own.st_mtime, own.st_size) for name, own in found)


def _warn(error: Exception) -> None:
    """Warn, once in a process."""
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(
            "compiled CPU kernels cannot be kept on disk, so each process takes seconds to compile "
            f"them: set NUMBA_CACHE_DIR to a directory that can be written to ({error})",
            RuntimeWarning,
            stacklevel=2,
        )


def compile_both(kernel: FunctionType) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Compile a kernel of ``prange`` loops twice with Numba: serial and parallel.

    Each gets a name of its own. Numba keys its cache by a function's name and line, not by
    ``parallel``: under one name, both would be whichever was compiled first.
    """
    serial, parallel = _renamed(kernel, "serial"), _renamed(kernel, "parallel")
    return compiled()(serial), compiled(parallel=True)(parallel)


def _renamed(function: FunctionType, suffix: str) -> FunctionType:
    name = f"{function.__name__}_{suffix}"
    copy = FunctionType(function.__code__, function.__globals__, name)
    copy.__qualname__ = name
    return copy
