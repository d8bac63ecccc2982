"""CPU kernels with and without threads, when to use which, and where they are kept compiled."""

import hashlib
import logging
import multiprocessing
import os
import pickle
import sys
import uuid
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import current_thread, main_thread
from types import FunctionType
from typing import Any, NamedTuple

import torch

_DIGEST_BYTES = hashlib.sha256().digest_size
_PARALLEL_FROM = 50_000  # elements; below, a parallel region costs more than it saves
_is_forked = False
_has_warned = False
_LOGGER = logging.getLogger("fixedpoint_kernels")


def is_parallel(elements: int) -> bool:
    """Say whether a kernel over ``elements`` should run in parallel.

    A forked child (a ``DataLoader`` worker, ``os.fork``) must not: GNU OpenMP kills it there. One that
    ``multiprocessing`` spawned is a process like any other. Nor may any but the main thread of Python, where
    Numba found no OpenMP: its own threads end the process when two of Python's meet there.
    """
    wanted = (
        elements >= _PARALLEL_FROM
        and torch.get_num_threads() > 1
        and not _is_forked
        and (multiprocessing.parent_process() is None or "--multiprocessing-fork" in sys.orig_argv)
    )
    return wanted and (_start() != "workqueue" or current_thread() is main_thread())


def thread_count() -> int:
    """Return how many threads a parallel kernel has."""
    from numba import get_num_threads  # takes half a second to import

    _start()
    return get_num_threads()


@cache
def _start() -> str:
    """Start Numba's threads, and return of which kind they are: ``"omp"``, ``"tbb"`` or ``"workqueue"``.

    Theirs may be torch's OpenMP, whose number of threads they set.
    """
    from numba import get_num_threads, threading_layer

    own = torch.get_num_threads()
    get_num_threads()  # starts them
    if torch.get_num_threads() != own:
        torch.set_num_threads(own)
    return threading_layer()


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

    from fixedpoint_kernels.llvm.compiler import Compiler

    own = njit(pipeline_class=Compiler, **options)
    return lambda function: kept(own(function), function)


def kept(kernel: Any, function: FunctionType) -> Any:
    """Return what Numba makes of a function; once it is compiled, that is kept on disk."""
    try:
        kernel._cache = _cache_class()(function)
    except RuntimeError as error:  # no directory can be written to
        _warn(error)
    return kernel


@cache
def _cache_class() -> Any:
    """Return Numba's cache, with files of our own, and one that gives up where the disk refuses."""
    from numba.core.caching import FunctionCache

    class Impl(FunctionCache._impl_class):
        _locator_classes = [  # noqa: RUF012  as Numba declares it
            place
            for place in FunctionCache._impl_class._locator_classes
            if _has_home() or "UserWide" not in place.__name__
        ]

    class Cache(FunctionCache):
        _impl_class = Impl

        def __init__(self, function: object) -> None:
            super().__init__(function)
            self._cache_file = _Files(Path(self._cache_path), self._impl.filename_base)

        def load_overload(self, sig: object, target_context: object) -> Any:
            found = self._tried(super().load_overload, sig, target_context)
            if found is None:
                _tell()
            return found

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


def _has_home() -> bool:
    """Say whether the user has a folder for caches; without one, Numba makes a folder named ``~``."""
    try:
        return "XDG_CACHE_HOME" in os.environ or bool(Path.home())
    except RuntimeError:  # HOME is not set, and the user has no name
        return False


class _Files(NamedTuple):
    """What is kept of a kernel: one file for each key, which says what it holds.

    Numba's own are an index and the files that it names. They disagree where two processes write at
    once, or one ends between the two: then a kernel runs that was made of other types, for another
    processor, or of older code.
    """

    folder: Path
    base: str

    def load(self, key: object) -> Any:
        """Return what was saved with a key; None if nothing was, or if it is not that any more."""
        try:
            found = self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        digest, data = found[:_DIGEST_BYTES], found[_DIGEST_BYTES:]
        return pickle.loads(data) if digest == _digest(key, data) else None

    def save(self, key: object, data: object) -> None:
        """Write a file whole or not at all."""
        from numba.core.serialize import dumps

        path, dumped = self._path(key), dumps(data)
        beside = path.with_name(f"{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
        try:
            beside.write_bytes(_digest(key, dumped) + dumped)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)

    def _path(self, key: object) -> Path:
        name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        return self.folder / f"{self.base}.{name}.nbc"


def _digest(key: object, data: bytes) -> bytes:
    return hashlib.sha256(repr((_stamp(), key)).encode() + data).digest()


@cache
def _stamp() -> tuple[str, str]:
    """Return what changes when this package or Numba does.

    Numba looks at the time and size of a function's own file. Kernels are made of others too, and
    an installer may give all files one time.
    """
    import numba

    folder, code = Path(__file__).parent, hashlib.sha256()
    archives = [path for path in folder.parents if path.is_file()]  # imported from a zip file
    for path in archives or sorted(folder.rglob("*.py")):
        code.update(f"{os.path.relpath(path, folder)}\n".encode() + path.read_bytes())
    return numba.__version__, code.hexdigest()


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


@cache
def _tell() -> None:
    """Log, once in a process, why the first steps take long."""
    _LOGGER.info("compiling kernels for this processor, once: up to two minutes in all")


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
