"""Which tensors the kernels of a program may step through by address."""

from collections.abc import Sequence
from itertools import chain, compress

from torch import Tensor

from fixedpoint_kernels.fused.graph import Layer, Norm
from fixedpoint_kernels.memory import are_float32

__all__ = ["Wanted"]


class Wanted:
    """What kernels may read and write of what layers have.

    Args:
        layers: As a program knows them.
    """

    def __init__(self, layers: Sequence[Layer | Norm]) -> None:
        sizes = [
            None if isinstance(own, Norm) else own.shape[: 2 if own.is_flat else 4]
            for own in layers
        ]
        self._has_weight = [size is not None for size in sizes]
        self._sizes = [size for size in sizes if size is not None]
        self._channels = [
            (own.channels,) if isinstance(own, Norm) else own.shape[:1] for own in layers
        ]
        self._strides: list[tuple[int, ...]] = []  # of weights that could be taken

    def are(self, weights: Sequence[Tensor | None], *others: Sequence[Tensor | None]) -> bool:
        """Say whether kernels may read and write these.

        Args:
            weights: Of each layer; of batch norm alone not looked at.
            others: What each has for each channel it makes, or None: scales, shifts or biases, running
                statistics.
        """
        matrices = [x for x in compress(weights, self._has_weight) if x is not None]
        flat = [*chain.from_iterable(others)]
        vectors = [x for x in flat if x is not None]
        lengths = [*compress(self._channels * len(others), (x is not None for x in flat))]
        if not are_float32(matrices, self._sizes) or not are_float32(vectors, lengths):
            return False
        strides = [*map(Tensor.stride, matrices)]
        if strides != self._strides:
            if not all(map(_steps_through_windows, matrices)):
                return False
            self._strides = strides
        return all(map(Tensor.is_contiguous, vectors))


def _steps_through_windows(weight: Tensor) -> bool:
    """Say whether one step leads from each element of a window to the next, through all rows."""
    if weight.dim() == 2:
        return True
    *_, height, width = weight.shape
    *_, down, across = weight.stride()
    return height == 1 or down == across * width
