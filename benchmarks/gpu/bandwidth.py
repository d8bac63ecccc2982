"""Bandwidth of each kernel, as a share of a plain copy's measured beside it."""

from collections.abc import Sequence

import torch

from benchmarks.gpu.clock import compare
from benchmarks.gpu.correctness import implementation
from benchmarks.gpu.kernels import JOBS, Job
from benchmarks.gpu.sizes import Sizes

__all__ = ["rows"]

TURN_S = 0.03  # of calls of a slow kernel


def rows(device: torch.device, sizes: Sizes, jobs: Sequence[Job] = JOBS) -> list[dict[str, object]]:
    """Return the share, rate and time of each kernel that is timed; bytes are the fewest possible."""
    found: list[dict[str, object]] = []
    x = torch.ones(sizes.elements, device=device)
    y = torch.empty_like(x)
    for job in jobs:
        if job.is_timed:
            found.append(_row(job, x, y, sizes))
    return found


def _row(job: Job, x: torch.Tensor, y: torch.Tensor, sizes: Sizes) -> dict[str, object]:
    work, code = job.make(sizes.elements, x.device), implementation(job, "gpu")
    outputs = work.run(code, work.inputs, work.outputs)
    moved = sum(t.nbytes for t in (*work.inputs, *outputs))
    contestants = {
        "kernel": lambda: work.run(code, work.inputs, work.outputs),
        "copy": lambda: y.copy_(x),
    }
    once = max(compare(contestants, x.device, 1).values())
    calls = max(1, min(sizes.calls, int(TURN_S / once)))
    seconds = compare(contestants, x.device, sizes.turns, calls)
    rate, copied = moved / seconds["kernel"], 2 * x.nbytes / seconds["copy"]
    return {
        "kernel": job.name,
        "share of a copy's bandwidth": rate / copied,
        "GB/s": rate / 1e9,
        "copy, GB/s": copied / 1e9,
        "ns an element": seconds["kernel"] / sizes.elements * 1e9,
        "bytes an element": moved / sizes.elements,
    }
