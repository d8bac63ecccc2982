"""Regression: functions, implicit fields and a differential equation."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tasks.parts import mlp, surface
from benchmarks.tasks.training import Training

__all__ = ["offset_features", "physics", "regression", "siren"]


def regression(t: Training, scale: float) -> float:
    """Return the squared error over the variance of the targets, %."""
    model, x, held = mlp(8, 64, 64, 1), t.normal(4096, 8), t.normal(2000, 8)
    y = scale * surface(x)

    def loss_of(_: int) -> Tensor:
        own, target = t.rows(x, y, batch=128)
        return F.mse_loss(model(own), target)

    t.fit(model, 1e-2, loss_of)
    with torch.no_grad():
        wanted = scale * surface(held)
        return 100 * (F.mse_loss(model(held), wanted) / wanted.var()).item()


def offset_features(t: Training) -> float:
    """Return the same where features are years and prices: far from 0, beside each other."""
    model, x, held = mlp(8, 64, 64, 1), t.normal(4096, 8), t.normal(2000, 8)
    model = nn.Sequential(nn.BatchNorm1d(8), model)
    shift, spread = torch.tensor([2000.0, 0, 100, 0, 0, 0, 50, 0]), torch.tensor([10.0] + 7 * [1.0])

    def loss_of(_: int) -> Tensor:
        (own,) = t.rows(x, batch=128)
        return F.mse_loss(model(shift + spread * own), surface(own))

    t.fit(model, 1e-2, loss_of)
    with torch.no_grad():
        error = F.mse_loss(model(shift + spread * held), surface(held))
        return 100 * (error / surface(held).var()).item()


class Siren(nn.Module):
    """Sines of linear layers: an implicit field."""

    def __init__(self, inputs: int, width: int, outputs: int, w0: float = 30.0) -> None:
        super().__init__()
        self.w0, sizes = w0, (inputs, width, width)
        self.layers = nn.ModuleList(nn.Linear(a, width) for a in sizes)
        self.head = nn.Linear(width, outputs)
        for i, layer in enumerate([*self.layers, self.head]):
            assert isinstance(layer, nn.Linear)
            bound = 1 / inputs if i == 0 else math.sqrt(6 / width) / w0
            nn.init.uniform_(layer.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = (self.w0 * layer(x)).sin()
        return self.head(x)


def siren(t: Training) -> float:
    """Return the signal-to-noise ratio, dB, of a signal of 1024 points that a SIREN keeps."""
    model, x = Siren(1, 64, 1), torch.linspace(-1, 1, 1024)[:, None]
    y = (40 * x).sin() * 0.5 + (90 * x * x).sin() * 0.5

    def loss_of(_: int) -> Tensor:
        own, target = t.rows(x, y, batch=256)
        return F.mse_loss(model(own), target)

    t.fit(model, 1e-3, loss_of)
    with torch.no_grad():
        return -10 * (F.mse_loss(model(x), y) / y.var()).log10().item()


def physics(t: Training) -> float:
    """Return the error, %, of the solution of u'' = -pi^2 sin(pi x), u(-1) = u(1) = 0."""
    model, ends = mlp(1, 32, 32, 1, act=nn.Tanh), torch.tensor([[-1.0], [1.0]])

    def loss_of(_: int) -> Tensor:
        x = (2 * torch.rand(64, 1, generator=t.generator) - 1).requires_grad_()
        u = model(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
        residual = ddu + math.pi**2 * (math.pi * x).sin()
        return residual.square().mean() + 10 * model(ends).square().mean()

    t.fit(model, 1e-2, loss_of)
    with torch.no_grad():
        x = torch.linspace(-1, 1, 500)[:, None]
        return 100 * ((model(x) - (math.pi * x).sin()).square().mean() * 2).sqrt().item()
