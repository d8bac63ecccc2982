"""A model trained in one of the ways that are compared."""

import functools
from collections.abc import Callable
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, CosineAnnealingWarmRestarts

import marvin
from marvin import LossBudgetPolicy, Policy, StaticPolicy

__all__ = ["WAYS", "Advice", "Training"]

MSGD_LR = 0.02  # gradients are normalised, so rates of AdamW do not carry over
WAYS: dict[str, Callable[..., Any] | None] = {
    "float32": None,
    "MSGD": None,
    "loss budget": LossBudgetPolicy,
    "5 bits": functools.partial(LossBudgetPolicy, target_bits=5),
    "static 8": lambda batch_size=None: StaticPolicy(8, 8),
    "integer": LossBudgetPolicy,
    "advised": None,  # of the task
}


class Advice(NamedTuple):
    """What trains a task better than the defaults.

    Args:
        policy: Makes it.
        exclude: Modules that do not round their inputs.
        weights_only: Whether no module does.
    """

    policy: Callable[[], Policy]
    exclude: tuple[str, ...] = ()
    weights_only: bool = False


class Learner:
    """A model with its optimizer and schedule, as a user would write them."""

    def __init__(
        self, model: nn.Module, way: str, advice: Advice | None, lr: float, steps: int, **more: Any
    ) -> None:
        self.model, self.way = model, way
        batch_size, restarts = more.pop("batch_size", None), more.pop("restarts", 0)
        make_policy, advice = WAYS[way], advice if way == "advised" else None
        policy = advice.policy() if advice else make_policy and make_policy(batch_size=batch_size)
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if way == "MSGD":
            self.optimizer = marvin.MSGD(trained, lr=MSGD_LR)
        else:
            self.optimizer = torch.optim.AdamW(trained, lr=lr, **more)
        if policy is not None:
            self.optimizer = marvin.Quantized(self.optimizer, policy)
        if way != "float32" and not (advice and advice.weights_only):
            assert isinstance(self.optimizer, marvin.Quantized)
            exclude = advice.exclude if advice and advice.exclude else None
            marvin.quantize_activations(model, self.optimizer, exclude=exclude)
        if way == "integer":
            marvin.integer.convert(model)
        self.schedule = (
            CosineAnnealingWarmRestarts(self.optimizer, steps // restarts)
            if restarts
            else CosineAnnealingLR(self.optimizer, steps)
        )

    def step(self, loss: Tensor) -> None:
        """Descend along one loss."""
        self.optimizer.zero_grad()
        loss.backward()
        self.move(loss)

    def move(self, loss: Tensor | float) -> None:
        """Take a step along the gradients that are there."""
        if self.way == "float32":
            self.optimizer.step()
        else:
            self.optimizer.step(loss=loss)  # pyright: ignore[reportCallIssue]
        self.schedule.step()

    def bits(self) -> float:
        """Return the mean word length of weights and inputs; 32 for float32."""
        if self.way == "float32":
            return 32.0
        assert isinstance(self.optimizer, marvin.Quantized)
        rows = {row.layer: row for row in self.optimizer.trace}.values()
        own = [mean(row.wl for row in rows)] if rows else []
        inputs = [row.input_wl for row in rows if 0 < row.input_wl < 32]
        return mean([*own, *([mean(inputs)] if inputs else [])]) if own else 32.0


class Training:
    """One run: its way, its seed, how many steps it takes, and advice on it."""

    def __init__(self, way: str, seed: int, steps: int, advice: Advice | None = None) -> None:
        self.way, self.steps, self.advice = way, steps, advice
        self.generator = torch.Generator().manual_seed(seed)
        self.learners: list[Learner] = []

    def learner(self, model: nn.Module, lr: float, **more: Any) -> Learner:
        """Return what trains a model; ``more``: arguments of AdamW, ``batch_size``, ``restarts``."""
        found = Learner(model, self.way, self.advice, lr, more.pop("steps", self.steps), **more)
        self.learners.append(found)
        return found

    def fit(
        self, model: nn.Module, lr: float, loss_of: Callable[[int], Tensor], **more: Any
    ) -> nn.Module:
        """Train a model on one loss a step, and return it in eval mode."""
        learner = self.learner(model, lr, **more)
        for step in range(self.steps):
            learner.step(loss_of(step))
        return model.eval()

    def rows(self, *of: Tensor, batch: int) -> list[Tensor]:
        """Return rows of tensors, drawn alike."""
        own = torch.randint(len(of[0]), (batch,), generator=self.generator)
        return [x[own] for x in of]

    def normal(self, *shape: int) -> Tensor:
        """Return normal numbers."""
        return torch.randn(shape, generator=self.generator)
