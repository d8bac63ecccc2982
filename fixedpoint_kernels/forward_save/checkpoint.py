"""Blocks that keep their inputs alone, and run again in the backward pass."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fixedpoint_kernels._torch_private import is_checkpointed, tree_flatten, tree_unflatten

__all__ = ["Checkpointed", "blocks", "copied_buffers"]


class Checkpointed(nn.Module):
    """Goes before the class of a block: gradients, statistics and random numbers are torch's own.

    torch's checkpoint runs a block a second time with all it does; here the second run writes to
    copies of the buffers, so that running statistics move once a step.
    """

    def __init_subclass__(cls, **named: Any):
        super().__init_subclass__(**named)

        @wraps(super().forward)  # whoever reads the signature sees that of the block
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            own: Any = super().forward  # of now: a class may be patched
            if not (self.training and torch.is_grad_enabled()):
                return own(*args, **kwargs)
            if torch.compiler.is_compiling():  # a graph writes to buffers once
                return checkpoint(own, *args, use_reentrant=False, **kwargs)
            if is_checkpointed():
                return own(*args, **kwargs)
            return _run(self, own, args, kwargs)

        cls.forward = forward


def blocks(model: nn.Module) -> list[str]:
    """Return the modules that can run again as a whole: those with layers of their own inside.

    The model itself is none: all of it would be there again before the backward pass begins.
    """
    hidden: tuple[str, ...] = ()
    found = []
    for name, module in model.named_modules():
        if not name or (hidden and name.startswith(hidden)):
            continue
        if isinstance(module, nn.MultiheadAttention | torch.jit.ScriptModule):
            hidden = (*hidden, name + ".")  # it never calls its modules
        has_forward = type(module).forward is not nn.Module.forward
        if has_forward and next(module.children(), None) is not None:
            is_unfit = "forward" in vars(module) or isinstance(module, torch.jit.ScriptModule)
            found += [] if is_unfit else [name]
    return found


def _run(module: nn.Module, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a block so that it keeps its tensors, each once and where autograd sees it."""
    leaves, shape = tree_flatten((args, kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[i] for i in at]
    for i in at:
        leaves[i] = None

    def again(*tensors: Tensor) -> Any:
        filled = list(leaves)
        for i, tensor in zip(at, tensors, strict=True):
            filled[i] = tensor
        args, kwargs = tree_unflatten(filled, shape)
        return own(*args, **kwargs)

    return checkpoint(again, *tensors, use_reentrant=False, context_fn=partial(_contexts, module))


def _contexts(
    module: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return what surrounds the first run and the second."""
    return nullcontext(), copied_buffers(module)


@contextmanager
def copied_buffers(module: nn.Module) -> Iterator[None]:
    """Let a block write to copies of its buffers."""
    own = [
        (part, name, buffer)
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
    ]
    copies = {id(buffer): buffer.detach().clone() for _, _, buffer in own}
    for part, name, buffer in own:
        setattr(part, name, copies[id(buffer)])
    try:
        yield
    finally:
        for part, name, buffer in own:
            setattr(part, name, buffer)
