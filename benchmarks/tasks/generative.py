"""Generative models: an autoencoder, variational ones, and a game of two networks."""

import math
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tasks.parts import digits, mlp
from benchmarks.tasks.training import Training

__all__ = ["autoencoder", "gan", "vae"]


def autoencoder(t: Training) -> float:
    """Return the squared error over the variance of pixels, %."""
    d = digits()
    model = nn.Sequential(nn.Flatten(), *mlp(64, 64, 12), *mlp(12, 64, 64))

    def loss_of(_: int) -> Tensor:
        (x,) = t.rows(d.x, batch=64)
        return F.mse_loss(model(x), x.flatten(1))

    t.fit(model, 3e-3, loss_of)
    with torch.no_grad():
        held = d.held_x.flatten(1)
        return 100 * (F.mse_loss(model(held), held) / (held - held.mean(0)).square().mean()).item()


class Vae(nn.Module):
    """An encoder to mean and log variance, a decoder, and the log of its own spread."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(64, 128, 16), mlp(8, 128, 64)
        self.log_spread = nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mu, log_var = self.encoder(x).chunk(2, -1)
        kl = 0.5 * (mu.square() + log_var.exp() - log_var - 1).sum(-1)
        return self.decoder(mu + (log_var / 2).exp() * noise), kl


def vae(t: Training, *, gaussian: bool) -> float:
    """Return minus the evidence bound, nats; below 0 where pixels have a density."""
    d, model = digits(), Vae()

    def bound(x: Tensor) -> Tensor:
        out, kl = model(x, t.normal(len(x), 8))
        if gaussian:
            spread = model.log_spread.clamp_min(-3)
            terms = spread + 0.5 * ((x - out) / spread.exp()).square() + 0.5 * math.log(2 * math.pi)
        else:
            terms = F.binary_cross_entropy_with_logits(out, x, reduction="none")
        return (terms.sum(-1) + kl).mean()

    t.fit(model, 2e-3, lambda _: bound(t.rows(d.x.flatten(1), batch=64)[0]))
    with torch.no_grad():
        return mean(bound(d.held_x.flatten(1)).item() for _ in range(8))


def gan(t: Training) -> float:
    """Return the sliced distance, %, between samples and a ring of 8 Gaussians."""
    g, d = mlp(4, 64, 64, 2), mlp(2, 64, 64, 1, act=nn.SiLU)
    both = [t.learner(net, 1e-3, betas=(0.0, 0.99), batch_size=128) for net in (g, d)]

    def real(count: int) -> Tensor:
        angle = torch.randint(8, (count,), generator=t.generator) * (math.pi / 4)
        return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * t.normal(count, 2)

    for step in range(t.steps):
        blur = 0.5 * max(0.0, 1 - 1.25 * step / t.steps)  # keeps the game stable
        fake = g(t.normal(128, 4)) + blur * t.normal(128, 2)
        seen = real(128) + blur * t.normal(128, 2)
        both[1].step((F.softplus(-d(seen)) + F.softplus(d(fake.detach()))).mean())
        both[0].step(F.softplus(-d(fake)).mean())
    with torch.no_grad():
        angle = torch.linspace(0, math.pi, 33)[:-1]
        lines = torch.stack([angle.cos(), angle.sin()])
        fake, wanted = g.eval()(t.normal(4096, 4)) @ lines, real(4096) @ lines
        return 100 * (fake.sort(0).values - wanted.sort(0).values).abs().mean().item()
