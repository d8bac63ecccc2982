"""Parameters of which each process holds a part (FSDP2); nothing else here knows DTensor.

The optimizer and its policies compute with plain tensors: what this process holds, beside a
``Shard`` that says where that lies in the whole. What goes out to states and to wrapped
optimizers is a DTensor again.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fixedpoint_kernels.memory import PLAIN
from marvin.ranks import reduced

__all__ = ["Shard", "Spread", "is_sharded", "laid_as", "local", "locals_of", "shard_of", "spread"]
__all__ += ["accumulate_dtype", "sum_vectors", "whole_norms"]


@dataclass(frozen=True)
class Shard:
    """Where what this process holds of a tensor lies in the whole tensor.

    Args:
        shape: Of the whole.
        offset: Position of the first element held, in row-major order.
        template: The DTensor whose layout this is; None for plain tensors.
        group: The processes that hold the other parts; None where all is here.
    """

    shape: torch.Size
    offset: int = 0
    template: Any = None
    group: Any = None

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return self.shape.numel()

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Those of all processes that have the tensor or a part, by the mesh's dimensions; none of a plain one."""
        if self.template is None:
            return ()
        mesh = self.template.device_mesh
        if (everyone := dist.group.WORLD) and mesh.size() == everyone.size():
            return (everyone,)
        return tuple(mesh.get_all_groups())

    def to_dtensor(self, part: Tensor) -> Tensor:
        """Return the whole tensor of which this process holds ``part``: the same memory.

        It has the parameter's rows, and may have other columns: then it is contiguous.
        """
        like = self.template
        if like is None:
            return part
        shape, stride = like.shape, like.stride()
        if part.shape[1:] != shape[1:]:
            shape = torch.Size((*shape[:1], *part.shape[1:]))
            stride = torch.empty(shape, device="meta").stride()
        return type(like).from_local(
            part,
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=shape,
            stride=stride,
        )

    def to_local(self, whole: Tensor) -> Tensor:
        """Return the part of ``whole``, plain or sharded in any way, that this process holds."""
        like = self.template
        if is_sharded(whole):
            whole = _redistributed(whole, like)
            return local(whole)
        if self.group is None:
            return whole
        rows = local(like).shape[0]
        first = self.offset // (self.numel // self.shape[0])
        return whole[first : first + rows].contiguous()

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor with the parameter's rows, sharded as it is."""
        if self.template is None:
            return torch.empty(shape, dtype=dtype, device="cpu")
        part = local(self.template)
        rows = part.new_empty((*part.shape[:1], *shape[1:]), dtype=dtype)
        return self.to_dtensor(torch.empty_like(part, dtype=dtype) if shape == self.shape else rows)

    def rows(self, values: Tensor) -> Tensor:
        """Return one number of each row of the whole tensor, (rows,), from those of the rows held."""
        if self.group is None:
            return values
        whole = values.new_zeros(self.shape[0])
        first = self.offset // (self.numel // self.shape[0])
        whole[first : first + len(values)] = values
        return self.sum(whole)

    def sum(self, counts: Tensor) -> Tensor:
        """Return the sum of what the processes counted, each in its part."""
        return counts if self.group is None else reduced(counts, dist.ReduceOp.SUM, self.group)


@dataclass(frozen=True)
class Spread:
    """Values of a tensor, of which other processes may hold parts, and the range of all.

    Args:
        values: What this process holds.
        shard: Where that is.
        low: Smallest value of the whole tensor; minus infinity where one is NaN.
        high: Largest value; infinity where one is NaN.
    """

    values: Tensor
    shard: Shard
    low: float
    high: float


def local(x: Tensor) -> Tensor:
    """Return what this process holds of ``x``: the same memory, a plain tensor."""
    if type(x) in PLAIN or not is_sharded(x):
        return x
    spread_tensor: Any = x
    with torch.no_grad():
        return spread_tensor.to_local()


