"""Hooks of optimizers, and what a gradient scaler tells them."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.optim.optimizer as torch_optimizer

__all__ = [
    "AskedByScaler",
    "calling_scaler",
    "has_step_hooks",
    "is_ready",
    "step_hooks_of",
    "without_global_step_hooks",
]

_Hook = TypeVar("_Hook")


def is_ready(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether an optimizer has what ``Optimizer.__init__`` makes: wrappers of some packages leave it out."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def step_hooks_of(optimizer: torch.optim.Optimizer, kind: type[_Hook]) -> Iterator[_Hook]:
    """Yield the hooks of a class before a step: torch registers them publicly, and lists them not."""
    hooks: list[object] = [*optimizer._optimizer_step_pre_hooks.values()]
    return (hook for hook in hooks if isinstance(hook, kind))


def has_step_hooks(optimizer: torch.optim.Optimizer, but: type) -> bool:
    """Say whether an optimizer has hooks for a step, but for those of a class before it."""
    return bool(
        len([*step_hooks_of(optimizer, but)]) < len(optimizer._optimizer_step_pre_hooks)
        or optimizer._optimizer_step_post_hooks
    )


@contextmanager
def without_global_step_hooks() -> Iterator[None]:
    """Let no hook of all optimizers see the steps in this block: they saw, or will see, the one it belongs to.

    torch lets nobody step an optimizer without them. Steps that other threads do meanwhile miss them.
    """
    tables = [
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    ]
    hooks = [dict(table) for table in tables]
    try:
        for table in tables:
            table.clear()
        yield
    finally:
        for table, own in zip(tables, hooks, strict=True):
            table.update(own)


class AskedByScaler:
    """A base of optimizers that hear of a step from ``GradScaler``, also where it leaves the step out.

    It tells nobody what it leaves out; but before it decides, it reads this attribute.
    """

    @property
    def _step_supports_amp_scaling(self) -> bool:
        if calling_scaler() is not None:
            self._before_scaled_step()
        return False  # the scaler divides gradients itself

    def _before_scaled_step(self) -> None:
        """Prepare for a ``step`` that may be left out."""


def calling_scaler() -> torch.amp.GradScaler | None:
    """Return the gradient scaler in whose method this is called; None if there is none.

    It hands in nothing that tells of it.
    """
    frame = inspect.currentframe()
    while frame is not None:
        own = frame.f_locals.get("self")
        if isinstance(own, torch.amp.GradScaler):
            return own
        frame = frame.f_back
    return None
