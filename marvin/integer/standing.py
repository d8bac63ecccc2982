"""What a chain has found out about its modules, and whether that still stands."""

from collections.abc import Sequence
from copy import copy
from operator import is_

from torch import nn

from fixedpoint_kernels._torch_private.modules import (
    buffers_of,
    global_backward_hooks,
    global_forward_hooks,
    mode_and_hooks,
)
from marvin.model_formats import mark_of
from marvin.rounder import BUFFER

__all__ = ["Standing"]


class Standing:
    """Hooks, modes and formats of modules when a chain could run, to notice when one changes.

    To ask each module takes ten times as long.

    Args:
        modules: Of a chain; they may be frozen.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._members = modules
        self._is_known = False

    def found(self, is_ready: bool) -> bool:
        """Note what the modules are now, where the chain can run; return whether it can."""
        self._is_known = False
        if not is_ready:
            return False
        self._owners = [*map(vars, self._members)]
        self._before = [tuple(map(copy, own)) for own in self._modes_and_hooks()]
        self._carried = buffers_of(self._members, BUFFER)
        self._marks = self._marks_now()
        self._is_known = True
        return True

    def holds(self) -> bool:
        """Say whether the chain could run, and all of it is as it was."""
        return (
            self._is_known
            and self._modes_and_hooks() == self._before
            and all(map(is_, buffers_of(self._members, BUFFER), self._carried))
            and self._marks_now() == self._marks
        )

    def _modes_and_hooks(self) -> list[tuple[object, ...]]:
        """Return those of each module, and the hooks of all."""
        return [*map(mode_and_hooks, self._owners), global_forward_hooks(), global_backward_hooks()]

    def _marks_now(self) -> list[object]:
        return [mark_of(own) for own in self._carried if own is not None]
