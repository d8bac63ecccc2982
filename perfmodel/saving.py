"""Watch what autograd saves, on fake tensors or real ones; loads torch."""

import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from fixedpoint_kernels._torch_private.modes import fake_tensor_mode, without_fake_log
from fixedpoint_kernels.watch import Running, Storage, Watch
from perfmodel.skeleton import check_model, explain, skeleton

__all__ = ["watch"]


def watch(
    model: nn.Module, inputs: Sequence[Tensor], measure: bool
) -> tuple[tuple[Storage, ...], str]:
    """Return what is kept, and how that is known; see ``perfmodel.memory.saved_bytes``.

    Raises:
        TypeError: ``model`` is no module, or ``inputs`` are no tensors.
    """
    check_model(model, "memory.saved_bytes(model, x)")
    _check_inputs(inputs)
    device = inputs[0].device
    if measure:
        with _own_randomness(device):
            kept = _run(skeleton(model, _own_buffers), inputs, "run on its inputs")
        return kept, f"measured on {device_name(device)}"
    device = torch.device("cpu") if device.type == "meta" else device
    with fake_tensor_mode(), without_fake_log(), _one_sequence_a_row():
        fake = _faker(device)
        copy = skeleton(model, fake)
        needed = "run on shapes alone (fake tensors)"
        kept = _run(copy, [fake(x) for x in inputs], needed, "measure=True runs it on values")
    lacking = ", without oneDNN's workspace of LSTMs: measure=True tells it"
    return kept, f"modelled, kernels of {device.type}" + lacking * _has_workspace(kept)


def _check_inputs(inputs: Sequence[object]) -> None:
    if inputs and all(isinstance(x, Tensor) for x in inputs):
        return
    if inputs and all(isinstance(x, int) for x in inputs):
        got = f"the shape {inputs!r}: write saved_bytes(model, torch.zeros{inputs!r})"
    elif any(isinstance(x, np.ndarray) for x in inputs):
        got = "a NumPy array: write saved_bytes(model, torch.from_numpy(x))"
    else:
        got = ", ".join(type(x).__name__ for x in inputs) or "nothing"
    raise TypeError(f"inputs must be a tensor, or a tuple of tensors, got {got}")


def _has_workspace(kept: Sequence[Storage]) -> bool:
    """Whether an LSTM on a CPU keeps what oneDNN works with: fake tensors say that it is empty."""
    return any(not s.size_bytes and who.function == "lstm" for s in kept for who in s.savers)


@contextmanager
def _one_sequence_a_row() -> Iterator[None]:
    """Let transformers take each row of tokens as one sequence: it reads that from values.

    Where it cannot, it makes a mask, and with a mask it repeats keys and values of grouped queries.
    """
    masks, name = sys.modules.get("transformers.masking_utils"), "find_packed_sequence_indices"
    own = getattr(masks, name, None)
    if masks is None or own is None:
        yield
        return
    setattr(masks, name, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(masks, name, own)


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


def _run(
    model: nn.Module, inputs: Sequence[Tensor], requirement: str, remedy: str = ""
) -> tuple[Storage, ...]:
    running = Running(model)
    seen = Watch(running, [*model.parameters(), *model.buffers()])
    with explain(running, requirement, remedy), torch.enable_grad(), seen:
        output = model(*inputs)
    found = seen.saved()
    del output  # it alone keeps the graph
    return found
