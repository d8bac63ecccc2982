"""Whether other tasks than classification train in fixed point as in float32, with what one writes first.

    python -m benchmarks.tasks --threads 1

Each task is a small network, its data and its figure on what no training has seen. It is trained in float32 and in the ways
of ``WAYS``, from the same seeds, weights and batches, with one learning rate and one cosine schedule. A run takes some
seconds on a core; each is written to ``results/tasks.csv`` when it ends, and not made again while it is there.
"""

from pathlib import Path

from perfmodel.arguments import Parser, whole

PARSER = Parser("python -m benchmarks.tasks", (__doc__ or "").partition("\n")[0])
PARSER.add_argument("--tasks", nargs="+", help="(default: all)")
PARSER.add_argument("--ways", nargs="+", help="(default: all)")
PARSER.add_argument("--seeds", type=whole(1), default=3)
PARSER.add_argument("--threads", type=whole(1), help="torch's (default: as torch chooses)")

if __name__ == "__main__":  # --help and slips are answered before torch loads
    PARSER.parse_args()

import csv
import functools
import itertools
import math
import pydoc_data.topics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, CosineAnnealingWarmRestarts

import marvin
from marvin import LossBudgetPolicy, Policy, StaticPolicy
from train import data as data_sets

RESULTS = Path(__file__).parent / "results/tasks.csv"
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


