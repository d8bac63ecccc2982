"""Number formats, as plain values: nothing here imports torch."""

import math
import operator
from dataclasses import dataclass
from typing import Any, Literal, SupportsIndex, get_args

__all__ = ["LONGEST_FL", "BlockFloat", "FixedPoint", "Minifloat", "Specials"]

Specials = Literal["none", "nan", "ieee"]
LONGEST_FL = 31  # of any format, in bits; and the most negative is -31


@dataclass(frozen=True)
class FixedPoint:
    """A fixed-point format ``<wl, fl>``: two's complement, or unsigned.

    A number of the format is an integer code times ``lsb``; codes run from ``min_code`` to
    ``max_code``. Values outside saturate wherever this package rounds.

    Args:
        wl: Word length in bits, sign included, 2 to 32; unsigned 1 to 31, so that int32 holds
            every code.
        fl: Fractional length in bits, -31 to 31; negative for steps coarser than 1. It may
            exceed ``wl``: then all numbers are small.
        symmetric: Leave out the most negative code, so that the range is symmetric about 0.
        signed: Without it there is no sign bit, and the smallest number is 0.

    Raises:
        TypeError: ``wl`` or ``fl`` is not an integer.
        ValueError: ``wl`` or ``fl`` is out of range, ``symmetric`` or ``signed`` is not True or False; the
            format is unsigned and symmetric.
    """

    wl: int
    fl: int
    symmetric: bool = False
    signed: bool = True

    def __post_init__(self) -> None:
        for name in ("symmetric", "signed"):
            if (given := getattr(self, name)) not in (False, True):
                raise ValueError(f"{name} must be True or False, got {name}={given!r}")
            object.__setattr__(self, name, bool(given))
        is_unsigned = not self.signed
        for name, low, high in (
            ("wl", 2 - is_unsigned, 32 - is_unsigned),
            ("fl", -LONGEST_FL, LONGEST_FL),
        ):
            value = _as_int(name, getattr(self, name))
            if not low <= value <= high:
                word = "word length" if name == "wl" else "fractional length"
                kind = " where unsigned" if is_unsigned and name == "wl" else ""
                raise ValueError(f"{word} must be {low} to {high} bits{kind}, got {name}={value}")
            object.__setattr__(self, name, value)
        if is_unsigned and self.symmetric:
            raise ValueError("a symmetric format must be signed, got signed=False")

    def __repr__(self) -> str:  # of a signed format as it was before there were others
        sign = "" if self.signed else ", signed=False"
        return f"FixedPoint(wl={self.wl}, fl={self.fl}, symmetric={self.symmetric}{sign})"

    def __str__(self) -> str:
        return f"<{self.wl}, {self.fl}>" if self.signed else f"unsigned <{self.wl}, {self.fl}>"

    @property
    def lsb(self) -> float:
        """The step between neighbouring numbers, ``2**-fl``."""
        return 2.0**-self.fl

    @property
    def scale(self) -> float:
        """Codes per unit, ``2**fl``: multiplying by it is exact in floating point."""
        return 2.0**self.fl

    @property
    def il(self) -> int:
        """Integer bits: before the binary point, without the sign; negative where all are small."""
        return self.wl - self.signed - self.fl

    @property
    def min_code(self) -> int:
        """The smallest integer code."""
        return self.symmetric - 2 ** (self.wl - 1) if self.signed else 0

    @property
    def max_code(self) -> int:
        """The largest integer code."""
        return 2 ** (self.wl - self.signed) - 1

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
            ValueError: ``fl`` is not positive, or the format unsigned: QPyTorch has no such.
        """
        import qtorch

        if self.fl < 1 or not self.signed:
            raise ValueError(
                f"a format of QPyTorch is signed, with a fractional length of 1 or more, got {self}"
            )
        return qtorch.FixedPoint(self.wl, self.fl, clamp=True, symmetric=self.symmetric)

    @classmethod
    def from_qtorch(cls, number: Any) -> "FixedPoint":
        """Return the format of a ``qtorch.FixedPoint``.

        Raises:
            TypeError: ``number`` is no such.
            ValueError: ``number`` does not clamp: formats of this package saturate.
        """
        if not hasattr(number, "clamp"):
            raise TypeError(
                f"from_qtorch takes a qtorch.FixedPoint, got {number!r:.60}: write FixedPoint(wl, fl)"
            )
        if not number.clamp:
            raise ValueError(
                "a fixed-point format must saturate, got a qtorch one with clamp=False"
            )
        return cls(number.wl, number.fl, bool(number.symmetric))


@dataclass(frozen=True)
class BlockFloat:
    """Block floating point: codes of ``wl`` bits, and one power of two for a whole tensor.

    The tensor's largest and smallest value decide the power: ``fl`` is the largest fractional
    length at which both round to a code.

    Args:
        wl: Word length in bits, sign included, 2 to 24.

    Raises:
        TypeError: ``wl`` is not an integer.
        ValueError: ``wl`` is out of range.
    """

    wl: int

    def __post_init__(self) -> None:
        value = _as_int("wl", self.wl)
        if not 2 <= value <= 24:
            raise ValueError(f"word length must be 2 to 24 bits, got wl={value}")
        object.__setattr__(self, "wl", value)

    def __str__(self) -> str:
        return f"block <{self.wl}>"

    @property
    def min_code(self) -> int:
        """The smallest integer code."""
        return -(2 ** (self.wl - 1))

    @property
    def max_code(self) -> int:
        """The largest integer code."""
        return 2 ** (self.wl - 1) - 1

    def fl(self, low: float, high: float) -> int:
        """Return the fractional length for values from ``low`` to ``high``; 0 where all are 0.

        Source:
            MuPPET (Rajagopal et al., 2020), equation 1:
            ``floor(log2(min((max_code + 1/2) / high, (min_code - 1/2) / low)))``, of each ratio
            where ``high`` is above and ``low`` below 0.
        """
        ratios = [(self.max_code + 0.5) / high] if high > 0 else []
        ratios += [(self.min_code - 0.5) / low] if low < 0 else []
        if not ratios or not 0 < min(ratios) < math.inf:
            return 0
        return math.frexp(min(ratios))[1] - 1


@dataclass(frozen=True)
class Minifloat:
    """A floating-point format of few bits: sign, exponent, mantissa; with subnormal numbers.

    A number is ``man + 1`` significant bits times a power of two. Below the smallest normal number
    steps stay as long as there (subnormal numbers). Values outside the range saturate: no result is
    infinite, but in float16 where that does not hold the largest number. What float32 cannot hold is
    left out: the largest exponent is 127 at most, and a step is ``2**-126`` at least, which concerns
    formats of 8 exponent bits alone.

    Args:
        exp: Bits of the exponent, 1 to 8; its bias is ``2**(exp - 1) - 1``.
        man: Stored bits of the mantissa, 1 to 23.
        specials: Which codes are no numbers, which decides the largest number. ``"none"``: all are
            numbers, as in QPyTorch and the 4- and 6-bit formats of OCP. ``"nan"``: the largest code
            is NaN, as in torch's ``float8_e4m3fn``. ``"ieee"``: the largest exponent is for
            infinities and NaN, as in ``float8_e5m2`` and ``float16``.

    Raises:
        TypeError: ``exp`` or ``man`` is not an integer.
        ValueError: One of them is out of range; ``specials`` is unknown, or leaves no numbers.

    Examples:
        >>> Minifloat(4, 3, "nan").max, Minifloat(5, 2, "ieee").max
        (448.0, 57344.0)
    """

    exp: int
    man: int
    specials: Specials = "none"

    def __post_init__(self) -> None:
        for name, high in (("exp", 8), ("man", 23)):
            value = _as_int(name, getattr(self, name))
            if not 1 <= value <= high:
                raise ValueError(f"{name} must be 1 to {high} bits, got {name}={value}")
            object.__setattr__(self, name, value)
        if self.specials not in get_args(Specials):
            raise ValueError(f"specials must be one of {get_args(Specials)}, got {self.specials!r}")
        if self.specials == "ieee" and self.exp == 1:
            raise ValueError('exp must be 2 bits or more with specials="ieee", got exp=1')

    def __str__(self) -> str:
        return f"e{self.exp}m{self.man}" + {"none": "", "nan": "fn", "ieee": " ieee"}[self.specials]

    @property
    def wl(self) -> int:
        """Bits of a number, sign included."""
        return 1 + self.exp + self.man

    @property
    def bias(self) -> int:
        """What is taken from a stored exponent."""
        return 2 ** (self.exp - 1) - 1

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal number, and of the numbers below it."""
        return max(1 - self.bias, self.man - 126)

    @property
    def lsb(self) -> float:
        """The smallest number above 0."""
        return 2.0 ** (self.min_exponent - self.man)

    @property
    def max(self) -> float:
        """The largest number."""
        last = 2**self.exp - 1 - (self.specials == "ieee") - self.bias
        top = 2 ** (self.man + 1) - 1 - (self.specials == "nan" and last <= 127)
        return top * 2.0 ** (min(last, 127) - self.man)

    @property
    def min(self) -> float:
        """The smallest number, ``-max``."""
        return -self.max

    def to_qtorch(self) -> Any:
        """Return the same format as a ``qtorch.FloatingPoint``; needs the extra ``[qtorch]``.

        Raises:
            ValueError: Some codes are no numbers: QPyTorch has no such format.
        """
        import qtorch

        if self.specials != "none":
            raise ValueError(f'a format of QPyTorch has specials="none", got {self!r}')
        return qtorch.FloatingPoint(self.exp, self.man)

    @classmethod
    def from_qtorch(cls, number: Any) -> "Minifloat":
        """Return the format of a ``qtorch.FloatingPoint``.

        Raises:
            TypeError: ``number`` is no such.
        """
        if not hasattr(number, "exp"):
            raise TypeError(
                f"from_qtorch takes a qtorch.FloatingPoint, got {number!r:.60}: write Minifloat(exp, man)"
            )
        return cls(number.exp, number.man)


def _as_int(name: str, value: SupportsIndex) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
