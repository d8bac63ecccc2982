"""Networks of inverted bottlenecks with depthwise convolutions: MobileNetV2, EfficientNet."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

__all__ = ["efficientnet", "mobilenet_v2"]

Activation = Callable[[], nn.Module]


@dataclass(frozen=True)
class _Stage:
    """Blocks of one size: expansion, channels, how many, stride of the first, kernel side."""

    expansion: int
    channels: int
    count: int
    stride: int
    kernel: int = 3


MOBILENET = (
    _Stage(1, 16, 1, 1),
    _Stage(6, 24, 2, 2),
    _Stage(6, 32, 3, 2),
    _Stage(6, 64, 4, 2),
    _Stage(6, 96, 3, 1),
    _Stage(6, 160, 3, 2),
    _Stage(6, 320, 1, 1),
)
EFFICIENTNET = (
    _Stage(1, 16, 1, 1),
    _Stage(6, 24, 2, 2),
    _Stage(6, 40, 2, 2, 5),
    _Stage(6, 80, 3, 2),
    _Stage(6, 112, 3, 1, 5),
    _Stage(6, 192, 4, 2, 5),
    _Stage(6, 320, 1, 1),
)


class _Excite(nn.Module):
    """Scales each channel by what its mean over the image says (squeeze and excitation)."""

    def __init__(self, channels: int, inner: int, activation: Activation):
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, inner, 1),
            activation(),
            nn.Conv2d(inner, channels, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled maps."""
        return x * self.gate(x)


class _Inverted(nn.Module):
    """Widen, filter each channel by itself, narrow; beside a short-cut where shapes allow."""

    def __init__(self, inputs: int, stage: _Stage, excite: bool, activation: Activation):
        super().__init__()
        inner = inputs * stage.expansion
        parts: list[nn.Module] = []
        if inner != inputs:
            parts += [*_convolution(inputs, inner, 1), activation()]
        depthwise = _convolution(inner, inner, stage.kernel, stage.stride, groups=inner)
        parts += [*depthwise, activation()]
        if excite:
            parts.append(_Excite(inner, max(1, inputs // 4), activation))
        self.branch = nn.Sequential(*parts, *_convolution(inner, stage.channels, 1))
        self.has_shortcut = stage.stride == 1 and inputs == stage.channels

    def forward(self, x: Tensor) -> Tensor:
        """Return the branch, with the input added where shapes allow."""
        return x + self.branch(x) if self.has_shortcut else self.branch(x)


def mobilenet_v2(activation: Activation = nn.ReLU6, classes: int = 1000) -> nn.Sequential:
    """Return MobileNetV2, without dropout.

    Source:
        Sandler et al., "MobileNetV2: inverted residuals and linear bottlenecks", 2018.
    """
    return _network(MOBILENET, (32, 1280), False, activation, classes)


def efficientnet(
    width: float, depth: float, activation: Activation = nn.SiLU, classes: int = 1000
) -> nn.Sequential:
    """Return EfficientNet, without dropout and stochastic depth.

    Args:
        width: Factor on the channels, rounded to multiples of 8, never below nine tenths.
        depth: Factor on the number of blocks, rounded up.
        activation: Makes the activation functions but the gates' sigmoid.
        classes: Outputs.

    Source:
        Tan and Le, "EfficientNet: rethinking model scaling", 2019.
    """
    stages = tuple(
        _Stage(
            s.expansion, _even(s.channels * width), math.ceil(s.count * depth), s.stride, s.kernel
        )
        for s in EFFICIENTNET
    )
    return _network(stages, (_even(32 * width), _even(1280 * width)), True, activation, classes)


def _network(
    stages: tuple[_Stage, ...],
    ends: tuple[int, int],
    excite: bool,
    activation: Activation,
    classes: int,
) -> nn.Sequential:
    """Put a convolution, the stages, another convolution and a classifier together."""
    inputs, last = ends
    parts = [*_convolution(3, inputs, 3, 2), activation()]
    for s in stages:
        for i in range(s.count):
            stride = 1 if i else s.stride
            block = _Stage(s.expansion, s.channels, 1, stride, s.kernel)
            parts.append(_Inverted(inputs, block, excite, activation))
            inputs = s.channels
    parts += [*_convolution(inputs, last, 1), activation()]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, classes))


def _convolution(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    conv = nn.Conv2d(
        inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False
    )
    return [conv, nn.BatchNorm2d(outputs)]


def _even(channels: float) -> int:
    """Round to a multiple of 8 that is not below nine tenths of ``channels``."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded
