"""Run one of the papers' experiments, a piece at a time, and write its table.

    python -m benchmarks.reproduce marvin --dataset cifar10 --model resnet20 --epochs 100
    python -m benchmarks.reproduce few-bit --dataset fashion-mnist --minutes 5 --limit 10000
    python -m benchmarks.reproduce policies --dataset fashion-mnist --only float32,static-6

Each run is a training script of its own, in a run folder; what is finished is not run again, what
was stopped goes on where it stopped. Flags that this command does not know go to the training
script; what tells runs of an experiment apart is not among them. Where runs are missing, the section
says so.
"""

from pathlib import Path

from benchmarks.experiments import EXPERIMENTS, PLAIN, Experiment
from perfmodel.arguments import Parser, encodable, message_of, real, stop, stop_at_interrupt, whole

PARSER = Parser(
    "python -m benchmarks.reproduce",
    (__doc__ or "").partition("\n")[0],
    epilog="Any other flag goes to the training script.",
)
PARSER.add_argument("experiment", choices=EXPERIMENTS)
PARSER.add_argument("--dataset", default="auto", help="as of the training scripts")
PARSER.add_argument("--model", default="resnet20", choices=["resnet20", "alexnet", "vit"])
PARSER.add_argument("--epochs", type=whole(1), default=100)
PARSER.add_argument("--seeds", type=whole(0), nargs="+", default=[0])
PARSER.add_argument(
    "--only",
    type=lambda text: text.split(","),
    default=[],
    metavar="NAME,...",
    help="run these variants alone; the table has all of them",
)
PARSER.add_argument(
    "--plain-lr", type=real(), help="--lr of the variants whose gradients are not normalised"
)
PARSER.add_argument(
    "--minutes", type=real(may_be_0=True), help="stop after so long; the next call goes on"
)
PARSER.add_argument("--name", help="of the section (default: experiment, dataset and model)")
PARSER.add_argument("--folder", type=Path, help="of the run folders (default: runs/NAME)")
PARSER.add_argument("--results", type=Path, help="also put the section into this Markdown file")
PARSER.add_argument("--data-name", help="what to call the data, e.g. 'CIFAR-10 (JPEG q75)'")

if __name__ == "__main__":  # --help and slips are answered before torch loads
    stop_at_interrupt()
    PARSER.parse_known_args()

import argparse
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import date

from benchmarks import figure
from benchmarks.comparison import (
    Finished,
    PlannedRun,
    epochs_of,
    finished_runs,
    mean_bits,
    meaning,
    not_finished,
    slug,
    table,
)
from marvin.files import write_atomic
from perfmodel.files import CONFIG, ENVIRONMENT, RunError, UserError, read_json
from train.checks import flag
from train.plot import LABELS

