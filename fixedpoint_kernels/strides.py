"""How tensors lie in memory."""

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

__all__ = ["is_dense", "laid", "lies_last", "memory_order", "orders_of"]


def memory_order(x: Tensor) -> tuple[int, ...] | None:
    """Return the order of dimensions in which ``x`` lies in memory without gaps, if not its own.

    So ``channels_last`` is read as it lies, and its gradient is ``channels_last`` too.
    """
    if x.is_contiguous():
        return None
    order: list[int] = []
    for i in range(x.dim()):  # sorted by insertion: Dynamo cannot sort sizes it does not know
        at = len(order)
        while at and x.stride(order[at - 1]) < x.stride(i):
            at -= 1
        order.insert(at, i)
    return tuple(order) if x.permute(order).is_contiguous() else None


def laid(x: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """Return ``x`` with its dimensions in an order that ``memory_order`` returned."""
    return x if order is None else x.permute(order)


def is_dense(x: Tensor) -> bool:
    """Say whether ``x`` lies in memory without gaps, in whatever order of its dimensions."""
    return x.is_contiguous() or _order(x.shape, x.stride()) is not None


def lies_last(x: Tensor) -> bool:
    """Say whether PyTorch takes maps for ``channels_last``: whether their strides are in that order.

    One channel, or one place, lies in both formats; what PyTorch makes of such maps lies as their strides say.

    Args:
        x: (samples, channels, height, width).
    """
    least = 0
    for dim in (1, 3, 2, 0):
        step, size = x.stride(dim), x.shape[dim]
        if not size or not step or step < least or (dim == 0 and least == x.stride(1)):
            return False
        least = step * size
    return True


def orders_of(xs: Sequence[Tensor]) -> list[tuple[int, ...] | None]:
    """Return the order of dimensions in which each tensor lies: () in their own, None with gaps.

    Tensors of one shape and one order have their elements at the same places. As ``memory_order``, without
    a tensor made of each.
    """
    return list(map(_order, (x.shape for x in xs), map(Tensor.stride, xs)))


@lru_cache(maxsize=1024)  # the same parameters come step after step
def _order(sizes: tuple[int, ...], steps: tuple[int, ...]) -> tuple[int, ...] | None:
    own = [i for i, n in enumerate(sizes) if n > 1]
    order = sorted(own, key=lambda i: steps[i], reverse=True)
    room = 1
    for i in reversed(order):
        if steps[i] != room and 0 not in sizes:
            return None
        room *= sizes[i]
    return () if order == own or 0 in sizes else tuple(order)
