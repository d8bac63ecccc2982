"""Networks, data and judges that several tasks share."""

import functools
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tasks.training import Training
from train import data as data_sets

__all__ = ["Split", "accuracy", "classify", "digit_net", "digits", "mlp", "surface"]


def mlp(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers with activations between them."""
    layers: list[nn.Module] = []
    for inner, outer in itertools.pairwise(widths):
        layers += [nn.Linear(inner, outer), act()]
    return nn.Sequential(*layers[:-1])


def surface(x: Tensor) -> Tensor:
    """Return a function of 8 numbers, of about unit variance."""
    return (x[:, :1] * (2 * x[:, 1:2]).sin() + x[:, 2:3] * x[:, 3:4] + x[:, 4:5].abs()) / 1.4


class Split(NamedTuple):
    """Images of 8x8 digits in 0 to 1, and their labels."""

    x: Tensor
    y: Tensor
    held_x: Tensor
    held_y: Tensor


@functools.cache
def digits() -> Split:
    """Return the digits that ``train`` ships."""
    found = data_sets.load("digits", Path("data"), may_fetch=False)
    x, held = (part.images.float() for part in (found.train, found.test))
    most = x.max()
    return Split(x / most, found.train.labels, held / most, found.test.labels)


def digit_net(width: int = 16) -> nn.Sequential:
    """Return a small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * width, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share that is right, %."""
    return 100 * (model(x).argmax(-1) == y).float().mean().item()


def classify(t: Training, model: nn.Module, batch: int = 64, parts: int = 1, **more: Any) -> float:
    """Return accuracy on digits; ``loss_fn`` changes the loss, ``parts`` accumulates."""
    d, loss_fn = digits(), more.pop("loss_fn", F.cross_entropy)
    learner = t.learner(model.train(), more.pop("lr", 3e-3), **more)
    for _ in range(t.steps):
        learner.optimizer.zero_grad()
        total = 0.0
        for _ in range(parts):
            x, y = t.rows(d.x, d.y, batch=batch)
            loss = loss_fn(model(x), y) / parts
            loss.backward()
            total += loss.item()
        learner.move(total)
    return accuracy(model.eval(), d.held_x, d.held_y)
