"""Whether other tasks than classification train in fixed point as in float32, with what one writes first.

    python -m benchmarks.tasks --threads 1

Each task is a small network, its data and its figure on what no training has seen. It is trained in float32 and in the ways
of ``WAYS``, from the same seeds, weights and batches, with one learning rate and one cosine schedule. A run takes some
seconds on a core; each is written to ``results/tasks.csv`` when it ends, and not made again while it is there.
"""

from pathlib import Path

from perfmodel.arguments import Parser, stop_at_interrupt, whole

PARSER = Parser("python -m benchmarks.tasks", (__doc__ or "").partition("\n")[0])
PARSER.add_argument("--tasks", nargs="+", metavar="NAME", help="of the table's rows (default: all)")
PARSER.add_argument("--ways", nargs="+", metavar="NAME", help="of its columns (default: all)")
PARSER.add_argument("--seeds", type=whole(1), default=3)
PARSER.add_argument("--threads", type=whole(1), help="torch's (default: as torch chooses)")

if __name__ == "__main__":  # --help and slips are answered before torch loads
    stop_at_interrupt()
    PARSER.parse_args()

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from statistics import mean, stdev
from typing import NamedTuple

import torch

from benchmarks import runs
from benchmarks.tasks.catalogue import TASKS
from benchmarks.tasks.training import WAYS, Training

RESULTS = Path(__file__).parents[1] / "results/tasks.csv"


class Run(NamedTuple):
    """One training: its figure, mean bits, and what was said: warnings, and the error that ended it."""

    task: str
    way: str
    seed: int
    figure: float
    bits: float
    said: str
    time_s: float


def run(task: str, way: str, seed: int) -> Run:
    """Train one task in one way."""
    torch.manual_seed(seed)
    start, own = time.perf_counter(), TASKS[task]
    training = Training(way, seed, own.steps, own.advice)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            figure, end = own.run(training), ""
        except (RuntimeError, ValueError, FloatingPointError) as error:
            figure, end = math.nan, f"{type(error).__name__}: {error}"
    messages: list[str] = [str(w.message) for w in caught] + ([end] if end else [])
    said = " | ".join(dict.fromkeys(messages))
    bits = mean(learner.bits() for learner in training.learners)
    return Run(task, way, seed, figure, bits, said, time.perf_counter() - start)


def table(found: Sequence[Run]) -> Iterator[str]:
    """Yield a row for each task: means over seeds with their spread, and bits."""
    yield f"| task | figure | {' | '.join(WAYS)} |"
    yield f"|---|---|{'---:|' * len(WAYS)}"
    for name, task in TASKS.items():
        own = [r for r in found if r.task == name]
        if own:
            cells = [_cell([r for r in own if r.way == way]) for way in WAYS]
            side = "more" if task.is_gain else "less"
            yield f"| {name} | {task.figure}, {side} is better | {' | '.join(cells)} |"


def _cell(found: Sequence[Run]) -> str:
    figures = [r.figure for r in found if math.isfinite(r.figure)]
    if not figures:
        return "refused" if found else ""
    spread = f" ± {stdev(figures):.2g}" if len(figures) > 1 else ""
    bits = mean(r.bits for r in found)
    return f"{mean(figures):.4g}{spread}" + (f" ({bits:.1f})" if bits < 32 else "")


def main(arguments: list[str] | None = None) -> None:
    """Make the runs that are missing, seed by seed, and print the table."""
    chosen = PARSER.parse_args(arguments)
    for flag, given, known in (("tasks", chosen.tasks, TASKS), ("ways", chosen.ways, WAYS)):
        if unknown := set(given or ()) - set(known):
            names = "; ".join(known)
            PARSER.error(f"--{flag} must be of {names}, got {'; '.join(sorted(unknown))}")
    torch.set_num_threads(chosen.threads or torch.get_num_threads())
    for seed in range(chosen.seeds):
        for task in chosen.tasks or TASKS:
            for way in chosen.ways or WAYS:
                if way != "advised" or TASKS[task].advice:
                    _make(task, way, seed)
    print("\n".join(table(runs.read(Run, RESULTS))))


def _make(task: str, way: str, seed: int) -> None:
    """Make a run, unless it is written."""
    if any(r[:3] == (task, way, seed) for r in runs.read(Run, RESULTS)):
        return
    found = run(task, way, seed)
    runs.append(RESULTS, found)
    print(
        f"{task}, {way}, seed {seed}: {found.figure:.4g}, {found.bits:.1f} bits, "
        f"{found.time_s:.0f} s {found.said[:300]}",
        flush=True,
    )


if __name__ == "__main__":
    main()
