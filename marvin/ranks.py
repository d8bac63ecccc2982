"""Training on several processes: what they must agree on."""

import gc
from collections.abc import Container, Sequence
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fixedpoint_kernels._torch_private.modules import is_joining

__all__ = [
    "check_not_joining",
    "is_distributed",
    "mean_over_ranks",
    "min_over_ranks",
    "parallel_models",
    "rank",
    "reduced",
    "sum_over_ranks",
    "sums_over_ranks",
]


def rank() -> int:
    """Return this process's number in the default group; 0 where there is none."""
    return dist.get_rank() if is_distributed() else 0


def mean_over_ranks(loss: float | Tensor | None, device: torch.device) -> float | Tensor | None:
    """Return the mean of ``loss`` over the default group's processes, the same bits on each.

    Args:
        loss: Of this process, one element; None, if so on all of them.
        device: Where the group communicates.
    """
    if loss is None or not is_distributed():
        return loss
    total = torch.as_tensor(loss, dtype=torch.float32, device=device).detach().to(device, copy=True)
    dist.all_reduce(total)
    return total / dist.get_world_size()


def parallel_models(params: Container[Tensor]) -> "list[ref[nn.Module]]":
    """Return the ``DistributedDataParallel`` that have some of these parameters; nothing else leads to them."""
    kind = nn.parallel.DistributedDataParallel
    models = [x for x in gc.get_objects() if kind in type(x).__mro__]
    return [ref(model) for model in models if any(p in params for p in model.parameters())]


def check_not_joining(models: "Sequence[ref[nn.Module]]") -> None:
    """Refuse a step in ``model.join()``: a process without batches would not answer its collectives.

    Raises:
        RuntimeError: A model is inside of that.
    """
    if any(model is not None and is_joining(model) for model in (own() for own in models)):
        raise RuntimeError(
            "processes must have equal numbers of batches, got a step in model.join(), where one that has no "
            "more would end the run: leave join() out, and write DistributedSampler(data, drop_last=True)"
        )


def sum_over_ranks(x: Tensor) -> Tensor:
    """Return the sum over the default group's processes, the same bits on each."""
    return reduced(x, dist.ReduceOp.SUM) if is_distributed() else x


def min_over_ranks(x: Tensor) -> Tensor:
    """Return the smallest values over the default group's processes."""
    return reduced(x, dist.ReduceOp.MIN) if is_distributed() else x


def sums_over_ranks(values: Sequence[float], device: torch.device | None) -> list[float]:
    """Return the sums of numbers on the host; ``device``: where the group communicates."""
    if not is_distributed():
        return list(values)
    return sum_over_ranks(torch.tensor(values, dtype=torch.float64, device=device)).tolist()


def reduced(
    x: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return what ``operation`` makes of a group's tensors, the same bits on each process.

    Args:
        x: Of this process; stays as it is.
        operation: One of ``torch.distributed.ReduceOp``.
        group: The processes; None: the default group's.
    """
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, operation, group=group)
    return total


def is_distributed() -> bool:
    """Say whether several processes train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
