"""What is common to all that policies remember of a layer."""

from typing import Any, Self

__all__ = ["PlainRecord"]


class PlainRecord:
    """A record without tensors, which is on every device.

    Trainers (Lightning) that move an optimizer's state ask whatever is in it to move.
    """

    def to(self, *_: Any, **__: Any) -> Self:
        """Return itself."""
        return self
