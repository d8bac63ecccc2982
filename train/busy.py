"""Says that other processes take the cores: PyTorch's threads wait actively, and are far slower then."""

import os
import time
from pathlib import Path

import torch

__all__ = ["Watch", "busy_seconds", "hint"]

SECONDS = 20.0  # before a look
STAT = Path("/proc/stat")  # of Linux; elsewhere nothing is said


class Watch:
    """Looks once, some seconds after it was made, at what other processes take."""

    def __init__(self) -> None:
        self._begun: tuple[float, float] | None = _others()

    def look(self) -> str:
        """Return what to say; ``""`` where there is nothing, or it is too early."""
        if self._begun is None or time.perf_counter() - self._begun[0] < SECONDS:
            return ""
        (begun, before), self._begun, now = self._begun, None, _others()
        if now is None:
            return ""
        taken = (now[1] - before) / (now[0] - begun)
        return hint(taken, os.cpu_count() or 1, torch.get_num_threads())


def hint(taken: float, cores: int, threads: int) -> str:
    """Return what helps where others take ``taken`` of the cores, ``""`` where nothing is wrong."""
    waits = os.environ.get("OMP_WAIT_POLICY", "active").lower() == "active"
    if threads == 1 or not waits or taken + threads < cores + 0.3:
        return ""
    return (
        f"other processes take {taken:.1f} of {cores} cores, and PyTorch's {threads} threads wait for "
        "each other: stop, write OMP_NUM_THREADS=1 before the command, and go on with --resume"
    )


def busy_seconds(text: str) -> float:
    """Return the seconds that all cores were busy, by the first line of ``/proc/stat``."""
    user, nice, system = map(int, text.split(maxsplit=4)[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def _others() -> tuple[float, float] | None:
    """Return the time, and the seconds that other processes were busy; both grow."""
    try:
        busy = busy_seconds(STAT.read_text())
    except (OSError, ValueError):
        return None
    own = os.times()
    return time.perf_counter(), busy - own.user - own.system
