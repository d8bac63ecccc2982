"""Work for Triton kernels: what each is given, and what it writes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fixedpoint_kernels import FixedPoint, quantize_many
from fixedpoint_kernels.division import Layout
from fixedpoint_kernels.few_bit import named
from fixedpoint_kernels.few_bit import reference as few_bit_reference
from fixedpoint_kernels.few_bit.fused import fused_of
from fixedpoint_kernels.few_bit.table import Table
from fixedpoint_kernels.histogram.reference import Bins, Cells
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.products.shapes import Window
from fixedpoint_kernels.rounding import Rounding
from fixedpoint_kernels.rounding import reference as rounding_reference

__all__ = [
    "CANDIDATES",
    "TENSORS",
    "Make",
    "Work",
    "cells",
    "compress",
    "convolve",
    "decode",
    "decompress",
    "encode",
    "input_gradient",
    "many",
    "observe",
    "observe_gradient",
    "pack",
    "round_per_sample",
    "rounding",
    "sampled",
    "unpack",
    "value_and_codes",
    "value_and_encode",
    "weight_gradient",
]

FMT, KEY = FixedPoint(8, 4), Key(3, 5)
SPECIAL = 0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, 3e38, -3e38, 1 / 32, -1 / 32
CANDIDATES = [FixedPoint(6 + fl, fl) for fl in range(16)]
BINS, CELLS = Bins(-4.0, 12.5, 100), Cells(7, -512, 1024)  # of values from -4 to 4
TENSORS = 65
CHANNELS, OUTPUTS, SIDE, KERNEL = 24, 40, 9, (3, 3)  # of a convolution


class Work(NamedTuple):
    """Inputs, outputs, and a call that takes an implementation and them, and returns outputs."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    run: Callable[[Any, list[Tensor], list[Tensor]], list[Tensor]]


Make = Callable[[int, torch.device], Work]  # of so many elements


