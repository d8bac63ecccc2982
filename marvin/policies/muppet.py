"""MuPPET: one word length for the whole network, longer when gradients stop to differ."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor

from fixedpoint_kernels import BlockFloat
from marvin.policies.base import Policy, fields_of
from marvin.policies.records import (
    ActivationFormats,
    Layer,
    LayerFormat,
    Measured,
    PlainRecord,
    Rules,
    Step,
    Update,
    word_length,
)
from marvin.policies.trace import Switch
from marvin.rounding import Format
from marvin.settings import Checks, Group, Settings, check_settings

__all__ = ["MuppetPolicy", "Stage", "epoch_diversity", "threshold"]


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, Integral) and int(value) >= least


def _is_rising(levels: Any) -> bool:
    return bool(levels) and all(a < b for a, b in pairwise(levels))


_CHECKS = Checks(
    choices={
        "window_kind": ("rolling", "block"),
        "threshold_epoch": ("absolute", "since_switch"),
    },
    rules=(
        ("levels", lambda s: _is_rising(s["levels"]), "rising word lengths, such as (8, 12, 32)"),
        ("window", lambda s: _is_whole(s["window"], 1), "a whole number from 1 on"),
        ("patience", lambda s: _is_whole(s["patience"], 1), "a whole number from 1 on"),
        ("epochs_per_lr", lambda s: _is_whole(s["epochs_per_lr"], 1), "a whole number from 1 on"),
        ("lr_decays", lambda s: _is_whole(s["lr_decays"], 0), "a whole number from 0 on"),
        ("lr_factor", lambda s: 0 < s["lr_factor"] < math.inf, "finite and above 0"),
    ),
)
_FLOAT = 32  # bits: this level is float32
_BASE, _HEIGHT, _DECAY = 1.0, 1.5, 0.1  # of the threshold


@dataclass(frozen=True)
class Stage(PlainRecord):
    """Where a network stands: what is common to all layers.

    Args:
        level: Position of the current word length among the levels.
        epoch: Epochs that have ended.
        since_switch: Of these, since the last switch.
        violations: Since the last switch.
        entries: Of these, since gradients were last forgotten.
        float_epochs: Epochs in float32.
        largest: Diversity since the last switch.
    """

    level: int = 0
    epoch: int = 0
    since_switch: int = 0
    violations: int = 0
    entries: int = 0
    float_epochs: int = 0
    largest: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MuppetPolicy(Policy):
    """Block floating point with one word length, which only rises, at the end of epochs.

    At the end of each epoch the last mini-batch's gradients are kept, of the last ``window``
    epochs. Their diversity, mean over the layers, is compared with the largest since the last
    switch: where that is more than ``threshold(epoch)`` times as large, a violation is counted,
    and ``patience`` violations raise the word length to the next level. At 32 bits the network is
    float32; there the learning rate is multiplied by ``lr_factor`` after every
    ``epochs_per_lr`` epochs, ``lr_decays`` times, and the training should stop after as many
    epochs more. Call ``optimizer.end_epoch()``, do not use a scheduler, and look at
    ``optimizer.should_stop``.

    Weights, biases and gradients are rounded to the level, each with a power of two of its own;
    with ``marvin.quantize_activations`` also the model's input, for each sample, the outputs of
    layers and average pooling, and the gradients that come back to them.

    Args:
        levels: Word lengths, rising, 2 to 24 bits; 32 is float32.
        window: Epochs whose gradients are compared.
        patience: Violations that make a switch.
        window_kind: ``"rolling"`` compares at every epoch once there are ``window``; ``"block"``
            compares, and starts anew, every ``window`` epochs.
        threshold_epoch: The threshold falls with the ``"absolute"`` epoch, or with those
            ``"since_switch"``.
        epochs_per_lr: Epochs of each learning rate in float32.
        lr_decays: How often the rate falls in float32.
        lr_factor: What it is then multiplied by.

    Raises:
        TypeError: An argument that must be a number is not one.
        ValueError: An argument is out of range.

    Source:
        Rajagopal, Vink, Venieris and Bouganis, 2020, Multi-Precision Policy Enforced Training
        (MuPPET). Constants that the paper leaves out are those of its authors' configuration.
    """

    levels: tuple[int, ...] = (8, 12, 14, 16, 32)
    window: int = 3
    patience: int = 2
    window_kind: Literal["rolling", "block"] = "rolling"
    threshold_epoch: Literal["absolute", "since_switch"] = "absolute"
    epochs_per_lr: int = 15
    lr_decays: int = 2
    lr_factor: float = 0.1

    rules = Rules(
        tensors=("last_grad",),
        quantizes_gradients=True,
        quantizes_norms=False,
        quantizes_input=True,
        takes_shards=False,  # a tensor's largest value gives its scale
        owns_lr=True,
    )

    def __post_init__(self) -> None:
        check_settings(fields_of(self), _CHECKS)
        for level in self.levels:
            _format(level)

    def settings(self) -> Group:
        """See ``Policy``: the network has one word length, so no group may differ."""
        return {}

    def word_length_at(self, shared: Stage) -> int:
        """Return the level at which a network stands, bits."""
        return self.levels[shared.level]

    def lr_scale_at(self, shared: Stage) -> float:
        """See ``Policy``."""
        falls = min(shared.float_epochs // self.epochs_per_lr, self.lr_decays)
        return self.lr_factor**falls

    def should_stop_at(self, shared: Stage) -> bool:
        """See ``Policy``."""
        return shared.float_epochs >= self.epochs_per_lr * (self.lr_decays + 1)

    def init_shared(self) -> Stage:
        """See ``Policy``."""
        return Stage()

    def load_shared(self, values: Mapping[str, Any] | None) -> Stage:
        """See ``Policy``."""
        shared = super().load_shared(values) or Stage()
        if not 0 <= shared.level < len(self.levels):
            got = f"number {shared.level}"
            raise ValueError(f"the state's level must be one of {self.levels}, got {got}")
        return shared

    def init(self, settings: Settings, shared: Stage) -> LayerFormat:
        """See ``Policy``."""
        return LayerFormat(_format(self.word_length_at(shared)))

    def activation_formats(self, record: LayerFormat) -> ActivationFormats:
        """See ``Policy``."""
        return ActivationFormats(None, record.fmt, record.fmt)

    def measure(
        self, shared: Stage, tensors: Sequence[Mapping[str, Tensor]], grads: Sequence[Tensor]
    ) -> Measured:
        """Keep a copy of the gradients: they may be the last of an epoch."""
        if self.word_length_at(shared) == _FLOAT:
            return Measured()
        return Measured({"last_grad": [grad.clone() for grad in grads]})

    def update(self, shared: Stage, layers: Sequence[Layer], step: Step) -> Update:
        """See ``Policy``: a layer that was frozen while the level rose takes the level of now."""
        fmt = _format(self.word_length_at(shared))
        if all(layer.record.fmt == fmt for layer in layers):
            return Update(shared, layers)
        late = LayerFormat(fmt)
        after = [
            layer if layer.record.fmt == fmt else _forgotten(layer).but(record=late)
            for layer in layers
        ]
        return Update(shared, after)

    def end_epoch(self, shared: Stage, layers: Sequence[Layer], step: Step) -> Update:
        """Look at the epoch's diversity; go to the next level where it has fallen too often."""
        shared = replace(shared, epoch=shared.epoch + 1, since_switch=shared.since_switch + 1)
        if self.word_length_at(shared) == _FLOAT:
            return Update(replace(shared, float_epochs=shared.float_epochs + 1), layers)
        shared = replace(shared, entries=shared.entries + 1)
        layers = [_remembered(layer, self.window) for layer in layers]
        if shared.entries < self.window:
            return Update(shared, layers)
        diversity = epoch_diversity([layer.tensors["epoch_grads"] for layer in layers])
        shared = self._compared(shared, diversity)
        if shared.violations >= self.patience and shared.level + 1 < len(self.levels):
            return self._switched(shared, layers, step, diversity)
        if self.window_kind == "block":
            return Update(replace(shared, entries=0), [_forgotten(layer) for layer in layers])
        return Update(shared, layers)

    def _compared(self, shared: Stage, diversity: float) -> Stage:
        """Count a violation where the diversity is far below the largest since the switch."""
        if not math.isfinite(diversity):
            return shared
        if diversity >= shared.largest:
            return replace(shared, largest=diversity)
        # epochs from 0: the one that has just ended is not counted yet
        is_absolute = self.threshold_epoch == "absolute"
        since = shared.epoch if is_absolute else shared.since_switch
        is_violation = shared.largest / diversity > threshold(since - 1)
        return replace(shared, violations=shared.violations + is_violation)

    def _switched(
        self, shared: Stage, layers: Sequence[Layer], step: Step, diversity: float
    ) -> Update:
        before = self.word_length_at(shared)
        shared = Stage(shared.level + 1, shared.epoch)
        fmt = _format(self.word_length_at(shared))
        rows = [
            Switch(
                step=step.number,
                layer=layer.name,
                wl=word_length(fmt),
                wl_before=before,
                diversity=diversity,
                window=self.window,
            )
            for layer in layers
        ]
        after = [_forgotten(layer).but(record=LayerFormat(fmt)) for layer in layers]
        return Update(shared, after, rows)


