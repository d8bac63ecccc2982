"""Check and time every kernel on one GPU, and what is made of them, in under eight minutes.

    python -m benchmarks.gpu

Figures come only of kernels that agree with the reference. A section that fails stops no other;
what there is is written after each, to benchmarks/results/gpu.json and gpu.md.
"""

from pathlib import Path

from perfmodel.arguments import Parser, real, stop_at_interrupt

RESULT = Path("benchmarks/results/gpu.json")
PARSER = Parser("python -m benchmarks.gpu", (__doc__ or "").partition("\n")[0])
PARSER.add_argument("--json", type=Path, default=RESULT, help=f"default: {RESULT}")
PARSER.add_argument(
    "--minutes", type=real(), default=8.0, help="begin no section after so long (default: 8)"
)

if __name__ == "__main__":  # --help and slips are answered before torch loads
    stop_at_interrupt()
    PARSER.parse_args()

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import machine
from benchmarks.gpu import (
    bandwidth,
    correctness,
    optimizer,
    products,
    report,
    saving,
    training,
)
from benchmarks.gpu.kernels import JOBS
from benchmarks.gpu.sizes import FULL, Sizes

__all__ = ["SECTIONS", "main", "run"]

Rows = list[dict[str, object]]
# each section's rows, and the groups of kernels that they stand on
SECTIONS: dict[str, tuple[Callable[[torch.device, Sizes], Rows], tuple[str, ...]]] = {
    "products": (products.rows, ("products",)),
    "training": (training.rows, ("rounding", "histogram", "products")),
    "optimizer": (optimizer.rows, ("rounding", "histogram")),
    "operators": (saving.operators, ("few_bit", "division")),
    "models": (saving.models, ("few_bit", "division")),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; the status is 1 where anything failed."""
    arguments = PARSER.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit(
            "python -m benchmarks.gpu needs a GPU that PyTorch can use through CUDA, found none"
        )
    record = run(torch.device("cuda"), FULL, arguments.json, arguments.minutes)
    print(report.markdown(record))
    sys.exit(bool(problems(record)))


def run(device: torch.device, sizes: Sizes, path: Path, minutes: float) -> dict[str, Any]:
    """Do all sections, kernels first, and return the record that is also in ``path``."""
    end = time.monotonic() + 60 * minutes
    record: dict[str, Any] = {"machine": describe(device), "sections": {}}

    def add(name: str, section: dict[str, Any]) -> None:
        record["sections"][name] = section
        report.save(record, path)
        print(f"{name}: {section.get('seconds', 'none')} s", file=sys.stderr, flush=True)

    checked = _section(lambda: correctness.rows(device, sizes))
    add("correctness", checked)
    wrong = _wrong(checked)
    timed = [job for job in JOBS if job.name not in wrong]
    add("bandwidth", _section(lambda: bandwidth.rows(device, sizes, timed)))
    for name, (rows, groups) in SECTIONS.items():
        broken = [job.name for job in JOBS if job.name in wrong and job.group in groups]
        if broken:
            add(name, {"refused": f"not as the reference: {', '.join(broken)}"})
        elif time.monotonic() > end:
            add(name, {"failed": f"no time was left of {minutes:g} minutes"})
        else:
            add(name, _section(lambda rows=rows: rows(device, sizes)))
    for problem in problems(record):
        print(problem, file=sys.stderr)
    return record


def _section(rows: Callable[[], Rows]) -> dict[str, Any]:
    """Return the rows and how long they took, or what went wrong."""
    begin = time.monotonic()
    try:
        found = rows()
    except Exception as error:  # what a compiler or a driver raises is not known
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}
    return {"seconds": round(time.monotonic() - begin, 1), "rows": found}


def _wrong(section: dict[str, Any]) -> set[str]:
    """Return the names of kernels that get no figure: all of them where none was checked."""
    if "rows" not in section:
        return {job.name for job in JOBS}
    return {row["kernel"] for row in section["rows"] if row["wrong"]}


def problems(record: dict[str, Any]) -> list[str]:
    """Return a line for each kernel that is wrong and each section that has no figures."""
    found = []
    for name, section in record["sections"].items():
        found += [
            f"{name} {word}: {section[word]}" for word in ("failed", "refused") if word in section
        ]
    checked = record["sections"]["correctness"].get("rows", [])
    return found + [f"{row['kernel']}: {row['wrong']}" for row in checked if row["wrong"]]


def describe(device: torch.device) -> dict[str, object]:
    """Return what the figures depend on."""
    facts = machine.describe()
    if device.type == "cuda":
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts |= {"capability": capability, "cuda": torch.version.cuda}
    return facts


if __name__ == "__main__":
    main()
