"""Compressing activations to block means and 2 bits an element, beside plain PyTorch.

Plain PyTorch pools, subtracts, quantises with ``rand_like`` and packs by shifts, without the care
of ours for edges, infinities and constant planes. The name of a row says how many bytes are kept.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.timing import Case
from fixedpoint_kernels import division

TESTS = "tests/fixedpoint_kernels/test_division_kernels.py"
SHAPES = (128, 64, 32, 32), (32, 256, 56, 56), (128, 512, 7, 7), (4096, 1024)
BLOCK = 8


def cases() -> Iterator[Case]:
    """Yield each shape three times: compress, decompress, both; then one shape in other forms."""
    for shape in SHAPES:
        yield from _cases(torch.randn(shape), str(shape))
    x = torch.randn(SHAPES[0])
    yield from _cases(x.to(memory_format=torch.channels_last), "channels last")
    yield from _cases(x.bfloat16(), "bfloat16")


def _cases(x: Tensor, name: str) -> Iterator[Case]:
    ours, theirs = division.compress(x), _compress(x)
    size = f"{ours.size_bytes / 1e6:.2f} of {x.numel() * x.element_size() / 1e6:.2f} MB"
    steps: dict[str, dict[str, Callable[[], object]]] = {
        "compress": {"ours": lambda: division.compress(x), "torch": lambda: _compress(x)},
        "decompress": {
            "ours": lambda: division.decompress(ours),
            "torch": lambda: _decompress(theirs, x),
        },
        "both": {
            "ours": lambda: division.decompress(division.compress(x)),
            "torch": lambda: _decompress(_compress(x), x),
        },
    }
    for step, contestants in steps.items():
        yield Case(f"{step}, {name}, {size}", x.numel(), contestants)


def _compress(x: Tensor) -> tuple[Tensor, ...]:
    planes = _planes(x)
    means = F.avg_pool2d(planes, _edges(planes), ceil_mode=True).bfloat16()
    residual = planes - _spread(means, planes)
    low = residual.amin((2, 3), keepdim=True)
    step = (residual.amax((2, 3), keepdim=True) - low) / 3
    codes = ((residual - low) / step + torch.rand_like(residual)).floor_().clamp_(0, 3)
    four = codes.to(torch.uint8).view(-1, 4)
    packed = four[:, 0] | four[:, 1] << 2 | four[:, 2] << 4 | four[:, 3] << 6
    return means, packed, low.bfloat16(), step.bfloat16()


def _decompress(parts: tuple[Tensor, ...], x: Tensor) -> Tensor:
    means, packed, low, step = parts
    planes = _planes(x)
    codes = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], 1).view(planes.shape)
    values = codes * step.float() + low.float() + _spread(means, planes)
    return values.to(x.dtype).view(x.shape)


def _planes(x: Tensor) -> Tensor:
    return x.float().contiguous() if x.dim() == 4 else x.float()[:, None, None]


def _edges(planes: Tensor) -> tuple[int, int]:
    return min(BLOCK, planes.shape[2]), min(BLOCK, planes.shape[3])


def _spread(means: Tensor, planes: Tensor) -> Tensor:
    height, width = _edges(planes)
    whole = means.float().repeat_interleave(height, 2).repeat_interleave(width, 3)
    return whole[..., : planes.shape[2], : planes.shape[3]]
