"""Hooks, tables and classes of modules: torch lists none of them."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from operator import itemgetter
from types import FrameType
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd as AdaptiveAvgPoolBase
from torch.nn.modules.pooling import _AvgPoolNd as AvgPoolBase

__all__ = [
    "FORWARDS",
    "HOOKS",
    "AdaptiveAvgPoolBase",
    "AvgPoolBase",
    "BatchNormBase",
    "ConvolutionHook",
    "NormBase",
    "buffer_of",
    "buffers_of",
    "called_in",
    "children_of",
    "exchange_hooks",
    "fill_copy",
    "global_backward_hooks",
    "global_forward_hooks",
    "has_backward_hooks",
    "hook_wrapper",
    "hooks_of",
    "in_place_of",
    "is_called_plainly",
    "is_joining",
    "keep_apart",
    "keep_when_copied",
    "mode_and_hooks",
    "own_buffers",
    "own_forward_hooks",
    "own_hooks",
    "own_parameters",
    "padding_around",
    "parameter_tables",
    "put_before",
    "remove_hooks",
    "saves_by_itself",
    "settings_of",
    "table_of",
    "tensor_of",
]

# Above, torch has no public name for: the common classes of batch and instance normalisation and of
# average pooling.

# A hook is known by the handle that registering it gave, and by nothing on a copy.
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
mode_and_hooks = itemgetter(
    "training", "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
)
"""Return, of ``vars(module)``, whether it trains, and its hooks around ``forward`` and on gradients."""

_OURS = "_forward_pre_hooks", "_forward_hooks", "_load_state_dict_pre_hooks", "_state_dict_hooks"


def hooks_of(module: nn.Module, kind: type) -> list[Any]:
    """Return the hooks of a class that a module has."""
    found, places = [], vars(module)
    for place in _OURS:
        for hook in places[place].values():
            own = _unwrapped(hook)
            if isinstance(own, kind):
                found.append(own)
    return found


def keep_when_copied(module: fx.GraphModule, kind: type, buffer: str) -> None:
    """Let copies of a traced module have its hooks of a class around ``forward``, and a buffer, as those of other modules do.

    ``fx.GraphModule`` leaves them out of copies. Each of these modules has a class of its own.
    """
    cls = type(module)
    if "__deepcopy__" in vars(cls):
        return
    plain = cls.__deepcopy__

    def copied(self: fx.GraphModule, memo: dict[int, object]) -> fx.GraphModule:
        new = plain(self, memo)
        for key, hook in self._forward_pre_hooks.items():
            if isinstance(hook, kind):
                with_kwargs = key in self._forward_pre_hooks_with_kwargs
                new.register_forward_pre_hook(deepcopy(hook, memo), with_kwargs=with_kwargs)
        for hook in self._forward_hooks.values():
            if isinstance(hook, kind):
                new.register_forward_hook(deepcopy(hook, memo))
        if buffer in self._buffers and buffer not in new._buffers:
            new.register_buffer(buffer, deepcopy(self._buffers[buffer], memo))
        keep_when_copied(new, kind, buffer)
        return new

    cls.__deepcopy__ = copied


def keep_apart(module: nn.Module, kind: type) -> None:
    """Let ``torch.compile`` tell a module that has hooks of a class from others, or no more once they went.

    Dynamo runs what it compiled for all modules of a class, and does not look whether those have hooks
    (``torch._dynamo.config.skip_nnmodule_hook_guards``, of all models). It looks at the type of the table from
    which it took parameters: torch makes a ``dict``. A table of somebody else's type stays.
    """
    old, new = (dict, OrderedDict) if hooks_of(module, kind) else (OrderedDict, dict)
    if type(module._parameters) is old:
        vars(module)["_parameters"] = new(module._parameters)


def saves_by_itself(module: nn.Module) -> bool:
    """Say whether a class has code of its own for what is in a module's state: it may leave out buffers."""
    return type(module)._save_to_state_dict is not nn.Module._save_to_state_dict


def remove_hooks(module: nn.Module, kind: type) -> None:
    """Take all hooks of a class from a module."""
    for place in _OURS:
        hooks: dict[int, Callable[..., Any]] = getattr(module, place)
        for key in [key for key, hook in hooks.items() if isinstance(_unwrapped(hook), kind)]:
            del hooks[key]
            if place == "_forward_pre_hooks":
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def exchange_hooks(module: nn.Module, old: type, new: type) -> None:
    """Put a module's hooks around ``forward`` of one class where those of another are, which go.

    Others keep their places: the order of hooks is part of what a module computes.
    """
    for hooks in own_forward_hooks(module):
        before = dict(hooks)
        moved = {key: hook for key, hook in before.items() if isinstance(hook, new)}
        hooks.clear()
        for key, hook in before.items():
            if key not in moved:
                hooks[key] = hook
            if isinstance(hook, old):
                hooks.update(moved)
        hooks.update(moved)  # where there was no other
    remove_hooks(module, old)


def put_before(module: nn.Module, number: int, kind: type) -> None:
    """Move a hook around ``forward``, by its number, in front of that of a class; where there is none, of all."""
    for hooks in own_forward_hooks(module):
        keys = [key for key in hooks if key != number] if number in hooks else []
        first = next((i for i, key in enumerate(keys) if isinstance(hooks[key], kind)), 0)
        for key in keys[first:]:  # go behind it
            hooks[key] = hooks.pop(key)


def _unwrapped(hook: object) -> object:
    """Return what was registered: torch wraps hooks that want the module."""
    return getattr(hook, "hook", hook)


