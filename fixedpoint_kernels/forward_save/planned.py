"""What a plan says: print it, draw it, write it to a file, give it to ``convert``."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from fixedpoint_kernels.drawing import draw_cells
from fixedpoint_kernels.forward_save.settings import Division, FewBit

if TYPE_CHECKING:
    from fixedpoint_kernels.figure import Shown

__all__ = ["Candidate", "Plan", "PlannedLayer", "Way"]

Way = Literal["", "recompute", "offload"]
VERSION = 1


@dataclass(frozen=True)
class PlannedLayer:
    """What a plan has for one layer, or for one block that runs again or is offloaded.

    Args:
        layer: Its name.
        module: Its class.
        keeps: ``"whole tensors"``, or what instead.
        error: Squared error that it adds to the gradient of the model, over the squared length of
            that gradient; 0 where the gradient is exact.
        settings: For activation functions and for DIVISION; None and None: the layer stays as it is.
        way: ``"recompute"``: the block keeps its inputs and runs again. ``"offload"``: what it
            keeps lies in the host's memory.
        added_s: Seconds that it adds to a step, measured alone.
    """

    layer: str
    module: str
    keeps: str
    error: float
    settings: tuple[FewBit | None, Division | None]
    way: Way = ""
    added_s: float = 0.0

    @property
    def is_changed(self) -> bool:
        """Whether ``convert`` changes it."""
        return self.settings != (None, None) or bool(self.way)


@dataclass(frozen=True)
class Candidate:
    """What a plan with the choice ``"compile"`` took, or might have taken.

    Args:
        name: In words.
        memory_budget: torch's ``activation_memory_budget``, 0 to 1; None: not compiled.
        kept_bytes: Kept for backward of the sample; 0: not known.
        step_s: Seconds of a step of the sample; 0 where it was left out.
        gradient_error: Length of the gradient's error over its length.
        left_out: Why it could not be taken, ``""`` if it could.
        note: What else to know, ``""`` if nothing.
    """

    name: str
    memory_budget: float | None
    kept_bytes: int = 0
    step_s: float = 0.0
    gradient_error: float = 0.0
    left_out: str = ""
    note: str = ""

    @property
    def cost(self) -> float:
        """Time to the same loss, in seconds of a step without noise; see ``Ledger.cost``."""
        return self.step_s * (1 + self.gradient_error**2)


@dataclass(frozen=True)
class Plan:
    """Settings of every layer that can be converted; print it, and give it to ``convert``.

    Args:
        layers: In the model's order.
        exact_bytes: Kept for backward of the sample without a conversion.
        predicted_bytes: Kept with this plan, in a run on the sample.
        smallest_bytes: The least that a plan of these choices was found to keep.
        budget_bytes: What was asked for, or None.
        peak_limit_bytes: What was asked for, or None.
        exact_peak_bytes: Most bytes of tensors alive at once in a step without a conversion, beyond
            the model and the sample.
        peak_bytes: The same with this plan; 0 where it is compiled: that is not counted.
        exact_step_s: Seconds of a step of the sample without a conversion.
        step_s: The same with this plan.
        gradient_error: Length of the gradient's error over its length, with this plan, of one draw.
        refused: Blocks that cannot run again, and why.
        memory_budget: The model is compiled with this ``activation_memory_budget`` of torch's, 0
            to 1; None: it is not compiled.
        candidates: With the choice ``"compile"``: what was measured, and what was left out.
    """

    layers: tuple[PlannedLayer, ...]
    exact_bytes: int
    predicted_bytes: int
    smallest_bytes: int
    budget_bytes: int | None = None
    peak_limit_bytes: int | None = None
    exact_peak_bytes: int = 0
    peak_bytes: int = 0
    exact_step_s: float = 0.0
    step_s: float = 0.0
    gradient_error: float = 0.0
    refused: tuple[tuple[str, str], ...] = ()
    memory_budget: float | None = None
    candidates: tuple[Candidate, ...] = ()

    @property
    def error(self) -> float:
        """Sum of the layers' squared errors: an estimate of the square of ``gradient_error``."""
        return sum(row.error for row in self.layers)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        wide = [max(len(w) for w in ws) for ws in zip(*map(_words, self.layers), strict=True)]
        lines = [
            f"{self.predicted_bytes:,} bytes of {self.exact_bytes:,} for this sample, "
            f"{_asked('budget', self.budget_bytes)}smallest found {self.smallest_bytes:,}",
            f"{self._peak()}; {self._step()}",
        ]
        if self.memory_budget is not None:
            lines.append(
                f"compiled by torch.compile with activation_memory_budget {self.memory_budget:.4g}; "
                "the first step takes longer"
            )
        for row in self.layers:
            cells = [word.ljust(n) for word, n in zip(_words(row), wide, strict=True)]
            lines.append("  ".join(["", *cells]).rstrip())
        lines += [f"  {name} cannot run again: {reason}" for name, reason in self.refused]
        return "\n".join([*lines, *self._compared()])

    def _peak(self) -> str:
        if self.memory_budget is not None:
            return f"peak of a step not counted, {self.exact_peak_bytes:,} bytes without a plan"
        limit = _asked(", limit", self.peak_limit_bytes).removesuffix(", ")
        return f"peak of a step {self.peak_bytes:,} bytes of {self.exact_peak_bytes:,}{limit}"

    def _compared(self) -> list[str]:
        """Return the lines that say which candidate was taken, and why."""
        if not self.candidates:
            return []
        lines = ["taken is the least time to the same loss, time of a step x (1 + error squared):"]
        fits = [one for one in self.candidates if not one.left_out]
        taken = min(fits, key=lambda one: one.cost, default=None)
        for one in self.candidates:
            words = one.left_out and f"left out: {one.left_out}"
            if not words:
                times = one.step_s / self.exact_step_s if self.exact_step_s else 1.0
                words = f"{times:.2f} of the time, error {one.gradient_error:.2g}"
            kept = f"{one.kept_bytes:,} bytes, " if one.kept_bytes else ""
            note = f"; {one.note}" if one.note else ""
            mark = "; taken" if one is taken else ""
            lines.append(f"  {one.name}: {kept}{words}{note}{mark}")
        return lines

    def _step(self) -> str:
        times = self.step_s / self.exact_step_s if self.exact_step_s else 1.0
        return (
            f"a step takes {times:.2f} of the time, error of the gradient {self.gradient_error:.2g}"
        )

    def plot(self) -> "Shown":
        """Draw the layers: coloured where they keep less.

        Returns:
            A figure of matplotlib's; a notebook shows it, ``savefig(path)`` writes it.

        Raises:
            ImportError: matplotlib is not installed.
        """
        rows = []
        for row in self.layers:
            name, *cells = _words(row)
            rows.append((name, [(text, row.is_changed) for text in cells]))
        title = (
            f"{self.predicted_bytes:,} bytes of {self.exact_bytes:,} are kept for backward; "
            f"{self._step()}"
        )
        return draw_cells(title, ("module", "what it keeps", "error, measured", "time"), rows)

    def save(self, path: str | Path) -> None:
        """Write the plan to a file of JSON.

        Raises:
            OSError: The file cannot be written.
        """
        Path(path).write_text(json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read what ``save`` wrote; whatever is in the file, no code runs.

        Raises:
            OSError: The file cannot be read.
            ValueError: It has no plan, or one of another version.
        """
        try:
            record = json.loads(Path(path).read_text())
            version = record.pop("version")
            if version != VERSION:
                raise ValueError(f"version {VERSION} is needed, got {version!r}")
            return _checked(cls(**{**record, **_nested(record)}))
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"{path} must be a plan that save wrote: {error}") from error


def _nested(record: Mapping[str, list[dict[str, object]]]) -> dict[str, object]:
    """Return the parts of a record that JSON has no types for."""
    layers = []
    for row in record["layers"]:
        few_bit, division = row["settings"]  # pyright: ignore[reportGeneralTypeIssues]
        settings = few_bit and FewBit(**few_bit), division and Division(**division)
        layers.append(PlannedLayer(**{**row, "settings": settings}))  # pyright: ignore
    refused = tuple((name, reason) for name, reason in record["refused"])
    candidates = tuple(Candidate(**one) for one in record.get("candidates", []))  # pyright: ignore
    return {"layers": tuple(layers), "refused": refused, "candidates": candidates}


def _checked(plan: Plan) -> Plan:
    """Return ``plan``, whose numbers and texts are such."""
    kinds = {"int": (int,), "float": (int, float), "str": (str,), "Way": (str,)}
    kinds["int | None"] = (int, type(None))
    kinds["float | None"] = (int, float, type(None))
    for record in (plan, *plan.layers, *plan.candidates):
        for field in fields(record):
            value = getattr(record, field.name)
            allowed = kinds.get(getattr(field.type, "__name__", str(field.type)))
            if allowed and (type(value) not in allowed):
                raise TypeError(f"{field.name} must be of type {field.type}, got {value!r}")
    if any(row.way not in get_args(Way) for row in plan.layers):
        raise ValueError("way must be empty, 'recompute' or 'offload'")
    if plan.memory_budget is not None and not 0 <= plan.memory_budget <= 1:
        raise ValueError(f"memory_budget must be 0 to 1, got {plan.memory_budget}")
    return plan


def _asked(name: str, limit: int | None) -> str:
    return "" if limit is None else f"{name} {limit:,}, "


def _words(row: PlannedLayer) -> tuple[str, str, str, str, str]:
    error = f"error {row.error:.2g}" if row.error else ""
    time = f"+{1e3 * row.added_s:.2g} ms" if row.is_changed and row.added_s else ""
    return row.layer or "(model)", row.module, row.keeps, error, time
