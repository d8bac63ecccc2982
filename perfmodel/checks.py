"""What arguments must be; loads no torch."""

import math
import operator
from collections.abc import Iterable
from typing import SupportsIndex

from perfmodel.madds import Layer

__all__ = ["check_layers", "check_whole"]


def check_whole(least: int, most: float = math.inf, **values: SupportsIndex) -> None:
    """Refuse what is no whole number, or out of range.

    Args:
        least: The smallest that may come.
        most: The largest.
        values: By name.

    Raises:
        TypeError: One is no whole number.
        ValueError: One is out of range.
    """
    for name, value in values.items():
        try:
            is_inside = least <= operator.index(value) <= most
        except TypeError:
            raise TypeError(f"{name} must be a whole number, got {value!r}") from None
        if isinstance(value, bool):
            raise TypeError(f"{name} must be a whole number, got {value!r}")
        if not is_inside:
            needed = f"at least {least}" if most == math.inf else f"{least} to {most}"
            raise ValueError(f"{name} must be {needed}, got {value}")


def check_layers(layers: Iterable[Layer]) -> list[Layer]:
    """Return the layers of a model as a list.

    Raises:
        TypeError: These are none.
        ValueError: There are none.
    """
    rows: list[object] = [*layers] if isinstance(layers, Iterable) else [layers]
    found = [row for row in rows if isinstance(row, Layer)]
    write = "write perfmodel.layers(model, (3, 32, 32)), with the shape of a sample"
    strange = [row for row in rows if not isinstance(row, Layer)]
    if strange:
        raise TypeError(f"layers must be those of a model, got {strange[0]!r:.60}: {write}")
    if not found:
        raise ValueError(f"layers must be those of a model, got none: {write}")
    return found
