"""A whole step on integer codes of networks that join values, or have batch norm before convolutions.

As ``int8_training``: "ours" beside PyTorch's own, 64 images of 32x32. One element is one image.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from benchmarks.networks import densenet40, preact_resnet20, unet
from benchmarks.ops.int8_training import contestants
from benchmarks.timing import Case
from fixedpoint_kernels import products

TESTS = "tests/marvin/test_fusion.py"
SECONDS = 40.0  # a row: steps are long
IMAGES, SIDE = 64, 32
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {  # with places of a class
    "PreActResNet20": (preact_resnet20, ()),
    "DenseNet-40, growth 12": (densenet40, ()),
    "U-Net of width 16": (unet, (SIDE, SIDE)),
}


def cases() -> Iterator[Case]:
    """Yield a step of each network."""
    print(f"path: {products.path()}")
    for name, (make, places) in NETWORKS.items():
        x, y = torch.randn(IMAGES, 3, SIDE, SIDE), torch.randint(10, (IMAGES, *places))
        row = f"{name}, {IMAGES} images of {SIDE}x{SIDE}"
        yield Case(row, IMAGES, contestants(make, x, y, simulates=False))
