"""The autograd function that keeps codes for backward in place of its input."""

from typing import Any

import torch
from torch import Tensor

from fixedpoint_kernels._torch_private import derivatives_of
from fixedpoint_kernels.few_bit.fused import Fused
from fixedpoint_kernels.few_bit.integrals import Function
from fixedpoint_kernels.few_bit.operators import (
    decode,
    encode,
    is_fused,
    is_plain,
    registered,
    value_and_encode,
)
from fixedpoint_kernels.strides import laid, memory_order


def apply(function: Function, x: Tensor, table: str, fused: Fused | None = None) -> Tensor:
    """Return ``function(x)``, whose gradient is the table's.

    Where no gradient is needed, nothing is encoded. With ``fused``, value and code come from one
    pass where there is a kernel for it.

    Raises:
        RuntimeError: ``torch.func`` would differentiate twice by ``x``, and the table is not exact.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return function(x)
    if not is_fused(x, fused):
        fused = None
    arguments = x, function, table, memory_order(x), fused
    if is_plain(x):
        return _FewBit.apply(*arguments)  # pyright: ignore[reportReturnType]
    if not torch.compiler.is_compiling() and derivatives_of(x) > 1:
        _refuse_second(table)  # torch.func would take the first derivative for a constant
    return _Transformable.apply(*arguments)[0]  # pyright: ignore[reportOptionalSubscript]


class _Transformable(torch.autograd.Function):
    """See ``apply``; planes are an output because torch.func saves only in- and outputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        function: Function,
        table: str,
        order: tuple[int, ...] | None,
        fused: Fused | None,
    ) -> tuple[Tensor, Tensor]:
        if fused is None:
            return function(x), encode(laid(x, order), table)
        y, planes = value_and_encode(laid(x, order), table, fused)
        return _back(y, order), planes

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        _keep(ctx, inputs, output)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor | None, _planes: None = None
    ) -> tuple[Tensor | None, None, None, None, None]:
        if grad is None:
            return None, None, None, None, None
        (planes,) = ctx.saved_tensors
        product = _product(laid(grad, ctx.order), planes, ctx.table, ctx.dtype)
        return _back(product, ctx.order), None, None, None, None


class _FewBit(_Transformable):
    """The same with one output, without what torch.func and the compiler need."""

    setup_context = torch.autograd.Function.setup_context

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *arguments: Any
    ) -> Tensor:
        output = _Transformable.forward(*arguments)
        _keep(ctx, arguments, output)
        return output[0]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, _, ctx.table, ctx.order, _ = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(output[1])


def _back(y: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """Undo ``laid``."""
    if order is None:
        return y
    return y.permute([order.index(i) for i in range(len(order))])


def _product(grad: Tensor, planes: Tensor, table: str, dtype: torch.dtype) -> Tensor:
    if not torch.is_grad_enabled():
        return decode(grad, planes, table, dtype)
    if is_plain(grad) and not (grad.requires_grad or registered(table).is_exact):
        grad = grad.detach().requires_grad_()  # so that nobody takes the product for a constant
    return _Product.apply(grad, planes, table, dtype)  # pyright: ignore[reportReturnType]


def _refuse_second(table: str) -> None:
    if not registered(table).is_exact:
        raise RuntimeError(
            "a few-bit activation has no second derivative: its derivative is piecewise constant; "
            "use torch's own where gradients are differentiated again"
        )


class _Product(torch.autograd.Function):
    """``decode``, differentiated where the derivative is really constant."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, planes: Tensor, table: str, dtype: torch.dtype) -> Tensor:
        return decode(grad, planes, table, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        grad, planes, ctx.table, _ = inputs
        ctx.dtype = grad.dtype
        ctx.save_for_backward(planes)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, None, None, None]:
        _refuse_second(ctx.table)
        (planes,) = ctx.saved_tensors
        return _product(grad, planes, ctx.table, ctx.dtype), None, None, None
