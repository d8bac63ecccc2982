"""Who sees what operators do: modes, transformations, hooks for saved tensors, and tensors without values."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "SavingHooks",
    "TorchDispatchMode",
    "derivatives_of",
    "fake_tensor_mode",
    "is_batched",
    "is_checkpointed",
    "is_fake",
    "is_recomputed",
    "is_transformed",
    "is_watched",
    "is_wrapped",
    "saving_hooks",
    "unseen_in_checkpoints",
    "without_fake_log",
]

# Above, torch has no public name for a mode that sees operators.


def is_watched() -> bool:
    """Say whether a mode, ``torch.func`` or forward-mode differentiation sees what operators do."""
    # torch.overrides tells of neither
    return bool(torch._C._len_torch_dispatch_stack() or is_transformed())


def is_transformed() -> bool:
    """Say whether ``torch.func`` or forward-mode differentiation sees what operators do."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def derivatives_of(x: Tensor) -> int:
    """Return how many transformations of ``torch.func`` will differentiate by ``x``.

    Tensors do not tell otherwise which transformations they are inside of.
    """
    found, inside = 0, torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    while inside.is_functorch_wrapped_tensor(x):
        found += inside.is_gradtrackingtensor(x)
        x = inside.get_unwrapped(x)
    return found


def is_batched(x: Tensor) -> bool:
    """Say whether a tensor stands for many gradients: ``torch.autograd.grad(..., is_grads_batched=True)``."""
    return torch._C._functorch.is_legacy_batchedtensor(x)  # pyright: ignore[reportAttributeAccessIssue]


def is_wrapped(x: Tensor) -> bool:
    """Say whether a transformation of ``torch.func`` wraps a tensor: torch gives it an address, or raises, as it likes."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)  # pyright: ignore[reportAttributeAccessIssue]


SavingHooks = tuple[Callable[..., object], Callable[..., Tensor]]


def saving_hooks() -> SavingHooks | None:
    """Return the innermost hooks for saved tensors, which torch does not tell; None where there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore


def _saving_hooks_of_others() -> SavingHooks | None:
    """Return the innermost hooks but those that pass tensors on to ``outer``, an attribute."""
    hooks = saving_hooks()
    while hooks is not None and hasattr(hooks[0], "outer"):
        hooks = hooks[0].outer  # pyright: ignore[reportFunctionMemberAccess]
    return hooks


def is_checkpointed() -> bool:
    """Say whether a checkpoint that is not reentrant drops what is saved just now, or makes it again.

    ``torch.utils.checkpoint`` does not tell; its hooks are on top of those for saved tensors.
    """
    hooks = _saving_hooks_of_others()
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def is_recomputed() -> bool:
    """Say whether a checkpoint that is not reentrant runs a part of a model for the second time."""
    hooks = _saving_hooks_of_others()
    return hooks is not None and "_recomputation_hook" in hooks[0].__qualname__


def unseen_in_checkpoints() -> AbstractContextManager[object]:
    """Let a selective checkpoint not see what operators do in this block.

    It wants the same operators each time it runs a part of a model; what is counted may take others.
    """
    if torch._C._len_torch_dispatch_stack() and is_checkpointed():
        return _disable_current_modes()
    return nullcontext()


def fake_tensor_mode() -> Any:
    """Return a mode in which tensors have shapes and devices, and no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    return FakeTensorMode()


@contextmanager
def without_fake_log() -> Iterator[None]:
    """Keep torch from printing a traceback before an operator without values raises its error."""
    from torch._subclasses import fake_tensor

    log, own = fake_tensor.log, fake_tensor.log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = own


def is_fake(x: Tensor) -> bool:
    """Say whether a tensor has a shape and a device, and no values."""
    if type(x) is Tensor:
        return False
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor)
