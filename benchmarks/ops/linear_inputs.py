"""What linear layers may keep of their input: random rows beside DIVISION, by bytes and error.

    python -m benchmarks.run --op linear_inputs

A perceptron on the digits inside the package (64, 256, 256, 10; Tanh between, which keeps its own
output), and a transformer block (width 64, 4 heads) on their 8 rows as tokens, each after 100 steps
of SGD. Bytes are those that its linear layers keep of a batch of 256, over those of whole inputs; errors those
of their weights' gradients, over the gradients' norms: means over 16 draws.
"""

import copy
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from fixedpoint_kernels import forward_save
from fixedpoint_kernels.forward_save import sample
from train.data import load

TESTS = "tests/fixedpoint_kernels/test_forward_save_rows.py"
BATCH, STEPS, DRAWS = 256, 100, 16
WAYS = [
    *({"bits": bits} for bits in (1, 2, 4, 8)),
    *({"rows": share} for share in (0.05, 0.1, 0.14, 0.27, 0.5)),
]


class Tokens(nn.Module):
    """A transformer block on the rows of an image, whose linear layers are modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Linear(8, 64), nn.Linear(64, 192)
        self.out, self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of images, ``(batch, 64)``."""
        x = self.embed(x.view(-1, 8, 8))
        q, k, v = self.qkv(x).view(-1, 8, 3, 4, 16).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        x = x + self.down(torch.tanh(self.up(x)))
        return self.head(x.mean(1))


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| keeps | perceptron: bytes | error | transformer block: bytes | error |"
    yield "|---|---:|---:|---:|---:|"
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10)]
    trained = [_trained(model) for model in (nn.Sequential(*layers), Tokens())]
    for way in WAYS:
        cells = [f"{x:.3f}" for model, x, y in trained for x in _measured(model, x, y, way)]
        words = forward_save.Division(**way).of_linear
        yield f"| {words} | {' | '.join(cells)} |"


def _trained(model: nn.Module) -> tuple[nn.Module, Tensor, Tensor]:
    data = load("digits", Path()).train
    images = data.images.flatten(1).float()
    images, labels = images / images.max(), data.labels
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        start = step * BATCH % (len(images) - BATCH)
        x, y = images[start : start + BATCH], labels[start : start + BATCH]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, images[:BATCH].clone(), labels[:BATCH]


def _measured(model: nn.Module, x: Tensor, y: Tensor, way: dict[str, float]) -> tuple[float, float]:
    """Return bytes that linear layers keep over those of their whole inputs, and the error."""
    exact = _gradients(model, x, y)
    few = copy.deepcopy(model)
    whole = _kept(few, x)
    forward_save.convert(few, division=way, calls=False)
    draws = [_gradients(few, x, y) for _ in range(DRAWS)]
    errors = [
        sum((a - b).square().sum() for a, b in zip(draw, exact, strict=True)) for draw in draws
    ]
    size = sum(b.square().sum() for b in exact)
    return _kept(few, x) / whole, float((sum(errors) / DRAWS / size) ** 0.5)


def _kept(model: nn.Module, x: Tensor) -> int:
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    found = sample.observe(model, x).saved
    return sum(storage.size_bytes for storage in found if storage.layers & linear)


def _gradients(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    loss = nn.functional.cross_entropy(model(x), y)
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    return list(torch.autograd.grad(loss, weights))
