"""What normalisation layers compute, and their gradients from what was kept of the input."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fixedpoint_kernels._torch_private.tensors import batch_norm as native_batch_norm
from fixedpoint_kernels.forward_save import maps
from fixedpoint_kernels.once import once_differentiable

__all__ = [
    "RMS",
    "BatchNorm",
    "FrozenBatchNorm",
    "GroupNorm",
    "LayerNorm",
    "RMSNorm",
    "by_channel",
    "by_group",
]

aten = torch.ops.aten


def by_channel(x: Tensor) -> Tensor:
    """Return ``x``, or where it has no pixels a view with the batch as pixels, ``(1, channels, 1, batch)``.

    Gradients are divided by each channel's deviation, so no plane may have several channels. The
    view has channels last in memory, which is read without a copy.
    """
    return x if _has_pixels(x.shape) else x.flatten(1).t()[None, :, None]


def by_group(x: Tensor, groups: int) -> Tensor:
    """Return ``x``, or a view ``(batch, groups, channels of a group)`` where it has no pixels."""
    if _has_pixels(x.shape) or groups < 1 or x.shape[1] % groups:  # torch says what is wrong
        return x
    return x.flatten(1).unflatten(1, (groups, -1))


def _has_pixels(shape: torch.Size) -> bool:
    return len(shape) < 2 or shape[2:].numel() != 1


class BatchNorm(torch.autograd.Function):
    """Batch norm in training, which keeps what ``pack`` returned."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any
    ) -> Tensor:
        """Return torch's own values."""
        *parts, ctx.form, (mean, variance), (momentum, ctx.eps) = rest
        running = None if mean is None else (mean, variance)
        made = native_batch_norm(x, weight, bias, running, momentum, ctx.eps)
        ctx.save_for_backward(weight, *made[1:], *parts)
        return made[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        """Return gradients, as far as what was kept goes."""
        weight, mean, scale, *parts = ctx.saved_tensors
        x, needed = _by_sample(parts, ctx.form, grad.shape), list(ctx.needs_input_grad[:3])
        gradients = aten.native_batch_norm_backward(
            grad, x, weight, None, None, mean, scale, True, ctx.eps, needed
        )
        return *_wanted(gradients, needed), *(None,) * 6


class FrozenBatchNorm(torch.autograd.Function):
    """Batch normalisation by running statistics, which are buffers and there anyway."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any
    ) -> Tensor:
        """Return torch's own values."""
        mean, variance, ctx.eps, *parts, ctx.form = rest
        ctx.save_for_backward(weight, mean, variance, *parts)
        ctx.shape, ctx.is_kept = x.shape, parts[0] is not None
        return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, ctx.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        """Return gradients, as far as what was kept goes."""
        weight, mean, variance, *parts = ctx.saved_tensors
        shape = ctx.shape
        x = _by_sample(parts, ctx.form, shape) if ctx.is_kept else grad.new_empty(shape)
        needed = list(ctx.needs_input_grad[:3])
        gradients = aten.native_batch_norm_backward(
            *(grad, x, weight, mean, variance, None, None, False, ctx.eps, needed)
        )
        return *_wanted(gradients, needed), *(None,) * 7


class LayerNorm(torch.autograd.Function):
    """``layer_norm``, which keeps what ``pack`` returned."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any
    ) -> Tensor:
        """Return torch's own values."""
        *parts, ctx.form, ctx.shape, eps = rest
        out, *statistics = torch.native_layer_norm(x, ctx.shape, weight, bias, eps)
        ctx.save_for_backward(weight, bias, *statistics, *parts)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        """Return gradients, as far as what was kept goes."""
        weight, bias, mean, scale, *parts = ctx.saved_tensors
        x, needed = maps.restore(parts, ctx.form).to(grad.dtype), list(ctx.needs_input_grad[:3])
        gradients = aten.native_layer_norm_backward(
            grad, x, ctx.shape, mean, scale, weight, bias, needed
        )
        return *_wanted(gradients, needed), *(None,) * 6


class GroupNorm(torch.autograd.Function):
    """``group_norm``, which keeps what ``pack`` returned."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any
    ) -> Tensor:
        """Return torch's own values."""
        *parts, ctx.form, ctx.groups, eps = rest
        # as torch's own, which knows channels last on CPU alone
        ctx.order = maps.order_of(x) if x.is_cpu else torch.contiguous_format
        x = x.contiguous(memory_format=ctx.order)
        ctx.sizes = x.shape[0], x.shape[1], x[0, 0].numel()
        out, *statistics = torch.native_group_norm(x, weight, bias, *ctx.sizes, ctx.groups, eps)
        ctx.save_for_backward(weight, *statistics, *parts)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        """Return gradients, as far as what was kept goes."""
        weight, mean, scale, *parts = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[:3])
        x = maps.restore(parts, ctx.form).to(grad.dtype).reshape(grad.shape)
        x = x.contiguous(memory_format=ctx.order)
        grad = grad.contiguous(memory_format=ctx.order)
        gradients = aten.native_group_norm_backward(
            grad, x, mean, scale, weight, *ctx.sizes, ctx.groups, needed
        )
        return *_wanted(gradients, needed), *(None,) * 6


class RMS(NamedTuple):
    """An RMS norm.

    Args:
        shape: Of the rows.
        eps: Added to the mean square; None: torch's own number.
        offset: Added to the weight.
        run: Computes the values, called as ``F.rms_norm``.
    """

    shape: tuple[int, ...]
    eps: float | None
    offset: float = 0.0
    run: Callable[..., Tensor] = F.rms_norm


class RMSNorm(torch.autograd.Function):
    """An RMS norm, which keeps what ``pack`` returned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, *rest: Any) -> Tensor:
        """Return torch's own values."""
        *parts, ctx.form, norm = rest
        ctx.count, ctx.dtype, ctx.offset = len(norm.shape), x.dtype, norm.offset
        eps = norm.eps
        if eps is None:  # torch's own number, of the type it computes in
            eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
        scale = x.float().square().mean(_last(ctx.count), keepdim=True).add(eps).rsqrt()
        ctx.save_for_backward(weight, scale, *parts)
        return norm.run(x, norm.shape, weight, norm.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        """Return gradients, as far as what was kept goes."""
        weight, scale, *parts = ctx.saved_tensors
        normal = maps.restore(parts, ctx.form).float() * scale
        wide = grad.float()
        inner = wide if weight is None else wide * (weight.float() + ctx.offset)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            shared = (inner * normal).mean(_last(ctx.count), keepdim=True)
            dx = ((inner - normal * shared) * scale).to(ctx.dtype)
        if weight is not None and ctx.needs_input_grad[1]:
            dw = (wide * normal).reshape(-1, *weight.shape).sum(0).to(weight.dtype)
        return dx, dw, *(None,) * 5


def _by_sample(parts: list[Tensor], form: maps.Form | None, shape: torch.Size) -> Tensor:
    """Return what was kept of ``by_channel(x)`` in the shape of ``x``."""
    x = maps.restore(parts, form)
    return x if _has_pixels(shape) else x[0, :, 0].t().reshape(shape)


def _last(count: int) -> tuple[int, ...]:
    return tuple(range(-count, 0))


def _wanted(gradients: tuple[object, ...], needed: list[bool]) -> list[Any]:
    return [g if is_needed else None for g, is_needed in zip(gradients, needed, strict=True)]
