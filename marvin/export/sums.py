"""Sums of rounded values, for integer hardware: what a sum takes gets a word of its own."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fixedpoint_kernels import FixedPoint
from marvin.export.bounds import value_of
from marvin.export.errors import ExportError
from marvin.export.network import Add, Network, Operation, Round, Value
from marvin.export.observe import fitting
from marvin.export.scales import short_scales
from marvin.export.simulate import apply

__all__ = ["round_sums", "sum_formats"]


def round_sums(network: Network, sample: Tensor, wl: int = 8) -> Network:
    """Return a network in which both terms of every sum are rounded to at most ``wl`` bits.

    Training leaves terms of sums as exact as they come, and so does ``describe``; integer hardware
    adds short words. Formats are calibrated: the finest in which nothing of the sample saturates,
    unsigned where no value can be below 0. Terms that are as short already stay.

    Args:
        network: From ``describe``.
        sample: What the network takes, shape ``(n, *network.input.shape)``, float32; the more the
            better.
        wl: Word length of a term, bits.

    Raises:
        ExportError: A term is not finite, or fits no format.
    """
    rewriter = _Rewriter({network.input.name: sample.double()}, dict(network.values), wl)
    operations = [new for op in network.operations[1:] for new in rewriter.rewrite(op)]
    operations.insert(0, network.input)
    values = {op.name: rewriter.values[op.name] for op in operations[1:]}
    return short_scales(replace(network, operations=tuple(operations), values=values))


def sum_formats(network: Network) -> dict[str, FixedPoint]:
    """Return the formats that ``round_sums`` has found, by the name of the rounding."""
    sums = {
        f"{op.name}.term{i}" for op in network.operations if isinstance(op, Add) for i in (1, 2)
    }
    return {name: fmt for name, fmt in network.formats().items() if name in sums}


@dataclass
class _Rewriter:
    """Computes a sample while it rewrites.

    Args:
        found: Values of the sample, float64, by name.
        values: Of the operations, updated.
        wl: Word length of a term.
    """

    found: dict[str, Tensor]
    values: dict[str, Value]
    wl: int

    def rewrite(self, op: Operation) -> list[Operation]:
        """Return an operation, with the roundings of what it takes before it if it is a sum."""
        added: list[Operation] = []
        if isinstance(op, Add):
            terms = [self._term(op, i, name) for i, name in enumerate(op.inputs, 1)]
            added = [term for term in terms if isinstance(term, Round)]
            names = (term.name if isinstance(term, Round) else term for term in terms)
            op = replace(op, inputs=tuple(names))
        self._compute(op)
        return [*added, op]

    def _term(self, op: Add, place: int, name: str) -> Round | str:
        """Return a new rounding of a term, or the name of the term where it is short enough."""
        value = self.values[name]
        is_signed = value.low < 0
        if value.bits - (not is_signed) <= self.wl:
            return name
        x = self.found[name]
        low, high = x.min().item(), x.max().item()
        if not torch.isfinite(x).all():
            raise ExportError(f"{name} must be finite to be calibrated, got {low} to {high}")
        rounding = Round(
            f"{op.name}.term{place}", (name,), fitting((low, high), self.wl, is_signed)
        )
        self._compute(rounding)
        return rounding

    def _compute(self, op: Operation) -> None:
        self.found[op.name] = apply(op, *(self.found[name] for name in op.inputs))
        if not (isinstance(op, Round) and op.inputs[0] not in self.values):
            self.values[op.name] = value_of(op, [self.values[name] for name in op.inputs])
