"""What notebooks show: an optimizer as a short table, and its word lengths as step curves."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fixedpoint_kernels.drawing import new_figure
from marvin.policies.records import word_length
from marvin.policies.trace import Switch
from marvin.rounding import Format

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["columns", "plot_word_lengths"]

_ROWS = 40  # of a table: more layers are counted


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows under a header, in columns as wide as they need; the middle of many is left out."""
    shown = [[*row] for row in rows]
    if len(shown) > _ROWS:
        left_out = f"... {len(shown) - _ROWS + 1} more"
        middle = [left_out, *[""] * (len(header) - 1)]
        shown = [*shown[: _ROWS // 2], middle, *shown[len(shown) - _ROWS // 2 + 1 :]]
    table = [[*header], *shown]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in table
    ]
    return "\n".join(line.rstrip() for line in lines)


def plot_word_lengths(
    trace: Sequence[Switch], formats: Mapping[str, Format | None], step: int
) -> "Figure":
    """Draw each layer's word length over the steps: weights, and inputs where they have their own.

    Args:
        trace: Switches, oldest first.
        formats: Of each layer, now.
        step: Steps done.

    Returns:
        A figure of matplotlib's, which notebooks show.

    Raises:
        ImportError: matplotlib is not installed.
    """
    has_inputs = any(row.input_wl for row in trace)
    figure = new_figure(8, 3.5 * (1 + has_inputs))
    from matplotlib.ticker import MaxNLocator

    parts = [("weights, bits", "wl"), ("inputs, bits", "input_wl")][: 1 + has_inputs]
    for place, (label, name) in enumerate(parts):
        axes = figure.add_subplot(len(parts), 1, place + 1)
        for layer, fmt in formats.items():
            steps, lengths = _curve([row for row in trace if row.layer == layer], name)
            if name == "wl" and not steps:
                steps, lengths = [0], [word_length(fmt)]
            if steps:
                axes.step([*steps, step], [*lengths, lengths[-1]], where="post", label=layer)
        axes.set_ylabel(label)
        axes.set_xlim(0, max(step, 1))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if len(formats) <= 12:
            axes.legend(frameon=False, fontsize=7, ncols=3)
    figure.axes[-1].set_xlabel("optimizer step")
    return figure


def _curve(switches: Sequence[Switch], name: str) -> tuple[list[int], list[int]]:
    """Return steps and word lengths of a layer, from step 0 where what was before is known."""
    steps, lengths = [row.step for row in switches], [getattr(row, name) for row in switches]
    if switches and name == "wl" and switches[0].wl_before:
        return [0, *steps], [switches[0].wl_before, *lengths]
    return steps, lengths
