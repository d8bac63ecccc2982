"""Several processes: the default group of ``torch.distributed``, and those of it that train one model together."""

import gc
import hashlib
import json
import math
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fixedpoint_kernels._torch_private.modules import is_joining

__all__ = [
    "ALONE",
    "Processes",
    "is_distributed",
    "processes_of",
    "rank",
    "reduced",
    "sum_over_ranks",
]

_REMEDIES = {
    "parameters": "make the optimizer of the same parameters in each (not by ZeroRedundancyOptimizer, "
    "which deals them out: write fully_shard)",
    "seed": "give the optimizer the same seed= in each; activations have noise of their own in each",
    "settings": "give the optimizer and its policy the same arguments in each",
    "formats": "load the same state in each",
    "use of loss=": "give step(loss=...) the process's own loss in each process, or no loss in any",
    "masters": "call torch.manual_seed with the same seed before the model is made, or make the "
    "optimizer after DistributedDataParallel(model), which gives all the first one's weights",
}
_NOT_TOLD = 2**62


@dataclass(frozen=True)
class Processes:
    """Those that train one model together, and take the same decisions.

    Args:
        groups: Of ``torch.distributed``. What is reduced goes through one after the other: dimensions of a
            device mesh. None: this process trains alone.
        models: The ``DistributedDataParallel`` that have some of the parameters.
    """

    groups: tuple[dist.ProcessGroup, ...] = ()
    models: tuple["ref[DistributedDataParallel]", ...] = ()

    @property
    def size(self) -> int:
        """How many they are."""
        return math.prod(map(dist.get_world_size, self.groups))

    def reduce(self, x: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """Return what ``operation`` makes of the processes' tensors, the same bits on each."""
        for group in self.groups:
            x = reduced(x, operation, group)
        return x

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the processes' tensors, the same bits on each."""
        return self.reduce(x, dist.ReduceOp.SUM) if self.groups else x

    def min(self, x: Tensor) -> Tensor:
        """Return the smallest of the processes' values."""
        return self.reduce(x, dist.ReduceOp.MIN) if self.groups else x

    def sums(self, values: Sequence[float], device: torch.device | None) -> list[float]:
        """Return the sums of numbers on the host; ``device``: where the groups communicate."""
        if not self.groups:
            return list(values)
        return self.sum(torch.tensor(values, dtype=torch.float64, device=device)).tolist()

    def mean(self, loss: float | Tensor | None, device: torch.device) -> float | Tensor | None:
        """Return the mean of ``loss``, the same bits on each.

        Args:
            loss: Of this process, one element; None, if so on all of them, as ``check_alike`` has seen.
            device: Where the groups communicate.
        """
        if loss is None or not self.groups:
            return loss
        own = torch.as_tensor(loss, dtype=torch.float32, device=device).detach()
        return self.sum(own.to(device)) / self.size

    def are_gone(self) -> bool:
        """Say whether nobody has any of ``models`` any more."""
        return bool(self.models) and not any(own() for own in self.models)

    def shares(self) -> set[Tensor]:
        """Return the parameters that ``models`` keep the same in all processes."""
        known = [model for own in self.models if (model := own()) is not None]
        return {
            p
            for model in known
            for name, p in model.module.named_parameters()
            if name not in model.parameters_to_ignore
        }

    def leaves_modules_out(self) -> bool:
        """Say whether one of ``models`` gives gradients to weights whose modules other processes alone called."""
        return any(getattr(own(), "find_unused_parameters", False) for own in self.models)

    def check_not_joining(self) -> None:
        """Refuse a step in ``model.join()``: a process without batches would not answer its collectives.

        Raises:
            RuntimeError: A model is inside of that.
        """
        if any(model is not None and is_joining(model) for model in (own() for own in self.models)):
            raise RuntimeError(
                "processes must have equal numbers of batches, got a step in model.join(), where one that has no "
                "more would end the run: leave join() out, and write DistributedSampler(data, drop_last=True)"
            )

    def check_alike(self, told: Sequence[tuple[str, object]], device: torch.device) -> None:
        """Refuse to train where the processes begin with other things; one collective, and all refuse.

        Args:
            told: What must be the same: keys of ``_REMEDIES``, and plain values or tensors. As many in each
                process; None where this one has nothing to compare.
            device: Where the groups communicate.

        Raises:
            RuntimeError: With what differs, and what to write.
        """
        digests = [None if value is None else _digest(value) for _, value in told]
        both = [_NOT_TOLD if own is None else sign * own for sign in (1, -1) for own in digests]
        found = self.min(torch.tensor(both, dtype=torch.int64, device=device)).tolist()
        rows = zip(told, found[: len(told)], found[len(told) :], strict=True)
        wrong = dict.fromkeys(
            name for (name, _), low, high in rows if low not in (_NOT_TOLD, -high)
        )
        if wrong:
            # weights that are rounded by other seeds make other masters
            told_of = [name for name in wrong if name != "masters" or "seed" not in wrong]
            raise RuntimeError(
                f"processes must begin with the same {', '.join(_REMEDIES)}, got other "
                f"{', '.join(wrong)} in some: {'; '.join(_REMEDIES[name] for name in told_of)}"
            )


ALONE = Processes()


def processes_of(
    params: Container[Tensor],
    meshes: Collection[tuple[dist.ProcessGroup, ...]],
    group: dist.ProcessGroup | None,
) -> Processes:
    """Return the processes that train these parameters together.

    Args:
        params: Of an optimizer.
        meshes: ``Shard.groups`` of those that are DTensors.
        group: What the user says; None: that of ``DistributedDataParallel``, or of the DTensors. Of several the
            largest, which has the others in it.
    """
    if not is_distributed():
        return ALONE
    models = [model for model in _parallel_models() if any(p in params for p in model.parameters())]
    own = [(model.process_group,) for model in models]
    found = [(group,)] if group is not None else [*own, *meshes]
    several = [tuple(x for x in groups if dist.get_world_size(x) > 1) for groups in found]
    refs = tuple(ref(model) for model in models)
    return max((Processes(groups, refs) for groups in several), key=lambda x: x.size, default=ALONE)


def _parallel_models() -> list[DistributedDataParallel]:
    """Return all ``DistributedDataParallel`` that there are; nothing leads to them from a parameter."""
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:  # then the collector does not tell of what was there before
        gc.unfreeze()
    found = [x for x in gc.get_objects() if DistributedDataParallel in type(x).__mro__]
    if is_frozen:
        gc.collect()  # or what waits to be collected would stay for ever
        gc.freeze()
    return found


def rank() -> int:
    """Return this process's number in the default group; 0 where there is none."""
    return dist.get_rank() if is_distributed() else 0


def sum_over_ranks(x: Tensor) -> Tensor:
    """Return the sum over the default group's processes, the same bits on each."""
    return reduced(x, dist.ReduceOp.SUM) if is_distributed() else x


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
    """Say whether several processes run together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _digest(value: object) -> int:
    """Return a number of 56 bits that tells plain values and tensors apart."""
    text = json.dumps(value, skipkeys=True, default=_plain)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, Tensor) else type(value).__name__
