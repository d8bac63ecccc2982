"""Activations as modules: torch's own classes, with ``bits`` and ``weight``.

Each is a subclass of its namesake in ``torch.nn``, with the same arguments, and does what the
function of the same name does (``fixedpoint_kernels.few_bit.functional``).
"""

from torch import Tensor, nn

from fixedpoint_kernels.few_bit import functional
from fixedpoint_kernels.few_bit.autograd import apply
from fixedpoint_kernels.few_bit.integrals import Function, Weight
from fixedpoint_kernels.few_bit.operators import register
from fixedpoint_kernels.few_bit.solver import checked_bits, solve_function


class _FewBit(nn.Module):
    bits: int
    weight: Weight

    def _set(self, bits: int, weight: Weight, inplace: bool = False) -> None:
        functional.refuse_inplace(inplace)
        self.bits, self.weight = checked_bits(bits), weight

    def extra_repr(self) -> str:
        """Return torch's own, and bits and weight."""
        given = super().extra_repr()
        return ", ".join(filter(None, [given, f"bits={self.bits}, weight={self.weight!r}"]))


class CELU(_FewBit, nn.CELU):
    """``torch.nn.CELU`` with a few-bit gradient."""

    def __init__(
        self,
        alpha: float = 1.0,
        inplace: bool = False,
        *,
        bits: int = 3,
        weight: Weight = "uniform",
    ) -> None:
        nn.CELU.__init__(self, alpha)
        self._set(bits, weight, inplace)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``functional.celu``."""
        return functional.celu(input, self.alpha, bits=self.bits, weight=self.weight)


class ELU(_FewBit, nn.ELU):
    """``torch.nn.ELU`` with a few-bit gradient."""

    def __init__(
        self,
        alpha: float = 1.0,
        inplace: bool = False,
        *,
        bits: int = 3,
        weight: Weight = "uniform",
    ) -> None:
        nn.ELU.__init__(self, alpha)
        self._set(bits, weight, inplace)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``functional.elu``."""
        return functional.elu(input, self.alpha, bits=self.bits, weight=self.weight)


class GELU(_FewBit, nn.GELU):
    """``torch.nn.GELU`` with a few-bit gradient."""

    def __init__(
        self,
        approximate: str = "none",
        *,
        bits: int = 3,
        weight: Weight = "uniform",
    ) -> None:
        nn.GELU.__init__(self, approximate)
        self._set(bits, weight)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``functional.gelu``."""
        return functional.gelu(
            input, approximate=self.approximate, bits=self.bits, weight=self.weight
        )


class Hardshrink(_FewBit, nn.Hardshrink):
    """``torch.nn.Hardshrink`` with an exact gradient from 1 bit."""

    def __init__(
        self,
        lambd: float = 0.5,
        *,
        bits: int = 1,
        weight: Weight = "uniform",
    ) -> None:
        nn.Hardshrink.__init__(self, lambd)
        self._set(bits, weight)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``functional.hardshrink``."""
        return functional.hardshrink(input, self.lambd, bits=self.bits, weight=self.weight)


class Hardsigmoid(_FewBit, nn.Hardsigmoid):
    """``torch.nn.Hardsigmoid`` with an exact gradient from 1 bit."""

    def __init__(
        self,
        inplace: bool = False,
        *,
        bits: int = 1,
        weight: Weight = "uniform",
    ) -> None:
        nn.Hardsigmoid.__init__(self)
        self._set(bits, weight, inplace)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``functional.hardsigmoid``."""
        return functional.hardsigmoid(input, bits=self.bits, weight=self.weight)


class Hardswish(_FewBit, nn.Hardswish):
    """``torch.nn.Hardswish`` with a few-bit gradient."""

    def __init__(
        self,
        inplace: bool = False,
        *,
        bits: int = 3,
        weight: Weight = "uniform",
    ) -> None:
        nn.Hardswish.__init__(self)
        self._set(bits, weight, inplace)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``functional.hardswish``."""
        return functional.hardswish(input, bits=self.bits, weight=self.weight)


