"""``python -m train.table RUN ...``: finished runs as a Markdown table, seeds taken together."""

from pathlib import Path

from perfmodel.arguments import (
    Parser,
    encodable,
    message_of,
    reader_may_leave,
    stop_at_interrupt,
)

PARSER = Parser("python -m train.table", __doc__ or "")
PARSER.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a finished run's folder")

if __name__ == "__main__":  # --help and slips are answered before torch loads
    stop_at_interrupt()
    PARSER.parse_args()

import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from train.config import Config
from train.errors import UserError
from train.records import RunFolder

__all__ = ["main", "spread", "table"]

HEADER = (
    "| model | data | optimizer | epochs | seeds | test accuracy, % | mean word length, bits |\n"
    "|---|---|---|---|---|---|---|"
)
FLOAT_BITS = 32.0
Finished = tuple[Config, dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table of the run folders on the command line."""
    given = PARSER.parse_args(argv)
    try:
        with reader_may_leave():
            print(encodable(table(given.runs)))
    except (UserError, OSError) as error:
        sys.exit(f"python -m train.table: error: {message_of(error)}")


def table(paths: Iterable[Path]) -> str:
    """Return one row for all runs that differ in nothing but their seed.

    Means are over seeds, with the sample's standard deviation behind them where there are
    several. The word length is that of the layers at the end of the run, unweighted.

    Raises:
        UserError: A folder is not that of a finished run, or two runs of a row have one seed.
    """
    groups: dict[Config, list[Finished]] = {}
    seen: dict[Config, Path] = {}
    for path in paths:
        config, result = read(path)
        same = replace(config, seed=0, run="", data_dir="", device="", checkpoint_steps=0)
        own = replace(same, seed=config.seed)
        if own in seen:
            raise UserError(
                f"runs of one row must have seeds of their own, got seed {config.seed} of {seen[own]} "
                f"and of {path}: leave one out"
            )
        seen[own] = path
        groups.setdefault(same, []).append((config, result))
    return "\n".join([HEADER, *(row(runs) for runs in groups.values())])


def read(path: Path) -> Finished:
    """Return configuration and result of a run.

    Raises:
        UserError: The run is not finished, or ``path`` is no run folder.
    """
    folder = RunFolder(path)
    return folder.read_config(), folder.read_result()


def row(runs: Sequence[Finished]) -> str:
    """Return the row of one or more seeds."""
    config = runs[0][0]
    results = [result for _, result in runs]
    seeds = ", ".join(str(c.seed) for c, _ in runs)
    accuracy = spread([100 * result["test_accuracy"] for result in results])
    lengths = [result["mean_word_length"] or FLOAT_BITS for result in results]
    bits = "32" if config.optimizer == "sgd" else spread(lengths)
    cells = config.model, config.dataset, config.method, config.epochs, seeds, accuracy, bits
    return f"| {' | '.join(map(str, cells))} |"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the mean, and the standard deviation where there are several values."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


if __name__ == "__main__":
    main()
