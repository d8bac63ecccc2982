"""Networks as torchvision has them, for ten classes; torchvision itself is not needed."""

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "densenet40",
    "efficientnet_b0",
    "mobilenet_v2",
    "padded_resnet20",
    "preact_resnet20",
    "resnet18",
    "unet",
]


class Block(nn.Module):
    """Two convolutions, and the input added to what they make.

    Args:
        inputs: Channels that come in.
        outputs: Channels that go out; where they differ, so does the resolution.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        self.downsample = nn.Identity() if stride == 1 else nn.Sequential(*projection)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``relu(f(x) + shortcut(x))``."""
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.downsample(x))


def resnet18() -> nn.Module:
    """Return ResNet-18."""
    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [Block(*pair) for pair in pairwise(widths)]
    stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)
    return nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1), *blocks, *head)


class Inverted(nn.Module):
    """An inverted residual: wider, place by place, and narrower again.

    Args:
        inputs: Channels that come in.
        outputs: Channels that go out.
        stride: Of the convolution of single channels.
        times: How many times as wide it is inside.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, times: int) -> None:
        super().__init__()
        inner = inputs * times
        layers = [*_convolved(inputs, inner, 1)] if times > 1 else []
        layers += [*_convolved(inner, inner, 3, stride, inner), *_convolved(inner, outputs, 1)][:-1]
        self.conv = nn.Sequential(*layers)
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layers make, with the input where it has the same shape."""
        return x + self.conv(x) if self.is_residual else self.conv(x)


def _convolved(
    inputs: int,
    outputs: int,
    kernel: int,
    stride: int = 1,
    groups: int = 1,
    act: type[nn.ReLU | nn.ReLU6 | nn.SiLU] = nn.ReLU6,
) -> Iterator[nn.Module]:
    padding = kernel // 2
    yield nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
    yield nn.BatchNorm2d(outputs)
    yield act(inplace=True)


_STAGES = (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)  # fmt: skip


def mobilenet_v2() -> nn.Module:
    """Return MobileNetV2."""
    width, blocks = 32, []
    for times, outputs, count, stride in _STAGES:
        for i in range(count):
            blocks.append(Inverted(width, outputs, stride if i == 0 else 1, times))
            width = outputs
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, 10)
    return nn.Sequential(*_convolved(3, 32, 3, 2), *blocks, *_convolved(width, 1280, 1), *head)


class Gate(nn.Module):
    """Squeeze and excitation: each channel times a number that comes from the means of all.

    Args:
        channels: How many.
        inner: How many between.
    """

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        first = nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, inner, 1), nn.SiLU(inplace=True)
        self.gate = nn.Sequential(*first, nn.Conv2d(inner, channels, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        """Return what comes in, times the gates."""
        return x * self.gate(x)


class Excited(nn.Module):
    """An inverted residual with SiLU, and a gate before it becomes narrower.

    Args:
        inputs: Channels that come in.
        outputs: Channels that go out.
        kernel: Of the convolution of single channels.
        stride: Of that one.
        times: How many times as wide it is inside.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, times: int) -> None:
        super().__init__()
        inner = inputs * times
        layers = [*_convolved(inputs, inner, 1, act=nn.SiLU)] if times > 1 else []
        layers += _convolved(inner, inner, kernel, stride, inner, nn.SiLU)
        layers += [Gate(inner, inputs // 4), *_convolved(inner, outputs, 1)][:-1]
        self.conv = nn.Sequential(*layers)
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layers make, with the input where it has the same shape."""
        return x + self.conv(x) if self.is_residual else self.conv(x)


_EXCITED = (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3)  # fmt: skip


def efficientnet_b0() -> nn.Module:
    """Return EfficientNet-B0, without stochastic depth."""
    width, blocks = 32, []
    for times, outputs, count, stride, kernel in _EXCITED:
        for i in range(count):
            blocks.append(Excited(width, outputs, kernel, stride if i == 0 else 1, times))
            width = outputs
    stem, last = _convolved(3, 32, 3, 2, act=nn.SiLU), _convolved(width, 1280, 1, act=nn.SiLU)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, 10)
    return nn.Sequential(*stem, *blocks, *last, *head)


class Thinned(nn.Module):
    """Every second place, and zeros in new channels, half of them in front.

    Args:
        channels: How many are new.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.before = channels // 2
        self.behind = channels - self.before

    def forward(self, x: Tensor) -> Tensor:
        """Return a smaller image of more channels."""
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.before, self.behind), "constant", 0)


class Padded(Block):
    """A residual block whose short-cut has no weights; else as ``Block``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        if inputs != outputs:
            self.downsample = Thinned(outputs - inputs)


def padded_resnet20(width: int = 16) -> nn.Module:
    """Return the ResNet20 of the paper for CIFAR-10, whose short-cuts have no weights (its option A)."""
    widths = [width] * 4 + [2 * width] * 3 + [4 * width] * 3
    blocks = [Padded(*pair) for pair in pairwise(widths)]
    stem = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10)
    return nn.Sequential(*stem, *blocks, *head)


