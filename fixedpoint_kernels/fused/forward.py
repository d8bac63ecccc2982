"""The operations of a forward pass."""

from fixedpoint_kernels.functions import number_of as number_of_curve
from fixedpoint_kernels.fused import fields as f
from fixedpoint_kernels.fused.graph import (
    INPUT,
    Joined,
    Layer,
    Norm,
    Pooled,
    Scaled,
    Value,
)
from fixedpoint_kernels.fused.layout import Layout
from fixedpoint_kernels.fused.operations import Buffer, Given, Number, Operation
from fixedpoint_kernels.fused.pooling import numbers_of
from fixedpoint_kernels.llvm import tiles
from fixedpoint_kernels.products import jobs, shapes
from fixedpoint_kernels.products.blocks import blocks, runs
from fixedpoint_kernels.products.instructions import GRAINS

__all__ = ["Forward", "kind_of", "number_of"]


class Forward:
    """Operations in order: a value is made when something first takes it.

    What needs a layer's statistics begins a region: they are sums over all images. So do linear layers
    behind images, which take more images at a time.

    Args:
        layout: Where everything lies.

    Attributes:
        regions: Operations of each region.

    Raises:
        ValueError: Sums of a layer do not fit in int32 and int64.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout, self.segment = layout, layout.segment
        self.regions: list[list[Operation]] = [[]]
        self._fresh: set[int] = set()  # layers whose sums the open region adds up
        self._ys: dict[int, Number] = {}
        for n, layer in enumerate(self.segment.layers):
            self._make(layer.source)
            if isinstance(layer, Norm):
                if layout.infers:
                    layout.sums[n] = self._ys[layer.source]
                continue
            if layer.is_flat and not self._is_flat(n - 1) and not layout.infers:
                self._begin()  # a large weight is read once for as many images as there are
            self._multiply(n)
        for i, value in enumerate(self.segment.values):
            if value.is_output:
                self._make(i)

    def _begin(self) -> None:
        """Begin a region."""
        self.regions.append([])
        self._fresh.clear()

    def _is_flat(self, n: int) -> bool:
        layer = self.segment.layers[n]
        return isinstance(layer, Layer) and layer.is_flat

    def _measured(self, i: int) -> list[Operation]:
        """Return what makes a value as batch norm takes it, and adds it up."""
        layout, value = self.layout, None if i == INPUT else self.segment.values[i]
        own: dict[str, Number] = {"OUT": layout.wide[i], "SUMS": layout.moments[i]}
        if isinstance(value, Joined):
            return [
                self._joining(i, k, f.JOIN_SUMS, Z=layout.wide[k], X=layout.moments[k], **own)
                for k in value.sources
            ]
        shape = layout.shapes[i]
        numbers = layout.numbers(shape, f.MOMENTS, Z=self._ys[i], **own)
        size, scratch = 6 * shape.padded, {4: 16 * shape.pattern}
        return [Operation(numbers, bytes_an_image=size, scratch=scratch)]

    def _multiply(self, n: int) -> None:
        """Compute what a layer makes."""
        self.regions[-1].append(self._product(n))
        if self.layout.has_statistics(n):
            self._fresh.add(n)

    def _make(self, i: int) -> None:
        """Make a value, unless it is there."""
        if i in self._ys:
            return
        if i != INPUT:
            self._prepare(i)
        self._ys[i] = self._place(i)
        self.regions[-1] += self._value(i, self._ys[i])
        if not self.layout.infers and i in self.layout.wide:
            self.regions[-1] += self._measured(i)
            self._fresh.update(self.segment.norms(i))

    def _prepare(self, i: int) -> None:
        value = self.segment.values[i]
        if isinstance(value, Pooled):
            self._make(value.source)
            return
        if isinstance(value, Scaled):
            self._make(value.source)
            self._make(value.gate)
            return
        if isinstance(value, Joined):
            for k in value.sources:
                self._make(k)
            return
        for k in value.values:
            self._make(k)
        if not self._fresh.isdisjoint(value.layers):
            self._begin()
        if not self.layout.infers:
            self.regions[-1] += [self._coefficients(n) for n in value.layers]

    def _place(self, i: int) -> Number:
        if i == INPUT:
            return Given("x", 0)
        if self.segment.values[i].is_output:
            return Given("y", i)
        if i in self.layout.shown:
            return Given("seen", i)
        if i in self.layout.gates:
            return self.layout.gates[i]
        value = self.segment.values[i]
        if isinstance(value, Joined) and not self._needs_floats(i):
            return 0
        if isinstance(value, Pooled | Joined) or self.segment.users(i) > len(
            self.segment.takers(i)[:1]
        ):
            return Buffer(4 * self.layout.images * self.layout.shapes[i].padded)
        return 0

    def _needs_floats(self, i: int) -> bool:
        return self.layout.infers or i in self.segment.floats

    def _value(self, i: int, y: Number) -> list[Operation]:
        """Return what makes a value: once for each layer that takes codes of it."""
        shape, takers = self.layout.shapes[i], self.segment.takers(i)
        found: list[Operation] = []
        value = None if i == INPUT else self.segment.values[i]
        if isinstance(value, Pooled):
            found.append(self._pool(i, value, y))
            more = {"FIRST": f.PLAIN, "Z": y}
        elif isinstance(value, Joined):
            if self._needs_floats(i):
                found += [self._joining(i, k, f.JOIN, Z=self._ys[k], Y=y) for k in value.sources]
            more = {"FIRST": f.PLAIN, "Z": y}
        else:
            more = self._terms(i, y)
            takers = takers if takers or value is None else [None]
        for n in takers:
            numbers = self.layout.numbers(shape, f.VALUE, **more)
            scratch = {6: 4 * shape.pattern} if "GATE" in more else {}
            operation = Operation(numbers, bytes_an_image=8 * shape.padded, scratch=scratch)
            if value is not None:
                operation.number = number_of(value)
            if n is not None:
                self._with_codes(operation, n)
            found.append(operation)
            more = {"FIRST": f.PLAIN, "Z": y}
        return found

    def _terms(self, i: int, y: Number) -> dict[str, Number]:
        """Return of what a value is the sum, and where it goes."""
        if i == INPUT:
            return {"FIRST": f.PLAIN, "Z": y}
        value, more = self.segment.values[i], {"Y": y}
        if isinstance(value, Scaled):
            more |= {"FIRST": f.SCALED, "Z": self._ys[value.source]}
            return more | self.layout.gate_of(value)
        names = ("FIRST", "Z", "A", "B"), ("SECOND", "Z2", "A2", "B2")
        terms: list[tuple[Number, ...]] = [
            (self.layout.kind_of_sums(n), self.layout.sums[n], *self.layout.factors[n])
            for n in value.layers
        ]
        terms += [(f.PLAIN, self._ys[k]) for k in value.values]
        for own, term in zip(names, terms, strict=False):
            more |= dict(zip(own, term, strict=False))
        if i in self.layout.relu:
            more["RELU_MASK"] = self.layout.relu[i]
        return more | kind_of(value)

    def _joining(self, i: int, source: int, kind: int, **own: Number) -> Operation:
        """Return what writes a value among the channels of another."""
        shape = self.layout.shapes[source]
        numbers = self.layout.numbers(shape, kind, **own, **self.layout.place_in(i, source))
        return Operation(numbers, bytes_an_image=8 * shape.padded)

    def _pool(self, i: int, value: Pooled, y: Number) -> Operation:
        """Return what makes a pooled value; its windows and what they took stay for backward."""
        layout, source, made = self.layout, self.layout.shapes[value.source], self.layout.shapes[i]
        windows = numbers_of(value, source, source.padded, made)
        layout.held.append(windows)
        size = layout.images * made.padded
        kept = Buffer(size) if layout.infers else layout.keep(size)
        places = 0 if value.is_mean else kept
        layout.pooled[i] = windows.ctypes.data, places
        more = dict(zip(("WINDOWS", "PLACES"), layout.pooled[i], strict=True))
        numbers = layout.numbers(made, f.POOL, Z=self._ys[value.source], Y=y, **more)
        return Operation(numbers, bytes_an_image=5 * made.padded)

    def _coefficients(self, n: int) -> Operation:
        layer, out = self.segment.layers[n], self.layout.outs[n]
        numbers = self.layout.norms[n]
        numbers[0] = layer.eps or 0.0
        return Operation(
            self.layout.numbers(
                out,
                f.COEFFICIENTS,
                HAS_NORM=layer.eps is not None,
                STATISTICS=self.layout.statistics_at[n],
                SUMS=self.layout.moments[layer.source] if isinstance(layer, Norm) else 0,
                MEANS=self.layout.means[n],
                INVERSES=self.layout.inverses[n],
                VARIANCES=self.layout.variances[n],
                NUMBERS=numbers.ctypes.data,
                POWERS=self.layout.powers[n].of_sums,
                SCALE=Given("scale", n),
                SHIFT=Given("shift", n),
                RUNNING_MEAN=Given("running_mean", n),
                RUNNING_VARIANCE=Given("running_variance", n),
                A=self.layout.factors[n][0],
                B=self.layout.factors[n][1],
            )
        )

    def _with_codes(self, operation: Operation, n: int) -> None:
        layer = self.segment.product(n)
        fmt = layer.inputs
        operation.reals = fmt.scale, fmt.min_code, fmt.max_code
        mask = self.layout.clip[n]
        operation.numbers |= {
            f.CODES: self.layout.codes[n],
            f.CLIP_MASK: 0 if mask is None else mask,
            f.CLIPS: layer.clip,
            f.BOTH: self.layout.shares_mask(layer.source),
            f.CLAMPED: 0 if self.layout.infers else self.layout.clamped[n].ctypes.data,
        }

    def _product(self, n: int) -> Operation:
        layer, out = self.segment.product(n), self.layout.outs[n]
        taken = self.layout.taken(n)
        part = shapes.forward(layer.window, taken[1:], layer.shape[2:])
        has_statistics = self.layout.has_statistics(n)
        size = 2 if has_statistics else 4
        steps = size * out.padded, size * out.width * out.channels, size * out.channels
        kind = tiles.KINDS["bfloat16 and statistics" if has_statistics else "float32"]
        in_int16 = shapes.steps_in_int16(layer.inputs, layer.weight)

        def details(chunk: int) -> jobs.Described:
            read, signed = self.layout.read(n), layer.inputs.signed
            images = 1 if read.is_alone else chunk  # 16 channels at a time: an image is read often
            most, grain = layer.most_positions, self.layout.grain(n)
            cut = blocks(part, images, taken[1:], taken.channels, 1, most, grain)
            found = runs(cut, GRAINS[self.layout.path], read)
            rest = size, kind, signed, in_int16, read
            own = jobs.describe_outputs(cut, found, part, (*steps, out.channels), *rest)
            own.row[jobs.X_IMAGE] = taken.padded
            return own

        groups = -(out.channels // -16)
        return Operation(
            self.layout.numbers(
                out,
                f.PRODUCT,
                X=self.layout.codes[n],
                HAS_NORM=has_statistics,
                STATISTICS=self.layout.statistics_at[n] if has_statistics else 0,
                OUT=self.layout.sums[n],
                POWERS=self.layout.powers[n].of_sums,
                **self.layout.weights_at(n, part, taken, out.channels, False),
            ),
            details=details,
            bytes_an_image=taken.padded + 2 * out.padded,
            scratch={5: groups * 384},
        )


def kind_of(value: Value | Pooled | Scaled | Joined) -> dict[str, Number]:
    """Return of what kind a value's activation is."""
    curve = number_of_curve(value.curve)
    return {"RELU": 2 if value.ceiling is not None else value.relu, "CURVE": curve}


def number_of(value: Value | Pooled | Scaled | Joined) -> float:
    """Return the number of a value's activation."""
    return value.curve.number if value.curve is not None else value.ceiling or 0.0
