"""Warnings that point at the line of the user's that led to them, and how they list names."""

import inspect
import warnings
from collections.abc import Sequence

__all__ = ["listed", "warn_user"]

_INSIDE = "contextlib", "fixedpoint_kernels", "marvin", "torch"


def warn_user(message: str) -> None:
    """Warn at the innermost line that is of none of these packages, whatever was called in between."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def listed(names: Sequence[str]) -> str:
    """Return the first three names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
