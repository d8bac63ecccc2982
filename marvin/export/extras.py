"""Optional packages: present, or one line that says how to install them."""

import importlib
from typing import Any

from marvin.export.errors import ExportError

__all__ = ["require"]


def require(package: str, extra: str) -> Any:
    """Return an optional package.

    Raises:
        ExportError: It is not installed; says what to install.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        command = f'pip install "marvin-fixedpoint[{extra}]"'
        raise ExportError(f"{package} cannot be imported ({error}): {command}") from error
