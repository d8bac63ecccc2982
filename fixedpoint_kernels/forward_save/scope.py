"""Whether functions keep less just now, in this thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch.overrides import TorchFunctionMode

__all__ = ["here", "paused"]


class _Here(threading.local):
    """The innermost scope, and whether it is to leave functions alone."""

    scope: TorchFunctionMode | None = None
    is_paused = False


here = _Here()


@contextmanager
def paused() -> Iterator[None]:
    """Let torch's own functions run."""
    before, here.is_paused = here.is_paused, True
    try:
        yield
    finally:
        here.is_paused = before
