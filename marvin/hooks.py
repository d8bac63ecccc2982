"""Hooks by which a module rounds what it sees, and checks the formats of a state that it loads."""

from functools import cache
from typing import Any

import torch
from torch import fx, nn
from torch.optim.optimizer import StateDict
from torch.utils.hooks import RemovableHandle

from fixedpoint_kernels._torch_private.modules import (
    exchange_hooks,
    hooks_of,
    keep_apart,
    keep_when_copied,
    put_before,
    remove_hooks,
    saves_by_itself,
)
from fixedpoint_kernels.watch import KEPT, has_own_forward
from marvin.model_formats import decode_formats, no_longer_awaited
from marvin.rounder import BUFFER, ForwardState, Rounder
from marvin.warned import listed, warn_user

__all__ = [
    "Saving",
    "Unscripted",
    "detach",
    "exchange",
    "give_place",
    "hook",
    "not_scripted",
    "restore_forwards",
    "rounders_of",
    "see_what_is_rounded",
    "state_of",
    "take_place",
]


class Unscripted:
    """A hook that ``torch.jit.script`` refuses by name: it asks for that of a function."""

    @property
    def __name__(self) -> str:
        raise not_scripted()


def not_scripted() -> AttributeError:
    """Return the error of a model of this package that ``torch.jit.script`` is to compile."""
    return AttributeError(
        "torch.jit.script cannot compile models that round: write "
        "torch.jit.trace(frozen, sample), where frozen = marvin.freeze(model)"
    )


class _Hook(Unscripted):
    """What a module calls; a class, so that models with hooks can be copied and pickled."""

    def __init__(self, rounder: Rounder) -> None:
        self.rounder = rounder

    def __setstate__(self, state: StateDict) -> None:
        vars(self).update(state)
        _keep_out_of_compilation()


class _Inputs(_Hook):
    def __call__(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs is None:  # registered anew, without keywords
            raise RuntimeError(
                "a model whose modules torch.ao replaces must be one for inference, got one that trains: "
                "give it marvin.freeze(model)"
            )
        own = self.rounder
        if own.is_root and not (module.training or own.state.is_complete):
            _name_awaited(module, own.state)
        return own.round_inputs(module, args, kwargs)


class _Outputs(_Hook):
    def __call__(self, module: nn.Module, _args: object, output: object) -> Any:
        return self.rounder.round_outputs(module, output)


class _Loading(_Hook):
    """Refuses numbers that are no formats; where a state has none, or a head's that was left out, those of the module stay.

    They are awaited no more.
    """

    def __call__(self, module: nn.Module, state: StateDict, prefix: str, *rest: Any) -> None:
        errors: list[str] = rest[-1]
        own = getattr(module, BUFFER)
        loaded = state.setdefault(prefix + BUFFER, own.detach().clone())
        names = [prefix + name for name, _ in module.named_parameters()]
        if names and loaded.shape != own.shape and not any(name in state for name in names):
            loaded = state[prefix + BUFFER] = own.detach().clone()  # of weights that were left out
        try:
            if decode_formats(loaded, prefix + BUFFER).is_awaited:
                state[prefix + BUFFER] = no_longer_awaited(loaded)
        except ValueError as error:
            errors.append(str(error))


class Saving(Unscripted):
    """Puts a module's formats into its state where code of its class left them out, as torch_geometric's ``Linear`` does."""

    def __call__(self, module: nn.Module, state: StateDict, prefix: str, *_: object) -> None:
        """Put them there."""
        state.setdefault(prefix + BUFFER, getattr(module, BUFFER).detach())


def hook(module: nn.Module, rounder: Rounder) -> None:
    """Let a module round by its formats, and save and load them with its state."""
    _keep_out_of_compilation()
    if isinstance(module, fx.GraphModule):
        keep_when_copied(module, Unscripted, BUFFER)
    module.register_forward_pre_hook(_Inputs(rounder), with_kwargs=True)
    module.register_forward_hook(_Outputs(rounder))
    module.register_load_state_dict_pre_hook(_Loading(rounder))
    if saves_by_itself(module) and not hooks_of(module, Saving):
        module.register_state_dict_post_hook(Saving())
    keep_apart(module, Unscripted)


def exchange(module: nn.Module, rounder: Rounder) -> None:
    """Let a module that rounds do so by another rounder, and keep the formats that it has."""
    remove_hooks(module, _Hook)
    hook(module, rounder)


def give_place(module: nn.Module, kind: type) -> None:
    """Let hooks of a class round where a module's own do, which go; its formats stay."""
    exchange_hooks(module, _Hook, kind)


def see_what_is_rounded(module: nn.Module, handle: RemovableHandle) -> None:
    """Let a hook, which was registered last, be called where the module rounds: others may change values before."""
    put_before(module, handle.id, _Hook)


def take_place(module: nn.Module, kind: type) -> None:
    """Let a module's own hooks round where those of a class do, which go."""
    exchange_hooks(module, kind, _Hook)


def detach(module: nn.Module) -> None:
    """Take hooks and formats from one module, if it has some."""
    for kind in (_Hook, Saving):
        remove_hooks(module, kind)
    if BUFFER in dict(module.named_buffers(recurse=False)):
        delattr(module, BUFFER)
    keep_apart(module, Unscripted)


def rounders_of(module: nn.Module) -> list[Rounder]:
    """Return by what a module rounds: one rounder, or none."""
    return [hook.rounder for hook in hooks_of(module, _Inputs)]


def state_of(model: nn.Module) -> ForwardState | None:
    """Return what a model's modules share; None where activations are not quantised."""
    found = (rounder.state for module in model.modules() for rounder in rounders_of(module))
    return next(found, None)


def _name_awaited(model: nn.Module, state: ForwardState) -> None:
    """Warn once of modules that still await formats beside others that got some: they compute in float32."""
    awaited = {
        rounder.name: rounder.formats(module).is_awaited
        for module in model.modules()
        for rounder in rounders_of(module)
        if not getattr(module, BUFFER).is_meta
    }
    if all(awaited.values()):
        return  # no state has been loaded yet
    state.is_complete = True
    if names := [name for name, own in awaited.items() if own and name]:
        warn_user(
            f"modules have got no formats, so they compute in float32 beside others that have some: {listed(names)}; "
            "load a state that has them by load_state_dict, or leave these out by marvin.prepare(model, exclude=...); "
            'of what accelerate puts on "disk", it loads them with offload_buffers=True alone'
        )


@cache
def _keep_out_of_compilation() -> None:
    """Keep hooks out of torch.compile, which cannot look into the kernels."""
    for kind in (_Inputs, _Outputs):  # takes a second the first time
        disabled: Any = torch.compiler.disable(kind.__call__)
        kind.__call__ = disabled


def restore_forwards(model: nn.Module) -> None:
    """Let modules run the ``forward`` of their class again; one that somebody else set stays, and may wrap that."""
    for module in model.modules():
        vars(module).pop(KEPT, None)
        if not has_own_forward(module):
            vars(module).pop("forward", None)
