"""``python -m train.front RUN ...``: the epochs of runs that no other beats in accuracy and cost.

Accuracy is that of the validation images, cost the EBOPs of the formats at the end of the epoch, with
which they are evaluated. A run with ``--keep-front`` keeps the checkpoints of its own front in
``RUN/front``. The picture goes to ``front.png`` in the first run's folder.
"""

from pathlib import Path

from perfmodel.arguments import Parser, message_of, reader_may_leave, stop_at_interrupt

PARSER = Parser("python -m train.front", (__doc__ or "").partition("\n")[0])
PARSER.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")

if __name__ == "__main__":  # --help and slips are answered before torch loads
    stop_at_interrupt()
    PARSER.parse_args()

import io
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import marvin
from marvin.files import write_atomic
from perfmodel.cost import ebops
from perfmodel.files import METRICS, RunError, UserError, number, read_config, read_rows, whole
from perfmodel.run import LACKS_PRODUCTS, MOST_STEPS, read_run, start_of
from perfmodel.trace import SwitchLike, Trace
from train.config import Config, to_dict
from train.records import RunFolder
from train.training import Training

__all__ = ["Candidate", "candidates_of", "draw", "front", "keep", "main"]

FILE = "front.png"


@dataclass(frozen=True)
class Candidate:
    """A run at the end of one of its epochs.

    Args:
        run: Its folder.
        epoch: From 1.
        accuracy: Of the validation images; of training where there are none.
        ebops: Of the formats then.
    """

    run: Path
    epoch: int
    accuracy: float
    ebops: int

    @property
    def checkpoint(self) -> Path:
        """Where ``--keep-front`` keeps it."""
        return RunFolder(self.run).kept(self.epoch)

    def beats(self, other: "Candidate") -> bool:
        """Say whether it is as good in both, and better in one."""
        is_as_good = self.accuracy >= other.accuracy and self.ebops <= other.ebops
        return is_as_good and (self.accuracy, self.ebops) != (other.accuracy, other.ebops)


def front(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return those that no other beats, the cheapest first."""
    every = list(candidates)
    left = [own for own in every if not any(other.beats(own) for other in every)]
    return sorted(left, key=lambda own: (own.ebops, str(own.run), own.epoch))


def candidates_of(path: Path) -> list[Candidate]:
    """Return the epochs of a run.

    Raises:
        RunError: A file of the folder is missing or damaged.
    """
    run = read_run(path)
    table, found = path / METRICS, []
    for row in read_rows(table, ("epoch", "step", "train_accuracy")):
        step = whole(table, row, "step", 1, MOST_STEPS)
        name = "validation_accuracy" if row.get("validation_accuracy") else "train_accuracy"
        cost = ebops(until(run.trace, run.trace.switches, step), run.layers)
        epoch = whole(table, row, "epoch", 1, MOST_STEPS)
        found.append(Candidate(path, epoch, number(table, row, name), cost))
    return found


def until(trace: Trace, switches: Sequence[SwitchLike], step: int) -> Trace:
    """Return a trace with the switches up to a step."""
    return replace(trace, switches=[s for s in switches if s.step <= step], steps=step)


def keep(training: Training) -> None:
    """Keep a checkpoint of now where no epoch of the run beats it; take away those that it beats."""
    config, optimizer = training.config, training.optimizer
    is_fixed = isinstance(optimizer, marvin.Quantized)
    start = start_of(to_dict(config)) if is_fixed else Trace((), 0, 32, kept={"*": 32})
    switches = training.switches()
    found = []
    for row in training.progress.rows:
        accuracy = row["validation_accuracy"]
        accuracy = row["train_accuracy"] if accuracy is None else accuracy
        assert accuracy is not None
        cost = ebops(until(start, switches, int(row["step"] or 0)), training.layers)
        found.append(Candidate(training.folder.path, int(row["epoch"] or 0), accuracy, cost))
    best = {own.checkpoint for own in front(found)}
    if found[-1].checkpoint in best:
        training.folder.save_checkpoint(training.state(), found[-1].checkpoint)
    for own in found:
        if own.checkpoint not in best:
            own.checkpoint.unlink(missing_ok=True)


def draw(candidates: Sequence[Candidate], part: str) -> Figure:
    """Return the figure: every epoch, a colour for each run, and the front as a line.

    Args:
        candidates: What to draw.
        part: Of which images the accuracies are: ``validation`` or ``training``.
    """
    figure = Figure(figsize=(7, 4), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for run in dict.fromkeys(own.run for own in candidates):
        points = [(own.ebops / 1e6, 100 * own.accuracy) for own in candidates if own.run == run]
        axes.plot(*zip(*points, strict=True), ".", label=run.name, alpha=0.6)
    best = [(own.ebops / 1e6, 100 * own.accuracy) for own in front(candidates)]
    axes.step(*zip(*best, strict=True), where="post", color="black", linewidth=1, label="front")
    axes.set_xscale("log")
    axes.set_xlabel("EBOPs, millions (modelled)")
    axes.set_ylabel(f"{part} accuracy, %")
    axes.legend(frameon=False, fontsize=8)
    return figure


def _part_of(runs: Sequence[Path]) -> str:
    """Return the part whose images the accuracies are of; refuse runs of which it is not the same."""
    found: dict[str, Path] = {}
    part = ""
    for run in runs:
        config = read_config(run)
        share, limit = (config.get(n, getattr(Config, n)) for n in ("validation_share", "limit"))
        part = "validation" if share else "training"
        split = f"--validation-share {share} --limit {limit}"
        found.setdefault(f"{config.get('dataset')}'s {part} images ({split})", run)
    if len(found) > 1:
        got = " and ".join(f"{images} ({run})" for images, run in found.items())
        raise RunError(
            f"accuracies must be of the same images, got those of {got}: call this for each"
        )
    return part


def _show(runs: Sequence[Path]) -> None:
    """Print and draw the front of runs."""
    part = _part_of(runs)
    for run in runs:
        if read_run(run).lacks_products:
            print(f"{run}: {LACKS_PRODUCTS}")
    found = [own for run in runs for own in candidates_of(run)]
    for own in front(found):
        kept = f"  {own.checkpoint}" if own.checkpoint.exists() else ""
        cost, accuracy = f"{own.ebops / 1e6:.3g} M EBOPs", f"{own.accuracy:.2%}"
        print(f"{cost:>16}  {accuracy:>7}  {own.run}, epoch {own.epoch}{kept}")
    picture = io.BytesIO()
    draw(found, part).savefig(picture, format="png", metadata={"Software": None})
    path = runs[0] / FILE
    write_atomic(path, picture.getvalue())
    print(f"figure {path}")


def main(argv: Sequence[str] | None = None) -> None:
    """Print and draw the front of the runs on the command line."""
    runs: dict[Path, Path] = {}  # however they are spelled
    for run in PARSER.parse_args(argv).runs:
        runs.setdefault(run.resolve(), run)
    try:
        with reader_may_leave():
            _show(list(runs.values()))
    except (RunError, UserError, OSError) as error:
        sys.exit(f"python -m train.front: error: {message_of(error)}")


if __name__ == "__main__":
    main()
