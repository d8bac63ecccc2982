"""What a conversion is asked for, checked."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fixedpoint_kernels.few_bit.integrals import Weight
from fixedpoint_kernels.few_bit.solver import checked_bits

__all__ = ["FewBit", "few_bit_settings"]


@dataclass(frozen=True)
class FewBit:
    """How activations keep their derivative.

    Args:
        bits: Of a code, 1 to 8; the stepwise ones need 1.
        weight: Where the table is accurate, see ``few_bit.solve``.

    Raises:
        ValueError: ``bits`` is out of range.
    """

    bits: int = 3
    weight: Weight = "uniform"

    def __post_init__(self) -> None:
        checked_bits(self.bits)


def few_bit_settings(value: Any) -> FewBit | None:
    """Return the settings that ``few_bit=`` stands for: None, a number of bits, or a mapping."""
    if value is None or isinstance(value, FewBit):
        return value
    if isinstance(value, Mapping):
        return FewBit(**known(value, FewBit, "few_bit"))
    return FewBit(value)


def known(values: Mapping[str, Any], kind: Any, argument: str) -> dict[str, Any]:
    """Return ``values``, whose names are all fields of ``kind``.

    Raises:
        ValueError: There is another name.
    """
    names = [f.name for f in fields(kind)]
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise ValueError(f"{argument} takes {', '.join(names)}, got {', '.join(unknown)}")
    return dict(values)
