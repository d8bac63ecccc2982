"""Quantised activations: what a user holds of a model whose modules round what they see."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import fill
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fixedpoint_kernels.drawing import draw_cells
from fixedpoint_kernels.rounding import Rounding
from fixedpoint_kernels.undo import all_or_nothing
from marvin.hooks import detach, rounders_of, state_of
from marvin.layers import is_layer, parameters_of
from marvin.rounder import BUFFER, ForwardState, Rounder
from marvin.straight_through import StraightThrough, Tally

if TYPE_CHECKING:
    from fixedpoint_kernels.figure import Shown

__all__ = ["BUFFER", "FROZEN", "Entry", "QuantizedActivations", "Report", "state_of"]

FROZEN = "frozen: float until it is trained"
"""Why a module does not round whose weight, or the layer that it follows, requires no gradient."""


@dataclass(frozen=True)
class Report:
    """Which modules round what they see, and which do not.

    Args:
        rounded: Names of modules.
        left: Why other modules with parameters, normalisation and pooling stay as they are, by name.
    """

    rounded: tuple[str, ...]
    left: Mapping[str, str]

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        lines = [f"{self._count} activations: {_listed(self.rounded)}"]
        for reason in dict.fromkeys(self.left.values()):
            names = [name for name, own in self.left.items() if own == reason]
            lines.append(f"not {_listed(names)}: {reason}")
        return "\n".join(fill(line, 100, subsequent_indent="    ") for line in lines)

    @property
    def _count(self) -> str:
        count = len(self.rounded)
        return "1 module rounds" if count == 1 else f"{count} modules round"

    def plot(self) -> "Shown":
        """Draw the modules: coloured where they round, grey where they do not, with the reason.

        Returns:
            A figure of matplotlib's; a notebook shows it, ``savefig(path)`` writes it.

        Raises:
            ImportError: matplotlib is not installed.
        """
        rows = [
            (name, [("rounds", True), (self.left.get(name, ""), False)]) for name in self.rounded
        ]
        others = [name for name in self.left if name not in self.rounded]
        rows += [(name, [("float", False), (self.left[name], False)]) for name in others]
        title = f"{self._count} activations"
        return draw_cells(title, ("activations", ""), rows)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(name or "the model itself" for name in names)


@dataclass(frozen=True)
class Entry:
    """A module that carries formats.

    Args:
        module: The module.
        rounder: Of it.
        parameters: The first with a format gives that of the activations.
        layers: Those whose formats they have.
    """

    module: nn.Module
    rounder: Rounder
    parameters: Sequence[Tensor] = ()
    layers: Sequence[Tensor] = ()

    @property
    def is_live(self) -> bool:
        """Whether the module rounds by this still."""
        return any(rounder is self.rounder for rounder in rounders_of(self.module))


@dataclass
class QuantizedActivations:
    """A model's quantised activations; made by ``quantize_activations`` and ``prepare``.

    Args:
        entries: Modules that carry formats.
        state: What they share.
        ste: See ``fake_quantize``.
        eval_rounding: How activations are rounded in eval mode.
        left: See ``Report``.
    """

    entries: list[Entry]
    state: ForwardState
    ste: StraightThrough = "clip"
    eval_rounding: Rounding = "nearest"
    left: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return str(self.report)

    @property
    def report(self) -> Report:
        """Which modules round what they see, and why others do not."""
        weights = self.with_weights()
        waiting = sorted(self.state.waiting & weights)
        if len(waiting) == len(weights):  # the model was not called at all
            waiting = []
        trained = {e.rounder.name for e in self.entries if any(p.requires_grad for p in e.layers)}
        left = {n: why for n, why in self.left.items() if why != FROZEN or n not in trained}
        rounded = tuple(name for name in self.layers() if left.get(name) != FROZEN)
        return Report(rounded, {**left, **dict.fromkeys(waiting, "not called yet")})

    @property
    def is_attached(self) -> bool:
        """Whether the model has these hooks still."""
        return any(entry.is_live for entry in self.entries)

    def remove(self) -> None:
        """Undo: the model's activations are float again, and its state has no formats.

        A call that is interrupted changes nothing.
        """
        with all_or_nothing(entry.module for entry in self.entries):
            for entry in self.entries:
                if entry.is_live:
                    detach(entry.module)

    def layers(self) -> list[str]:
        """Return the names of the modules that round their activations."""
        return [e.rounder.name for e in self.entries if e.parameters and e.is_live]

    def with_weights(self) -> set[str]:
        """Return the names of those that have a weight of two or more dimensions."""
        return {
            entry.rounder.name
            for entry in self.entries
            if entry.parameters and any(map(is_layer, parameters_of(entry.module).values()))
        }

    def saturation(self) -> dict[str, float]:
        """Return the share of values each module clamped since the last call, where gradients were recorded.

        Of inputs and outputs the larger share. Inputs to which no gradient goes back, such as the data,
        do not count, nor does block floating point, nor what ``ste="identity"`` rounds. Above a few per
        cent, use more ``buffer_bits``.
        """
        rounders = [entry.rounder for entry in self.entries if entry.parameters]
        shares = {r.name: max(r.tally.share(), r.outputs.share()) for r in rounders}
        for rounder in rounders:
            rounder.tally, rounder.outputs = Tally(), Tally()
        return shares
