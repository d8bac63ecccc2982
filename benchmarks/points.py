"""Draw accuracy against bits of the runs in a table.

    python -m benchmarks.points benchmarks/results/full-size-80.csv docs/images/full-size-80.png \\
        --title "ResNet20 on CIFAR-10 (JPEG q75), 80 epochs"

Each kind of run is a point: means over its seeds, with the standard deviation where there are several.
"""

from perfmodel.arguments import Parser, message_of

PARSER = Parser("python -m benchmarks.points", (__doc__ or "").partition("\n")[0])
PARSER.add_argument(
    "table",
    metavar="FILE.csv",
    help="with columns run, test_accuracy, weight_bits and input_bits",
)
PARSER.add_argument("picture", metavar="FILE.png", help="to write")
PARSER.add_argument("--title", metavar="STR", default="", help="above the picture")

if __name__ == "__main__":  # --help and slips are answered before matplotlib loads
    PARSER.parse_args()

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figure import Point, draw, save
from perfmodel.files import RunError, accuracy_percent, number, read_rows

__all__ = ["read"]

COLUMNS = "run", "test_accuracy", "weight_bits", "input_bits"
NAMES = {"lsq": "LSQ", "marvin": "MARViN"}  # as their authors write them


def read(path: Path) -> list[Point]:
    """Return the points of a table; bits are the mean of weights' and inputs'.

    Raises:
        RunError: The table is cut off, has no such columns, no row, or an accuracy that is not from 0 to 1.
    """
    points: dict[str, Point] = {}
    for row in read_rows(path, COLUMNS):
        first, *rest = row["run"].split("-")
        name = " ".join([NAMES.get(first, first), *rest])
        weights, inputs = (number(path, row, column) for column in COLUMNS[2:])
        point = points.setdefault(name, Point(name, [], []))
        point.bits.append((weights + inputs) / 2)
        point.accuracy.append(accuracy_percent(path, row))
    if not points:
        raise RunError(f"{path} must have a row, has none")
    return list(points.values())


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    arguments = PARSER.parse_args(words)
    try:
        save(draw(read(Path(arguments.table)), arguments.title), Path(arguments.picture))
    except (RunError, OSError) as error:
        sys.exit(f"{PARSER.prog}: {message_of(error)}")


if __name__ == "__main__":
    main()
