"""What changes a module's results from outside its class, and so is not in a trace: refused."""

import functools
from collections.abc import Iterable

from torch import nn
from torch.nn.utils import parametrize

from fixedpoint_kernels._torch_private.modules import global_forward_hooks, own_forward_hooks
from marvin.export.errors import ExportError

__all__ = ["check_finite", "check_own", "kind_of"]

_OURS = "marvin"  # whose hooks round activations, which the export knows of


def check_own(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse modules that do more than their class says.

    A trace calls a layer's class and nothing else: it sees no hook on the layer or on the model
    itself, and no ``forward`` of one object. Hooks on what is traced through are in the trace.

    Args:
        model: The model.
        names: Of the modules that are called as one layer.

    Raises:
        ExportError: Names the first that has a foreign hook, a ``forward`` of its own or a
            parametrised weight, or is an embedding that writes to its weight.
    """
    for hook in [*global_forward_hooks()[0].values(), *global_forward_hooks()[1].values()]:
        if found := _foreign(hook):
            raise ExportError(f"no hook on all modules may be set, got {found}: remove it")
    for name in dict.fromkeys(["", *names]):
        module = model.get_submodule(name)
        shown = name or "the model"
        before, after = own_forward_hooks(module)
        around = [("before", hook) for hook in before.values()]
        for when, hook in [*around, *(("after", hook) for hook in after.values())]:
            if found := _foreign(hook):
                raise ExportError(
                    f"{shown} has a hook {when} forward which is not exported, {found}: remove it, "
                    "or make it a layer"
                )
        if "forward" in vars(module):
            raise ExportError(
                f"{shown} has a forward of its own, which is not exported: write it in a class"
            )
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            raise ExportError(
                f"{shown}: an embedding must have max_norm=None, got {module.max_norm}"
            )  # it writes to its weight
        if parametrize.is_parametrized(module):
            weights = ", ".join(getattr(module, "parametrizations", {}))
            raise ExportError(
                f"{shown} must have plain weights, got a parametrisation of {weights}: "
                "torch.nn.utils.parametrize.remove_parametrizations makes them so"
            )


def check_finite(layer: str, module: nn.Module) -> None:
    """Refuse numbers of a layer that have no codes, by name.

    Raises:
        ExportError: Parameters, or averages of batch normalisation, are not finite, or have no
            values, or a variance is below 0.
    """
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        if x.is_meta:
            raise ExportError(f"{layer}.{name} must have values, got a tensor on the meta device")
        x = x.detach()
        wrong = ~x.isfinite()
        if name == "running_var":
            wrong |= x < 0
        if wrong.any():
            least = " from 0 on" if name == "running_var" else ""
            raise ExportError(
                f"{layer}.{name} must hold finite numbers{least}, got {int(wrong.sum())} of "
                f"{x.numel()} that are not"
            )


def kind_of(module: nn.Module, kinds: Iterable[type[nn.Module]]) -> type[nn.Module] | None:
    """Return the kind whose ``forward`` a module has; None where it has none of these."""
    own = type(module).forward
    return next((k for k in kinds if isinstance(module, k) and k.forward is own), None)


def _foreign(hook: object) -> str:
    """Return the name of a hook that is not of this package, or ``""``."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    home = getattr(hook, "__module__", None) or type(hook).__module__
    if home.partition(".")[0] == _OURS:
        return ""
    return getattr(hook, "__qualname__", type(hook).__qualname__)
