"""SGD on masters: without new tensors, and in one pass with the rounding where nothing is special."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from fixedpoint_kernels._torch_private.optimizers import has_step_hooks
from fixedpoint_kernels._torch_private.tensors import foreach_add, foreach_add_, foreach_mul_
from fixedpoint_kernels.memory import joined
from fixedpoint_kernels.sgd import Moves, Rates
from marvin.gradients import Gradients
from marvin.inner_optimizer import OwnStep
from marvin.settings import Group

__all__ = ["SGD", "keep_momenta", "moves_of"]


class SGD(torch.optim.SGD):
    """SGD with momentum that makes no new tensors; the bits are those of torch's.

    Torch's own adds the weight decay out of place. Here gradients that ``Quantized`` has normalised
    are overwritten; others may be the user's. Measured on ResNet20, one thread of a busy CPU: with
    torch's in its place a step takes 1.04 times the time.
    """

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        """Do one update; ``closure`` must be None."""
        rare = "dampening", "maximize", "nesterov"
        if any(group[name] for group in self.param_groups for name in rare):
            super().step()
            return
        for group in self.param_groups:
            by_type: dict[type, list[Tensor]] = {}  # no operator takes DTensors and others together
            for p in group["params"]:
                if p.grad is not None:  # compact ones were moved elsewhere
                    by_type.setdefault(type(p), []).append(p)
            for masters in by_type.values():
                self._move(masters, group)

    def _move(self, masters: list[Tensor], group: Group) -> None:
        steps: list[Tensor] | tuple[Tensor, ...] = [p.grad for p in masters if p.grad is not None]
        if decay := group["weight_decay"]:
            if group["normalize_gradients"]:
                foreach_add_(steps, masters, alpha=decay)
            else:
                steps = foreach_add(steps, masters, alpha=decay)
        if group["momentum"]:
            steps = self._momenta(masters, steps, group["momentum"])
        foreach_add_(masters, steps, alpha=-float(group["lr"]))

    def _momenta(
        self, masters: list[Tensor], steps: Sequence[Tensor], momentum: float
    ) -> list[Tensor]:
        """Add the gradients to the momenta; a first gradient is its own momentum."""
        buffers: list[Tensor | None] = [self.state[p].get("momentum_buffer") for p in masters]
        begun = [(buffer, steps[i]) for i, buffer in enumerate(buffers) if buffer is not None]
        if begun:
            old, new = zip(*begun, strict=True)
            foreach_mul_(old, momentum)
            foreach_add_(old, new)
        for i, buffer in enumerate(buffers):
            if buffer is None:
                buffers[i] = self.state[masters[i]]["momentum_buffer"] = steps[i].clone()
        return [buffer for buffer in buffers if buffer is not None]


def moves_of(optimizer: Optimizer, batches: Sequence[Gradients]) -> Moves | None:
    """Return what a step of ``optimizer`` does to the masters, if it is plain SGD on whole tensors.

    Momenta that are not begun are new tensors, which ``keep_momenta`` gives the optimizer.

    Args:
        optimizer: The wrapped one.
        batches: The gradients, a group each; rows are counted through all of them.

    Returns:
        None where ``optimizer.step`` must be called: another class or a method of one's own, hooks,
        dampening, ``maximize``, ``differentiable``, ``fused`` or ``foreach`` as the user asks for, a
        learning rate that is a tensor, processes that share a parameter.
    """
    kind = type(optimizer)
    known = kind in (SGD, torch.optim.SGD)
    if not known or "step" in vars(optimizer) or has_step_hooks(optimizer, OwnStep):
        return None
    if not all(_is_plain(batch.group, kind) for batch in batches):
        return None
    if any(shard.group is not None for batch in batches for shard in batch.members.shards):
        return None
    grads = [grad for batch in batches for grad in batch.values]
    momenta: list[Tensor | None] = []
    is_first: list[bool] = []
    rates: list[Rates] = []
    for batch in batches:
        group, masters = batch.group, batch.members.masters
        own = Rates(float(group["lr"]), group["momentum"], group["weight_decay"], group["nesterov"])
        rates += [own] * len(masters)
        if not own.momentum:
            momenta += [None] * len(masters)
            is_first += [False] * len(masters)
            continue
        begun = [optimizer.state[p].get("momentum_buffer") for p in masters]
        is_first += [momentum is None for momentum in begun]
        pairs = zip(begun, masters, strict=True)
        momenta += [torch.empty_like(p) if m is None else m for m, p in pairs]
    places = joined([batch.places for batch in batches])
    return Moves(range(len(grads)), grads, momenta, is_first, rates, places)


def keep_momenta(optimizer: Optimizer, batches: Sequence[Gradients], moves: Moves) -> None:
    """Give the optimizer the momenta that ``moves`` began."""
    if any(moves.is_first):
        masters = [p for batch in batches for p in batch.members.masters]
        for p, momentum, is_first in zip(masters, moves.momenta, moves.is_first, strict=True):
            if is_first:
                optimizer.state[p]["momentum_buffer"] = momentum


def _is_plain(group: Group, kind: type[Optimizer]) -> bool:
    """Say whether a group asks for nothing but what ``fixedpoint_kernels.sgd`` does."""
    special = "dampening", "maximize", "differentiable", "fused"
    if any(group[name] for name in special) or isinstance(group["lr"], Tensor):
        return False
    return kind is SGD or group["foreach"] is None
