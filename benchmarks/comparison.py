"""The table and the picture of an experiment, from the folders of its runs."""

import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

from benchmarks.experiments import Experiment
from benchmarks.paired import MARGIN, Paired, paired
from perfmodel.files import METRICS, RESULT, RunError, number, read_json, read_rows
from perfmodel.run import read_run
from perfmodel.summary import totals
from train import alexnet, resnet20, vit
from train.arguments import parse
from train.config import Config
from train.data import choose
from train.records import RunFolder, differences
from train.table import spread

__all__ = [
    "Finished",
    "PlannedRun",
    "clamped",
    "epochs_of",
    "lengths",
    "meaning",
    "slug",
    "table",
]

DEFAULTS = {own.DEFAULTS.model: own.DEFAULTS for own in (resnet20, alexnet, vit)}
MODELLED = "SU", "SZ", "MEM", "EBOPs"
WEIGHTS, INPUTS = "mean_word_length", "mean_input_word_length"


@dataclass(frozen=True)
class PlannedRun:
    """One training run: its variant, its seed, its folder, its model and the flags that make it."""

    variant: str
    seed: int
    folder: Path
    model: str
    flags: tuple[str, ...]

    def asked(self) -> Config:
        """Return what the flags ask; flags of which the trainer knows nothing end the process."""
        config = parse(DEFAULTS[self.model], self.flags)
        return replace(config, dataset=choose(config.dataset, Path(config.data_dir)))

    def result(self) -> dict[str, Any] | None:
        """Return what came of the run; None if it has not come to the end of its epochs.

        A policy may end a run before that: then the run was asked for them, and is over.

        Raises:
            UserError: A file of the folder is damaged, or it holds a finished run of other flags.
        """
        path = self.folder / RESULT
        if not path.exists():
            return None
        begun, asked = RunFolder(self.folder).read_config(), self.asked()
        changed = differences(begun, asked)
        if begun.epochs > asked.epochs:
            changed = f"epochs was {begun.epochs}, got {asked.epochs}"
        if changed:
            raise RunError(
                f"{self.folder} must hold a run of these flags, got a finished one of others: "
                f"{changed}; choose another --folder"
            )
        if begun.epochs < asked.epochs:
            return None
        result = read_json(path)
        lengths = WEIGHTS, f"{WEIGHTS}_by_size", INPUTS, f"{INPUTS}_by_size"
        for name in (n for n in lengths if result.get(n) is not None):
            result[name] = number(path, result, name)
        if (
            begun.policy == "muppet" and begun.quantize_activations
        ):  # rounds outputs, to this length
            result[INPUTS] = result.get(WEIGHTS)
            result[f"{INPUTS}_by_size"] = result.get(f"{WEIGHTS}_by_size")
        return result


Finished = list[tuple[PlannedRun, dict[str, Any]]]  # runs, and what came of them


def slug(text: str) -> str:
    """Return ``text`` as part of a file's name."""
    return re.sub("[^a-z0-9]+", "-", text.lower())


def table(experiment: Experiment, finished: Mapping[str, Finished]) -> list[str]:
    """Return the lines of the Markdown table: a row for each variant, its seeds taken together.

    Variants of which no run is finished have no row; ``not_finished`` names them.
    """
    first = next(iter(experiment.variants))
    header = ["", "seeds", "test accuracy, %", f"points above {first}"]
    header += [f"no worse by {MARGIN}?", f"training loss above {first}", "test loss"]
    if experiment.has_word_lengths:
        header += ["validation accuracy, %", "weights, bits", "inputs, bits", *MODELLED]
        header += ["clamped, %"]
    lines = [header, ["---"] * len(header)]
    gains, losses = (_differences(finished, what) for what in ("test_accuracy", "train_loss"))
    for variant, found in finished.items():
        if not found:
            continue
        seeds = ", ".join(str(run.seed) for run, _ in found)
        accuracy = spread([100 * result["test_accuracy"] for _, result in found])
        loss = spread([result["test_loss"] for _, result in found], digits=3)
        gain, above = gains.get(variant), losses.get(variant)
        shown = [gain.shown(), gain.verdict()] if gain else ["", ""]
        lines.append([variant, seeds, accuracy, *shown, above.shown(3) if above else "", loss])
        if experiment.has_word_lengths:
            lines[-1] += _word_lengths(found)
    return [f"| {' | '.join(cells)} |" for cells in lines]


def not_finished(finished: Mapping[str, Finished]) -> str:
    """Name the variants of which no run is finished, in one sentence; empty where there are none."""
    missing = [variant for variant, found in finished.items() if not found]
    return f"No run finished: {'; '.join(missing)}." if missing else ""


