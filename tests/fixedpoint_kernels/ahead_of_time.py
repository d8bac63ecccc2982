"""Compile every Triton kernel for a GPU that need not be there; run by test_ahead_of_time.py.

The launchers are called as a user's call would, on tensors of the CPU or, where they would not fit,
of the meta device. The driver is a stand-in and a launch stops after compilation, so that Triton
specialises on the real arguments: multiples of 16, ones, 64-bit sizes, alignment of pointers.
"""

import argparse
import ast
import contextlib
import importlib
import inspect
import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import fixedpoint_kernels
from fixedpoint_kernels import FixedPoint, Minifloat
from fixedpoint_kernels.division import Layout
from fixedpoint_kernels.division import gpu as division
from fixedpoint_kernels.few_bit import gpu as few_bit
from fixedpoint_kernels.few_bit.fused import FORMULAS, fused_of
from fixedpoint_kernels.few_bit.named import NAMES, resolve
from fixedpoint_kernels.few_bit.table import number
from fixedpoint_kernels.histogram import gpu as histogram
from fixedpoint_kernels.histogram.reference import Bins, Cells
from fixedpoint_kernels.memory import places_of
from fixedpoint_kernels.observer import gpu as observer
from fixedpoint_kernels.packing import _code_dtype
from fixedpoint_kernels.packing import gpu as packing
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.products import gpu as products
from fixedpoint_kernels.products.shapes import Window
from fixedpoint_kernels.rounding import gpu as rounding

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SIZES = 1027, 2**31 + 16
EVERY_SIZE = 1, 1024, 1027, 2**31 + 16, 2**31 + 1
FLOATS = torch.float32, torch.bfloat16, torch.float16
CODES = torch.int8, torch.uint8, torch.int16, torch.int32
FMT, KEY = FixedPoint(8, 4), Key(1, 1)  # Triton takes an argument of 1 for a constant
MINIFLOAT = Minifloat(4, 3, "nan")


def empty(n, dtype=torch.float32):
    return torch.empty(n, dtype=dtype, device="meta" if n >= 2**31 else "cpu")


def round_every_way(sizes):
    for n, mode in itertools.product(sizes, ("stochastic", "nearest")):
        rounding.quantize(empty(n), empty(n), None, FMT, mode, KEY)
        rounding.quantize(empty(1027), empty(1027), empty(1027, torch.bool), FMT, mode, KEY)
    for x, y in itertools.product(FLOATS, FLOATS + CODES):
        rounding.quantize(empty(1027, x), empty(1027, y), None, FMT, "stochastic", KEY)
    for mode, dtype in itertools.product(("stochastic", "nearest"), FLOATS):
        mask = empty(1027, torch.bool)
        rounding.quantize(empty(1027, dtype), empty(1027, dtype), mask, MINIFLOAT, mode, KEY)
    unaligned = empty(1028)[1:]
    rounding.quantize(unaligned, unaligned, None, FMT, "nearest", KEY)
    for mode in ("stochastic", "nearest"):
        xs = [empty(n) for n in (1, 1024, 5000)]
        places = places_of(xs, xs)
        rounding.quantize_many(places, [FMT] * 3, mode, KEY, [0] * 3, xs[0].device)
    for offset in (1, 2, 7, 2**34):
        key = Key(1, 1, offset)
        rounding.quantize(empty(1027), empty(1027), None, FMT, "stochastic", key)
        histogram.sampled(empty(1027), [FMT], Bins(-1.0, 50.0, 100), "stochastic", key)


def count_every_way(sizes):
    for n, mode in itertools.product(sizes, ("stochastic", "nearest")):
        histogram.sampled(empty(n), [FMT], Bins(-1.0, 50.0, 100), mode, KEY)
    for resolution in (1, 150):
        bins = Bins(-1.0, 50.0, resolution)
        histogram.sampled(empty(1027), [FMT] * 16, bins, "stochastic", KEY)
        histogram.cells(empty(1027), bins, Cells(7, 1, 16))
    for n in sizes:
        histogram.cells(empty(n), Bins(-1.0, 50.0, 100), Cells(7, -200, 400))


def observe_every_way(sizes):
    for n, fmt in itertools.product(sizes, (None, FMT)):
        observe_both_ways(n, torch.float32, fmt)
    for dtype in FLOATS:
        observe_both_ways(1027, dtype, FMT)


