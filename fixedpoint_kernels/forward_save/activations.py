"""Which activation modules have a few-bit one, and what it needs."""

from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import activation as torchs

from fixedpoint_kernels._torch_private.compiling import compiled_as_constant, constants
from fixedpoint_kernels._torch_private.modules import settings_of
from fixedpoint_kernels.few_bit.activations import ENTRIES
from fixedpoint_kernels.few_bit.autograd import apply
from fixedpoint_kernels.few_bit.functional import table_key
from fixedpoint_kernels.few_bit.integrals import Weight
from fixedpoint_kernels.few_bit.modules import MODULES as FEW_BIT
from fixedpoint_kernels.few_bit.named import resolve
from fixedpoint_kernels.few_bit.operators import register
from fixedpoint_kernels.few_bit.solver import solve_function
from fixedpoint_kernels.few_bit.table import Table
from fixedpoint_kernels.forward_save import maps
from fixedpoint_kernels.forward_save.in_place import overwrite
from fixedpoint_kernels.forward_save.scope import paused
from fixedpoint_kernels.forward_save.swap import undo_of

__all__ = [
    "CALLS",
    "FEW_BIT",
    "SMOOTH",
    "STEPWISE",
    "Exactly",
    "InPlace",
    "OwnValues",
    "few_bit_of",
    "is_activation",
]

SMOOTH = tuple(entry.kind for entry in ENTRIES.values() if not entry.exact)
STEPWISE = tuple(entry.kind for entry in ENTRIES.values() if entry.exact)  # exact with 1 bit
CALLS = {*ENTRIES, *(name + "_" for name in ENTRIES)}  # as torch calls the functions
_OTHERS = tuple(getattr(torchs, name) for name in torchs.__all__)
WHY_NOT = {
    nn.PReLU: "its slope learns",
    nn.RReLU: "its slope is random",
}


class Exactly(nn.Module):
    """Goes first: torch's own runs in eval mode, and where few bits do not fit the input."""

    bits: int

    def forward(self, input: Tensor) -> Tensor:
        """Return what the next class returns, or torch's own."""
        own: Callable[[Tensor], Tensor] = super().forward
        if not self.training:
            with paused():
                return own(input)
        if _fits(input, self.bits):
            return own(input)
        with paused():
            return undo_of(self).original.forward(self, input)


class InPlace(nn.Module):
    """Keeps ``inplace=True``: the input is overwritten, as the model may rely on it."""

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input``, which holds the value from then on."""
        own: Callable[[Tensor], Tensor] = super().forward
        return overwrite(input, own(input)) if self.training else own(input)  # torch's own writes


def _fits(x: Tensor, bits: int) -> bool:
    """Whether a code is made of ``x``: neither sparse nor nested, and larger than the code."""
    return maps.is_dense(x) and maps.is_less_in_code(x, bits)


class OwnValues(nn.Module):
    """Goes before an activation of another package: its own values, a few-bit gradient."""

    _name: str
    bits: int
    weight: Weight

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the class itself returns."""
        own = super().forward
        is_known = bool(self._name) or not learns(self)
        is_simple = self.training and len(args) == 1 and not kwargs and is_known
        if not (is_simple and _fits(args[0], self.bits)):
            with paused():
                return own(*args, **kwargs)
        numbers: list[float] = []
        if torch.compiler.is_compiling():  # it asks once for all modules with the same numbers
            every = (n for m in self.modules() for n in vars(m).values())
            numbers = [*constants(n for n in every if isinstance(n, int | float))]
        return apply(own, args[0], self.table_key(self.bits, self.weight, *numbers))

    @compiled_as_constant
    def table_key(self, bits: int, weight: Weight, *_numbers: float) -> str:
        """Return the key of the table of its name, or of one that is solved for on its own forward."""
        if self._name:
            name, parameters = resolve(self._name)
            return table_key(name, bits, weight, *parameters)
        own = _Function(super().forward, (type(self), _settings(self)))
        return register(_solved(own, bits, weight))


class _Function:
    """A function that equals another of the same class and settings."""

    def __init__(self, run: Callable[[Tensor], Tensor], key: Hashable):
        self.run, self.key = run, key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Function) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)


def _settings(module: nn.Module) -> Hashable:
    """Return what the values of a module may depend on besides its class."""
    return tuple((name, _hashable(value)) for name, value in settings_of(module).items())


def _hashable(value: object) -> Hashable:
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), tuple(value.detach().flatten().tolist())
    if isinstance(value, nn.Module):
        return type(value), _settings(value)
    if isinstance(value, Mapping):
        return tuple((name, _hashable(each)) for name, each in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_hashable, value))
    try:
        hash(value)
    except TypeError:
        return _Same(value)
    return type(value), cast("Hashable", value)  # 1, 1.0 and True are equal


class _Same(NamedTuple):
    """An object that equals itself alone."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def learns(module: nn.Module) -> bool:
    """Whether a parameter in a module asks for a gradient, which no table gives it."""
    return any(p.requires_grad for p in module.parameters())


@lru_cache(maxsize=256)
def _solved(function: _Function, bits: int, weight: Weight) -> Table:
    with paused():
        return solve_function(function.run, bits, weight=weight)


def few_bit_of(module: nn.Module) -> type[nn.Module] | None:
    """Return torch's class that a module behaves as, if there is a few-bit one of it."""
    kinds = (kind for kind in type(module).__mro__ if kind in FEW_BIT)
    kind = next(kinds, None)
    return kind if kind is not None and type(module).forward is kind.forward else None


def is_activation(module: nn.Module) -> bool:
    """Whether it is torch's or derives from torch's, few-bit ones apart."""
    return isinstance(module, _OTHERS) and type(module) not in FEW_BIT.values()


def why_not(module: nn.Module) -> str:
    """Say why an activation has no few-bit one."""
    for kind, reason in WHY_NOT.items():
        if isinstance(module, kind):
            return reason
    if isinstance(module, tuple(FEW_BIT)):
        return "it has a forward of its own"
    return "it is not a function of one element"
