"""CPU kernels with and without threads, and when to use which."""

import multiprocessing
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch

_PARALLEL_FROM = 50_000  # elements; below, a parallel region costs more than it saves


def is_parallel(elements: int) -> bool:
    """Say whether a kernel over ``elements`` should run in parallel.

    A forked child (a ``DataLoader`` worker) must not: GNU OpenMP kills it there.
    """
    parallel = (
        elements >= _PARALLEL_FROM
        and torch.get_num_threads() > 1
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


def compile_both(kernel: FunctionType) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Compile a kernel of ``prange`` loops twice with Numba: serial and parallel.

    Each gets a name of its own. Numba keys its cache by a function's name and line, not by
    ``parallel``: under one name, both would be whichever was compiled first.
    """
    from numba import njit  # takes half a second to import

    serial, parallel = _renamed(kernel, "serial"), _renamed(kernel, "parallel")
    return njit(cache=True)(serial), njit(parallel=True, cache=True)(parallel)


def _renamed(function: FunctionType, suffix: str) -> FunctionType:
    name = f"{function.__name__}_{suffix}"
    copy = FunctionType(function.__code__, function.__globals__, name)
    copy.__qualname__ = name
    return copy
