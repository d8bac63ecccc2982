"""Transformers: RoBERTa-shaped encoders, GPT-2, a small ViT; and an LSTM over tokens."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT2", "LanguageLSTM", "NewGELU", "Roberta", "Size", "ViT"]

Activation = Callable[[], nn.Module]


@dataclass(frozen=True)
class Size:
    """What tells one transformer from another.

    Args:
        layers: Blocks.
        width: Features of a token.
        heads: Attention heads.
        tokens: Longest input.
        vocabulary: Different tokens.
        is_eager: Attention of matrix products and a softmax; otherwise one fused operation.
    """

    layers: int
    width: int
    heads: int
    tokens: int = 514
    vocabulary: int = 50265
    is_eager: bool = True


class NewGELU(nn.Module):
    """GELU by its tanh formula, written out: autograd keeps four tensors of it."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of each element."""
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1 + torch.tanh(inner))


class _Attention(nn.Module):
    """Multi-head self-attention.

    Args:
        size: Of the model.
        is_causal: Whether a token sees only those before it.
    """

    def __init__(self, size: Size, is_causal: bool = False):
        super().__init__()
        self.query, self.key, self.value, self.out = (
            nn.Linear(size.width, size.width) for _ in range(4)
        )
        self.heads = size.heads
        self.is_causal, self.is_eager = is_causal, size.is_eager

    def forward(self, x: Tensor) -> Tensor:
        """Return the mixed tokens, shape of ``x``."""
        batch, tokens, width = x.shape
        split = (batch, tokens, self.heads, width // self.heads)
        parts = (self.query(x), self.key(x), self.value(x))
        q, k, v = (part.view(split).transpose(1, 2) for part in parts)
        mixed = self._eager(q, k, v) if self.is_eager else self._fused(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))

    def _eager(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if self.is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
            scores = torch.where(seen, scores, torch.finfo(scores.dtype).min)
        return scores.softmax(-1) @ v

    def _fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)


def _mlp(width: int, activation: Activation) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), activation(), nn.Linear(4 * width, width))


class _PostNorm(nn.Module):
    """A block that normalises after each sum, as RoBERTa."""

    def __init__(self, size: Size, activation: Activation):
        super().__init__()
        self.attention = _Attention(size)
        self.norm1 = nn.LayerNorm(size.width)
        self.mlp = _mlp(size.width, activation)
        self.norm2 = nn.LayerNorm(size.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens after attention and perceptron."""
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class _PreNorm(nn.Module):
    """A block that normalises before each branch, as GPT-2 and ViT."""

    def __init__(self, size: Size, is_causal: bool, activation: Activation):
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width)
        self.attention = _Attention(size, is_causal)
        self.norm2 = nn.LayerNorm(size.width)
        self.mlp = _mlp(size.width, activation)

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens after attention and perceptron."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Roberta(nn.Module):
    """An encoder of the shape of RoBERTa with a pooler on the first token; no dropout.

    Source:
        Liu et al., "RoBERTa", 2019.
    """

    def __init__(self, size: Size, activation: Activation = nn.GELU):
        super().__init__()
        self.words = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.tokens, size.width)
        self.types = nn.Embedding(1, size.width)
        self.norm = nn.LayerNorm(size.width)
        self.blocks = nn.Sequential(*(_PostNorm(size, activation) for _ in range(size.layers)))
        self.pooler = nn.Linear(size.width, size.width)
        self.tanh = nn.Tanh()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return one vector for each row of tokens (rows, length), int64."""
        indices = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.positions(indices) + self.types(torch.zeros_like(tokens))
        return self.tanh(self.pooler(self.blocks(self.norm(x))[:, 0]))


class GPT2(nn.Module):
    """A decoder of the shape of GPT-2 with tied input and output embeddings; no dropout.

    Source:
        Radford et al., "Language models are unsupervised multitask learners", 2019.
    """

    def __init__(self, size: Size, activation: Activation = NewGELU):
        super().__init__()
        self.words = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.tokens, size.width)
        blocks = (_PreNorm(size, True, activation) for _ in range(size.layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (rows, length, vocabulary) of the next token; tokens (rows, length) int64."""
        indices = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.positions(indices)
        return self.head(self.norm(self.blocks(x)))


class ViT(nn.Module):
    """A vision transformer; ``size.tokens`` patches and one more for the class.

    Source:
        Dosovitskiy et al., "An image is worth 16x16 words", 2020.
    """

    def __init__(self, size: Size, patch: int, activation: Activation = nn.GELU):
        super().__init__()
        self.patches = nn.Conv2d(3, size.width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, size.width))
        self.positions = nn.Parameter(torch.zeros(1, size.tokens + 1, size.width))
        blocks = (_PreNorm(size, False, activation) for _ in range(size.layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (n, classes) of images (n, 3, height, width)."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class LanguageLSTM(nn.Module):
    """A two-layer LSTM that predicts the next token.

    Source:
        Zaremba et al., "Recurrent neural network regularization", 2014, the medium size.
    """

    def __init__(self, vocabulary: int = 10000, width: int = 650):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (rows, length, vocabulary) of the next token; tokens (rows, length) int64."""
        return self.head(self.lstm(self.words(tokens))[0])