def _values(n: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator(device).manual_seed(n)
    x = 3 * torch.randn(n, generator=generator, device=device)
    special = torch.tensor(SPECIAL[: n // 2], device=device)
    x[: len(special)] = special
    return x.to(dtype)


def _integers(shape: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(device).manual_seed(1)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, generator=generator, device=device, dtype=dtype)


def rounding(rounding: Rounding, x: torch.dtype, y: torch.dtype, has_mask: bool = False) -> Make:
    def make(n: int, device: torch.device) -> Work:
        outputs = [torch.empty(n, dtype=y, device=device)]
        outputs += [torch.empty(n, dtype=torch.bool, device=device)] if has_mask else []
        return Work([_values(n, device, x)], outputs, run)

    def run(code: Any, inputs: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
        mask = outputs[1] if has_mask else None
        code.quantize(inputs[0], outputs[0], mask, FMT, rounding, KEY)
        return outputs

    return make


def many(n: int, device: torch.device) -> Work:
    """Return work on tensors of sizes that differ a little; the reference takes one by one."""
    fmts = [FixedPoint(4 + j % 9, j % 5) for j in range(TENSORS)]

    def run(code: Any, xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
        if code is not rounding_reference:
            return quantize_many(xs, fmts, seed=KEY.seed, stream=KEY.stream, out=ys)
        for j, (x, y, fmt) in enumerate(zip(xs, ys, fmts, strict=True)):
            code.quantize(x, y, None, fmt, "stochastic", Key(KEY.seed, KEY.stream + j))
        return ys

    xs = [_values(n // TENSORS + 1 + j, device) for j in range(TENSORS)]
    return Work(xs, [torch.empty_like(x) for x in xs], run)


def sampled(n: int, device: torch.device) -> Work:
    x = torch.nan_to_num(_values(n, device)).clamp(-3.9, 3.9)
    return Work(
        [x], [], lambda code, xs, _: [code.sampled(xs[0], CANDIDATES, BINS, "stochastic", KEY)]
    )


def cells(n: int, device: torch.device) -> Work:
    x = torch.nan_to_num(_values(n, device)).clamp(-3.9, 3.9)
    return Work([x], [], lambda code, xs, _: list(code.cells(xs[0], BINS, CELLS)))


def observe(n: int, device: torch.device) -> Work:
    """Return work whose sum of squares is left out: its order is not the reference's."""

    def run(code: Any, inputs: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
        counts, sums = code.observe(inputs[0], *outputs, FMT)
        return [*outputs, counts, sums[2]]

    ste_mask = torch.empty(n, dtype=torch.uint8, device=device)
    return Work([_values(n, device)], [torch.empty(n, device=device), ste_mask], run)


def observe_gradient(n: int, device: torch.device) -> Work:
    """Return work whose squared norm is left out."""

    def run(code: Any, inputs: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
        code.observe_gradient(*inputs, outputs[0])
        return outputs

    ste_mask = _integers((n,), device, torch.uint8) & 3
    return Work([_values(n, device), ste_mask], [torch.empty(n, device=device)], run)


def pack(bits: int, dtype: torch.dtype) -> Make:
    def make(n: int, device: torch.device) -> Work:
        packed = torch.empty((n * bits + 7) // 8, dtype=torch.uint8, device=device)
        return Work([_integers((n,), device, dtype)], [packed], run)

    def run(code: Any, inputs: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
        code.pack(inputs[0], outputs[0], bits)
        return outputs

    return make


def unpack(bits: int, dtype: torch.dtype) -> Make:
    def make(n: int, device: torch.device) -> Work:
        packed = _integers(((n * bits + 7) // 8,), device, torch.uint8)
        return Work([packed], [torch.empty(n, dtype=dtype, device=device)], run)

    def run(code: Any, inputs: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
        code.unpack(inputs[0], outputs[0], bits, True)
        return outputs

    return make


def _table(name: str, bits: int) -> Table:
    return named.table_of(*named.resolve(name), bits, "uniform")


def _planes(n: int, table: Table, device: torch.device) -> Tensor:
    words = -(n // -1024) * 32 * table.bits  # which may be fewer than were asked for
    return torch.empty(words, dtype=torch.int32, device=device)


def encode(name: str, bits: int, dtype: torch.dtype = torch.float32) -> Make:
    def make(n: int, device: torch.device) -> Work:
        planes = _planes(n, _table(name, bits), device)
        return Work([_values(n, device, dtype)], [planes], run)

    def run(code: Any, inputs: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
        code.encode(inputs[0], outputs[0], _table(name, bits))
        return outputs

    return make


def value_and_encode(name: str, bits: int, dtype: torch.dtype = torch.float32) -> Make:
    def make(n: int, device: torch.device) -> Work:
        x = _values(n, device, dtype)
        x = torch.where(x.abs() < 1e3, x, 1.0) if name == "gelu" else x  # torch's own overflows
        planes = _planes(n, _table(name, bits), device)
        return Work([x], [torch.empty_like(x), planes], run)

    def run(code: Any, inputs: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
        y, planes = outputs
        code.value_and_encode(
            inputs[0], y, planes, _table(name, bits), fused_of(*named.resolve(name))
        )
        return outputs

    return make


def value_and_codes(name: str, bits: int) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return what ``value_and_encode`` is compared with: torch's value, the reference's codes."""

    def expected(inputs: list[Tensor]) -> list[Tensor]:
        (x,) = inputs
        planes = _planes(x.numel(), _table(name, bits), x.device)
        few_bit_reference.encode(x, planes, _table(name, bits))
        return [named.function_of(*named.resolve(name))(x), planes]

    return expected


def decode(bits: int, dtype: torch.dtype = torch.float32) -> Make:
    def make(n: int, device: torch.device) -> Work:
        planes = _integers(_planes(n, _table("sigmoid", bits), device).shape, device, torch.int32)
        grad = _values(n, device, dtype)
        return Work([grad, planes], [torch.empty_like(grad)], run)

    def run(code: Any, inputs: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
        code.decode(*inputs, *outputs, _table("sigmoid", bits))
        return outputs

    return make


def _layout(n: int, sides: tuple[int, ...], bits: int, dtype: torch.dtype) -> Layout:
    planes = max(2, n // torch.Size(sides).numel())
    return Layout((planes, *sides), dtype, 8, bits, len(sides))


def _parts(layout: Layout, device: torch.device) -> list[Tensor]:
    shapes = layout.means_shape, layout.codes_shape, layout.ranges_shape
    dtypes = torch.bfloat16, torch.uint8, torch.bfloat16
    return [torch.empty(s, dtype=d, device=device) for s, d in zip(shapes, dtypes, strict=True)]


def compress(sides: tuple[int, ...], bits: int, dtype: torch.dtype = torch.float32) -> Make:
    def make(n: int, device: torch.device) -> Work:
        layout = _layout(n, sides, bits, dtype)
        x = _values(layout.planes * layout.elements, device, dtype).view(layout.shape)

        def run(code: Any, inputs: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
            code.compress(inputs[0], *outputs, layout, KEY)
            return outputs

        return Work([x], _parts(layout, device), run)

    return make


def decompress(sides: tuple[int, ...], bits: int, dtype: torch.dtype = torch.float32) -> Make:
    def make(n: int, device: torch.device) -> Work:
        layout = _layout(n, sides, bits, dtype)
        means, codes, ranges = _parts(layout, device)
        parts = [
            _values(means.numel(), device, means.dtype).view(means.shape),
            _integers(codes.shape, device, codes.dtype),
            _values(ranges.numel(), device, ranges.dtype).view(ranges.shape),
        ]

        def run(code: Any, inputs: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
            code.decompress(*inputs, outputs[0], layout)
            return outputs

        return Work(parts, [torch.empty(layout.shape, dtype=dtype, device=device)], run)

    return make


def _images(n: int) -> int:
    return max(1, n // (CHANNELS * SIDE * SIDE))


def _exponents(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device) % 7 - 12


def convolve(x: torch.dtype, dtype: torch.dtype, stride: int) -> Make:
    window = Window((stride, stride), (1, 1), (1, 1), 1)

    def make(n: int, device: torch.device) -> Work:
        codes = _integers((_images(n), CHANNELS, SIDE, SIDE), device, x)
        weight = _integers((OUTPUTS, CHANNELS, *KERNEL), device, torch.int8)
        return Work([codes, weight, _exponents(OUTPUTS, device)], [], run)

    def run(code: Any, inputs: list[Tensor], _: list[Tensor]) -> list[Tensor]:
        return [code.convolve(*inputs, window, dtype, False)[0]]

    return make


def input_gradient(stride: int) -> Make:
    window = Window((stride, stride), (1, 1), (1, 1), 1)

    def make(n: int, device: torch.device) -> Work:
        side = (SIDE - 1) // stride + 1
        grad = _integers((_images(n), OUTPUTS, side, side), device, torch.int8)
        weight = _integers((OUTPUTS, CHANNELS, *KERNEL), device, torch.int8)
        return Work([grad, weight, _exponents(len(grad), device)], [], run)

    def run(code: Any, inputs: list[Tensor], _: list[Tensor]) -> list[Tensor]:
        return [code.input_gradient(*inputs, (SIDE, SIDE), window, torch.float32)]

    return make


def weight_gradient(x: torch.dtype, exponents: int | None = None) -> Make:
    """Return work with so many exponents; None: each image has its own."""
    window = Window((1, 1), (1, 1), (1, 1), 1)

    def make(n: int, device: torch.device) -> Work:
        codes = _integers((_images(n), CHANNELS, SIDE, SIDE), device, x)
        grad = _integers((len(codes), OUTPUTS, SIDE, SIDE), device, torch.int8)
        count = len(codes) if exponents is None else exponents
        return Work([codes, grad, *([_exponents(count, device)] if count else [])], [], run)

    def run(code: Any, inputs: list[Tensor], _: list[Tensor]) -> list[Tensor]:
        codes, grad, *powers = inputs
        own = powers[0] if powers else None
        return [code.weight_gradient(codes, grad, own, KERNEL, window)]

    return make


def round_per_sample(dtype: torch.dtype, samples: int) -> Make:
    """Return work whose first sample holds an infinity: its codes are 0."""

    def make(n: int, device: torch.device) -> Work:
        x = _values(samples * (n // samples + 1), device, dtype).view(samples, -1)
        return Work([x], [], lambda code, xs, _: list(code.round_per_sample(xs[0], KEY)))

    return make
