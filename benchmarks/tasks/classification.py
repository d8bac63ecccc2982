"""Classification of other kinds than one class an image."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tasks.parts import accuracy, digit_net, digits, mlp, surface
from benchmarks.tasks.training import Training

__all__ = ["graph", "imbalanced", "mixed", "multi_label", "tabular", "unet"]


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


def mixed(t: Training) -> float:
    """Return accuracy after mixup."""
    d, model = digits(), digit_net()

    def loss_of(_: int) -> Tensor:
        x, y = t.rows(d.x, F.one_hot(d.y, 10).float(), batch=64)
        share = torch.rand(64, 1, generator=t.generator)
        order = torch.randperm(64, generator=t.generator)
        both = share[..., None, None] * x + (1 - share[..., None, None]) * x[order]
        return F.cross_entropy(model(both), share * y + (1 - share) * y[order])

    return accuracy(t.fit(model, 3e-3, loss_of), d.held_x, d.held_y)
