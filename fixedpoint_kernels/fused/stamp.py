"""How tensors are told from what they were, so that what was made of them can be used again."""

from collections.abc import Sequence
from operator import is_

from torch import Tensor

from fixedpoint_kernels._torch_private.tensors import versions_of

__all__ = ["Stamp"]


class Stamp:
    """Which tensors there are, where and how they lie, and how often each was written to.

    Writes that torch does not count are not seen: through ``.data``, a NumPy array or an address, or by another process.

    Args:
        tensors: In an order that stays; None where there is none.
    """

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self.tensors = tuple(tensors)
        found = [x for x in tensors if x is not None]
        self._places = [*map(Tensor.data_ptr, found)]
        self._shapes = [(x.shape, x.stride()) for x in found]
        self._versions = versions_of(found)
        # holding the memory keeps its address from being given to another tensor (``x.data = y``)
        self._memory = [x.untyped_storage() for x in found]
        self._counts = not any(map(Tensor.is_inference, found))

    def is_of(self, tensors: Sequence[Tensor | None]) -> bool:
        """Say whether these are the tensors, as they were; never, where one is of inference mode, which counts no writes."""
        own = self.tensors
        if not self._counts or len(tensors) != len(own) or not all(map(is_, tensors, own)):
            return False
        found = [x for x in own if x is not None]
        return (
            versions_of(found) == self._versions
            and [*map(Tensor.data_ptr, found)] == self._places
            and [(x.shape, x.stride()) for x in found] == self._shapes
        )
