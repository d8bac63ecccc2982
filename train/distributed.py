"""Several processes, as torchrun starts them: each takes its share of each batch.

One process needs nothing of this: every function then does nothing, or returns what it was given.
"""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from perfmodel.files import UserError, shown

__all__ = [
    "PeerLost",
    "check_environment",
    "first_alone",
    "is_first",
    "no_sync",
    "own_device",
    "parallel",
]
__all__ += ["process_group", "rank", "share", "sync_buffers", "world"]


MOST = 10**6  # processes
_REMEDY = "start several processes by torchrun, or one without WORLD_SIZE"


class PeerLost(Exception):
    """Another process has ended before this one."""


def check_environment() -> None:
    """Look at the variables by which torchrun, or what starts processes in its place, tells of them.

    Raises:
        UserError: One is missing, or is not what it must be.
    """
    if _whole("WORLD_SIZE", 1, MOST, "1") == 1:
        return
    _whole("RANK", 0, world() - 1)
    _whole("MASTER_PORT", 0, 2**16 - 1)
    if not os.environ.get("MASTER_ADDR"):
        raise UserError(f"MASTER_ADDR must be the name of a machine, got none: {_REMEDY}")


def _whole(name: str, low: int, high: int, default: str = "") -> int:
    text = os.environ.get(name, default)
    is_whole = re.fullmatch("[0-9]{1,9}", text) is not None
    if not is_whole or not low <= int(text) <= high:
        required = f"a whole number from {low} to {high}"
        raise UserError(f"{name} must be {required}, got {shown(text)}: {_REMEDY}")
    return int(text)


def rank() -> int:
    """Return this process's number."""
    return int(os.environ.get("RANK", "0")) if world() > 1 else 0


def world() -> int:
    """Return how many processes train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Say whether this process writes files and prints."""
    return rank() == 0


def share(count: int) -> slice:
    """Return which of ``count`` images, a micro-batch, are this process's."""
    return slice(rank() * count // world(), (rank() + 1) * count // world())


def own_device(name: str) -> str:
    """Return the device of this process: each on a machine has a GPU of its own.

    Raises:
        UserError: torchrun did not say which.
    """
    if world() > 1 and (name == "cuda" or (name == "auto" and torch.cuda.is_available())):
        return f"cuda:{_whole('LOCAL_RANK', 0, MOST)}"
    return name


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Join the other processes.

    Raises:
        PeerLost: Another process ended before this one.
    """
    if world() == 1:
        yield
        return
    lost = PeerLost(
        f"process {rank()} ends because another one has: see its message; the same command with "
        "--resume continues from the last checkpoint"
    )

    def terminate(*_: object) -> None:
        raise lost

    before = signal.signal(signal.SIGTERM, terminate)  # torchrun's, when one has ended
    is_cuda = device.startswith("cuda")
    try:
        if is_cuda:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if is_cuda else "gloo")
        yield
        dist.destroy_process_group()
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise lost from error
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def first_alone() -> Iterator[None]:
    """Let the first process do this before the others: it downloads, and they find."""
    if world() > 1 and not is_first():
        dist.barrier()
    yield
    if world() > 1 and is_first():
        dist.barrier()


def parallel(model: nn.Module) -> nn.Module:
    """Return ``model`` such that its gradients are means over the processes."""
    if world() == 1:
        return model
    device = next(model.parameters()).device
    return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)


def no_sync(model: nn.Module, *, is_last: bool) -> AbstractContextManager[object]:
    """Leave the exchange of gradients to the last micro-batch of a step."""
    if isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    return nullcontext()


def sync_buffers(model: nn.Module) -> None:
    """Give every process the running statistics of the first, as each training step does."""
    if world() > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
