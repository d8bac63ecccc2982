"""Run a model once on a sample, and see who calls what and who keeps which tensor."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from fixedpoint_kernels._torch_private import HOOKS

__all__ = ["Inputs", "Seen", "observe", "visit"]

Inputs = Tensor | Sequence[Any]


@dataclass
class Seen:
    """What one forward pass did.

    Args:
        calls: Module and function of each call from Python, without repetition.
        savers: For each storage kept for backward, the modules and functions that keep it;
            parameters and buffers are left out.
        sizes: Bytes of each.
    """

    calls: dict[tuple[str, str], None] = field(default_factory=dict)
    savers: dict[int, dict[tuple[str, str], None]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)

    def is_idle(self, layer: str, gone: set[str]) -> bool:
        """Whether all that a layer keeps is also kept by a layer outside of ``gone``."""
        mine = [savers for savers in self.savers.values() if layer in {n for n, _ in savers}]
        return bool(mine) and all(any(n not in gone for n, _ in savers) for savers in mine)


def _arguments(inputs: Inputs) -> tuple[Any, ...]:
    """Return a sample as positional arguments."""
    return (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)


def observe(model: nn.Module, inputs: Inputs) -> Seen:
    """Run a forward pass in the mode the model is in; the user's hooks are not called."""
    stack, buffers = [""], _copies(model)
    watch = _Watch(stack, [*model.parameters(), *buffers.values()])
    hooks = saved_tensors_hooks(watch.keep, lambda tensor: tensor)
    with without_hooks(model):
        _follow(model, stack)
        with torch.enable_grad(), watch, hooks:
            output = _forward(model, buffers, inputs)
    del output  # it alone keeps the graph
    return watch.seen


def visit(
    model: nn.Module, inputs: Inputs, see: Callable[[str, nn.Module, tuple[Any, ...]], None]
) -> None:
    """Run a forward pass without gradients, and call ``see`` before each module."""
    with without_hooks(model), torch.no_grad():
        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(see, name))
        _forward(model, _copies(model), inputs)


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.detach().clone() for name, b in model.named_buffers()}


def _forward(model: nn.Module, buffers: dict[str, Tensor], inputs: Inputs) -> Any:
    """Call ``model`` on ``buffers``, leaving the random numbers as they were."""
    devices = {t.device for t in model.parameters() if t.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):
        return torch.func.functional_call(model, buffers, _arguments(inputs))


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Take off all hooks but torch's own (such as weight normalisation), and put them back."""
    before = [(m, name, getattr(m, name)) for m in model.modules() for name in HOOKS]
    for module, name, hooks in before:
        torchs = {k: h for k, h in hooks.items() if type(h).__module__.startswith("torch.nn.utils")}
        setattr(module, name, type(hooks)(torchs))
    try:
        yield
    finally:
        for module, name, hooks in before:
            setattr(module, name, hooks)


def _follow(model: nn.Module, stack: list[str]) -> None:
    """Keep the name of the running module on top of ``stack``."""
    for name, module in model.named_modules():
        module.register_forward_pre_hook(partial(_enter, stack, name))
        module.register_forward_hook(partial(_leave, stack))


def _enter(stack: list[str], name: str, _module: nn.Module, _inputs: Any) -> None:
    stack.append(name)


def _leave(stack: list[str], _module: nn.Module, _inputs: Any, _output: Any) -> None:
    stack.pop()


class _Watch(TorchFunctionMode):
    """Notes calls, and the tensors that autograd saves."""

    def __init__(self, stack: list[str], own: list[Tensor]):
        super().__init__()
        self.seen = Seen()
        self._stack, self._op = stack, ""
        self._own = {t.untyped_storage().data_ptr() for t in own}
        self._alive: list[Tensor] = []  # an address is not given twice while its owner lives

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._op = getattr(func, "__name__", "")
        self.seen.calls[self._stack[-1], self._op] = None
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._op = ""

    def keep(self, tensor: Tensor) -> Tensor:
        """Note a tensor that autograd saves."""
        address = tensor.untyped_storage().data_ptr()
        if address and address not in self._own:
            self._alive.append(tensor)
            self.seen.sizes[address] = tensor.untyped_storage().nbytes()
            self.seen.savers.setdefault(address, {})[self._stack[-1], self._op] = None
        return tensor
