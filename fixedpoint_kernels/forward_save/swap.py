"""Give a module another class, and take it back: parameters, hooks and names never move.

A converted module is the same object with a subclass of its own class. So the modules of a
``Sequential``, tied modules, optimizers and hooks keep what they hold, and keys of ``state_dict``
stay. What the conversion added is written down on the module itself; a copy can be undone too.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, NoReturn

from torch import nn
from torch.fx import GraphModule

__all__ = [
    "Converted",
    "Undo",
    "check_model",
    "is_converted",
    "is_restorable",
    "restore_",
    "swap_",
    "undo_of",
]

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

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse ``torch.jit.script`` by name, which asks for this first."""
        raise RuntimeError(
            "torch.jit.script cannot compile models that keep less for backward: call "
            "forward_save.revert(model) first"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        undo = vars(self)[UNDO]
        if _has_own_reduce(undo.original):
            attributes = {name: vars(self)[name] for name in undo.attributes}
            with _as_it_was(self):
                make, given, *rest = self.__reduce_ex__(protocol)
            return _made_again, (make, given, undo.bases, attributes), *rest
        _, _, *rest = super().__reduce_ex__(protocol)  # the class is made at run time: name parts
        return _blank, (undo.bases, undo.original), *rest


def check_model(model: object, name: str) -> None:
    """Refuse what is no model where a function, of this name, takes one first.

    Raises:
        TypeError: It is none.
    """
    if not isinstance(model, nn.Module):
        came = type(model).__name__
        raise TypeError(f"{name} needs a model (torch.nn.Module) first, got {came}")


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
    added: dict[str, object] = {"__module__": original.__module__}
    if hasattr(original, "__deepcopy__"):
        added["__deepcopy__"] = _deepcopy
    if issubclass(original, GraphModule):  # which writes its code to the class
        added["recompile"] = _recompile
    return type(original.__name__, (Converted, *bases, *own), added)


@contextmanager
def _as_it_was(module: nn.Module) -> Iterator[None]:
    """Give a module its own class and attributes while this is entered."""
    undo = undo_of(module)
    attributes = {name: vars(module)[name] for name in undo.attributes}
    restore_(module)
    try:
        yield
    finally:
        swap_(module, undo.bases, attributes)


def _deepcopy(module: nn.Module, memo: dict[int, object]) -> object:
    """Copy a module as its own class does, and convert the copy."""
    undo = undo_of(module)
    attributes = copy.deepcopy({name: vars(module)[name] for name in undo.attributes}, memo)
    with _as_it_was(module):
        made = module.__deepcopy__(memo)  # pyright: ignore[reportCallIssue]
    if made is not module and isinstance(made, nn.Module) and not is_converted(made):
        swap_(made, undo.bases, attributes)
    return made


def _recompile(module: GraphModule) -> object:
    with _as_it_was(module):
        return module.recompile()


def _has_own_reduce(kind: type) -> bool:
    """Whether a class says itself how it is pickled."""
    plain = nn.Module
    return (kind.__reduce__, kind.__reduce_ex__) != (plain.__reduce__, plain.__reduce_ex__)


def _made_again(
    make: Callable[..., nn.Module],
    given: tuple[object, ...],
    bases: tuple[type, ...],
    attributes: dict[str, object],
) -> nn.Module:
    """Return what a class of its own pickling makes, converted."""
    made = make(*given)
    swap_(made, bases, attributes)
    return made


def _blank(bases: tuple[type, ...], original: type) -> Any:
    made: Any = _converted(bases, original)
    return made.__new__(made)
