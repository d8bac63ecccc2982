"""Names of a package that are loaded when they are first used, so that commands answer at once."""

import warnings
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["Alias", "load"]


def load(package: str, homes: Mapping[str, str], name: str) -> object:
    """Return what a package calls ``name``: an object of one of its modules, or a module itself.

    Args:
        package: Such as ``"marvin"``.
        homes: Module of each name, without the package; modules of the package need not be there.
        name: What is asked for.

    Raises:
        AttributeError: The package has no such name.
    """
    if name in homes:
        return getattr(import_module(f"{package}.{homes[name]}"), name)
    if name.isidentifier() and not name.startswith("_") and find_spec(f"{package}.{name}"):
        return import_module(f"{package}.{name}")
    raise AttributeError(f"module {package!r} has no attribute {name!r}")


class Alias(ModuleType):
    """A module under another name: what is asked of it comes from its home, loaded then.

    Args:
        name: The other name.
        home: The module's own.
        is_old: Whether to warn that the module is at its home now.
    """

    def __init__(self, name: str, home: str, *, is_old: bool = False) -> None:
        super().__init__(name)
        self._home, self._is_old = home, is_old

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":  # tools ask every module for these
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if self._is_old:
            moved = f"{self.__name__} is now {self._home}"
            warnings.warn(moved, DeprecationWarning, stacklevel=2)
        return getattr(import_module(self._home), name)
