"""Networks of linear layers, layer norms, GELU, attention and sums, run as a whole on integer codes.

segment = Segment(inputs, operations, outputs)                  # what there is
program = Program(segment, samples, tokens, path, ...)          # for so many rows
ys, kept = forward(program, xs, parameters)
dxs, grads = backward(program, kept, parameters, dys)

A thread takes the tokens of a few samples through all operations while they are in its cache. What it
computes is ``reference``, in plain PyTorch: forward to the bit.
"""

from fixedpoint_kernels.tokens.graph import (
    Add,
    Attention,
    Gelu,
    Linear,
    Norm,
    Operation,
    Part,
    Relu,
    Segment,
)
from fixedpoint_kernels.tokens.reference import Parameters

__all__ = [
    "Add",
    "Attention",
    "Gelu",
    "Linear",
    "Norm",
    "Operation",
    "Parameters",
    "Part",
    "Relu",
    "Segment",
]
