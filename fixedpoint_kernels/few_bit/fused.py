"""Which activations give value and code in one pass, and by which formula.

On a GPU, left to torch's operator are those whose formula needs a logarithm, or a difference that loses
digits, which Triton has no accurate function for: LogSigmoid, Mish, Softplus, Tanh, Tanhshrink and
the tanh form of GELU. On a CPU there are those whose value has torch's own bits, or nearly: ``formulas.py``.
"""

import torch

from fixedpoint_kernels.few_bit.activations import ENTRIES, Parameters

Fused = tuple[str, float, float, float]  # kind of formula, and its numbers

DTYPES = torch.float32, torch.bfloat16, torch.float16
_WITHOUT_NUMBERS = "hardsigmoid", "hardswish", "sigmoid", "silu", "softsign"
_AS_GIVEN = "hardshrink", "hardtanh", "leaky_relu", "softshrink", "threshold"
FORMULAS = ("elu", "gelu", *_WITHOUT_NUMBERS, *_AS_GIVEN)
WITH_EXPONENTIAL = "sigmoid", "silu", "tanh"  # whose last bit may be another than torch's
ON_CPU = (
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "softshrink",
    "softsign",
    "threshold",
    *WITH_EXPONENTIAL,
)
Passes = tuple[tuple[torch.dtype, ...], tuple[str, ...]]  # dtypes and kinds
NONE: Passes = (), ()
ONE_PASS: dict[str, Passes] = {"cuda": (DTYPES, FORMULAS), "cpu": (DTYPES[:1], ON_CPU)}


def fused_of(name: str, parameters: Parameters) -> Fused | None:
    """Return the formula of an activation, or None where torch's operator computes the value."""
    make = ENTRIES[name].formula
    formula = make(*parameters) if make else None
    if formula is None:
        return None
    kind, *numbers = formula
    a, b, c = (*map(float, numbers), 0.0, 0.0, 0.0)[:3]
    return str(kind), a, b, c
