"""``python -m train.plot RUN``: the word length of each layer over a run, as a picture."""

from pathlib import Path

from perfmodel.arguments import Parser, message_of, reader_may_leave, stop_at_interrupt

PARSER = Parser("python -m train.plot", __doc__ or "")
PARSER.add_argument("run", type=Path, metavar="RUN", help="folder of a run of msgd")
PARSER.add_argument(
    "--out", type=Path, metavar="FILE", help="the picture, .png (default: RUN/word_lengths.png)"
)

if __name__ == "__main__":  # --help and slips are answered before torch loads
    stop_at_interrupt()
    PARSER.parse_args()

import io
import sys
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from marvin.files import write_atomic
from perfmodel.files import LAYERS, METRICS, TRACE, RunError, UserError, number, read_rows, whole
from perfmodel.run import MOST_STEPS, NO_WEIGHT, start_of
from train.config import to_dict
from train.records import RunFolder, read_csv

__all__ = ["History", "draw", "read", "save"]

FILE = "word_lengths.png"
MAX_BITS = 32
BITS_COLOR, ACCURACY_COLOR = "#2b6c8f", "#c2571a"
LABELS = {"resnet20": "ResNet20", "alexnet": "AlexNet", "vit": "ViT"}
LABELS |= {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "fashion-mnist": "Fashion-MNIST"}


@dataclass(frozen=True)
class History:
    """What the figure shows.

    Args:
        title: What was trained on what.
        layers: Name and shape of each layer.
        word_lengths: Bits of each layer in each optimiser step, shape ``(layers, steps)``.
        epoch_steps: Optimiser steps done at the end of each epoch.
        accuracy: Accuracy at the end of each epoch.
        accuracy_of: Which images that accuracy is of.
        input_lengths: Bits of each layer's inputs, where they have formats of their own.
    """

    title: str
    layers: list[str]
    word_lengths: np.ndarray
    epoch_steps: list[int]
    accuracy: list[float]
    accuracy_of: str
    input_lengths: np.ndarray | None = None


def read(path: Path) -> History:
    """Read the figure's content from a run folder.

    Raises:
        UserError: ``path`` is no run folder of MSGD, or the run has no whole epoch yet.
        RunError: A table is damaged.
    """
    config = RunFolder(path).read_config()
    if config.optimizer != "msgd":
        raise UserError(
            f"{path} must be a run of msgd to have word lengths, got {config.optimizer}"
        )
    start = start_of(to_dict(config))
    rows = read_csv(path / METRICS)
    if not rows:
        raise UserError(f"{path} must have one whole epoch to draw, got none")
    part = "validation" if rows[-1].get("validation_accuracy") else "train"
    steps = [whole(path / METRICS, row, "step", 1, MOST_STEPS) for row in rows]
    layers = [
        row
        for row in read_rows(path / LAYERS, ("layer", "shape"))
        if row.get("elements") != NO_WEIGHT
    ]
    names = [row["layer"] for row in layers]
    trace = read_rows(path / TRACE, ("step", "layer", "wl"))
    own = [row | {"wl": row["input_wl"]} for row in trace if row.get("input_wl", "0") != "0"]
    check_trace(path / TRACE, [*trace, *own], names)
    return History(
        title=" on ".join(LABELS.get(name, name) for name in (config.model, config.dataset)),
        layers=[label(row) for row in layers],
        word_lengths=word_lengths(names, trace, max(steps), start.init_wl),
        epoch_steps=steps,
        accuracy=[number(path / METRICS, row, f"{part}_accuracy") for row in rows],
        accuracy_of=part,
        input_lengths=word_lengths(names, own, max(steps), start.init_wl) if own else None,
    )


def check_trace(path: Path, rows: list[dict[str, str]], layers: list[str]) -> None:
    """Check the rows of ``trace.csv``.

    Raises:
        RunError: One is of no layer of the run, or its numbers are out of range.
    """
    for row in rows:
        whole(path, row, "step", 0, MOST_STEPS)
        whole(path, row, "wl", 2, MAX_BITS)
        if row["layer"] not in layers:
            raise RunError(f"{path} must have the layers of layers.csv, got {row['layer']!r:.60}")


def label(row: dict[str, str]) -> str:
    """Return what stands beside a layer's row of the heat map."""
    return f"{row['layer'].removesuffix('.weight')}  {row['shape']}"


def word_lengths(
    layers: list[str], trace: list[dict[str, str]], steps: int, init_wl: int
) -> np.ndarray:
    """Return the bits each layer computed with, shape ``(layers, steps)``.

    A switch at the end of a step shows from the next step on.
    """
    bits = np.full((len(layers), steps), init_wl, dtype=np.uint8)
    row = {layer: i for i, layer in enumerate(layers)}
    for switch in trace:
        bits[row[switch["layer"]], int(switch["step"]) :] = int(switch["wl"])
    return bits


