"""What reports draw: a row for each layer, cells in two colours. Loads matplotlib when it draws."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fixedpoint_kernels.figure import Shown

__all__ = ["Cell", "draw_cells", "new_figure"]

Cell = tuple[str, bool]  # a text, and whether it is what was asked for
_ROW, _REST = 0.22, 0.9  # inches
_DONE, _LEFT = "#7fc4b4", "#e3e3e3"


def new_figure(width: float, height: float) -> "Shown":
    """Return an empty figure.

    Args:
        width: Inches.
        height: Inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from fixedpoint_kernels.figure import Shown
    except ImportError as error:
        raise ImportError("plot() needs matplotlib: pip install matplotlib") from error
    return Shown(width, height)


def draw_cells(
    title: str, header: Sequence[str], rows: Sequence[tuple[str, Sequence[Cell]]]
) -> "Shown":
    """Draw a table: coloured cells have what was asked for, grey ones have not.

    Args:
        title: Above it.
        header: Of the columns, without that of the names.
        rows: Name and cells of each; a cell without a text is left out.

    Returns:
        A figure of matplotlib's; a notebook shows it, ``savefig(path)`` writes it.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(8, _REST + _ROW * max(len(rows), 1))
    axes = figure.add_subplot()
    for place, (_, cells) in enumerate(rows):
        for column, (text, is_done) in enumerate(cells):
            if not text:
                continue
            axes.barh(place, 0.98, left=column, height=0.9, color=_DONE if is_done else _LEFT)
            axes.text(column + 0.03, place, text, va="center", fontsize=7, clip_on=True)
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlim(0, max(len(header), 1))
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes.set_xticks([column + 0.5 for column in range(len(header))], header, fontsize=8)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=7)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    return figure
