"""From a segment and a number of samples and tokens to rows of numbers that one kernel runs.

A thread takes the rows of a few samples through all operations, forward and then backward; between
operations values lie in its own memory, which others take when nobody needs them any more. Gradients
of weights come last: they are sums over all samples.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fixedpoint_kernels.dropout import Odds
from fixedpoint_kernels.functions import number_of
from fixedpoint_kernels.fused import fields as w
from fixedpoint_kernels.fused.memory import Memory, bytes_of
from fixedpoint_kernels.fused.powers import Powers
from fixedpoint_kernels.fused.stamp import Stamp
from fixedpoint_kernels.fused.weights import packing_items, spare_bytes
from fixedpoint_kernels.llvm.tiles import kind_of_bytes
from fixedpoint_kernels.products import by_outputs, jobs, weight_jobs
from fixedpoint_kernels.products.blocks import blocks
from fixedpoint_kernels.products.instructions import FLIPS, GRAINS
from fixedpoint_kernels.products.shapes import GRADIENTS, PIECE, Window, forward, steps_in_int16
from fixedpoint_kernels.products.spans import spans
from fixedpoint_kernels.scratch import new_bytes
from fixedpoint_kernels.tokens import fields as f
from fixedpoint_kernels.tokens.graph import (
    Add,
    Attention,
    Curved,
    Cut,
    Dropout,
    Linear,
    Multiply,
    Norm,
    Operation,
    Part,
    Relu,
    Rotary,
    Segment,
)
from fixedpoint_kernels.tokens.reference import Parameters
from fixedpoint_kernels.tokens.rows import SPARE_ROWS, Given, Kept, Local, Number, Rows

__all__ = ["Packing", "Program"]

_CACHE = 2**18  # bytes of values that a thread works on at a time
_PIECE = 1024  # rows that are laid out at once for gradients of weights


class Packing(NamedTuple):
    """What lays out weights for one direction, see ``fused.weights``, and the layer of each task."""

    tasks: np.ndarray
    reals: np.ndarray
    items: np.ndarray
    layers: list[int]
    spare_bytes: int


class Program:
    """What runs a segment on samples of one number of tokens.

    Args:
        segment: What is computed.
        samples: How many.
        tokens: Of a sample.
        path: Of products, one of ``GRAINS``.
        threads: How many.
        needs_inputs: Whether the gradient of each value that comes in is wanted; nothing where no pass goes
            backward: then weights are not laid out for one.
        needs_weights: Whether that of each operation's weight is wanted; nothing where none is.
        memory: Shared with programs that never run at the same time; default: one of its own.
        observes: Whether what linear layers take is written too, and what comes back to each.

    Attributes:
        shown: Values that layers take and that are written for it.
        pack: Lays out weights for forward.
        pack_turned: Lays them out for backward, where a gradient goes on.
        stamp: Of the weights that are laid out for forward; None: of those of one call.
        held_bytes: Of the arrays that it has while it does not run.
    """

    def __init__(  # noqa: PLR0913
        self,
        segment: Segment,
        samples: int,
        tokens: int,
        path: str,
        threads: int,
        needs_inputs: Sequence[bool],
        needs_weights: Sequence[bool],
        memory: Memory | None = None,
        *,
        observes: bool = False,
    ) -> None:
        self.segment, self.samples, self.tokens = segment, samples, tokens
        self.observes, self.shown = observes, _taken(segment) if observes else set[int]()
        self.path, self.threads, self.rows = path, threads, samples * tokens
        self.needs_inputs, self._infers = tuple(needs_inputs), not needs_inputs
        self.needs_weights = tuple(needs_weights) or (False,) * len(segment.operations)
        self._flips, self._grain = FLIPS[path], GRAINS[path]
        self.widths, self._count = segment.widths(), len(segment.inputs)
        self._memory: list[np.ndarray] = []
        self.kept_bytes = 0
        self.chunk = self._chunk()
        self.chunks = -(samples // -self.chunk)
        self._allocate()
        forward, backward = self._forward(), Rows() if self._infers else self._backward()
        self._make_scratch(forward, backward)
        local = int(self.places[f.LOCAL])
        self.forward, self.backward = forward.finished(local), backward.finished(local)
        self._weights_tasks()
        self.memory = Memory() if memory is None else memory
        self.stamp: Stamp | None = None
        self.held_bytes = bytes_of(self._memory)

    def move(self, parameters: Sequence[Parameters]) -> bool:
        """Take the fractional bits of outputs, where layers have some of their own; say whether they changed."""
        changed = [own.move(parameters[i].shifts) for i, own in self.powers.items()]
        return any(changed)

    # ------------------------------------------------------------------ memory

    def _take(self, count: int, dtype: type = np.uint8) -> int:
        """Return the address of memory of the program's own, 0 at first."""
        return self._array(count, dtype).ctypes.data

    def _array(self, count: int, dtype: type) -> np.ndarray:
        """Return an array of the program's own, of zeros, at a multiple of 64 bytes."""
        size = count * np.dtype(dtype).itemsize
        memory = new_bytes(size + 64, np.zeros)  # kernels read behind it
        self._memory.append(memory)
        return memory[:size].view(dtype)

    def _hold(self, numbers: Sequence[float], dtype: type) -> int:
        """Return the address of an array of the program's own."""
        array = np.array(numbers, dtype)
        self._memory.append(array)
        return array.ctypes.data

    def _keep(self, size: int) -> Kept:
        offset, self.kept_bytes = self.kept_bytes, self.kept_bytes - (-size // 64) * 64
        return Kept(offset)

    def _bfloat16(self, count: int) -> Number:
        """Keep so many numbers where a pass goes backward."""
        return 0 if self._infers else self._keep(2 * count)

    def _chunk(self) -> int:
        """Return how many samples a thread takes at a time: the same for any number of threads."""
        widest = 4 * max(self.widths) * self.tokens
        return max(1, min(_CACHE // (2 * widest), self.samples // 8))

    def _allocate(self) -> None:
        n = self.rows
        self.codes, self.masks, self.inverses = {}, {}, {}
        self.extra: dict[int, Number] = {}
        self.others: dict[int, Number] = {}
        self.partial_width, self.partials = 0, {}
        self.partial_widths: list[int] = []  # of the sums in a row, as they follow each other
        self.packed: dict[int, tuple[int, ...]] = {}
        operations = self.segment.operations
        self.clamped = np.zeros((len(operations), self.threads), np.int64)
        self.scales, self.grad_codes = {}, {}
        self.powers: dict[int, Powers] = {}
        for i, op in enumerate(operations):
            width = self.widths[self._count + i]
            if isinstance(op, Linear):
                self.codes[i] = self._keep((n + SPARE_ROWS) * op.shape[1] + 64)
                if op.clip and self._needs_gradient(op.source):
                    self.masks[i] = self._keep(n * op.shape[1] // 8)
                self.partials[i] = (self._partial(width),)
                formats = op.inputs, op.weight
                self.powers[i] = Powers(formats, op.by_channel, width, width, self._array)
                self.packed[i] = self._room_of_weights(op)
                self.scales[i] = self._take(self.samples, np.float64)
                self.grad_codes[i] = self._take(n * width + 64)
            elif isinstance(op, Norm):
                size = op.size or width
                self.extra[i] = self._bfloat16(n * width)
                self.inverses[i] = self._keep(4 * n * (width // size))
                self.partials[i] = self._partial(size), self._partial(size)
            elif isinstance(op, Curved | Multiply):
                self.extra[i] = self._bfloat16(n * width)
                if isinstance(op, Multiply):
                    self.others[i] = self._bfloat16(n * width)
            elif isinstance(op, Relu | Dropout):
                self.extra[i] = self._keep(n * width // 8)
        attended = {s for op in operations if isinstance(op, Attention) for s in op.sources}
        self._made = {
            v: self._keep(4 * (n + SPARE_ROWS) * self.widths[v]) for v in sorted(attended)
        }
        self.partial_bytes = max(4 * self.partial_width, 64)
        self.partial = np.zeros((self.chunks, self.partial_bytes // 4), np.float32)
        most = max(self.widths)
        self.ones, self.zeros = (self._hold([x] * most, np.float32) for x in (1.0, 0.0))

    def _partial(self, width: int) -> int:
        start, self.partial_width = self.partial_width, self.partial_width + width
        self.partial_widths.append(width)
        return start

    def _room_of_weights(self, op: Linear) -> tuple[int, ...]:
        """Return addresses: weights, where sums start, and both turned; then both depths."""
        (outputs, inputs), grain = op.shape, self._grain
        depth, turned = (-(size // -grain) * grain for size in (inputs, outputs))
        return (
            self._take(outputs * depth + 64),
            self._take(outputs, np.int32),
            self._take(inputs * turned + 64),
            self._take(inputs, np.int32),
            depth,
            turned,
        )

    def _needs_gradient(self, v: int) -> bool:
        """Say whether a value's gradient is wanted: all that operations make has parameters before."""
        return not self._infers and (v >= self._count or self.needs_inputs[v])

    def _make_scratch(self, *directions: Rows) -> None:
        rows, most = self.chunk * self.tokens, max(self.widths)
        heads = [op.size for op in self.segment.operations if isinstance(op, Attention)]
        lines = (
            192 * (self.tokens + 8) + 2 * self.tokens
        )  # scores, their gradients and what is left of them; bits
        head = max([512 + 64 * size + lines for size in heads] or [0])
        local = max(direction.place(rows) for direction in directions)
        sizes = (
            (rows + SPARE_ROWS) * 128,
            (rows + SPARE_ROWS) * most + 1024,
            4 * rows + 64,
            head + 64,
            local + 4096,
        )
        sizes = [-(size // -64) * 64 for size in sizes]
        begins = np.cumsum([0, *sizes])
        self.places, self.scratch_bytes = begins[:5].astype(np.int64), int(begins[-1])

    # ------------------------------------------------------------------ forward

    def _forward(self) -> Rows:
        rows = Rows()
        where: dict[int, Number] = {i: Given("x", i) for i in range(self._count)}
        for i, op in enumerate(self.segment.operations):
            v = self._count + i
            leaves = v in self.segment.outputs or v in self.shown
            if v in self._made:
                where[v] = self._made[v]
            elif leaves:
                where[v] = Given("y", v)
            else:
                where[v] = rows.local(self.widths[v])
            self._do(rows, i, op, where)
            if leaves and v in self._made:
                more = self._operand("X", where[v], v) | self._operand("Y", Given("y", v), v)
                rows.add(f.PASS_ON, more | {"WIDTH": self.widths[v]})
        return rows

    def _operand(self, name: str, place: Number, v: int) -> dict[str, Number]:
        """Return where rows of a value are."""
        row = 0 if isinstance(place, Local) else 4 * self.widths[v]
        return {name: place, f"{name}_ROW": row}

    def _do(self, rows: Rows, i: int, op: Operation, where: dict[int, Number]) -> None:
        v = self._count + i
        more = self._operand("Y", where[v], v) | {"WIDTH": self.widths[v]}
        if isinstance(op, Attention):
            for name, part in zip("QKV", op.parts, strict=True):
                more |= self._part(name, where[part.value], part)
            more |= self._attending(op) | self._chance(i, op.odds)
            rows.add(f.ATTENTION, more, op.scale, _factor(op.odds))
            return
        if isinstance(op, Rotary):
            place = where[op.part.value]
            more |= self._part("Q", place, op.part) | self._operand("Q", place, op.part.value)
            rows.add(f.ROTARY, more | self._turning(i, op))
            return
        more |= self._operand("X", where[op.source], op.source)
        if isinstance(op, Linear):
            numbers = op.inputs.scale, op.inputs.min_code, op.inputs.max_code
            rows.add(f.LINEAR, more | self._multiplying(i, op), *numbers)
        elif isinstance(op, Norm):
            more |= {"SCALE": Given("first", i), "SHIFT": Given("second", i)}
            more |= self._normalizing(i, op)
            rows.add(f.NORM, more, op.size or self.widths[v], op.eps)
        elif isinstance(op, Add):
            rows.add(f.ADD, more | self._operand("OTHER", where[op.other], op.other))
        elif isinstance(op, Multiply):
            more |= self._operand("OTHER", where[op.other], op.other)
            rows.add(f.MULTIPLY, more | {"KEPT": self.extra[i], "OTHER_KEPT": self.others[i]})
        else:
            self._do_one(rows, i, op, more)

    def _do_one(
        self, rows: Rows, i: int, op: Cut | Curved | Dropout | Relu, more: dict[str, Number]
    ) -> None:
        if isinstance(op, Cut):
            rows.add(f.CUT, more | self._cutting(op))
        elif isinstance(op, Dropout):
            more |= self._chance(i, op.odds) | {"KEPT": self.extra[i]}
            rows.add(f.DROPOUT, more, op.odds.factor)
        elif isinstance(op, Curved):
            more |= {"KEPT": self.extra[i], "CURVE_NUMBER": number_of(op.curve)}
            rows.add(f.CURVE, more, op.curve.number)
        else:
            rows.add(f.RELU, more | {"KEPT": self.extra[i]})

    def _multiplying(self, i: int, op: Linear) -> dict[str, Number]:
        """Return what the products of a layer need to know."""
        weights, begin, _, _, depth, _ = self.packed[i]
        return self._tiles(weights, begin, depth, op.shape[1]) | {
            "DEPTH": op.shape[1],
            "CODES": self.codes[i],
            "MASK": self.masks.get(i, 0),
            "FLIP": 128 * self._is_flipped(op),
            "BYTES": kind_of_bytes(op.inputs.signed, steps_in_int16(op.inputs, op.weight)),
            "CLAMPED": self.clamped[i].ctypes.data,
            "BIAS": Given("second", i),
            "SUM_POWERS": self.powers[i].of_sums,
        }

    def _cutting(self, op: Cut) -> dict[str, Number]:
        """Return what a cut needs to know in both directions."""
        return {"Q_LINE": 4 * self.widths[op.source], "Q_START": 4 * op.start}

    def _attending(self, op: Attention) -> dict[str, Number]:
        """Return what a pass of attention needs to know in both directions."""
        return {"HEADS": op.heads, "SIZE": op.size, "CAUSAL": op.causal, "GROUPS": op.groups}

    def _normalizing(self, i: int, op: Norm) -> dict[str, Number]:
        """Return the same of a norm."""
        width = self.widths[self._count + i]
        size = op.size or width
        kept: dict[str, Number] = {"KEPT": self.extra[i], "INVERSE": self.inverses[i]}
        return kept | {"WIDTH": size, "HEADS": width // size, "CENTRED": op.centred}

    def _turning(self, i: int, op: Rotary) -> dict[str, Number]:
        """Return the same of a rotary embedding."""
        tables: dict[str, Number] = {"COS": Given("first", i), "SIN": Given("second", i)}
        sizes = {"HEADS": op.heads, "SIZE": op.size, "TURNED": op.turned}
        return tables | sizes | {"BY_SAMPLE": op.by_sample, "IN_PAIRS": op.in_pairs}

    def _chance(self, i: int, odds: Odds | None) -> dict[str, Number]:
        """Return what decides which numbers become 0."""
        if odds is None:
            return {}
        noise: dict[str, Number] = {"SEED": Given("seed", i), "STREAM": Given("stream", i)}
        return noise | {"THRESHOLD": odds.threshold}

    def _is_flipped(self, op: Linear) -> bool:
        return bool(self._flips and op.inputs.signed)

    def _tiles(self, weights: int, begin: int, depth: int, step: int) -> dict[str, Number]:
        """Return what tiles need to know of packed weights and of rows ``step`` bytes apart."""
        return {
            "WEIGHTS": weights,
            "BEGIN": begin,
            "GROUP_BYTES": 16 * depth,
            "RUNS": self._hold([0, depth // self._grain, 0], np.int64),
            "STARTS": self._hold([16 * step * i for i in range(4)], np.int64),
        }

    def _part(self, name: str, place: Number, part: Part) -> dict[str, Number]:
        """Return where queries, keys or values lie."""
        line = 4 * self.widths[part.value]
        own: dict[str, Number] = {name: place, f"{name}_ROW": line, f"{name}_LINE": line}
        return own | {f"{name}_START": 4 * part.start, f"{name}_STEP": 4 * part.step}

    # ------------------------------------------------------------------ backward

    def _backward(self) -> Rows:
        rows = Rows()
        self._back: dict[int, Number] = {}
        self._touched: set[int] = set()
        outputs = set(self.segment.outputs)
        for i in reversed(range(len(self.segment.operations))):
            v = self._count + i
            if v in outputs:
                to = self._contribute(rows, v, "Y") | {"WIDTH": self.widths[v]}
                rows.add(f.PASS_ON, to | self._operand("X", Given("dy", v), v))
            self._undo(rows, i, self.segment.operations[i])
        return rows

    def _contribute(self, rows: Rows, v: int, name: str, adds: str = "ADDS") -> dict[str, Number]:
        """Return where to write, or add to, a value's gradient."""
        if v not in self._back:
            is_input = v < self._count
            self._back[v] = Given("dx", v) if is_input else rows.local(self.widths[v])
        found = self._operand(name, self._back[v], v) | {adds: v in self._touched}
        self._touched.add(v)
        return found

    def _undo(self, rows: Rows, i: int, op: Operation) -> None:
        v = self._count + i
        more = self._operand("X", self._back[v], v) | {"WIDTH": self.widths[v]}
        if isinstance(op, Attention):
            self._undo_attention(rows, i, op, more)
        elif isinstance(op, Rotary):
            self._undo_rotary(rows, i, op, more)
        elif isinstance(op, Linear):
            self._undo_linear(rows, i, op, more)
        elif isinstance(op, Norm):
            needed = self._needs_gradient(op.source)
            more |= self._contribute(rows, op.source, "Y") if needed else {"Y": -1}
            more |= self._normalizing(i, op) | {"SCALE": Given("first", i)}
            more |= dict(zip(("SUMS", "SUMS2"), self.partials[i], strict=True))
            rows.add(f.NORM_BACKWARD, more, op.size or self.widths[v])
        elif isinstance(op, Add | Multiply):
            self._undo_pair(rows, i, op, more)
        elif self._needs_gradient(op.source):
            self._undo_one(rows, i, op, more)

    def _undo_one(
        self, rows: Rows, i: int, op: Cut | Curved | Dropout | Relu, more: dict[str, Number]
    ) -> None:
        if isinstance(op, Cut):
            self._blank(rows, [(Part(op.source, op.start, 0), 1)], op.width)
            to = self._contribute(rows, op.source, "Y")
            rows.add(f.CUT_BACKWARD, more | to | self._cutting(op))
            return
        more |= self._contribute(rows, op.source, "Y") | {"KEPT": self.extra[i]}
        if isinstance(op, Curved):
            more["CURVE_NUMBER"] = number_of(op.curve)
            rows.add(f.CURVE_BACKWARD, more, op.curve.number)
        elif isinstance(op, Dropout):
            rows.add(f.DROPOUT_BACKWARD, more, op.odds.factor)
        else:
            rows.add(f.RELU_BACKWARD, more)

    def _undo_pair(self, rows: Rows, i: int, op: Add | Multiply, more: dict[str, Number]) -> None:
        factors = self.others.get(i, 0), self.extra.get(i, 0)  # of a product: the other number
        for source, kept in zip(op.sources, factors, strict=True):
            if not self._needs_gradient(source):
                continue
            to = self._contribute(rows, source, "Y")
            if isinstance(op, Add):
                rows.add(f.PASS_ON, more | to)
            else:
                rows.add(f.MULTIPLY_BACKWARD, more | to | {"OTHER_KEPT": kept})

    def _undo_linear(self, rows: Rows, i: int, op: Linear, more: dict[str, Number]) -> None:
        goes_on = self._needs_gradient(op.source)
        seen = Given("seen gradient", i)
        if goes_on or self.observes:
            _, _, turned, begin, _, depth = self.packed[i]
            more |= self._tiles(turned, begin, depth, op.shape[0])
            more["BYTES"] = kind_of_bytes(True, steps_in_int16(GRADIENTS, op.weight))
        if self.observes:
            more |= self._operand("Y", seen, op.source)
        elif goes_on:
            more |= self._contribute(rows, op.source, "Y")
        more |= {
            "DEPTH": op.shape[1],
            "MASK": self.masks.get(i, 0),
            "SUMS": self.partials[i][0],
            "GRAD_CODES": self.grad_codes[i],
            "SCALES": self.scales[i],
            "WEIGHT_FL": op.weight.fl,
            "SEED": Given("seed", i),
            "STREAM": Given("stream", i),
            "SECOND_STREAM": Given("second stream", i),
            "FACTORS": self.powers[i].of_gradients,
        }
        rows.add(f.LINEAR_BACKWARD, more)
        if self.observes and goes_on:
            more = self._operand("X", seen, op.source) | self._contribute(rows, op.source, "Y")
            rows.add(f.PASS_ON, more | {"WIDTH": op.shape[1]})

    def _undo_attention(self, rows: Rows, i: int, op: Attention, more: dict[str, Number]) -> None:
        self._blank(rows, op.heads_of_parts, op.size)
        touched = set(self._touched)
        adds = {"Q": "ADDS", "K": "DK_ADDS", "V": "DV_ADDS"}
        for name, part in zip("QKV", op.parts, strict=True):
            more |= self._part(name, self._made[part.value], part)
            more |= self._contribute(rows, part.value, f"D{name}", adds[name])
            more[adds[name]] = part.value in touched  # three parts of one value are apart
        more |= self._attending(op) | self._chance(i, op.odds)
        rows.add(f.ATTENTION_BACKWARD, more, op.scale, _factor(op.odds))

    def _undo_rotary(self, rows: Rows, i: int, op: Rotary, more: dict[str, Number]) -> None:
        v = op.part.value
        self._blank(rows, [(op.part, op.heads)], op.size)
        more |= self._part("Q", 0, op.part) | self._contribute(rows, v, "DQ")
        rows.add(f.ROTARY_BACKWARD, more | self._turning(i, op))

    def _blank(self, rows: Rows, parts: Sequence[tuple[Part, int]], size: int) -> None:
        """Fill gradients of values with 0 that nobody has touched, and whose features heads do not cover once each."""
        for v in dict.fromkeys(part.value for part, _ in parts):
            covered = np.zeros(self.widths[v], np.int64)
            for part, heads in parts:
                for head in range(heads if part.value == v else 0):
                    covered[part.start + head * part.step :][:size] += 1
            if v not in self._touched and not (covered == 1).all():
                to = self._contribute(rows, v, "Y") | {"WIDTH": self.widths[v]}
                rows.add(f.BLANK, to)

    # ------------------------------------------------------------------ weights

    def _weights_tasks(self) -> None:
        """Describe what lays out weights, and what adds up their gradients."""
        linear = [(i, op) for i, op in enumerate(self.segment.operations) if isinstance(op, Linear)]
        self.linear = [i for i, _ in linear]
        self.layers = np.zeros((len(linear), f.COUNT), np.int64)
        self.lsbs = np.array([op.inputs.lsb for _, op in linear], np.float32)
        for k, (i, op) in enumerate(linear):
            own = self.scales[i], self.grad_codes[i], self.lsbs.ctypes.data + 4 * k
            self.layers[k, [f.SCALES, f.GRAD_CODES, f.LSB]] = own
            self.layers[k, f.LIES] = 2 if op.is_turned else 0
        turned = [(i, op) for i, op in linear if self.observes or self._needs_gradient(op.source)]
        self.pack, self.pack_turned = self._packing(linear, False), self._packing(turned, True)
        self._share_weights(linear)

    def _packing(self, linear: Sequence[tuple[int, Linear]], is_turned: bool) -> Packing:
        """Describe what lays out weights, as they are or turned."""
        first, tasks, reals = self._hold([0], np.int64), [], []
        start = 2 * is_turned
        for i, op in linear:
            outer, inner = reversed(op.shape) if op.is_turned else op.shape
            d = np.zeros(w.COUNT, np.int64)
            d[[w.W_OUTPUTS, w.W_INPUTS]] = outer, inner
            d[[w.W_TAPS, w.W_PART_TAPS, w.W_GROUPS, w.W_STEP_C, w.W_STEP_T]] = 1
            d[[w.W_STEP_O, w.W_DEPTH]] = inner, self.packed[i][4 + is_turned]
            d[[w.W_NUMBERS, w.W_OFFSETS]] = first
            d[[w.W_PACKED, w.BEGIN]] = self.packed[i][start : start + 2]
            d[w.W_SCALES] = self.powers[i].of_weights
            d[w.W_IS_TURNED] = is_turned != op.is_turned
            d[w.W_FLIPS] = self._flips if is_turned else self._is_flipped(op)
            tasks.append(d)
            reals.append((op.weight.scale, op.weight.min_code, op.weight.max_code, 0))
        table = np.array(tasks, np.int64).reshape(-1, w.COUNT)
        size = max((spare_bytes((*op.shape, 1, 1)) for _, op in linear), default=64)
        size = -(size // -64) * 64
        found = np.array(reals, np.float32).reshape(-1, 4)
        return Packing(table, found, packing_items(table), [i for i, _ in linear], size)

    def _share_weights(self, linear: Sequence[tuple[int, Linear]]) -> None:
        """Cut gradients of weights into tasks, and give each thread as many products."""
        wanted = [k for k, (i, _) in enumerate(linear) if self.needs_weights[i]]
        described = {k: self._described(linear[k][1]) for k in wanted}
        self._memory += [array for own in described.values() for array in own.kept]
        self.details = np.zeros((len(linear), jobs.FIELDS), np.int64)
        pairs: list[tuple[int, int, int]] = []
        for k in described:
            outputs, inputs = linear[k][1].shape
            pairs += [(k, group, inputs) for group in range(0, outputs // 16, 2)]
        ends = np.cumsum([inputs for *_, inputs in pairs], dtype=np.int64)
        tasks, self.begins = [], np.zeros(self.threads + 1, np.int64)
        for thread in range(self.threads):
            share = [ends[-1] * (thread + i) // self.threads for i in range(2)] if pairs else [0, 0]
            own = [
                pair for pair, end in zip(pairs, ends, strict=True) if share[0] < end <= share[1]
            ]
            for k in dict.fromkeys(k for k, *_ in own):
                groups = [group for other, group, _ in own if other == k]
                tasks.append((k, groups[0], min(groups[-1] + 2, linear[k][1].shape[0] // 16)))
            self.begins[thread + 1] = len(tasks)
        self.tasks = np.array(tasks, np.int64).reshape(-1, 3)
        most = max((end - begin for _, begin, end in tasks), default=0)
        for k, own in described.items():
            by_outputs.make_room(own.row, self.samples, most)
            self.details[k] = own.row
        most = max((int(own.row[jobs.WORK_BYTES]) for own in described.values()), default=0)
        self.weight_bytes = most + 128
        a_thread = max(self.scratch_bytes, self.weight_bytes, self.pack.spare_bytes)
        self.work_bytes = a_thread * self.threads

    def _described(self, op: Linear) -> jobs.Described:
        """Describe the jobs of a weight's gradient: tokens lie below each other, as rows of an image."""
        outputs, inputs = op.shape
        size = self.tokens, 1
        part = forward(Window(), size, (1, 1))
        cut = blocks(part, self.samples, size, inputs, 1, PIECE)
        in_int16, read = steps_in_int16(op.inputs, GRADIENTS), spans(inputs, outputs, 1, 1)
        rest = outputs, op.inputs.signed, in_int16, read, self.samples, _PIECE
        own = weight_jobs.describe_weights(cut, part, *rest)
        own.row[jobs.FLIPPED] *= 2  # forward left them so
        return own


def _taken(segment: Segment) -> set[int]:
    """Return the values that operations make and linear layers take."""
    taken = {op.source for op in segment.operations if isinstance(op, Linear)}
    return {v for v in taken if v >= len(segment.inputs)}


def _factor(odds: Odds | None) -> float:
    return 1.0 if odds is None else odds.factor
