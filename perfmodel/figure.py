"""The figure of a run's modelled cost, as RUN/performance.png."""

import io
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from perfmodel.cost import FLOAT_BITS, pushdown_ops, pushup_ops, weights_of
from perfmodel.files import replace_file
from perfmodel.run import Run
from perfmodel.summary import layer_rows, totals

__all__ = ["draw", "save", "step_costs"]

FILE = "performance.png"
FORWARD, BACKWARD, SEARCH, FLOAT32 = "#2b6c8f", "#b9cfdb", "#c2571a", "0.25"


def step_costs(run: Run) -> tuple[np.ndarray, float]:
    """Return the cost of each step, shape ``(steps,)``, and that of a step in float32."""
    costs = np.zeros(run.trace.steps)
    base = 0.0
    for w in weights_of(run.layers):
        madds = w.madds * run.samples
        base += madds * 2.0 * FLOAT_BITS
        if not w.name:
            costs += madds * 2.0 * FLOAT_BITS
            continue
        search = pushdown_ops(w.elements, run.trace.resolution[1])
        search += pushup_ops(w.elements, run.trace.lookback[1])
        begin = 0
        for s in run.trace.segments(w.name):
            cost = madds * (s.product_wl + FLOAT_BITS) + FLOAT_BITS * search / s.lookback
            costs[begin : begin + s.steps] += cost
            begin += s.steps
    return costs, base


def draw(run: Run) -> Figure:
    """Return the figure: the cost of each layer, and the speedup over the steps."""
    rows = layer_rows(run)
    bars_height = 1.1 + 0.21 * len(rows)
    figure = Figure(figsize=(10, bars_height + 2.4), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 1, height_ratios=(bars_height, 2.0))
    _draw_layers(figure.add_subplot(grid[0]), run)
    _draw_speedup(figure.add_subplot(grid[1]), run)
    values = {t.name: t.value for t in totals(run)}
    named = ", ".join(f"{name} {values[name]:.2f}" for name in ("SU", "MEM", "SZ"))
    figure.suptitle(f"{run.title}: modelled cost ({named})", fontsize=12, parse_math=False)
    return figure


def _draw_layers(axes: Axes, run: Run) -> None:
    rows = layer_rows(run)
    places = np.arange(len(rows))
    left = np.zeros(len(rows))
    parts = (("forward, in the layer's bits", FORWARD, [r.forward for r in rows]),)
    parts += (("backward, in 32 bits", BACKWARD, [r.backward for r in rows]),)
    parts += (("search for formats", SEARCH, [r.search for r in rows]),)
    for label, color, values in parts:
        axes.barh(places, values, 0.7, left, color=color, label=label)
        left += np.array(values)
    float32 = [2 * r.backward for r in rows]
    axes.plot(float32, places, "|", color=FLOAT32, markersize=9, label="float32")
    names = [f"{r.layer.removesuffix('.weight')}  {r.kind}" for r in rows]
    axes.set_yticks(places, names, fontsize=7, family="monospace", parse_math=False)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_title("cost of each layer, share of the whole run in float32", loc="left", fontsize=10)
    axes.legend(fontsize=8, frameon=False, ncols=4, loc="upper left", bbox_to_anchor=(0, -0.06))
    _plain(axes, "x")


def _draw_speedup(axes: Axes, run: Run) -> None:
    costs, base = step_costs(run)
    steps = np.arange(1, len(costs) + 1)
    marker = "o" if len(steps) == 1 else None  # a line of one point is not seen
    axes.plot(steps, base / costs, color=BACKWARD, marker=marker, linewidth=1, label="of each step")
    so_far = base * steps / costs.cumsum()
    axes.plot(steps, so_far, color=FORWARD, marker=marker, linewidth=1.8, label="so far")
    axes.axhline(1, color=FLOAT32, linewidth=0.8, linestyle=":")
    axes.set_title("speedup over float32, modelled", loc="left", fontsize=10)
    axes.set_xlabel("optimiser step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.legend(fontsize=8, frameon=False, ncols=2, loc="upper right")
    axes.margins(x=0)
    _plain(axes, "both")


def _plain(axes: Axes, grid: str) -> None:
    axes.grid(axis="x" if grid == "x" else "both", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def save(run: Run) -> Path:
    """Draw the figure into the run folder; return the file."""
    path, content = run.path / FILE, io.BytesIO()
    draw(run).savefig(content, format="png")
    replace_file(path, content.getvalue())
    return path
