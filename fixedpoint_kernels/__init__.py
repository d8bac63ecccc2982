"""Fixed-point rounding, bit packing and histograms for PyTorch, on CPU and GPU."""

from fixedpoint_kernels import division, few_bit, forward_save
from fixedpoint_kernels.block import quantize_block
from fixedpoint_kernels.formats import BlockFloat, FixedPoint, Minifloat
from fixedpoint_kernels.histogram import histogram_candidates
from fixedpoint_kernels.packing import pack, unpack
from fixedpoint_kernels.rounding import (
    decode,
    encode,
    quantize,
    quantize_many,
    quantize_with_mask,
)

__all__ = [
    "BlockFloat",
    "FixedPoint",
    "Minifloat",
    "decode",
    "division",
    "encode",
    "few_bit",
    "forward_save",
    "histogram_candidates",
    "pack",
    "quantize",
    "quantize_block",
    "quantize_many",
    "quantize_with_mask",
    "unpack",
]
