"""Products, softmax and attention that keep their operands in few bits.

A product is linear in each of its operands, so noise without bias stays without bias in the
gradients. Attention is computed again in the backward pass, from what is left of its operands.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fixedpoint_kernels.forward_save import maps
from fixedpoint_kernels.once import once_differentiable

__all__ = ["again", "matmul", "product", "softmax"]

Pack = Callable[[Tensor], maps.Packed]


def product(func: Callable[..., Tensor], a: Tensor, b: Tensor, pack: Pack) -> Tensor:
    """Return ``func(a, b)``, which multiplies element by element."""
    kept = [_kept(a, b.requires_grad, pack), _kept(b, a.requires_grad, pack)]
    return _Product.apply(func, kept, a, b)  # pyright: ignore[reportReturnType]


def matmul(func: Callable[..., Tensor], a: Tensor, b: Tensor, pack: Pack) -> Tensor:
    """Return ``func(a, b)``, a product of matrices with any leading dimensions."""
    kept = [_kept(a, b.requires_grad, pack), _kept(b, a.requires_grad, pack)]
    return _Matmul.apply(func, kept, maps.autocast_dtype(a), a, b)  # pyright: ignore


def softmax(func: Callable[[Tensor], Tensor], x: Tensor, pack: Pack) -> Tensor:
    """Return ``func(x)``, a softmax over the last dimension, whose values are kept."""
    return _Softmax.apply(func, pack, x)  # pyright: ignore[reportReturnType]


def again(
    func: Callable[..., Tensor], tensors: Sequence[Tensor], pack: Pack, *, is_random: bool
) -> Tensor:
    """Return ``func(*tensors)``, computed again in the backward pass from what ``pack`` keeps.

    Args:
        func: Of tensors alone; what it needs besides is inside of it, and it is held until backward.
        tensors: Its operands; gradients go to those that require one.
        pack: Keeps an operand.
        is_random: Whether ``func`` draws random numbers; the same ones are drawn again.
    """
    kept = [_kept(tensor, True, pack) for tensor in tensors]
    return _Again.apply(func, kept, is_random, *tensors)  # pyright: ignore[reportReturnType]


def _kept(x: Tensor, is_needed: bool, pack: Pack) -> maps.Packed:
    return pack(x) if is_needed else maps.NOTHING


def _save(ctx: Any, kept: Sequence[maps.Packed], *others: Tensor | None) -> None:
    ctx.forms = [packed.form for packed in kept]
    ctx.save_for_backward(*(part for packed in kept for part in packed[:3]), *others)


def _restored(ctx: Any) -> list[Tensor]:
    """Return each operand as far as it was kept."""
    parts = ctx.saved_tensors
    rows = zip(parts[0::3], parts[1::3], parts[2::3], strict=False)
    return [maps.restore(row, form) for row, form in zip(rows, ctx.forms, strict=False)]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, func: Callable[..., Tensor], kept: list[maps.Packed], a: Tensor, b: Tensor
    ) -> Tensor:
        _save(ctx, kept)
        ctx.shapes = a.shape, b.shape
        return func(a, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        a, b = _restored(ctx)
        first, second = ctx.shapes
        da = (grad * b).sum_to_size(first) if ctx.needs_input_grad[2] else None
        db = (grad * a).sum_to_size(second) if ctx.needs_input_grad[3] else None
        return None, None, da, db


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        func: Callable[..., Tensor],
        kept: list[maps.Packed],
        dtype: torch.dtype | None,
        a: Tensor,
        b: Tensor,
    ) -> Tensor:
        _save(ctx, kept)
        ctx.shapes = a.shape, b.shape
        return func(*maps.cast(dtype, a, b))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        a, b = _restored(ctx)
        first, second = ctx.shapes
        da = db = None
        if ctx.needs_input_grad[3]:
            da = (grad @ b.to(grad.dtype).mT).sum_to_size(first)
        if ctx.needs_input_grad[4]:
            a = a.to(grad.dtype)
            if len(second) == 2:
                rows = grad.shape[:-1].numel()  # flatten takes no batch of gradients
                a, grad = a.reshape(rows, a.shape[-1]), grad.reshape(rows, grad.shape[-1])
            db = (a.mT @ grad).sum_to_size(second)
        return None, None, None, da, db


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, func: Callable[[Tensor], Tensor], pack: Pack, x: Tensor) -> Tensor:
        out = func(x)
        _save(ctx, [pack(out)])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (y,) = _restored(ctx)
        inner = y * grad
        return None, None, inner - y * inner.sum(-1, keepdim=True)


class _Autocast(NamedTuple):
    """How autocast was set for a device in the forward pass."""

    kind: str
    is_on: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> "_Autocast | None":
        kind = x.device.type
        if not maps.has_autocast(kind):
            return None
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        func: Callable[..., Tensor],
        kept: list[maps.Packed],
        is_random: bool,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.func, ctx.autocast = func, _Autocast.of(tensors[0])
        ctx.devices = sorted({t.device.index for t in tensors if t.is_cuda})
        states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, ctx.devices)]
        ctx.is_random = is_random
        _save(ctx, kept, *(states if is_random else ()))
        return func(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        needed = ctx.needs_input_grad[3:]
        tensors = [
            t.detach().requires_grad_(is_needed)
            for t, is_needed in zip(_restored(ctx), needed, strict=True)
        ]  # not a leaf itself: it may stand here twice, and its hooks are autograd's to run
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            if ctx.autocast is not None:
                kind, is_on, dtype = ctx.autocast
                stack.enter_context(torch.autocast(kind, dtype, is_on))
            if ctx.is_random:
                stack.enter_context(torch.random.fork_rng(ctx.devices))
                cpu, *others = ctx.saved_tensors[3 * len(tensors) :]
                torch.set_rng_state(cpu)
                for device, state in zip(ctx.devices, others, strict=True):
                    torch.cuda.set_rng_state(state, device)
            out = ctx.func(*tensors)
        wanted = [t for t, is_needed in zip(tensors, needed, strict=True) if is_needed]
        found = iter(torch.autograd.grad(out, wanted, grad, allow_unused=True))
        return None, None, None, *(next(found) if n else None for n in needed)
