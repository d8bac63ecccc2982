"""Normalisation layers that keep their input in few bits, and its statistics exactly."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fixedpoint_kernels._torch_private import batch_norm
from fixedpoint_kernels.forward_save import maps
from fixedpoint_kernels.forward_save.layers import Divided

__all__ = ["BatchNorm", "GroupNorm", "LayerNorm", "RMSNorm"]

aten = torch.ops.aten


class BatchNorm(Divided):
    """Goes before ``nn.BatchNorm1d``, ``nn.BatchNorm2d`` or ``nn.BatchNorm3d``."""

    def spatial(self, x: Tensor) -> int:
        """Return all dimensions but batch and channels; features where there are none."""
        return max(1, x.dim() - 2)

    def forward(self: Any, input: Tensor) -> Tensor:
        """Return torch's own, and move the running statistics as torch does."""
        if not self._keeps(input) or _is_one_value_a_channel(input):
            return super().forward(input)
        self._check_input_dim(input)
        kept = self._pack(input)
        running = self.running_mean, self.running_var
        numbers = _momentum(self), self.eps
        return _BatchNorm.apply(input, self.weight, self.bias, *kept, running, numbers)  # pyright: ignore


class LayerNorm(Divided):
    """Goes before ``nn.LayerNorm``."""

    def forward(self: Any, input: Tensor) -> Tensor:
        """Return torch's own."""
        if not self._keeps(input):
            return super().forward(input)
        shape = self.normalized_shape
        whole = _cast(input, lambda: F.layer_norm(input.new_zeros(shape), shape))
        kept, input = self._pack(input, whole.dtype), whole
        return _LayerNorm.apply(input, self.weight, self.bias, *kept, shape, self.eps)  # pyright: ignore


class GroupNorm(Divided):
    """Goes before ``nn.GroupNorm``."""

    def spatial(self, x: Tensor) -> int:
        """Return all dimensions but batch and channels; features where there are none."""
        return max(1, x.dim() - 2)

    def forward(self: Any, input: Tensor) -> Tensor:
        """Return torch's own."""
        if not self._keeps(input) or not input.numel():
            return super().forward(input)
        one = 1, self.num_channels, 2
        whole = _cast(input, lambda: F.group_norm(input.new_zeros(one), self.num_groups))
        kept, input = self._pack(input, whole.dtype), whole
        numbers = self.num_groups, self.eps
        return _GroupNorm.apply(input, self.weight, self.bias, *kept, *numbers)  # pyright: ignore


class RMSNorm(Divided):
    """Goes before ``nn.RMSNorm``."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Return torch's own."""
        if not self._keeps(x):
            return super().forward(x)
        shape = self.normalized_shape
        whole = _cast(x, lambda: F.rms_norm(x.new_zeros(shape), shape))
        kept = self._pack(x, whole.dtype)
        return _RMSNorm.apply(whole, self.weight, *kept, shape, self.eps)  # pyright: ignore


def _cast(x: Tensor, probe: Callable[[], Tensor]) -> Tensor:
    """Return ``x`` as autocast would hand it to a layer, which ``probe`` calls on little."""
    if maps.autocast_dtype(x) is None:
        return x
    return x.to(probe().dtype)


def _is_one_value_a_channel(x: Tensor) -> bool:
    """Whether torch refuses to normalise ``x``; its own layer then says so."""
    return x.dim() < 2 or x.numel() <= x.shape[1]


def _momentum(norm: Any) -> float:
    """Count the batch, and return its weight in the running statistics."""
    if not norm.track_running_stats or norm.num_batches_tracked is None:
        return 0.0 if norm.momentum is None else norm.momentum
    norm.num_batches_tracked.add_(1)
    if norm.momentum is None:  # the mean of all batches
        return 1.0 / float(norm.num_batches_tracked)
    return norm.momentum


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any
    ) -> Tensor:
        *parts, ctx.form, (mean, variance), (momentum, ctx.eps) = rest
        running = None if mean is None else (mean, variance)
        made = batch_norm(x, weight, bias, running, momentum, ctx.eps)
        ctx.save_for_backward(weight, *made[1:], *parts)
        return made[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        weight, mean, scale, *parts = ctx.saved_tensors
        x, needed = maps.unpack(parts, ctx.form), list(ctx.needs_input_grad[:3])
        gradients = aten.native_batch_norm_backward(
            grad, x, weight, None, None, mean, scale, True, ctx.eps, needed
        )
        return *_wanted(gradients, needed), *(None,) * 6


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any
    ) -> Tensor:
        *parts, ctx.form, ctx.shape, eps = rest
        out, *statistics = torch.native_layer_norm(x, ctx.shape, weight, bias, eps)
        ctx.save_for_backward(weight, bias, *statistics, *parts)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        weight, bias, mean, scale, *parts = ctx.saved_tensors
        x, needed = maps.unpack(parts, ctx.form).to(grad.dtype), list(ctx.needs_input_grad[:3])
        gradients = aten.native_layer_norm_backward(
            grad, x, ctx.shape, mean, scale, weight, bias, needed
        )
        return *_wanted(gradients, needed), *(None,) * 6


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any
    ) -> Tensor:
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
        weight, mean, scale, *parts = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[:3])
        x = maps.unpack(parts, ctx.form).to(grad.dtype).contiguous(memory_format=ctx.order)
        grad = grad.contiguous(memory_format=ctx.order)
        gradients = aten.native_group_norm_backward(
            grad, x, mean, scale, weight, *ctx.sizes, ctx.groups, needed
        )
        return *_wanted(gradients, needed), *(None,) * 6


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, *rest: Any) -> Tensor:
        *parts, ctx.form, shape, eps = rest
        ctx.count, ctx.dtype = len(shape), x.dtype
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        scale = x.float().square().mean(_last(ctx.count), keepdim=True).add(eps).rsqrt()
        ctx.save_for_backward(weight, scale, *parts)
        return F.rms_norm(x, shape, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        weight, scale, *parts = ctx.saved_tensors
        normal = maps.unpack(parts, ctx.form).float() * scale
        wide = grad.float()
        inner = wide if weight is None else wide * weight
        dx = dw = None
        if ctx.needs_input_grad[0]:
            shared = (inner * normal).mean(_last(ctx.count), keepdim=True)
            dx = ((inner - normal * shared) * scale).to(ctx.dtype)
        if weight is not None and ctx.needs_input_grad[1]:
            dw = (wide * normal).reshape(-1, *weight.shape).sum(0).to(weight.dtype)
        return dx, dw, *(None,) * 6


def _last(count: int) -> tuple[int, ...]:
    return tuple(range(-count, 0))


def _wanted(gradients: tuple[object, ...], needed: list[bool]) -> list[Any]:
    return [g if is_needed else None for g, is_needed in zip(gradients, needed, strict=True)]
