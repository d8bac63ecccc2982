"""The largest batch that trains in a memory, by trials in processes of their own; loads no torch.

What a process takes is more than what autograd keeps: the interpreter and its libraries, weights,
gradients, the optimizer's state, what kernels work with, and what malloc does not give back. The
system knows the most a process has had. glibc's malloc is told to give large pieces back at once
(``MALLOC``), so that what it holds beyond need is small and always the same.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from perfmodel.text import binary, of_tokens, table

__all__ = ["MALLOC", "WAYS", "Found", "Trial", "check_ways", "largest", "lines", "run"]

WAYS = "exact", "checkpointing", "few-bit", "few-bit+division"
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
PRECISION = 0.02  # of the batch
FIRST = 2, 16  # batches tried at first
MOST = 2**24
GROWTH = 8  # most times that a trial is larger than the one before, where nothing was counted


class Trial(NamedTuple):
    """One step to try.

    Args:
        model: ``module:name``, or ``module:name(argument=value)``.
        shape: Of one sample.
        dtype: Of the input.
        way: One of ``WAYS``, or the file of a plan.
        batch: Samples.
        threads: Of torch.
        is_counted: Whether bytes are counted, too, which takes two steps more.
    """

    model: str
    shape: tuple[int, ...]
    dtype: str
    way: str
    batch: int
    threads: int = 1
    is_counted: bool = True


class Found(NamedTuple):
    """A trial's outcome.

    Args:
        way: How less is kept.
        batch: Samples.
        peak_bytes: Most memory that the process had.
        kept_bytes: Counted: what autograd keeps between the passes.
        counted_peak_bytes: Counted: most bytes of tensors that a step holds at once, beyond model,
            optimizer and batch.
        base_bytes: Most memory of the process before the step: a step with two samples.
        step_s: Seconds of the step.
    """

    way: str
    batch: int
    peak_bytes: int
    kept_bytes: int
    counted_peak_bytes: int
    base_bytes: int
    step_s: float


def check_ways(ways: Iterable[str]) -> None:
    """Check that each way is known, or the file of a plan.

    Raises:
        ValueError: One is neither.
    """
    for way in ways:
        if way not in WAYS and not Path(way).is_file():
            known = ", ".join(WAYS)
            raise ValueError(f"a way must be known ({known}), or the file of a plan, got {way!r}")


def run(trial: Trial) -> Found:
    """Run one step in a process of its own.

    Raises:
        ValueError: The process failed; says with what.
    """
    command = [sys.executable, "-m", "perfmodel.trial", json.dumps(trial)]
    threads = {"OMP_NUM_THREADS": str(trial.threads)}
    environment = {**os.environ, **MALLOC, **threads}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise ValueError(f"{trial.way}, batch {trial.batch}: {last}{of_tokens(last)}")
    found = Found(**json.loads(done.stdout.splitlines()[-1]))
    print(f"{found.way}: batch {found.batch}, {binary(found.peak_bytes)}", file=sys.stderr)
    return found


def largest(
    trial: Trial,
    memory_bytes: float,
    run: Callable[[Trial], Found] = run,
    precision: float = PRECISION,
) -> Found:
    """Return the largest batch that was seen to fit; the next one tried, 2 % larger, did not.

    Memory grows evenly with the batch, nearly: each trial is where a line through the largest that
    fits and another one meets the memory; the first is where it would be after the counted bytes
    of two small batches.

    Args:
        trial: The model and the way; its batch is not read.
        memory_bytes: Of the process.
        run: Tries a batch.
        precision: How much larger the next batch is that did not fit, as a share.

    Raises:
        ValueError: Not even two samples fit, any number does, or a trial failed.
    """
    counted, trial = trial, trial._replace(is_counted=False)
    least, other = (run(counted._replace(batch=batch, is_counted=True)) for batch in FIRST)
    more = (other.counted_peak_bytes - least.counted_peak_bytes) / (other.batch - least.batch)
    fits = run(trial._replace(batch=least.batch))  # the first compiled kernels, which takes memory
    if fits.peak_bytes > memory_bytes:
        raise ValueError(
            f"{trial.way}: a batch of {fits.batch} takes {binary(fits.peak_bytes)}, "
            f"more than {binary(memory_bytes)}"
        )
    too_large = None
    while True:
        if other.peak_bytes > memory_bytes:
            too_large = other.batch
        else:
            fits, other = other, fits
        if fits.batch > MOST:
            raise ValueError(f"{trial.way}: memory must grow with the batch, {MOST:,} fit")
        slope = (other.peak_bytes - fits.peak_bytes) / (other.batch - fits.batch)
        slope = max(slope, more)
        step = max(1, round(precision * fits.batch))
        most = 2 * MOST if more > 0 else GROWTH * fits.batch
        if slope * (most - fits.batch) > memory_bytes - fits.peak_bytes:
            most = fits.batch + int((memory_bytes - fits.peak_bytes) / slope)
        batch = max(most, fits.batch + step)
        if too_large is not None:
            if too_large - fits.batch <= step:
                last = run(counted._replace(batch=fits.batch))
                return last._replace(peak_bytes=fits.peak_bytes, step_s=fits.step_s)
            batch = min(batch, too_large - step)
        other = run(trial._replace(batch=batch))


def lines(found: Iterable[Found]) -> Iterator[str]:
    """Yield the lines of a table."""
    header = "way", "batch", "process", "before", "counted peak", "kept", "samples/s"
    rows = [
        (
            row.way,
            str(row.batch),
            *map(binary, (row.peak_bytes, row.base_bytes, row.counted_peak_bytes, row.kept_bytes)),
            f"{row.batch / row.step_s:.1f}",
        )
        for row in found
    ]
    yield table(header, rows)
    yield ""
    yield f"malloc: {' '.join(f'{name}={value}' for name, value in MALLOC.items())}"
