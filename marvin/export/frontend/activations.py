"""Activation functions: bounds where they have nothing else, else tables of codes."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fixedpoint_kernels import FixedPoint
from fixedpoint_kernels.few_bit.activations import ENTRIES
from marvin.export.errors import ExportError
from marvin.export.frontend.builder import Builder, Pending
from marvin.export.graph.functions import KEEP_ORDER, Clip, Table
from marvin.export.graph.nodes import AveragePool, Round

__all__ = ["ACTIVATIONS", "exact"]

_LONGEST = 16  # bits of rounded codes that have a table of all
_FAR = 2.0**61  # of a bound that no code reaches


def exact(m: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return what an activation function computes, for float64; ``m`` is one of ``ACTIVATIONS``."""
    if isinstance(m, nn.PReLU):
        return lambda x: F.prelu(x, m.weight.detach().to(x))
    forward: Any = type(m).forward
    return lambda x: forward(m, x.clone())  # some work in place


def _bounded(builder: Builder, name: str, module: str, m: nn.Hardtanh, source: str) -> str:
    low, high = float(m.min_val), float(m.max_val)
    value = builder.values.get(source)
    if value is not None and not all((x * 2.0**value.fl).is_integer() for x in (low, high)):
        return _table(builder, name, module, m, source)

    if value is not None:
        first, last = (int(min(max(x * 2.0**value.fl, -_FAR), _FAR)) for x in (low, high))
        return builder.add(Clip(name, (source,), first, last, value.fl))

    def make(own: str, taken: str, fmt: FixedPoint) -> Clip:
        # rounding keeps the order, so the rounded value has the rounded bounds
        codes = (torch.tensor([low, high], dtype=torch.float64) * fmt.scale).round()
        first, last = codes.clamp(fmt.min_code, fmt.max_code).to(torch.int64).tolist()
        return Clip(own, (taken,), first, last, fmt.fl)

    return builder.keep(name, source, make)


def _table(builder: Builder, name: str, module: str, m: nn.Module, source: str) -> str:
    if isinstance(m, nn.PReLU) and m.num_parameters > 1:
        raise ExportError(
            f"{module}: a PReLU must have one slope, got {m.num_parameters}: use num_parameters=1"
        )
    source = _short(builder, name, module, source)
    value, function = builder.values[source], exact(m)
    codes = torch.arange(value.low, value.high + 1, dtype=torch.float64)
    results = function(codes * 2.0**-value.fl).detach()
    kind = type(m).__name__

    def make(own: str, taken: str, fmt: FixedPoint) -> Table:
        rounded = torch.round(results * fmt.scale).clamp(fmt.min_code, fmt.max_code)
        return Table(own, (taken,), rounded.to(torch.int64), value.low, value.fl, fmt, kind)

    result = builder.wait(name, Pending(source, make, value.shape, builder.node))
    return builder.round_output(name, module, result)


def _short(builder: Builder, name: str, module: str, source: str) -> str:
    """Return a value that a table can have all codes of: rounded, if it is too long."""
    source = builder.round_input(name, module, source)
    value, op = builder.values[source], builder.operation(source)
    while isinstance(op, KEEP_ORDER):
        op = builder.operation(op.inputs[0])
    longest = _LONGEST if isinstance(op, Round | Table | AveragePool) else builder.wl
    if value.bits - (value.low >= 0) <= longest:
        return source
    fmt = builder.fitting(builder.taken)
    rounded = builder.add(Round(builder.unused(f"{name}.in"), (source,), fmt))
    builder.origins[rounded] = source
    builder.found[rounded] = fmt
    return rounded


_BOUNDED = nn.Hardtanh, nn.ReLU6
_TABLES = [entry.kind for entry in ENTRIES.values() if entry.kind not in (nn.ReLU, *_BOUNDED)]
ACTIVATIONS: dict[type[nn.Module], Callable[..., str]] = {
    **dict.fromkeys(_BOUNDED, _bounded),
    **dict.fromkeys([*_TABLES, nn.PReLU], _table),
}
