"""What came of the sections, as JSON and as Markdown."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marvin.files import write_atomic

__all__ = ["markdown", "save"]

TITLES = {
    "correctness": "Kernels that differ from the reference",
    "bandwidth": "Bandwidth of kernels",
    "products": "Integer products",
    "optimizer": "A step of the optimizer",
    "training": "Training",
    "operators": "Few-bit activations and DIVISION beside torch",
    "models": "Keeping less for backward",
}


def save(record: Mapping[str, Any], path: Path) -> None:
    """Write a JSON file, and a Markdown file of the same name beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(record, indent=2) + "\n")
    write_atomic(path.with_suffix(".md"), markdown(record))


def markdown(record: Mapping[str, Any]) -> str:
    """Return the record as text: a table for each section."""
    about = "; ".join(f"{name} {value}" for name, value in record["machine"].items())
    lines = ["# On a GPU", "", "    python -m benchmarks.gpu", "", f"{about}.", ""]
    lines += ["Medians of interleaved turns, by CUDA events.", ""]
    for name, section in record["sections"].items():
        lines += [f"## {TITLES[name]}", "", *_section(name, section), ""]
    return "\n".join(lines)


def _section(name: str, section: Mapping[str, Any]) -> Sequence[str]:
    for word in ("failed", "refused"):
        if word in section:
            return [f"{word}: {section[word]}"]
    rows = section["rows"]
    if name != "correctness":
        return _table(rows)
    wrong = [row for row in rows if row["wrong"]]
    if wrong:
        return _table(wrong)
    return [f"None of {len(rows)}: bit for bit; values of few-bit activations within 2 units."]


def _table(rows: Sequence[Mapping[str, Any]]) -> Sequence[str]:
    if not rows:
        return ["Nothing."]
    header = list(rows[0])
    align = [":---" if isinstance(rows[0][name], str) else "---:" for name in header]
    cells = [[_text(row[name]) for name in header] for row in rows]
    return [f"| {' | '.join(line)} |" for line in (header, align, *cells)]


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)
