"""Compare what a file holds with what it should: kinds of values, names, shapes of tensors."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from perfmodel.files import shown

__all__ = ["check_alike", "check_names"]

MOST = 2**53  # whole numbers up to here are exact as floats, too


def check_names(what: str, want: Mapping[str, object], got: Mapping[str, object]) -> None:
    """Refuse a dictionary of other names.

    Raises:
        ValueError: With the names in which they differ.
    """
    if differing := sorted(map(str, set(want) ^ set(got))):
        raise ValueError(f"{what} must have {len(want)} names, others are {differing[:3]}")


def check_alike(where: str, want: Any, got: Any) -> None:
    """Refuse a value of another kind, and tensors of another shape or type.

    Args:
        where: What to call the value.
        want: A value of the right kind. Where it is None, a number or a format may have come
            since. Of dictionaries the names in both are compared; lists of one length element by
            element, others each element with the first of ``want``.
        got: The value.

    Raises:
        ValueError: With what is required and what came.
    """
    if isinstance(want, Tensor):
        _check_tensor(where, want, got)
    elif isinstance(want, Mapping):
        is_float32 = got is None and "wl" in want  # no format
        _require(where, "a dictionary", is_float32 or isinstance(got, Mapping), got)
        for name, value in (got or {}).items():
            if name in want:
                check_alike(f"{where}.{name}", want[name], value)
    elif isinstance(want, list | tuple):
        _require(where, "a list", isinstance(got, list | tuple), got)
        firsts = [want[0] if want else None] * len(got)
        for own, value in zip(want if len(want) == len(got) else firsts, got, strict=True):
            check_alike(where, own, value)
    elif want is None:
        _check_unknown(where, got)
    else:
        _check_plain(where, want, got)


def _check_unknown(where: str, got: object) -> None:
    """Refuse what is no number, nor a dictionary or list of numbers, such as a format."""
    if isinstance(got, Mapping):
        for name, value in got.items():
            _check_unknown(f"{where}.{name}", value)
    elif isinstance(got, list | tuple):
        for value in got:
            _check_plain(where, 0, value)
    else:
        is_number = isinstance(got, float) or (isinstance(got, int) and abs(got) <= MOST)
        _require(where, "a number or a format", got is None or is_number, got)


def _check_tensor(where: str, want: Tensor, got: Any) -> None:
    same = isinstance(got, Tensor) and got.shape == want.shape and got.dtype == want.dtype
    if not same or got.layout != torch.strided or got.device != torch.device("cpu"):
        what = f"{tuple(got.shape)}, {got.dtype}" if isinstance(got, Tensor) else shown(got)
        raise ValueError(f"{where} must be {tuple(want.shape)}, {want.dtype}, got {what}")


def _check_plain(where: str, want: object, got: object) -> None:
    """Compare two numbers, words or truths; a whole number is a number, too."""
    numbers = (int,) if isinstance(want, int) else (int, float)
    kinds = type(want) if isinstance(want, bool | str) else numbers
    is_alike = isinstance(got, kinds) and isinstance(got, bool) == isinstance(want, bool)
    is_alike &= not isinstance(got, int) or abs(got) <= MOST
    _require(where, f"like {shown(want)}", is_alike, got)


def _require(where: str, what: str, is_met: bool, got: object) -> None:
    if not is_met:
        raise ValueError(f"{where} must be {what}, got {shown(got)}")
