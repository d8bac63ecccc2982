"""Dropout and pooling that keep a mask, a small index, or only shapes; their derivatives are exact.

Backward is linear in the gradient, and made of what autograd can differentiate in turn.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fixedpoint_kernels._torch_private.compiling import compiled_as_constant, constants
from fixedpoint_kernels._torch_private.modes import is_transformed
from fixedpoint_kernels._torch_private.tensors import adaptive_avg_pool_backward
from fixedpoint_kernels.few_bit import operators
from fixedpoint_kernels.few_bit.autograd import product
from fixedpoint_kernels.few_bit.functional import table_key
from fixedpoint_kernels.forward_save import maps
from fixedpoint_kernels.forward_save.in_place import overwrite
from fixedpoint_kernels.sides import for_each_side

__all__ = ["AdaptiveAvgPool", "AvgPool", "Dropout", "MaxPool"]

aten = torch.ops.aten
WINDOW = 256  # places that an index of 8 bits can tell apart


def _keeps(module: nn.Module, input: Tensor) -> bool:
    is_kept = module.training and torch.is_grad_enabled() and input.requires_grad
    if not (is_kept and maps.is_dense(input)):
        return False
    return torch.compiler.is_compiling() or not is_transformed()  # exactly, as torch.func sees it


class Dropout(nn.Module):
    """Goes before ``nn.Dropout``: keeps 1 bit an element, with torch's own random numbers."""

    def forward(self: Any, input: Tensor) -> Tensor:
        """Return torch's own."""
        if not (_keeps(self, input) and 0 < self.p < 1 and maps.is_less_in_code(input, 1)):
            return super().forward(input)
        out = dropout(input, self.p)
        return overwrite(input, out) if self.inplace else out


class MaxPool(nn.Module):
    """Goes before ``nn.MaxPool1d`` to ``3d``: keeps 8 bits an output."""

    def forward(self: Any, input: Tensor) -> Tensor:
        """Return torch's own."""
        if not _keeps(self, input):
            return super().forward(input)
        names = "kernel_size", "stride", "padding", "dilation"
        window = [for_each_side(getattr(self, name), _spatial(self)) for name in names]
        if _spatial(self) == 1:  # views stay outside of the Function
            flat = [(i, *n) for i, n in zip((1, 1, 0, 1), window, strict=True)]
            return _MaxPool.apply(input.unsqueeze(-2), flat, self.ceil_mode).squeeze(-2)  # pyright: ignore
        return _MaxPool.apply(input, window, self.ceil_mode)  # pyright: ignore


class AvgPool(nn.Module):
    """Goes before ``nn.AvgPool1d`` to ``3d``: keeps no tensor."""

    def forward(self: Any, input: Tensor) -> Tensor:
        """Return torch's own."""
        if not _keeps(self, input):
            return super().forward(input)
        spatial = _spatial(self)
        window = [for_each_side(n, spatial) for n in (self.kernel_size, self.stride, self.padding)]
        divisor = getattr(self, "divisor_override", None)
        rest = self.ceil_mode, self.count_include_pad, divisor
        if spatial == 1:
            flat = [(i, *n) for i, n in zip((1, 1, 0), window, strict=True)]
            return _AvgPool.apply(input.unsqueeze(-2), *flat, *rest).squeeze(-2)  # pyright: ignore
        return _AvgPool.apply(input, *window, *rest)  # pyright: ignore


class AdaptiveAvgPool(nn.Module):
    """Goes before ``nn.AdaptiveAvgPool1d`` to ``3d``: keeps no tensor."""

    def forward(self: Any, input: Tensor) -> Tensor:
        """Return torch's own."""
        if not _keeps(self, input):
            return super().forward(input)
        size = self.output_size
        if _spatial(self) == 1:
            flat = 1, *for_each_side(size, 1)
            return _AdaptiveAvgPool.apply(input.unsqueeze(-2), flat, 2).squeeze(-2)  # pyright: ignore
        return _AdaptiveAvgPool.apply(input, size, _spatial(self))  # pyright: ignore


def dropout(x: Tensor, p: float) -> Tensor:
    """Return ``F.dropout``, which keeps 1 bit an element."""
    return _Dropout.apply(x, *constants([p]))  # pyright: ignore[reportReturnType]


def window_size(module: Any) -> int:
    """Return how many places a max pooling's window has."""
    size = 1
    for side in for_each_side(module.kernel_size, _spatial(module)):
        size *= side
    return size


def _spatial(module: nn.Module) -> int:
    """Return the dimensions that torch's class pools over, the last digit but one of its name."""
    kinds = (nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d)
    if isinstance(module, kinds):
        return 1
    return 2 if isinstance(module, (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)) else 3


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        out, noise, ctx.scale = _drawn(x, p)
        ctx.table, ctx.order = table_key("relu", 1, "uniform"), _order(x)
        ctx.save_for_backward(operators.encode(noise.permute(ctx.order), ctx.table))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        (planes,) = ctx.saved_tensors
        ordered = grad.permute(ctx.order)
        kept = product(ordered, planes, ctx.table, grad.dtype)
        back = [ctx.order.index(i) for i in range(grad.dim())]
        return (kept * ctx.scale).permute(back), None


