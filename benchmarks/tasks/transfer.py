"""What a network learns from another one, or from itself: embeddings, distillation, fine-tuning."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tasks.parts import Split, accuracy, classify, digit_net, digits
from benchmarks.tasks.training import Training

__all__ = ["contrastive", "distilled", "fine_tuned", "siamese"]


def views(t: Training, x: Tensor) -> Tensor:
    """Return digits moved by up to a pixel, in noise."""
    moves = torch.randint(-1, 2, (2,), generator=t.generator).tolist()
    return x.roll(moves, (2, 3)) + 0.2 * t.normal(*x.shape)


@torch.no_grad()
def nearest(model: nn.Module, d: Split) -> float:
    """Return accuracy, %, of the nearest of the training digits, by cosine."""
    own, held = (F.normalize(model(x), dim=-1) for x in (d.x, d.held_x))
    return 100 * (d.y[(held @ own.T).argmax(-1)] == d.held_y).float().mean().item()


def contrastive(t: Training) -> float:
    """Return accuracy of the nearest neighbour after SimCLR: the model is called twice a step."""
    d, model = digits(), nn.Sequential(*list(digit_net())[:-1], nn.Linear(512, 32))

    def loss_of(_: int) -> Tensor:
        (x,) = t.rows(d.x, batch=64)
        one, two = (F.normalize(model(views(t, x)), dim=-1) for _ in range(2))
        return F.cross_entropy(one @ two.T / 0.2, torch.arange(64))

    return nearest(t.fit(model, 3e-3, loss_of), d)


def siamese(t: Training) -> float:
    """Return accuracy of the nearest neighbour after pairs with a margin: the loss may be 0."""
    d, model = digits(), nn.Sequential(*list(digit_net())[:-1], nn.Linear(512, 16))

    def loss_of(_: int) -> Tensor:
        (a, ya), (b, yb) = t.rows(d.x, d.y, batch=32), t.rows(d.x, d.y, batch=32)
        apart = (model(a) - model(b)).square().sum(-1).add(1e-6).sqrt()
        return torch.where(ya == yb, apart.square(), (1 - apart).relu().square()).mean()

    return nearest(t.fit(model, 3e-3, loss_of), d)


def distilled(t: Training) -> float:
    """Return accuracy of a student of a teacher that trained in the same way and is frozen."""
    d, teacher, student = digits(), digit_net(), digit_net(4)
    classify(t, teacher)
    teacher.requires_grad_(False)

    def loss_of(_: int) -> Tensor:
        (x,) = t.rows(d.x, batch=64)
        soft = (teacher(x) / 2).softmax(-1)
        return 4 * F.kl_div((student(x) / 2).log_softmax(-1), soft, reduction="batchmean")

    return accuracy(t.fit(student, 3e-3, loss_of), d.held_x, d.held_y)


def fine_tuned(t: Training, *, probe: bool) -> float:
    """Return accuracy on upside-down digits, the first layers frozen; ``probe``: all but the last."""
    d, model = digits(), digit_net()
    classify(Training("float32", 0, t.steps), model)
    model[7] = nn.Linear(512, 10)
    model.train()
    for layer in list(model)[: 7 if probe else 3]:
        layer.requires_grad_(False)

    def loss_of(_: int) -> Tensor:
        x, y = t.rows(d.x, d.y, batch=64)
        return F.cross_entropy(model(x.flip(2)), y)

    return accuracy(t.fit(model, 3e-3, loss_of), d.held_x.flip(2), d.held_y)
