"""Runs in a CSV file: each is a row that is written when it ends, and not made again while it is there."""

import csv
from pathlib import Path
from typing import NamedTuple, TypeVar

__all__ = ["append", "read"]

_Run = TypeVar("_Run", bound=NamedTuple)


def read(kind: type[_Run], path: Path) -> list[_Run]:
    """Return the runs of a file; none where there is no file.

    Args:
        kind: A named tuple of text and numbers; a field's type reads the column of its name.
        path: The file.
    """
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    types = kind.__annotations__
    return [kind._make(types[name](row[name]) for name in kind._fields) for row in rows]


def append(path: Path, *parts: NamedTuple) -> None:
    """Write a run behind the others; a new file begins with the names of its fields.

    Args:
        path: The file.
        parts: What a row is made of, from left to right.
    """
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow([name for part in parts for name in part._fields])
        writer.writerow([value for part in parts for value in part])
