"""What a chain has found out about its modules, and whether that still stands."""

from collections.abc import Sequence
from operator import is_

from torch import nn

from fixedpoint_kernels._torch_private import buffers_of, running_hooks, versions_of
from marvin.rounder import BUFFER

__all__ = ["Standing"]


class Standing:
    """Hooks, modes and formats of modules as they are now, to notice when one changes.

    To ask each module takes ten times as long.

    Args:
        modules: Of a chain.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._members = modules
        self._formats = buffers_of(modules, BUFFER)
        self._seen = self._now()
        # torch counts no versions of what was made in inference mode
        self._is_known = not any(own is not None and own.is_inference() for own in self._formats)

    def holds(self) -> bool:
        """Say whether all of it is as it was."""
        return self._is_known and self._now() == self._seen

    def _now(self) -> tuple[list[object], list[bool], list[bool], list[int]]:
        formats = buffers_of(self._members, BUFFER)
        is_same = list(map(is_, formats, self._formats))
        modes = [own.training for own in self._members]
        versions = versions_of([own for own in formats if own is not None])
        return running_hooks(self._members), modes, is_same, versions
