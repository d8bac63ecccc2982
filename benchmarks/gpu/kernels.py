"""Every Triton kernel in the ways that are checked and timed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu import work
from fixedpoint_kernels.few_bit import named
from fixedpoint_kernels.few_bit.fused import FORMULAS, fused_of

__all__ = ["JOBS", "Job"]

FLOAT, HALF = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Job:
    """One kernel in one of its ways.

    Args:
        name: Shown in the table.
        group: Package of ``fixedpoint_kernels`` that has it.
        kernel: The Triton kernel it launches.
        make: Makes the work of ``n`` elements on a device.
        reference: What to compare with where the package's reference has no such function.
        is_exact: Whether the bits must be the same; values of few-bit activations have 2 units.
        is_timed: Whether it has a row in the table of bandwidths.
    """

    name: str
    group: str
    kernel: str
    make: work.Make
    reference: Callable[[list[Tensor]], list[Tensor]] | None = None
    is_exact: bool = True
    is_timed: bool = True


def _rounding() -> Iterator[Job]:
    ways = {
        "stochastic": work.rounding("stochastic", FLOAT, FLOAT),
        "nearest": work.rounding("nearest", FLOAT, FLOAT),
        "stochastic, with mask": work.rounding("stochastic", FLOAT, FLOAT, True),
        "nearest, with mask": work.rounding("nearest", FLOAT, FLOAT, True),
        "stochastic, bfloat16": work.rounding("stochastic", HALF, HALF),
        "stochastic, float16": work.rounding("stochastic", torch.float16, torch.float16),
        "stochastic, to int8": work.rounding("stochastic", FLOAT, torch.int8),
        "nearest, to int16": work.rounding("nearest", FLOAT, torch.int16),
    }
    for name, make in ways.items():
        yield Job(f"quantize, {name}", "rounding", "_quantize_kernel", make)
    name = f"quantize_many, {work.TENSORS} tensors"
    yield Job(name, "rounding", "_quantize_many_kernel", work.many)


def _histograms() -> Iterator[Job]:
    name = f"sampled counts of {len(work.CANDIDATES)} formats"
    yield Job(name, "histogram", "_sampled_kernel", work.sampled)
    yield Job("counts in cells", "histogram", "_cells_kernel", work.cells)


def _observer() -> Iterator[Job]:
    yield Job("round and observe", "observer", "_observe_kernel", work.observe)
    kernel = "_observe_gradient_kernel"
    yield Job("mask and observe a gradient", "observer", kernel, work.observe_gradient)


def _packing() -> Iterator[Job]:
    sizes = {1: torch.int8, 3: torch.int8, 8: torch.int8, 12: torch.int16, 25: torch.int32}
    for bits, dtype in sizes.items():
        yield Job(f"pack, {bits} bits", "packing", "_pack_kernel", work.pack(bits, dtype))
        yield Job(f"unpack, {bits} bits", "packing", "_unpack_kernel", work.unpack(bits, dtype))


def _few_bit() -> Iterator[Job]:
    ways = [(bits, FLOAT) for bits in range(1, 9)] + [(3, HALF)]
    for bits, dtype in ways:
        name = f"{bits} bits" + (", bfloat16" if dtype == HALF else "")
        timed = bits in (1, 3, 8)
        make = work.encode("tanh", bits, dtype)
        yield Job(f"encode, {name}", "few_bit", "_encode_kernel", make, is_timed=timed)
        make = work.decode(bits, dtype)
        yield Job(f"decode, {name}", "few_bit", "_decode_kernel", make, is_timed=timed)
    for name in named.NAMES:
        fused = fused_of(*named.resolve(name))
        if fused and fused[0] in FORMULAS:
            yield Job(
                f"{name} and its code",
                "few_bit",
                "_encode_kernel",
                work.value_and_encode(name, 3),
                work.value_and_codes(name, 3),
                is_exact=False,
                is_timed=name in ("gelu", "silu", "relu"),
            )


def _division() -> Iterator[Job]:
    ways = [((32, 32), 2, FLOAT), ((56, 56), 2, FLOAT), ((7, 7), 2, FLOAT), ((1024,), 2, FLOAT)]
    ways += [((32, 32), bits, FLOAT) for bits in (1, 4, 8)] + [((32, 32), 2, HALF)]
    for sides, bits, dtype in ways:
        name = f"{'x'.join(map(str, sides))}, {bits} bits" + (", bfloat16" * (dtype == HALF))
        make = work.compress(sides, bits, dtype)
        yield Job(f"compress, {name}", "division", "_compress_kernel", make)
        make = work.decompress(sides, bits, dtype)
        yield Job(f"decompress, {name}", "division", "_decompress_kernel", make)


def _products() -> Iterator[Job]:
    """Yield products, which no copy's bandwidth bounds, and the rounding of gradients."""
    kernel = "_correlate_kernel"
    for name, make in {
        "convolve, uint8": work.convolve(torch.uint8, FLOAT, 1),
        "convolve, int8, to bfloat16": work.convolve(torch.int8, HALF, 2),
        "input gradient": work.input_gradient(1),
        "input gradient, stride 2": work.input_gradient(2),
    }.items():
        yield Job(name, "products", kernel, make, is_timed=False)
    kernels = {
        "uint8": ("_weight_gradient_kernel", work.weight_gradient(torch.uint8)),
        "int8": ("_lay_kernel", work.weight_gradient(torch.int8)),
        "int8, one exponent": ("_group_kernel", work.weight_gradient(torch.int8, 1)),
        "uint8, integers": ("_finish_kernel", work.weight_gradient(torch.uint8, 0)),
    }
    for name, (kernel, make) in kernels.items():
        yield Job(f"weight gradient, {name}", "products", kernel, make, is_timed=False)
    make = work.round_per_sample(FLOAT, 3)
    yield Job("round 3 samples", "products", "_round_kernel", make)
    make = work.round_per_sample(HALF, 9)
    yield Job("round 9 samples, bfloat16", "products", "_largest_kernel", make)


JOBS = (
    *_rounding(),
    *_histograms(),
    *_observer(),
    *_packing(),
    *_few_bit(),
    *_division(),
    *_products(),
)
