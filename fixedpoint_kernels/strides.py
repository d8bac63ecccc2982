"""How tensors lie in memory."""

from torch import Tensor

__all__ = ["laid", "memory_order"]


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
