"""Networks of convolutions, batch norm, sums, concatenation, activations and pooling, run as a whole on integer codes.

segment = Segment(layers, values)                              # what there is
program = Program(segment, len(x), x.shape[2:], path, ...)     # for images of one size
ys, kept = forward(program, x, parameters)
dx, grads = backward(program, kept, parameters, dys)

Between two layers go codes; batch norm, sums, ReLU and rounding happen in the cache. What it
computes is ``reference``, in plain PyTorch: forward to the bit.
"""

from fixedpoint_kernels.fused.graph import (
    INPUT,
    LONGEST,
    MOST_TAPS,
    Joined,
    Layer,
    Norm,
    Pooled,
    Scaled,
    Segment,
    Value,
)
from fixedpoint_kernels.fused.reference import Gradients, Parameters
from fixedpoint_kernels.fused.taken import Wanted

__all__ = [
    "INPUT",
    "LONGEST",
    "MOST_TAPS",
    "Gradients",
    "Joined",
    "Layer",
    "Norm",
    "Parameters",
    "Pooled",
    "Scaled",
    "Segment",
    "Value",
    "Wanted",
]
