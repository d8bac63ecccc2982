"""All tasks by name: how each is trained, what its figure is, and what trains it better."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import nn

from benchmarks.tasks.classification import graph, imbalanced, mixed, multi_label, tabular, unet
from benchmarks.tasks.decisions import dqn, reinforce
from benchmarks.tasks.generative import autoencoder, gan, vae
from benchmarks.tasks.parts import classify, digit_net
from benchmarks.tasks.regression import offset_features, physics, regression, siren
from benchmarks.tasks.sequences import Recurrent, Transformer, language
from benchmarks.tasks.training import Advice, Training
from benchmarks.tasks.transfer import contrastive, distilled, fine_tuned, siamese
from marvin import LossBudgetPolicy, StaticPolicy

__all__ = ["TASKS", "Task"]


class Task(NamedTuple):
    """What is trained, and what its figure is.

    Args:
        run: Trains, and returns the figure.
        steps: Of a training.
        figure: Its name and unit.
        is_gain: Whether more is better.
        advice: What trains it better than the defaults, if anything does.
    """

    run: Callable[[Training], float]
    steps: int
    figure: str
    is_gain: bool = True
    advice: Advice | None = None


def _digits(steps: int = 400, advice: dict[str, Any] | None = None, **more: Any) -> Task:
    own = Advice(lambda: LossBudgetPolicy(**advice)) if advice else None
    return Task(lambda t: classify(t, digit_net(), **more), steps, "accuracy, %", advice=own)


_FINER = Advice(lambda: LossBudgetPolicy(max_noise=(1e-4, 1e-5)))
TASKS = {
    **{
        f"regression, targets {scale:g}": Task(
            lambda t, scale=scale: regression(t, scale), 3000, "error, %", False, _FINER
        )
        for scale in (1.0, 1e3, 1e-3)
    },
    "features far from 0": Task(offset_features, 3000, "error, %", False, _FINER),
    "implicit field (SIREN)": Task(
        siren,
        2000,
        "signal, dB",
        advice=Advice(lambda: StaticPolicy(12, 12), exclude=("layers.0",)),
    ),
    "physics-informed": Task(
        physics,
        1000,
        "error, %",
        False,
        Advice(lambda: StaticPolicy(12, 12), weights_only=True),
    ),
    "autoencoder": Task(autoencoder, 2500, "error, %", False, _FINER),
    "VAE, bits": Task(lambda t: vae(t, gaussian=False), 1500, "bound, nats", False),
    "VAE, density (negative loss)": Task(
        lambda t: vae(t, gaussian=True), 1500, "bound, nats", False
    ),
    "GAN": Task(gan, 3000, "distance, %", False),
    "DQN": Task(dqn, 2500, "steps of 200"),
    "policy gradient": Task(reinforce, 100, "steps of 200"),
    "LSTM": Task(lambda t: language(t, Recurrent(nn.LSTM), 1e-2), 800, "nats a byte", False),
    "GRU": Task(lambda t: language(t, Recurrent(nn.GRU), 1e-2), 800, "nats a byte", False),
    "transformer, tied": Task(
        lambda t: language(t, Transformer(48), 3e-3), 1200, "nats a byte", False
    ),
    "imbalanced": Task(imbalanced, 1500, "precision, %"),
    "multi-label": Task(multi_label, 400, "right, %"),
    "U-Net": Task(
        unet,
        600,
        "overlap, %",
        advice=Advice(lambda: LossBudgetPolicy(batch_size=16 * 24 * 24)),
    ),
    "graph network": Task(graph, 200, "accuracy, %"),
    "contrastive": Task(contrastive, 400, "accuracy, %"),
    "Siamese": Task(siamese, 400, "accuracy, %"),
    "distillation": Task(distilled, 400, "accuracy, %"),
    "frozen first layers": Task(lambda t: fine_tuned(t, probe=False), 300, "accuracy, %"),
    "linear probe": Task(lambda t: fine_tuned(t, probe=True), 300, "accuracy, %"),
    "tabular, embeddings": Task(tabular, 1500, "accuracy, %"),
    "digits": _digits(),
    "loss times 1000": _digits(
        advice={"kappa": 10.0}, loss_fn=lambda out, y: 1000 * F.cross_entropy(out, y)
    ),
    "loss by 1000": _digits(
        advice={"kappa": 1e-5}, loss_fn=lambda out, y: F.cross_entropy(out, y) / 1000
    ),
    "loss summed": _digits(
        advice={"batch_size": 1}, loss_fn=functools.partial(F.cross_entropy, reduction="sum")
    ),
    "loss less 10": _digits(loss_fn=lambda out, y: F.cross_entropy(out, y) - 10),
    "batches of 2": _digits(800, batch=2, lr=1e-3),
    "8 batches of 8": _digits(batch=8, parts=8),
    "label smoothing": _digits(loss_fn=functools.partial(F.cross_entropy, label_smoothing=0.1)),
    "mixup": Task(mixed, 400, "accuracy, %"),
    "cosine restarts": _digits(restarts=4),
}
