"""What torch does not offer publicly; nothing else here uses its private names."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

__all__ = ["global_hooks", "hook_wrapper", "hooks_of", "own_hooks", "remove_hooks"]

# torch gives a handle for each hook it registers, but no way to find a hook on a copy of a module
_PLACES = "_forward_pre_hooks", "_forward_hooks", "_load_state_dict_pre_hooks"


def hooks_of(module: nn.Module, kind: type) -> Iterator[Any]:
    """Yield the hooks of a class that a module has."""
    for place in _PLACES:
        for hook in getattr(module, place).values():
            own = _unwrapped(hook)
            if isinstance(own, kind):
                yield own


def remove_hooks(module: nn.Module, kind: type) -> None:
    """Take all hooks of a class from a module."""
    for place in _PLACES:
        hooks: dict[int, Callable[..., Any]] = getattr(module, place)
        for key in [key for key, hook in hooks.items() if isinstance(_unwrapped(hook), kind)]:
            del hooks[key]
            if place == "_forward_pre_hooks":
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def _unwrapped(hook: Any) -> Any:
    """Return what was registered: torch wraps hooks that want the module."""
    return getattr(hook, "hook", hook)


def hook_wrapper() -> type:
    """Return the class that torch wraps a hook in that wants the module; a saved model names it."""
    return torch_module._WrappedHook


def own_hooks(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the hooks around the ``forward`` of a module, each with ``"before"`` or ``"after"``."""
    yield from (("before", hook) for hook in module._forward_pre_hooks.values())
    yield from (("after", hook) for hook in module._forward_hooks.values())


def global_hooks() -> Iterator[Any]:
    """Yield the hooks around the ``forward`` of every module."""
    yield from torch_module._global_forward_pre_hooks.values()
    yield from torch_module._global_forward_hooks.values()
