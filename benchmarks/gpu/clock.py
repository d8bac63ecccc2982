"""Time by CUDA events, interleaved; on a CPU by the clock. Waits, launches and memory of a call."""

import random
import statistics
import time
import warnings
from collections.abc import Callable, Mapping

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["compare", "host_waits", "launches", "peak_bytes", "repeated"]

Call = Callable[[], object]
LAUNCHES = "cudaLaunch", "cuLaunch"  # of torch's kernels and of Triton's


def compare(
    contestants: Mapping[str, Call], device: torch.device, turns: int, calls: int = 1
) -> dict[str, float]:
    """Return the median seconds of a call of each contestant.

    In each of ``turns`` rounds every contestant makes one call that is not timed, so that a GPU
    has work while the first timed one is launched, and then ``calls`` that are.
    """
    for call in contestants.values():
        call()  # compiles
    times: dict[str, list[float]] = {name: [] for name in contestants}
    order = random.Random(0)
    for _ in range(turns):
        for name in order.sample(list(times), len(times)):
            times[name].append(_turn(contestants[name], device, calls))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def _turn(call: Call, device: torch.device, calls: int) -> float:
    if device.type != "cuda":
        call()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    call()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def host_waits(call: Call, device: torch.device) -> int | None:
    """Return how often the host waits for the device in a call; None without CUDA."""
    if device.type != "cuda":
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def launches(call: Call, device: torch.device) -> int | None:
    """Return how many kernels a call launches; None without CUDA, or where none can be seen."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=kinds, acc_events=True) as profiler:  # else torch 2.11 warns
        call()
        torch.cuda.synchronize()
    found = sum(row.count for row in profiler.key_averages() if row.key.startswith(LAUNCHES))
    return found or None


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """Return the most memory that a call takes beside what is there; None without CUDA."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def repeated(call: Call, times: int) -> Call:
    """Return ``times`` calls as one."""

    def calls() -> None:
        for _ in range(times):
            call()

    return calls
