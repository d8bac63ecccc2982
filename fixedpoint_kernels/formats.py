"""Number formats, as plain values: nothing here imports torch."""

import operator
from dataclasses import dataclass
from typing import Any

__all__ = ["FixedPoint"]


@dataclass(frozen=True)
class FixedPoint:
    """A signed two's complement fixed-point format ``<wl, fl>``.

    A number of the format is an integer code times ``lsb``; codes run from ``min_code`` to
    ``max_code``. Values outside saturate wherever this package rounds.

    Args:
        wl: Word length in bits, sign included, 2 to 32.
        fl: Fractional length in bits, -31 to 31; negative for steps coarser than 1. It may
            exceed ``wl``: then all numbers are small.
        symmetric: Leave out the most negative code, so that the range is symmetric about 0.

    Raises:
        TypeError: ``wl`` or ``fl`` is not an integer.
        ValueError: ``wl`` or ``fl`` is out of range.
    """

    wl: int
    fl: int
    symmetric: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (("wl", 2, 32), ("fl", -31, 31)):
            value = _as_int(name, getattr(self, name))
            if not low <= value <= high:
                word = "word length" if name == "wl" else "fractional length"
                raise ValueError(f"{word} must be {low} to {high} bits, got {name}={value}")
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        return f"<{self.wl}, {self.fl}>"

    @property
    def lsb(self) -> float:
        """The step between neighbouring numbers, ``2**-fl``."""
        return 2.0**-self.fl

    @property
    def scale(self) -> float:
        """Codes per unit, ``2**fl``: multiplying by it is exact in floating point."""
        return 2.0**self.fl

    @property
    def min_code(self) -> int:
        """The smallest integer code."""
        return self.symmetric - 2 ** (self.wl - 1)

    @property
    def max_code(self) -> int:
        """The largest integer code."""
        return 2 ** (self.wl - 1) - 1

    @property
    def min(self) -> float:
        """The smallest number."""
        return self.min_code * self.lsb

    @property
    def max(self) -> float:
        """The largest number."""
        return self.max_code * self.lsb

    def to_qtorch(self) -> Any:
        """Return the same format as a ``qtorch.FixedPoint``; needs the extra ``[qtorch]``.

        Raises:
            ValueError: ``fl`` is not positive: QPyTorch has no such formats.
        """
        import qtorch

        if self.fl < 1:
            raise ValueError(
                f"a format of QPyTorch has a fractional length of 1 or more, got {self}"
            )
        return qtorch.FixedPoint(self.wl, self.fl, clamp=True, symmetric=self.symmetric)

    @classmethod
    def from_qtorch(cls, number: Any) -> "FixedPoint":
        """Return the format of a ``qtorch.FixedPoint``.

        Raises:
            ValueError: ``number`` does not clamp: formats of this package saturate.
        """
        if not number.clamp:
            raise ValueError(
                "a fixed-point format must saturate, got a qtorch one with clamp=False"
            )
        return cls(number.wl, number.fl, bool(number.symmetric))


def _as_int(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
