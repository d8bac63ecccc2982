"""One input of each target."""

from collections.abc import Callable
from random import Random

from benchmarks.fuzz import (
    block,
    division,
    export,
    few_bit,
    histogram,
    integer,
    operators,
    packed,
    packing,
    products,
    rounding,
)

CHECKS: dict[str, Callable[[Random], None]] = {
    "quantize": rounding.quantize,
    "quantize_outs": rounding.quantize_outs,
    "quantize_many": rounding.quantize_many,
    "lazy": rounding.lazy,
    "codes": rounding.codes,
    "pack": packing.pack,
    "histogram": histogram.sampled,
    "expected": histogram.expected,
    "push_down": histogram.pushed,
    "few_bit": few_bit.gradients,
    "few_bit_codes": few_bit.codes,
    "division": division.compress,
    "block": block.block,
    "observe": block.observe,
    "products": products.multiply,
    "gradients": products.rounded,
    "integer": integer.run,
    "export": export.run,
    "packed": packed.files,
    "hostile": packed.hostile,
    "operators": operators.call,
}


def run_one(target: str, seed: int, index: int) -> None:
    """Try one input, which is made from these three alone.

    Raises:
        Exception: The result is wrong, or an error came that must not.
    """
    CHECKS[target](Random(f"{target} {seed} {index}"))
