"""Integer products of layers beside torch's in bfloat16 and float32, which may use TensorFloat-32."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.clock import compare, launches
from benchmarks.gpu.sizes import Sizes
from benchmarks.ops.products import torch_products
from fixedpoint_kernels import products

__all__ = ["rows"]

CALLS = 10  # in a turn


class _Layer(NamedTuple):
    samples: int
    inputs: int
    side: int
    outputs: int
    kernel: int
    stride: int = 1


def rows(device: torch.device, sizes: Sizes) -> list[dict[str, object]]:
    """Return the three products of each layer."""
    benchmark, tf32 = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = True, True
    try:
        return [row for name, layer in _layers(sizes) for row in _rows(name, layer, device, sizes)]
    finally:
        torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = benchmark, tf32


def _layers(sizes: Sizes) -> Iterator[tuple[str, _Layer]]:
    batch, width = sizes.batch, sizes.width
    yield "ResNet20, first stage", _Layer(batch, width, 32, width, 3)
    yield "ResNet20, to the second stage", _Layer(batch, width, 32, 2 * width, 3, 2)
    yield "ResNet20, last stage", _Layer(batch, 4 * width, 8, 4 * width, 3)
    yield "ResNet-50, 56x56", _Layer(batch // 2, 4 * width, 56, 4 * width, 3)
    yield "ResNet-50, 14x14", _Layer(batch // 2, 16 * width, 14, 16 * width, 3)
    yield "ResNet-50, 14x14, 1x1", _Layer(batch // 2, 16 * width, 14, 64 * width, 1)
    yield "linear", _Layer(64 * batch, 64 * width, 1, 256 * width, 1)


def _rows(
    name: str, layer: _Layer, device: torch.device, sizes: Sizes
) -> Iterator[dict[str, object]]:
    samples, inputs, side, outputs, kernel, stride = layer
    padding, places = kernel // 2, (side - 1) // stride + 1

    def codes(low: int, *shape: int) -> Tensor:
        numbers = torch.randint(low, 256 + low, shape, device=device)
        dtype = torch.uint8 if low == 0 else torch.int8
        return numbers.to(dtype).contiguous(memory_format=torch.channels_last)

    x = codes(0, samples, inputs, side, side)
    weight = codes(-127, outputs, inputs, kernel, kernel)
    grad = codes(-127, samples, outputs, places, places)
    exponents = torch.randint(-12, -8, (samples,), dtype=torch.int32, device=device)
    window = {"stride": stride, "padding": padding}
    scaled = {"exponents": exponents, **window}
    ours: dict[str, Callable[[], object]] = {
        "forward": partial(products.convolve, x, weight, exponents=-12, **window),
        "input gradient": partial(
            products.convolve_input_gradient, grad, weight, (side, side), **scaled
        ),
        "weight gradient": partial(
            products.convolve_weight_gradient, x, grad, (kernel, kernel), **scaled
        ),
    }
    theirs = {
        str(dtype)[6:]: torch_products(x.to(dtype), weight.to(dtype), grad.to(dtype), stride)
        for dtype in (torch.bfloat16, torch.float32)
    }
    described = f"{samples}x{inputs}x{side}x{side} to {outputs}, {kernel}x{kernel}"
    for product, call in ours.items():
        calls = {"ours": call, **{who: own[product] for who, own in theirs.items()}}
        seconds = compare(calls, device, sizes.turns, CALLS)
        operations = 2 * grad.numel() * inputs * kernel * kernel
        yield {
            "layer": name,
            "what": described,
            "product": product,
            "time over bfloat16's": seconds["ours"] / seconds["bfloat16"],
            "time over float32's": seconds["ours"] / seconds["float32"],
            **{f"{who}, us": s * 1e6 for who, s in seconds.items()},
            "T operations/s": operations / seconds["ours"] / 1e12,
            "launches": launches(call, device),
        }
