"""Which activations give value and code in one pass on a GPU, and by which formula.

Left to torch's operator are those whose formula needs a logarithm, or a difference that loses
digits, which Triton has no accurate function for: LogSigmoid, Mish, Softplus, Tanh, Tanhshrink and
the tanh form of GELU.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

Fused = tuple[str, float, float, float]  # kind of formula, and its numbers

DTYPES = torch.float32, torch.bfloat16, torch.float16
_SCALE = np.float32(1.0507009873554805)
_SELU = float(_SCALE * np.float32(1.6732632423543772)), 1.0, float(_SCALE)  # as torch multiplies
_WITHOUT_NUMBERS = "hardsigmoid", "hardswish", "sigmoid", "silu", "softsign"
_AS_GIVEN = "hardshrink", "hardtanh", "leaky_relu", "softshrink", "threshold"
FORMULAS = ("elu", "gelu", *_WITHOUT_NUMBERS, *_AS_GIVEN)


def fused_of(name: str, parameters: tuple[Any, ...]) -> Fused | None:
    """Return the formula of an activation, or None where torch's operator computes the value."""
    numbers: tuple[float, ...] = ()
    if name in ("elu", "celu"):
        alpha = parameters[0]
        name, numbers = "elu", (alpha, 1.0 / alpha if name == "celu" else 1.0, 1.0)
    elif name == "selu":
        name, numbers = "elu", _SELU
    elif name in ("relu", "relu6"):
        name, numbers = "hardtanh", (0.0, 6.0 if name == "relu6" else float("inf"))
    elif name in _AS_GIVEN:
        numbers = parameters
    elif name not in _WITHOUT_NUMBERS and (name, parameters) != ("gelu", ("none",)):
        return None
    a, b, c = (*numbers, 0.0, 0.0, 0.0)[:3]
    return name, a, b, c


def is_fused(x: Tensor, fused: Fused | None) -> bool:
    """Say whether the one pass is there for ``x``."""
    return fused is not None and x.is_cuda and x.dtype in DTYPES
