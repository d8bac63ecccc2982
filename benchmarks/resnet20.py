"""The tensors of ResNet20 for CIFAR-10, 1x1 convolutions where the width changes."""

WIDTHS = 16, 32, 64
BLOCKS = 3  # a stage, two convolutions each
CLASSES = 10


def shapes() -> list[tuple[int, ...]]:
    """Return the 65 parameter shapes, 272,474 numbers in all."""
    found = _convolution(3, WIDTHS[0], 3)
    before = WIDTHS[0]
    for width in WIDTHS:
        for _ in range(BLOCKS):
            found += _convolution(before, width, 3) + _convolution(width, width, 3)
            if before != width:
                found += _convolution(before, width, 1)
            before = width
    return [*found, (CLASSES, before), (CLASSES,)]


def _convolution(inputs: int, outputs: int, kernel: int) -> list[tuple[int, ...]]:
    """Return the shapes of a convolution and of the batch normalisation behind it."""
    return [(outputs, inputs, kernel, kernel), (outputs,), (outputs,)]