def locals_of(xs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return what this process holds of each tensor; see ``local``."""
    return xs if PLAIN.issuperset(map(type, xs)) else [local(x) for x in xs]


def laid_as(x: Tensor, like: Tensor) -> Tensor:
    """Return ``x`` in the memory order of ``like``, a tensor of its shape: itself where it has that.

    Optimizers with ``fused=True`` go through flat memory.
    """
    sides = zip(x.shape, x.stride(), like.stride(), strict=True)
    if x.stride() == like.stride() or all(own == other for n, own, other in sides if n > 1):
        return x
    return torch.empty_like(like, dtype=x.dtype).copy_(x)


def shard_of(parameter: Tensor) -> Shard:
    """Return where this process's part of a parameter is.

    Raises:
        ValueError: It is split other than by rows over one dimension of the device mesh.
    """
    if not is_sharded(parameter):
        return Shard(parameter.shape)
    template: Any = parameter.detach()
    split = [i for i, p in enumerate(template.placements) if not p.is_replicate()]
    if not split:
        return Shard(parameter.shape, template=template)
    rows = parameter.shape[0] if parameter.ndim else 0
    mesh, part = template.device_mesh, local(template)
    if len(split) == 1 and template.placements[split[0]].is_shard(0):
        chunk = -(rows // -mesh.size(split[0]))
        first = min(mesh.get_local_rank(split[0]) * chunk, rows)
        if part.shape[0] == min(chunk, rows - first):
            offset = first * (parameter.numel() // max(rows, 1))
            return Shard(parameter.shape, offset, template, mesh.get_group(split[0]))
    raise ValueError(
        "sharded parameters must be split by rows over one dimension of the device mesh, as "
        f"fully_shard does it, got {template.placements}"
    )


def spread(tensors: Sequence[Tensor], shards: Sequence[Shard]) -> list[Spread]:
    """Find the ranges of tensors, with one transfer to the host, and one collective a group.

    Args:
        tensors: What this process holds.
        shards: Where that is.
    """
    if not tensors:
        return []
    rows = [_range(x) for x in tensors]
    vector = torch.stack([row.to(rows[0].device) for row in rows])  # lowest, and minus highest
    vector.nan_to_num_(-math.inf, math.inf, -math.inf)  # a minimum over processes may drop NaN
    for group, indices in _groups(shards):
        vector[indices] = reduced(vector[indices], dist.ReduceOp.MIN, group)
    found = zip(tensors, shards, vector.tolist(), strict=True)
    return [Spread(x, shard, low, -high) for x, shard, (low, high) in found]


def sum_vectors(vectors: Sequence[Tensor], shards: Sequence[Sequence[Shard]]) -> list[Tensor]:
    """Add numbers up over the parts of the tensors that they come from: one collective a group.

    Args:
        vectors: One number for each tensor of this process, of one dtype and device.
        shards: Of these tensors.

    Returns:
        Vectors of the same lengths; numbers of whole tensors as they came.
    """
    flat = [shard for row in shards for shard in row]
    if all(shard.group is None for shard in flat):
        return list(vectors)
    numbers = torch.cat(list(vectors))
    for group, indices in _groups(flat):
        numbers[indices] = reduced(numbers[indices], dist.ReduceOp.SUM, group)
    return list(numbers.split([len(vector) for vector in vectors]))


def accumulate_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which to add up: float64, which Apple's GPUs do not have."""
    return torch.float32 if device.type == "mps" else torch.float64


def whole_norms(norms: Sequence[Tensor], shards: Sequence[Sequence[Shard]]) -> list[Tensor]:
    """Return 2-norms of whole tensors from those of the parts.

    They are added up in float64 and rounded to float32, which hides in which order.

    Args:
        norms: Vectors, ``accumulate_dtype``.
        shards: Of each number's tensor.

    Returns:
        Vectors of the same lengths, float32.
    """
    if all(shard.group is None for row in shards for shard in row):
        return [vector.float() for vector in norms]
    squares = sum_vectors([vector.square() for vector in norms], shards)
    return [vector.sqrt().float() for vector in squares]


def is_sharded(x: Tensor) -> bool:
    """Say whether ``x`` is a DTensor, of which this process may hold a part."""
    module: Any = sys.modules.get("torch.distributed.tensor")  # slow to import
    return module is not None and isinstance(x, module.DTensor)


def _redistributed(x: Any, like: Any) -> Tensor:
    if like is None:
        return x.full_tensor()
    if x.device_mesh == like.device_mesh and x.placements == like.placements:
        return x
    return x.redistribute(like.device_mesh, like.placements)


def _range(x: Tensor) -> Tensor:
    if not x.numel():
        return torch.full((2,), math.inf, device=x.device)
    low, high = x.detach().aminmax()
    return torch.stack([low, -high])


def _groups(shards: Sequence[Shard]) -> list[tuple[Any, list[int]]]:
    """Return each group of processes, and which of the shards are of it."""
    found: dict[Any, list[int]] = {}
    for i, shard in enumerate(shards):
        if shard.group is not None:
            found.setdefault(shard.group, []).append(i)
    return list(found.items())