def mlp(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers with activations between them."""
    layers: list[nn.Module] = []
    for inner, outer in itertools.pairwise(widths):
        layers += [nn.Linear(inner, outer), act()]
    return nn.Sequential(*layers[:-1])


class Split(NamedTuple):
    """Images of 8x8 digits in 0 to 1, and their labels."""

    x: Tensor
    y: Tensor
    held_x: Tensor
    held_y: Tensor


@functools.cache
def digits() -> Split:
    """Return the digits that ``train`` ships."""
    found = data_sets.load("digits", Path("data"), may_fetch=False)
    x, held = (part.images.float() for part in (found.train, found.test))
    most = x.max()
    return Split(x / most, found.train.labels, held / most, found.test.labels)


@functools.cache
def text() -> Tensor:
    """Return Python's documentation, byte by byte."""
    topics = pydoc_data.topics.topics
    whole_text = "\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(whole_text), dtype=torch.uint8).long().clamp_max(127)


def digit_net(width: int = 16) -> nn.Sequential:
    """Return a small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * width, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share that is right, %."""
    return 100 * (model(x).argmax(-1) == y).float().mean().item()


# regression ---------------------------------------------------------------------------------


def surface(x: Tensor) -> Tensor:
    """Return a function of 8 numbers, of about unit variance."""
    return (x[:, :1] * (2 * x[:, 1:2]).sin() + x[:, 2:3] * x[:, 3:4] + x[:, 4:5].abs()) / 1.4


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


# generative ---------------------------------------------------------------------------------


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


# decisions ----------------------------------------------------------------------------------


class Poles:
    """Many carts with poles at once; a step of balance is worth 1."""

    def __init__(self, count: int, g: torch.Generator) -> None:
        self.g, self.count = g, count
        self.state, self.age = self._fresh(count), torch.zeros(count)

    def _fresh(self, count: int) -> Tensor:
        return 0.1 * torch.rand(count, 4, generator=self.g) - 0.05

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the state after, who fell, and the state to go on from."""
        _, v, a, w = self.state.unbind(1)
        force = 20.0 * action - 10
        pull = (force + 0.05 * w * w * a.sin()) / 1.1
        spin = (9.8 * a.sin() - a.cos() * pull) / (0.5 * (4 / 3 - 0.1 * a.cos() ** 2 / 1.1))
        push = pull - 0.05 * spin * a.cos() / 1.1
        after = self.state + 0.02 * torch.stack([v, push, w, spin], 1)
        self.age += 1
        fell = (after[:, 0].abs() > 2.4) | (after[:, 2].abs() > 0.21)
        over = fell | (self.age >= 200)
        self.state = torch.where(over[:, None], self._fresh(self.count), after)
        self.age = torch.where(over, 0, self.age)
        return after, fell, self.state


@torch.no_grad()
def balanced(policy: nn.Module, g: torch.Generator) -> float:
    """Return how many of 200 steps the best action balances the pole, mean of 64."""
    poles, alive, total = Poles(64, g), torch.ones(64), 0.0
    for _ in range(200):
        total += alive.sum().item()
        _, fell, _ = poles.step(policy(poles.state).argmax(-1))
        alive *= (~fell).float()
    return total / 64


def dqn(t: Training) -> float:
    """Return steps of balance after Q-learning: the loss says nothing of progress."""
    model, target = mlp(4, 64, 64, 2), mlp(4, 64, 64, 2)
    learner, poles = t.learner(model, 1e-3, batch_size=128), Poles(16, t.generator)
    target.load_state_dict({k: v for k, v in model.state_dict().items() if "fixed_point" not in k})
    memory: list[tuple[Tensor, ...]] = []
    for step in range(t.steps):
        with torch.no_grad():
            state, best = poles.state, model.eval()(poles.state).argmax(-1)
        model.train()
        chance = max(0.05, 1 - 2 * step / t.steps)
        is_random = torch.rand(16, generator=t.generator) < chance
        action = torch.where(is_random, torch.randint(2, (16,), generator=t.generator), best)
        after, fell, _ = poles.step(action)
        memory.append((state, action, after, fell))
        chosen = torch.randint(len(memory), (8,), generator=t.generator)
        s, a, n, f = (
            torch.cat(column) for column in zip(*(memory[i] for i in chosen), strict=True)
        )
        with torch.no_grad():
            wanted = 1 + 0.98 * target(n).max(-1).values * ~f
        learner.step(F.smooth_l1_loss(model(s).gather(1, a[:, None])[:, 0], wanted))
        if step % 50 == 0:
            with torch.no_grad():
                for own, other in zip(target.parameters(), model.parameters(), strict=True):
                    own.copy_(other)
    return balanced(model.eval(), t.generator)


def reinforce(t: Training) -> float:
    """Return steps of balance after policy gradients: a loss of both signs, around 0."""
    model = mlp(4, 32, 2)
    learner = t.learner(model, 1e-2)
    for _ in range(t.steps):
        poles, states, actions = Poles(16, t.generator), [], []
        ages, alive = torch.zeros(200, 16), torch.ones(16)
        for i in range(200):
            with torch.no_grad():
                action = torch.multinomial(
                    model.eval()(poles.state).softmax(-1), 1, generator=t.generator
                )
            states.append(poles.state)
            actions.append(action)
            ages[i] = alive
            alive = alive * (~poles.step(action[:, 0])[1]).float()
            if not alive.any():
                break
        length = len(states)
        returns = ages[:length].flip(0).cumsum(0).flip(0)
        advantage = (returns - returns[ages[:length] > 0].mean()) / (returns.std() + 1)
        logits = model.train()(torch.cat(states)).log_softmax(-1).gather(1, torch.cat(actions))
        weight = (advantage * ages[:length]).reshape(-1, 1)
        learner.step(-(logits * weight).sum() / ages[:length].sum())
    return balanced(model.eval(), t.generator)


# sequences ----------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A language model of bytes."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(128, 48), nn.Linear(96, 128)
        self.core = kind(48, 96, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.core(self.embed(tokens))[0])


class Transformer(nn.Module):
    """A causal language model of bytes with tied embeddings."""

    def __init__(self, length: int, width: int = 64) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(128, width), nn.Embedding(length, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.core, self.norm = (
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.LayerNorm(width),
        )
        self.head = nn.Linear(width, 128, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.embed(tokens) + self.places(torch.arange(length))
        return self.head(self.norm(self.core(x, mask=mask, is_causal=True)))


def language(t: Training, model: nn.Module, lr: float, length: int = 48) -> float:
    """Return the loss of held-out text, nats a byte."""
    whole_text, held = text()[:-40000], text()[-40000:]
    ahead = torch.arange(length + 1)

    def loss_of(_: int) -> Tensor:
        starts = torch.randint(len(whole_text) - length, (16, 1), generator=t.generator)
        x = whole_text[starts + ahead]
        return F.cross_entropy(model(x[:, :-1]).transpose(1, 2), x[:, 1:])

    t.fit(model, lr, loss_of, batch_size=16)
    with torch.no_grad():
        x = held[: len(held) // (length + 1) * (length + 1)].view(-1, length + 1)
        return F.cross_entropy(model(x[:, :-1]).transpose(1, 2), x[:, 1:]).item()


# classification -----------------------------------------------------------------------------


def imbalanced(t: Training) -> float:
    """Return the average precision, %, where one in a hundred is positive."""

    def labels(x: Tensor) -> Tensor:
        return (surface(x) > 2.3).float()

    model, x, held = mlp(8, 64, 64, 1), t.normal(20000, 8), t.normal(20000, 8)

    def loss_of(_: int) -> Tensor:
        own, y = t.rows(x, labels(x), batch=128)
        return F.binary_cross_entropy_with_logits(model(own), y)

    t.fit(model, 3e-3, loss_of)
    with torch.no_grad():
        order = model(held)[:, 0].argsort(descending=True)
        hits = labels(held)[order, 0]
        precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1)
        return 100 * ((precision * hits).sum() / hits.sum()).item()


def multi_label(t: Training) -> float:
    """Return the share of right answers, %, to four questions about a digit."""
    d = digits()
    of = torch.tensor(
        [[n % 2, n > 4, n in (2, 3, 5, 7), n in (0, 6, 8, 9)] for n in range(10)]
    ).float()
    model = nn.Sequential(*list(digit_net())[:-1], nn.Linear(512, 4))

    def loss_of(_: int) -> Tensor:
        x, y = t.rows(d.x, of[d.y], batch=64)
        return F.binary_cross_entropy_with_logits(model(x), y)

    t.fit(model, 3e-3, loss_of)
    with torch.no_grad():
        return 100 * ((model(d.held_x) > 0) == (of[d.held_y] > 0)).float().mean().item()


class UNet(nn.Module):
    """Two levels with skips, a transposed convolution and an upsampling."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        pairs = [(1, width), (width, 2 * width), (2 * width, 4 * width)]
        self.down = nn.ModuleList(self._block(*pair) for pair in pairs)
        self.raise_two = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.raise_one = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(2 * width, width, 1))
        self.up = nn.ModuleList([self._block(4 * width, 2 * width), self._block(2 * width, width)])
        self.head = nn.Conv2d(width, 1, 1)

    @staticmethod
    def _block(inner: int, outer: int) -> nn.Sequential:
        conv = nn.Conv2d(inner, outer, 3, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(outer), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        one = self.down[0](x)
        two = self.down[1](F.max_pool2d(one, 2))
        x = self.raise_two(self.down[2](F.max_pool2d(two, 2)))
        x = self.raise_one(self.up[0](torch.cat([x, two], 1)))
        return self.head(self.up[1](torch.cat([x, one], 1)))


def unet(t: Training) -> float:
    """Return intersection over union, %, of discs found among squares in noise."""
    side = torch.arange(24.0)
    model = UNet()

    def images(count: int) -> tuple[Tensor, Tensor]:
        place = 5 + 14 * torch.rand(count, 4, 1, 1, generator=t.generator)
        dx, dy = side - place[:, 0], side[:, None] - place[:, 1]
        disc = (dx * dx + dy * dy < 16).float()
        square = ((side - place[:, 2]).abs() < 4) & ((side[:, None] - place[:, 3]).abs() < 4)
        x = torch.maximum(disc, square.float()) + 0.5 * t.normal(count, 24, 24)
        return x[:, None], disc[:, None]

    def loss_of(_: int) -> Tensor:
        x, y = images(16)
        return F.binary_cross_entropy_with_logits(model(x), y)

    t.fit(model, 3e-3, loss_of)
    with torch.no_grad():
        x, y = images(256)
        found, wanted = model(x) > 0, y > 0
        return 100 * ((found & wanted).sum() / (found | wanted).sum()).item()


class Graph(nn.Module):
    """Two graph convolutions: products with an adjacency."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(inputs, 32), nn.Linear(32, classes)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return adjacency @ self.two((adjacency @ self.one(x)).relu())


def graph(t: Training) -> float:
    """Return accuracy, %, on nodes of a graph of four groups, 40 of 400 labelled."""
    y = torch.arange(400) % 4
    same = y[:, None] == y
    edges = torch.rand(400, 400, generator=t.generator) < torch.where(same, 0.06, 0.015)
    links = ((edges | edges.T) & ~torch.eye(400, dtype=torch.bool)).float() + torch.eye(400)
    share = links.sum(1).rsqrt()
    adjacency = share[:, None] * links * share
    x, model = F.one_hot(y, 4).float() @ t.normal(4, 16) * 0.4 + t.normal(400, 16), Graph(16, 4)
    t.fit(
        model, 1e-2, lambda _: F.cross_entropy(model(x, adjacency)[:40], y[:40]), weight_decay=5e-2
    )
    with torch.no_grad():
        return 100 * (model(x, adjacency)[40:].argmax(-1) == y[40:]).float().mean().item()


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
    exact = Training("float32", 0, 300)
    classify(exact, model)
    model[7] = nn.Linear(512, 10)
    model.train()
    for layer in list(model)[: 7 if probe else 3]:
        layer.requires_grad_(False)

    def loss_of(_: int) -> Tensor:
        x, y = t.rows(d.x, d.y, batch=64)
        return F.cross_entropy(model(x.flip(2)), y)

    return accuracy(t.fit(model, 3e-3, loss_of), d.held_x.flip(2), d.held_y)


class Tabular(nn.Module):
    """Embeddings of categories beside numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.ModuleList(nn.Embedding(n, 8) for n in (50, 10)), mlp(20, 64, 2)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        parts = [layer(categories[:, i]) for i, layer in enumerate(self.embed)]
        return self.body(torch.cat([numbers, *parts], 1))


def tabular(t: Training) -> float:
    """Return accuracy, %, on numbers and two categories."""
    model, effects = Tabular(), (t.normal(50), t.normal(10))

    def rows(count: int) -> tuple[Tensor, Tensor, Tensor]:
        numbers = t.normal(count, 4)
        pair = [torch.randint(n, (count,), generator=t.generator) for n in (50, 10)]
        score = numbers[:, 0] * numbers[:, 1] + effects[0][pair[0]] + effects[1][pair[1]]
        return numbers, torch.stack(pair, 1), (score > 0).long()

    def loss_of(_: int) -> Tensor:
        numbers, categories, y = rows(128)
        return F.cross_entropy(model(numbers, categories), y)

    t.fit(model, 3e-3, loss_of)
    numbers, categories, y = rows(5000)
    with torch.no_grad():
        return 100 * (model(numbers, categories).argmax(-1) == y).float().mean().item()


# one network, and what users do to its loss --------------------------------------------------


def classify(t: Training, model: nn.Module, batch: int = 64, parts: int = 1, **more: Any) -> float:
    """Return accuracy on digits; ``loss_fn`` changes the loss, ``parts`` accumulates."""
    d, loss_fn = digits(), more.pop("loss_fn", F.cross_entropy)
    learner = t.learner(model.train(), more.pop("lr", 3e-3), **more)
    for _ in range(t.steps):
        learner.optimizer.zero_grad()
        total = 0.0
        for _ in range(parts):
            x, y = t.rows(d.x, d.y, batch=batch)
            loss = loss_fn(model(x), y) / parts
            loss.backward()
            total += loss.item()
        learner.move(total)
    return accuracy(model.eval(), d.held_x, d.held_y)


def smooth(out: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy with smoothed labels."""
    return F.cross_entropy(out, y, label_smoothing=0.1)


def mixed(t: Training) -> float:
    """Return accuracy after mixup."""
    d, model = digits(), digit_net()

    def loss_of(_: int) -> Tensor:
        x, y = t.rows(d.x, F.one_hot(d.y, 10).float(), batch=64)
        share, order = (
            torch.rand(64, 1, generator=t.generator),
            torch.randperm(64, generator=t.generator),
        )
        both = share[..., None, None] * x + (1 - share[..., None, None]) * x[order]
        return F.cross_entropy(model(both), share * y + (1 - share) * y[order])

    return accuracy(t.fit(model, 3e-3, loss_of), d.held_x, d.held_y)


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
    "label smoothing": _digits(loss_fn=smooth),
    "mixup": Task(mixed, 400, "accuracy, %"),
    "cosine restarts": _digits(restarts=4),
}


class Run(NamedTuple):
    """One training: its figure, bits, what was said, and how it ended where it did not."""

    task: str
    way: str
    seed: int
    figure: float
    bits: float
    said: str
    time_s: float


def run(task: str, way: str, seed: int) -> Run:
    """Train one task in one way."""
    torch.manual_seed(seed)
    start, training = (
        time.perf_counter(),
        Training(way, seed, TASKS[task].steps, TASKS[task].advice),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            figure, end = TASKS[task].run(training), ""
        except (RuntimeError, ValueError, FloatingPointError) as error:
            figure, end = math.nan, f"{type(error).__name__}: {error}"
    messages: list[str] = [str(w.message) for w in caught] + ([end] if end else [])
    said: list[str] = list(dict.fromkeys(messages))
    bits = mean(learner.bits() for learner in training.learners)
    return Run(task, way, seed, figure, bits, " | ".join(said), time.perf_counter() - start)


def known_runs(path: Path = RESULTS) -> list[Run]:
    """Return the runs that are written."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    kinds = Run.__annotations__
    return [Run(**{name: kinds[name](row[name]) for name in Run._fields}) for row in rows]


def keep(found: Run, path: Path = RESULTS) -> None:
    """Write a run behind the others."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(Run._fields)
        writer.writerow(found)


def table(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a row for each task: means over seeds with their spread, and bits."""
    yield f"| task | figure | {' | '.join(WAYS)} |"
    yield f"|---|---|{'---:|' * len(WAYS)}"
    for name, task in TASKS.items():
        own = [r for r in runs if r.task == name]
        if own:
            cells = [_cell([r for r in own if r.way == way]) for way in WAYS]
            side = "more" if task.is_gain else "less"
            yield f"| {name} | {task.figure}, {side} is better | {' | '.join(cells)} |"


def _cell(runs: Sequence[Run]) -> str:
    figures = [r.figure for r in runs if math.isfinite(r.figure)]
    if not figures:
        return "refused" if runs else ""
    spread = f" ± {stdev(figures):.2g}" if len(figures) > 1 else ""
    bits = mean(r.bits for r in runs)
    return f"{mean(figures):.4g}{spread}" + (f" ({bits:.1f})" if bits < 32 else "")


def main(arguments: list[str] | None = None) -> None:
    """Make the runs that are missing, seed by seed, and print the table."""
    chosen = PARSER.parse_args(arguments)
    torch.set_num_threads(chosen.threads or torch.get_num_threads())
    for seed in range(chosen.seeds):
        for task in chosen.tasks or TASKS:
            for way in chosen.ways or WAYS:
                is_known = any(r[:3] == (task, way, seed) for r in known_runs())
                if not is_known and (way != "advised" or TASKS[task].advice):
                    found = run(task, way, seed)
                    keep(found)
                    print(
                        f"{task}, {way}, seed {seed}: {found.figure:.4g}, {found.bits:.1f} bits, "
                        f"{found.time_s:.0f} s {found.said[:300]}",
                        flush=True,
                    )
    print("\n".join(table(known_runs())))


if __name__ == "__main__":
    main()
