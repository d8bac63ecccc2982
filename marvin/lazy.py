"""Names of a package that are loaded when they are first used, so that commands answer at once."""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec

__all__ = ["load"]


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