class PreActivated(nn.Module):
    """A residual block whose batch norms stand before the convolutions.

    Args:
        inputs: Channels that come in.
        outputs: Channels that go out; where they differ, so does the resolution.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.bn1, self.bn2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        own = None if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.projection = own

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layers make, and the input or its projection added."""
        y = self.bn1(x).relu()
        shortcut = x if self.projection is None else self.projection(y)
        return self.conv2(self.bn2(self.conv1(y)).relu()) + shortcut


def preact_resnet20() -> nn.Module:
    """Return a pre-activation ResNet of 20 layers."""
    widths = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)
    blocks = [PreActivated(*pair) for pair in pairwise(widths)]
    head = nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    return nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), *blocks, *head)


class Dense(nn.Module):
    """A convolution whose output stands beside its input.

    Args:
        inputs: Channels that come in.
        growth: Channels that are added.
    """

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.conv = nn.Conv2d(inputs, growth, 3, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input's channels, and behind them the layer's."""
        return torch.cat([x, self.conv(self.norm(x).relu())], 1)


def densenet40(growth: int = 12) -> nn.Module:
    """Return a DenseNet of 40 layers, for images of 32x32."""
    width = 16
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False)]
    for stage in range(3):
        if stage:
            one = nn.Conv2d(width, width, 1, bias=False)
            layers += [nn.BatchNorm2d(width), nn.ReLU(), one, nn.AvgPool2d(2)]
        layers += [Dense(width + k * growth, growth) for k in range(12)]
        width += 12 * growth
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)
    return nn.Sequential(*layers, nn.BatchNorm2d(width), nn.ReLU(), *head)


class Level(nn.Module):
    """A level of a U-Net: two convolutions, what is below, and two more.

    Args:
        inputs: Channels that come in.
        outputs: Channels that go out.
        below: The next level, of twice as many channels.
    """

    def __init__(self, inputs: int, outputs: int, below: nn.Module) -> None:
        super().__init__()
        self.first = nn.Sequential(*_twice(inputs, outputs))
        self.down, self.below, self.up = nn.MaxPool2d(2), below, nn.Upsample(scale_factor=2)
        self.last = nn.Sequential(*_twice(3 * outputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return values of the same height and width."""
        y = self.first(x)
        return self.last(torch.cat([self.up(self.below(self.down(y))), y], 1))


def _twice(inputs: int, outputs: int) -> list[nn.Module]:
    return [
        *_convolved(inputs, outputs, 3, act=nn.ReLU),
        *_convolved(outputs, outputs, 3, act=nn.ReLU),
    ]


def unet(base: int = 16, classes: int = 10) -> nn.Module:
    """Return a U-Net of four levels, which says of each place which class it is."""
    below: nn.Module = nn.Sequential(*_twice(4 * base, 8 * base))
    for width in (4 * base, 2 * base):
        below = Level(width // 2, width, below)
    return nn.Sequential(Level(3, base, below), nn.Conv2d(base, classes, 1))
