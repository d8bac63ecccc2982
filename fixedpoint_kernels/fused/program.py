"""From a segment and a size of images to rows of numbers that one kernel runs.

Work is cut into regions. In a region a thread takes a few images through all operations; between
regions all threads wait: batch norm needs the sums of all images.
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fixedpoint_kernels.fused import cpu
from fixedpoint_kernels.fused import fields as f
from fixedpoint_kernels.fused.graph import INPUT, Layer, Pooled, Return, Segment
from fixedpoint_kernels.fused.pooling import numbers_of
from fixedpoint_kernels.llvm import tiles
from fixedpoint_kernels.products import jobs, shapes
from fixedpoint_kernels.products.blocks import Blocks, blocks, runs
from fixedpoint_kernels.products.instructions import FLIPS, GRAINS
from fixedpoint_kernels.products.shapes import Correlation
from fixedpoint_kernels.products.spots import spots

__all__ = ["Addresses", "Program", "Shape"]

_CACHE = 2**21  # bytes of what a thread works on at a time
_BLOCK = 64


class Shape(NamedTuple):
    """Of an image: channels, height, width."""

    channels: int
    height: int
    width: int

    @property
    def elements(self) -> int:
        """How many an image has."""
        return self.channels * self.height * self.width

    @property
    def padded(self) -> int:
        """Elements from one image to the next: a multiple of 64."""
        return -(self.elements // -_BLOCK) * _BLOCK

    @property
    def pattern(self) -> int:
        """Elements after which channels begin at a multiple of 64 again."""
        return math.lcm(self.channels, _BLOCK)


@dataclass(eq=False)
class _Buffer:
    """Memory that is known by size first."""

    size: int
    first: int = 2**31  # region that uses it
    last: int = -1
    address: int = 0


class _Kept(NamedTuple):
    offset: int


class _Given(NamedTuple):
    name: str
    number: int


_Number = int | _Buffer | _Kept | _Given
_Details = Callable[[int], jobs.Described]


@dataclass
class _Operation:
    numbers: dict[int, _Number]
    reals: tuple[float, float, float] = (0.0, 0.0, 0.0)
    details: _Details | None = None
    bytes_an_image: int = 0
    scratch: dict[int, int] = field(default_factory=dict)  # bytes, some of them an image


class Addresses(NamedTuple):
    """Where in a table which addresses belong: those of kept memory, and those given at each call."""

    kept: tuple[np.ndarray, np.ndarray, np.ndarray]
    given: dict[tuple[str, int], list[tuple[int, int]]]


class Region(NamedTuple):
    """Operations ``begin`` to ``end``, on ``chunk`` images at a time."""

    begin: int
    end: int
    chunk: int


@dataclass
class Pass:
    """Operations of one direction, and weights to be laid out before."""

    table: np.ndarray
    reals: np.ndarray
    details: np.ndarray
    regions: list[Region]
    addresses: Addresses
    tasks: np.ndarray
    task_reals: np.ndarray
    task_addresses: Addresses


class Memory:
    """Lends tensors of one size, and takes their memory back when nobody holds it any more.

    New memory costs as much time as the layers that fill it: the system clears each page.

    Args:
        size: Bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[np.ndarray] = []

    def lend(self) -> Tensor:
        """Return a tensor, uint8, of any content."""
        memory = self._free.pop() if self._free else np.empty(self.size, np.uint8)
        lease = memory[:]
        weakref.finalize(lease, _take_back, self._free, memory).atexit = False
        return torch.from_numpy(lease)


def _take_back(free: list[np.ndarray], memory: np.ndarray) -> None:
    if not free:  # one is enough for a step after the other
        free.append(memory)