class Hardtanh(_FewBit, nn.Hardtanh):
    """``torch.nn.Hardtanh`` with an exact gradient from 1 bit."""

    def __init__(
        self,
        min_val: float = -1.0,
        max_val: float = 1.0,
        inplace: bool = False,
        *,
        bits: int = 1,
        weight: Weight = "uniform",
    ) -> None:
        nn.Hardtanh.__init__(self, min_val, max_val)
        self._set(bits, weight, inplace)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``functional.hardtanh``."""
        return functional.hardtanh(
            input, self.min_val, self.max_val, bits=self.bits, weight=self.weight
        )


class LeakyReLU(_FewBit, nn.LeakyReLU):
    """``torch.nn.LeakyReLU`` with an exact gradient from 1 bit."""

    def __init__(
        self,
        negative_slope: float = 0.01,
        inplace: bool = False,
        *,
        bits: int = 1,
        weight: Weight = "uniform",
    ) -> None:
        nn.LeakyReLU.__init__(self, negative_slope)
        self._set(bits, weight, inplace)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``functional.leaky_relu``."""
        return functional.leaky_relu(input, self.negative_slope, bits=self.bits, weight=self.weight)


class LogSigmoid(_FewBit, nn.LogSigmoid):
    """``torch.nn.LogSigmoid`` with a few-bit gradient."""

    def __init__(
        self,
        *,
        bits: int = 3,
        weight: Weight = "uniform",
    ) -> None:
        nn.LogSigmoid.__init__(self)
        self._set(bits, weight)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``functional.logsigmoid``."""
        return functional.logsigmoid(input, bits=self.bits, weight=self.weight)


class Mish(_FewBit, nn.Mish):
    """``torch.nn.Mish`` with a few-bit gradient."""

    def __init__(
        self,
        inplace: bool = False,
        *,
        bits: int = 3,
        weight: Weight = "uniform",
    ) -> None:
        nn.Mish.__init__(self)
        self._set(bits, weight, inplace)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``functional.mish``."""
        return functional.mish(input, bits=self.bits, weight=self.weight)


class ReLU(_FewBit, nn.ReLU):
    """``torch.nn.ReLU`` with an exact gradient from 1 bit."""

    def __init__(
        self,
        inplace: bool = False,
        *,
        bits: int = 1,
        weight: Weight = "uniform",
    ) -> None:
        nn.ReLU.__init__(self)
        self._set(bits, weight, inplace)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``functional.relu``."""
        return functional.relu(input, bits=self.bits, weight=self.weight)


class ReLU6(_FewBit, nn.ReLU6):
    """``torch.nn.ReLU6`` with an exact gradient from 1 bit."""

    def __init__(
        self,
        inplace: bool = False,
        *,
        bits: int = 1,
        weight: Weight = "uniform",
    ) -> None:
        nn.ReLU6.__init__(self)
        self._set(bits, weight, inplace)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``functional.relu6``."""
        return functional.relu6(input, bits=self.bits, weight=self.weight)


class SELU(_FewBit, nn.SELU):
    """``torch.nn.SELU`` with a few-bit gradient."""

    def __init__(
        self,
        inplace: bool = False,
        *,
        bits: int = 3,
        weight: Weight = "uniform",
    ) -> None:
        nn.SELU.__init__(self)
        self._set(bits, weight, inplace)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``functional.selu``."""
        return functional.selu(input, bits=self.bits, weight=self.weight)


class Sigmoid(_FewBit, nn.Sigmoid):
    """``torch.nn.Sigmoid`` with a few-bit gradient."""

    def __init__(
        self,
        *,
        bits: int = 3,
        weight: Weight = "uniform",
    ) -> None:
        nn.Sigmoid.__init__(self)
        self._set(bits, weight)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``functional.sigmoid``."""
        return functional.sigmoid(input, bits=self.bits, weight=self.weight)


