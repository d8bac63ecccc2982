"""Where a step on integer codes pays: ResNet20 by batch, width and size of images.

"ours" is the step of ``int8_training``, beside PyTorch's in float32 and under bfloat16 autocast, contiguous
and channels last. ``--threads`` says on how many threads. One element is one image.
"""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.ops.int8_training import contestants
from benchmarks.timing import Case
from fixedpoint_kernels import products
from train.resnet20 import resnet20

TESTS = "tests/marvin/test_fusion.py"
SECONDS = 8.0  # a row
SIZES = (  # images of a batch, width, side of an image
    (8, 16, 32),
    (32, 16, 32),
    (128, 16, 32),
    (512, 16, 32),
    (128, 8, 32),
    (32, 64, 32),
    (8, 128, 32),
    (2, 256, 32),
    (128, 16, 8),
    (128, 16, 16),
    (32, 16, 64),
    (8, 16, 128),
    (2, 16, 224),
)


def cases() -> Iterator[Case]:
    """Yield a step of each size."""
    print(f"path: {products.path()}")
    for images, width, side in SIZES:
        x, y = torch.randn(images, 3, side, side), torch.randint(10, (images,))
        make = partial(resnet20, width=width)
        own = contestants(make, x, y, simulates=False)
        yield Case(f"{images} images of {side}x{side}, width {width}", images, own)