def own_forward_hooks(
    module: nn.Module,
) -> tuple[dict[int, Callable[..., object]], dict[int, Callable[..., object]]]:
    """Return the hooks before and after a module's ``forward``."""
    return module._forward_pre_hooks, module._forward_hooks


_ALL_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def own_hooks(module: nn.Module) -> list[object]:
    """Return all hooks of a module: around ``forward``, on gradients, and around its state."""
    return [_unwrapped(hook) for name in _ALL_HOOKS for hook in getattr(module, name).values()]


def global_backward_hooks() -> tuple[
    dict[int, Callable[..., object]], dict[int, Callable[..., object]]
]:
    """Return the hooks on gradients of every module."""
    return torch_module._global_backward_hooks, torch_module._global_backward_pre_hooks


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's children by name; what is put in their place later is seen in it."""
    return module._modules


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's buffers by name, those that are None, too; what is put in their place later is seen in it."""
    return module._buffers


def own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return names and parameters of a module alone: a tenth of the time of ``named_parameters``."""
    return [(name, own) for name, own in module._parameters.items() if own is not None]


def parameter_tables(modules: Iterable[nn.Module]) -> list[Mapping[str, nn.Parameter | None]]:
    """Return the table of parameters of each module: see ``keep_apart``."""
    return [own._parameters for own in modules]


_MACHINERY = {*vars(nn.Module())} - {"_buffers", "_modules", "_parameters"}


def settings_of(module: nn.Module) -> dict[str, object]:
    """Return what is on a module, its tensors and its children too, but torch's hooks and flags."""
    return {name: value for name, value in vars(module).items() if name not in _MACHINERY}


@contextmanager
def in_place_of(module: nn.Module, others: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Let a module and those inside read other tensors in the place of some of its parameters."""
    places = [
        (part._parameters, name, p)
        for part in module.modules()
        for name, p in part._parameters.items()
        if p is not None and p in others
    ]
    for own, name, p in places:
        own[name] = others[p]  # pyright: ignore[reportArgumentType]: a tensor, not a parameter
    try:
        yield
    finally:
        for own, name, p in places:
            own[name] = p


def tensor_of(module: nn.Module, name: str) -> Tensor | None:
    """Return a parameter or buffer as ``getattr`` does, without the search; None where there is none."""
    for own in (module._parameters, module._buffers):
        if name in own:
            return own[name]
    return getattr(module, name, None)


def buffer_of(module: nn.Module, name: str) -> Tensor | None:
    """Return a buffer of a module; None where there is none. An attribute takes five times as long."""
    return module._buffers.get(name)


def buffers_of(modules: Sequence[nn.Module], name: str) -> list[Tensor | None]:
    """Return a buffer of each module; None where there is none."""
    return [own._buffers.get(name) for own in modules]


def table_of(module: nn.Module, name: str) -> Mapping[str, object]:
    """Return the table in which a module has a parameter, a buffer or another attribute."""
    tables = module._parameters, module._buffers
    return next((own for own in tables if name in own), vars(module))


def has_backward_hooks(module: nn.Module) -> bool:
    """Say whether a module has hooks on gradients, or all modules have."""
    return bool(
        module._backward_hooks or module._backward_pre_hooks or any(global_backward_hooks())
    )


def global_forward_hooks() -> tuple[
    dict[int, Callable[..., object]], dict[int, Callable[..., object]]
]:
    """Return the hooks before and after every module's ``forward``."""
    return torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks


def is_called_plainly(module: nn.Module) -> bool:
    """Say whether calling a module is its class's ``forward``, between its own hooks alone."""
    is_own = "forward" not in vars(module) and module._compiled_call_impl is None
    return is_own and not any(global_forward_hooks())


def called_in(frame: FrameType) -> nn.Module | None:
    """Return the module whose call runs in a frame of torch's; None where that is another frame.

    A ``forward`` that is set on a module is not told which module is called.
    """
    called = frame.f_locals.get("self")
    return called if isinstance(called, nn.Module) else None


def hook_wrapper() -> type:
    """Return the class that torch wraps a hook in that wants the module; a saved model names it."""
    return torch_module._WrappedHook


def fill_copy(
    copy: nn.Module,
    module: nn.Module,
    convert: Callable[[Tensor | None], Any],
    child: Callable[[nn.Module], nn.Module],
) -> None:
    """Give a copy of ``module`` parameters, buffers and modules of its own.

    ``named_parameters`` and its like leave out what is None or there twice.
    """
    copy._parameters = {name: convert(p) for name, p in module._parameters.items()}
    copy._buffers = {name: convert(b) for name, b in module._buffers.items()}
    copy._modules = {name: m and child(m) for name, m in module._modules.items()}


FORWARDS = "forward", "_conv_forward"
"""Methods in which torch's layers compute."""


class ConvolutionHook(nn.Module):
    """Goes before a convolution in a class's bases: ``convolve`` replaces its product.

    ``forward`` calls that with the weight and bias of the moment (weight normalisation); whoever
    overrides ``forward`` alone, as is public, misses what subclasses of torch's layers do there.
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        own = super()._conv_forward  # pyright: ignore[reportAttributeAccessIssue]
        return self.convolve(own, input, weight, bias)

    def convolve(
        self, own: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Return the convolution of ``x``; ``own`` is torch's."""
        return own(x, weight, bias)


def padding_around(module: Any) -> list[int]:
    """Return a convolution's padding as ``F.pad`` takes it: ``padding`` may be a word."""
    return module._reversed_padding_repeated_twice


def is_joining(model: Any) -> bool:
    """Say whether a ``DistributedDataParallel`` is inside of ``join``, of which it does not tell."""
    return model._join_config.enable
