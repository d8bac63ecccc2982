"""The table of activations: whoever knows them by name or by class reads it here.

To add one, add an entry. Function and module of that name, ``few_bit.solve``, ``forward_save`` and
``perfmodel`` then know it; its few-bit table is solved for at the first call. ``is_shipped`` is for
entries whose tables are in ``tables.npz``, in this order: ``python -m fixedpoint_kernels.few_bit``
writes it. A formula for one pass on a GPU must be one of the kernel's, ``fused.FORMULAS``.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fixedpoint_kernels.few_bit.table import Table, number

__all__ = ["ENTRIES", "OTHER_NAMES", "Entry", "Parameters"]

Parameters = tuple[float | str, ...]
Formula = tuple[str | float, ...]  # its name in the kernel, and its numbers


@dataclass(frozen=True)
class Entry:
    """One activation.

    Args:
        name: Of torch's function, and of ours.
        kind: torch's class. Its parameters are those of the function: names, defaults, order.
        function: Of a tensor and the parameters.
        exact: Makes the table of the exact derivative from the parameters, where there is one: the
            derivative has two values. None: the best table is solved for.
        formula: Makes from the parameters how a GPU computes value and code in one pass; None, or
            a formula of None: torch's operator computes the value.
        is_shipped: Whether tables of its default parameters are in the file.
        same_table: Name of the entry whose tables it shares where parameters are the defaults.
        rounds_parameters: Whether torch rounds the parameters to the tensor's dtype before it compares.
    """

    name: str
    kind: type[nn.Module]
    function: Callable[..., Tensor]
    exact: Callable[..., Table] | None = None
    formula: Callable[..., Formula | None] | None = None
    is_shipped: bool = False
    same_table: str = ""
    rounds_parameters: bool = False

    @property
    def bits(self) -> int:
        """Bits an element that it keeps where nobody says."""
        return 1 if self.exact else 3

    @cached_property
    def signature(self) -> inspect.Signature:
        """Of torch's class: what it takes beside the input, in torch's order."""
        given = inspect.signature(self.kind).parameters.values()
        own = [p for p in given if p.kind is p.POSITIONAL_OR_KEYWORD]
        own = [p for p in own if p.name not in ("min_value", "max_value")]  # deprecated
        return inspect.Signature(own)

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of its numbers and words, in torch's order."""
        return tuple(name for name in self.signature.parameters if name != "inplace")

    @cached_property
    def defaults(self) -> Parameters:
        """Values of the parameters where nobody says; 0 where torch wants one."""
        values = [self.signature.parameters[name].default for name in self.parameters]
        return tuple(0.0 if value is inspect.Parameter.empty else value for value in values)


class _Pieces(NamedTuple):
    """A derivative of two levels: ``ranks`` say which each piece has."""

    borders: tuple[np.float32 | float, ...]
    ranks: tuple[int, ...]
    levels: tuple[float, float] = (0.0, 1.0)

    def table(self) -> Table:
        return number(
            np.array(self.borders, np.float32), np.array(self.ranks), np.array(self.levels)
        )


def _below(x: float) -> np.float32:
    return np.nextafter(np.float32(x), np.float32(-np.inf))


def _shrink(lambd: float) -> Table:
    """0 from -lambd to lambd, both included."""
    return _Pieces((_below(-lambd), lambd), (1, 0, 1)).table()


def _between(low: float, high: float, level: float = 1.0) -> Table:
    """``level`` between the ends, both excluded."""
    ends = low, max(_below(high), np.float32(low))
    return _Pieces(ends, (0, 1, 0), (0.0, level)).table()


def _step(at: float, low: float = 0.0) -> Table:
    """``low``, then 1."""
    return _Pieces((at,), (0, 1), (low, 1.0)).table()


_SCALE = np.float32(1.0507009873554805)
_SELU = float(_SCALE * np.float32(1.6732632423543772)), 1.0, float(_SCALE)  # as torch multiplies


def _table(*entries: Entry) -> dict[str, Entry]:
    return {entry.name: entry for entry in entries}


ENTRIES = _table(
    Entry(
        "celu",
        nn.CELU,
        F.celu,
        formula=lambda alpha: ("elu", alpha, 1.0 / alpha, 1.0),
        same_table="elu",
    ),
    Entry("elu", nn.ELU, F.elu, formula=lambda alpha: ("elu", alpha, 1.0, 1.0), is_shipped=True),
    Entry(
        "gelu",
        nn.GELU,
        lambda x, approximate: F.gelu(x, approximate=approximate),
        formula=lambda approximate: ("gelu",) if approximate == "none" else None,
        is_shipped=True,
    ),
    Entry("hardswish", nn.Hardswish, F.hardswish, formula=lambda: ("hardswish",), is_shipped=True),
    Entry("logsigmoid", nn.LogSigmoid, F.logsigmoid, is_shipped=True),
    Entry("mish", nn.Mish, F.mish, is_shipped=True),
    Entry("selu", nn.SELU, F.selu, formula=lambda: ("elu", *_SELU), is_shipped=True),
    Entry("sigmoid", nn.Sigmoid, torch.sigmoid, formula=lambda: ("sigmoid",), is_shipped=True),
    Entry("silu", nn.SiLU, F.silu, formula=lambda: ("silu",), is_shipped=True),
    Entry("softplus", nn.Softplus, F.softplus, is_shipped=True),
    Entry("softsign", nn.Softsign, F.softsign, formula=lambda: ("softsign",), is_shipped=True),
    Entry("tanh", nn.Tanh, torch.tanh, formula=lambda: ("tanh",), is_shipped=True),
    Entry("tanhshrink", nn.Tanhshrink, F.tanhshrink, is_shipped=True),
    # stepwise: exact with 1 bit
    Entry(
        "hardshrink",
        nn.Hardshrink,
        F.hardshrink,
        exact=_shrink,
        formula=lambda lambd: ("hardshrink", lambd),
        rounds_parameters=True,
    ),
    Entry(
        "hardsigmoid",
        nn.Hardsigmoid,
        F.hardsigmoid,
        exact=lambda: _between(-3.0, 3.0, 1 / 6),
        formula=lambda: ("hardsigmoid",),
    ),
    Entry(
        "hardtanh",
        nn.Hardtanh,
        F.hardtanh,
        exact=_between,
        formula=lambda low, high: ("hardtanh", low, high),
    ),
    Entry(
        "leaky_relu",
        nn.LeakyReLU,
        F.leaky_relu,
        exact=lambda slope: _step(0.0, slope),
        formula=lambda slope: ("leaky_relu", slope),
    ),
    Entry(
        "relu",
        nn.ReLU,
        F.relu,
        exact=lambda: _step(0.0),
        formula=lambda: ("hardtanh", 0.0, float("inf")),
    ),
    Entry(
        "relu6",
        nn.ReLU6,
        F.relu6,
        exact=lambda: _between(0.0, 6.0),
        formula=lambda: ("hardtanh", 0.0, 6.0),
    ),
    Entry(
        "softshrink",
        nn.Softshrink,
        F.softshrink,
        exact=_shrink,
        formula=lambda lambd: ("softshrink", lambd),
        rounds_parameters=True,
    ),
    Entry(
        "threshold",
        nn.Threshold,
        F.threshold,
        exact=lambda at, value: _step(at),
        formula=lambda at, value: ("threshold", at, value),
    ),
)
OTHER_NAMES: dict[str, tuple[str, Parameters]] = {
    "gelu_tanh": ("gelu", ("tanh",)),  # its tables are in the file too
    "swish": ("silu", ()),
}
