"""A figure of a derivative, its tables and their errors, as in the papers."""

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fixedpoint_kernels.few_bit.integrals import Function
from fixedpoint_kernels.few_bit.table import Table

DERIVATIVE, TABLE, ERROR, BORDER = "black", "#0072B2", "#D55E00", "0.8"  # Okabe and Ito
_COLUMNS = 4  # of panels
_POINTS = 2001


def draw(title: str, function: Function, tables: list[Table]) -> Figure:
    """Draw f' with each table above the error, f' minus the table.

    Args:
        title: Above all panels.
        function: f; differentiated by autograd in float64.
        tables: One panel each, four in a row.

    Returns:
        The figure, drawn by Agg; ``savefig`` writes it.
    """
    columns = min(_COLUMNS, len(tables))
    rows = -(len(tables) // -columns)
    width = 6.4 if columns == 1 else 3.4 * columns
    figure = Figure(figsize=(width, 4.6 * rows + 0.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12)
    grid = figure.add_gridspec(2 * rows, columns, height_ratios=[3, 1.4] * rows)
    x = np.linspace(*_range(tables), _POINTS)
    slope = _slope(function, x)
    above = below = None
    for i, table in enumerate(tables):
        row, column = divmod(i, columns)
        above = figure.add_subplot(grid[2 * row, column], sharey=above)
        below = figure.add_subplot(grid[2 * row + 1, column], sharex=above, sharey=below)
        _panel(above, below, table, x, slope)
        for axes in (above, below):
            axes.tick_params(labelleft=column == 0)
        if column == 0:
            above.set_ylabel("f'(x)")
            below.set_ylabel("error")
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4 if columns > 1 else 3,
        frameon=False,
        fontsize=9,
    )
    return figure


def _panel(above: Axes, below: Axes, table: Table, x: np.ndarray, slope: np.ndarray) -> None:
    ends = np.array([x[0], *table.borders.clip(x[0], x[-1]), x[-1]])
    for axes in (above, below):
        axes.grid(axis="y", color="0.93", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        for border in table.borders if len(table.borders) <= 64 else ():
            axes.axvline(border, color=BORDER, linewidth=0.7, zorder=0)
    above.plot(x, slope, color=DERIVATIVE, linewidth=1.2, linestyle="--", label="f'", zorder=3)
    above.stairs(
        table.levels[table.codes],
        ends,
        baseline=None,
        color=TABLE,
        linewidth=1.8,
        label="table",
        zorder=2,
    )
    above.plot([], [], color=BORDER, linewidth=0.7, label="border")
    above.tick_params(labelbottom=False)
    above.set_title(
        f"{table.bits} bit{'s' if table.bits > 1 else ''}, loss {table.loss:.3g}", fontsize=10
    )
    error = slope - table(x)
    below.fill_between(x, error, color=ERROR, alpha=0.35, linewidth=0)
    below.plot(x, error, color=ERROR, linewidth=0.9)
    below.axhline(0, color="0.4", linewidth=0.6)
    below.set_xlabel("x")
    below.set_xlim(x[0], x[-1])


def _range(tables: list[Table]) -> tuple[float, float]:
    """Return where there is something to see: the borders, and as much again beside them."""
    borders = np.concatenate([table.borders for table in tables])
    low, high = min(borders.min(initial=0.0), -1.0), max(borders.max(initial=0.0), 1.0)
    room = 0.25 * (high - low)
    return low - room, high + room


def _slope(function: Function, x: np.ndarray) -> np.ndarray:
    points = torch.from_numpy(x).requires_grad_()
    (slope,) = torch.autograd.grad(function(points).sum(), points)
    return slope.numpy()
