"""A whole step on integer codes of networks that people train: torchvision's structures, and timm's own.

As ``int8_training``: "ours" beside PyTorch's own, 32 images of 64x64. timm needs torchvision; without it
its rows are left out by name. One element is one image.
"""

import importlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from benchmarks.networks import mobilenet_v2, resnet18
from benchmarks.ops.int8_training import contestants
from benchmarks.timing import Case
from fixedpoint_kernels import products

TESTS = "tests/marvin/test_fusion.py"
SECONDS = 40.0  # a row: steps are long
IMAGES, SIDE = 32, 64
_TIMM = (
    "resnet50", "resnext50_32x4d", "regnety_008", "mobilenetv3_large_100", "efficientnet_b0"
)  # fmt: skip


def cases() -> Iterator[Case]:
    """Yield a step of each network."""
    print(f"path: {products.path()}")
    networks: dict[str, Callable[[], nn.Module]] = {
        "ResNet-18": resnet18,
        "MobileNetV2": mobilenet_v2,
    }
    try:
        timm = importlib.import_module("timm")
        networks |= {
            f"timm {name}": lambda name=name: timm.create_model(name, num_classes=10)
            for name in _TIMM
        }
    except (ImportError, RuntimeError) as error:  # torchvision of another torch
        print(f"left out, for timm cannot be imported ({error}): {', '.join(_TIMM)}")
    for name, make in networks.items():
        x, y = torch.randn(IMAGES, 3, SIDE, SIDE), torch.randint(10, (IMAGES,))
        row = f"{name}, {IMAGES} images of {SIDE}x{SIDE}"
        yield Case(row, IMAGES, contestants(make, x, y))
