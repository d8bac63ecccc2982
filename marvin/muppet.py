"""MuPPET: one word length for the whole network, longer when gradients stop to differ."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fixedpoint_kernels import BlockFloat
from marvin.policy import ActivationFormats, Kept, Layer, Measured, Policy, Step, word_length
from marvin.rounding import Format
from marvin.trace import Switch

__all__ = ["MuppetPolicy", "epoch_diversity", "threshold"]

_FLOAT = 32  # bits: this level is float32
_BASE, _HEIGHT, _DECAY = 1.0, 1.5, 0.1  # of the threshold


@dataclass(eq=False)
class MuppetPolicy(Policy):
    """Block floating point with one word length, which only rises, at the end of epochs.

    At the end of each epoch the last mini-batch's gradients are kept, of the last ``window``
    epochs. Their diversity, mean over the layers, is compared with the largest since the last
    switch: where that is more than ``threshold(epoch)`` times as large, a violation is counted,
    and ``patience`` violations raise the word length to the next level. At 32 bits the network is
    float32; there the learning rate is multiplied by ``lr_factor`` after every
    ``epochs_per_lr`` epochs, ``lr_decays`` times, and the training should stop after as many
    epochs more. Call ``optimizer.end_epoch()``, do not use a scheduler, and look at
    ``optimizer.policy.should_stop``.

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

    tensors = ("last_grad",)
    quantizes_gradients = True
    quantizes_norms = False
    quantizes_input = True
    takes_shards = False  # a tensor's largest value gives its scale
    owns_lr = True

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.levels, self.levels[1:], strict=False))
        if not self.levels or not rising:
            raise ValueError(f"levels must be rising word lengths, got {self.levels}")
        for level in self.levels:
            _format(level)
        for name in ("window", "patience", "epochs_per_lr"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {name}={getattr(self, name)}")
        if self.window_kind not in ("rolling", "block"):
            raise ValueError(f"window_kind must be rolling or block, got {self.window_kind!r}")
        if self.threshold_epoch not in ("absolute", "since_switch"):
            raise ValueError(
                f"threshold_epoch must be absolute or since_switch, got {self.threshold_epoch!r}"
            )
        self._state = {"level": 0, "epoch": 0, "since_switch": 0, "violations": 0}
        self._state |= {"entries": 0, "float_epochs": 0}
        self._largest = 0.0  # diversity since the last switch

    @property
    def word_length(self) -> int:
        """The current level, bits."""
        return self.levels[self._state["level"]]

    @property
    def lr_scale(self) -> float:
        """See ``Policy``."""
        falls = min(self._state["float_epochs"] // self.epochs_per_lr, self.lr_decays)
        return self.lr_factor**falls

    @property
    def should_stop(self) -> bool:
        """See ``Policy``."""
        return self._state["float_epochs"] >= self.epochs_per_lr * (self.lr_decays + 1)

    def start(self, settings: Mapping[str, Any]) -> Kept:
        """See ``Policy``."""
        return Kept(_format(self.word_length))

    def activation_formats(self, record: Kept) -> ActivationFormats:
        """See ``Policy``."""
        return ActivationFormats(None, record.fmt, record.fmt)

    def measure(self, states: Sequence[Mapping[str, Any]], grads: Sequence[Tensor]) -> Measured:
        """Keep a copy of the gradients: they may be the last of an epoch."""
        if self.word_length == _FLOAT:
            return Measured()
        return Measured({"last_grad": [grad.clone() for grad in grads]})

    def on_epoch_end(self, layers: Sequence[Layer], step: Step) -> list[Switch]:
        """Look at the epoch's diversity; go to the next level where it has fallen too often."""
        state = self._state
        state["epoch"] += 1
        state["since_switch"] += 1
        if self.word_length == _FLOAT:
            state["float_epochs"] += 1
            return []
        state["entries"] += 1
        for layer in layers:
            _remember(layer.state, self.window)
        if state["entries"] < self.window:
            return []
        diversity = epoch_diversity([layer.state["epoch_grads"] for layer in layers])
        self._compare(diversity)
        if state["violations"] >= self.patience and state["level"] + 1 < len(self.levels):
            state |= {"level": state["level"] + 1, "violations": 0, "since_switch": 0}
            self._largest = 0.0
            self._forget(layers)
            return self._switch(layers, step, diversity)
        if self.window_kind == "block":
            self._forget(layers)
        return []

    def state_dict(self) -> dict[str, Any]:
        """See ``Policy``; the arguments are part of it."""
        return {"muppet": {**self._state, "largest": self._largest, "settings": asdict(self)}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``Policy``: the arguments become those of the state.

        Raises:
            ValueError: They are out of range, or the state's level is none of theirs.
        """
        own = dict(state["muppet"])
        settings = own.pop("settings", {})  # earlier versions did not save them
        saved = replace(self, **{**settings, "levels": tuple(settings.get("levels", self.levels))})
        if not 0 <= own["level"] < len(saved.levels):
            raise ValueError(f"the state's level must be one of {saved.levels}, got {own['level']}")
        vars(self).update(asdict(saved))
        self._largest = own.pop("largest")
        self._state = own

    def _compare(self, diversity: float) -> None:
        """Count a violation where the diversity is far below the largest since the switch."""
        if not math.isfinite(diversity):
            return
        # epochs from 0: the one that has just ended is not counted yet
        since = "epoch" if self.threshold_epoch == "absolute" else "since_switch"
        if diversity >= self._largest:
            self._largest = diversity
        elif self._largest / diversity > threshold(self._state[since] - 1):
            self._state["violations"] += 1

    def _forget(self, layers: Sequence[Layer]) -> None:
        self._state["entries"] = 0
        for layer in layers:
            del layer.state["epoch_grads"]

    def _switch(self, layers: Sequence[Layer], step: Step, diversity: float) -> list[Switch]:
        before, fmt = self.levels[self._state["level"] - 1], _format(self.word_length)
        rows = []
        for layer in layers:
            layer.state["layer"] = Kept(fmt)
            rows.append(
                Switch(
                    step=step.number,
                    layer=layer.name,
                    wl=word_length(fmt),
                    wl_before=before,
                    diversity=diversity,
                    window=self.window,
                )
            )
        return rows


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


def _remember(state: dict[str, Any], window: int) -> None:
    """Add the last gradient to those of the epochs before, shape ``(up to window, ...)``."""
    last = state["last_grad"].unsqueeze(0)
    before = state.get("epoch_grads", last[:0])
    state["epoch_grads"] = torch.cat([before, last])[-window:]
