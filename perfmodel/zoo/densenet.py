"""DenseNet-121 to 201: every layer sees all maps before it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["densenet"]

Activation = Callable[[], nn.Module]


class _Dense(nn.Module):
    """Adds ``growth`` maps, made from all that come in by a 1x1 and a 3x3 convolution."""

    def __init__(self, inputs: int, growth: int, activation: Activation):
        super().__init__()
        inner = 4 * growth
        self.branch = nn.Sequential(
            nn.BatchNorm2d(inputs),
            activation(),
            nn.Conv2d(inputs, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            activation(),
            nn.Conv2d(inner, growth, 3, padding=1, bias=False),
        )

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Return the maps and one more."""
        return [*maps, self.branch(torch.cat(maps, 1))]


class _Block(nn.Module):
    def __init__(self, inputs: int, growth: int, count: int, activation: Activation):
        super().__init__()
        sizes = range(inputs, inputs + growth * count, growth)
        self.layers = nn.ModuleList(_Dense(size, growth, activation) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Return all maps side by side."""
        maps = [x]
        for layer in self.layers:
            maps = layer(maps)
        return torch.cat(maps, 1)


def densenet(
    growth: int,
    first: int,
    counts: tuple[int, int, int, int],
    activation: Activation = nn.ReLU,
    classes: int = 1000,
) -> nn.Sequential:
    """Return a DenseNet for images.

    Args:
        growth: Maps that a layer adds.
        first: Maps of the first convolution.
        counts: Layers of each of four blocks.
        activation: Makes the activation functions.
        classes: Outputs.

    Source:
        Huang et al., "Densely connected convolutional networks", 2017, with bottlenecks and
        halved maps between blocks.
    """
    conv = nn.Conv2d(3, first, 7, 2, padding=3, bias=False)
    parts = [conv, nn.BatchNorm2d(first), activation(), nn.MaxPool2d(3, 2, padding=1)]
    inputs = first
    for i, count in enumerate(counts):
        parts.append(_Block(inputs, growth, count, activation))
        inputs += growth * count
        parts += [nn.BatchNorm2d(inputs), activation()]
        if i < 3:
            parts += [nn.Conv2d(inputs, inputs // 2, 1, bias=False), nn.AvgPool2d(2)]
            inputs //= 2
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
