"""Watch what autograd saves, on fake tensors or real ones; loads torch."""

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from fixedpoint_kernels._torch_private import fake_tensor_mode, storage_key
from perfmodel.memory import Kept, Saved, Saver, kind_of
from perfmodel.skeleton import Stack, skeleton

__all__ = ["watch"]


def watch(model: nn.Module, inputs: Sequence[Tensor], measure: bool) -> Saved:
    """See ``perfmodel.memory.saved_bytes``."""
    device = inputs[0].device
    if measure:
        with _own_randomness(device):
            kept = _run(skeleton(model, _own_buffers), inputs, "run on its inputs")
        return Saved(kept, f"measured on {device_name(device)}")
    device = torch.device("cpu") if device.type == "meta" else device
    with fake_tensor_mode():
        fake = _faker(device)
        copy = skeleton(model, fake)
        kept = _run(copy, [fake(x) for x in inputs], "run on shapes alone (fake tensors)")
    return Saved(kept, f"modelled, kernels of {device.type}")


def device_name(device: torch.device) -> str:
    """Return what to call a device in a report."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()})"


def _faker(device: torch.device) -> Callable[[Tensor], Tensor]:
    def fake(tensor: Tensor) -> Tensor:
        shape, strides = tensor.shape, tensor.stride()
        made = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)

    return fake


def _own_buffers(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()


@contextmanager
def _own_randomness(device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


def _run(model: nn.Module, inputs: Sequence[Tensor], requirement: str) -> tuple[Kept, ...]:
    stack = Stack(model)
    named = _Named()
    saves = _Saves(model, stack, named)
    hooks = saved_tensors_hooks(saves.pack, lambda tensor: tensor)
    with stack.explain(requirement), torch.enable_grad(), named, hooks:
        output = model(*inputs)
    found = saves.kept()
    del output  # it alone keeps the graph
    return found


class _Named(TorchFunctionMode):
    """Knows which operation was called last from Python."""

    def __init__(self):
        super().__init__()
        self.op = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.op = getattr(func, "__name__", "")
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.op = ""


class _Saves:
    """Collects what autograd saves, a storage at a time.

    Args:
        model: Whose parameters and buffers are left out.
        stack: Which module is running.
        named: Which operation is.
    """

    def __init__(self, model: nn.Module, stack: Stack, named: _Named):
        self._stack, self._named = stack, named
        own = [*model.parameters(), *model.buffers()]
        self._own = {_address(t) for t in own}
        self._alive: list[Tensor] = own  # an address is not given twice while its owner lives
        self._found: dict[int, tuple[Tensor, dict[Saver, None]]] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        """Note one tensor that autograd saves."""
        address = _address(tensor)
        if address not in self._own:
            self._alive.append(tensor)
            _, savers = self._found.setdefault(address, (tensor, {}))
            savers[self._saver()] = None
        return tensor

    def kept(self) -> tuple[Kept, ...]:
        """Return all, in the order in which they were saved."""
        return tuple(
            Kept(
                tensor.untyped_storage().nbytes(),
                tuple(tensor.shape),
                tensor.itemsize,
                tuple(savers),
            )
            for tensor, savers in self._found.values()
        )

    def _saver(self) -> Saver:
        op = self._named.op or self._stack.kind
        return Saver(self._stack.name, kind_of(op), op, self._stack.kind)


def _address(tensor: Tensor) -> int:
    return storage_key(tensor)
