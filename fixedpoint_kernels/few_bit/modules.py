"""Activations as modules: torch's own classes, with ``bits`` and ``weight``.

Each is a subclass of its namesake in ``torch.nn``, with the same arguments, and does what the
function of the same name does (``fixedpoint_kernels.few_bit.functional``).
"""

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor, nn

from fixedpoint_kernels.few_bit import functional
from fixedpoint_kernels.few_bit.autograd import apply
from fixedpoint_kernels.few_bit.integrals import Function, Weight
from fixedpoint_kernels.few_bit.operators import register
from fixedpoint_kernels.few_bit.solver import checked_bits, solve_function


class _FewBit(nn.Module):
    _function: ClassVar[Callable[..., Tensor]]
    _arguments: ClassVar[tuple[str, ...]] = ()  # attributes of torch's that the function takes
    bits: int
    weight: Weight

    def _set(self, bits: int, weight: Weight, inplace: bool = False) -> None:
        functional.refuse_inplace(inplace)
        self.bits, self.weight = checked_bits(bits), weight

    def forward(self, input: Tensor) -> Tensor:
        """Return what the function of the same name returns."""
        given = {name: getattr(self, name) for name in self._arguments}
        return self._function(input, **given, bits=self.bits, weight=self.weight)

    def extra_repr(self) -> str:
        """Return torch's own, and bits and weight."""
        given = super().extra_repr()
        return ", ".join(filter(None, [given, f"bits={self.bits}, weight={self.weight!r}"]))


class _Plain(_FewBit):
    def __init__(self, *, bits: int = 3, weight: Weight = "uniform") -> None:
        super().__init__()
        self._set(bits, weight)


class _InPlace(_FewBit):
    def __init__(self, inplace: bool = False, *, bits: int = 3, weight: Weight = "uniform") -> None:
        super().__init__()
        self._set(bits, weight, inplace)


class _InPlaceStepwise(_FewBit):
    def __init__(self, inplace: bool = False, *, bits: int = 1, weight: Weight = "uniform") -> None:
        super().__init__()
        self._set(bits, weight, inplace)


class _Alpha(_FewBit):
    _arguments = ("alpha",)

    def __init__(
        self,
        alpha: float = 1.0,
        inplace: bool = False,
        *,
        bits: int = 3,
        weight: Weight = "uniform",
    ) -> None:
        super().__init__(alpha)
        self._set(bits, weight, inplace)


class CELU(_Alpha, nn.CELU):
    """``torch.nn.CELU`` with a few-bit gradient."""

    _function = staticmethod(functional.celu)


class ELU(_Alpha, nn.ELU):
    """``torch.nn.ELU`` with a few-bit gradient."""

    _function = staticmethod(functional.elu)


class GELU(_FewBit, nn.GELU):
    """``torch.nn.GELU`` with a few-bit gradient."""

    _function = staticmethod(functional.gelu)
    _arguments = ("approximate",)

    def __init__(
        self, approximate: str = "none", *, bits: int = 3, weight: Weight = "uniform"
    ) -> None:
        nn.GELU.__init__(self, approximate)
        self._set(bits, weight)


class Hardshrink(_FewBit, nn.Hardshrink):
    """``torch.nn.Hardshrink`` with an exact gradient from 1 bit."""

    _function = staticmethod(functional.hardshrink)
    _arguments = ("lambd",)

    def __init__(self, lambd: float = 0.5, *, bits: int = 1, weight: Weight = "uniform") -> None:
        nn.Hardshrink.__init__(self, lambd)
        self._set(bits, weight)


class Hardsigmoid(_InPlaceStepwise, nn.Hardsigmoid):
    """``torch.nn.Hardsigmoid`` with an exact gradient from 1 bit."""

    _function = staticmethod(functional.hardsigmoid)


class Hardswish(_InPlace, nn.Hardswish):
    """``torch.nn.Hardswish`` with a few-bit gradient."""

    _function = staticmethod(functional.hardswish)


class Hardtanh(_FewBit, nn.Hardtanh):
    """``torch.nn.Hardtanh`` with an exact gradient from 1 bit."""

    _function = staticmethod(functional.hardtanh)
    _arguments = ("min_val", "max_val")

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


class LeakyReLU(_FewBit, nn.LeakyReLU):
    """``torch.nn.LeakyReLU`` with an exact gradient from 1 bit."""

    _function = staticmethod(functional.leaky_relu)
    _arguments = ("negative_slope",)

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


class LogSigmoid(_Plain, nn.LogSigmoid):
    """``torch.nn.LogSigmoid`` with a few-bit gradient."""

    _function = staticmethod(functional.logsigmoid)


class Mish(_InPlace, nn.Mish):
    """``torch.nn.Mish`` with a few-bit gradient."""

    _function = staticmethod(functional.mish)


class ReLU(_InPlaceStepwise, nn.ReLU):
    """``torch.nn.ReLU`` with an exact gradient from 1 bit."""

    _function = staticmethod(functional.relu)


class ReLU6(_InPlaceStepwise, nn.ReLU6):
    """``torch.nn.ReLU6`` with an exact gradient from 1 bit."""

    _function = staticmethod(functional.relu6)


class SELU(_InPlace, nn.SELU):
    """``torch.nn.SELU`` with a few-bit gradient."""

    _function = staticmethod(functional.selu)


class Sigmoid(_Plain, nn.Sigmoid):
    """``torch.nn.Sigmoid`` with a few-bit gradient."""

    _function = staticmethod(functional.sigmoid)


class SiLU(_InPlace, nn.SiLU):
    """``torch.nn.SiLU`` with a few-bit gradient."""

    _function = staticmethod(functional.silu)


class Softplus(_FewBit, nn.Softplus):
    """``torch.nn.Softplus`` with a few-bit gradient."""

    _function = staticmethod(functional.softplus)
    _arguments = ("beta", "threshold")

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


class Softshrink(_FewBit, nn.Softshrink):
    """``torch.nn.Softshrink`` with an exact gradient from 1 bit."""

    _function = staticmethod(functional.softshrink)
    _arguments = ("lambd",)

    def __init__(self, lambd: float = 0.5, *, bits: int = 1, weight: Weight = "uniform") -> None:
        nn.Softshrink.__init__(self, lambd)
        self._set(bits, weight)


class Softsign(_Plain, nn.Softsign):
    """``torch.nn.Softsign`` with a few-bit gradient."""

    _function = staticmethod(functional.softsign)


class Tanh(_Plain, nn.Tanh):
    """``torch.nn.Tanh`` with a few-bit gradient."""

    _function = staticmethod(functional.tanh)


class Tanhshrink(_Plain, nn.Tanhshrink):
    """``torch.nn.Tanhshrink`` with a few-bit gradient."""

    _function = staticmethod(functional.tanhshrink)


class Threshold(_FewBit, nn.Threshold):
    """``torch.nn.Threshold`` with an exact gradient from 1 bit."""

    _function = staticmethod(functional.threshold)
    _arguments = ("threshold", "value")

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
