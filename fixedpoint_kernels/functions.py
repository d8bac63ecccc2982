"""Functions of float32 as sequences of sums and products, so that every execution has the same bits.

Constants are rounded to float32. ``exp`` is within 2 units of the last place for -87 to 0; ``normal``,
the share of a normal distribution below a number, is within 2e-7, and ``normal_by_tanh`` of its own formula.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "CURVES",
    "ERF",
    "ERF_FROM",
    "EXP",
    "LN2",
    "LOG2_E",
    "LOWEST",
    "NORMAL",
    "TANH",
    "TANH_FROM",
    "Curve",
    "exp",
    "normal",
    "normal_by_tanh",
    "number_of",
    "sigmoid",
]

EXP = (1.0, 1.0, 1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720)
"""Taylor's factors of the exponential."""
LOG2_E = 1.4426950408889634
LN2 = 0.693359375, -2.12194440e-4
"""The logarithm of 2: a part of few bits, whose products with small integers are exact, and the rest."""
LOWEST = -87.0
"""Below, the exponential is taken to be what it is here."""
ERF_FROM = 3.95
"""From here on, and below the negative, the error function is 1 or -1 to float32."""
ERF = (
    (
        1.128378987312317, 0.19403596222400665, 0.05320708081126213,
        0.00391732482239604, 0.00028760009445250034, 2.0117315671086544e-06,
    ),
    (
        1.0, 0.5052914023399353, 0.11559084802865982,
        0.0152707165107131, 0.0011982013238593936, 3.783956708502956e-05,
    ),
)  # fmt: skip
"""Factors of ``erf(t) = t * p(t**2) / q(t**2)``, fitted by least squares, errors made alike."""
NORMAL = 0.7071067811865476, 0.3989422804014327
"""Of a normal distribution: the square root of 1/2, and its largest density."""
TANH = 1.5957691216057308, 0.07135481627260025
"""Twice the square root of 2 / pi, and that times 0.044715: ``(1 + tanh(u)) / 2 = sigmoid(x * (a + b * x**2))``."""
TANH_FROM = 10.0
"""From here on, and below the negative, the share by tanh is 1 or 0 to float32."""


def polynomial(x: Tensor, factors: tuple[float, ...]) -> Tensor:
    """Return a sum of powers, from the highest down."""
    value = torch.full_like(x, factors[-1])
    for factor in factors[-2::-1]:
        value = value * x + factor
    return value


def exp(x: Tensor) -> Tensor:
    """Return the exponential of numbers, float32, that are not above 0."""
    x = x.clamp(min=LOWEST)
    whole = torch.round(x * LOG2_E)
    rest = x - whole * LN2[0] - whole * LN2[1]
    power = (whole.nan_to_num(0.0).int() + 127 << 23).view(torch.float32)
    return polynomial(rest, EXP) * power


def normal(z: Tensor) -> Tensor:
    """Return the share of a normal distribution below each number, float32."""
    t = (z * NORMAL[0]).clamp(-ERF_FROM, ERF_FROM)
    above, below = (polynomial(t * t, factors) for factors in ERF)
    return (t * above / below + 1.0) * 0.5


def normal_by_tanh(x: Tensor) -> Tensor:
    """Return ``(1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2``, float32, GELU's other share below a number."""
    t = x.clamp(-TANH_FROM, TANH_FROM)
    return sigmoid((t * t * TANH[1] + TANH[0]) * t)


class Curve(NamedTuple):
    """An activation function whose slope is not 0 or 1 alone.

    Args:
        name: One of ``CURVES``.
        number: Of leaky ReLU: the slope below 0.
    """

    name: str
    number: float = 0.0

    def value(self, x: Tensor) -> Tensor:
        """Return the function of numbers, float32."""
        match self.name:
            case "silu":
                return x * sigmoid(x)
            case "sigmoid":
                return sigmoid(x)
            case "hardswish":
                return x * (x + 3.0).clamp(0.0, 6.0) / 6.0
            case "hardsigmoid":
                return (x + 3.0).clamp(0.0, 6.0) / 6.0
            case "gelu":
                return x * normal(x)
            case "gelu_tanh":
                return x * normal_by_tanh(x)
        return torch.where(x > 0, x, x * x.new_tensor(self.number))

    def slope(self, x: Tensor) -> Tensor:
        """Return its derivative, float32."""
        one = torch.ones_like(x)
        match self.name:
            case "silu":
                s = sigmoid(x)
                return s * (x * (1.0 - s) + 1.0)
            case "sigmoid":
                s = sigmoid(x)
                return s * (1.0 - s)
            case "hardswish":
                return torch.where(x >= 3.0, one, torch.where(x > -3.0, x / 3.0 + 0.5, 0.0))
            case "hardsigmoid":
                return torch.where((x > -3.0) & (x < 3.0), one / 6.0, 0.0)
            case "gelu":
                return normal(x) + x * (exp(x * x * -0.5) * NORMAL[1])
            case "gelu_tanh":
                s, t = normal_by_tanh(x), x.clamp(-TANH_FROM, TANH_FROM)
                return s + x * ((1.0 - s) * s * (t * t * (3 * TANH[1]) + TANH[0]))
        return torch.where(x > 0, one, x.new_tensor(self.number))


def number_of(curve: Curve | None) -> int:
    """Return the number that a curve has in kernels; 0: none."""
    return 0 if curve is None else 1 + CURVES.index(curve.name)


CURVES = "silu", "sigmoid", "hardswish", "hardsigmoid", "gelu", "leaky_relu", "gelu_tanh"


def sigmoid(x: Tensor) -> Tensor:
    """Return ``1 / (1 + exp(-x))`` of numbers, float32; the exponential is of ``-abs(x)``."""
    power = exp(-x.abs())
    return torch.where(x > 0, 1.0, power) / (power + 1.0)
