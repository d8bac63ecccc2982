"""What products of integers count in PyTorch's ``FlopCounterMode``: as many operations as those of floats.

To be imported where PyTorch's compiler is loaded anyway: the counter loads Triton, where it is installed.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch.utils.flop_counter import register_flop_formula

from fixedpoint_kernels.products import operators as operators

__all__: list[str] = []

_Shape = Sequence[int]


@register_flop_formula(torch.ops.fixedpoint_kernels.products_convolve)
def _forward(_: _Shape, weight: _Shape, *args: object, out_shape: _Shape, **kwargs: object) -> int:
    return 2 * prod(out_shape) * prod(weight[1:])


@register_flop_formula(torch.ops.fixedpoint_kernels.products_input_gradient)
def _input_gradient(grad: _Shape, weight: _Shape, *args: object, **kwargs: object) -> int:
    return 2 * prod(grad) * prod(weight[1:])


@register_flop_formula(torch.ops.fixedpoint_kernels.products_weight_gradient)
def _weight_gradient(
    _: _Shape, grad: _Shape, *args: object, out_shape: _Shape, **kwargs: object
) -> int:
    return 2 * prod(grad) * prod(out_shape[1:])
