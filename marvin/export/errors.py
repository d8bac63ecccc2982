"""What can go wrong in an export, as the user is told."""

import importlib
from typing import Any

from fixedpoint_kernels import FixedPoint
from marvin.channels import ChannelFormat

__all__ = ["ExportError", "fixed_point", "require"]


class ExportError(ValueError):
    """A network or a file that cannot be exported or read; says what, and why."""


def fixed_point(name: str, fmt: object) -> FixedPoint:
    """Return ``fmt``, if it is a format that every target has.

    Of a weight whose channels have an ``fl`` of their own, it is the shortest that has all their values.

    Raises:
        ExportError: It is of block floating point, whose ``fl`` moves with the data, or of channels
            that have no format of 32 bits in common.
    """
    if isinstance(fmt, ChannelFormat):
        try:
            return fmt.whole()
        except ValueError as error:
            raise ExportError(f"{name}: {error}") from error
    if not isinstance(fmt, FixedPoint):
        raise ExportError(
            f"{name} must have a fixed-point format, got {fmt}: take the trained model's formats "
            "off, marvin.prepare(model).remove(), and write marvin.calibrate(model, batches)"
        )
    return fmt


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
