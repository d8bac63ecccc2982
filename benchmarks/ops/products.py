"""Forward and backward products of ResNet20's layers on int8 codes, beside torch's own.

Each contestant has what it needs of the layers before it: codes, or floats channels last. Packing
of weights is part of every call, for each step of training has new ones. "torch int8" is oneDNN's
convolution forward; backward there is none. Times are by element of the output (of the input, for
its gradient). The last two rows run all three products of a network, each layer as often as
it has it, one element a layer and product. On a processor without AMX, "ours" is the path that
``FIXEDPOINT_KERNELS_PRODUCTS`` or the processor chooses; set it to ``avx512_vnni`` to see that path
where there is AMX, and ``ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16`` to see torch without tiles.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import Case
from fixedpoint_kernels import products

TESTS = "tests/fixedpoint_kernels/test_products.py::test_every_path_equals_an_oracle_in_numpy"
SECONDS = 2.0  # a row: there are many
LAYERS = (  # input channels over width, height and width, output channels over width, stride
    (1, 32, 1, 1),
    (1, 32, 2, 2),
    (2, 16, 2, 1),
    (2, 16, 4, 2),
    (4, 8, 4, 1),
)
TIMES = 6, 1, 5, 1, 5  # that a ResNet20 has each, but the first layer and projections
WIDTHS = {16: 128, 64: 32}  # and samples
PADDING = (1, 1)


def cases() -> Iterator[Case]:
    """Yield the three products of each layer."""
    print(f"path: {products.path()}")
    whole = []
    for width, samples in WIDTHS.items():
        calls: dict[str, list[Callable[[], object]]] = {}
        for (inputs, size, outputs, stride), times in zip(LAYERS, TIMES, strict=True):
            for case in _layer(samples, width * inputs, size, width * outputs, stride):
                yield case
                for name in ("ours", "float32", "bfloat16"):
                    calls.setdefault(name, []).extend([case.contestants[name]] * times)
        name = f"ResNet20 of width {width}, {samples} images: all"
        whole.append(Case(name, 3 * sum(TIMES), {k: partial(_all, v) for k, v in calls.items()}))
    yield from whole


def _all(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _layer(samples: int, inputs: int, size: int, outputs: int, stride: int) -> Iterator[Case]:
    x = _last(torch.randint(0, 256, (samples, inputs, size, size)).to(torch.uint8))
    weight = _last(torch.randint(-127, 128, (outputs, inputs, 3, 3)).to(torch.int8))
    places = size // stride
    grad = _last(torch.randint(-127, 128, (samples, outputs, places, places)).to(torch.int8))
    exponents = torch.randint(-12, -8, (samples,), dtype=torch.int32)
    name = f"{samples}x{inputs}x{size}x{size} to {outputs}" + f", stride {stride}" * (stride > 1)
    own: dict[str, Any] = {"stride": stride, "padding": 1}

    theirs = {
        str(dtype)[6:]: torch_products(x.to(dtype), weight.to(dtype), grad.to(dtype), stride)
        for dtype in (torch.float32, torch.bfloat16)
    }

    def row(product: str, count: int, ours: Callable) -> Case:
        contestants = {"ours": ours, **{name: calls[product] for name, calls in theirs.items()}}
        if product == "forward":
            contestants["torch int8"] = partial(_onednn, x, weight, stride)
        return Case(f"{name}: {product}", count, contestants)

    ours: Callable = partial(products.convolve, x, weight, exponents=-12, **own)
    yield row("forward", grad.numel(), ours)
    numbers = {"exponents": exponents, **own}
    ours = partial(products.convolve_input_gradient, grad, weight, (size, size), **numbers)
    yield row("input gradient", x.numel(), ours)
    ours = partial(products.convolve_weight_gradient, x, grad, (3, 3), **numbers)
    yield row("weight gradient", grad.numel(), ours)


def torch_products(
    x: Tensor, weight: Tensor, grad: Tensor, stride: int
) -> dict[str, Callable[[], Tensor]]:
    """Return torch's own three products of a layer, whose kernel keeps the size at stride 1."""
    strides, padding = [stride] * 2, [n // 2 for n in weight.shape[2:]]

    def backward(which: list[bool]) -> Tensor:
        numbers = strides, padding, [1, 1], False, [0, 0], 1
        return torch.ops.aten.convolution_backward(grad, x, weight, None, *numbers, which)

    return {
        "forward": partial(torch.conv2d, x, weight, None, strides, padding),
        "input gradient": partial(backward, [True, False, False]),
        "weight gradient": partial(backward, [False, True, False]),
    }


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _onednn(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Convolve by torch's private operators for quantised inference."""
    onednn, outputs = torch.ops.onednn, len(weight)
    scales, zeros = torch.full((outputs,), 2.0**-12), torch.zeros(outputs, dtype=torch.int32)
    numbers = [stride] * 2, list(PADDING), [1, 1], 1
    packed = onednn.qconv_prepack(weight, scales, 1.0, 0, *numbers, list(x.shape))
    result = 1.0, 0, torch.float32, "none", [], ""
    return onednn.qconv_pointwise(x, 1.0, 0, packed, scales, zeros, None, *numbers, *result)
