"""Training on several processes: what they must agree on."""

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["mean_over_ranks", "rank"]


def rank() -> int:
    """Return this process's number in the default group; 0 where there is none."""
    return dist.get_rank() if _is_distributed() else 0


def mean_over_ranks(loss: float | Tensor | None, device: torch.device) -> float | Tensor | None:
    """Return the mean of ``loss`` over the default group's processes, the same bits on each.

    Args:
        loss: Of this process; None, if so on all of them.
        device: Where the group communicates.
    """
    if loss is None or not _is_distributed():
        return loss
    total = torch.as_tensor(loss, dtype=torch.float32).detach().to(device, copy=True)
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
