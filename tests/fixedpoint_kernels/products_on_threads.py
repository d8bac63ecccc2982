"""Products on two threads, in a process of their own: ``products_on_threads.py PATH``."""

import sys

import torch

from fixedpoint_kernels import products
from fixedpoint_kernels.products import reference
from fixedpoint_kernels.products.shapes import Window

torch.set_num_threads(2)
generator = torch.Generator().manual_seed(0)


def codes(dtype, *shape):
    low, high = (0, 256) if dtype is torch.uint8 else (-128, 128)
    return torch.randint(low, high, shape, generator=generator).to(dtype)


for dtype, side in ((torch.uint8, 32), (torch.int8, 32), (torch.uint8, 4), (torch.int8, 4)):
    x, weight = codes(dtype, 40, 20, side, side), codes(torch.int8, 40, 20, 3, 3)
    grad = codes(torch.int8, 40, 40, side, side)
    exponents = torch.randint(-12, -8, (40,), generator=generator, dtype=torch.int32)
    with products.force(sys.argv[1]):
        found = (
            products.convolve(x, weight, padding=1),
            products.convolve_with_statistics(x, weight, padding=1)[1].sums,
            products.convolve_input_gradient(grad, weight, (side, side), padding=1),
            products.convolve_weight_gradient(x, grad, (3, 3), padding=1),
            products.convolve_weight_gradient(x, grad, (3, 3), padding=1, exponents=exponents),
        )
    window = Window(padding=(1, 1))
    y, statistics = reference.convolve(x, weight, None, window, torch.int32, True)
    wanted = (
        y,
        statistics[0],
        reference.input_gradient(grad, weight, None, (side, side), window, torch.int32),
        reference.weight_gradient(x, grad, None, (3, 3), window),
        reference.weight_gradient(x, grad, exponents, (3, 3), window),
    )
    assert [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)] == [True] * 5
