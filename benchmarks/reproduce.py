"""Run one of the papers' experiments, a piece at a time, and write its table.

    python -m benchmarks.reproduce marvin --dataset cifar10 --model resnet20 --epochs 100
    python -m benchmarks.reproduce few-bit --dataset fashion-mnist --minutes 5 --limit 10000

Each run is a training script of its own, in a run folder; what is finished is not run again, what
was stopped goes on where it stopped. Flags that this command does not know go to the training
script. Where runs are missing, the table says so.
"""

import argparse
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.experiments import EXPERIMENTS, Experiment
from perfmodel.run import read_run
from perfmodel.summary import totals
from train.table import spread

ROOT = Path(__file__).parent.parent
MODELLED = "SU", "MEM", "SZ"
SHOWN = "cpu", "gpu", "threads", "python", "torch", "numba"  # of a run's environment


@dataclass(frozen=True)
class Run:
    """One training run: its variant, its seed, its folder and the flags that make it."""

    variant: str
    seed: int
    folder: Path
    flags: tuple[str, ...]

    def result(self, epochs: int) -> dict[str, Any] | None:
        """Return what came of the run; None if it has not come to the end of ``epochs``."""
        path = self.folder / "result.json"
        result = json.loads(path.read_text()) if path.exists() else None
        return result if result and result["epochs"] >= epochs else None


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    argv = sys.argv[1:] if argv is None else argv
    arguments, passed_on = _parser().parse_known_args(argv)
    experiment = EXPERIMENTS[arguments.experiment]
    name = f"{arguments.experiment}-{arguments.dataset}-{arguments.model}"
    folder = arguments.folder or Path("runs") / name
    runs = plan(experiment, arguments, folder, passed_on)
    go_on(runs, arguments.model, arguments.epochs, arguments.minutes)
    section = write_section(experiment, runs, arguments, _command(argv))
    print(section)
    if arguments.results:
        text = arguments.results.read_text() if arguments.results.exists() else ""
        arguments.results.write_text(put(text, name, section))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reproduce",
        description=(__doc__ or "").partition("\n")[0],
        epilog="Any other flag goes to the training script.",
        allow_abbrev=False,
    )
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--dataset", default="auto", help="as of the training scripts")
    parser.add_argument("--model", default="resnet20", choices=["resnet20", "alexnet"])
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--minutes", type=float, help="stop after so long; the next call goes on")
    parser.add_argument("--folder", type=Path, help="of the run folders (default: under runs/)")
    parser.add_argument("--results", type=Path, help="also put the section into this Markdown file")
    parser.add_argument("--data-name", help="what to call the data, e.g. 'CIFAR-10 (JPEG q75)'")
    return parser


def plan(
    experiment: Experiment, arguments: argparse.Namespace, folder: Path, passed_on: Sequence[str]
) -> list[Run]:
    """Return all runs, seed by seed, so that a piece of the work is a fair comparison."""
    shared = "--dataset", arguments.dataset, "--epochs", str(arguments.epochs)
    return [
        Run(
            variant,
            seed,
            folder / f"{re.sub('[^a-z0-9]+', '-', variant.lower())}-seed{seed}",
            (*shared, "--seed", str(seed), *experiment.common, *flags, *passed_on),
        )
        for seed in arguments.seeds
        for variant, flags in experiment.variants.items()
    ]


def go_on(runs: Sequence[Run], model: str, epochs: int, minutes: float | None) -> None:
    """Run what is not finished, until all is or the time is up.

    A run whose time is up is interrupted as by Ctrl-C: its last checkpoint stays.
    """
    end = None if minutes is None else time.monotonic() + 60 * minutes
    for run in runs:
        left = None if end is None else end - time.monotonic()
        if run.result(epochs) or (left is not None and left <= 0):
            continue
        resume = ["--resume"] if (run.folder / "config.json").exists() else []
        command = [sys.executable, "-m", f"train.{model}", "--run", str(run.folder)]
        print(f"{run.variant}, seed {run.seed}", flush=True)
        process = subprocess.Popen([*command, *run.flags, *resume])
        try:
            code = process.wait(left)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait()
            return
        if code:
            sys.exit(f"{run.folder} stopped with status {code}")


def write_section(
    experiment: Experiment, runs: Sequence[Run], arguments: argparse.Namespace, command: str
) -> str:
    """Return the Markdown of an experiment: question, command, machine, table."""
    data = arguments.data_name or arguments.dataset
    lines = [
        f"### {arguments.experiment}: {arguments.model} on {data}, {arguments.epochs} epochs",
        "",
        experiment.question[0].upper() + experiment.question[1:],
        "",
        f"    {command}",
        "",
        f"{date.today()}. {_machine(runs)}",
        "",
        *_table(experiment, runs, arguments.epochs),
    ]
    return "\n".join(lines)


def _table(experiment: Experiment, runs: Sequence[Run], epochs: int) -> list[str]:
    modelled = ["mean word length, bits", *MODELLED] if experiment.has_word_lengths else []
    header = ["", "seeds", "test accuracy, %", "test loss", *modelled]
    lines = [header, ["---"] * len(header)]
    for variant in experiment.variants:
        found = [(run, run.result(epochs)) for run in runs if run.variant == variant]
        finished = [(run, result) for run, result in found if result]
        if not finished:
            lines.append([variant, "none finished", *[""] * (len(header) - 2)])
            continue
        seeds = ", ".join(str(run.seed) for run, _ in finished)
        accuracy = spread([100 * result["test_accuracy"] for _, result in finished])
        loss = spread([result["test_loss"] for _, result in finished], digits=3)
        cells = [variant, seeds, accuracy, loss]
        if modelled:
            rows = [_modelled(run, result) for run, result in finished]
            cells += [spread(column) for column in zip(*rows, strict=True)]
        lines.append(cells)
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _modelled(run: Run, result: dict[str, Any]) -> list[float]:
    """Return word length, SU, MEM and SZ at the end of a run; those of float32 are known."""
    if result["mean_word_length"] is None:
        return [32, 1, 1, 1]
    values = {total.name: total.value for total in totals(read_run(run.folder))}
    return [result["mean_word_length"], *(values[name] for name in MODELLED)]


def _machine(runs: Sequence[Run]) -> str:
    """Return where the runs took place; more than one place where they differ."""
    places: dict[str, None] = {}
    for run in runs:
        path = run.folder / "environment.json"
        if path.exists():
            values = json.loads(path.read_text())
            names = [name for name in SHOWN if values[name]]
            place = ", ".join(
                values[name] if name in ("cpu", "gpu") else f"{name} {values[name]}"
                for name in names
            )
            places[place] = None
    return "; ".join(places) + "."


def _command(argv: Sequence[str]) -> str:
    """Return the command, without what says only where and for how long."""
    kept = ["python -m benchmarks.reproduce"]
    words = iter(argv)
    for word in words:
        if word in ("--minutes", "--results", "--folder", "--data-name"):
            next(words)
        else:
            kept.append(shlex.quote(word))
    return " ".join(kept)


def put(text: str, name: str, section: str) -> str:
    """Return a Markdown text with the section of an experiment replaced, or added at its end."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    block = f"{begin}\n{section}\n{end}"
    if begin in text:
        before, _, rest = text.partition(begin)
        return before + block + rest.partition(end)[2]
    return f"{text.rstrip()}\n\n{block}\n".lstrip()


if __name__ == "__main__":
    main()
