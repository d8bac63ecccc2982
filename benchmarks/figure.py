"""Pictures of experiments: test accuracy against mean word length, and loss over the epochs."""

import io
import statistics
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, ScalarFormatter
from matplotlib.transforms import Bbox

from marvin.files import write_atomic

__all__ = ["Curve", "Point", "draw", "draw_curves", "save"]

COLORS = {"static": "#7a7a7a", "loss budget": "#c2571a", "float32": "#111111"}
OTHERS = "#2b6c8f"
PLACES = {"static": (4, -12), "float32, plain": (4, -12), "fixed": (4, -12)}  # of labels, points
NUMBERS = {"static": "static, bits", "loss budget": "loss budget, kappa"}  # what their labels are
AROUND = (4, 4), (4, -12), (-4, 4), (-4, -12), (4, 16), (4, -24), (-4, 16), (-4, -24)
DECADE = 10  # of losses that differ more the axis is logarithmic
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


@dataclass(frozen=True)
class Curve:
    """One variant.

    Args:
        name: In the table.
        train: Training loss after each epoch, of each seed.
        validation: Loss on the images held out, the same way.
    """

    name: str
    train: list[list[float]]
    validation: list[list[float]]


def draw_curves(curves: list[Curve], title: str) -> Figure:
    """Return the figure: means over seeds, the first curve in black."""
    figure = Figure(figsize=(9, 4), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for axes, part in ((left, "train"), (right, "validation")):
        for number, curve in enumerate(curves):
            seeds = getattr(curve, part)
            means = [statistics.mean(values) for values in zip(*seeds, strict=True)]
            color = "black" if number == 0 else f"C{number - 1}"
            epochs = range(1, len(means) + 1)
            axes.plot(epochs, means, color=color, label=curve.name, marker="o", markersize=3)
        losses = [loss for curve in curves for own in getattr(curve, part) for loss in own]
        if losses and max(losses) > DECADE * min(losses) > 0:
            axes.set_yscale("log")
        axes.set_title(f"{part} loss", loc="left", fontsize=10)
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _plain(axes)
    left.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=11)
    return figure


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
    labels: list[Annotation] = []
    for family, members in families.items():
        labels += _draw_family(axes, members, COLORS.get(family, OTHERS))
    if points and points[0].name == "float32":
        level = statistics.mean(points[0].accuracy)
        axes.axhline(level, color=COLORS["float32"], linewidth=0.8, linestyle="--", zorder=1)
    _draw_axes(axes)
    if axes.get_legend_handles_labels()[0]:
        # between the short words and float32; "best" would not see the bars
        axes.legend(loc="upper center", frameon=False, fontsize=8)
    below = [p for p in points if statistics.mean(p.accuracy) < lowest]
    text = [f"{p.name}: {statistics.mean(p.accuracy):.1f} %" for p in below]
    axes.text(0.5, 0.02, "\n".join(text), transform=axes.transAxes, ha="center", fontsize=8)
    axes.set_title(title, fontsize=11)
    _keep_apart(figure, axes, labels)
    return figure


def _keep_apart(figure: Figure, axes: Axes, labels: list[Annotation]) -> None:
    """Move labels to where they are over the fewest others, points, lines and other words."""
    figure.draw_without_rendering()  # it is known then where things are
    points = [axes.transData.transform(label.xy) for label in labels]
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in points]
    words = [axes.get_legend(), axes.yaxis.label, *axes.get_yticklabels()]
    taken += [word.get_window_extent() for word in words if word is not None]
    lines = [line.get_transform().transform_path(line.get_path()) for line in axes.lines]

    def place(label: Annotation, offset: tuple[float, float]) -> int:
        """Put a label there, and return over how much it is."""
        label.xyann = offset
        label.set_horizontalalignment("left" if offset[0] > 0 else "right")
        box = label.get_window_extent()
        crossed = [line.intersects_bbox(box, filled=False) for line in lines]
        return sum(map(box.overlaps, taken)) + sum(crossed)

    for label in labels:
        best = min((label.xyann, *AROUND), key=lambda offset: place(label, offset))
        place(label, best)
        taken.append(label.get_window_extent())


def _draw_family(axes: Axes, members: list[Point], color: str) -> list[Annotation]:
    """Draw the points of a family, and return their labels."""
    bits = [statistics.mean(point.bits) for point in members]
    accuracy = [statistics.mean(point.accuracy) for point in members]
    bars = [statistics.stdev(p.accuracy) if len(p.accuracy) > 1 else 0.0 for p in members]
    line = "-" if members[0].family != "float32" else ""
    family = members[0].family
    label = NUMBERS.get(family) if len(members) > 1 else None
    axes.errorbar(
        bits, accuracy, bars, color=color, marker="o", markersize=4, linestyle=line, label=label
    )
    return [
        axes.annotate(
            point.name.removeprefix(family).strip() if label else point.name,
            (x, y),
            xytext=next((xy for name, xy in PLACES.items() if point.name.startswith(name)), (4, 4)),
            textcoords="offset points",
            fontsize=8,
            color=color,
            path_effects=[withStroke(linewidth=2, foreground="white")],
        )
        for x, y, point in zip(bits, accuracy, members, strict=True)
    ]


def _draw_axes(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.margins(x=0.12)
    axes.set_xlabel("mean word length of weights and layers' inputs, bits")
    axes.set_ylabel("test accuracy, %")
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def save(figure: Figure, path: Path) -> None:
    """Write a picture into a file, whole or not at all."""
    content = io.BytesIO()
    figure.savefig(content, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content.getvalue())
