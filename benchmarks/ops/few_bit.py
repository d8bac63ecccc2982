"""Forward and backward of each activation beside torch's own, at 1 to 4 bits.

The name of a row says how many bytes are kept for backward, ours and those of its float32 input.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.timing import Case
from fixedpoint_kernels import few_bit
from fixedpoint_kernels.few_bit import named

TESTS = "tests/fixedpoint_kernels/test_few_bit_kernels.py"
N = 1_000_000
STEPWISE = "relu", "leaky_relu", "relu6", "hardtanh", "hardsigmoid", "hardshrink", "softshrink"


def cases() -> Iterator[Case]:
    """Yield the continuous activations at 1 to 4 bits, then the stepwise ones at 1."""
    x, grad = torch.randn(N, requires_grad=True), torch.randn(N)
    for name in named.NAMES:
        if name in named.resolve(name) and name != "threshold":
            for bits in (1,) if name in STEPWISE else (1, 2, 3, 4):
                yield _case(name, bits, x, grad)


def _case(name: str, bits: int, x: Tensor, grad: Tensor) -> Case:
    theirs = named.function_of(*named.resolve(name))

    def ours(x: Tensor) -> Tensor:
        return getattr(few_bit, name)(x, bits=bits)

    kept = -(N // -1024) * 128 * bits
    contestants = {"ours": _both(ours, x, grad), "torch": _both(theirs, x, grad)}
    return Case(f"{name}, {bits} bits, {kept:,} of {4 * N:,} bytes", N, contestants)


def _both(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(function(x), x, grad)
