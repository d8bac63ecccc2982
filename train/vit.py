"""``python -m train.vit``: train a small vision transformer in fixed point or in float32."""

from perfmodel.arguments import stop_at_interrupt
from train.arguments import parse
from train.config import Config

DEFAULTS = Config(model="vit", width=64, activation="gelu", buffer_bits=8, lr=0.02)
if __name__ == "__main__":  # --help and slips are answered before torch loads
    stop_at_interrupt()
    parse(DEFAULTS)

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.errors import UserError

__all__ = ["DEFAULTS", "MIN_SIDE", "PATCH", "VisionTransformer", "vit"]

MIN_SIDE = 32
PATCH = 8  # edge, so that an image is 16 tokens
TOKENS = (MIN_SIDE // PATCH) ** 2
HEADS = 4


class Positions(nn.Module):
    """Adds what is learned of each token's place.

    A module, so that what rounds modules' outputs sees the sum. The parameter has one dimension,
    as biases have: only what multiplies has a format of its own. It begins about as large as the
    tokens, since normalised gradients move a whole parameter by no more than the learning rate.

    Args:
        tokens: Tokens of a sample.
        width: Numbers of a token.
    """

    def __init__(self, tokens: int, width: int):
        super().__init__()
        self.values = nn.Parameter(0.5 * torch.randn(tokens * width))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x + positions``, shape ``(n, tokens, width)``."""
        return x + self.values.view(x.shape[1:])


class Attention(nn.Module):
    """Self-attention of several heads; its two products of activations stay in float32.

    Args:
        width: Numbers of a token, a multiple of ``HEADS``.
    """

    def __init__(self, width: int):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended tokens, shape ``(n, tokens, width)``."""
        parts = self.qkv(x).unflatten(-1, (3, HEADS, -1))  # (n, tokens, 3, HEADS, width / HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)  # (n, HEADS, tokens, width / HEADS)
        return self.projection(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a perceptron, each normalised before and beside a short-cut.

    Args:
        width: Numbers of a token.
        activation: Makes the activation function.
    """

    def __init__(self, width: int, activation: type[nn.Module] = nn.GELU):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.gelu = activation()
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens as those that came, shape ``(n, tokens, width)``."""
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(self.gelu(self.fc1(self.norm2(x))))


class VisionTransformer(nn.Module):
    """A pre-norm vision transformer for small images, without dropout and class token.

    Args:
        classes: Number of classes.
        channels: Colour channels of the images, 32x32.
        width: Numbers of a token, a multiple of 4.
        activation: Makes the activation functions.
        depth: Number of blocks.

    Raises:
        UserError: ``width`` is not a multiple of 4.

    Source:
        Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021. Differs: the mean of all tokens
        is classified, as there is no token for the class.
    """

    def __init__(
        self,
        classes: int = 10,
        channels: int = 3,
        width: int = 64,
        activation: type[nn.Module] = nn.GELU,
        depth: int = 4,
    ):
        if width % HEADS:
            raise UserError(f"--width must be a multiple of {HEADS} for its heads, got {width}")
        super().__init__()
        self.patches = nn.Conv2d(channels, width, PATCH, stride=PATCH)
        self.positions = Positions(TOKENS, width)
        self.blocks = nn.Sequential(*(Block(width, activation) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, shape ``(n, classes)``, of images ``(n, channels, 32, 32)``."""
        x = self.patches(x).flatten(2).transpose(1, 2)  # (n, TOKENS, width)
        return self.fc(self.norm(self.blocks(self.positions(x))).mean(1))


def vit(
    classes: int = 10,
    channels: int = 3,
    width: int = 64,
    activation: type[nn.Module] = nn.GELU,
) -> VisionTransformer:
    """Return a small vision transformer; see ``VisionTransformer``. 144,000 weights for CIFAR-10."""
    return VisionTransformer(classes, channels, width, activation)


if __name__ == "__main__":
    from train.main import main

    main(DEFAULTS, vit, MIN_SIDE)
