"""What can go wrong in an export, as the user is told."""

import importlib
from typing import Any

import torch
from torch import Tensor

from fixedpoint_kernels import FixedPoint
from marvin.channels import ChannelFormat

__all__ = ["NO_MEMORY", "ExportError", "check_length", "check_tensor", "fixed_point", "require"]


NO_MEMORY = MemoryError, torch.OutOfMemoryError
"""What a model raises where memory ends: nothing is wrong with the model or its samples."""


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


def check_length(name: str, wl: object) -> None:
    """Refuse what is no word length.

    Args:
        name: Of the setting.
        wl: What came.

    Raises:
        ExportError: It is not 2 to 32 bits.
        TypeError: It is no whole number.
    """
    if not isinstance(wl, int) or isinstance(wl, bool):
        raise TypeError(f"{name} must be a whole number of bits, got {name}={wl!r:.80}")
    if not 2 <= wl <= 32:
        raise ExportError(f"{name} must be 2 to 32 bits, got {name}={wl}")


def check_tensor(x: object, name: str = "samples") -> None:
    """Refuse what is no tensor where one batch is meant.

    Args:
        x: What came.
        name: What it is called.

    Raises:
        TypeError: It is not a tensor; says what to write of an array, and of batches.
    """
    if not isinstance(x, Tensor):
        kind = type(x).__name__
        instead = (
            "torch.from_numpy(x)" if kind == "ndarray" else "torch.cat(batches) of their inputs"
        )
        raise TypeError(f"{name} must be a tensor, one batch, got {kind}: write {instead}")


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