def draw(history: History) -> Figure:
    """Return the figure: a heat map, and below it mean word length and accuracy.

    Where layers' inputs have formats of their own, the same of them stands beside it. The scale
    ends at the longest word length after the first step, if there are more, 8, 16 or 32 bits.
    """
    columns = {"word length of each layer": history.word_lengths}
    if history.input_lengths is not None:
        columns = {"word length of weights": history.word_lengths}
        columns["of layers' inputs"] = history.input_lengths
    longest = max(int(own[:, 1:].max(initial=own[:, -1].max())) for own in columns.values())
    limit = next(bits for bits in (8, 16, MAX_BITS) if bits >= longest)
    heat_height = 0.9 + 0.21 * len(history.layers)
    size = 10 + 5 * (len(columns) - 1), heat_height + 2.2
    figure = Figure(figsize=size, layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    ratios = {
        "height_ratios": (heat_height, 1.7),
        "width_ratios": (*(50 for _ in columns), 1),
    }
    grid = figure.add_gridspec(2, len(columns) + 1, **ratios)
    images = []
    for place, lengths in enumerate(columns.values()):
        heat = figure.add_subplot(grid[0, place])
        curves = figure.add_subplot(grid[1, place], sharex=heat)
        labels = history.layers if place == 0 else []
        images.append(_draw_heat_map(heat, lengths, labels, limit))
        _draw_curves(curves, lengths, history, limit)
    ticks = range(0, limit + 1, limit // 8)
    bar = figure.colorbar(images[0], cax=figure.add_subplot(grid[0, len(columns)]), ticks=ticks)
    bar.set_label("word length, bits")
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    figure.suptitle(f"{history.title}: {', '.join(columns)}", fontsize=12)
    return figure


def _draw_heat_map(axes: Axes, lengths: np.ndarray, labels: list[str], limit: int) -> AxesImage:
    """Draw the bits of each layer in each step; without ``labels``, as a neighbour of one."""
    layers, steps = lengths.shape
    image = axes.imshow(
        lengths,
        aspect="auto",
        cmap="viridis",
        vmin=0,
        vmax=limit,
        extent=(0, steps, layers - 0.5, -0.5),
        interpolation="nearest",
    )
    axes.set_yticks(range(len(labels)), labels, fontsize=7, family="monospace", parse_math=False)
    axes.set_yticks(np.arange(0.5, layers - 1), minor=True)
    axes.grid(axis="y", which="minor", color="white", linewidth=0.6)
    axes.tick_params(axis="both", which="both", length=0)
    axes.tick_params(axis="x", labelbottom=False)
    axes.spines[:].set_visible(False)
    return image


def _draw_curves(axes: Axes, lengths: np.ndarray, history: History, limit: int) -> None:
    """Draw the mean over the layers on the left axis, accuracy on the right one."""
    axes.stairs(lengths.mean(axis=0), baseline=None, color=BITS_COLOR, linewidth=1.5)
    axes.set_ylim(0, limit)
    axes.set_yticks(range(0, limit + 1, limit // 4))
    axes.set_title("mean word length, bits", loc="left", color=BITS_COLOR, fontsize=10)
    axes.set_xlabel("optimiser step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    right = axes.twinx()
    marker = "o" if len(history.epoch_steps) <= 40 else None
    right.plot(
        history.epoch_steps,
        history.accuracy,
        color=ACCURACY_COLOR,
        marker=marker,
        markersize=3,
        clip_on=False,
    )
    right.set_ylim(0, 1)
    right.yaxis.set_major_formatter(PercentFormatter(1))
    title = f"{history.accuracy_of} accuracy"
    right.set_title(title, loc="right", color=ACCURACY_COLOR, fontsize=10)
    for side in (axes, right):
        side.spines[:].set_visible(False)
        side.tick_params(length=0)


def save(path: Path, out: Path | None = None) -> Path:
    """Draw a run folder's figure; return the file.

    Args:
        path: The run folder, from which is read.
        out: The file, None for one in the run folder.

    Raises:
        UserError: ``path`` is no run folder of MSGD, the run has no whole epoch yet, or ``out`` does
            not end in ``.png``.
    """
    content, file = io.BytesIO(), path / FILE if out is None else out
    if file.suffix.lower() != ".png":
        raise UserError(f"--out must be a file of PNG, its name ending in .png, got {file}")
    draw(read(path)).savefig(content, format="png")
    write_atomic(file, content.getvalue())
    return file


def main(argv: list[str] | None = None) -> None:
    """Draw the figure of the run folder named on the command line."""
    given = PARSER.parse_args(argv)
    try:
        with reader_may_leave():
            print(save(given.run, given.out))
    except (UserError, OSError) as error:
        sys.exit(f"python -m train.plot: error: {message_of(error)}")


if __name__ == "__main__":
    main()
