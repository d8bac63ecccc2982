"""Tensors and operators: what torch tells or does of them under private names alone."""

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef as WeakStorage
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import TensorWeakRef as WeakTensor

__all__ = [
    "READ_ONE",
    "OpOverload",
    "WeakStorage",
    "WeakTensor",
    "adaptive_avg_pool_backward",
    "attention_of_functions",
    "base_of",
    "batch_norm",
    "foreach_abs",
    "foreach_add",
    "foreach_add_",
    "foreach_clamp_min_",
    "foreach_div",
    "foreach_mul_",
    "foreach_norm",
    "foreach_sub",
    "int_mm",
    "storage_key",
    "tree_flatten",
    "tree_leaves",
    "tree_unflatten",
    "version_of",
    "versions_of",
    "written_by",
]

# Above, torch has no public name for: the type of an operator, nested containers, and a reference that
# ends with a tensor: weakref's own ends with the Python object, which autograd lets go. One that ends
# with a storage has a public name, and no page; no storage gets its number meanwhile.

# The public operators take one tensor: one call, and on a GPU one launch, for each.
foreach_abs = torch._foreach_abs
foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_clamp_min_ = torch._foreach_clamp_min_
foreach_div = torch._foreach_div
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sub = torch._foreach_sub

int_mm = torch._int_mm  # torch.mm takes no int8 on the CPU


def version_of(x: Tensor) -> int:
    """Return how often a tensor has been written to.

    ``torch.autograd.graph`` can only count one up. Tensors of inference mode count nothing: 0.
    """
    return 0 if x.is_inference() else x._version


def versions_of(xs: Sequence[Tensor]) -> list[int]:
    """Return ``version_of`` many tensors."""
    try:
        return [x._version for x in xs]
    except RuntimeError:  # one is of inference mode
        return list(map(version_of, xs))


def base_of(x: Tensor) -> Tensor:
    """Return the tensor of which ``x`` is a view, or ``x``; torch tells only whether it is one."""
    return x if x._base is None else x._base


def storage_key(x: Tensor) -> int:
    """Return a number that tensors with one memory share, also without an address (meta, fake)."""
    return x.untyped_storage()._cdata


def written_by(
    func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> list[Tensor]:
    """Return the tensors to which a call of an operator writes.

    An operator tells that only by its schema.
    """
    given: list[object] = []
    for i, own in enumerate(func._schema.arguments):
        if own.alias_info is not None and own.alias_info.is_write:
            given.append(args[i] if i < len(args) else kwargs.get(own.name))
    return [x for x in tree_leaves(given) if isinstance(x, Tensor)]


READ_ONE = torch.ops.aten._local_scalar_dense.default
"""The operator that makes a Python number of a tensor."""


# Operators that nn.functional calls, which give what backward needs, or take it.
def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: tuple[Tensor, Tensor] | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise as in training; returns the output, and means and inverse deviations."""
    statistics = () if running is None else running
    return torch.ops.aten._native_batch_norm_legit(
        x, weight, bias, *statistics, True, momentum, eps
    )


def adaptive_avg_pool_backward(grad: Tensor, x: Tensor, spatial: int) -> Tensor:
    """Return the gradient to ``x`` of adaptive average pooling over 2 or 3 dimensions."""
    aten = torch.ops.aten
    if spatial == 2:
        return aten._adaptive_avg_pool2d_backward(grad, x)
    return aten._adaptive_avg_pool3d_backward(grad, x)


def _attention_of_functions() -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return ``F.multi_head_attention_forward`` that shows a mode the functions it calls.

    Torch's shows itself alone: a mode is off while it runs. It asks ``has_torch_function``, its
    global, whether a mode is on; the same code here is always told no.
    """
    own = F.multi_head_attention_forward
    names = {**own.__globals__, "has_torch_function": lambda _: False}
    copy = FunctionType(own.__code__, names, own.__name__, own.__defaults__)
    copy.__kwdefaults__ = own.__kwdefaults__
    return copy


attention_of_functions = _attention_of_functions()
