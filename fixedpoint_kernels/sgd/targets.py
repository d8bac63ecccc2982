"""What a step of SGD reads and writes, and whether a kernel may."""

from collections.abc import Sequence
from operator import is_
from typing import NamedTuple

import numpy as np
from torch import Tensor

from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.memory import are_apart, places_on_cpu
from fixedpoint_kernels.strides import laid, memory_order

__all__ = ["Moves", "Rates", "Targets"]


class Rates(NamedTuple):
    """The hyper-parameters of one parameter, as ``torch.optim.SGD`` names them; dampening is 0."""

    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool


class Moves(NamedTuple):
    """Which masters move, and how; sequences of one length.

    Args:
        rows: Positions among the masters, ascending.
        grads: float32, as many elements as the master, in its strides; not changed.
        momenta: The same; None where ``momentum`` is 0. Changed.
        is_first: Whether the momentum is not begun: it becomes the gradient, what it holds is
            not read.
        rates: Hyper-parameters.
    """

    rows: Sequence[int]
    grads: Sequence[Tensor]
    momenta: Sequence[Tensor | None]
    is_first: Sequence[bool]
    rates: Sequence[Rates]


class Targets:
    """What steps write: masters, weights and momenta. Where they lie is checked once, until it changes.

    Args:
        masters: float32, any shapes, without gaps, on a CPU.
        weights: Where the rounded masters go, like these, in their strides.
        fmts: Of each weight; None: the weight is the master.
        offsets: Position of each weight's first element in its stream of noise.
    """

    def __init__(
        self,
        masters: Sequence[Tensor],
        weights: Sequence[Tensor],
        fmts: Sequence[FixedPoint | None],
        offsets: Sequence[int],
    ) -> None:
        self.fmts, self.offsets = tuple(fmts), tuple(offsets)
        self._own = [*masters, *weights]
        self._momenta: list[Tensor] = []
        self._seen: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self._strides: list[tuple[int, ...]] = []
        self._orders: list[tuple[int, ...] | None] = []
        self._starts = self._ends = np.empty(0, np.int64)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each master; those of its weight are as many."""
        return self._seen[1][: len(self.fmts)] if self._seen else ()

    def orders(self) -> list[tuple[int, ...] | None]:
        """Return the order of dimensions in which each master lies in memory, if not their own."""
        masters = self._own[: len(self.fmts)]
        strides = [x.stride() for x in masters]
        if strides != self._strides:
            self._strides, self._orders = strides, [memory_order(x) for x in masters]
        return self._orders

    def find(
        self, momenta: list[Tensor], orders: list[tuple[int, ...] | None]
    ) -> np.ndarray | None:
        """Return addresses of masters, weights and momenta, int64; None where a kernel takes them not.

        Args:
            momenta: Those that there are.
            orders: In which each of them must lie; weights lie as their masters do.
        """
        own = self.orders()
        tensors = [*self._own, *momenta]
        if any(own):
            tensors = list(map(laid, tensors, [*own, *own, *orders]))
        is_known = len(momenta) == len(self._momenta) and all(map(is_, momenta, self._momenta))
        if is_known and self._seen is not None:
            now = tuple(map(Tensor.data_ptr, tensors)), tuple(map(Tensor.numel, tensors))
            if now == self._seen and all(map(Tensor.is_contiguous, tensors)):
                return self._addresses
        self._seen = None
        places = places_on_cpu(tensors)
        if places is None or not are_apart(places._replace(ys=places.xs)):
            return None
        count, sizes = len(self.fmts), places.elements
        if sizes[count : 2 * count] != sizes[:count]:
            return None
        self._addresses = np.array(places.xs, np.int64)
        self._seen, self._momenta = (places.xs, sizes), momenta
        filled = np.array(sizes) > 0
        self._starts = self._addresses[filled]
        order = np.argsort(self._starts)
        self._ends = (self._starts + 4 * np.array(sizes)[filled])[order]
        self._starts = self._starts[order]
        return self._addresses

    def written(self) -> list[Tensor]:
        """Return all tensors."""
        return [*self._own, *self._momenta]

    def shares(self, starts: np.ndarray, sizes: np.ndarray) -> bool:
        """Say whether spans of float32 elements share memory with these tensors."""
        at = np.searchsorted(self._ends, starts, side="right")  # the first that ends behind a start
        behind = np.append(self._starts, np.iinfo(np.int64).max)[at]
        return bool(((starts + 4 * sizes > behind) & (sizes > 0)).any())
