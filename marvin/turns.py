"""Calls of an optimizer that come one after the other, whichever thread or handler makes them."""

from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import Concatenate, ParamSpec, Protocol, TypeVar

__all__ = ["in_turn"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _HasTurn(Protocol):
    _turn: RLock


_Self = TypeVar("_Self", bound=_HasTurn)


def in_turn(
    method: Callable[Concatenate[_Self, _P], _R],
) -> Callable[Concatenate[_Self, _P], _R]:
    """Let a method wait while another thread is in one of these, and refuse it inside of one of this thread.

    There, in a signal handler or a hook, masters and weights are those of no step.
    """

    @wraps(method)
    def run(self: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        # an interrupt may leave a flag behind, but no lock; Python has no public way to ask who holds it
        if self._turn._is_owned():  # pyright: ignore[reportAttributeAccessIssue]
            raise RuntimeError(
                f"{method.__name__}() must come between two steps, got it inside of step() or of another call that "
                f"changes or reads the {type(self).__name__}, from a signal handler or a hook: set a flag there, "
                f"and call {method.__name__}() after step()"
            )
        with self._turn:
            return method(self, *args, **kwargs)

    return run
