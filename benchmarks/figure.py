"""The picture of an experiment: test accuracy against mean word length."""

import io
import statistics
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from marvin.files import write_atomic

__all__ = ["Point", "draw", "save"]

COLORS = {"static": "#7a7a7a", "loss budget": "#c2571a", "float32": "#111111"}
OTHERS = "#2b6c8f"
PLACES = {"static": (4, -12), "float32, plain": (4, -12), "fixed": (4, -12)}  # of labels, points
NUMBERS = {"static": "static, bits", "loss budget": "loss budget, kappa"}  # what their labels are
HEIGHT = 10  # %: what is further below the best is named, not drawn
TICKS = 2, 3, 4, 5, 6, 8, 12, 16, 24, 32


@dataclass(frozen=True)
class Point:
    """One variant.

    Args:
        name: In the table.
        bits: Mean word length of weights and inputs of each seed.
        accuracy: Test accuracy of each seed, in %.
    """

    name: str
    bits: list[float]
    accuracy: list[float]

    @property
    def family(self) -> str:
        """What has one colour and, where it has several points, one line."""
        return next((family for family in COLORS if self.name.startswith(family)), self.name)


def draw(points: list[Point], title: str) -> Figure:
    """Return the figure; bars are standard deviations over seeds, the dashed line is float32."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lowest = max((statistics.mean(p.accuracy) for p in points), default=0.0) - HEIGHT
    families: dict[str, list[Point]] = {}
    for point in points:
        if statistics.mean(point.accuracy) >= lowest:
            families.setdefault(point.family, []).append(point)
    for family, members in families.items():
        _draw_family(axes, members, COLORS.get(family, OTHERS))
    if points and points[0].name == "float32":
        level = statistics.mean(points[0].accuracy)
        axes.axhline(level, color=COLORS["float32"], linewidth=0.8, linestyle="--", zorder=1)
    _draw_axes(axes)
    if any(family in NUMBERS for family in families):
        axes.legend(loc="best", frameon=False, fontsize=8)
    below = [p for p in points if statistics.mean(p.accuracy) < lowest]
    text = [f"{p.name}: {statistics.mean(p.accuracy):.1f} %" for p in below]
    axes.text(0.99, 0.02, "\n".join(text), transform=axes.transAxes, ha="right", fontsize=8)
    axes.set_title(title, fontsize=11)
    return figure


def _draw_family(axes: Axes, members: list[Point], color: str) -> None:
    bits = [statistics.mean(point.bits) for point in members]
    accuracy = [statistics.mean(point.accuracy) for point in members]
    bars = [statistics.stdev(p.accuracy) if len(p.accuracy) > 1 else 0.0 for p in members]
    line = "-" if members[0].family != "float32" else ""
    family = members[0].family
    label = NUMBERS.get(family)
    axes.errorbar(
        bits, accuracy, bars, color=color, marker="o", markersize=4, linestyle=line, label=label
    )
    for x, y, point in zip(bits, accuracy, members, strict=True):
        axes.annotate(
            point.name.removeprefix(family).strip() if label else point.name,
            (x, y),
            xytext=next((xy for name, xy in PLACES.items() if point.name.startswith(name)), (4, 4)),
            textcoords="offset points",
            fontsize=8,
            color=color,
            path_effects=[withStroke(linewidth=2, foreground="white")],
        )


def _draw_axes(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.margins(x=0.12)
    axes.set_xlabel("mean word length of weights and layers' inputs, bits")
    axes.set_ylabel("test accuracy, %")
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def save(points: list[Point], title: str, path: Path) -> None:
    """Draw into a file, whole or not at all."""
    content = io.BytesIO()
    draw(points, title).savefig(content, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content.getvalue())
