"""What integer norms, softmax and attention cost: ``python -m benchmarks.transformers`` prints docs/transformers.md's table.

Two transformers learn digits in float32, some ten seconds each: the vision transformer of ``train/vit.py``
on images of 32x32, and an encoder of torch on the pixels as 64 words of 17. Each is calibrated, which
rounds weights and what layers take, and exported, where norms and softmax are integers, too.
"""

from perfmodel.arguments import Parser, stop_at_interrupt

PARSER = Parser(
    "python -m benchmarks.transformers",
    "What integer norms, softmax and attention cost in accuracy.",
)

if __name__ == "__main__":  # --help and slips are answered before torch loads
    stop_at_interrupt()
    PARSER.parse_args()

from importlib import resources

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import marvin
from marvin.export import describe, exact_module, integer
from train.vit import VisionTransformer

EPOCHS, BATCH, TRAINED, CALIBRATED = 12, 64, 1438, 256
BITS = 8, 6, 5, 4, 3


class Words(nn.Module):
    """An encoder of torch on pixels as words, and a linear head on the mean of all."""

    def __init__(self) -> None:
        super().__init__()
        width = 32
        self.embed, self.positions = nn.Embedding(17, width), nn.Embedding(64, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(width)
        self.encoder = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of indices, shape ``(n, 64)``."""
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.head(self.encoder(x).mean(1))


def _digits() -> tuple[Tensor, Tensor]:
    """Return pixels, 0 to 16, shape ``(n, 8, 8)``, and labels; training images come first."""
    with resources.files("train").joinpath("digits.npz").open("rb") as file:
        arrays = dict(np.load(file))
    images, labels = (
        torch.from_numpy(np.concatenate([arrays[f"{part}_{what}"] for part in ("train", "test")]))
        for what in ("images", "labels")
    )
    return (images[:, 0].float() * 16 / 255).round().long(), labels.long()


def _trained(model: nn.Module, x: Tensor, labels: Tensor) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x)).split(BATCH):
            loss = F.cross_entropy(model(x[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


@torch.no_grad()
def _row(name: str, model: nn.Module, x: Tensor, labels: Tensor, bits: int) -> str:
    test, known = x[TRAINED:], labels[TRAINED:]
    fixed = marvin.calibrate(model, [x[:CALIBRATED]], bits=bits)
    network = describe(fixed, x[:32], wl=bits, calibration=x[:CALIBRATED])
    logits = fixed(test).double(), integer.run(network, test)
    assert torch.equal(exact_module(network)(test), logits[1])
    found = [(y.argmax(1) == known).double().mean().item() for y in (model(test), *logits)]
    gap = (logits[1] - logits[0]).abs()
    shares = gap.mean() / logits[0].abs().mean(), gap.max() / logits[0].abs().max()
    cells = *(f"{x:.2%}" for x in found), *(f"{x:.2%}" for x in shares)
    return f"| {name} | {bits} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    PARSER.parse_args()
    torch.manual_seed(0)
    pixels, labels = _digits()
    images = (pixels.float() / 8 - 1)[:, None].repeat_interleave(4, -1).repeat_interleave(4, -2)
    makers = {
        "vision transformer": (VisionTransformer(10, 1, 32), images),
        "encoder of torch": (Words(), pixels.flatten(1)),
    }
    print("| | bits | float32 | calibrated | exported | logits, mean | logits, most |")
    print("|---|---|---|---|---|---|---|")
    for name, (model, x) in makers.items():
        trained = _trained(model, x[:TRAINED], labels[:TRAINED])
        for bits in BITS:
            print(_row(name, trained, x, labels, bits), flush=True)


if __name__ == "__main__":
    main()
