"""Networks as torchvision has them, for ten classes; torchvision itself is not needed."""

from collections.abc import Iterator
from itertools import pairwise

from torch import Tensor, nn

__all__ = ["efficientnet_b0", "mobilenet_v2", "resnet18"]


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
    act: type[nn.ReLU6 | nn.SiLU] = nn.ReLU6,
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
