"""How large what is measured is."""

from dataclasses import dataclass

__all__ = ["FULL", "Sizes"]


@dataclass(frozen=True)
class Sizes:
    """What fits a GPU, or a test.

    Args:
        checked: Elements on which kernels are compared with the reference: Triton compiles for 1,
            and for what 16 divides, on its own.
        elements: Elements of what kernels are timed on: far more than caches hold.
        turns: How often each contestant is timed; figures are medians.
        calls: Calls of a kernel in a turn, at most.
        steps: Training steps in a turn, with the searches for formats that fall in them.
        batch: Images of a training step.
        width: Channels of ResNet20's first stage; AlexNet has four times as many.
        tokens: Tokens and width of the transformer blocks.
    """

    checked: tuple[int, ...]
    elements: int
    turns: int
    calls: int
    steps: int
    batch: int
    width: int
    tokens: tuple[int, int]


FULL = Sizes((1, 1027, 2**18), 2**26, 5, 10, 25, 128, 16, (256, 512))
