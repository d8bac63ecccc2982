"""VGG-11, 16 and 19: plain stacks of 3x3 convolutions."""

from collections.abc import Callable

from torch import nn

__all__ = ["vgg"]


def vgg(
    depths: tuple[int, int, int, int, int],
    activation: Callable[[], nn.Module] = nn.ReLU,
    classes: int = 1000,
) -> nn.Sequential:
    """Return a VGG network without batch normalisation and dropout.

    Args:
        depths: Convolutions of each stage; a stage ends in a pooling that halves the image.
        activation: Makes the activation functions.
        classes: Outputs.

    Source:
        Simonyan and Zisserman, "Very deep convolutional networks", 2014. Differs: the image is
        averaged to 7x7 before the classifier, so that any size fits.
    """
    parts: list[nn.Module] = []
    inputs = 3
    for depth, outputs in zip(depths, (64, 128, 256, 512, 512), strict=True):
        for _ in range(depth):
            parts += [nn.Conv2d(inputs, outputs, 3, padding=1), activation()]
            inputs = outputs
        parts.append(nn.MaxPool2d(2))
    parts += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    for before, after in ((512 * 49, 4096), (4096, 4096)):
        parts += [nn.Linear(before, after), activation()]
    return nn.Sequential(*parts, nn.Linear(4096, classes))