def threshold(epoch: int) -> float:
    """Return what ratio of diversities is a violation in an epoch, counted from 0.

    Source:
        MuPPET, section 3.3: ``alpha + beta exp(-lambda epoch)``, 1, 1.5 and 0.1.
    """
    return _BASE + _HEIGHT * math.exp(-_DECAY * epoch)


def epoch_diversity(windows: Sequence[Tensor]) -> float:
    """Return the diversity of gradients between epochs, mean over layers.

    Of each layer it is the sum of squared norms over the squared norm of the sum: ``1 / n`` for
    ``n`` equal gradients, 1 for orthogonal ones. Layers without any gradient do not count.

    Args:
        windows: Of each layer, shape ``(n, ...)``.

    Returns:
        NaN where no layer counts; infinity where one's gradients cancel.

    Source:
        MuPPET, equation 2. Differs: ``n`` gradients, where one more is printed.
    """
    numbers = []
    for window in windows:
        rows = window.flatten(1).double()
        numbers += [rows.square().sum(), rows.sum(0).square().sum()]
    if not numbers:
        return math.nan
    values = torch.stack([number.to(numbers[0].device) for number in numbers]).tolist()
    pairs = list(zip(values[::2], values[1::2], strict=True))
    ratios = [top / bottom if bottom else math.inf for top, bottom in pairs if top or bottom]
    return sum(ratios) / len(ratios) if ratios else math.nan


def _format(level: int) -> Format | None:
    return None if level == _FLOAT else BlockFloat(level)


def _remembered(layer: Layer, window: int) -> Layer:
    """Add the last gradient to those of the epochs before, shape ``(up to window, ...)``."""
    last = layer.tensors["last_grad"].unsqueeze(0)
    before = layer.tensors.get("epoch_grads", last[:0])
    grads = torch.cat([before, last])[-window:]
    return layer.but(tensors={**layer.tensors, "epoch_grads": grads})


def _forgotten(layer: Layer) -> Layer:
    """Leave nothing but the last gradient."""
    return layer.but(tensors={"last_grad": layer.tensors["last_grad"]})
