"""The autograd function that keeps codes for backward in place of its input."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from fixedpoint_kernels._torch_private.modes import derivatives_of
from fixedpoint_kernels.few_bit.fused import Fused
from fixedpoint_kernels.few_bit.integrals import Function
from fixedpoint_kernels.few_bit.operators import (
    decode,
    encode,
    encode_plain,
    is_fused,
    is_fused_plain,
    is_plain,
    registered,
    value_and_encode,
    value_and_encode_plain,
)
from fixedpoint_kernels.once import leaves_of, refuse_batched
from fixedpoint_kernels.strides import laid, memory_order


def apply(function: Function, x: Tensor, table: str, fused: Fused | None = None) -> Tensor:
    """Return ``function(x)``, whose gradient is the table's.

    Where no gradient is needed, in forward mode, and in traces of ``torch.jit``, nothing is encoded. With ``fused``, value and code come from one
    pass where there is a kernel for it.

    Raises:
        RuntimeError: ``torch.func`` would differentiate twice by ``x``, and the table is not exact.
    """
    is_wanted = torch.is_grad_enabled() and x.requires_grad and not torch.jit.is_tracing()
    if not is_wanted or unpack_dual(x).tangent is not None:
        return function(x)
    if is_plain(x):
        return _FewBit.apply(x, (function, table, memory_order(x), fused))  # pyright: ignore[reportReturnType]
    if not is_fused(x, fused):
        fused = None
    if not torch.compiler.is_compiling() and derivatives_of(x) > 1:
        _refuse_second(table)  # torch.func would take the first derivative for a constant
    kind = _Transformable if torch.compiler.is_compiling() else _TwiceTransformable
    output = kind.apply(x, function, table, memory_order(x), fused)
    return output[0]  # pyright: ignore[reportOptionalSubscript]


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
        return value_and_encode(x, table, fused, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        x, _, ctx.table, ctx.order, _ = inputs
        ctx.dtype = x.dtype
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor | None, _planes: None = None
    ) -> tuple[Tensor | None, None, None, None, None]:
        if grad is None:
            return None, None, None, None, None
        return _input_gradient(ctx, grad), None, None, None, None


class _TwiceTransformable(_Transformable):
    """The same, with forward mode outside of reverse mode, which the compiler takes from nobody."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _Transformable.setup_context(ctx, inputs, output)
        ctx.save_for_forward(output[1])

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: object) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _refuse_second(ctx.table)
        return _input_gradient(ctx, tangent), None


class _FewBit(torch.autograd.Function):
    """The same of a plain ``x``, with one output: without what torch.func and the compiler need.

    Its arguments are few because torch looks into each, and in a network they are no longer in the
    caches then: Python takes as long as a kernel over 100,000 elements.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, how: tuple[Function, str, tuple[int, ...] | None, Fused | None]
    ) -> Tensor:
        function, ctx.table, ctx.order, fused = how
        ctx.dtype = x.dtype
        if fused is not None and is_fused_plain(x, fused):
            y, planes = value_and_encode_plain(x, ctx.table, fused, ctx.order)
        else:
            y, planes = function(x), encode_plain(laid(x, ctx.order), ctx.table)
        ctx.save_for_backward(planes)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _input_gradient(ctx, grad), None


def product(grad: Tensor, planes: Tensor, table: str, dtype: torch.dtype) -> Tensor:
    """Return ``decode``, which may be differentiated by ``grad`` where the table is exact.

    Raises:
        RuntimeError: As ``refuse_batched``.
    """
    if not torch.is_grad_enabled():
        return decode(grad, planes, table, dtype)
    return _differentiable_product(grad, planes, table, dtype)


def _differentiable_product(
    grad: Tensor, planes: Tensor, table: str, dtype: torch.dtype, *leaves: Tensor
) -> Tensor:
    refuse_batched(grad)
    kind = _Product if torch.compiler.is_compiling() else _TwiceProduct
    return kind.apply(grad, planes, table, dtype, *leaves)  # pyright: ignore[reportReturnType]


def _input_gradient(ctx: Any, grad: Tensor) -> Tensor:
    (planes,) = ctx.saved_tensors
    own = grad if ctx.order is None else laid(grad, ctx.order)
    if torch.is_grad_enabled():
        product = _differentiable(ctx, own, planes)
    else:
        product = decode(own, planes, ctx.table, ctx.dtype)
    return product if ctx.order is None else _back(product, ctx.order)


def _back(y: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """Undo ``laid``."""
    if order is None:
        return y
    return y.permute([order.index(i) for i in range(len(order))])


def _differentiable(ctx: Any, grad: Tensor, planes: Tensor) -> Tensor:
    """Return the product as what may be differentiated, or refuses to be, by all that it depends on."""
    leaves: list[Tensor] = []
    if is_plain(grad) and not registered(ctx.table).is_exact:
        leaves = leaves_of(ctx)
        if not grad.requires_grad:
            grad = grad.detach().requires_grad_()  # so that nobody takes the product for a constant
    return _differentiable_product(grad, planes, ctx.table, ctx.dtype, *leaves)


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
    def forward(
        grad: Tensor, planes: Tensor, table: str, dtype: torch.dtype, *_leaves: Tensor
    ) -> Tensor:
        return decode(grad, planes, table, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        grad, planes, ctx.table, _, *leaves = inputs
        ctx.count = len(leaves)
        ctx.dtype = grad.dtype
        ctx.save_for_backward(planes)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Any, ...]:
        _refuse_second(ctx.table)
        (planes,) = ctx.saved_tensors
        return product(grad, planes, ctx.table, ctx.dtype), *(None,) * (3 + ctx.count)


class _TwiceProduct(_Product):
    """The same, in forward mode."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _Product.setup_context(ctx, inputs, output)
        ctx.output_dtype = output.dtype
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: object) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        _refuse_second(ctx.table)
        (planes,) = ctx.saved_tensors
        return product(tangent, planes, ctx.table, ctx.output_dtype)
