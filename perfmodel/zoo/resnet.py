"""Residual networks: ResNet-18 to 152, WRN-50-2, and ResNet-18 for small images."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

__all__ = ["ResNet", "Residual", "Shape"]

Activation = Callable[[], nn.Module]


@dataclass(frozen=True)
class Shape:
    """What tells one residual network from another.

    Args:
        blocks: Residual blocks of each of four stages.
        is_bottleneck: Blocks of 1x1, 3x3, 1x1 convolutions; otherwise of two 3x3.
        width: Factor on the channels of a bottleneck's 3x3 convolution.
        is_small: For 32x32 images: a 3x3 convolution and no pooling at the start.
        classes: Outputs.
    """

    blocks: tuple[int, int, int, int]
    is_bottleneck: bool = True
    width: int = 1
    is_small: bool = False
    classes: int = 1000


class Residual(nn.Module):
    """A branch of convolutions beside a short-cut.

    Args:
        inputs: Channels coming in.
        channels: Channels of the stage; a bottleneck gives four times as many.
        stride: Of the 3x3 convolution that may shrink the image.
        shape: Of the network.
        activation: Makes the activation functions.
    """

    def __init__(
        self, inputs: int, channels: int, stride: int, shape: Shape, activation: Activation
    ):
        super().__init__()
        outputs = channels * (4 if shape.is_bottleneck else 1)
        if shape.is_bottleneck:
            inner = channels * shape.width
            sizes = [(inputs, inner, 1, 1), (inner, inner, 3, stride), (inner, outputs, 1, 1)]
        else:
            sizes = [(inputs, channels, 3, stride), (channels, channels, 3, 1)]
        parts: list[nn.Module] = []
        for before, after, kernel, step in sizes:
            parts += [*_convolution(before, after, kernel, step), activation()]
        self.branch = nn.Sequential(*parts[:-1])
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Sequential(*([] if same else _convolution(inputs, outputs, 1, stride)))
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of the sum of both."""
        return self.activation(self.branch(x) + self.shortcut(x))


class ResNet(nn.Sequential):
    """A residual network for images.

    Source:
        He et al., "Deep residual learning", 2016, with the stride on the 3x3 convolution;
        Zagoruyko and Komodakis, "Wide residual networks", 2016.
    """

    def __init__(self, shape: Shape, activation: Activation = nn.ReLU):
        expansion = 4 if shape.is_bottleneck else 1
        kernel, stride = (3, 1) if shape.is_small else (7, 2)
        parts: list[nn.Module] = [*_convolution(3, 64, kernel, stride), activation()]
        if not shape.is_small:
            parts.append(nn.MaxPool2d(3, 2, padding=1))
        inputs = 64
        for stage, count in enumerate(shape.blocks):
            for block in range(count):
                step = 2 if stage and not block else 1
                parts.append(Residual(inputs, 64 << stage, step, shape, activation))
                inputs = (64 << stage) * expansion
        parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, shape.classes)]
        super().__init__(*parts)


def _convolution(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]
