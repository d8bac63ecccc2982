"""Forward and backward of each activation beside torch's own, at 1 to 4 bits, on a GPU if there is one.

The name of a row says which part of the bytes that torch keeps for backward is kept, as measured:
the storages of saved tensors, the input's among them, each counted once. CELU is not here: with its
defaults it is ELU.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.timing import Case
from fixedpoint_kernels import few_bit
from fixedpoint_kernels.few_bit import named

TESTS = "tests/fixedpoint_kernels/test_few_bit_kernels.py::test_kernels_equal_the_reference"
SECONDS = 2.0  # a row: there are many
N = 1_000_000
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONTINUOUS = [name for name in named.SHIPPED if hasattr(few_bit, name)]
STEPWISE = "relu", "leaky_relu", "relu6", "hardtanh", "hardsigmoid", "hardshrink", "softshrink"
Function = Callable[[Tensor], Tensor]


def cases() -> Iterator[Case]:
    """Yield the continuous activations at 1 to 4 bits, then the stepwise ones at 1."""
    x, grad = torch.randn(N, device=DEVICE, requires_grad=True), torch.randn(N, device=DEVICE)
    for name in (*CONTINUOUS, *STEPWISE):
        for bits in (1,) if name in STEPWISE else (1, 2, 3, 4):
            yield _case(name, bits, x, grad)


def _case(name: str, bits: int, x: Tensor, grad: Tensor) -> Case:
    theirs = few_bit.function_of(*few_bit.resolve(name))

    def ours(x: Tensor) -> Tensor:
        return getattr(few_bit, name)(x, bits=bits)

    kept, all_bytes = _kept_bytes(ours, x), _kept_bytes(theirs, x)
    label = f"{name}, {bits} bit{'s' * (bits > 1)}, keeps 1/{all_bytes / kept:.1f}: {kept:,} bytes"
    contestants = {"ours": _both(ours, x, grad), "torch": _both(theirs, x, grad)}
    return Case(f"{label} of {all_bytes:,}", N, contestants)


def _both(function: Function, x: Tensor, grad: Tensor) -> Callable[[], object]:
    def call() -> None:
        torch.autograd.grad(function(x), x, grad)
        if x.is_cuda:
            torch.cuda.synchronize()

    return call


def _kept_bytes(function: Function, x: Tensor) -> int:
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = function(x)
    del y  # until here, so that no storage took another's place
    return sum(storages.values())
