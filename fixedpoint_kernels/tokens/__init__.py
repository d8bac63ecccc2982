"""Networks of linear layers, norms, activation functions, dropout, attention, sums and products, run as a whole on integer codes.

segment = Segment(inputs, operations, outputs)                  # what there is
program = Program(segment, samples, tokens, path, ...)          # for so many rows
ys, kept = forward(program, xs, parameters)
dxs, grads = backward(program, kept, parameters, dys)

A thread takes the tokens of a few samples through all operations while they are in its cache. What it
computes is ``reference``, in plain PyTorch: forward to the bit.
"""

from fixedpoint_kernels.dropout import Odds
from fixedpoint_kernels.functions import Curve
from fixedpoint_kernels.products import paths
from fixedpoint_kernels.tokens.graph import (
    Add,
    Attention,
    Curved,
    Cut,
    Dropout,
    Linear,
    Multiply,
    Norm,
    Operation,
    Part,
    Relu,
    Rotary,
    Segment,
    width_of,
)
from fixedpoint_kernels.tokens.reference import Parameters

__all__ = [
    "PATHS",
    "Add",
    "Attention",
    "Curve",
    "Curved",
    "Cut",
    "Dropout",
    "Linear",
    "Multiply",
    "Norm",
    "Odds",
    "Operation",
    "Parameters",
    "Part",
    "Relu",
    "Rotary",
    "Segment",
    "path",
    "width_of",
]

PATHS = ("amx", "avx512_vnni", "avx2")
"""Paths of products that these kernels have run on."""
_NEAREST = {"avx_vnni": "avx2"}  # what these processors have too


def path() -> str | None:
    """Return the path that these kernels take, as ``products.path``; None: none of ``PATHS``."""
    own = paths.path().name
    own = _NEAREST.get(own, own)
    return own if own in PATHS and own not in paths.unavailable() else None
