"""Whether functions keep less just now, in this thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch.overrides import TorchFunctionMode

__all__ = ["here", "paused"]


class _Here(threading.local):
    """The innermost scope, and whether it is to leave functions alone."""

    def __init__(self):  # in each thread; not on the class: Dynamo guards what an object has
        self.scope: TorchFunctionMode | None = None
        self.is_paused = False


here = _Here()


@contextmanager
def paused() -> Iterator[None]:
    """Let torch's own functions run."""
    before, here.is_paused = here.is_paused, True
    try:
        yield
    finally:
        here.is_paused = before
