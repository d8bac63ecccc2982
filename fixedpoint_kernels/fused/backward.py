"""The operations of a backward pass."""

import numpy as np

from fixedpoint_kernels.fused import fields as f
from fixedpoint_kernels.fused.forward import kind_of, number_of
from fixedpoint_kernels.fused.graph import INPUT, Layer, Norm, Return, Scaled
from fixedpoint_kernels.fused.layout import Layout
from fixedpoint_kernels.fused.operations import Buffer, Given, Number, Operation
from fixedpoint_kernels.llvm import tiles
from fixedpoint_kernels.products import by_outputs, jobs, shapes, weight_jobs
from fixedpoint_kernels.products.blocks import blocks, runs
from fixedpoint_kernels.products.instructions import GRAINS, ends_with_tiles
from fixedpoint_kernels.products.shapes import GRADIENTS, Correlation
from fixedpoint_kernels.products.spots import spots

__all__ = ["Backward"]


class Backward:
    """Operations in order; what needs the sums of a gradient over all images begins a region.

    Args:
        layout: Where everything lies, after ``Forward``.

    Attributes:
        regions: Operations of each region.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout, self.segment, shapes = layout, layout.segment, layout.shapes
        self._gradients = {i: Buffer(2 * layout.images * own.padded) for i, own in shapes.items()}
        self._widest = max(own.channels for own in shapes.values())
        self._sums = {i: layout.take(layout.images * 3 * self._widest, np.float64) for i in shapes}
        self._codes = {
            n: Buffer(layout.images * self._codes_step(n) + 64)
            for n, needed in enumerate(layout.needs_weights)
            if needed and layout.weight_sums[n] is None
        }
        self._scales: dict[int, int] = {}
        self.regions = self._regions()

    def _regions(self) -> list[list[Operation]]:
        segment, made_by = self.segment, self.segment.made_by
        regions: list[list[Operation]] = [[]]
        later: list[Operation] = []  # what needs codes of all images
        fresh: set[int] = set()  # values whose sums the open region adds up
        for step in segment.backward(self.layout.needs_input):
            if isinstance(step, Return):
                self._come_back(step, regions[-1])
                if step.is_last:
                    fresh.add(step.value)
                continue
            if made_by[step] in fresh:
                regions.append(later)
                later = []
                fresh.clear()
            if isinstance(segment.layers[step], Norm):
                regions[-1] += self._norm_gradient(step, made_by[step])
                continue
            layer, needs_weight = segment.product(step), self.layout.needs_weights[step]
            coefficients, places = self._coefficients(step, made_by[step])
            regions[-1].append(coefficients)
            if needs_weight or not layer.by_channel:
                regions[-1].append(self._gradient(step, made_by[step], places))
            if step in self._codes:
                later.append(self._weights_by_output(step))
            elif needs_weight:
                regions[-1].append(self._weight_product(step))
            if layer.source != INPUT or self.layout.needs_input:
                regions[-1] += self._for_input(step, made_by[step], places)
        return [*regions, later]

    def _come_back(self, step: Return, region: list[Operation]) -> None:
        """Append what makes a part of the gradient of a value and adds it to the others."""
        if self._ends_with_product(step):
            region.append(self._finished(step, region.pop()))
        else:
            region += self._returned(step)

    def _returned(self, step: Return) -> list[Operation]:
        """Return what makes a part of the gradient of a value, and what adds it to the others."""
        found = []
        if step.pooled is not None:
            found.append(self._unpool(step.pooled, step.value))
        if step.gated is not None:
            found.append(self._weigh(step.gated))
        return [*found, *self._cuts(step), self._finish(step)]

    def _ends_with_product(self, step: Return) -> bool:
        """Say whether the product that a gradient comes back with may write what it adds up to.

        It must be the last one, of all places, row by row; and little else may come back.
        """
        n, i, layout = step.layer, step.value, self.layout
        others = step.outer or step.joined or step.pooled is not None or step.gated is not None
        if n is None or i == INPUT or others or not step.is_last or layout.observes:
            return False
        layer, value = self.segment.layers[n], self.segment.values[i]
        waiting = self._waiting(step)
        if isinstance(layer, Norm) or "ADD2" in waiting or "SCALED_GRADIENT" in waiting:
            return False
        shape, out = layout.shapes[i], layout.outs[n]
        parts = shapes.input_gradient(layer.window, shape[1:], layer.shape[2:])
        return (
            bool(value.layers)
            and value.curve is None
            and layer.window.groups == 1
            and len(parts) == 1
            and parts[0].step == (1, 1)
            and shapes.covers(parts, shape[1:])
            and spots(parts[0], out[1:], out.channels, layout.grain(n)) is None
            and shape.channels % 16 == 0
            and ends_with_tiles(layout.path, shape.channels, shape.width)
        )

    def _finished(self, step: Return, product: Operation) -> Operation:
        """Return what multiplies and adds up what comes back to a value at once; see ``_finish``."""
        describe, shape = product.details, self.layout.shapes[step.value]
        assert describe is not None

        def details(chunk: int) -> jobs.Described:
            own = describe(chunk)
            own.row[jobs.KIND] = jobs.FINISHED
            steps = [jobs.OUT_SIZE, jobs.OUT_IMAGE, jobs.OUT_ROW, jobs.OUT_COLUMN]
            own.row[steps] //= 2  # of bfloat16, not float32
            return own

        most = int(details(self.layout.images).row[jobs.SLOTS])
        return Operation(
            self._finish(step).numbers | product.numbers | {f.OUT: self._gradients[step.value]},
            details=details,
            bytes_an_image=6 * shape.padded,
            scratch={4: 12 * shape.pattern * most},
        )

    def _finish(self, step: Return) -> Operation:
        """Return what adds up what comes back to a value."""
        i, shape = step.value, self.layout.shapes[step.value]
        value = None if i == INPUT else self.segment.values[i]
        more, number = self._waiting(step) | {"OUT": self._gradients[i]}, 0.0
        if step.outer:
            more["OUTER"] = Given("dy", i)
        if step.layer is not None:
            mask = self.layout.clip[step.layer]
            more |= {"HAS_PRODUCT": 1, "CLIP_MASK": 0 if mask is None else mask}
            if self.layout.observes and isinstance(self.segment.layers[step.layer], Layer):
                more["SEEN"] = Given("seen gradient", step.layer)
        elif _has_part(step) or step.joined:
            more["HAS_PRODUCT"] = 1
        if step.is_last and value is None:
            more |= {"OUT": 0, "OUTER_OUT": Given("dx", 0)}
        elif step.is_last and value is not None:
            more |= {"RELU_MASK": self.layout.relu.get(i, 0)} | self._sums_of(i)
            number = number_of(value)
        return Operation(
            self.layout.numbers(shape, f.FINISH, **more),
            number=number,
            bytes_an_image=10 * shape.padded,
            scratch={4: 12 * shape.pattern, 3: 4 * shape.padded, 6: 4 * shape.pattern},
        )

    def _waiting(self, step: Return) -> dict[str, Number]:
        """Return which gradients of values are added, and that of one which was scaled."""
        waits, found = [self._gradients[step.value]] if step.continues else [], {}
        for k in step.added:
            own = self.segment.values[k]
            if isinstance(own, Scaled):
                found = {"SCALED_GRADIENT": self._gradients[k], **self.layout.gate_of(own)}
            else:
                waits.append(self._gradients[k])
        return found | dict(zip(("ADD", "ADD2"), waits, strict=False))

    def _sums_of(self, i: int) -> dict[str, Number]:
        """Return what the sums of a whole gradient need, for the layers that make the value, and its slope."""
        value = self.segment.values[i]
        more: dict[str, Number] = {} if value.curve is None else self._term(i)
        for names, n in zip((("FIRST", "Z"), ("SECOND", "Z2")), value.layers, strict=False):
            if self.layout.kind_of_sums(n) == f.BFLOAT16:
                more |= dict(zip(names, (f.BFLOAT16, self.layout.sums[n]), strict=True))
        if value.layers:
            more |= {"SUMS": self._sums[i], "SUMS_STRIDE": self._widest}
        return more

    def _term(self, i: int) -> dict[str, Number]:
        """Return of what one layer a value is made, and by which activation."""
        (n,) = self.segment.values[i].layers
        term = self.layout.kind_of_sums(n), self.layout.sums[n], *self.layout.factors[n]
        own = dict(zip(("FIRST", "Z", "A", "B"), term, strict=True))
        return own | kind_of(self.segment.values[i])

    def _weigh(self, i: int) -> Operation:
        """Return what makes the gradient of a gate from that of what it scaled."""
        value = self.segment.values[i]
        assert isinstance(value, Scaled)
        shape, step = self.layout.shapes[i], 4 * self.layout.shapes[value.gate].padded
        more = {"G": self._gradients[i], "GATE_STEP": step, **self._term(value.source)}
        return Operation(
            self.layout.numbers(shape, f.WEIGH, **more),
            number=number_of(self.segment.values[value.source]),
            bytes_an_image=4 * shape.padded,
            scratch={4: 12 * shape.pattern, 3: step},
        )

    def _unpool(self, i: int, source: int) -> Operation:
        """Return what makes the gradient of a value from that of what was pooled from it."""
        size, own = 4 * self.layout.shapes[source].padded, self.layout.pooled[i]
        more = dict(zip(("WINDOWS", "PLACES"), own, strict=True))
        numbers = self.layout.numbers(self.layout.shapes[i], f.UNPOOL, G=self._gradients[i], **more)
        return Operation(numbers, bytes_an_image=size, scratch={3: size})

    def _cuts(self, step: Return) -> list[Operation]:
        """Return what makes the gradient of a value from those of what it was joined to, or adds them."""
        shape = self.layout.shapes[step.value]
        size, adds, found = 4 * shape.padded, _has_part(step), []
        for i in step.joined:
            own = {"G": self._gradients[i], "J_ADDS": adds, **self.layout.place_in(i, step.value)}
            numbers, adds = self.layout.numbers(shape, f.CUT, **own), True
            found.append(Operation(numbers, bytes_an_image=size, scratch={3: size}))
        return found

    def _gradient(
        self, n: int, i: int, places: dict[str, Number], moved: bool = False
    ) -> Operation:
        """Return what makes the codes of a layer's gradient, from that of the value that it makes.

        moved: Whether to meet weights that have fractional bits by channel.
        """
        layer, out = self.segment.product(n), self.layout.outs[n]
        step, more = self._codes_step(n), {}
        if moved:
            more = {"FACTORS": self.layout.powers[n].of_gradients}
        elif n in self._codes:
            self._scales[n] = self.layout.take(self.layout.images, np.float64)
            more = {"CODES": self._codes[n], "SCALES": self._scales[n]}
        codes = self.layout.numbers(
            out,
            f.GRADIENT,
            FIRST=self.layout.kind_of_sums(n),
            G=self._gradients[i],
            Z=self.layout.sums[n] if layer.eps is not None else 0,
            POWERS=self.layout.exponents,
            WEIGHT_FL=layer.weight.fl,
            CODES_STEP=step,
            SEED=Given("seed", n),
            STREAM=Given("second stream" if moved else "stream", n),
            **more,
            **places,
        )
        size = 6 * out.padded + step
        return Operation(codes, bytes_an_image=size, scratch={1: 4 * step, 2: step})

    def _for_input(self, n: int, i: int, places: dict[str, Number]) -> list[Operation]:
        """Return what makes the gradient of what a layer takes, from that of value ``i``, which it makes."""
        by_channel = self.segment.product(n).by_channel
        codes = [self._gradient(n, i, places, moved=True)] if by_channel else []
        return codes + self._input_products(n)

    def _norm_gradient(self, n: int, i: int) -> list[Operation]:
        """Return what makes the gradient of what a batch norm took, from that of the value that it makes."""
        shape, (coefficients, places) = self.layout.outs[n], self._coefficients(n, i)
        if self.segment.layers[n].source == INPUT and not self.layout.needs_input:
            return [coefficients]
        own = {"FIRST": f.BFLOAT16, "G": self._gradients[i], "Z": self.layout.sums[n], **places}
        numbers = self.layout.numbers(shape, f.NORM_GRADIENT, **own)
        size = 4 * shape.padded
        return [coefficients, Operation(numbers, bytes_an_image=2 * size, scratch={3: size})]

    def _coefficients(self, n: int, i: int) -> tuple[Operation, dict[str, Number]]:
        """Return what makes the factors of batch norm's backward, and where they are."""
        out = self.layout.outs[n]
        places: dict[str, Number] = {
            name: self.layout.take(out.pattern, np.float32) for name in ("GA", "GB", "GC")
        }
        numbers = self.layout.numbers(
            out,
            f.GRADIENT_COEFFICIENTS,
            HAS_NORM=self.layout.has_statistics(n),
            SUMS=self._sums[i],
            SUMS_STRIDE=self._widest,
            WHICH=1 + self.segment.values[i].layers.index(n),
            MEANS=self.layout.means[n],
            INVERSES=self.layout.inverses[n],
            SCALE=Given("scale", n),
            OF_SCALE=Given("of_scale", n),
            OF_SHIFT=Given("of_shift", n),
            **places,
        )
        return Operation(numbers), places

    def _codes_step(self, n: int) -> int:
        """Return bytes from the codes of one image's gradient to the next one's."""
        return -(self.layout.outs[n].elements // -f.NOISE_BLOCK) * f.NOISE_BLOCK

    def _described(self, n: int, chunk: int, images: int = 0) -> jobs.Described:
        """Describe the jobs of a weight's gradient, of ``chunk`` images or fewer; see ``describe_weights``."""
        layer, taken = self.segment.product(n), self.layout.taken(n)
        part, cut = self.layout.weight_blocks(n, chunk)
        in_int16 = shapes.steps_in_int16(layer.inputs, GRADIENTS)
        rest = self.layout.outs[n].channels, layer.inputs.signed, in_int16, self.layout.read(n)
        grain = 0 if images else GRAINS[self.layout.path]
        own = weight_jobs.describe_weights(cut, part, *rest, images, grain=grain)
        own.row[[jobs.X_IMAGE, jobs.GRAD_IMAGE]] = taken.padded, self._codes_step(n)
        return own

    def _weights_by_output(self, n: int) -> Operation:
        """Return what writes the gradient of a weight, of all images."""
        images = self.layout.images
        numbers = self.layout.numbers(
            self.layout.outs[n],
            f.WEIGHTS_BY_OUTPUT,
            X=self.layout.codes[n],
            CODES=self._codes[n],
            SCALES=self._scales[n],
            OUT=Given("of_weight", n),
            W_STEP_C=Given("of_weight lies last", n),
            POWERS=self.layout.lsbs.ctypes.data + 4 * n,
        )
        described = self._described(n, images, images)
        if (layer := self.segment.product(n)).is_flat:
            inputs, height, width = self.layout.shapes[layer.source]
            rest = height * width, inputs, inputs
            described.row[[jobs.OUT_TAPS, jobs.OUT_INPUTS, jobs.OUT_APART]] = rest
        by_outputs.make_room(described.row, images, int(described.row[jobs.GROUPS]))
        return Operation(numbers, details=lambda _: described)

    def _weight_product(self, n: int) -> Operation:
        out, taken = self.layout.outs[n], self.layout.taken(n)
        own = self.layout.weight_sums[n]
        assert own is not None
        numbers = self.layout.numbers(
            out,
            f.WEIGHT_PRODUCT,
            X=self.layout.codes[n],
            HELD=own.held,
            SUMS=own.sums,
            SUMS_STRIDE=own.stride,
            TOTALS=own.totals,
        )
        return Operation(
            numbers,
            details=lambda chunk: self._described(n, chunk),
            bytes_an_image=taken.padded,
        )

    def _input_products(self, n: int) -> list[Operation]:
        layer, out = self.segment.product(n), self.layout.outs[n]
        taken = self.layout.taken(n)
        size = taken.height, taken.width
        parts = shapes.input_gradient(layer.window, size, layer.shape[2:])
        step, codes = self._codes_step(n), 0 if layer.by_channel else self._codes.get(n, 0)
        covered = shapes.covers(parts, size)
        in_int16 = shapes.steps_in_int16(GRADIENTS, layer.weight)
        found = []
        for k, part in enumerate(parts):
            row, column = 4 * taken.width * taken.channels, 4 * taken.channels
            place = part.first[0] * row + part.first[1] * column

            def details(
                chunk: int, part: Correlation = part, row: int = row, column: int = column
            ) -> jobs.Described:
                cut = blocks(part, chunk, out[1:], out.channels, 1, grain=self.layout.grain(n))
                every = 4 * taken.padded, row, column, taken.channels
                kind = tiles.KINDS["float32 by row"]
                read = self.layout.read(n, turned=True)
                own = runs(cut, GRAINS[self.layout.path], read)
                rest = every, 4, kind, True, in_int16, read
                described = jobs.describe_outputs(cut, own, part, *rest)
                described.row[jobs.X_IMAGE] = step
                return described

            numbers = self.layout.numbers(
                taken,
                f.INPUT_PRODUCT,
                POWERS=self.layout.exponents,
                OUT=place,
                CODES=codes,
                CODES_STEP=step,
                ZEROES=k == 0 and not covered,
                **self.layout.weights_at(n, part, out, taken.channels, True),
            )
            groups = -(taken.channels // -16)
            found.append(
                Operation(
                    numbers,
                    details=details,
                    bytes_an_image=4 * taken.padded,
                    scratch={3: 4 * taken.padded, 5: groups * 384},
                )
            )
        return found


def _has_part(step: Return) -> bool:
    """Say whether a gradient comes from a layer, a pooled value or a gate."""
    return any(own is not None for own in (step.layer, step.pooled, step.gated))
