"""Draw the pictures of docs/concepts.md; every point in them is computed by the package.

    python docs/draw_concepts.py [FOLDER]

FOLDER is docs/images by default. Takes some seconds on a CPU.
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws without a screen

import matplotlib.pyplot as plt
import torch
from torch import nn

import marvin
from fixedpoint_kernels import BlockFloat, FixedPoint, Minifloat, quantize, quantize_block
from train.data import load

FORMAT = FixedPoint(4, 2)
STEPS = 300
POLICIES = {
    "MarvinPolicy(lookback=(10, 25))": lambda: marvin.MarvinPolicy(lookback=(10, 25)),
    "LossBudgetPolicy()": marvin.LossBudgetPolicy,
    "StaticPolicy(6, 6)": lambda: marvin.StaticPolicy(6, 6),
    "FixedPolicy(8, 4)": lambda: marvin.FixedPolicy(8, 4),
}


def draw_rounding(path: Path) -> None:
    """Nearest and stochastic rounding to <4, 2>, and what saturates."""
    x = torch.linspace(-2.5, 2.5, 1001)
    nearest = quantize(x, FORMAT, rounding="nearest")
    draws = torch.stack([quantize(x, FORMAT, seed=seed) for seed in range(400)])
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained", sharey=True)
    left.plot(x, nearest)
    left.set_title("nearest", fontsize=10)
    right.plot(x, draws[0], ".", markersize=2, label="one draw")
    right.plot(x, draws.mean(0), label="mean of 400 draws")
    right.set_title("stochastic", fontsize=10)
    right.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.axvspan(-2.5, FORMAT.min, color="0.93")
        axes.axvspan(FORMAT.max, 2.5, color="0.93")
        axes.set_yticks([FORMAT.min, -1, 0, 1, FORMAT.max])
        axes.set_xlabel("value")
    left.set_ylabel("rounded to <4, 2>")
    save(figure, path)


def draw_formats(path: Path) -> None:
    """The numbers that some formats have, between 0 and 8."""
    x = torch.linspace(0, 8, 2**17 + 1)
    block = torch.cat([x[x <= 3], torch.tensor([3.0])])  # its largest value decides
    rows = {
        "FixedPoint(6, 2)\nsteps of 1/4, to 7.75": quantize(
            x, FixedPoint(6, 2), rounding="nearest"
        ),
        "FixedPoint(6, 4)\nsteps of 1/16, to 1.94": quantize(
            x, FixedPoint(6, 4), rounding="nearest"
        ),
        "BlockFloat(6)\nof a block up to 3": quantize_block(
            block, BlockFloat(6), rounding="nearest"
        ),
        "Minifloat(3, 2)\ndenser towards 0": quantize(x, Minifloat(3, 2), rounding="nearest"),
    }
    figure, axes = plt.subplots(figsize=(8, 2.8), layout="constrained")
    for place, values in enumerate(rows.values()):
        numbers = values.unique()
        axes.plot(numbers, torch.full_like(numbers, place), "|", markersize=14)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(-0.1, 8.1)
    axes.set_xlabel("numbers of 6 bits, from 0 up")
    save(figure, path)


def draw_policies(path: Path, steps: int = STEPS) -> None:
    """Word lengths of a small network on digits under four policies."""
    data = load("digits", Path())
    images, labels = data.train.images.float() / data.train.images.max(), data.train.labels.long()
    figure, grid = plt.subplots(
        2, 2, figsize=(8, 5), layout="constrained", sharex=True, sharey=True
    )
    for axes, (title, policy) in zip(grid.flat, POLICIES.items(), strict=True):
        optimizer, accuracy = train(images, labels, policy(), steps)
        for line in optimizer.plot().axes[0].lines:
            axes.step(*line.get_data(), where="post", label=line.get_label())
        axes.set_title(f"{title}\n{accuracy:.0%} of the training digits right", fontsize=9)
        axes.set_ylim(0, 33)
    grid[0, 0].legend(frameon=False, fontsize=8, title="weights of", title_fontsize=8)
    for axes in grid[1]:
        axes.set_xlabel("step")
    for axes in grid[:, 0]:
        axes.set_ylabel("word length, bits")
    save(figure, path)


def train(
    images: torch.Tensor, labels: torch.Tensor, policy: marvin.Policy, steps: int
) -> tuple[marvin.Quantized, float]:
    """Return the optimizer of a network with one hidden layer, trained, and its accuracy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    optimizer = marvin.Quantized(sgd, policy)
    marvin.quantize_activations(model, optimizer)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(images), (64,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        optimizer.step(loss=loss)
    model.eval()
    return optimizer, (model(images).argmax(1) == labels).double().mean().item()


def save(figure: plt.Figure, path: Path) -> None:
    """Write a picture, and let go of it."""
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def main(folder: Path, steps: int = STEPS) -> None:
    """Draw all pictures."""
    draw_rounding(folder / "concepts-rounding.png")
    draw_formats(folder / "concepts-formats.png")
    draw_policies(folder / "concepts-policies.png", steps)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "images")
