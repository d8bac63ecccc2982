"""Which tensors the kernels of a program may step through by address."""

from collections.abc import Sequence

from torch import Tensor

from fixedpoint_kernels.fused.graph import Layer, Norm
from fixedpoint_kernels.memory import are_float32

__all__ = ["are_taken"]


def are_taken(
    layers: Sequence[Layer | Norm],
    weights: Sequence[Tensor | None],
    others: Sequence[Sequence[Tensor | None]],
) -> bool:
    """Say whether kernels may read and write what layers have.

    Args:
        layers: As a program knows them.
        weights: Values of the weight of each; of batch norm alone not looked at.
        others: What each has for each channel it makes: scale, shift or bias, running statistics.
    """
    matrices: list[Tensor] = []
    sizes: list[Sequence[int]] = []
    vectors: list[Tensor] = []
    lengths: list[Sequence[int]] = []
    for layer, weight, own in zip(layers, weights, others, strict=True):
        is_alone = isinstance(layer, Norm)
        channels = (layer.channels,) if is_alone else layer.shape[:1]
        for x in own:
            if x is not None:
                vectors.append(x)
                lengths.append(channels)
        if is_alone:
            continue
        if weight is None:
            return False
        matrices.append(weight)
        sizes.append(layer.shape[: 2 if layer.is_flat else 4])
    if not are_float32(matrices, sizes) or not are_float32(vectors, lengths):
        return False
    return all(map(_steps_through_windows, matrices)) and all(map(Tensor.is_contiguous, vectors))


def _steps_through_windows(weight: Tensor) -> bool:
    """Say whether one step leads from each element of a window to the next, through all rows."""
    if weight.dim() == 2:
        return True
    *_, height, width = weight.shape
    *_, down, across = weight.stride()
    return height == 1 or down == across * width
