"""What a conversion did, by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fixedpoint_kernels.drawing import draw_cells

if TYPE_CHECKING:
    from fixedpoint_kernels.figure import Shown

__all__ = ["Call", "Kept", "Replaced", "Report"]


WHOLE = "no small form is known of it, or it is not asked for"


@dataclass(frozen=True)
class Replaced:
    """A module that now keeps less.

    Args:
        layer: Its first name, ``""`` for the model itself.
        module: Its class.
        keeps: What it keeps in place of a tensor.
        note: What else is different, ``""`` if nothing.
    """

    layer: str
    module: str
    keeps: str
    note: str = ""


@dataclass(frozen=True)
class Kept:
    """A module that stays as it was.

    Args:
        layer: Its first name, ``""`` for the model itself.
        module: Its class.
        reason: Why.
    """

    layer: str
    module: str
    reason: str


@dataclass(frozen=True)
class Call:
    """A function that a module calls.

    Args:
        layer: The module that calls it, ``""`` for the model itself.
        function: Its name.
        keeps: What it keeps in place of a tensor, ``""`` if it keeps the tensor.
    """

    layer: str
    function: str
    keeps: str = ""


@dataclass(frozen=True)
class Report:
    """What ``convert`` did.

    Args:
        replaced: Modules that keep less, in the model's order; a module with two names once.
        kept: Modules that stay as they were, and why.
        calls: Functions called in a ``forward`` that keep a tensor, and activation functions; None
            where no sample input was given.
        saves_nothing: Layers replaced whose tensors another operation keeps anyway; None where no
            sample input was given.
        memory_budget: The model is compiled with this ``activation_memory_budget`` of torch's, 0
            to 1; None: it is not compiled.
    """

    replaced: tuple[Replaced, ...]
    kept: tuple[Kept, ...]
    calls: tuple[Call, ...] | None = None
    saves_nothing: tuple[str, ...] | None = None
    memory_budget: float | None = None

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        parts = [
            _part("replaced", [_replaced(r) for r in self.replaced]),
            _part("not replaced", [(k.layer, k.module, k.reason) for k in self.kept]),
        ]
        if self.calls is None:
            parts.append("functions that a forward calls keep less, too; sample_input names them\n")
        else:
            less = [(c.layer, c.function, c.keeps) for c in self.calls if c.keeps]
            rest = [(c.layer, c.function, WHOLE) for c in self.calls if not c.keeps]
            parts += [_part("called, and keep less", less), _part("called, and keep all", rest)]
        if self.saves_nothing:
            names = ", ".join(name or "the model" for name in self.saves_nothing)
            parts.append(f"save nothing, for another operation keeps the same tensor: {names}\n")
        if self.memory_budget is not None:
            parts.append(
                "the model is compiled by torch.compile, with activation_memory_budget "
                f"{self.memory_budget:.4g}; the first step takes longer\n"
            )
        return "".join(parts).rstrip("\n")

    def plot(self) -> "Shown":
        """Draw modules, and functions if they are known: coloured where they keep less.

        Returns:
            A figure of matplotlib's; a notebook shows it, ``savefig(path)`` writes it.

        Raises:
            ImportError: matplotlib is not installed.
        """
        unsaved = self.saves_nothing or ()
        done = [(r.layer, r.module, _replaced(r)[2], r.layer not in unsaved) for r in self.replaced]
        done += [(k.layer, k.module, k.reason, False) for k in self.kept]
        done += [(c.layer, c.function, c.keeps or WHOLE, bool(c.keeps)) for c in self.calls or ()]
        rows = [
            (name or "(model)", [(kind, is_less), (text, is_less)])
            for name, kind, text, is_less in done
        ]
        title = f"{len(self.replaced)} modules keep less for backward"
        return draw_cells(title, ("module or function", "what it keeps"), rows)


def _replaced(row: Replaced) -> tuple[str, str, str]:
    return row.layer, row.module, "; ".join(filter(None, [row.keeps, row.note]))


def _part(title: str, rows: Sequence[tuple[str, str, str]]) -> str:
    if not rows:
        return f"{title}: nothing\n"
    named = [(layer or "(model)", kind, text) for layer, kind, text in rows]
    wide = [max(len(row[i]) for row in named) for i in (0, 1)]
    lines = [f"  {a:<{wide[0]}}  {b:<{wide[1]}}  {text}\n" for a, b, text in named]
    return f"{title}: {len(rows)}\n{''.join(lines)}"
