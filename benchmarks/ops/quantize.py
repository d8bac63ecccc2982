"""Stochastic rounding to <8, 4>, beside QPyTorch, plain torch and a copy.

Ours and ``copy_`` write into an output that is there already; QPyTorch and plain torch have no way
to, and make a new one. Plain torch is the usual ``floor(x + u)``, clamped.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks import qpytorch, resnet20
from benchmarks.timing import Case
from fixedpoint_kernels import FixedPoint, quantize, quantize_many

TESTS = "tests/fixedpoint_kernels/test_rounding.py"
SIZES = 10_000, 100_000, 1_000_000, 10_000_000
FMT = FixedPoint(8, 4)


def cases() -> Iterator[Case]:
    """Yield one tensor of each size, then ResNet20's list."""
    theirs = _qtorch()
    for n in SIZES:
        x = torch.randn(n)
        yield _one_tensor(x, torch.empty_like(x), theirs)
    xs = [torch.randn(shape) for shape in resnet20.shapes()]
    yield _list("ResNet20, 65 tensors", xs, [torch.empty_like(x) for x in xs], theirs)


def _one_tensor(x: Tensor, out: Tensor, theirs: Callable[[Tensor], Tensor] | None) -> Case:
    contestants: dict[str, Callable[[], object]] = {
        "ours": lambda: quantize(x, FMT, seed=1, out=out),
        "copy_": lambda: out.copy_(x),
        "torch": lambda: _plain_torch(x),
    }
    if theirs is not None:
        contestants["qtorch"] = lambda: theirs(x)
    return Case(f"{x.numel():,} elements", x.numel(), contestants)


def _list(
    name: str, xs: list[Tensor], outs: list[Tensor], theirs: Callable[[Tensor], Tensor] | None
) -> Case:
    fmts = [FMT] * len(xs)
    contestants: dict[str, Callable[[], object]] = {
        "ours": lambda: quantize_many(xs, fmts, seed=1, out=outs),
        "copy_": lambda: [out.copy_(x) for x, out in zip(xs, outs, strict=True)],
        "torch": lambda: [_plain_torch(x) for x in xs],
    }
    if theirs is not None:
        contestants["qtorch"] = lambda: [theirs(x) for x in xs]
    return Case(name, sum(math.prod(x.shape) for x in xs), contestants)


def _plain_torch(x: Tensor) -> Tensor:
    codes = torch.floor(x * FMT.scale + torch.rand_like(x))
    return codes.clamp_(FMT.min_code, FMT.max_code).mul_(FMT.lsb)


def _qtorch() -> Callable[[Tensor], Tensor] | None:
    """Return QPyTorch's rounding, or None."""
    quant = qpytorch.load()
    if quant is None:
        return None
    return lambda x: quant.fixed_point_quantize(x, FMT.wl, FMT.fl, rounding="stochastic")
