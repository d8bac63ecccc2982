"""Measure an operation and print a Markdown table, ratios first.

    python -m benchmarks.run --op quantize --json benchmarks/results/quantize.json

Rows are printed, and written, when they are measured. An operation whose tests are red gets no number.
"""

from pathlib import Path

from perfmodel.arguments import Parser, real, stop_at_interrupt, whole

ROOT = Path(__file__).parent.parent
OPS = sorted(path.stem for path in (ROOT / "benchmarks/ops").glob("[!_]*.py"))
PARSER = Parser("python -m benchmarks.run", (__doc__ or "").partition("\n")[0])
PARSER.add_argument("--op", choices=OPS, required=True)
PARSER.add_argument("--json", type=Path, help="also write machine, times and ratios here")
PARSER.add_argument("--seconds", type=real(), help="for each row, about (default: 4, or the op's)")
PARSER.add_argument("--threads", type=whole(1), help="torch's (default: as torch chooses)")
PARSER.add_argument(
    "--malloc",
    choices=("keep", "default"),
    default="keep",
    help="whether malloc keeps freed memory, as jemalloc does (default), or is as it comes",
)

if __name__ == "__main__":  # --help and slips are answered before torch loads
    stop_at_interrupt()
    PARSER.parse_args()

import gc
import importlib
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from benchmarks import machine
from benchmarks.timing import Case, Timing, measure
from perfmodel.files import replace_file


@dataclass(frozen=True)
class Row:
    """What was measured of one case, whose networks are gone."""

    case: str
    elements: int
    timing: Timing


def main() -> None:
    """Run the command line."""
    arguments = PARSER.parse_args()
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    op = importlib.import_module(f"benchmarks.ops.{arguments.op}")
    seconds = arguments.seconds or getattr(op, "SECONDS", 4.0)
    _require_green(op.TESTS)
    if hasattr(op, "table"):  # an op that counts, and takes no time
        for line in op.table():
            print(line, flush=True)  # what is known stays if the rest is stopped
        return
    kept = arguments.malloc == "keep" and machine.keep_freed_memory()
    before = {**machine.describe(), "freed memory": "kept" if kept else "as malloc likes"}
    rows: list[Row] = []
    facts: dict[str, object] = {}
    for row in _measured(op.cases(), seconds):
        rows.append(row)
        if len(rows) == 1:
            print(_head(arguments.op, row))
        print(_line(row, rows[0]), flush=True)  # what is known stays if the rest is stopped
        facts = {**before, "load average after": machine.load()}
        if arguments.json:
            record = {"op": arguments.op, "machine": facts, "rows": [_record(own) for own in rows]}
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            replace_file(arguments.json, (json.dumps(record, indent=2) + "\n").encode())
    if not rows:
        sys.exit(f"{PARSER.prog}: {arguments.op} found nothing to measure on this machine")
    about = "; ".join(f"{name} {value}" for name, value in facts.items())
    print(f"\nMedians of interleaved runs; times in ns an element. {about}.")


def _measured(cases: Iterable[Case], seconds: float) -> Iterator[Row]:
    """Yield rows; the networks of a case are gone before the next but one is made."""
    for case in cases:
        yield Row(case.name, case.elements, measure(case, seconds))
        gc.collect()  # networks hold each other, and few objects are many bytes


def _require_green(tests: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}\nno numbers: {tests} is not green")


def _head(op: str, first: Row) -> str:
    others = _others(first)
    header = op, *(f"ours / {name}" for name in others), "ours", *others, "runs"
    return f"{_cells(header)}\n{_cells(['---', *('---:' for _ in header[1:])])}"


def _line(row: Row, first: Row) -> str:
    """Return a line of the table whose columns are the first row's."""
    others, ratios = _others(first), _ratios(row.timing)
    times = {name: s / row.elements * 1e9 for name, s in row.timing.medians_s.items()}
    return _cells(
        [
            row.case,
            *(_times_faster(ratios[name]) if name in ratios else "" for name in others),
            *(f"{times[name]:.3g}" if name in times else "" for name in ("ours", *others)),
            str(row.timing.runs),
        ]
    )


def _others(row: Row) -> list[str]:
    return [name for name in row.timing.medians_s if name != "ours"]


def _cells(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _ratios(timing: Timing) -> dict[str, float]:
    ours = timing.medians_s["ours"]
    return {name: ours / other for name, other in timing.medians_s.items() if name != "ours"}


def _times_faster(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio > 0.5 else f"1/{1 / ratio:.1f}"


def _record(row: Row) -> dict[str, object]:
    return {
        "case": row.case,
        "elements": row.elements,
        "ours over": _ratios(row.timing),
        "runs": row.timing.runs,
        "median_s": row.timing.medians_s,
        "minimum_s": row.timing.minima_s,
    }


if __name__ == "__main__":
    main()
