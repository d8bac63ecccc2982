"""What can go wrong in an export, as the user is told."""

from typing import Any

from fixedpoint_kernels import FixedPoint

__all__ = ["ExportError", "fixed_point"]


class ExportError(ValueError):
    """A network or a file that cannot be exported or read; says what, and why."""


def fixed_point(name: str, fmt: Any) -> FixedPoint:
    """Return ``fmt``, if it is a format that every target has.

    Raises:
        ExportError: It is of block floating point, whose point moves with the data.
    """
    if not isinstance(fmt, FixedPoint):
        raise ExportError(f"{name} must have a fixed-point format, got {fmt}")
    return fmt
