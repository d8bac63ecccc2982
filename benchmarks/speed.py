"""Write the tables of ``docs/integer_speed.md`` and of the README from ``benchmarks/results``.

    python -m benchmarks.speed

A cell says how many times as fast as float32, and as bfloat16, our own code was: the quotient of the
medians of one run, against the faster of PyTorch's two layouts. Below 1 it is bold.
"""

from perfmodel.arguments import Parser

PARSER = Parser("python -m benchmarks.speed", (__doc__ or "").partition("\n")[0])

if __name__ == "__main__":  # --help and slips are answered before anything loads
    PARSER.parse_args()

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reproduce import put

ROOT = Path(__file__).parent.parent
RESULTS, PAGE, README = (
    ROOT / "benchmarks/results",
    ROOT / "docs/integer_speed.md",
    ROOT / "README.md",
)
STEPS = {  # a column: the files that it has
    "Xeon with AMX": ("int8_training-amx", "int8_models-amx", "int8_joins-amx", "int8_linear-amx"),
    "Zen 5": ("int8_training-zen5-default-wait",),
    "Zen 4": ("int8_training-zen4", "int8_models-zen4", "int8_joins-zen4", "int8_linear-zen4"),
    "Zen 3, passive": ("int8_training-zen3",),
}
INFERENCE = {
    "Xeon with AMX": ("int8_inference-amx", "int8_linear-amx"),
    "Zen 5": ("int8_inference-zen5",),
    "Zen 4": ("int8_inference-zen4", "int8_linear-zen4"),
}
PASSIVE = {
    "Xeon with AMX, passive": ("int8_training-amx-passive",),
    "Zen 5, passive": ("int8_training-zen5",),
    "Zen 4, passive": ("int8_training-zen4-passive",),
}
SCALING = {
    "Zen 5, two threads": ("int8_scaling-zen5",),
    "Zen 5, one thread, passive": ("int8_scaling-zen5-one-thread",),
    "Zen 4, two threads": ("int8_scaling-zen4",),
}
SHOWN = (  # in the README
    "ResNet20, 128 images of 32x32",
    "timm resnet50, 32 images of 64x64",
    "timm efficientnet_b0, 32 images of 64x64",
    "ViT, 128 images of 32x32",
    "BERT, 16 texts of 64 words",
)


@dataclass(frozen=True)
class Row:
    """One case of one run."""

    case: str  # without what it does
    does: str  # "training" or "inference"
    medians_s: dict[str, float]  # by contestant
    runs: int

    def ratios(self, ours: str = "ours") -> str:
        """Return how many times as fast as float32, and as bfloat16, a contestant is."""
        kinds = ("float32", "bfloat16")
        return ", ".join(filter(None, (self._ratio(kind, ours) for kind in kinds)))

    def _ratio(self, kind: str, ours: str) -> str:
        best = [s for name, s in self.medians_s.items() if name.startswith(kind)]
        if not best or ours not in self.medians_s:
            return ""
        ratio = min(best) / self.medians_s[ours]
        return f"{ratio:.1f}" if ratio >= 1 else f"**{ratio:.1f}**"


def main() -> None:
    """Run the command line."""
    PARSER.parse_args()
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    README.write_text(readme(README.read_text(encoding="utf-8")), encoding="utf-8")


def page(text: str) -> str:
    """Return the page with its tables made anew."""
    text = put(text, "steps", table(STEPS, "training"))
    text = put(text, "passive", table(PASSIVE, "training"))
    text = put(text, "scaling", table(SCALING, "training"))
    return put(text, "inference", table(INFERENCE, "inference", "prepacked"))


def readme(text: str) -> str:
    """Return the README with its table made anew."""
    columns = {column: STEPS[column] for column in ("Zen 4", "Xeon with AMX")}
    lines, _, _ = table(columns, "training", only=SHOWN).partition("\n\n")
    return put(text, "speed", lines)


def table(
    columns: dict[str, tuple[str, ...]], does: str, also: str = "", only: Collection[str] = ()
) -> str:
    """Return a Markdown table of what files have, and a line on each column.

    Args:
        columns: Names of files by column, without ``.json``.
        does: Which rows, ``"training"`` or ``"inference"``.
        also: A contestant that has a column of its own beside each.
        only: Cases, in their order; all that the files have if empty.
    """
    found: dict[str, dict[str, Row]] = {column: {} for column in columns}
    for column, files in columns.items():
        for row in (row for file in files for row in rows(file) if row.does == does):
            found[column].setdefault(row.case, row)  # the first file that has it
    cases = only or dict.fromkeys(case for by_case in found.values() for case in by_case)
    heads: list[tuple[str, str]] = []
    for column, by_case in found.items():
        heads.append((column, "ours"))
        if any(also in row.medians_s for row in by_case.values()):
            heads.append((column, also))
    names = [column if ours == "ours" else f"{column}, {ours}" for column, ours in heads]
    lines = [["", *names], ["---"] * (1 + len(heads))]
    for case in cases:
        of_case = [(found[column].get(case), ours) for column, ours in heads]
        cells = [row.ratios(ours) if row else "" for row, ours in of_case]
        if any(cells):
            lines.append([case, *cells])
    notes = [f"- {column}: {'; '.join(map(note, files))}." for column, files in columns.items()]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *notes])


def rows(file: str) -> Iterator[Row]:
    """Yield the rows of a file."""
    for row in _read(file)["rows"]:
        case, _, does = row["case"].rpartition(", ")
        if does not in ("training", "inference"):
            case, does = row["case"], "inference" if "inference" in file else "training"
        yield Row(case, does, row["median_s"], row["runs"])


def note(file: str) -> str:
    """Return when and how a file was measured."""
    facts, counts = _read(file)["machine"], [row.runs for row in rows(file)]
    kept = ", malloc keeps freed memory" if facts.get("freed memory") == "kept" else ""
    return f"`{file}.json`, {facts['date'][:10]}, {min(counts)} to {max(counts)} runs{kept}"


def _read(file: str) -> dict:
    return json.loads((RESULTS / f"{file}.json").read_text())


if __name__ == "__main__":
    main()
