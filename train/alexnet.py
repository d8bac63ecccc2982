"""``python -m train.alexnet``: train AlexNet in fixed point or in float32."""

from perfmodel.arguments import stop_at_interrupt
from train.arguments import parse
from train.config import Config

DEFAULTS = Config(model="alexnet", width=64, buffer_bits=4, lr=0.02)
if __name__ == "__main__":  # --help and slips are answered before torch loads
    stop_at_interrupt()
    parse(DEFAULTS)

from collections import OrderedDict

from torch import nn

__all__ = ["DEFAULTS", "MIN_SIDE", "alexnet"]

MIN_SIDE = 32  # a stride of 4 and three poolings leave 1x1


def alexnet(
    classes: int = 10,
    channels: int = 3,
    width: int = 64,
    activation: type[nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """Return AlexNet for small images, without dropout; 2,471,104 weights for CIFAR-10.

    Args:
        classes: Number of classes.
        channels: Colour channels of the images, 32x32.
        width: Channels of the first convolution; the others have 3, 6, 4 and 4 times as many.
        activation: Makes the activation functions.
    """
    w = width
    layers = {
        "conv1": nn.Conv2d(channels, w, 11, stride=4, padding=5),
        "relu1": activation(),
        "pool1": nn.MaxPool2d(2),
        "conv2": nn.Conv2d(w, 3 * w, 5, padding=2),
        "relu2": activation(),
        "pool2": nn.MaxPool2d(2),
        "conv3": nn.Conv2d(3 * w, 6 * w, 3, padding=1),
        "relu3": activation(),
        "conv4": nn.Conv2d(6 * w, 4 * w, 3, padding=1),
        "relu4": activation(),
        "conv5": nn.Conv2d(4 * w, 4 * w, 3, padding=1),
        "relu5": activation(),
        "pool5": nn.MaxPool2d(2),
        "flatten": nn.Flatten(),
        "fc": nn.Linear(4 * w, classes),
    }
    return nn.Sequential(OrderedDict(layers))


if __name__ == "__main__":
    from train.main import main

    main(DEFAULTS, alexnet, MIN_SIDE)
