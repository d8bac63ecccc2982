"""How many logits MSGD clamps, and what that costs: small classifiers of digits at three ``buffer_bits``.

python -m benchmarks.logits
"""

from perfmodel.arguments import Parser, stop_at_interrupt, whole

PARSER = Parser("python -m benchmarks.logits", (__doc__ or "").partition("\n")[0])
PARSER.add_argument("--seeds", type=whole(1), default=5)
PARSER.add_argument("--steps", type=whole(200), default=400)

if __name__ == "__main__":  # --help and slips are answered before torch loads
    stop_at_interrupt()
    PARSER.parse_args()

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import marvin
from train.data import load

__all__ = ["main"]


def linear() -> nn.Module:
    """Return three linear layers."""
    relus = nn.ReLU(), nn.ReLU()
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 128),
        relus[0],
        nn.Linear(128, 128),
        relus[1],
        nn.Linear(128, 10),
    )


def convolutional() -> nn.Module:
    """Return two convolutions with batch norm, and a linear layer."""
    first = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
    second = nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()
    return nn.Sequential(*first, *second, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10))


def measured(
    model: nn.Module, x: Tensor, y: Tensor, bits: int, seed: int, steps: int
) -> tuple[float, float, float]:
    """Train on 1,500 images; return shares: logits clamped at the end, right answers, ties for the largest."""
    optimizer = marvin.MSGD(model.named_parameters(), lr=0.05, buffer_bits=bits)
    activations = marvin.quantize_activations(model, optimizer)
    schedule = CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        if step == steps - 99:
            activations.saturation()
        batch = torch.randint(1500, (64,), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step(loss=loss)
        schedule.step()
    clamped = max(activations.saturation().values())
    with torch.no_grad():
        logits = model.eval()(x[1500:])
    two = logits.topk(2, 1).values
    is_right = logits.argmax(1) == y[1500:]
    return clamped, is_right.float().mean().item(), (two[:, 0] == two[:, 1]).float().mean().item()


def main(argv: Sequence[str] | None = None) -> None:
    """Train all, and print means and standard deviations."""
    arguments = PARSER.parse_args(argv)
    warnings.filterwarnings("ignore", "values are clamped")  # which is what this measures
    digits = load("digits", Path())
    x = torch.cat([digits.train.images, digits.test.images]).float()
    x, y = (x - x.mean()) / x.std(), torch.cat([digits.train.labels, digits.test.labels]).long()
    for make in (linear, convolutional):
        for bits in (4, 6, 8):
            rows = []
            for seed in range(arguments.seeds):
                torch.manual_seed(seed)
                rows.append(measured(make(), x, y, bits, seed, arguments.steps))
            clamped, right, ties = 100 * torch.tensor(rows).T
            print(
                f"{make.__name__}, buffer_bits={bits}: clamped {clamped.min():.0f} to {clamped.max():.0f} %, "
                f"accuracy {right.mean():.2f} ± {right.std():.2f} %, ties {ties.mean():.2f} %",
                flush=True,
            )


if __name__ == "__main__":
    main()
