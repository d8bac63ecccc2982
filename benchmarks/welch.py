"""Whether one kind of run is no worse than another, where their seeds have nothing in common.

    python -m benchmarks.welch benchmarks/results/full-size.csv target-5-bits float32

prints means over seeds, the difference with its standard error, and its one-sided 95 % bound, by
Welch's t-test. Runs of one seed share little where one of them rounds: the noise differs from the first
step on. So pairs spare nothing, and a kind of run may have more seeds than the other.
"""

from perfmodel.arguments import Parser, message_of, real

MARGIN = 0.5  # points of accuracy
PARSER = Parser("python -m benchmarks.welch", (__doc__ or "").partition("\n")[0])
PARSER.add_argument("table", metavar="FILE.csv", help="with columns run, seed and test_accuracy")
PARSER.add_argument("ours", metavar="OURS", help="a name in the column run")
PARSER.add_argument("theirs", metavar="THEIRS", help="another")
PARSER.add_argument("--margin", type=real(), default=MARGIN, help="points of accuracy")

if __name__ == "__main__":  # --help and slips are answered before scipy loads
    PARSER.parse_args()

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy.stats import t as student

from perfmodel.files import RunError, number, read_rows

__all__ = ["Unpaired"]

LEVEL = 0.95


@dataclass(frozen=True)
class Unpaired:
    """Two samples of unlike size and spread; larger is better.

    Args:
        ours: Accuracies, %, two at least.
        theirs: So too.

    Source:
        B. L. Welch, Biometrika 34 (1947): the degrees of freedom.
    """

    ours: Sequence[float]
    theirs: Sequence[float]

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
        """Return the one-sided 95 % bound of the true difference."""
        reach = float(student.ppf(LEVEL, self.freedom)) * self.error
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


def read(path: Path, name: str) -> list[float]:
    """Return the accuracies of a kind of run, %.

    Raises:
        RunError: The table is cut off, or has no such columns.
        ValueError: There are fewer than two, or two of one seed, or accuracies are not 0 to 1.
    """
    columns = "run", "seed", "test_accuracy"
    rows = [row for row in read_rows(path, columns) if row["run"] == name]
    if len(rows) < 2:
        raise ValueError(f"{path} must have two runs of {name!r} or more, got {len(rows)}")
    if len({row["seed"] for row in rows}) < len(rows):
        raise ValueError(f"{path} must have runs of {name!r} with different seeds, got one twice")
    found = [number(path, row, "test_accuracy") for row in rows]
    if not all(0 <= accuracy <= 1 for accuracy in found):
        raise ValueError(f"{path} must have accuracies of 0 to 1, got {max(found)} of {name!r}")
    return [100 * accuracy for accuracy in found]


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    arguments = PARSER.parse_args(words)
    names = arguments.ours, arguments.theirs
    try:
        samples = [read(Path(arguments.table), name) for name in names]
    except (RunError, OSError, ValueError) as error:
        sys.exit(f"{PARSER.prog}: {message_of(error)}")
    for name, own in zip(names, samples, strict=True):
        mean, spread = statistics.mean(own), statistics.stdev(own)
        print(f"{name}: {mean:.2f} ± {spread:.2f} %, {len(own)} seeds")
    found = Unpaired(*samples)
    print(f"difference: {found.mean:+.2f} ± {found.error:.2f} points")
    print(f"no worse by {arguments.margin:g} points? {found.verdict(arguments.margin)}")


if __name__ == "__main__":
    main()