def _is_fused(x: Tensor) -> bool:
    """Whether torch drops in one kernel, which rounds once."""
    return x.is_cuda


def _drawn(x: Tensor, p: float) -> tuple[Tensor, Tensor, float]:
    """Return ``F.dropout``, a tensor that is 0 where it drops, and what gradients are multiplied by."""
    if _is_fused(x):
        out, mask = torch.native_dropout(x, p, True)
        return out, mask.to(x.dtype), 1 / (1 - p)
    noise = F.dropout(torch.ones_like(x), p)  # 0 or 1 / (1 - p), rounded as torch does
    return x * noise, noise, _scale(p, x.dtype)


@compiled_as_constant
def _scale(p: float, dtype: torch.dtype) -> float:
    """Return 1 / (1 - p) as torch rounds it in a dtype."""
    return float(torch.ones((), dtype=dtype).div_(1 - p))


def _order(x: Tensor) -> tuple[int, ...]:
    """Return dimensions by falling stride, so that a mask is read as it lies in memory."""
    order: list[int] = []
    for i in range(x.dim()):
        at = len(order)
        while at and x.stride(order[at - 1]) < x.stride(i):
            at -= 1
        order.insert(at, i)
    return tuple(order)


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Any, ceil_mode: bool) -> Tensor:
        spatial = len(window[0])
        pool = F.max_pool2d if spatial == 2 else F.max_pool3d
        out, index = pool(x, *window, ceil_mode=ceil_mode, return_indices=True)
        ctx.sides, ctx.leading, ctx.window = x.shape[-spatial:], x.shape[:-spatial], window
        ctx.order = maps.order_of(x)
        offsets = _offsets(ctx.sides, window, x.device)
        kernel, _, _, dilation = window
        last = sum(
            (k - 1) * d * n for k, d, n in zip(kernel, dilation, _scales(ctx.sides), strict=True)
        )
        places = torch.zeros(1 + last, dtype=torch.uint8, device=x.device)
        places[offsets] = torch.arange(len(offsets), dtype=torch.uint8, device=x.device)
        first = _starts(index.shape[-spatial:], ctx.sides, window, x.device)
        ctx.save_for_backward(places.take(index - first))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        (places,) = ctx.saved_tensors
        spatial = len(ctx.sides)
        index = _offsets(ctx.sides, ctx.window, grad.device).take(places.long())
        index += _starts(places.shape[-spatial:], ctx.sides, ctx.window, grad.device)
        dx = grad.new_zeros((*ctx.leading, math.prod(ctx.sides)))
        flat = (
            *ctx.leading,
            math.prod(places.shape[-spatial:]),
        )  # flatten takes no batch of gradients
        dx.scatter_add_(-1, index.reshape(flat), grad.reshape(flat))
        dx = dx.view(*ctx.leading, *ctx.sides)
        return dx.contiguous(memory_format=ctx.order), None, None


def _offsets(sides: Sequence[int], window: Any, device: torch.device) -> Tensor:
    """Return where the places of a window lie in a plane, int64, counted from its first.

    In planes narrower than the window some have one offset: they are one element.
    """
    kernel, _, _, dilation = window
    found = torch.zeros((), dtype=torch.int64, device=device)
    for count, step, scale in zip(kernel, dilation, _scales(sides), strict=True):
        found = found.unsqueeze(-1) + torch.arange(count, device=device) * (step * scale)
    return found.flatten()


def _starts(
    counts: Sequence[int], sides: Sequence[int], window: Any, device: torch.device
) -> Tensor:
    """Return where each output's window begins in a plane, int64; before it where there is padding."""
    _, stride, padding, _ = window
    found = torch.zeros((), dtype=torch.int64, device=device)
    for count, step, before, scale in zip(counts, stride, padding, _scales(sides), strict=True):
        found = found.unsqueeze(-1) + (torch.arange(count, device=device) * step - before) * scale
    return found


def _scales(sides: Sequence[int]) -> list[int]:
    """Return how far neighbours along each side lie apart in a plane."""
    return [math.prod(sides[i + 1 :]) for i in range(len(sides))]


class _AvgPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *numbers: Any) -> Tensor:
        ctx.shape, ctx.order, ctx.numbers = x.shape, maps.order_of(x), numbers
        return (F.avg_pool2d if len(numbers[0]) == 2 else F.avg_pool3d)(x, *numbers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        is_2d = len(ctx.numbers[0]) == 2
        backward = aten.avg_pool2d_backward if is_2d else aten.avg_pool3d_backward
        return backward(grad, _like(ctx, grad), *ctx.numbers), *(None,) * 6


class _AdaptiveAvgPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: Any, spatial: int) -> Tensor:
        ctx.shape, ctx.order, ctx.spatial = x.shape, maps.order_of(x), spatial
        return (F.adaptive_avg_pool2d if spatial == 2 else F.adaptive_avg_pool3d)(x, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        return adaptive_avg_pool_backward(grad, _like(ctx, grad), ctx.spatial), None, None


def _like(ctx: Any, grad: Tensor) -> Tensor:
    """Return a tensor of the input's shape, whose values nobody reads."""
    return grad.new_empty(ctx.shape).contiguous(memory_format=ctx.order)