NOT_SHOWN = "--minutes", "--results", "--folder", "--data-name", "--data-dir", "--only"
SHOWN = "cpu", "gpu", "threads", "python", "torch", "numba"  # of a run's environment


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; what the user can put right ends with one line."""
    try:
        _reproduce(sys.argv[1:] if argv is None else argv)
    except (UserError, OSError) as error:
        sys.exit(f"python -m benchmarks.reproduce: error: {message_of(error)}")
    except KeyboardInterrupt:
        stop("stopped; the same command, without --resume, goes on where it stopped")


def _reproduce(argv: Sequence[str]) -> None:
    arguments, passed_on = PARSER.parse_known_args(argv)
    experiment = EXPERIMENTS[arguments.experiment]
    unknown = set(arguments.only) - set(map(slug, experiment.variants))
    if unknown:
        names = ", ".join(map(slug, experiment.variants))
        PARSER.error(f"--only must be of {names}, got {', '.join(sorted(unknown))}")
    taken = _flags(passed_on) & _taken(experiment)
    if taken:
        PARSER.error(
            f"{', '.join(map(flag, sorted(taken)))} must be left out: each run has its own; seeds are "
            "--seeds, run folders are in --folder, and what stopped goes on without a flag"
        )
    name = arguments.name or f"{arguments.experiment}-{arguments.dataset}-{arguments.model}"
    folder = arguments.folder or Path("runs") / name
    runs = plan(experiment, arguments, folder, passed_on)
    chosen = [run for run in runs if not arguments.only or slug(run.variant) in arguments.only]
    go_on(chosen, arguments.minutes)
    finished = finished_runs(experiment, runs)
    section = write_section(experiment, finished, arguments, _command(argv), _machine(runs))
    print(encodable(section))
    if arguments.results:
        section += _picture(experiment, finished, arguments, name)
        text = arguments.results.read_text(encoding="utf-8") if arguments.results.exists() else ""
        write_atomic(arguments.results, put(text, name, section))


def _flags(words: Iterable[str]) -> set[str]:
    """Return the names of flags, of ``--no-late`` and of ``--late=x`` too: ``late``."""
    flags = (word.partition("=")[0] for word in words if word.startswith("--"))
    return {name.removeprefix("--").removeprefix("no-") for name in flags}


def _taken(experiment: Experiment) -> set[str]:
    """Return the names of the flags that tell the runs of an experiment apart."""
    of_variants = (_flags(flags) for flags in experiment.variants.values())
    return {"seed", "run", "run-folder", "resume"}.union(*of_variants)


def plan(
    experiment: Experiment, arguments: argparse.Namespace, folder: Path, passed_on: Sequence[str]
) -> list[PlannedRun]:
    """Return all runs, seed by seed, so that a piece of the work is a fair comparison."""
    plain_lr = () if arguments.plain_lr is None else ("--lr", str(arguments.plain_lr))
    shared = "--dataset", arguments.dataset, "--epochs", str(arguments.epochs)
    return [
        PlannedRun(
            variant,
            seed,
            folder / f"{slug(variant)}-seed{seed}",
            arguments.model,
            (
                *(*shared, "--seed", str(seed), *experiment.common, *flags, *passed_on),
                *(plain_lr if PLAIN in flags else ()),
            ),
        )
        for seed in dict.fromkeys(arguments.seeds)
        for variant, flags in experiment.variants.items()
    ]


def go_on(runs: Sequence[PlannedRun], minutes: float | None) -> None:
    """Run what is not finished, until all is or the time is up.

    A run whose time is up is interrupted as by Ctrl-C: its last checkpoint stays.
    """
    end = None if minutes is None else time.monotonic() + 60 * minutes
    for run in runs:
        left = None if end is None else end - time.monotonic()
        if run.result() or (left is not None and left <= 0):
            continue
        resume = ["--resume"] if (run.folder / CONFIG).exists() else []
        command = [sys.executable, "-m", f"train.{run.model}", "--run", str(run.folder)]
        print(f"{run.variant}, seed {run.seed}", flush=True)
        process = subprocess.Popen([*command, *run.flags, *resume])
        try:
            code = process.wait(left)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait()
            return
        except KeyboardInterrupt:  # it has come to the script, too, which then says so
            process.wait()
            raise
        if code:
            sys.exit(f"{run.folder} stopped with status {code}")


def write_section(
    experiment: Experiment,
    finished: Mapping[str, Finished],
    arguments: argparse.Namespace,
    command: str,
    machine: str,
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
        f"{date.today()}. {machine} {experiment.note}".rstrip(),
        "",
        *table(experiment, finished),
    ]
    for sentence in (not_finished(finished), meaning(finished)):
        lines += ["", sentence] if sentence else []
    return "\n".join(lines)


def _picture(
    experiment: Experiment,
    finished: Mapping[str, Finished],
    arguments: argparse.Namespace,
    name: str,
) -> str:
    """Draw the finished runs beside the results, and return what shows the picture there."""
    rows = [(variant, found) for variant, found in finished.items() if found]
    if len(rows) < 2:
        return ""
    data = arguments.data_name or LABELS.get(arguments.dataset, arguments.dataset)
    title = f"{LABELS[arguments.model]} on {data}, {arguments.epochs} epochs"
    path = arguments.results.parent / f"images/{name}.png"
    if experiment.has_word_lengths:
        drawn = figure.draw([_point(*row) for row in rows], title)
        shows = "accuracy against bits"
    else:
        drawn = figure.draw_curves([curve(*row) for row in rows], title)
        shows = "loss of each epoch"
    figure.save(drawn, path)
    return f"\n\n![{title}: {shows}](images/{path.name})"


def _point(variant: str, finished: Finished) -> figure.Point:
    accuracy = [100 * result["test_accuracy"] for _, result in finished]
    return figure.Point(variant, [mean_bits(result) for _, result in finished], accuracy)


def curve(variant: str, finished: Finished) -> figure.Curve:
    """Return the losses of a variant's runs."""
    losses = [
        [epochs_of(run.folder, f"{part}_loss") for run, _ in finished]
        for part in ("train", "validation")
    ]
    return figure.Curve(variant, *losses)


def _machine(runs: Sequence[PlannedRun]) -> str:
    """Return where the runs took place; more than one place where they differ."""
    places: dict[str, None] = {}
    for run in runs:
        path = run.folder / ENVIRONMENT
        if path.exists():
            values = read_json(path)
            names = [name for name in SHOWN if values.get(name)]
            place = ", ".join(
                str(values[name]) if name in ("cpu", "gpu") else f"{name} {values[name]}"
                for name in names
            )
            places[place] = None
    return "; ".join(places) + "."


def _command(argv: Sequence[str]) -> str:
    """Return the command, without what says only where and for how long."""
    kept = ["python -m benchmarks.reproduce"]
    words = iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in NOT_SHOWN:
            kept.append(shlex.quote(word))
        elif not equals:
            next(words, None)
    return " ".join(kept)


def put(text: str, name: str, section: str) -> str:
    """Return a Markdown text with the section of an experiment replaced, or added at its end.

    Raises:
        RunError: The section has a begin and no end: what is behind it would be lost.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    block = f"{begin}\n{section}\n{end}"
    if begin in text:
        before, _, rest = text.partition(begin)
        if end not in rest:
            raise RunError(f"the section must end with {end}, found only {begin}: write that line")
        return before + block + rest.partition(end)[2]
    return f"{text.rstrip()}\n\n{block}\n".lstrip()


if __name__ == "__main__":
    main()
