"""Tensors inside of tuples, lists and dictionaries."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

__all__ = ["mapped", "mapped_output", "mapped_value"]


def mapped(
    function: Callable[[Tensor], Tensor],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    names: Sequence[str],
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return arguments with their tensors replaced, also inside of tuples, lists and dictionaries.

    Args:
        function: Gives what takes a tensor's place.
        args: By position.
        kwargs: By name. What is named a mask stays.
        names: Of ``args``, as far as they are known.
    """
    known = [*names[: len(args)], *[""] * (len(args) - len(names))]
    own = tuple(mapped_value(function, x, name) for name, x in zip(known, args, strict=True))
    return own, {name: mapped_value(function, x, name) for name, x in kwargs.items()}


def mapped_value(function: Callable[[Tensor], Tensor], value: Any, name: str = "") -> Any:
    """Return ``value`` with its tensors replaced; what is named a mask stays."""
    if "mask" in name:
        return value
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        items = [mapped_value(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = mapped_value(function, item, str(key))
        return copied
    return value


def mapped_output(function: Callable[[Tensor], Tensor], output: Any) -> Any:
    """Return what a module gave with its tensors replaced, but for numbers by themselves: a loss is no activation."""
    return mapped_value(lambda x: function(x) if x.ndim else x, output)
