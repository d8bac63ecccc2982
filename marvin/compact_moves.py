"""Steps of SGD and Adam on compact states, without a float32 copy of any."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fixedpoint_kernels._torch_private import has_step_hooks
from fixedpoint_kernels.compact import Adam, Codes, Sgd
from marvin.compact import moment_of
from marvin.gradients import Gradients
from marvin.settings import Group, OwnStep
from marvin.sgd import SGD
from marvin.shards import Shard

__all__ = ["Moved", "moves_of_compact"]

_ADAMS = torch.optim.Adam, torch.optim.AdamW


class Moved(NamedTuple):
    """How a compact parameter moves, without a float32 copy.

    Args:
        move: Of ``torch.optim.SGD`` or ``Adam``.
        grad: float32.
        moments: What this process holds of them.
    """

    move: Sgd | Adam
    grad: Tensor
    moments: tuple[Codes, ...]


def moves_of_compact(
    optimizer: Optimizer, batches: Sequence[Gradients]
) -> dict[Tensor, Moved] | None:
    """Return how the compact ones among some parameters move, by parameter.

    Moments that are not begun are made here.

    Args:
        optimizer: The wrapped one.
        batches: The gradients, a group each.

    Returns:
        None where the wrapped optimizer's ``step`` must be called: a class other than SGD, Adam
        and AdamW, a method of one's own, hooks, an option that is not plain.
    """
    kind = type(optimizer)
    known = kind in (SGD, torch.optim.SGD, *_ADAMS)
    if not known or "step" in vars(optimizer) or has_step_hooks(optimizer, OwnStep):
        return None
    if not all(_is_plain(batch.group, kind) for batch in batches):
        return None
    found = {}
    for batch in batches:
        members = batch.members
        rows = zip(members.params, members.masters, batch.values, members.shards, strict=True)
        for p, master, grad, shard in rows:
            if p in members.compact:
                found[p] = _moved(optimizer, batch.group, master, grad, shard)
    return found


def _moved(optimizer: Optimizer, group: Group, master: Tensor, grad: Tensor, shard: Shard) -> Moved:
    state = optimizer.state.get(master, {})
    if isinstance(optimizer, _ADAMS):
        state["step"] = state.get("step", torch.tensor(0.0)) + 1
        decoupled = group["decoupled_weight_decay"]
        move = Adam(
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=decoupled,
            step=int(state["step"]),
        )
        names = ["exp_avg", "exp_avg_sq"]
    else:
        own = (group[name] for name in ("momentum", "weight_decay", "nesterov"))
        move = Sgd(float(group["lr"]), *own)
        names = ["momentum_buffer"] if move.momentum else []
    moments = tuple(moment_of(state, name, master, shard) for name in names)
    if moments:
        optimizer.state[master] = state
    return Moved(move, grad, moments)


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
