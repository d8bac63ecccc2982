"""Sums and means of rounded values, for integer hardware: what is added gets a format of its own."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fixedpoint_kernels import FixedPoint
from marvin.export.errors import ExportError, check_tensor
from marvin.export.execute.simulate import apply
from marvin.export.graph.bounds import value_of
from marvin.export.graph.formats import fitting
from marvin.export.graph.functions import Mul
from marvin.export.graph.nodes import (
    Add,
    AveragePool,
    Network,
    Operation,
    Round,
    Value,
    check_network,
)
from marvin.export.passes.rows import refitted
from marvin.export.passes.shorten_scales import shorten_scales

__all__ = ["round_sums", "sum_formats"]

_ENDING = ".term"
_SUMS = Add, AveragePool, Mul


def round_sums(network: Network, sample: Tensor, wl: int = 8) -> Network:
    """Return a network in which the terms of every sum, mean and product are rounded to at most ``wl`` bits.

    Training leaves terms as exact as they come, and so does ``describe``; integer hardware adds short
    codes. Formats are calibrated: the finest in which nothing of the sample saturates,
    unsigned where no value can be below 0; or that of a layer which rounds the same value to ``wl`` bits, where
    it moves the sample less, in the mean square. Terms that are as short already stay. What else rounds
    a term to at most ``wl`` bits takes it as it is rounded for the sum: it is stored once.

    Args:
        network: From ``describe``.
        sample: What the network takes, shape ``(n, *network.input.shape)``, float32; the more the
            better.
        wl: Word length of a term, 2 to 32 bits.

    Raises:
        ExportError: A term is not finite, or fits no format; or there is no such word length, or the
            sample has another shape.
        TypeError: ``network`` is not a ``Network``, or ``sample`` no tensor.
    """
    check_network(network)
    check_tensor(sample)
    shape = network.input.shape
    if tuple(sample.shape[1:]) != shape or not sample.numel():
        wanted = ", ".join(map(str, ("n", *shape)))
        raise ExportError(f"the sample must have shape ({wanted}), got {tuple(sample.shape)}")
    if not isinstance(wl, int) or not 2 <= wl <= 32:
        raise ExportError(
            f"the word length of sums must be 2 to 32 bits, got {wl!r}: write round_sums(network, sample, 8)"
        )
    rewriter = _Rewriter(network, {network.input.name: sample.double()}, wl)
    operations = [network.input]
    last = {name: op for op in network.operations for name in op.inputs}
    for op in network.operations[1:]:
        operations += rewriter.rewrite(op)
        rewriter.forget(name for name in op.inputs if last[name] is op)
    rounded = replace(network, operations=tuple(operations), values=rewriter.values)
    return shorten_scales(rounded)


def sum_formats(network: Network) -> dict[str, FixedPoint]:
    """Return the formats that ``round_sums`` has found, by the name of the rounding."""
    terms = {n for op in network.operations if isinstance(op, _SUMS) for n in op.inputs}
    found = network.formats().items()
    return {name: fmt for name, fmt in found if name in terms and name.endswith(_ENDING)}


def _noise(x: Tensor, fmt: FixedPoint) -> float:
    """Return the sum of squares of what rounding to a format changes."""
    codes = torch.round(x * fmt.scale).clamp(fmt.min_code, fmt.max_code)
    return float((codes * fmt.lsb - x).square().sum())


@dataclass
class _Rewriter:
    """Computes a sample while it rewrites.

    Args:
        network: What is rewritten.
        found: Values of the sample, float64, by name.
        wl: Word length of a term.
        values: Of the operations so far.
        terms: The rounding of each term, by its name.
    """

    network: Network
    found: dict[str, Tensor]
    wl: int
    values: dict[str, Value] = field(default_factory=dict)
    terms: dict[str, str] = field(default_factory=dict)

    def rewrite(self, op: Operation) -> list[Operation]:
        """Return an operation, and behind it its rounding where it is a term of a sum."""
        if isinstance(op, _SUMS) or (isinstance(op, Round) and op.fmt.wl <= self.wl):
            op = replace(op, inputs=tuple(self.terms.get(name, name) for name in op.inputs))
        if op.inputs and op.inputs[0] in self.values:
            op = refitted(op, self.values[op.inputs[0]])
        self._compute(op)
        users = self.network.users.get(op.name, [])
        value = self.values[op.name]
        bits = value.bits - (value.low >= 0)
        if bits <= self.wl or not any(isinstance(user, _SUMS) for user in users):
            return [op]
        term = Round(op.name + _ENDING, (op.name,), self._fitting(op.name, value.low < 0))
        self.terms[op.name] = term.name
        self._compute(term)
        return [op, term]

    def forget(self, names: Iterable[str]) -> None:
        """Leave out what nothing takes any more: all values of a sample are hundreds of times the sample."""
        for name in {*names}:
            del self.found[name]
            if name in self.terms:
                del self.found[self.terms[name]]

    def _fitting(self, name: str, is_signed: bool) -> FixedPoint:
        x = self.found[name]
        low, high = x.min().item(), x.max().item()
        if not torch.isfinite(x).all():
            raise ExportError(f"{name} must be finite to be calibrated, got {low} to {high}")
        users = self.network.users[name]
        layers = [op.fmt for op in users if isinstance(op, Round) and op.fmt.wl == self.wl]
        return min([*layers, fitting((low, high), self.wl, is_signed)], key=lambda f: _noise(x, f))

    def _compute(self, op: Operation) -> None:
        self.found[op.name] = apply(op, *(self.found[name] for name in op.inputs))
        if op.inputs == (self.network.input.name,):
            self.values[op.name] = self.network.values[op.name]
        else:
            self.values[op.name] = value_of(op, [self.values[name] for name in op.inputs])
