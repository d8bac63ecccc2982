"""The files of a run folder, read by whoever finds one: whole and of their kind, or refused."""

import csv
import io
import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "CHECKPOINT",
    "CONFIG",
    "ENVIRONMENT",
    "FILES",
    "LAYERS",
    "METRICS",
    "RESULT",
    "TIMING",
    "TRACE",
    "RunError",
    "UserError",
    "accuracy_percent",
    "number",
    "read_config",
    "read_json",
    "read_result",
    "read_rows",
    "read_text",
    "replace_file",
    "shown",
    "whole",
]

CONFIG, ENVIRONMENT, RESULT = "config.json", "environment.json", "result.json"
LAYERS, METRICS, TRACE, TIMING = "layers.csv", "metrics.csv", "trace.csv", "timing.csv"
CHECKPOINT = "checkpoint.pt"
FILES = (CONFIG, ENVIRONMENT, CHECKPOINT, RESULT, LAYERS, METRICS, TRACE, TIMING)


class UserError(ValueError):
    """Something the user can put right; commands show it without a traceback."""


class RunError(UserError):
    """A run folder that cannot be used; says which file, and why."""


def read_config(folder: Path) -> dict[str, Any]:
    """Return what a run was asked.

    Raises:
        RunError: The folder is not that of a run, or the file is damaged.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise RunError(f"{folder} must be the folder of a run, found no {CONFIG} in it")
    try:
        return read_json(path)
    except RunError as error:
        raise RunError(f"{path} must hold a run's configuration: {error}") from error


def read_result(folder: Path) -> dict[str, Any]:
    """Return what came of a run; ``mean_word_length`` is None or missing where it was in float32.

    Raises:
        RunError: It is not finished, or the file is damaged.
    """
    path = folder / RESULT
    if not path.is_file():
        raise RunError(f"{folder} must be a finished run, found no {RESULT} in it")
    values = read_json(path)
    is_float = "mean_word_length" in values and values["mean_word_length"] is None
    for name in ("test_accuracy", *(() if is_float else ("mean_word_length",))):
        values[name] = number(path, values, name)
    return values


def read_text(path: Path) -> str:
    """Return what is in a file.

    Raises:
        RunError: There is none, or it is not text.
    """
    try:
        if path.exists() and not path.is_file():  # reading a pipe or a device would never end
            raise RunError(f"{path} must be a file, got a folder or a device")
        return path.read_text(encoding="utf-8-sig")  # spreadsheets write a byte order mark
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RunError(f"{path} must be there, found none") from error
    except (OSError, UnicodeDecodeError, MemoryError) as error:
        raise RunError(f"{path} must be text: {error or 'too large'}") from error


def replace_file(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` at once; a link there is replaced, what it names stays.

    Raises:
        OSError: It cannot be written; ``path`` is named.
    """
    # a name of its own: in containers process ids repeat, and what a kill left is another's
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        RunError: There is none.
    """
    text = read_text(path)
    try:
        values = json.loads(text)
        json.dumps(values, ensure_ascii=False).encode()  # texts may have halves of characters
    except (ValueError, RecursionError, MemoryError) as error:
        raise RunError(f"{path} must hold a JSON object: {error}") from error
    if not isinstance(values, dict):
        raise RunError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values


def read_rows(path: Path, columns: Sequence[str] = ()) -> list[dict[str, str]]:
    """Return the rows of a table whose ``columns`` are all filled.

    Raises:
        RunError: There is no table with such columns, or it is cut off.
    """
    text = read_text(path)
    try:
        reader = csv.DictReader(io.StringIO(text))
        rows, names = list(reader), reader.fieldnames or ()
    except csv.Error as error:
        raise RunError(f"{path} must be a table: {error}") from error
    if not names or not set(columns) <= set(names):
        got = ", ".join(names) or "an empty file"
        raise RunError(f"{path} must have columns {', '.join(columns) or 'in it'}, got {got}")
    for line, row in enumerate(rows, start=2):
        is_cut = any(cell is None for cell in row.values()) or any(not row[n] for n in columns)
        if is_cut or (line > len(rows) and text[-1] != "\n"):
            raise RunError(f"{path} must be whole, line {line} is cut off")
        if None in row:  # where csv puts cells without a column
            raise RunError(f"{path} must have a column for each cell, got more in line {line}")
    return rows


def whole(path: Path, values: Mapping[str, object], name: str, low: int, high: int) -> int:
    """Return a whole number that a file holds: in JSON as one, in a table as text.

    Args:
        path: The file.
        values: What it holds.
        name: Of the number.
        low: The smallest that is allowed.
        high: The largest.

    Raises:
        RunError: It is missing, no whole number or out of range.
    """
    value = values.get(name)
    try:
        found = int(value) if isinstance(value, str) and path.suffix == ".csv" else value
    except ValueError:
        found = None
    if not isinstance(found, int) or isinstance(found, bool) or not low <= found <= high:
        required = f"a whole number from {low} to {high:,}"
        raise RunError(f"{path}: {name} must be {required}, got {shown(value)}")
    return found


def number(path: Path, values: Mapping[str, Any], name: str) -> float:
    """Return a finite number that a file holds, as JSON or as text.

    Raises:
        RunError: It is missing or none.
    """
    try:
        found = float(values[name])
    except (KeyError, OverflowError, TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        raise RunError(f"{path}: {name} must be a number, got {shown(values.get(name))}")
    return found


def accuracy_percent(path: Path, values: Mapping[str, object]) -> float:
    """Return the test accuracy of a run, %; files hold it from 0 to 1.

    Raises:
        RunError: It is missing, no number, or out of range.
    """
    found = number(path, values, "test_accuracy")
    if not 0 <= found <= 1:
        raise RunError(f"{path}: test_accuracy must be from 0 to 1, got {found:g}")
    return 100 * found


def shown(value: object) -> str:
    """Return a value that a file holds as a message shows it: short, and whatever is in it."""
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return f"{value!r:.60}" if is_plain else f"a {type(value).__name__}"
