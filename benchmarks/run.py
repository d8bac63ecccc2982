"""Measure an operation and print a Markdown table, ratios first.

    python -m benchmarks.run --op quantize --json benchmarks/results/quantize.json

An operation whose tests are red gets no number.
"""

from pathlib import Path

from perfmodel.arguments import Parser, real, whole

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
    PARSER.parse_args()

import importlib
import json
import subprocess
import sys

import torch

from benchmarks import machine
from benchmarks.timing import Case, Timing, measure


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
    rows = [(case, measure(case, seconds)) for case in op.cases()]
    facts = {**before, "load average after": machine.describe()["load average"]}
    if arguments.json:
        record = {"op": arguments.op, "machine": facts, "rows": [_record(*row) for row in rows]}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    print(_table(arguments.op, rows, facts))


def _require_green(tests: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}\nno numbers: {tests} is not green")


def _table(op: str, rows: list[tuple[Case, Timing]], facts: dict[str, object]) -> str:
    others = [name for name in rows[0][0].contestants if name != "ours"]
    header = [op, *(f"ours / {name}" for name in others), "ours", *others, "runs"]
    lines = [header, ["---", *("---:" for _ in header[1:])]]
    for case, timing in rows:
        ratios = _ratios(timing)
        times = {name: s / case.elements * 1e9 for name, s in timing.medians_s.items()}
        lines.append(
            [
                case.name,
                *(_times_faster(ratios[name]) if name in ratios else "" for name in others),
                *(f"{times[name]:.3g}" if name in times else "" for name in ("ours", *others)),
                str(timing.runs),
            ]
        )
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    about = "; ".join(f"{name} {value}" for name, value in facts.items())
    return f"{table}\n\nMedians of interleaved runs; times in ns an element. {about}."


def _ratios(timing: Timing) -> dict[str, float]:
    ours = timing.medians_s["ours"]
    return {name: ours / other for name, other in timing.medians_s.items() if name != "ours"}


def _times_faster(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio > 0.5 else f"1/{1 / ratio:.1f}"


def _record(case: Case, timing: Timing) -> dict[str, object]:
    return {
        "case": case.name,
        "elements": case.elements,
        "ours over": _ratios(timing),
        "runs": timing.runs,
        "median_s": timing.medians_s,
        "minimum_s": timing.minima_s,
    }


if __name__ == "__main__":
    main()
