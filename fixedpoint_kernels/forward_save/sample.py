"""Run a model once on a sample, and see who calls what and who keeps which tensor."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fixedpoint_kernels._torch_private import HOOKS
from fixedpoint_kernels.watch import Caller, Running, Storage, Watch, is_torchs

__all__ = ["ForwardPass", "Inputs", "observe", "visit"]

Inputs = Tensor | Sequence[object] | Mapping[str, object]
Arguments = tuple[tuple[object, ...], dict[str, object]]


class ForwardPass(NamedTuple):
    """What one forward pass did.

    Args:
        calls: Each call from Python, without repetition.
        saved: Each storage kept for backward; parameters, buffers and empty ones are left out.
    """

    calls: tuple[Caller, ...]
    saved: tuple[Storage, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes kept."""
        return sum(storage.size_bytes for storage in self.saved)

    def is_idle(self, layer: str, rest: set[tuple[str, str]]) -> bool:
        """Whether all that a layer keeps is also kept by ``rest``: layers and their functions."""
        mine = [storage.savers for storage in self.saved if layer in storage.layers]
        return bool(mine) and all(
            any((who.layer, who.function) in rest for who in savers) for savers in mine
        )


def _arguments(inputs: Inputs) -> Arguments:
    """Return a sample as arguments by position and by keyword."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return ((inputs,) if isinstance(inputs, Tensor) else tuple(inputs)), {}


def observe(model: nn.Module, inputs: Inputs) -> ForwardPass:
    """Run a forward pass in the mode the model is in; the user's hooks are not called."""
    buffers = _copies(model)
    with without_hooks(model):
        watch = Watch(Running(model), [*model.parameters(), *buffers.values()])
        with torch.enable_grad(), watch:
            output = _forward(model, buffers, inputs)
    del output  # it alone keeps the graph
    return ForwardPass(tuple(watch.calls), tuple(s for s in watch.saved() if s.size_bytes))


def visit(model: nn.Module, inputs: Inputs, see: Callable[[str, nn.Module, Tensor], None]) -> None:
    """Run a forward pass without gradients, and call ``see`` with each module's first tensor."""

    def hook(
        name: str, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if tensors:
            see(name, module, tensors[0])

    with without_hooks(model), torch.no_grad():
        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(hook, name), with_kwargs=True)
        _forward(model, _copies(model), inputs)


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.detach().clone() for name, b in model.named_buffers()}


def _forward(model: nn.Module, buffers: dict[str, Tensor], inputs: Inputs) -> object:
    """Call ``model`` on ``buffers``, leaving the random numbers as they were."""
    devices = {t.device for t in model.parameters() if t.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):
        return torch.func.functional_call(model, buffers, *_arguments(inputs))


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Take off all hooks but torch's own (such as weight normalisation), and put them back."""
    before = [(m, name, getattr(m, name)) for m in model.modules() for name in HOOKS]
    for module, name, hooks in before:
        torchs = {key: hook for key, hook in hooks.items() if is_torchs(hook)}
        setattr(module, name, type(hooks)(torchs))
    try:
        yield
    finally:
        for module, name, hooks in before:
            setattr(module, name, hooks)