def observe_both_ways(n, dtype, fmt):
    x, ste_mask = empty(n, dtype), empty(n, torch.uint8)
    out = None if fmt is None else empty(n, dtype)
    observer.observe(x, out, ste_mask, fmt)
    observer.observe_gradient(x, ste_mask, out)


def pack_every_way(sizes):
    for bits in (1, 2, 3, 8, 9, 16, 17, 25, 26, 32):
        pack_and_unpack(1027, bits, True, _code_dtype(bits, True))
    for bits in (8, 15, 32):
        pack_and_unpack(1027, bits, False, _code_dtype(bits, True))
    for n in sizes:
        pack_and_unpack(n, 3, True, torch.int8)
    for dtype in (torch.int16, torch.int32, torch.int64):
        pack_and_unpack(1027, 7, True, dtype)


def pack_and_unpack(n, bits, signed, dtype):
    packed = empty((n * bits + 7) // 8, torch.uint8)
    packing.pack(empty(n, dtype), packed, bits)
    packing.unpack(packed, empty(n, _code_dtype(bits, signed)), bits, signed)


def few_bits_every_way(sizes):
    for bits in range(1, 9):
        save_in_few_bits(5000, bits, torch.float32, torch.float32)
    for dtype in (*FLOATS, torch.float64):
        save_in_few_bits(5000, 3, dtype, dtype)
    save_in_few_bits(5000, 3, torch.bfloat16, torch.float32)
    save_in_few_bits(5000, 3, torch.float32, torch.bfloat16)
    for n in sizes:
        save_in_few_bits(n, 3, torch.float32, torch.float32)
    found = dict.fromkeys(fused_of(*resolve(name)) for name in NAMES)
    formulas = [own for own in found if own and own[0] in FORMULAS]
    for fused, dtype in itertools.product(formulas, FLOATS):
        value_and_few_bits(5000, 3, dtype, fused)
    for n in sizes:
        value_and_few_bits(n, 8, torch.float32, ("gelu", 0.0, 0.0, 0.0))


def value_and_few_bits(n, bits, dtype, fused):
    table, planes = table_and_planes(n, bits)
    few_bit.value_and_encode(empty(n, dtype), empty(n, dtype), planes, table, fused)


def save_in_few_bits(n, bits, dtype, out_dtype):
    table, planes = table_and_planes(n, bits)
    few_bit.encode(empty(n, dtype), planes, table)
    few_bit.decode(empty(n, dtype), planes, empty(n, out_dtype), table)


def table_and_planes(n, bits):
    borders = np.arange(2**bits - 1, dtype=np.float32)
    table = number(borders, np.arange(2**bits), np.arange(2**bits, dtype=np.float32))
    return table, torch.empty(-(n // -1024) * bits * 32, dtype=torch.int32, device=empty(n).device)


def divide_every_way(sizes):
    for bits in (0, 1, 2, 4, 8):
        divide((3, 8, 32, 32), 8, bits, 2)
    for shape in [(2, 3, 7, 7), (2, 3, 112, 112)]:
        divide(shape, 8, 2, 2)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        divide((3, 8, 14, 14), 4, 2, 2, dtype)
    divide((2, 3, 9, 10, 11), 8, 2, 3)
    divide((64, 1000), None, 2, 1)
    divide((64, 1000), 300, 2, 1)
    for n in sizes:
        divide((n // 3 + 1, 3), 8, 2, 1)


def divide(shape, block, bits, spatial, dtype=torch.float32):
    layout = Layout(shape, dtype, block, bits, spatial)
    x = empty(torch.Size(shape).numel(), dtype)
    means = torch.empty(layout.means_shape, dtype=torch.bfloat16, device=x.device)
    codes = torch.empty(layout.codes_shape, dtype=torch.uint8, device=x.device)
    ranges = torch.empty(layout.ranges_shape, dtype=torch.bfloat16, device=x.device)
    division.compress(x, means, codes, ranges, layout, KEY)
    division.decompress(means, codes, ranges, x, layout)


def multiply_every_way(sizes):
    for dtype, stride in itertools.product((torch.int8, torch.uint8), (1, 2)):
        for outputs in (64, 512):
            multiply((3, 64, 14, 14), outputs, 3, Window((stride, stride), (1, 1)), dtype)
    multiply((3, 3, 9, 9), 5, 3, Window((1, 1), (1, 1), (2, 2)), torch.uint8)
    for n in sizes:
        multiply((n // 128 + 1, 64, 1, 1), 32, 1, Window(), torch.int8)


def multiply(shape, outputs, kernel, window, dtype):
    samples, channels, *size = shape
    x = empty(torch.Size(shape).numel(), dtype).view(shape)
    weight = torch.empty(outputs, channels, kernel, kernel, dtype=torch.int8, device=x.device)
    counts = window.outputs(size, (kernel, kernel))
    grad = empty(samples * outputs * counts[0] * counts[1], torch.int8)
    grad = grad.to(x.device).view(samples, outputs, *counts)
    one, each = (torch.empty(n, dtype=torch.int32, device=x.device) for n in (1, samples))
    for result, exponents in (torch.int32, None), (torch.float32, one), (torch.bfloat16, one):
        products.convolve(x, weight, exponents, window, result, False)
        products.input_gradient(grad, weight, exponents, tuple(size), window, result)
    products.input_gradient(grad, weight, each, tuple(size), window, torch.float32)
    for exponents in (each, one, None):
        products.weight_gradient(x, grad, exponents, (kernel, kernel), window)
    for floats in FLOATS:
        rows = torch.empty(samples, channels, dtype=floats, device=x.device)
        products.round_per_sample(rows, KEY)


def without_integer_cores(compiled):
    """Name the products that are not made with the integer instruction of the tensor cores."""
    instruction = re.compile(
        r"mma\.sync\.\S*\.s32\.s8\.s8\.s32|wgmma\S*\.s32\.s8\.s8|tcgen05\.mma\S*kind::i8|v_mfma_i32"
    )
    products_of = "_correlate_kernel", "_weight_gradient_kernel"
    texts = [
        (name, kernel.asm.get("ptx") or kernel.asm["amdgcn"])
        for (name, _), kernel in compiled.items()
        if name in products_of
    ]
    return {name for name, text in texts if not instruction.search(text)}


class Driver:
    """What Triton asks of a driver before it launches."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@contextlib.contextmanager
def compiled_for(target, forced):
    """Collect what launches compile, as ``{(kernel name, hash): compiled kernel}``."""
    compiled, run = {}, JITFunction.run

    def compile_only(self, *args, grid, warmup=False, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options, **forced)
        compiled[self.fn.__name__, kernel.hash] = kernel

    triton.runtime.driver.set_active(Driver(target))
    JITFunction.run = compile_only
    yield compiled
    JITFunction.run = run


def launched_kernels():
    """Name the kernels that some ``gpu.py`` launches, in the form ``kernel[grid](...)``."""
    root = Path(fixedpoint_kernels.__file__).parent
    for path in sorted(root.rglob("gpu.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        module = importlib.import_module(".".join(parts))
        for call in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript):
                kernel = getattr(module, ast.unparse(call.func.value), None)
                if isinstance(kernel, JITFunction):
                    yield kernel.fn.__name__


def stack_bytes(kernels):
    """Return the bytes of stack that each kernel uses: spilled registers are there."""
    if "amdgcn" in kernels[0].asm:
        found = [re.search(r"private_segment_fixed_size: (\d+)", k.asm["amdgcn"]) for k in kernels]
        return [int(match[1]) for match in found]
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        sizes = []
        for kernel in kernels:
            Path(file.name).write_bytes(kernel.asm["cubin"])
            command = [tool, "--dump-resource-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            sizes.append(int(re.search(r"STACK:(\d+)", usage)[1]))
    return sizes


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--max-registers", type=int, help="provoke spilling")
    arguments = parser.parse_args()
    sizes = EVERY_SIZE if arguments.target == "sm_90" else SIZES
    forced = {"maxnreg": arguments.max_registers} if arguments.max_registers else {}
    with compiled_for(TARGETS[arguments.target], forced) as compiled:
        if forced:
            divide((3, 8, 32, 32), 8, 2, 2)
        else:
            round_every_way(sizes)
            count_every_way(sizes)
            observe_every_way(sizes)
            pack_every_way(sizes)
            few_bits_every_way(sizes)
            divide_every_way(sizes)
            multiply_every_way(sizes)
    missing = set(launched_kernels()) - {name for name, _ in compiled}
    stack = stack_bytes(list(compiled.values()))
    spilled = {name for (name, _), size in zip(compiled, stack, strict=True) if size}
    slow = without_integer_cores(compiled)
    print(f"{arguments.target}: {len(compiled)} kernels, {missing=}, {spilled=}, {slow=}")
    sys.exit(bool(missing or spilled or slow))


if __name__ == "__main__":
    main()
