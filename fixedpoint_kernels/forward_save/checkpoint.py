"""Blocks that keep their inputs alone, and run again in the backward pass."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fixedpoint_kernels._torch_private.modes import is_checkpointed, is_recomputed
from fixedpoint_kernels._torch_private.modules import in_place_of, own_parameters
from fixedpoint_kernels._torch_private.tensors import tree_flatten, tree_unflatten, version_of

__all__ = ["Checkpointed", "Found", "blocks", "copied_buffers"]


class Checkpointed(nn.Module):
    """Goes before the class of a block: gradients, statistics and random numbers are torch's own.

    torch's checkpoint runs a block a second time with all it does; here the second run finds parameters
    and buffers as the first did, and writes to copies of buffers, so that running statistics move once a step.
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

    found = Found(module)

    def again(*tensors: Tensor) -> Any:
        filled = list(leaves)
        for i, tensor in zip(at, tensors, strict=True):
            filled[i] = tensor
        args, kwargs = tree_unflatten(filled, shape)
        with found.of_run(is_again=is_recomputed()):
            return own(*args, **kwargs)

    return checkpoint(again, *tensors, use_reentrant=False)


class Found:
    """Parameters and buffers of a block that runs more than once, each time as if for the first time.

    After ``functional_call`` a model has its own tensors again when the pass backward comes.

    Args:
        module: The block, before its first run.
    """

    def __init__(self, module: nn.Module):
        self._module = module
        # that the first run found; of buffers it wrote to, copies come behind
        self._first_buffers: list[_Buffer] = []
        self._first_parameters: list[tuple[nn.Module, dict[str, nn.Parameter]]] = []

    @contextmanager
    def of_run(self, *, is_again: bool) -> Iterator[None]:
        """Surround a run: the first writes to the buffers, others have its parameters and write to copies of buffers."""
        if is_again:
            with (
                in_place_of(self._module, self._others()),
                copied_buffers(self._module, self._first_buffers),
            ):
                yield
            return
        self._first_parameters = [
            (part, dict(own_parameters(part))) for part in self._module.modules()
        ]
        found = _buffers(self._module)
        copies = _copies(b.tensor for b in found)
        versions = [version_of(b.tensor) for b in found]
        yield
        self._first_buffers = found + [
            b._replace(tensor=copies[id(b.tensor)])
            for b, version in zip(found, versions, strict=True)
            if getattr(b.module, b.name, None) is not b.tensor or version_of(b.tensor) != version
        ]

    def _others(self) -> dict[Tensor, Tensor]:
        """Return the parameters of the first run by those that are in their place now.

        Where FSDP has gathered a parameter or let it go since, its own hooks see to it.
        """
        return {
            now: first[name]
            for part, first in self._first_parameters
            for name, now in own_parameters(part)
            if name in first and first[name] is not now and type(first[name].data) is type(now.data)
        }


@contextmanager
def copied_buffers(module: nn.Module, before: "Sequence[_Buffer]" = ()) -> Iterator[None]:
    """Let a block write to copies of its buffers.

    Args:
        module: The block.
        before: Buffers whose copies have other values.
    """
    own = _buffers(module)
    put = [*own, *before]
    copies = _copies(b.tensor for b in put)
    for part, name, tensor in put:
        setattr(part, name, copies[id(tensor)])
    try:
        yield
    finally:
        for part, name, tensor in own:
            setattr(part, name, tensor)


class _Buffer(NamedTuple):
    module: nn.Module
    name: str
    tensor: Tensor


def _buffers(module: nn.Module) -> list[_Buffer]:
    return [
        _Buffer(part, name, tensor)
        for part in module.modules()
        for name, tensor in part.named_buffers(recurse=False, remove_duplicate=False)
    ]


def _copies(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """Return a copy of each tensor, by its ``id``: what modules share they share again."""
    return {id(tensor): tensor.detach().clone() for tensor in tensors}
