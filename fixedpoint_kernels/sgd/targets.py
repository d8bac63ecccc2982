"""What a step of SGD reads and writes, and whether a kernel may."""

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import NamedTuple

import numpy as np
from torch import Tensor

from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.memory import Places, are_apart, places_on_cpu
from fixedpoint_kernels.strides import is_dense, orders_of

__all__ = ["Moves", "Rates", "Tables", "Targets"]

_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")
_END = np.iinfo(np.int64).max  # behind all memory


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
        places: What ``places_on_cpu`` says of ``grads``, without gaps, if it was asked.
    """

    rows: Sequence[int]
    grads: Sequence[Tensor]
    momenta: Sequence[Tensor | None]
    is_first: Sequence[bool]
    rates: Sequence[Rates]
    places: Places | None = None


class Tables(NamedTuple):
    """What a kernel made of addresses, sizes and formats, for steps in which the same rows move.

    Args:
        rows: As of ``Moves``.
        moving: The same.
        pointers: As of ``cpu.step_task``; those of gradients are of the last step.
        kinds: The same.
        table: The same; the address of rates is of the last step.
        elements: Of all masters.
        tasks: How many.
        held: All arrays that ``table`` has the address of.
    """

    rows: Sequence[int]
    moving: np.ndarray
    pointers: np.ndarray
    kinds: np.ndarray
    table: np.ndarray
    elements: int
    tasks: int
    held: tuple[np.ndarray | None, ...]


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
        self._rows: list[int] = []
        self._seen: Sequence[Sequence[object]] | None = None
        self._orders: list[tuple[int, ...] | None] = []
        self.sizes: tuple[int, ...] = ()
        self.tables: Tables | None = None
        self._starts, self._ends = np.full(1, _END), np.empty(0, np.int64)

    @property
    def is_turned(self) -> bool:
        """Whether dimensions of a master lie in another order than their own."""
        return any(self._orders)

    def find(self, momenta: list[Tensor], rows: list[int]) -> np.ndarray | None:
        """Return addresses of masters, weights and momenta, int64; None where a kernel takes them not.

        Args:
            momenta: Those that there are.
            rows: Of which masters.
        """
        tensors = [*self._own, *momenta]
        now = _lying(tensors)
        is_known = len(momenta) == len(self._momenta) and all(map(is_, momenta, self._momenta))
        if is_known and rows == self._rows and now == self._seen:
            return self._addresses
        self._seen = self.tables = None
        places = places_on_cpu(tensors, is_dense)
        if places is None or not are_apart(places._replace(ys=places.xs)):
            return None
        count, sizes = len(self.fmts), places.elements
        self.sizes, self._orders = sizes[:count], orders_of(self._own[:count])
        if not self.are_alike([*range(count), *rows], tensors[count:], sizes[count:]):
            return None
        self._addresses = np.array(places.xs, np.int64)
        self._seen, self._momenta, self._rows = now, momenta, rows
        filled = np.array(sizes) > 0
        self._starts = self._addresses[filled]
        order = np.argsort(self._starts)
        self._ends = (self._starts + 4 * np.array(sizes)[filled])[order]
        self._starts = np.append(self._starts[order], _END)
        return self._addresses

    def are_alike(self, rows: Sequence[int], xs: Sequence[Tensor], sizes: Sequence[int]) -> bool:
        """Say whether tensors, of so many elements, lie in memory as the masters of these rows do."""
        if [*sizes] != [self.sizes[row] for row in rows]:
            return False
        return orders_of(xs) == [self._orders[row] for row in rows]

    def written(self) -> list[Tensor]:
        """Return all tensors."""
        return [*self._own, *self._momenta]

    def shares(self, starts: np.ndarray, sizes: np.ndarray) -> bool:
        """Say whether spans of float32 elements share memory with these tensors."""
        at = np.searchsorted(self._ends, starts, side="right")  # the first that ends behind a start
        return bool(((starts + 4 * sizes > self._starts[at]) & (sizes > 0)).any())


def _lying(xs: Sequence[Tensor]) -> Sequence[Sequence[object]]:
    """Return where tensors lie, and how: what changes where one gets other memory."""
    lying = map(Tensor.data_ptr, xs), map(_SHAPE, xs), map(Tensor.stride, xs)
    return [[*own] for own in lying] + [[*set(map(_DTYPE, xs))]]
