"""From a segment and a size of images to rows of numbers that one kernel runs.

Work is cut into regions. In a region a thread takes a few images through all operations; between
regions all threads wait: batch norm needs the sums of all images.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fixedpoint_kernels.fused import fields as f
from fixedpoint_kernels.fused.backward import Backward
from fixedpoint_kernels.fused.forward import Forward
from fixedpoint_kernels.fused.graph import Layer, Norm, Segment
from fixedpoint_kernels.fused.layout import Layout
from fixedpoint_kernels.fused.memory import Memory, bytes_of
from fixedpoint_kernels.fused.operations import (
    Addresses,
    GivenNumbers,
    Operation,
    place_buffers,
    table,
    write_over,
)
from fixedpoint_kernels.fused.reference import Parameters
from fixedpoint_kernels.fused.taken import Wanted
from fixedpoint_kernels.fused.weights import packing_items, spare_bytes
from fixedpoint_kernels.products import jobs

__all__ = ["Pass", "Program"]

# bytes of what a thread works on at a time; backward, the products of more images for a weight are cheaper
_FORWARD, _BACKWARD = 3 * 2**19, 2**23
_OF_IMAGES = 2, 3  # parts of a thread's memory of which each image has its own


class Region(NamedTuple):
    """Operations ``begin`` to ``end``, on ``chunk`` images at a time."""

    begin: int
    end: int
    chunk: int


@dataclass
class Pass:
    """Operations of one direction, and weights to be laid out before; see ``fields``."""

    table: np.ndarray
    reals: np.ndarray
    details: np.ndarray
    regions: np.ndarray
    addresses: Addresses
    tasks: np.ndarray
    task_reals: np.ndarray
    task_addresses: Addresses
    items: np.ndarray
    context: np.ndarray
    places: tuple[int, int] = (0, 0)  # of kept and working memory, as the tables have them


class Program(Layout):
    """What runs a segment on images of one size.

    Args:
        segment: Layers and values.
        images: How many.
        size: Height and width of the input.
        path: Of products, one of ``GRAINS``.
        threads: How many.
        needs_input: Whether the gradient of the input is wanted.
        needs_weights: Whether that of each layer's weight is wanted.
        observes: Whether what layers take is written too, and what comes back to each; then
            ``needs_input``.
        memory: Shared with programs that never run at the same time; default: one of its own.

    Attributes:
        held_bytes: Of the arrays that it has while it does not run.
        elements: That each layer takes.

    Raises:
        ValueError: Sums of a layer do not fit in int32 and int64.
    """

    def __init__(  # noqa: PLR0913
        self,
        segment: Segment,
        images: int,
        size: tuple[int, int],
        path: str,
        threads: int,
        needs_input: bool,
        needs_weights: Sequence[bool],
        observes: bool = False,
        memory: Memory | None = None,
    ) -> None:
        super().__init__(segment, images, size, path, threads, needs_input, needs_weights, observes)
        self._places = [0] * 7  # bytes of each part of a thread's memory
        self.work_bytes = 0
        self.forward = self._finished(Forward(self).regions, _FORWARD)
        last = [
            Operation({f.SUMS: own.sums, f.TOTALS: own.totals}) for own in self.weight_sums if own
        ]
        self.backward = self._finished(Backward(self).regions, _BACKWARD, last)
        self._make_scratch()
        for own in (self.forward, self.backward):
            self._fill_context(own)
        self._collected = self._collecting()
        self.wanted = Wanted(segment.layers)
        self.elements = [images * self.shapes[own.source].elements for own in segment.layers]
        self.places_of_weights = [self._places_of(own) for own in segment.layers]
        self.steps: tuple[list[tuple[int, ...]], dict[str, list[int]]] = [], {}  # of weights
        self.memory = Memory() if memory is None else memory
        self.held_bytes = bytes_of(self.held)

    def _places_of(self, layer: Layer | Norm) -> int:
        """Return how many places the image has that a linear layer takes flat; 1 of other layers."""
        if isinstance(layer, Norm) or not layer.is_flat:
            return 1
        _, height, width = self.shapes[layer.source]
        return height * width

    def clear(self) -> None:
        """Set what forward adds to to 0."""
        self.statistics[:] = 0
        self.clamped[:] = 0

    def move(self, parameters: Sequence[Parameters]) -> None:
        """Take the fractional bits of channels, where layers have some of their own."""
        for powers, own in zip(self.powers, parameters, strict=True):
            powers.move(own.shifts)

    def place(self, own: Pass, kept: int, given: GivenNumbers, work: int) -> None:
        """Fill a pass's tables with addresses.

        Args:
            own: ``forward`` or ``backward``.
            kept: Address of kept memory.
            given: Other addresses.
            work: Address of ``work_bytes`` of memory.
        """
        if own.places != (kept, work):
            own.places = 0, 0  # it may be interrupted
            own.addresses.fill(own.table, kept, work)
            own.task_addresses.fill(own.tasks, kept, work)
            own.context[[f.C_SCRATCH, f.C_SPARE]] = work + self._scratch_at, work + self._spare_at
            own.places = kept, work
        own.addresses.given.fill(own.table, given)
        own.task_addresses.given.fill(own.tasks, given)

    def place_gradients(self, given: GivenNumbers, work: int) -> None:
        """Say where weight gradients are written that backward adds up by images.

        Args:
            given: As of ``place``.
            work: So too.
        """
        tasks, _, (rows, columns, offsets) = self._collected
        tasks[rows, columns] = offsets + work
        tasks[:, f.W_STEP_C], tasks[:, f.OUT] = given["of_weight lies last"], given["of_weight"]

    def _collecting(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tell backward which weight gradients it writes at its end, and return where it reads that.

        That are layers; the inputs of each in sixteens, in groups the outputs; and rows, columns and offsets
        of addresses in working memory.
        """
        tasks = np.zeros((len(self.segment.layers), f.COUNT), np.int64)
        items, work = [], []
        for n in range(len(self.segment.layers)):
            if (own := self.weight_sums[n]) is None:
                continue
            for place, size in self.weight_sizes(n).items():
                tasks[n, place] = size
            tasks[n, f.POWERS] = self.lsbs.ctypes.data + 4 * n
            tasks[n, [f.HELD, f.W_FLIPS, f.SUMS_STRIDE]] = own.held, own.is_flipped, own.stride
            work += [(n, f.SUMS, own.sums.offset), (n, f.TOTALS, own.totals.offset)]
            count = tasks[n, f.W_INPUTS if tasks[n, f.W_GROUPS] == 1 else f.W_OUTPUTS]
            items += [(n, first) for first in range(0, int(count), 16)]
        own, places = np.array(items, np.int64).reshape(-1, 2), np.array(work, np.int64)
        context = self.backward.context
        context[[f.C_COLLECT, f.C_COLLECT_ITEMS]] = tasks.ctypes.data, own.ctypes.data
        context[f.C_COLLECT_COUNT] = len(own)
        return tasks, own, places.reshape(-1, 3).T

    def _finished(
        self, regions: list[list[Operation]], room: int, last: Sequence[Operation] = ()
    ) -> Pass:
        """Return a pass; what ``last`` needs is there when it is over.

        A thread works on as many images at a time as ``room`` bytes hold, about as many each time.
        """
        regions = [region for region in regions if region]
        operations, found, details = [], [], []
        for region in regions:
            bytes_an_image = max(sum(op.bytes_an_image for op in region), 1)
            most = -(self.images // -self.threads)
            pieces = max(1, -(most * bytes_an_image // -room))
            chunk = -(most // -pieces)
            found.append(Region(len(operations), len(operations) + len(region), chunk))
            for op in region:
                own = None if op.details is None else op.details(chunk)
                details.append(own)
                if own is not None:
                    self._places[0] = max(self._places[0], int(own.row[jobs.WORK_BYTES]) + 64)
                    self.held.append(own)
                for part, size in op.scratch.items():
                    times = chunk if part in _OF_IMAGES else 1
                    self._places[part] = max(self._places[part], size * times)
            operations += region
        write_over(regions)
        self.work_bytes = max(self.work_bytes, place_buffers([*regions, last]))
        rows = np.zeros((len(operations), jobs.FIELDS), np.int64)
        for row, own in zip(rows, details, strict=True):
            if own is not None:
                row[:] = own.row
        numbers, reals, addresses = table(operations)
        tasks, task_reals, task_addresses = table(self.tasks)
        self.tasks = []
        own = np.array(found, np.int64)
        context = np.zeros(f.CONTEXT, np.int64)
        return Pass(
            numbers,
            reals,
            rows,
            own,
            addresses,
            tasks,
            task_reals,
            task_addresses,
            packing_items(tasks),
            context,
        )

    def _fill_context(self, own: Pass) -> None:
        """Write what a kernel needs to know of a pass."""
        arrays = {
            f.C_TABLE: own.table,
            f.C_REALS: own.reals,
            f.C_DETAILS: own.details,
            f.C_REGIONS: own.regions,
            f.C_TASKS: own.tasks,
            f.C_TASK_REALS: own.task_reals,
            f.C_ITEMS: own.items,
        }
        for place, array in arrays.items():
            own.context[place] = array.ctypes.data
        own.context[[f.C_ITEM_COUNT, f.C_SPARE_BYTES]] = len(own.items), self._spare_bytes
        counts = len(own.table), self.images, self.threads
        own.context[[f.C_OPERATIONS, f.C_IMAGES, f.C_THREADS]] = counts
        own.context[[f.C_SCRATCH_BYTES, f.C_PLACES]] = self._scratch_bytes, self._begins.ctypes.data

    def _make_scratch(self) -> None:
        sizes = [-(size // -64) * 64 + 64 for size in self._places]
        begins = np.cumsum([0, *sizes])
        self._begins, self._scratch_bytes = begins[:7].astype(np.int64), int(begins[-1])
        self._scratch_at = self.work_bytes
        self._spare_at = self._scratch_at + self._scratch_bytes * self.threads
        self._spare_bytes = max(spare_bytes(own.shape) for own in self.segment.products)
        self.work_bytes = self._spare_at + self._spare_bytes * self.threads
