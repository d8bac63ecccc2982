"""Which tensors the kernels of a program may step through by address."""

from collections.abc import Sequence

from torch import Tensor

from fixedpoint_kernels.fused.graph import Layer, Norm
from fixedpoint_kernels.memory import is_float32

__all__ = ["are_taken"]


def are_taken(layer: Layer | Norm, weight: Tensor | None, others: Sequence[Tensor | None]) -> bool:
    """Say whether kernels may read and write what a layer has.

    Args:
        layer: As a program knows it.
        weight: Values of its weight; of batch norm alone not looked at.
        others: What it has for each channel it makes: scale, shift or bias, running statistics.
    """
    if isinstance(layer, Norm):
        channels = (layer.channels,)
    else:
        channels = layer.shape[:1]
        shape = layer.shape[: 2 if layer.is_flat else 4]
        if weight is None or not is_float32(weight, shape, is_dense=False):
            return False
        if not layer.is_flat and not _steps_through_windows(weight):
            return False
    return all(x is None or is_float32(x, channels) for x in others)


def _steps_through_windows(weight: Tensor) -> bool:
    """Say whether one step leads from each element of a window to the next, through all rows."""
    *_, height, width = weight.shape
    *_, down, across = weight.stride()
    return height == 1 or down == across * width
