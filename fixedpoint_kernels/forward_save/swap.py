"""Give a module another class, and take it back: parameters, hooks and names never move.

A converted module is the same object with a subclass of its own class. So the modules of a
``Sequential``, tied modules, optimizers and hooks keep what they hold, and keys of ``state_dict``
stay. What the conversion added is written down on the module itself; a copy can be undone too.
"""

from functools import cache
from typing import Any, NamedTuple

from torch import nn

__all__ = ["Converted", "Undo", "is_converted", "is_restorable", "restore_", "swap_", "undo_of"]

UNDO = "_forward_save_undo"


class _Missing:
    """Stands for an attribute that was not there; the class itself is the mark, so it pickles."""


class Undo(NamedTuple):
    """How to take a conversion back.

    Args:
        bases: Classes that came before the module's own.
        original: The module's own class.
        attributes: What was under the names that the conversion used.
    """

    bases: tuple[type, ...]
    original: type
    attributes: dict[str, Any]


class Converted(nn.Module):
    """First base of every converted class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *rest = super().__reduce_ex__(protocol)  # the class is made at run time: name parts
        undo = vars(self)[UNDO]
        return _blank, (undo.bases, undo.original), *rest


def swap_(module: nn.Module, bases: tuple[type, ...], attributes: dict[str, Any]) -> None:
    """Put ``bases`` before the class of ``module``, and set attributes.

    Args:
        module: Not converted yet.
        bases: Classes whose methods win; the first that derives from the module's class replaces
            it.
        attributes: Plain values, restored by ``restore_``.
    """
    original = type(module)
    old = {name: vars(module).get(name, _Missing) for name in attributes}
    vars(module).update(attributes, **{UNDO: Undo(bases, original, old)})
    module.__class__ = _converted(bases, original)


def restore_(module: nn.Module) -> None:
    """Undo ``swap_``.

    Raises:
        ValueError: The class has changed since, for instance by a parametrisation.
    """
    undo = undo_of(module)
    if type(module) is not _converted(undo.bases, undo.original):
        raise ValueError(f"the class must be as convert left it, got {type(module).__name__}")
    for name, value in undo.attributes.items():
        if value is _Missing:
            del vars(module)[name]
        else:
            vars(module)[name] = value
    del vars(module)[UNDO]
    module.__class__ = undo.original


def undo_of(module: nn.Module) -> Undo:
    """Return what ``swap_`` wrote down."""
    return vars(module)[UNDO]


def is_converted(module: nn.Module) -> bool:
    """Whether ``swap_`` was done to ``module``."""
    return UNDO in vars(module)


def is_restorable(module: nn.Module) -> bool:
    """Whether ``restore_`` can undo it."""
    undo = undo_of(module)
    return type(module) is _converted(undo.bases, undo.original)


@cache
def _converted(bases: tuple[type, ...], original: type) -> type:
    own = () if any(issubclass(base, original) for base in bases) else (original,)
    return type(original.__name__, (Converted, *bases, *own), {"__module__": original.__module__})


def _blank(bases: tuple[type, ...], original: type) -> Any:
    made: Any = _converted(bases, original)
    return made.__new__(made)
