"""Differences of runs that share their seeds, and whether they show that one is no worse.

    python -m benchmarks.paired simulated=runs/x/simulated-seed* int8=runs/x/int8-seed*

prints a table of the groups and one of all differences, each group less every one before it.

A difference of single runs says nothing here: means over seeds do, with their standard error. That an
average is close is no proof; that it is not worse by more than a margin is shown where the one-sided
95 % bound of the paired differences, by Student's t, lies above minus the margin.
"""

from perfmodel.arguments import Parser, message_of, real, stop_at_interrupt

MARGIN = 0.5  # points of accuracy
PARSER = Parser("python -m benchmarks.paired", (__doc__ or "").partition("\n")[0])
PARSER.add_argument("words", nargs="+", metavar="NAME=RUN [RUN ...]")
PARSER.add_argument("--margin", type=real(), default=MARGIN, help="points of accuracy")

if __name__ == "__main__":  # --help and slips are answered before torch loads
    stop_at_interrupt()
    PARSER.parse_args()

import itertools
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy.stats import t as student

from perfmodel.files import (
    CONFIG,
    METRICS,
    RESULT,
    RunError,
    accuracy_percent,
    number,
    read_config,
    read_json,
    read_rows,
    whole,
)

__all__ = ["MARGIN", "Group", "Paired", "paired", "read_group", "tables"]

LEVEL = 0.95


@dataclass(frozen=True)
class Paired:
    """Differences seed by seed.

    Args:
        seeds: Those that both sides have.
        values: Ours less theirs, in the seeds' order.
        level: Of the bounds.
    """

    seeds: tuple[int, ...]
    values: tuple[float, ...]
    level: float = LEVEL

    @property
    def mean(self) -> float:
        """Mean difference."""
        return statistics.mean(self.values)

    @property
    def error(self) -> float | None:
        """Standard error of the mean; None for one seed, which tells nothing of it."""
        count = len(self.values)
        return statistics.stdev(self.values) / math.sqrt(count) if count > 1 else None

    @property
    def t(self) -> float | None:
        """Mean over standard error; infinite where all differences are the same."""
        if self.error is None:
            return None
        return self.mean / self.error if self.error else math.copysign(math.inf, self.mean)

    def bound(self, *, upper: bool = False) -> float | None:
        """Return the one-sided bound of the true difference; None for one seed."""
        if self.error is None:
            return None
        reach = float(student.ppf(self.level, len(self.values) - 1)) * self.error
        return self.mean + (reach if upper else -reach)

    def verdict(self, margin: float = MARGIN) -> str:
        """Say whether ours is shown to be no worse by ``margin``; larger must be better."""
        lower, upper = self.bound(), self.bound(upper=True)
        if lower is None or upper is None:
            return "one seed: not decided"
        if lower > -margin:
            return f"yes (bound {lower:+.2f})"
        return (
            f"no (bound {upper:+.2f})" if upper < -margin else f"not decided (bound {lower:+.2f})"
        )

    def shown(self, digits: int = 2) -> str:
        """Return mean and standard error."""
        mean = f"{self.mean:+.{digits}f}"
        return mean if self.error is None else f"{mean} ± {self.error:.{digits}f}"


def paired(
    ours: Mapping[int, float], theirs: Mapping[int, float], level: float = LEVEL
) -> Paired | None:
    """Return the differences over the seeds that both have; None where there are none."""
    seeds = tuple(seed for seed in ours if seed in theirs)
    return Paired(seeds, tuple(ours[s] - theirs[s] for s in seeds), level) if seeds else None


@dataclass(frozen=True)
class Group:
    """Finished runs that differ in their seed.

    Args:
        accuracy: Of the test, %, by seed.
        loss: Of training in the last epoch, by seed.
        bits: Mean word length of weights and of layers' inputs when the run ended, by seed.
    """

    accuracy: dict[int, float]
    loss: dict[int, float]
    bits: dict[int, tuple[float, float]]


def read_group(folders: Sequence[Path]) -> Group:
    """Read run folders.

    Raises:
        RunError: A folder holds no finished run, or two have one seed.
    """
    found = Group({}, {}, {})
    for folder in folders:
        seed = whole(folder / CONFIG, read_config(folder), "seed", 0, 2**63)
        if seed in found.loss:
            raise RunError(f"runs of a group must have different seeds, got {seed} in {folder} too")
        result = read_json(folder / RESULT)
        found.accuracy[seed] = accuracy_percent(folder / RESULT, result)
        names = "mean_word_length", "mean_input_word_length"
        weights, inputs = (
            number(folder / RESULT, result, n) if result.get(n) else 32.0 for n in names
        )
        found.bits[seed] = weights, inputs
        row = read_rows(folder / METRICS, ("train_loss",))[-1]
        found.loss[seed] = number(folder / METRICS, row, "train_loss")
    return found


def tables(groups: Mapping[str, Group], margin: float = MARGIN) -> str:
    """Return two Markdown tables: the groups, and each less every one before it."""
    rows = [
        ["", "seeds", "training loss", "test accuracy, %", "weights, bits", "inputs, bits"],
        ["---"] * 6,
    ]
    for name, group in groups.items():
        weights, inputs = zip(*group.bits.values(), strict=True)
        seeds = ", ".join(map(str, group.loss))
        cells = [_mean(group.loss.values(), 4), _mean(group.accuracy.values())]
        rows.append([name, seeds, *cells, _mean(weights), _mean(inputs)])
    question = f"no worse by {margin:g} points?"
    others = [
        ["difference", "seeds", "training loss", "its t", "test accuracy, points", question],
        ["---"] * 6,
    ]
    for before, name in itertools.combinations(groups, 2):
        loss = paired(groups[name].loss, groups[before].loss)
        accuracy = paired(groups[name].accuracy, groups[before].accuracy)
        if loss is None or accuracy is None:
            continue
        t = "" if loss.t is None else f"{loss.t:+.1f}"
        cells = [loss.shown(4), t, accuracy.shown(), accuracy.verdict(margin)]
        others.append([f"{name} less {before}", str(len(loss.seeds)), *cells])
    return "\n".join([*map(_line, rows), "", *map(_line, others)])


def _mean(values: Iterable[float], digits: int = 2) -> str:
    numbers = list(values)
    mean = f"{statistics.mean(numbers):.{digits}f}"
    return mean if len(numbers) == 1 else f"{mean} ± {statistics.stdev(numbers):.{digits}f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _named(word: str) -> tuple[str | None, str]:
    """Return the name that a word of the command line gives, if any, and its run: folders may have "=" in their names."""
    if Path(word).exists():
        return None, word
    ends = [i for i, character in enumerate(word) if character == "="]
    found = next((i for i in ends if Path(word[i + 1 :]).exists()), ends[-1] if ends else None)
    return (None, word) if found is None else (word[:found], word[found + 1 :])


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables of the groups on the command line."""
    given = PARSER.parse_args(argv)
    folders: dict[str, list[Path]] = {}
    for word in given.words:
        name, first = _named(word)
        if name is not None:
            if name in folders:
                PARSER.error(f"names of groups must be unique, got {name} twice")
            folders[name] = []
        elif not folders:
            PARSER.error(f"the first run must have a name, as NAME=RUN, got {word}")
        folders[next(reversed(folders))].append(Path(first))
    try:
        print(tables({name: read_group(own) for name, own in folders.items()}, given.margin))
    except RunError as error:
        sys.exit(f"python -m benchmarks.paired: error: {message_of(error)}")


if __name__ == "__main__":
    main()
