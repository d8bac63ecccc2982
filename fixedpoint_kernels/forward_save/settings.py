"""What a conversion is asked for, checked."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fixedpoint_kernels.few_bit.integrals import Weight
from fixedpoint_kernels.few_bit.solver import checked_bits

__all__ = [
    "METHODS",
    "Division",
    "FewBit",
    "division_settings",
    "few_bit_settings",
]

METHODS = {
    "division": "block means and residuals: DIVISION",
    "low": "block means alone",
    "high": "residuals alone",
    "fixed": "values, one range a plane",
    "per_group": "values, one range for each 256 of them, as ActNN",
}
BITS = 1, 2, 4, 8


@dataclass(frozen=True)
class FewBit:
    """How activations keep their derivative.

    Args:
        bits: Of a code, 1 to 8; the stepwise ones need 1.
        weight: Where the table is accurate, see ``few_bit.solve``.

    Raises:
        TypeError: ``bits`` is no integer.
        ValueError: ``bits`` is out of range, or ``weight`` is unknown.
    """

    bits: int = 3
    weight: Weight = "uniform"

    def __post_init__(self) -> None:
        checked_bits(self.bits)
        if not (callable(self.weight) or self.weight in ("uniform", "normal")):
            raise ValueError(
                f"weight must be 'uniform', 'normal' or a function, got {self.weight!r}"
            )


@dataclass(frozen=True)
class Division:
    """How activations are kept that are not exact.

    Args:
        block: Edge of the blocks whose means are kept in bfloat16; unused by ``"fixed"`` and
            ``"per_group"``.
        bits: Of a residual, or of a value: 1, 2, 4 or 8; unused by ``"low"``.
        method: One of ``METHODS``; all but the first are for comparison.
        rows: Share of an input's rows that linear layers keep, whole, in place of all in few bits:
            above 0, below 1. The gradient of the weight is then a product of random rows, scaled so
            that its mean is exact.

    Raises:
        ValueError: A value is out of range.
    """

    block: int = 8
    bits: int = 2
    method: str = "division"
    rows: float | None = None

    def __post_init__(self) -> None:
        if type(self.block) is not int or self.block < 1:
            raise ValueError(
                f"block must be a whole number of at least 1, got {self.block!r}: without means, "
                "write {'method': 'fixed'}"
            )
        if type(self.bits) is not int or self.bits not in BITS:
            raise ValueError(f"bits of division must be one of {BITS}, got {self.bits!r}")
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
        if self.rows is not None and not 0 < self.rows < 1:
            raise ValueError(f"rows must be a share above 0 and below 1, got {self.rows!r}")

    @property
    def of_linear(self) -> str:
        """What linear layers keep, in words."""
        return str(self) if self.rows is None else f"{self.rows:.3g} of the rows, by chance"

    def __str__(self) -> str:
        return {
            "division": f"means of blocks of {self.block}, residuals of {bit_count(self.bits)}",
            "low": f"means of blocks of {self.block} alone",
            "high": f"residuals of {bit_count(self.bits)} alone, of blocks of {self.block}",
            "fixed": f"values of {bit_count(self.bits)}, one range a plane",
            "per_group": f"values of {bit_count(self.bits)}, one range for 256",
        }[self.method]


def bit_count(bits: int) -> str:
    """Return a number of bits in words."""
    return f"{bits} bit{'s' if bits > 1 else ''}"


def division_settings(value: Division | Mapping[str, object] | bool | None) -> Division | None:
    """Return the settings that ``division=`` stands for: None, True, or a mapping.

    Raises:
        TypeError: ``value`` is something else.
        ValueError: A setting is unknown, or out of range.
    """
    if value is None or isinstance(value, Division):
        return value
    if value is True:
        return Division()
    if isinstance(value, Mapping):
        return Division(**known(value, Division, "division"))
    raise TypeError(f"division must be a mapping such as {{'block': 8, 'bits': 2}}, got {value!r}")


def few_bit_settings(value: FewBit | Mapping[str, object] | int | None) -> FewBit | None:
    """Return the settings that ``few_bit=`` stands for: None, True, a number of bits, or a mapping."""
    if value is None or isinstance(value, FewBit):
        return value
    if value is True:
        return FewBit()
    if isinstance(value, Mapping):
        return FewBit(**known(value, FewBit, "few_bit"))
    return FewBit(value)


def known(values: Mapping[str, object], kind: type, argument: str) -> dict[str, Any]:
    """Return ``values``, whose names are all fields of ``kind``.

    Raises:
        ValueError: There is another name.
    """
    names = [f.name for f in fields(kind)]
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise ValueError(f"{argument} takes {', '.join(names)}, got {', '.join(unknown)}")
    return dict(values)
