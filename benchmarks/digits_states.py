"""Accuracy with compact optimizer states, beside float32 ones: the digits inside the package, 5 seeds.

    python -m benchmarks.digits_states

A perceptron (64, 128, 128, 10), 20 epochs in batches of 64. Differences are taken seed by seed.
"""

from perfmodel.arguments import Parser

PARSER = Parser("python -m benchmarks.digits_states", (__doc__ or "").partition("\n")[0])

if __name__ == "__main__":  # --help and slips are answered before torch loads
    PARSER.parse_args()

from pathlib import Path
from statistics import mean, stdev

import torch
from torch import nn
from torch.optim import SGD, AdamW

import marvin
from train.data import load

SEEDS, EPOCHS, BATCH = 5, 20, 64


def main() -> None:
    """Print a row for each optimizer."""
    PARSER.parse_args()
    print("| optimizer | float32 state, % | compact, % | difference, with its standard error |")
    print("|---|---:|---:|---:|")
    for kind in ("MSGD", "SGD", "AdamW"):
        plain, few = ([_accuracy(kind, c, s) for s in range(SEEDS)] for c in (False, True))
        gains = [b - a for a, b in zip(plain, few, strict=True)]
        error = stdev(gains) / SEEDS**0.5
        cells = f"{mean(plain):.2f} | {mean(few):.2f} | {mean(gains):+.2f} ± {error:.2f}"
        print(f"| {kind} | {cells} |", flush=True)


def _accuracy(kind: str, compact: bool, seed: int) -> float:
    data = load("digits", Path())
    train, test = (
        (part.images.flatten(1).float() / 255.0, part.labels) for part in (data.train, data.test)
    )
    torch.manual_seed(seed)
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    model = nn.Sequential(*layers)
    optimizer = _optimizer(kind, model, compact, seed)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(train[0])).split(BATCH):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(train[0][batch]), train[1][batch])
            loss.backward()
            optimizer.step(loss=loss.detach())
    with torch.no_grad():
        right = model(test[0]).argmax(1) == test[1]
    return 100 * right.float().mean().item()


def _optimizer(kind: str, model: nn.Module, compact: bool, seed: int) -> marvin.Quantized:
    params, fixed = model.named_parameters(), marvin.FixedPolicy(8, 6)
    if kind == "MSGD":
        return marvin.MSGD(params, lr=0.05, buffer_bits=8, seed=seed, compact_state=compact)
    wrapped = SGD(params, lr=0.1, momentum=0.9) if kind == "SGD" else AdamW(params, lr=2e-3)
    return marvin.Quantized(wrapped, fixed, seed=seed, compact_state=compact)


if __name__ == "__main__":
    main()
