"""What a program knows before its operations: sizes, formats and places in memory."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fixedpoint_kernels.fused import fields as f
from fixedpoint_kernels.fused.graph import INPUT, Joined, Layer, Norm, Scaled, Segment
from fixedpoint_kernels.fused.operations import Buffer, Given, Kept, Number, Operation
from fixedpoint_kernels.fused.powers import Powers
from fixedpoint_kernels.products import weight_jobs
from fixedpoint_kernels.products.blocks import Blocks, blocks, runs
from fixedpoint_kernels.products.instructions import FLIPS, GRAINS
from fixedpoint_kernels.products.shapes import Correlation, forward
from fixedpoint_kernels.products.spans import Spans, spans
from fixedpoint_kernels.products.spots import spots
from fixedpoint_kernels.scratch import new_bytes

__all__ = ["Layout", "Shape"]

_BLOCK = 64
_POSITIONS = 2**13  # of a job for weights: they are laid out in 16 lines or more, in a cache
LEAST_BY_OUTPUTS = 2**16  # elements of a weight: fewer stay in a cache for each thread
MOST_BY_OUTPUTS = 2**15  # positions: each thread lays out all of them


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


class WeightSums:
    """Where threads add up a layer's weight gradient: int32, and float64 for what int32 cannot hold.

    The float64 are touched where they are needed alone: a weight's gradient mostly fits.

    Args:
        layout: Whose memory it is.
        n: Number of a layer whose weight needs a gradient.

    Attributes:
        held: Address of (threads, 3) float64: see ``sums.fold``.
        sums: Each thread's int32, ``stride`` bytes apart: by tap, input and output, each of
            the last two up to a multiple of 16; behind them a row of what flipped codes must lose.
        totals: As many float64 of each thread, but for that row.
        is_flipped: Whether codes were unsigned only there.
    """

    def __init__(self, layout: "Layout", n: int) -> None:
        outputs, _, height, width = layout.segment.product(n).shape
        columns = -(outputs // -16) * 16
        read = layout.read(n)
        rows = weight_jobs.sum_rows(height * width, read)
        size = rows * columns
        room = (
            4 * weight_jobs.sums_size(rows, columns // 16) + 64
        )  # clearing writes up to 63 bytes more
        self.stride, threads = -(room // -64) * 64, layout.threads
        self.held = layout.take(3 * threads, np.float64)
        self.sums, self.totals = Buffer(threads * self.stride), Buffer(8 * threads * size)
        self.is_flipped = layout.flips(n)


class Layout:
    """Sizes of a segment's layers and values, and where they lie.

    Args:
        As of ``Program``.

    Attributes:
        infers: Whether nothing goes backward, and batch norm's factors are known before.
    """

    infers = False

    def __init__(  # noqa: PLR0913
        self,
        segment: Segment,
        images: int,
        size: tuple[int, int],
        path: str,
        threads: int,
        needs_input: bool,
        needs_weights: Sequence[bool],
        observes: bool,
    ) -> None:
        self.segment, self.images, self.path, self.threads = segment, images, path, threads
        self.needs_input, self.needs_weights, self.observes = needs_input, needs_weights, observes
        self.shown = [
            i
            for i, value in enumerate(segment.values)
            if observes and not value.is_output and segment.takers(i)
        ]
        self.shapes = {i: Shape(*found) for i, found in segment.sizes(size).items()}
        self.outs = [self.shapes[segment.made_by[n]] for n in range(len(segment.layers))]
        self.kept_bytes = 0
        self.held: list[object] = []  # arrays whose addresses operations have
        self.tasks: list[Operation] = []  # weights to be laid out
        self.pooled: dict[int, tuple[Number, Number]] = {}  # windows, and what they took
        self.powers = list(map(self._powers_of, segment.layers, self.outs))
        self._allocate()

    def taken(self, n: int) -> Shape:
        """Return the shape of what layer ``n`` takes: of a linear layer, channels of one place."""
        layer = self.segment.product(n)
        shape = self.shapes[layer.source]
        return Shape(shape.elements, 1, 1) if layer.is_flat else shape

    def read(self, n: int, turned: bool = False) -> Spans:
        """Return which channels of what layer ``n`` takes its outputs read; turned, backward."""
        inputs, outputs = self.taken(n).channels, self.outs[n].channels
        if turned:
            inputs, outputs = outputs, inputs
        layer = self.segment.product(n)
        return spans(inputs, outputs, layer.window.groups, math.prod(layer.shape[2:]))

    def flips(self, n: int) -> bool:
        """Say whether codes that layer ``n`` takes are unsigned only where they are multiplied."""
        is_signed = self.segment.product(n).inputs.signed
        return bool(FLIPS[self.path]) and is_signed and not self.read(n).is_alone

    def weight_blocks(self, n: int, images: int) -> tuple[Correlation, Blocks]:
        """Return what layer ``n`` computes, and blocks of ``images`` images for its weight's gradient."""
        layer, taken = self.segment.product(n), self.taken(n)
        part = forward(layer.window, taken[1:], layer.shape[2:])
        grain = 0 if layer.inputs.signed else self.grain(n)
        return part, blocks(part, images, taken[1:], taken.channels, 1, _POSITIONS, grain)

    def goes_by_outputs(self, n: int) -> bool:
        """Say whether threads share the gradient of layer ``n``'s weight by outputs; see ``by_outputs``."""
        outputs, inputs, height, width = self.segment.product(n).shape
        part, cut = self.weight_blocks(n, self.images)
        positions = self.images * cut.slot_rows * cut.columns
        return (
            self.read(n).groups == 1
            and outputs % 16 == inputs % 16 == 0
            and -(outputs // -32) >= self.threads
            and outputs * inputs * height * width >= LEAST_BY_OUTPUTS
            and cut.band == part.counts[0]
            and positions <= MOST_BY_OUTPUTS
        )

    def grain(self, n: int) -> int:
        """Return bytes of a row that a tile takes at a time, if layer ``n`` may go place by place."""
        return GRAINS[self.path] if self.segment.product(n).window.groups == 1 else 0

    def _powers_of(self, layer: Layer | Norm, out: Shape) -> Powers:
        multiplies = isinstance(layer, Layer)
        formats = (layer.inputs, layer.weight) if multiplies else None
        rest = multiplies and layer.by_channel, out.channels, out.pattern, self.array
        return Powers(formats, *rest)

    def array(self, count: int, dtype: type = np.uint8) -> np.ndarray:
        """Return an array of the program's own, of zeros, at a multiple of 64 bytes."""
        memory = new_bytes(count * np.dtype(dtype).itemsize, np.zeros)
        self.held.append(memory)
        return memory.view(dtype)

    def take(self, count: int, dtype: type = np.uint8) -> int:
        """Return the address of an array of the program's own."""
        return self.array(count, dtype).ctypes.data

    def keep(self, size: int) -> Kept:
        """Return a place in the memory that forward leaves for backward."""
        offset, self.kept_bytes = self.kept_bytes, self.kept_bytes - (-size // 64) * 64
        return Kept(offset)

    def _allocate(self) -> None:
        n, segment = self.images, self.segment
        self.codes: Sequence[Number] = [
            self.keep(n * self.shapes[own.source].padded) if isinstance(own, Layer) else 0
            for own in segment.layers
        ]
        self.clip: Sequence[Kept | None] = [
            self.keep(n * self.shapes[layer.source].padded // 8)
            if self._wants_mask(layer)
            else None
            for layer in segment.layers
        ]
        again = segment.computed_again
        # what batch norm takes, as bfloat16, and its sums
        self.wide = {i: self._wide_of(i) for i in sorted(segment.normed)}
        self.moments = {
            i: self.take(2 * n * self.shapes[i].channels, np.float64) for i in self.wide
        }
        self.sums: list[Number] = [self._sums_of(i, i in again) for i in range(len(segment.layers))]
        self.gates = {
            value.gate: self.keep(4 * n * self.shapes[value.gate].padded)
            for value in segment.values
            if isinstance(value, Scaled)
        }
        self.relu = {
            i: self.keep(n * self.shapes[i].padded // 8)
            for i, value in enumerate(segment.values)
            if value.relu and not self.shares_mask(i)
        }
        self.means, self.inverses, self.variances = (
            [self.keep(8 * out.channels) for out in self.outs] for _ in range(3)
        )
        sizes = [self.threads * -(out.channels // -16) * 384 for out in self.outs]
        self.statistics = self.array(sum(sizes))
        self.statistics_at = [
            self.statistics.ctypes.data + sum(sizes[:n]) for n in range(len(sizes))
        ]
        self.factors: Sequence[Sequence[Kept | int]] = [
            [self.keep(4 * out.pattern) if i in again else self.take(4 * out.pattern) for _ in "ab"]
            for i, out in enumerate(self.outs)
        ]
        self.norms = np.zeros((len(segment.layers), 2))  # eps, momentum
        self.momenta = self.norms[:, 1]
        self.clamped = np.zeros((len(segment.layers), self.threads), np.int64)
        self.lsbs = np.array(
            [own.inputs.lsb if isinstance(own, Layer) else 0.0 for own in segment.layers],
            np.float32,
        )
        self.exponents = self.take(n, np.float32)
        self.weight_sums = [
            WeightSums(self, i) if needed and not self.goes_by_outputs(i) else None
            for i, needed in enumerate(self.needs_weights)
        ]

    def _wide_of(self, i: int) -> Kept | Buffer:
        size = 2 * self.images * self.shapes[i].padded
        return self.keep(size) if self.segment.norms(i) else Buffer(size)

    def _sums_of(self, n: int, again: bool) -> Kept | Buffer:
        layer, size = self.segment.layers[n], self.images * self.outs[n].padded
        if isinstance(layer, Norm):
            return self.wide[layer.source]
        if layer.eps is not None:
            return self.keep(2 * size)
        return self.keep(4 * size) if again else Buffer(4 * size)

    def _wants_mask(self, layer: Layer | Norm) -> bool:
        if isinstance(layer, Norm) or (layer.source == INPUT and not self.needs_input):
            return False
        return layer.clip or self.shares_mask(layer.source)

    def shares_mask(self, i: int) -> bool:
        """Say whether one mask tells both what was below 0 and what was clamped."""
        if i == INPUT:
            return False
        value = self.segment.values[i]
        return len(self.segment.takers(i)) == self.segment.users(i) == 1 and not value.is_output

    def numbers(self, shape: Shape, kind: int, **more: Number) -> dict[int, Number]:
        """Return the numbers of an operation of a kind, with ``more`` by their names in ``fields``."""
        numbers: dict[int, Number] = {
            f.KIND: kind,
            f.CHANNELS: shape.channels,
            f.ELEMENTS: shape.elements,
            f.PADDED: shape.padded,
            f.PATTERN: shape.pattern,
            f.POSITIONS: self.images * shape.height * shape.width,
        }
        return numbers | {getattr(f, name): number for name, number in more.items()}

    def gate_of(self, value: Scaled) -> dict[str, Number]:
        """Return where the gate of a value is."""
        step = 4 * self.shapes[value.gate].padded
        return {"GATE": self.gates[value.gate], "GATE_STEP": step}

    def place_in(self, i: int, source: int) -> dict[str, Number]:
        """Return where a value is among the channels of joined value ``i``, and how many zeros are beside it."""
        value, whole = self.segment.values[i], self.shapes[i]
        assert isinstance(value, Joined)
        before = value.sources[: value.sources.index(source)]
        names = "J_CHANNELS", "J_FIRST", "J_PADDED", "J_WIDTH", "J_DOWN", "J_ACROSS"
        first = value.zeros[0] + sum(self.shapes[k].channels for k in before)
        numbers = whole.channels, first, whole.padded, self.shapes[source].width, *value.times
        return {
            **dict(zip(names, numbers, strict=True)),
            "J_BEFORE": 0 if before else value.zeros[0],
            "J_BEHIND": value.zeros[1] if source == value.sources[-1] else 0,
        }

    def kind_of_sums(self, n: int) -> int:
        """Return as what a layer's sums are kept."""
        return f.BFLOAT16 if self.has_statistics(n) else f.FLOAT32

    def has_statistics(self, n: int) -> bool:
        """Say whether batch norm takes the statistics of what a layer makes."""
        return self.segment.layers[n].eps is not None

    def weight_sizes(self, n: int) -> dict[int, int]:
        """Return the sizes of a weight: outputs, inputs of a group and places, also those of a linear layer."""
        layer = self.segment.product(n)
        outputs, inputs, height, width = layer.shape
        if layer.is_flat:
            inputs, height, width = self.shapes[layer.source]
        sizes = {f.W_OUTPUTS: outputs, f.W_INPUTS: inputs, f.W_TAPS: height * width}
        read = self.read(n)
        self.held.append(read)
        rows = weight_jobs.sum_rows(height * width, read)
        sizes |= {f.W_GROUPS: read.groups, f.W_IS_ALONE: read.is_alone, f.W_ROWS: read.rows}
        sizes |= {f.W_SUM_ROWS: rows}
        return sizes | {f.W_STARTS: read.starts.ctypes.data, f.W_IS_FLAT: layer.is_flat}

    def weights_at(
        self, n: int, part: Correlation, taken: Shape, columns: int, turned: bool
    ) -> dict[str, Number]:
        """Make room for packed weights, and note how to lay them out.

        Args:
            n: Number of the layer.
            part: What they are multiplied by.
            taken: Shape of what goes into the product.
            columns: Channels that come out.
            turned: Whether outputs and inputs change places, as backward.
        """
        layer = self.segment.product(n)
        cut = blocks(part, 1, (taken.height, taken.width), taken.channels, 1)
        read = self.read(n, turned)
        found = runs(cut, GRAINS[self.path], read)
        groups = -(columns // -16)
        packed = self.take(groups * 16 * found.depth + 64)
        own = spots(part, (taken.height, taken.width), taken.channels, self.grain(n))
        meets = np.empty((0, 0), np.uint8) if own is None else own.meets
        begin = self.take((1 + len(meets)) * groups * 16, np.int32)
        numbers = np.array(part.taps, np.int64)
        self.held += [numbers, found, meets, read]
        flips = (turned or layer.inputs.signed) and FLIPS[self.path] and not read.is_alone
        self.tasks.append(
            Operation(
                {
                    **self.weight_sizes(n),
                    f.W_FIRSTS: read.firsts.ctypes.data,
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
                    f.W_SCALES: self.powers[n].of_weights,
                    f.WEIGHTS: Given("weight", n),
                    f.W_STEP_O: Given("step_o", n),
                    f.W_STEP_C: Given("step_c", n),
                    f.W_STEP_T: Given("step_t", n),
                },
                (layer.weight.scale, layer.weight.min_code, layer.weight.max_code),
            )
        )
        return {"WEIGHTS": packed, "BEGIN": begin}
