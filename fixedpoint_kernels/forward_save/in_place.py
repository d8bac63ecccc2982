"""Values that take the place of what they were computed from."""

from typing import Any

import torch
from torch import Tensor

from fixedpoint_kernels._torch_private.tensors import base_of
from fixedpoint_kernels.few_bit.operators import is_plain

__all__ = ["overwrite"]


def overwrite(x: Tensor, values: Tensor) -> Tensor:
    """Write to ``x`` what was computed from it, and return it: its gradient is that of ``values``.

    As ``x.copy_(values)``, whose backward pass makes a gradient of zeros for ``x`` in the usual
    order of memory: added to the other, it takes channels last away from all that come after.

    Args:
        x: No leaf that requires a gradient.
        values: Of its shape.
    """
    is_simple = is_plain(x) and base_of(x) is x and values.dtype is x.dtype
    if is_simple and torch.is_grad_enabled() and values.requires_grad:
        return _Overwrite.apply(x, values)  # pyright: ignore[reportReturnType]
    return x.copy_(values)


class _Overwrite(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.mark_dirty(x)
        return x.copy_(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, grad
