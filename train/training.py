"""All that takes part in a run, and where it stands."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import marvin
import perfmodel
from fixedpoint_kernels import forward_save
from marvin.policies.records import word_length
from train.augment import steps_per_epoch
from train.config import Config
from train.data import Parts
from train.dataset import Dataset
from train.records import RunFolder

__all__ = ["COLUMNS", "Progress", "Training", "mean_word_lengths"]

COLUMNS = (
    "epoch",
    "step",
    "lr",
    "train_loss",
    "train_accuracy",
    "validation_loss",
    "validation_accuracy",
    "mean_word_length",
)


@dataclass
class Progress:
    """Where a run stands, beside model, optimizer and schedule.

    Args:
        epoch: Whole epochs done.
        step: Optimiser steps done in the epoch that is not whole yet.
        total_steps: Optimiser steps done in all.
        loss_sum: Sum of the losses of ``step`` steps, each times its images.
        correct: Right answers in these steps.
        seen: Images in these steps.
        left_out: Images of those of these steps that ``--nonfinite skip`` skipped: their losses count
            nowhere.
        rows: Metrics of each whole epoch.
        switch_steps: Step of the run at the end of which each switch of the optimizer came: the
            optimizer's own count leaves out skipped steps.
    """

    epoch: int = 0
    step: int = 0
    total_steps: int = 0
    loss_sum: float = 0.0
    correct: int = 0
    seen: int = 0
    left_out: int = 0
    rows: list[dict[str, float | None]] = field(default_factory=list)
    switch_steps: list[int] = field(default_factory=list)

    @property
    def mean_loss(self) -> float | None:
        """Mean loss over the images of the epoch so far; None where all were left out."""
        images = self.seen - self.left_out
        return self.loss_sum / images if images else None

    def add(self, loss: float, correct: int, images: int, *, was_skipped: bool = False) -> None:
        """Count one optimiser step."""
        self.step += 1
        self.total_steps += 1
        self.correct += correct
        self.seen += images
        if was_skipped:
            self.left_out += images
        else:
            self.loss_sum += loss * images

    def finish_epoch(self, row: dict[str, float | None]) -> None:
        """Count one epoch, and begin the next one empty."""
        self.rows.append(row)
        self.epoch += 1
        self.step = self.correct = self.seen = self.left_out = 0
        self.loss_sum = 0.0


@dataclass(frozen=True)
class Training:
    """All that takes part in a run.

    ``layers`` are what the model multiplies; ``parallel`` is the model, for training steps, with
    gradients over all processes; ``average`` is that of its masters, if it is wanted.
    """

    config: Config
    dataset: Dataset
    parts: Parts
    model: nn.Module
    parallel: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: ReduceLROnPlateau
    folder: RunFolder
    activations: marvin.QuantizedActivations | None = None
    average: marvin.MasterAverage | None = None
    layers: list[perfmodel.Layer] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)

    def state(self) -> dict[str, Any]:
        """Return all that decides the future, as plain values and tensors."""
        noise = forward_save.state(self.model)
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "progress": dataclasses.asdict(self.progress),
            "data": self.dataset.fingerprint(),
            **({"forward_save": noise} if noise else {}),
            **({"average": self.average.state_dict()} if self.average is not None else {}),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what ``state`` returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        forward_save.load_state(self.model, state.get("forward_save", {}))
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        for name, value in state["progress"].items():
            setattr(self.progress, name, value)
        if "switch_steps" not in state["progress"]:  # of an earlier version
            self.progress.switch_steps = [switch.step for switch in self._own_switches]

    @property
    def _own_switches(self) -> list[marvin.Switch]:
        optimizer = self.optimizer
        return optimizer.trace if isinstance(optimizer, marvin.Quantized) else []

    def note_switches(self) -> None:
        """Remember the step of the run in which the optimizer's latest switches came."""
        new = len(self._own_switches) - len(self.progress.switch_steps)
        self.progress.switch_steps += [self.progress.total_steps] * new

    def switches(self, first: int = 0) -> list[marvin.Switch]:
        """Return the changes of formats, from number ``first`` on, with their steps of the run."""
        pairs = zip(self._own_switches[first:], self.progress.switch_steps[first:], strict=True)
        return [dataclasses.replace(switch, step=step) for switch, step in pairs]

    @property
    def skipped_steps(self) -> int:
        """Steps that ``--nonfinite skip`` skipped."""
        optimizer = self.optimizer
        return optimizer.skipped_steps if isinstance(optimizer, marvin.Quantized) else 0

    @property
    def steps(self) -> int:
        """Optimiser steps of an epoch."""
        config = self.config
        return steps_per_epoch(len(self.parts.train), config.batch_size, config.accumulation_steps)

    @property
    def evaluated(self) -> nn.Module:
        """The model that is evaluated and exported: with averaged weights where they are averaged."""
        return self.model if self.average is None else self.average.averaged()

    @property
    def mean_word_length(self) -> float | None:
        """Bits, mean over the layers; None in float32."""
        optimizer = self.optimizer
        is_fixed = isinstance(optimizer, marvin.Quantized)
        return optimizer.mean_word_length() if is_fixed else None

    @property
    def policy(self) -> marvin.Policy | None:
        """What decides formats; None in float32."""
        optimizer = self.optimizer
        return optimizer.policy if isinstance(optimizer, marvin.Quantized) else None

    @property
    def is_over(self) -> bool:
        """Whether all epochs are done, or the policy has had enough."""
        optimizer = self.optimizer
        done = self.progress.epoch >= self.config.epochs
        return done or (isinstance(optimizer, marvin.Quantized) and optimizer.should_stop)


def mean_word_lengths(training: Training) -> dict[str, float]:
    """Return mean word lengths, in bits, by their names in ``result.json``.

    ``mean_word_length`` counts each layer's weight once; ``mean_input_word_length`` the inputs of
    layers that round them, and is missing where none do. ``..._by_size`` weighs each by its
    number of elements, inputs by those of one sample. Empty in float32.
    """
    optimizer = training.optimizer
    if not isinstance(optimizer, marvin.Quantized):
        return {}
    formats, inputs = optimizer.formats(), optimizer.input_formats()
    weights = {name: word_length(formats.get(name)) for name in optimizer.layers()}
    named = training.model.named_parameters()
    found = _means("mean_word_length", weights, {name: p.numel() for name, p in named})
    if training.activations is not None and inputs:
        sizes = {layer.weight: math.prod(layer.input_shape) for layer in training.layers}
        lengths = {name: word_length(fmt) for name, fmt in inputs.items()}
        found |= _means("mean_input_word_length", lengths, sizes)
    return found


def _means(name: str, lengths: dict[str, int], sizes: dict[str, int]) -> dict[str, float]:
    total = sum(sizes[layer] for layer in lengths)
    weighted = sum(bits * sizes[layer] for layer, bits in lengths.items())
    return {name: sum(lengths.values()) / len(lengths), f"{name}_by_size": weighted / total}
