"""A copy of a model that shares nothing the copy may change; loads torch."""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fixedpoint_kernels._torch_private.compiling import uncompiled
from fixedpoint_kernels._torch_private.modules import HOOKS, fill_copy
from fixedpoint_kernels.watch import OtherForward, Running, is_torchs, stock_class
from perfmodel.text import of_tokens

__all__ = ["check_model", "explain", "skeleton"]

Convert = Callable[[Tensor], Tensor]


def check_model(model: object, call: str) -> None:
    """Refuse what is no model where one comes first.

    Args:
        model: What came.
        call: How it is written.

    Raises:
        TypeError: It is no ``torch.nn.Module``.
    """
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"a model (torch.nn.Module) must come first, got {got}: write {call}")


def skeleton(model: nn.Module, convert: Convert) -> nn.Module:
    """Return a copy of ``model`` with every tensor replaced, and without hooks but torch's own.

    Those of weight and spectral normalisation make the weight. What ``marvin.integer.convert`` did
    is undone: its products need values.

    Args:
        model: Left as it is.
        convert: Makes the tensor of the copy from the model's; called once a tensor, so tied
            weights stay tied.

    Returns:
        The copy. Attributes that are neither tensors nor modules are shared.

    Raises:
        ValueError: A module is lazy: its weights have no shape yet.
    """
    for name, module in model.named_modules():
        if any(map(is_lazy, (*module.parameters(False), *module.buffers(False)))):
            raise ValueError(
                f"every weight must have a shape, got none yet in {name or 'the model itself'} "
                f"({type(module).__name__}): run the model once first, such as in the function that "
                "makes it"
            )
    tensors: dict[int, Tensor] = {}

    def once(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in tensors:
            tensors[id(tensor)] = convert(tensor)
        return tensors[id(tensor)]

    return _copy(uncompiled(model), {}, once)


def _copy(
    module: nn.Module, copies: dict[int, nn.Module], convert: Callable[[Any], Any]
) -> nn.Module:
    """Copy ``module`` and all below it; a module met before is the same copy."""
    if id(module) in copies:
        return copies[id(module)]
    kind = stock_class(module) or type(module)
    copy = copies[id(module)] = object.__new__(kind)  # fx's own makes a class without forward
    state = {
        name: _attribute(value, module, copy)
        for name, value in vars(module).items()
        if not isinstance(value, OtherForward)
    }
    copy.__dict__ = {n: convert(v) if isinstance(v, Tensor) else v for n, v in state.items()}
    for name in HOOKS:
        hooks = getattr(module, name)
        kept = ((key, hook) for key, hook in hooks.items() if is_torchs(hook))
        setattr(copy, name, type(hooks)(kept))
    fill_copy(copy, module, convert, lambda m: _copy(m, copies, convert))
    return copy


def _attribute(value: object, module: nn.Module, copy: nn.Module) -> Any:
    """Return an attribute for the copy: a ``forward`` put on the module moves with it."""
    if isinstance(value, types.MethodType) and value.__self__ is module:
        return types.MethodType(value.__func__, copy)
    return value


@contextmanager
def explain(running: Running, requirement: str, remedy: str = "") -> Iterator[None]:
    """Turn an error of the model into one that names the module, and what to write instead.

    Raises:
        ValueError: The model failed.
    """
    try:
        yield
    except Exception as error:  # whatever a model may raise
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"the model must {requirement}, got {type(error).__name__} "
            f"in {running.name or 'the model itself'}: {reason}{of_tokens(reason)}"
            f"{remedy and '; '}{remedy}"
        ) from error