def meaning(finished: Mapping[str, Finished]) -> str:
    """Say what the differences to the first row mean; empty without one."""
    if not any(_differences(finished, "test_accuracy").values()):
        return ""
    return (
        "Differences to the first row are means over the seeds that both rows have, seed by seed, with "
        "their standard error. That a row is no worse by half a point is shown where the one-sided "
        "95 % bound, by Student's t, is above -0.5. Else these seeds do not decide it, or show that it "
        "is worse."
    )


def _differences(finished: Mapping[str, Finished], what: str) -> dict[str, Paired | None]:
    """Return how far each variant but the first is above it, seed by seed."""
    values = {
        variant: {run.seed: _value(run, result, what) for run, result in found}
        for variant, found in finished.items()
    }
    first, *others = values
    return {variant: paired(values[variant], values[first]) for variant in others}


def _value(run: PlannedRun, result: Mapping[str, Any], what: str) -> float:
    if what == "train_loss":
        return epochs_of(run.folder, what)[-1]
    return 100 * result[what]


def finished_runs(experiment: Experiment, runs: Sequence[PlannedRun]) -> dict[str, Finished]:
    """Return the finished runs of each variant, in its order, and what came of them.

    Raises:
        UserError: A file of a run is damaged, or a finished run has other flags.
    """
    found = [(run, run.result()) for run in runs]
    for run, result in found:
        for name in ("test_accuracy", "test_loss") if result else ():
            number(run.folder / RESULT, result or {}, name)
    return {
        variant: [(run, result) for run, result in found if result and run.variant == variant]
        for variant in experiment.variants
    }


def _word_lengths(finished: Finished) -> list[str]:
    results = [result for _, result in finished]
    folders = [run.folder for run, _ in finished]
    rows = [_modelled(run, result) for run, result in finished]
    return [
        _spread([held_out_accuracy(folder) for folder in folders], 100),
        _bits(results, WEIGHTS),
        _bits(results, INPUTS),
        *(_spread(column) for column in zip(*rows, strict=True)),
        _spread([clamped(folder) for folder in folders], 100),
    ]


def _spread(values: Sequence[float | None], scale: float = 1) -> str:
    known = [scale * value for value in values if value is not None]
    return spread(known) if len(known) == len(values) else ""


def _bits(results: Sequence[dict[str, Any]], name: str) -> str:
    pairs = [lengths(result, name) for result in results]
    plain, by_size = (spread(column) for column in zip(*pairs, strict=True))
    return f"{plain} ({by_size})"


def lengths(result: dict[str, Any], name: str) -> tuple[float, float]:
    """Return a mean word length and the same weighted by size; what is not rounded has 32 bits."""
    return (result.get(name) or 32.0), (result.get(f"{name}_by_size") or 32.0)


def mean_bits(result: dict[str, Any]) -> float:
    """Return the mean word length of weights and inputs, layers unweighted."""
    return statistics.mean(lengths(result, name)[0] for name in (WEIGHTS, INPUTS))


def held_out_accuracy(folder: Path) -> float | None:
    """Return the accuracy on validation images after the last epoch; None without such images."""
    found = epochs_of(folder, "validation_accuracy")
    return found[-1] if found else None


def epochs_of(folder: Path, column: str) -> list[float]:
    """Return what a run measured after each epoch; nothing where it did not measure it."""
    path = folder / METRICS
    return [number(path, row, column) for row in read_rows(path) if row.get(column)]


def clamped(folder: Path) -> float | None:
    """Return the share of activations clamped in the last epoch, mean over the modules.

    None where none is rounded, and where the run was stopped within that epoch: the share is of whole
    epochs. It is recorded in the run's TensorBoard files alone.
    """
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={SCALARS: 1}).Reload()
    tags = [tag for tag in events.Tags()[SCALARS] if tag.startswith("saturation/")]
    shares = [events.Scalars(tag)[-1] for tag in tags]
    last = max(epochs_of(folder, "step"), default=0) if shares else 0
    shown = [share.value for share in shares if share.step == last]
    return statistics.mean(shown) if shown else None


def _modelled(run: PlannedRun, result: dict[str, Any]) -> list[float | None]:
    """Return SU, SZ, MEM and EBOPs (millions) of a run, None where they have no model."""
    try:
        found = totals(read_run(run.folder))
    except RunError as error:
        print(f"not modelled: {error}", file=sys.stderr)
        return [None] * len(MODELLED)
    values = {total.name: total.value for total in found}
    return [values[name] for name in MODELLED]
