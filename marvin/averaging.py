"""The average of float32 masters over the steps of training."""

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TypedDict

import torch
from torch import Tensor, nn

from fixedpoint_kernels._torch_private.compiling import left_uncompiled
from marvin.compact import master_of
from marvin.masters import WithMasters
from marvin.owners import check_pair, owner_of
from marvin.rounding import round_one
from marvin.shards import is_sharded

__all__ = ["AverageState", "MasterAverage"]


class AverageState(TypedDict):
    """The state of a ``MasterAverage``; tensors by parameter name."""

    decay: float
    steps: int
    masters: dict[str, Tensor]


class MasterAverage:
    """An exponential moving average of a model's masters, for evaluation and deployment.

    Weights that an optimizer rounds move in steps of their format; their float32 masters do not, so
    it is these that are averaged. Early on the average follows fast: step ``n`` has the weight
    ``1 - min(decay, n / (n + 9))``, all of it at first. Training is not changed.

    Args:
        model: In training. Parameters without a master, and all those of a float32 optimizer, are
            averaged themselves.
        optimizer: Its optimizer; of a model with several, one of them.
        decay: What is left of the average in a step.

    Raises:
        TypeError: These are no model and no optimizer, or it is one that a ``Quantized`` wraps.
        ValueError: The optimizer has no parameter of the model, ``decay`` is not from 0 to below 1, or
            a parameter is sharded.

    Examples:
        >>> average = marvin.MasterAverage(model, optimizer)
        >>> optimizer.step(loss=loss)
        >>> average.update()
        >>> evaluated = average.averaged()
        >>> marvin.reestimate_batch_norm(evaluated, batches)
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, decay: float = 0.999
    ) -> None:
        check_pair(model, optimizer, "marvin.MasterAverage(model, optimizer)")
        _check_decay(decay)
        if any(map(is_sharded, model.parameters())):
            raise ValueError(
                "parameters must be whole, got sharded ones: average before fully_shard"
            )
        self.model, self.optimizer, self.decay = model, optimizer, decay
        self.steps = 0
        self.masters = {
            name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.named_parameters()
        }

    @left_uncompiled
    @torch.no_grad()
    def update(self) -> None:
        """Add the masters of now; call it after each step of the optimizer.

        Raises:
            ValueError: The model has got other parameters, or of other shapes.
        """
        for name, p in self.model.named_parameters():
            shape = self.masters[name].shape if name in self.masters else None
            if shape != p.shape:
                raise ValueError(
                    f"an average is of the parameters that the model had, got {name} of shape "
                    f"{tuple(p.shape)} in the place of {'none' if shape is None else tuple(shape)}: make "
                    "a new MasterAverage when layers are added or replaced"
                )
        weight = 1 - min(self.decay, self.steps / (self.steps + 9))
        self.steps += 1
        for name, p in self.model.named_parameters():
            self.masters[name].lerp_(self._master(p), weight)

    @left_uncompiled
    @torch.no_grad()
    def averaged(self) -> nn.Module:
        """Return a copy of the model with averaged weights, rounded to nearest to the formats of now.

        Batch norm's statistics are those of the model: they fit other weights, so estimate them
        anew with ``marvin.reestimate_batch_norm``. The copy is tied to nothing.

        Raises:
            ValueError: Nothing was averaged yet.
        """
        if not self.steps:
            raise ValueError("update() must come before averaged(), got no step to average")
        with ExitStack() as stack:
            for owner in {owner_of(p) or self.optimizer for p in self.model.parameters()}:
                if isinstance(owner, WithMasters):
                    stack.enter_context(owner.with_values())  # a copy needs them
            found = copy.deepcopy(self.model)
        for (name, p), own in zip(self.model.named_parameters(), found.parameters(), strict=True):
            optimizer = owner_of(p) or self.optimizer
            fmt = None
            if isinstance(optimizer, WithMasters) and p in optimizer:
                fmt = optimizer.format_of(p)
            value = self.masters[name]
            own.copy_(value if fmt is None else round_one(value, fmt, rounding="nearest"))
        return found

    def state_dict(self) -> AverageState:
        """Return what ``load_state_dict`` takes: plain numbers, and tensors by parameter name."""
        return {"decay": self.decay, "steps": self.steps, "masters": dict(self.masters)}

    @torch.no_grad()
    def load_state_dict(self, state: AverageState) -> None:
        """Continue from what ``state_dict`` returned.

        Raises:
            ValueError: It is of a model with other parameters, or no such state.
        """
        if not isinstance(state, Mapping) or state.keys() != self.state_dict().keys():
            got = ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(
                f"the state of an average must have {', '.join(self.state_dict())}, got {got or 'nothing'}: "
                "give what state_dict() of a MasterAverage returned"
            )
        _check_decay(state["decay"])
        steps = state["steps"]
        if type(steps) is not int or steps < 0:
            raise ValueError(f"steps must be a whole number, 0 or more, got {steps!r:.60}")
        own, loaded = self.masters, state["masters"]
        loaded = loaded if isinstance(loaded, Mapping) else {}
        shapes = {name: getattr(value, "shape", None) for name, value in loaded.items()}
        if {n: v.shape for n, v in own.items()} != shapes:
            raise ValueError(
                f"masters must have the names and shapes of {len(own)} parameters, got others: "
                f"{', '.join(sorted(own.keys() ^ loaded.keys())[:3]) or 'shapes'}"
            )
        self.decay, self.steps = state["decay"], steps
        for name, value in loaded.items():
            own[name].copy_(value)

    def _master(self, p: Tensor) -> Tensor:
        optimizer = owner_of(p) or self.optimizer
        own = optimizer.state.get(p, {}) if isinstance(optimizer, WithMasters) else {}
        return (master_of(own) if own else p).to(torch.float32)


def _check_decay(decay: object) -> None:
    if not isinstance(decay, int | float) or not 0 <= decay < 1:
        raise ValueError(f"decay must be 0 or more and below 1, got {decay!r}")
