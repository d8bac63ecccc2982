"""Backward passes that are differentiated once."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from fixedpoint_kernels._torch_private.modes import is_batched

__all__ = ["leaves_of", "once_differentiable", "refuse_batched"]

_MESSAGE = (
    "activations that are kept in few bits have no second derivative: where gradients are "
    "differentiated again, use forward_save.revert(model), or leave the scope of forward_save.saving"
)


def once_differentiable(
    backward: Callable[..., object], message: str = _MESSAGE
) -> Callable[..., object]:
    """Make the gradients of ``backward`` refuse to be differentiated, by name.

    ``torch.autograd.function.once_differentiable`` passes them as constants where the gradient that
    comes in is one, as in ``torch.autograd.grad(model(x).sum(), x, create_graph=True)``: the penalty
    of a critic would then change nothing, and nobody would be told. Where the gradient that comes in
    is none, it hides from what that is made of.

    Args:
        backward: Of a ``torch.autograd.Function``.
        message: What the error says.

    Raises:
        RuntimeError: In the backward pass: as ``refuse_batched``.
    """

    @wraps(backward)
    def once(ctx: Any, *grads: Tensor) -> object:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return found
        refuse_batched(*grads)
        found = found if isinstance(found, tuple) else (found,)
        # whoever asks for the derivative by one of these comes through here
        leaves = leaves_of(ctx)
        needs = [torch.empty(0, requires_grad=True, device="cpu"), *leaves, *grads]
        present = [gradient for gradient in found if gradient is not None]
        tensors = iter(_Refused.apply(message, len(present), *present, *needs))  # pyright: ignore
        return tuple(None if gradient is None else next(tensors) for gradient in found)

    return once


def refuse_batched(*grads: Tensor) -> None:
    """Refuse gradients of many at once that are to have a graph: torch loses it at a function of Python, and gives 0.

    Raises:
        RuntimeError: There is one.
    """
    if not torch.compiler.is_compiling() and any(map(is_batched, grads)):
        raise RuntimeError(
            "gradients of many at once must be asked for without a graph, got create_graph=True with "
            "is_grads_batched=True or vectorize=True: ask for one gradient after the other"
        )


def leaves_of(ctx: Any) -> list[Tensor]:
    """Return the leaves that the inputs of an autograd function depend on, each once.

    What is computed from these in the backward pass is asked for its own derivative, whether it is
    by the function's input or by what that was made of. Inputs that are no leaves are no longer
    there.

    Args:
        ctx: Of a backward pass.
    """
    leaves, seen, found = [], set(), [ctx]
    while found:
        for node, _ in found.pop().next_functions:
            if node is None or node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable"):
                leaves.append(node.variable)
            found.append(node)
    return leaves


class _Refused(torch.autograd.Function):
    """Returns the first tensors, which then need gradients as others do, and refuses to give them."""

    @staticmethod
    def forward(ctx: Any, message: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.message = message
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(ctx.message)
