"""A segment forward alone, with batch norm's running statistics.

Without means, SiLU, sigmoid and GELU it is to the bit what its layers compute one by one. These are as in
``fixedpoint_kernels.fused.reference``.

A thread takes a few images through all layers, in memory of its own that stays in its cache: no layer
waits for another thread.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numba import prange
from torch import Tensor

from fixedpoint_kernels.fused import cpu, execute
from fixedpoint_kernels.fused import fields as f
from fixedpoint_kernels.fused.forward import Forward
from fixedpoint_kernels.fused.graph import INPUT, Layer, Scaled, Segment
from fixedpoint_kernels.fused.layout import Layout, Shape
from fixedpoint_kernels.fused.memory import bytes_of
from fixedpoint_kernels.fused.operations import (
    Buffer,
    GivenNumbers,
    Numbers,
    Operation,
    place_buffers,
    table,
)
from fixedpoint_kernels.fused.stamp import Stamp
from fixedpoint_kernels.fused.weights import pack_weights, packing_items, spare_bytes
from fixedpoint_kernels.products import jobs
from fixedpoint_kernels.products.instructions import compiled
from fixedpoint_kernels.scratch import Scratch

__all__ = ["Norm", "Program", "run"]

_CACHE = 2**21  # bytes of what a thread works on at a time
_BLOCK = 64
run_region: Any = None


class Norm(NamedTuple):
    """Batch norm in eval mode: mean, variance, scale and shift by channel, float32; the last two or None."""

    mean: Tensor
    variance: Tensor
    scale: Tensor | None
    shift: Tensor | None
    eps: float


@cache
def rounds_once() -> bool | None:
    """Say whether ``F.batch_norm`` rounds product and sum once, in eval mode; None: it does something else."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 32, generator=generator, dtype=torch.float32, device="cpu")
    drawn = torch.rand(4, 32, generator=generator, dtype=torch.float32, device="cpu")
    mean, variance, scale, shift = drawn.add(0.1)
    own = Norm(mean, variance, scale, shift, 1e-5)
    factor, shift = (t.double() for t in factors(own))
    y = F.batch_norm(x, own.mean, own.variance, own.scale, own.shift, eps=own.eps)
    product = x.double() * factor  # exact
    if torch.equal(y, (product + shift).float()):
        return True
    return False if torch.equal(y, product.float() + shift.float()) else None


def factors(own: Norm) -> tuple[Tensor, Tensor]:
    """Return by what ``F.batch_norm`` multiplies, and what it adds; (channels,) float32.

    It tells itself: what it makes of 1, with a mean and a shift of 0, and of 0.
    """
    zero = torch.zeros(len(own.mean), dtype=torch.float32, device="cpu")
    one = torch.ones(1, len(zero), dtype=torch.float32, device="cpu")
    factor = F.batch_norm(one, zero, own.variance, own.scale, zero, eps=own.eps)
    added = F.batch_norm(zero[None], own.mean, own.variance, own.scale, own.shift, eps=own.eps)
    return factor[0], added[0]


def _joined(norms: Sequence[Norm]) -> Norm:
    """Return the channels of several as those of one; all have the same ``eps``, and scale and shift or not."""
    if len(norms) == 1:
        return norms[0]
    parts = zip(*(own[:4] for own in norms), strict=True)
    mean, variance, scale, shift = (None if p[0] is None else torch.cat(p) for p in parts)
    assert mean is not None
    assert variance is not None
    return Norm(mean, variance, scale, shift, norms[0].eps)


class _Layout(Layout):
    """Of a few images of one thread."""

    infers = True

    def has_statistics(self, n: int) -> bool:
        """Say no: they are known."""
        return False

    def kind_of_sums(self, n: int) -> int:
        """Return as what a layer's sums are kept, and how they are scaled and shifted."""
        return f.FUSED if rounds_once() else f.FLOAT32

    def _allocate(self) -> None:
        n, segment = self.images, self.segment
        self.codes = [
            Buffer(n * self.shapes[own.source].padded) if isinstance(own, Layer) else 0
            for own in segment.layers
        ]
        self.sums = [Buffer(4 * n * out.padded) for out in self.outs]
        self.clip = [None] * len(segment.layers)
        self.relu = {}
        self.gates = {
            value.gate: Buffer(4 * n * self.shapes[value.gate].padded)
            for value in segment.values
            if isinstance(value, Scaled)
        }
        ends = np.cumsum([0, *(out.pattern for out in self.outs)])
        self.spread = np.concatenate(
            [first + np.arange(out.pattern) % out.channels for first, out in self.channels()]
        )
        self.both = self.array(2 * ends[-1], np.float32).reshape(2, ends[-1])
        self.factors = [[own[end:].ctypes.data for own in self.both] for end in ends[:-1]]

    def channels(self) -> Iterator[tuple[int, Shape]]:
        """Yield what each layer makes, and the number of its first channel among all layers'."""
        first = 0
        for out in self.outs:
            yield first, out
            first += out.channels


