"""How far integer biases move logits: ``python -m benchmarks.biases`` prints the table of docs/deploy.md.

The policies that measure ranges leave biases in floats; exports make integers of them. A small CNN
with random weights goes through a few steps, so that it has formats, and its logits are compared
with those of the integers.
"""

from perfmodel.arguments import Parser, stop_at_interrupt

PARSER = Parser("python -m benchmarks.biases", "How far integer biases move logits.")

if __name__ == "__main__":  # --help and slips are answered before torch loads
    stop_at_interrupt()
    PARSER.parse_args()

import torch
from torch import Tensor, nn

import marvin
from marvin.export import describe, integer

SEEDS, SAMPLES, STEPS = 4, 200, 3
WAYS = ((3, 4, False), (4, 4, False), (6, 6, False), (8, 8, False), (4, 4, True))


class Net(nn.Module):
    """Three convolutions and two linear layers with biases, without batch normalisation.

    Args:
        is_residual: Whether the second convolution's input is added to its output.
    """

    def __init__(self, is_residual: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 16), (16, 16), (16, 32))
        )
        self.hidden, self.last = nn.Linear(32 * 16, 64), nn.Linear(64, 10)
        self.pool, self.relu, self.flatten = nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()
        self.is_residual = is_residual

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of images of 8x8."""
        x = self.relu(self.first(x))
        y = self.second(x)
        x = self.relu(x + y if self.is_residual else y)
        x = self.pool(self.relu(self.third(x)))
        return self.last(self.relu(self.hidden(self.flatten(x))))


def share(seed: int, weights: int, activations: int, is_residual: bool) -> float:
    """Return the largest difference of a logit, as a share of the largest logit."""
    torch.manual_seed(seed)
    model, x = Net(is_residual), torch.randn(SAMPLES, 3, 8, 8)
    for p in model.parameters():
        if p.ndim == 1:
            nn.init.normal_(p, std=0.1)
    sgd = torch.optim.SGD(model.named_parameters(), lr=1e-3)
    optimizer = marvin.Quantized(sgd, marvin.StaticPolicy(weights, activations))
    marvin.quantize_activations(model, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), torch.arange(SAMPLES) % 10)
        loss.backward()
        optimizer.step(loss=loss)
    logits = model.eval()(x).detach()
    network = describe(model, x[:32], optimizer.formats())
    return float((integer.run(network, x) - logits).abs().max() / logits.abs().max())


def main() -> None:
    """Print the table."""
    PARSER.parse_args()
    print("| weights, activations | at most | on average |")
    print("|---|---|---|")
    for weights, activations, is_residual in WAYS:
        found = [share(seed, weights, activations, is_residual) for seed in range(SEEDS)]
        name = f"{weights}, {activations}" + ", with a residual sum" * is_residual
        print(f"| {name} | {max(found):.2%} | {sum(found) / SEEDS:.2%} |")


if __name__ == "__main__":
    main()
