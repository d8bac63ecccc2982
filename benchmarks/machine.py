"""What a number depends on, beside the code."""

import ctypes
import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's mallopt
PACKAGES = "torch", "triton", "numba", "llvmlite", "numpy", "qtorch"


def describe() -> dict[str, object]:
    """Return the processor, versions, thread count, load and commit."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "wait policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "load average": load(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def load() -> float:
    """Return how many processes wanted a core in the last minute, on average."""
    return round(os.getloadavg()[0], 2)


def keep_freed_memory() -> bool:
    """Tell glibc's malloc not to give freed memory back; return whether it does so.

    Where the heap's end happens to lie decides else whether each call of an operator gets 4 MB of
    pages that fault, which takes longer than an activation. jemalloc and tcmalloc keep memory too.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1) and mallopt(_MMAP_THRESHOLD, 2**25))


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