class Program:
    """What runs a segment forward on images of one size.

    Args:
        segment: Layers and values; linear layers take values of one place.
        images: How many.
        size: Height and width of the input.
        path: Of products, one of ``GRAINS``.
        threads: How many.
        packers: How many threads lay weights out: a single image has one thread and all weights.

    Attributes:
        lock: To be held while the program runs.
        held_bytes: Of the arrays that it has while it does not run.
        stamp: Of the weights and batch norms that are laid out; None: of those of one call.

    Raises:
        ValueError: Sums of a layer do not fit in int32.
    """

    def __init__(
        self,
        segment: Segment,
        images: int,
        size: tuple[int, int],
        path: str,
        threads: int,
        packers: int,
    ) -> None:
        self.segment, self.path, self.threads, self.packers = segment, path, threads, packers
        shapes = _shapes(segment, size)
        most = max(shapes)
        self.chunk = max(1, min(-(images // -threads), _CACHE // (6 * most)))
        layers = len(segment.layers)
        layout = _Layout(segment, self.chunk, size, path, 1, False, [False] * layers, False)
        self.shapes, self._factors, self._spread = layout.shapes, layout.both, layout.spread
        self._powers = layout.powers
        self._parts = [slice(n, n + out.channels) for n, out in layout.channels()]
        self._flat = np.zeros((2, self._parts[-1].stop), np.float32)
        (operations,) = Forward(layout).regions
        self._held = [layout, details := [_details(op, self.chunk) for op in operations]]
        self._scratch_at = place_buffers([[op] for op in operations])
        rows = [np.zeros(jobs.FIELDS, np.int64) if own is None else own.row for own in details]
        self._details = np.array(rows)
        numbers, self._reals, self.addresses = table(operations)
        self._tables = np.stack([numbers] * threads)
        self._tasks, self._task_reals, self._task_addresses = table(layout.tasks)
        self._items = packing_items(self._tasks)
        self._spare_bytes = max(spare_bytes(own.shape) for own in segment.products)
        self._make_contexts(operations)
        self.lock = Lock()
        self.held_bytes = bytes_of([layout.held, details, self._tables])
        self.stamp: Stamp | None = None
        self._work = 0  # where working memory was
        own = self.addresses.given
        steps = [4 * self.shapes[INPUT if name == "x" else k].padded for name, k in own.keys]
        self._cells = np.stack([own.rows, own.columns, np.zeros_like(own.rows), steps], 1)

    def _make_contexts(self, operations: list[Operation]) -> None:
        """Write what each thread's kernel needs to know."""
        sizes = [64] * 7
        for op, row in zip(operations, self._details, strict=True):
            sizes[0] = max(sizes[0], int(row[jobs.WORK_BYTES]) + 64)
            for part, size in op.scratch.items():
                sizes[part] = max(sizes[part], -(size // -_BLOCK) * _BLOCK + 64)
        begins = np.cumsum([0, *(-(size // -_BLOCK) * _BLOCK for size in sizes)]).astype(np.int64)
        self._regions = np.array([[0, len(operations), self.chunk]], np.int64)
        self._contexts = np.zeros((self.threads, f.CONTEXT), np.int64)
        self._held.append(begins)
        for thread, own in enumerate(self._contexts):
            arrays = self._tables[thread], self._reals, self._details, self._regions
            places = f.C_TABLE, f.C_REALS, f.C_DETAILS, f.C_REGIONS
            for place, array in zip(places, arrays, strict=True):
                own[place] = array.ctypes.data
            own[[f.C_OPERATIONS, f.C_THREADS, f.C_SCRATCH_BYTES]] = len(operations), 1, begins[-1]
            own[f.C_PLACES] = begins.ctypes.data
        self._thread_bytes = self._scratch_at + int(begins[-1])
        self.work_bytes = self._thread_bytes * self.threads + self._spare_bytes * self.packers

    def scale(self, norms: Sequence[Norm | Tensor | None]) -> bool:
        """Write batch norm's factors, or biases; say whether they are finite."""
        flat, alike = self._flat, {}
        for n, own in enumerate(norms):
            part = flat[:, self._parts[n]]
            if isinstance(own, Norm):
                kind = own.eps, own.scale is None, own.shift is None
                alike.setdefault(kind, []).append((own, part))
            else:
                part[0], part[1] = 1.0, 0.0 if own is None else own.detach().numpy()
        for members in alike.values():  # torch is asked once
            sizes = [part.shape[1] for _, part in members]
            both = np.stack([t.numpy() for t in factors(_joined([own for own, _ in members]))])
            for (_, part), own in zip(
                members, np.split(both, np.cumsum(sizes)[:-1], 1), strict=True
            ):
                part[:] = own
        np.take(flat, self._spread, 1, out=self._factors)
        return bool(np.isfinite(flat).all())

    def move(self, shifts: Sequence[tuple[int, ...]]) -> bool:
        """Take the fractional bits of each layer's channels, empty where they share one length; say whether they changed."""
        changed = [own.move(moved) for own, moved in zip(self._powers, shifts, strict=True)]
        return any(changed)

    def pack(self, weights: Sequence[Tensor | None], work: int) -> None:
        """Lay out the weights.

        Args:
            weights: Of each layer.
            work: Address of ``work_bytes`` of memory.
        """
        given: dict[str, Numbers] = {
            "weight": [0 if own is None else own.data_ptr() for own in weights],
            **execute.steps_given([() if own is None else own.stride() for own in weights]),
        }
        self._task_addresses.given.fill(self._tasks, given)
        spare = work + self._thread_bytes * self.threads, self._spare_bytes, self.packers
        pack_weights(self.packers > 1)(self._tasks, self._task_reals, self._items, *spare)

    def place(self, given: GivenNumbers, work: int) -> None:
        """Note where images come from and go to, and at which address threads work."""
        if work != self._work:
            rows, columns, offsets = self.addresses.work
            for thread, own in enumerate(self._tables):
                own[rows, columns] = offsets + work + thread * self._thread_bytes
            scratch = work + self._scratch_at
            self._contexts[:, f.C_SCRATCH] = scratch + self._thread_bytes * np.arange(self.threads)
            self._work = work
        self._cells[:, 2] = self.addresses.given.numbers(given)

    def go(self, images: int) -> None:
        """Run all images."""
        parts = cpu.parts_of_regions()
        kernel = compiled(_run_each, self.path, *parts)[self.threads > 1]
        kernel(self._contexts, self._tables, self._cells, images, self.chunk, self.threads)


def _shapes(segment: Segment, size: tuple[int, int]) -> list[int]:
    return [c * h * w for c, h, w in segment.sizes(size).values()]


def _details(op: Operation, chunk: int) -> jobs.Described | None:
    return None if op.details is None else op.details(chunk)


def _run_each(contexts, tables, cells, images, chunk, threads):
    """Run each thread's share of the images, so many at a time.

    Args:
        contexts: (threads, ``fields.CONTEXT``) int64.
        tables: (threads, operations, ``fields.COUNT``) int64.
        cells: (n, 4) int64: row and column of a table, address, and bytes from one image to the next.
        images: How many.
        chunk: Of these at a time.
        threads: How many.
    """
    for thread in prange(threads):
        first, last = images * thread // threads, images * (thread + 1) // threads
        for at in range(first, last, chunk):
            contexts[thread, f.C_IMAGES] = min(chunk, last - at)
            for k in range(len(cells)):
                place = cells[k, 2] + at * cells[k, 3]
                tables[thread, cells[k, 0], cells[k, 1]] = place
            run_region(contexts[thread].ctypes.data, 0, 0)


def run(
    program: Program,
    x: Tensor,
    weights: Sequence[Tensor | None],
    norms: Sequence[Norm | Tensor | None],
    shifts: Sequence[tuple[int, ...]],
    stamp: Stamp | None = None,
) -> list[Tensor] | None:
    """Run a segment forward.

    Args:
        program: Made for the shape of ``x``.
        x: (images, channels, height, width), float32, any strides.
        weights: Of each layer; None of batch norm alone.
        norms: Of each layer: batch norm, a bias, or nothing.
        shifts: Of each layer: how many fractional bits more its channels have, or empty.
        stamp: Of ``weights`` and ``norms``: where the program was run with this object before, they are not looked at; None: they
            are laid out.

    Returns:
        The values that leave the segment, float32, channels last, or (images, channels) where they are
        flat; None where a factor of batch norm is not finite.
    """
    source = execute.laid(x, program.shapes[INPUT])
    results = {}
    for i, value in enumerate(program.segment.values):
        if value.is_output:
            results[i] = execute.Result(len(x), program.shapes[i], value.is_flat)
    given: dict[str, Numbers] = {"x": [source.address], "y": execute.addresses_of(results)}
    with program.lock, Scratch(program.work_bytes) as (_, work):
        moved = program.move(shifts)
        if moved or stamp is None or stamp is not program.stamp:
            program.stamp = None
            if not program.scale(norms):
                return None
            program.pack(weights, work)
            program.stamp = stamp
        program.place(given, work)
        program.go(len(x))
    return [result.take() for result in results.values()]