class SiLU(_FewBit, nn.SiLU):
    """``torch.nn.SiLU`` with a few-bit gradient."""

    def __init__(
        self,
        inplace: bool = False,
        *,
        bits: int = 3,
        weight: Weight = "uniform",
    ) -> None:
        nn.SiLU.__init__(self)
        self._set(bits, weight, inplace)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``functional.silu``."""
        return functional.silu(input, bits=self.bits, weight=self.weight)


class Softplus(_FewBit, nn.Softplus):
    """``torch.nn.Softplus`` with a few-bit gradient."""

    def __init__(
        self,
        beta: float = 1.0,
        threshold: float = 20.0,
        *,
        bits: int = 3,
        weight: Weight = "uniform",
    ) -> None:
        nn.Softplus.__init__(self, beta, threshold)
        self._set(bits, weight)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``functional.softplus``."""
        return functional.softplus(
            input, self.beta, self.threshold, bits=self.bits, weight=self.weight
        )


class Softshrink(_FewBit, nn.Softshrink):
    """``torch.nn.Softshrink`` with an exact gradient from 1 bit."""

    def __init__(
        self,
        lambd: float = 0.5,
        *,
        bits: int = 1,
        weight: Weight = "uniform",
    ) -> None:
        nn.Softshrink.__init__(self, lambd)
        self._set(bits, weight)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``functional.softshrink``."""
        return functional.softshrink(input, self.lambd, bits=self.bits, weight=self.weight)


class Softsign(_FewBit, nn.Softsign):
    """``torch.nn.Softsign`` with a few-bit gradient."""

    def __init__(
        self,
        *,
        bits: int = 3,
        weight: Weight = "uniform",
    ) -> None:
        nn.Softsign.__init__(self)
        self._set(bits, weight)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``functional.softsign``."""
        return functional.softsign(input, bits=self.bits, weight=self.weight)


class Tanh(_FewBit, nn.Tanh):
    """``torch.nn.Tanh`` with a few-bit gradient."""

    def __init__(
        self,
        *,
        bits: int = 3,
        weight: Weight = "uniform",
    ) -> None:
        nn.Tanh.__init__(self)
        self._set(bits, weight)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``functional.tanh``."""
        return functional.tanh(input, bits=self.bits, weight=self.weight)


class Tanhshrink(_FewBit, nn.Tanhshrink):
    """``torch.nn.Tanhshrink`` with a few-bit gradient."""

    def __init__(
        self,
        *,
        bits: int = 3,
        weight: Weight = "uniform",
    ) -> None:
        nn.Tanhshrink.__init__(self)
        self._set(bits, weight)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``functional.tanhshrink``."""
        return functional.tanhshrink(input, bits=self.bits, weight=self.weight)


class Threshold(_FewBit, nn.Threshold):
    """``torch.nn.Threshold`` with an exact gradient from 1 bit."""

    def __init__(
        self,
        threshold: float,
        value: float,
        inplace: bool = False,
        *,
        bits: int = 1,
        weight: Weight = "uniform",
    ) -> None:
        nn.Threshold.__init__(self, threshold, value)
        self._set(bits, weight, inplace)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``functional.threshold``."""
        return functional.threshold(
            input, self.threshold, self.value, bits=self.bits, weight=self.weight
        )


class Activation(nn.Module):
    """Any differentiable pointwise function, with a few-bit gradient.

    Args:
        function: From a tensor to a tensor of the same shape, element by element, without
            parameters that learn; works in float64 too.
        bits: Bits an element kept for backward, 1 to 8.
        weight: As for ``few_bit.solve``.
        interval: As for ``few_bit.solve``.

    Raises:
        ValueError: ``function`` is a module with parameters.
    """

    def __init__(
        self,
        function: Function,
        bits: int = 3,
        *,
        weight: Weight = "uniform",
        interval: tuple[float, float] = (-10.0, 10.0),
    ) -> None:
        super().__init__()
        if isinstance(function, nn.Module) and any(True for _ in function.parameters()):
            raise ValueError(
                "function must have no parameters, for they would get no gradient, "
                f"got {type(function).__name__}"
            )
        self.function = function
        self.table = solve_function(function, bits, weight=weight, interval=interval)
        self._key = register(self.table)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``function(input)``."""
        return apply(self.function, input, self._key)

    def extra_repr(self) -> str:
        """Return the bits, those that the table needs."""
        return f"bits={self.table.bits}"

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._key = register(self.table)
