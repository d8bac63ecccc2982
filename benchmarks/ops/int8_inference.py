"""Inference on integer codes inside torch: a frozen model beside float32, bfloat16 autocast, and layers one by one.

"ours": ``marvin.freeze`` of a converted model. "prepacked": that, with weights that stay laid out between calls
(``marvin.integer.prepack``). "layer by layer": the same without chains
(``convert(frozen, fused=False)``). All others are PyTorch's own in eval mode. One element is one image.
"""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import marvin
from benchmarks.networks import efficientnet_b0, mobilenet_v2, resnet18
from benchmarks.ops.int8_training import fixed_point_model
from benchmarks.steps import Step
from benchmarks.timing import Case
from fixedpoint_kernels import products
from train.resnet20 import resnet20

TESTS = "tests/marvin/test_inference.py"
SECONDS = 20.0  # a row
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # with the side of its images
    "ResNet20": (resnet20, 32),
    "ResNet-18": (resnet18, 64),
    "MobileNetV2": (mobilenet_v2, 64),
    "EfficientNet-B0": (efficientnet_b0, 64),
}
BATCHES = 1, 8, 128


def cases() -> Iterator[Case]:
    """Yield a forward pass of each network, for some sizes of batches."""
    print(f"path: {products.path()}")
    for name, (make, side) in NETWORKS.items():
        frozen = frozen_model(make, torch.randn(8, 3, side, side))
        for images in BATCHES:
            x = torch.randn(images, 3, side, side)
            row = f"{name}, {images} image{'s' * (images > 1)} of {side}x{side}"
            yield Case(row, images, contestants(make, frozen, x))


def frozen_model(make: Callable[[], nn.Module], x: Tensor) -> nn.Module:
    """Return a network in the loss budget's formats, which it finds on ``x``, frozen."""
    y = torch.randint(10, (len(x),))
    model, step = fixed_point_model(make, x, y, integer=True)
    step()
    return marvin.freeze(model)


def contestants(make: Callable[[], nn.Module], frozen: nn.Module, x: Tensor) -> dict[str, Step]:
    """Return forward passes of a network by what computes them."""
    alone, prepacked = copy.deepcopy(frozen), copy.deepcopy(frozen)
    marvin.integer.convert(alone, fused=False)
    marvin.integer.prepack(prepacked)
    last = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
    own = {"ours": frozen, "prepacked": prepacked, "layer by layer": alone}
    found = {name: _forward(model, last) for name, model in own.items()}
    for dtype in (torch.float32, torch.bfloat16):
        for layout in (torch.contiguous_format, torch.channels_last)[: 1 + (x.dim() == 4)]:
            kind = f"{str(dtype)[6:]}" + " channels last" * (layout is torch.channels_last)
            model = make().eval()
            model.to(memory_format=layout)  # pyright: ignore[reportCallIssue]: torch has it
            found[kind] = _forward(
                model, x.contiguous(memory_format=layout) if x.dim() == 4 else x, dtype
            )
    return found


def _forward(model: nn.Module, x: Tensor, dtype: torch.dtype = torch.float32) -> Step:
    def step() -> None:
        autocast = torch.autocast("cpu", dtype, enabled=dtype is not torch.float32)
        with torch.inference_mode(), autocast:
            model(x)

    return step
