"""Steps of SGD and Adam on compact states, without a float32 copy of any."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fixedpoint_kernels._torch_private.optimizers import has_step_hooks
from fixedpoint_kernels.compact import Adam, Codes, Sgd
from marvin.compact import moment_of
from marvin.gradients import Gradients
from marvin.inner_optimizer import OwnStep
from marvin.settings import Group
from marvin.sgd import SGD

__all__ = ["Moved", "moves_of_compact"]

_ADAMS = torch.optim.Adam, torch.optim.AdamW
_Moments = tuple[Codes | Tensor, ...]
_Row = tuple[int, Tensor, Sgd | Adam, _Moments]  # see ``Moved``


class Moved(NamedTuple):
    """What moves in one pass with the rounding, and how; compact states without a float32 copy.

    Sequences of one length.

    Args:
        rows: Positions among the parameters that have a gradient, group by group, ascending.
        grads: float32.
        moves: Of ``torch.optim.SGD`` or ``Adam``.
        moments: What this process holds of them.
    """

    rows: Sequence[int]
    grads: Sequence[Tensor]
    moves: Sequence[Sgd | Adam]
    moments: Sequence[_Moments]


def moves_of_compact(optimizer: Optimizer, batches: Sequence[Gradients]) -> Moved | None:
    """Return how parameters move that need no ``step`` of the wrapped optimizer.

    The compact ones, and for SGD the others too, once their momentum is begun. That of compact ones is
    begun here.

    Args:
        optimizer: The wrapped one.
        batches: The gradients, a group each.

    Returns:
        None where the wrapped optimizer's ``step`` must be called for all: a class other than SGD, Adam
        and AdamW, a method of one's own, hooks, an option that is not plain.
    """
    kind = type(optimizer)
    known = kind in (SGD, torch.optim.SGD, *_ADAMS)
    if not known or "step" in vars(optimizer) or has_step_hooks(optimizer, OwnStep):
        return None
    if not all(_is_plain(batch.group, kind) for batch in batches):
        return None
    of_group = _adam_moves if isinstance(optimizer, _ADAMS) else _sgd_moves
    found: list[_Row] = []
    first = 0
    for batch in batches:
        found += of_group(optimizer, batch, first)
        first += len(batch.values)
    return Moved(*zip(*found, strict=True)) if found else Moved((), (), (), ())


def _sgd_moves(optimizer: Optimizer, batch: Gradients, first: int) -> Iterator[_Row]:
    group, members, name = batch.group, batch.members, "momentum_buffer"
    own = (group[name] for name in ("momentum", "weight_decay", "nesterov"))
    move, moments = Sgd(float(group["lr"]), *own), ()
    rows = zip(batch.values, members.masters, members.shards, members.compact, strict=True)
    for row, (grad, master, shard, is_coded) in enumerate(rows, first):
        if move.momentum:
            state = optimizer.state[master]
            if is_coded:
                moments = (moment_of(state, name, master, shard),)
            elif name in state:
                moments = (state[name],)
            else:
                continue
        if is_coded or shard.group is None:
            yield row, grad, move, moments


def _adam_moves(optimizer: Optimizer, batch: Gradients, first: int) -> Iterator[_Row]:
    group, members = batch.group, batch.members
    options = {name: group[name] for name in ("betas", "eps", "weight_decay")}
    options |= {"lr": float(group["lr"]), "decoupled": group["decoupled_weight_decay"]}
    rows = zip(batch.values, members.masters, members.shards, members.compact, strict=True)
    for row, (grad, master, shard, is_coded) in enumerate(rows, first):
        if not is_coded:
            continue
        state = optimizer.state[master]
        state["step"] = state.get("step", torch.tensor(0.0, dtype=torch.float32, device="cpu")) + 1
        move = Adam(**options, step=int(state["step"]))
        names = "exp_avg", "exp_avg_sq"
        yield row, grad, move, tuple(moment_of(state, n, master, shard) for n in names)


def _is_plain(group: Group, kind: type[Optimizer]) -> bool:
    """Say whether a group asks for nothing but what ``fixedpoint_kernels.compact`` does."""
    special = ["maximize", "differentiable", "fused"]
    special += ["amsgrad", "capturable"] if kind in _ADAMS else ["dampening"]
    if any(group[name] for name in special) or isinstance(group["lr"], Tensor):
        return False
    if kind in _ADAMS:
        beta1, beta2 = group["betas"]
        if isinstance(beta1, Tensor) or isinstance(beta2, Tensor) or beta1 <= 0.5:
            return False
    return kind is SGD or group["foreach"] is None
