"""Whether one kind of run is no worse than another, by means over seeds and seed by seed.

    python -m benchmarks.welch benchmarks/results/full-size.csv target-5-bits float32

prints means over seeds, the difference with its standard error, and its one-sided 95 % bound, by
Welch's t-test: a kind of run may have more seeds than the other, and pairs count for nothing. Then the same
of the seeds that both have, by Student's t-test of their differences: runs of one seed share first weights
and batches. Which of the two decides is chosen before the runs are seen.
"""

from perfmodel.arguments import Parser, message_of, real

MARGIN = 0.5  # points of accuracy
PARSER = Parser("python -m benchmarks.welch", (__doc__ or "").partition("\n")[0])
PARSER.add_argument("table", metavar="FILE.csv", help="with columns run, seed and test_accuracy")
PARSER.add_argument("ours", metavar="OURS", help="a name in the column run")
PARSER.add_argument("theirs", metavar="THEIRS", help="another")
PARSER.add_argument("--margin", type=real(), default=MARGIN, help="points of accuracy")
PARSER.add_argument(
    "--level", type=real(), default=95, help="%% of the one-sided bound (default: 95)"
)

if __name__ == "__main__":  # --help and slips are answered before scipy loads
    PARSER.parse_args()

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy.stats import t as student

from benchmarks.paired import LEVEL, paired
from perfmodel.files import RunError, accuracy_percent, read_rows, whole

__all__ = ["Unpaired"]


@dataclass(frozen=True)
class Unpaired:
    """Two samples of unlike size and spread; larger is better.

    Args:
        ours: Accuracies, %, two at least.
        theirs: So too.
        level: Of the bounds.

    Source:
        B. L. Welch, Biometrika 34 (1947): the degrees of freedom.
    """

    ours: Sequence[float]
    theirs: Sequence[float]
    level: float = LEVEL

    @property
    def mean(self) -> float:
        """Ours less theirs."""
        return statistics.mean(self.ours) - statistics.mean(self.theirs)

    @property
    def error(self) -> float:
        """Standard error of the difference."""
        return math.sqrt(sum(self._parts))

    @property
    def freedom(self) -> float:
        """Degrees of freedom."""
        counts = len(self.ours), len(self.theirs)
        rest = sum(part**2 / (n - 1) for part, n in zip(self._parts, counts, strict=True))
        return sum(self._parts) ** 2 / rest if rest else math.inf

    def bound(self, *, upper: bool = False) -> float:
        """Return the one-sided bound of the true difference."""
        reach = float(student.ppf(self.level, self.freedom)) * self.error
        return self.mean + (reach if upper else -reach)

    def verdict(self, margin: float) -> str:
        """Say whether ours is shown to be no worse by ``margin``."""
        if self.bound() > -margin:
            return f"yes (bound {self.bound():+.2f})"
        upper = self.bound(upper=True)
        return (
            f"no (bound {upper:+.2f})" if upper < -margin else f"not decided ({self.bound():+.2f})"
        )

    @property
    def _parts(self) -> tuple[float, float]:
        both = self.ours, self.theirs
        ours, theirs = (statistics.variance(own) / len(own) for own in both)
        return ours, theirs


def read(path: Path, name: str) -> dict[int, float]:
    """Return the accuracies of a kind of run, %, by seed.

    Raises:
        RunError: The table is cut off, has no such columns, or an accuracy that is not from 0 to 1.
        ValueError: There are fewer than two, or two of one seed.
    """
    columns = "run", "seed", "test_accuracy"
    rows = [row for row in read_rows(path, columns) if row["run"] == name]
    if len(rows) < 2:
        raise ValueError(f"{path} must have two runs of {name!r} or more, got {len(rows)}")
    seeds = [whole(path, row, "seed", 0, 2**63) for row in rows]
    if len(set(seeds)) < len(rows):
        raise ValueError(f"{path} must have runs of {name!r} with different seeds, got one twice")
    return {seed: accuracy_percent(path, row) for seed, row in zip(seeds, rows, strict=True)}


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    arguments = PARSER.parse_args(words)
    names = arguments.ours, arguments.theirs
    if not 50 < arguments.level < 100:
        PARSER.error(f"--level must be between 50 and 100, got {arguments.level:g}")
    try:
        samples = [read(Path(arguments.table), name) for name in names]
    except (RunError, OSError, ValueError) as error:
        sys.exit(f"{PARSER.prog}: {message_of(error)}")
    for name, own in zip(names, samples, strict=True):
        mean, spread = statistics.mean(own.values()), statistics.stdev(own.values())
        print(f"{name}: {mean:.2f} ± {spread:.2f} %, {len(own)} seeds")
    margin, level = arguments.margin, arguments.level / 100
    ours, theirs = samples
    found = Unpaired(tuple(ours.values()), tuple(theirs.values()), level)
    print(f"difference: {found.mean:+.2f} ± {found.error:.2f} points")
    print(f"no worse by {margin:g} points? {found.verdict(margin)}")
    if (pairs := paired(ours, theirs, level)) is not None and len(pairs.seeds) > 1:
        print(f"seed by seed, {len(pairs.seeds)} seeds: {pairs.shown()} points")
        print(f"no worse by {margin:g} points? {pairs.verdict(margin)}")


if __name__ == "__main__":
    main()
