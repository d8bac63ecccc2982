"""``python -m train.resnet20``: train ResNet20 in fixed point or in float32."""

from perfmodel.arguments import stop_at_interrupt
from train.arguments import parse
from train.config import Config

DEFAULTS = Config(model="resnet20", width=16, buffer_bits=8, channels_last=True)
if __name__ == "__main__":  # --help and slips are answered before torch loads
    stop_at_interrupt()
    parse(DEFAULTS)

import itertools

from torch import Tensor, nn

__all__ = ["DEFAULTS", "MIN_SIDE", "ResNet20", "resnet20"]

MIN_SIDE = 8  # two halvings leave 2x2


class Block(nn.Module):
    """Two 3x3 convolutions beside a short-cut.

    Args:
        inputs: Channels coming in.
        outputs: Channels going out; where they differ, the first convolution halves the image.
        activation: Makes the activation functions.
    """

    def __init__(self, inputs: int, outputs: int, activation: type[nn.Module] = nn.ReLU):
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu1 = activation()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if inputs == outputs else _projection(inputs, outputs)
        self.relu2 = activation()

    def forward(self, x: Tensor) -> Tensor:
        """Return ``relu(f(x) + shortcut(x))``."""
        y = self.relu1(self.bn1(self.conv1(x)))
        return self.relu2(self.bn2(self.conv2(y)) + self.shortcut(x))


def _projection(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 1, stride=2, bias=False), nn.BatchNorm2d(outputs)
    )


class ResNet20(nn.Module):
    """ResNet20 for small images, with 1x1 projections where the short-cut changes shape.

    Args:
        classes: Number of classes.
        channels: Colour channels of the images, at least 8x8.
        width: Channels of the first of three stages; each next one doubles them.
        activation: Makes the activation functions.
    """

    def __init__(
        self,
        classes: int = 10,
        channels: int = 3,
        width: int = 16,
        activation: type[nn.Module] = nn.ReLU,
    ):
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.relu = activation()
        widths = [width] * 4 + [2 * width] * 3 + [4 * width] * 3
        pairs = itertools.pairwise(widths)
        self.blocks = nn.Sequential(*(Block(*pair, activation) for pair in pairs))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, shape ``(n, classes)``, of images ``(n, channels, side, side)``."""
        x = self.blocks(self.relu(self.bn(self.conv(x))))
        return self.fc(self.pool(x).flatten(1))


def resnet20(
    classes: int = 10,
    channels: int = 3,
    width: int = 16,
    activation: type[nn.Module] = nn.ReLU,
) -> ResNet20:
    """Return ResNet20; see ``ResNet20``. 270,896 weights for CIFAR-10."""
    return ResNet20(classes, channels, width, activation)


if __name__ == "__main__":
    from train.main import main

    main(DEFAULTS, resnet20, MIN_SIDE)
