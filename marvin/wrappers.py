"""Optimizers of other packages that take on the class of the one they wrap, as Lightning's do."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar, cast

from torch.optim import Optimizer

__all__ = ["for_wrappers", "unwrapped"]

_Class = TypeVar("_Class", bound=type)
_Kind = TypeVar("_Kind", bound=Optimizer)
_Run = TypeVar("_Run", bound=Callable[..., object])

_NAMES = "__contains__", "__repr__"


def unwrapped(optimizer: _Kind) -> _Kind:
    """Return the optimizer that another, whose class is derived from its class, has as an attribute; else itself.

    Args:
        optimizer: One on masters, or a wrapper that reads what it lacks from one.
    """
    own = vars(optimizer)
    if "policy" in own:
        return optimizer
    for found in own.values():  # of what is being made, none has a policy
        if isinstance(found, Optimizer) and hasattr(found, "policy"):
            return unwrapped(found)  # pyright: ignore[reportReturnType]
    return optimizer


def for_wrappers(cls: _Class) -> _Class:
    """Let the public methods and properties of a class work on what a wrapper wraps.

    What a wrapper does not override would run with the wrapper as ``self``: it reads from the
    optimizer, and writes to itself.
    """
    for name, own in list(vars(cls).items()):
        if name.startswith("_") and name not in _NAMES:
            continue
        if isinstance(own, property) and own.fget is not None:
            setattr(cls, name, property(_on_unwrapped(own.fget), doc=own.__doc__))
        elif callable(own) and not isinstance(own, type):
            setattr(cls, name, _on_unwrapped(own))
    return cls


def _on_unwrapped(function: _Run) -> _Run:
    @wraps(function)
    def run(self: Optimizer, *args: object, **kwargs: object) -> object:
        return function(unwrapped(self), *args, **kwargs)

    return cast("_Run", run)
