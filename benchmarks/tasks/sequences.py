"""Language models of bytes, on Python's own documentation."""

import functools
import pydoc_data.topics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tasks.training import Training

__all__ = ["Recurrent", "Transformer", "language"]


@functools.cache
def text() -> Tensor:
    """Return Python's documentation, byte by byte."""
    topics = pydoc_data.topics.topics
    whole_text = "\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(whole_text), dtype=torch.uint8).long().clamp_max(127)


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
        self.core = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
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
