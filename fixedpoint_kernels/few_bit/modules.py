"""Activations as modules: torch's own classes, with ``bits`` and ``weight``.

There is one for each entry of the table (``fixedpoint_kernels.few_bit.activations``): a subclass of
its namesake in ``torch.nn``, with the same arguments, that does what the function of the same name
does (``fixedpoint_kernels.few_bit.functional``). In eval mode gradients are exact: torch's own runs.
"""

from typing import ClassVar

from torch import Tensor, nn

from fixedpoint_kernels.few_bit import functional
from fixedpoint_kernels.few_bit.activations import ENTRIES, Entry
from fixedpoint_kernels.few_bit.autograd import apply
from fixedpoint_kernels.few_bit.integrals import Function, Weight
from fixedpoint_kernels.few_bit.operators import register
from fixedpoint_kernels.few_bit.solver import checked_bits, solve_function


class _FewBit(nn.Module):
    _entry: ClassVar[Entry]
    bits: int
    weight: Weight

    def __init__(
        self,
        *arguments: object,
        bits: int | None = None,
        weight: Weight = "uniform",
        **named: object,
    ) -> None:
        super().__init__(*arguments, **named)
        functional.refuse_inplace(getattr(self, "inplace", False))
        approximate = getattr(self, "approximate", "none")
        if approximate not in ("none", "tanh"):
            raise ValueError(
                f"approximate must be 'none' or 'tanh', got {approximate!r}: bits are a keyword, bits=3"
            )
        self.bits = checked_bits(self._entry.bits if bits is None else bits)
        self.weight = weight

    def forward(self, input: Tensor) -> Tensor:
        """Return what the function of the same name returns; in eval mode, torch's own does."""
        if not self.training:
            return super().forward(input)  # pyright: ignore[reportAttributeAccessIssue]
        entry = self._entry
        parameters = functional.numbers([getattr(self, name) for name in entry.parameters])
        return functional.run(entry.name, input, parameters, self.bits, self.weight)

    def extra_repr(self) -> str:
        """Return torch's own, and bits and weight."""
        given = super().extra_repr()
        return ", ".join(filter(None, [given, f"bits={self.bits}, weight={self.weight!r}"]))


def make(entry: Entry) -> type[nn.Module]:
    """Return the class of an entry of the table."""
    name = entry.kind.__name__
    how = "an exact gradient from 1 bit" if entry.exact else "a few-bit gradient"
    attributes = {
        "__module__": __name__,
        "__doc__": f"``torch.nn.{name}`` with {how}.",
        "__signature__": functional.with_bits(entry, (), None),
        "_entry": entry,
    }
    return type(name, (_FewBit, entry.kind), attributes)


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
        """Return ``function(input)``; in eval mode, with its own gradient."""
        return apply(self.function, input, self._key) if self.training else self.function(input)

    def extra_repr(self) -> str:
        """Return the bits, those that the table needs."""
        return f"bits={self.table.bits}"

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._key = register(self.table)


MODULES = {entry.kind: make(entry) for entry in ENTRIES.values()}
globals().update({kind.__name__: ours for kind, ours in MODULES.items()})


def __getattr__(name: str) -> type[nn.Module]:  # for type checkers: the names are set above
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