class Program:
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
    ) -> None:
        self.observes = observes
        self.segment, self.images, self.path, self.threads = segment, images, path, threads
        self.needs_input, self._needs_weights = needs_input, needs_weights
        self.shapes = {i: Shape(*found) for i, found in segment.sizes(size).items()}
        self.outs = [self.shapes[segment.made_by[n]] for n in range(len(segment.layers))]
        self.kept_bytes = 0
        self._memory: list[np.ndarray] = []
        self._hold: list[object] = []
        self._pooled: dict[int, tuple[int, _Kept]] = {}  # windows, and what they took
        self._tasks: list[_Operation] = []
        self._places = [0] * 7  # bytes of each part of a thread's memory
        self._allocate()
        self.forward = self._finished(self._forward())
        self.backward = self._finished(self._backward())
        self._make_scratch()
        self.memory = Memory(self.kept_bytes + 64)

    # ------------------------------------------------------------------ memory

    def _take(self, count: int, dtype: type = np.uint8) -> int:
        """Return the address of memory of the program's own."""
        size = np.dtype(dtype).itemsize
        memory = np.zeros(count * size + 64, np.uint8)
        self._memory.append(memory)
        return -(memory.ctypes.data // -64) * 64

    def _keep(self, size: int) -> _Kept:
        """Return a place in the memory that forward leaves for backward."""
        offset, self.kept_bytes = self.kept_bytes, self.kept_bytes - (-size // 64) * 64
        return _Kept(offset)

    def _allocate(self) -> None:
        n, segment = self.images, self.segment
        self.codes = [self._keep(n * self.shapes[layer.source].padded) for layer in segment.layers]
        self._clip = [
            self._keep(n * self.shapes[layer.source].padded // 8)
            if self._wants_mask(layer)
            else None
            for layer in segment.layers
        ]
        self._z: list[_Kept | _Buffer] = [
            self._keep(2 * n * out.padded) if layer.eps is not None else _Buffer(4 * n * out.padded)
            for layer, out in zip(segment.layers, self.outs, strict=True)
        ]
        self._relu = {
            i: self._keep(n * self.shapes[i].padded // 8)
            for i, value in enumerate(segment.values)
            if value.relu and not self._shares_mask(i)
        }
        self.means, self.inverses, self.variances = (
            [self._keep(8 * out.channels) for out in self.outs] for _ in range(3)
        )
        sizes = [self.threads * -(out.channels // -16) * 384 for out in self.outs]
        self._statistics = self._take(sum(sizes))
        self._sums_at = [self._statistics + sum(sizes[:n]) for n in range(len(sizes))]
        self._factors = [[self._take(out.pattern, np.float32) for _ in "ab"] for out in self.outs]
        self._numbers = np.zeros((len(segment.layers), 3))  # power of two, eps, momentum
        self.momenta = self._numbers[:, 2]
        self.clamped = np.zeros((len(segment.layers), self.threads), np.int64)
        self._lsbs = np.array([layer.inputs.lsb for layer in segment.layers], np.float32)
        self._exponents = self._take(n, np.float32)
        self.totals = [
            self._take(self.threads * self._padded_weights(layer), np.float64) if needed else 0
            for layer, needed in zip(segment.layers, self._needs_weights, strict=True)
        ]
        self._collected = self._collecting()

    def clear(self) -> None:
        """Set what forward adds to to 0."""
        memory = next(m for m in self._memory if 0 <= self._statistics - m.ctypes.data < 64)
        memory[:] = 0
        self.clamped[:] = 0

    def collect(self, weights: Sequence[Tensor]) -> None:
        """Write weight gradients, contiguous, from what backward added up; empty ones are not wanted."""
        tasks, items = self._collected
        tasks[:, f.OUT] = [weight.data_ptr() if weight.numel() else 0 for weight in weights]
        cpu.collect(self.threads > 1)(tasks, items, self.threads)

    def _collecting(self) -> tuple[np.ndarray, np.ndarray]:
        """Return what ``cpu.collect`` takes: layers, and the inputs of each in sixteens."""
        tasks = np.zeros((len(self.segment.layers), f.COUNT), np.int64)
        items = []
        for n, layer in enumerate(self.segment.layers):
            outputs, inputs, height, width = layer.shape
            tasks[n, [f.W_OUTPUTS, f.W_INPUTS, f.W_TAPS]] = outputs, inputs, height * width
            tasks[n, [f.TOTALS, f.POWERS]] = self.totals[n], self._lsbs.ctypes.data + 4 * n
            items += [(n, first) for first in range(0, inputs, 16)]
        return tasks, np.array(items, np.int64)

    @staticmethod
    def _padded_weights(layer: Layer) -> int:
        outputs, inputs, height, width = layer.shape
        return height * width * -(inputs // -16) * 16 * -(outputs // -16) * 16

    def _wants_mask(self, layer: Layer) -> bool:
        if layer.source == INPUT and not self.needs_input:
            return False
        return layer.clip or self._shares_mask(layer.source)

    def _shares_mask(self, i: int) -> bool:
        """Say whether one mask tells both what was below 0 and what was clamped."""
        if i == INPUT:
            return False
        value = self.segment.values[i]
        return len(self.segment.takers(i)) == self.segment.users(i) == 1 and not value.is_output

    # ------------------------------------------------------------------ operations

    def _of(self, shape: Shape, kind: int, **more: _Number) -> dict[int, _Number]:
        numbers: dict[int, _Number] = {
            f.KIND: kind,
            f.CHANNELS: shape.channels,
            f.ELEMENTS: shape.elements,
            f.PADDED: shape.padded,
            f.PATTERN: shape.pattern,
            f.POSITIONS: self.images * shape.height * shape.width,
        }
        return numbers | {getattr(f, name): number for name, number in more.items()}

    def _term(self, n: int) -> int:
        return f.FLOAT32 if self.segment.layers[n].eps is None else f.BFLOAT16

    def _forward(self) -> list[list[_Operation]]:
        order = _Forward(self)
        for n, layer in enumerate(self.segment.layers):
            order.make(layer.source)
            order.multiply(n)
        for i, value in enumerate(self.segment.values):
            if value.is_output:
                order.make(i)
        return order.regions

    def _value(self, i: int, y: _Number, ys: Mapping[int, _Number]) -> list[_Operation]:
        """Return what makes a value: once for each layer that takes codes of it."""
        shape, takers = self.shapes[i], self.segment.takers(i)
        found: list[_Operation] = []
        value = None if i == INPUT else self.segment.values[i]
        if isinstance(value, Pooled):
            found.append(self._pool(i, value, y, ys))
            more = {"FIRST": f.PLAIN, "Z": y}
        else:
            more = self._terms(i, y, ys)
            takers = takers or [None]
        for n in takers:
            operation = _Operation(
                self._of(shape, f.VALUE, **more), bytes_an_image=8 * shape.padded
            )
            if n is not None:
                self._with_codes(operation, n)
            found.append(operation)
            more = {"FIRST": f.PLAIN, "Z": y}
        return found

    def _terms(self, i: int, y: _Number, ys: Mapping[int, _Number]) -> dict[str, _Number]:
        """Return of what a value is the sum, and where it goes."""
        if i == INPUT:
            return {"FIRST": f.PLAIN, "Z": y}
        value, more = self.segment.values[i], {"Y": y}
        names = ("FIRST", "Z", "A", "B"), ("SECOND", "Z2", "A2", "B2")
        for own, n in zip(names, value.layers, strict=False):
            more |= dict(zip(own, (self._term(n), self._z[n], *self._factors[n]), strict=True))
        if value.other_value is not None:
            more |= {"SECOND": f.PLAIN, "Z2": ys[value.other_value]}
        if i in self._relu:
            more["RELU_MASK"] = self._relu[i]
        return more | {"RELU": value.relu}

    def _pool(self, i: int, value: Pooled, y: _Number, ys: Mapping[int, _Number]) -> _Operation:
        """Return what makes a pooled value; its windows and what they took stay for backward."""
        source, made = self.shapes[value.source], self.shapes[i]
        windows = numbers_of(value, source, source.padded, made)
        self._hold.append(windows)
        own = self._pooled[i] = windows.ctypes.data, self._keep(self.images * made.padded)
        return _Operation(
            self._of(made, f.POOL, Z=ys[value.source], Y=y, WINDOWS=own[0], PLACES=own[1]),
            bytes_an_image=5 * made.padded,
        )

    def _unpool(self, i: int, source: int, gradients: Mapping[int, _Buffer]) -> _Operation:
        """Return what makes the gradient of a value from that of what was pooled from it."""
        size, (windows, places) = 4 * self.shapes[source].padded, self._pooled[i]
        return _Operation(
            self._of(self.shapes[i], f.UNPOOL, G=gradients[i], WINDOWS=windows, PLACES=places),
            bytes_an_image=size,
            scratch={3: size},
        )

    def _coefficients(self, n: int) -> _Operation:
        layer, out = self.segment.layers[n], self.outs[n]
        power = 2.0 ** (-layer.inputs.fl - layer.weight.fl)
        numbers = self._numbers[n]
        numbers[:2] = power, layer.eps or 0.0
        return _Operation(
            self._of(
                out,
                f.COEFFICIENTS,
                HAS_NORM=layer.eps is not None,
                STATISTICS=self._sums_at[n],
                MEANS=self.means[n],
                INVERSES=self.inverses[n],
                VARIANCES=self.variances[n],
                NUMBERS=numbers.ctypes.data,
                SCALE=_Given("scale", n),
                SHIFT=_Given("shift", n),
                RUNNING_MEAN=_Given("running_mean", n),
                RUNNING_VARIANCE=_Given("running_variance", n),
                A=self._factors[n][0],
                B=self._factors[n][1],
            )
        )

    def _with_codes(self, operation: _Operation, n: int) -> None:
        layer = self.segment.layers[n]
        fmt = layer.inputs
        operation.reals = fmt.scale, fmt.min_code, fmt.max_code
        mask = self._clip[n]
        operation.numbers |= {
            f.CODES: self.codes[n],
            f.CLIP_MASK: 0 if mask is None else mask,
            f.CLIPS: layer.clip,
            f.BOTH: self._shares_mask(layer.source),
            f.CLAMPED: self.clamped[n].ctypes.data,
        }

    def _product(self, n: int) -> _Operation:
        layer, out = self.segment.layers[n], self.outs[n]
        taken = self.shapes[layer.source]
        part = shapes.forward(layer.window, taken[1:], layer.shape[2:])
        _check_sums(layer, part, taken)
        size = 4 if layer.eps is None else 2
        steps = size * out.padded, size * out.width * out.channels, size * out.channels
        kind = tiles.KINDS["float32" if layer.eps is None else "bfloat16 and statistics"]
        scales = np.full(
            -(out.channels // -16) * 16, 2.0 ** (-layer.inputs.fl - layer.weight.fl), np.float32
        )
        self._hold.append(scales)

        def details(chunk: int) -> jobs.Described:
            grain = GRAINS[self.path]
            cut = blocks(part, chunk, taken[1:], taken.channels, 1, grain=grain)
            every = *steps, out.channels
            found = runs(cut, grain)
            own = jobs.describe_outputs(cut, found, part, every, size, kind, layer.inputs.signed)
            own.row[jobs.X_IMAGE] = taken.padded
            return own

        groups = -(out.channels // -16)
        return _Operation(
            self._of(
                out,
                f.PRODUCT,
                X=self.codes[n],
                HAS_NORM=layer.eps is not None,
                STATISTICS=self._sums_at[n],
                OUT=self._z[n],
                POWERS=scales.ctypes.data,
                **self._weights_at(n, part, taken, out.channels, False),
            ),
            details=details,
            bytes_an_image=taken.padded + 2 * out.padded,
            scratch={5: groups * 384},
        )

    def _weights_at(
        self, n: int, part: Correlation, taken: Shape, columns: int, turned: bool
    ) -> dict[str, _Number]:
        """Make room for packed weights, and note how to lay them out."""
        layer = self.segment.layers[n]
        cut = blocks(part, 1, (taken.height, taken.width), taken.channels, 1)
        found = runs(cut, GRAINS[self.path])
        groups = -(columns // -16)
        packed = self._take(groups * 16 * found.depth + 64)
        own = spots(part, (taken.height, taken.width), taken.channels, GRAINS[self.path])
        meets = np.empty((0, 0), np.uint8) if own is None else own.meets
        begin = self._take((1 + len(meets)) * groups * 16, np.int32)
        numbers = np.array(part.taps, np.int64)
        self._hold += [numbers, found, meets]
        outputs, inputs, height, width = layer.shape
        flips = FLIPS[self.path] if (turned or layer.inputs.signed) else 0
        self._tasks.append(
            _Operation(
                {
                    f.W_OUTPUTS: outputs,
                    f.W_INPUTS: inputs,
                    f.W_TAPS: height * width,
                    f.W_PART_TAPS: len(numbers),
                    f.W_NUMBERS: numbers.ctypes.data,
                    f.W_OFFSETS: found.offsets.ctypes.data,
                    f.W_DEPTH: found.depth,
                    f.W_IS_TURNED: turned,
                    f.W_FLIPS: flips,
                    f.W_PACKED: packed,
                    f.W_SPOTS: len(meets),
                    f.W_MEETS: meets.ctypes.data,
                    f.BEGIN: begin,
                    f.WEIGHTS: _Given("weight", n),
                    f.W_STEP_O: _Given("step_o", n),
                    f.W_STEP_C: _Given("step_c", n),
                    f.W_STEP_T: _Given("step_t", n),
                },
                (layer.weight.scale, layer.weight.min_code, layer.weight.max_code),
            )
        )
        return {"WEIGHTS": packed, "BEGIN": begin}

    def _backward(self) -> list[list[_Operation]]:
        segment = self.segment
        regions: list[list[_Operation]] = [[]]
        fresh: set[int] = set()  # values whose sums the open region adds up
        gradients = {i: _Buffer(2 * self.images * shape.padded) for i, shape in self.shapes.items()}
        widest = max(shape.channels for shape in self.shapes.values())
        sums = {i: self._take(self.images * 3 * widest, np.float64) for i in self.shapes}
        made_by = segment.made_by
        for step in segment.backward(self.needs_input):
            if isinstance(step, Return):
                if step.pooled is not None:
                    regions[-1].append(self._unpool(step.pooled, step.value, gradients))
                regions[-1].append(self._finish(step, gradients, sums, widest))
                if step.is_last:
                    fresh.add(step.value)
                continue
            n, i = step, made_by[step]
            if i in fresh:
                regions.append([])
                fresh.clear()
            which = 1 + segment.values[i].layers.index(n)
            regions[-1] += self._gradient(n, which, gradients[i], sums[i], widest)
            if self._needs_weights[n]:
                regions[-1].append(self._weight_product(n))
            if segment.layers[n].source != INPUT or self.needs_input:
                regions[-1] += self._input_products(n)
        return regions

    def _finish(
        self, step: Return, gradients: dict[int, _Buffer], sums: dict[int, int], widest: int
    ) -> _Operation:
        i, shape = step.value, self.shapes[step.value]
        waits = [gradients[i]] if step.continues else []
        waits += [gradients[k] for k in step.added]
        more: dict[str, _Number] = dict(zip(("ADD", "ADD2"), waits, strict=False))
        more["OUT"] = gradients[i]
        if step.outer:
            more["OUTER"] = _Given("dy", i)
        if step.layer is not None:
            mask = self._clip[step.layer]
            more |= {"HAS_PRODUCT": 1, "CLIP_MASK": 0 if mask is None else mask}
            if self.observes:
                more["SEEN"] = _Given("seen gradient", step.layer)
        elif step.pooled is not None:
            more["HAS_PRODUCT"] = 1
        if step.is_last and i == INPUT:
            more |= {"OUT": 0, "OUTER_OUT": _Given("dx", 0)}
        elif step.is_last and self.segment.values[i].layers:
            terms = ("FIRST", "Z"), ("SECOND", "Z2")
            for (kind, place), n in zip(terms, self.segment.values[i].layers, strict=False):
                if self._term(n) == f.BFLOAT16:
                    more |= {kind: f.BFLOAT16, place: self._z[n]}
            more |= {"SUMS": sums[i], "SUMS_STRIDE": widest}
            if i in self._relu:
                more["RELU_MASK"] = self._relu[i]
        return _Operation(
            self._of(shape, f.FINISH, **more),
            bytes_an_image=10 * shape.padded,
            scratch={4: 12 * shape.pattern, 3: 4 * shape.padded},
        )

    def _gradient(
        self, n: int, which: int, gradient: _Number, sums: int, widest: int
    ) -> list[_Operation]:
        layer, out = self.segment.layers[n], self.outs[n]
        places = [self._take(out.pattern, np.float32) for _ in range(3)]
        step = -(out.elements // -f.NOISE_BLOCK) * f.NOISE_BLOCK
        coefficients = self._of(
            out,
            f.GRADIENT_COEFFICIENTS,
            HAS_NORM=layer.eps is not None,
            SUMS=sums,
            SUMS_STRIDE=widest,
            WHICH=which,
            MEANS=self.means[n],
            INVERSES=self.inverses[n],
            SCALE=_Given("scale", n),
            OF_SCALE=_Given("of_scale", n),
            OF_SHIFT=_Given("of_shift", n),
            **dict(zip(("GA", "GB", "GC"), places, strict=True)),
        )
        codes = self._of(
            out,
            f.GRADIENT,
            FIRST=self._term(n),
            G=gradient,
            Z=self._z[n] if layer.eps is not None else 0,
            POWERS=self._exponents,
            WEIGHT_FL=layer.weight.fl,
            CODES_STEP=step,
            SEED=_Given("seed", n),
            STREAM=_Given("stream", n),
            **dict(zip(("GA", "GB", "GC"), places, strict=True)),
        )
        return [
            _Operation(coefficients),
            _Operation(codes, bytes_an_image=6 * out.padded + step, scratch={1: 4 * step, 2: step}),
        ]

    def _weight_product(self, n: int) -> _Operation:
        layer, out = self.segment.layers[n], self.outs[n]
        taken = self.shapes[layer.source]
        part = shapes.forward(layer.window, taken[1:], layer.shape[2:])

        def details(chunk: int) -> jobs.Described:
            grain = 0 if layer.inputs.signed else GRAINS[self.path]
            cut = blocks(part, chunk, taken[1:], taken.channels, 1, jobs.PIECE - 4096, grain)
            if cut.most_positions > jobs.PIECE:
                raise ValueError(f"rows of {taken.width} places are too long to be fused")
            own = jobs.describe_weights(cut, part, out.channels, layer.inputs.signed)
            own.row[jobs.X_IMAGE] = taken.padded
            own.row[jobs.GRAD_IMAGE] = -(out.elements // -f.NOISE_BLOCK) * f.NOISE_BLOCK
            return own

        return _Operation(
            self._of(out, f.WEIGHT_PRODUCT, X=self.codes[n], TOTALS=self.totals[n]),
            details=details,
            bytes_an_image=taken.padded,
        )

    def _input_products(self, n: int) -> list[_Operation]:
        layer, out = self.segment.layers[n], self.outs[n]
        taken = self.shapes[layer.source]
        size = taken.height, taken.width
        parts = shapes.input_gradient(layer.window, size, layer.shape[2:])
        step = -(out.elements // -f.NOISE_BLOCK) * f.NOISE_BLOCK
        covered = shapes.covers(parts, size)
        found = []
        for k, part in enumerate(parts):
            row, column = 4 * taken.width * taken.channels, 4 * taken.channels
            place = part.first[0] * row + part.first[1] * column

            def details(
                chunk: int, part: Correlation = part, row: int = row, column: int = column
            ) -> jobs.Described:
                cut = blocks(part, chunk, out[1:], out.channels, 1, grain=GRAINS[self.path])
                every = 4 * taken.padded, row, column, taken.channels
                kind = tiles.KINDS["float32 by row"]
                own = runs(cut, GRAINS[self.path])
                described = jobs.describe_outputs(cut, own, part, every, 4, kind, True)
                described.row[jobs.X_IMAGE] = step
                return described

            numbers = self._of(
                taken,
                f.INPUT_PRODUCT,
                POWERS=self._exponents,
                OUT=place,
                ZEROES=k == 0 and not covered,
                **self._weights_at(n, part, out, taken.channels, True),
            )
            groups = -(taken.channels // -16)
            found.append(
                _Operation(
                    numbers,
                    details=details,
                    bytes_an_image=4 * taken.padded,
                    scratch={3: 4 * taken.padded, 5: groups * 384},
                )
            )
        return found

    # ------------------------------------------------------------------ rows of numbers

    _TAKE = (2, 3)  # parts of a thread's memory of which each image has its own

    def _finished(self, regions: list[list[_Operation]]) -> Pass:
        regions = [region for region in regions if region]
        operations, found, details = [], [], []
        for region in regions:
            bytes_an_image = max(sum(op.bytes_an_image for op in region), 1)
            most = -(self.images // -self.threads)
            chunk = max(1, min(most, _CACHE // bytes_an_image))
            found.append(Region(len(operations), len(operations) + len(region), chunk))
            sums = 0
            for op in region:
                own = None if op.details is None else op.details(chunk)
                details.append(own)
                if own is not None:
                    self._places[0] = max(self._places[0], int(own.row[jobs.WORK_BYTES]) + 64)
                    self._hold.append(own)
                if op.numbers[f.KIND] == f.WEIGHT_PRODUCT and own is not None:
                    op.numbers[f.SUMS] = sums
                    sums += -(int(own.row[jobs.SUMS_SIZE]) * 4 // -64) * 64
                for part, size in op.scratch.items():
                    times = chunk if part in self._TAKE else 1
                    self._places[part] = max(self._places[part], size * times)
            self._places[6] = max(self._places[6], sums)
            operations += region
        self._place_buffers(operations, found)
        rows = np.zeros((len(operations), jobs.FIELDS), np.int64)
        for row, own in zip(rows, details, strict=True):
            if own is not None:
                row[:] = own.row
        table, reals, addresses = _table(operations)
        tasks, task_reals, task_addresses = _table(self._tasks)
        self._tasks = []
        return Pass(table, reals, rows, found, addresses, tasks, task_reals, task_addresses)

    def _place_buffers(self, operations: list[_Operation], regions: list[Region]) -> None:
        """Give buffers memory; those that are never needed together share it."""
        used: dict[_Buffer, None] = {}
        for k, region in enumerate(regions):
            for op in operations[region.begin : region.end]:
                for number in op.numbers.values():
                    if isinstance(number, _Buffer):
                        number.first, number.last = min(number.first, k), max(number.last, k)
                        used[number] = None
        free: list[tuple[int, int]] = []  # size and address
        for k in range(len(regions)):
            for buffer in (b for b in used if b.first == k):
                fitting = [place for place in free if place[0] >= buffer.size]
                if fitting:
                    place = min(fitting)
                    free.remove(place)
                else:
                    place = buffer.size, self._take(buffer.size)
                buffer.size, buffer.address = place
            free += [(b.size, b.address) for b in used if b.last == k]

    def _make_scratch(self) -> None:
        sizes = [-(size // -64) * 64 + 64 for size in self._places]
        begins = np.cumsum([0, *sizes])
        self.places = begins[:7].astype(np.int64)
        self.scratch_bytes = int(begins[-1])
        self.scratch = self._take(self.scratch_bytes * self.threads)
        largest = max(math.prod(layer.shape) for layer in self.segment.layers)
        self.spare_bytes = largest + 128
        self.spare = self._take(self.spare_bytes * self.threads)


class _Forward:
    """Operations in order: a value is made when something first takes it.

    What needs a layer's statistics begins a region: they are sums over all images.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.segment = program, program.segment
        self.regions: list[list[_Operation]] = [[]]
        self._fresh: set[int] = set()  # layers whose sums the open region adds up
        self._ys: dict[int, _Number] = {}

    def multiply(self, n: int) -> None:
        """Compute what a layer makes."""
        self.regions[-1].append(self.program._product(n))
        if self.segment.layers[n].eps is not None:
            self._fresh.add(n)

    def make(self, i: int) -> None:
        """Make a value, unless it is there."""
        if i in self._ys:
            return
        if i != INPUT:
            self._prepare(i)
        self._ys[i] = self._place(i)
        self.regions[-1] += self.program._value(i, self._ys[i], self._ys)

    def _prepare(self, i: int) -> None:
        value = self.segment.values[i]
        if isinstance(value, Pooled):
            self.make(value.source)
            return
        if value.other_value is not None:
            self.make(value.other_value)
        if not self._fresh.isdisjoint(value.layers):
            self.regions.append([])
            self._fresh.clear()
        self.regions[-1] += [self.program._coefficients(n) for n in value.layers]

    def _place(self, i: int) -> _Number:
        if i == INPUT:
            return _Given("x", 0)
        if self.segment.values[i].is_output:
            return _Given("y", i)
        if self.program.observes and self.segment.takers(i):
            return _Given("seen", i)
        value = self.segment.values[i]
        if isinstance(value, Pooled) or self.segment.users(i) > len(self.segment.takers(i)[:1]):
            return _Buffer(4 * self.program.images * self.program.shapes[i].padded)
        return 0


def _table(operations: list[_Operation]) -> tuple[np.ndarray, np.ndarray, Addresses]:
    table = np.zeros((len(operations), f.COUNT), np.int64)
    reals = np.array([op.reals for op in operations], np.float32).reshape(-1, 3)
    kept: list[tuple[int, int, int]] = []
    given: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for k, op in enumerate(operations):
        for place, number in op.numbers.items():
            if isinstance(number, _Kept):
                kept.append((k, place, number.offset))
            elif isinstance(number, _Given):
                given.setdefault((number.name, number.number), []).append((k, place))
            elif isinstance(number, _Buffer):
                table[k, place] = number.address
            else:
                table[k, place] = number
    rows, places, offsets = np.array(kept, np.int64).reshape(-1, 3).T
    return table, reals, Addresses((rows, places, offsets), given)


def _check_sums(layer: Layer, part: Correlation, taken: Shape) -> None:
    """Refuse a layer whose sums int32, or the sums of their squares int64, could not hold."""
    largest = 255 * 128 * math.prod(layer.shape[1:])
    cut: Blocks = blocks(part, 1, taken[1:], taken.channels, 1)
    if 4 * largest >= 2**31 or largest**2 * cut.most_positions >= 2**63:
        raise ValueError(f"sums of {math.prod(layer.shape[1:])} products are too long to be fused")
