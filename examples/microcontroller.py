"""Train on digits for a microcontroller: 4-bit weights, one C file, compiled and compared.

python examples/microcontroller.py
"""

import subprocess
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import marvin
from marvin.export import Network, c, describe, integer, round_sums
from train.augment import batch
from train.data import load

DIGITS = load("digits", Path("data"))
IMAGES, LABELS = batch(DIGITS.train, torch.arange(len(DIGITS.train)), DIGITS)
TEST, TEST_LABELS = batch(DIGITS.test, torch.arange(len(DIGITS.test)), DIGITS)


def network_of(width: int) -> nn.Module:
    """Return a small convolutional network for images of 8x8."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, 10),
    )


def train(steps: int, width: int) -> Network:
    """Return a trained network: weights of 4 bits, what layers take of 8."""
    torch.manual_seed(0)
    model = network_of(width)
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    optimizer = marvin.Quantized(sgd, marvin.StaticPolicy(4, 8))
    marvin.quantize_activations(model, optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        chosen = torch.randint(len(IMAGES), (64,))
        loss = F.cross_entropy(model(IMAGES[chosen]), LABELS[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(loss=loss)
        schedule.step()
    print(f"trained: {accuracy(model.eval()(TEST)):.2%}")
    return round_sums(describe(model, IMAGES[:512], optimizer.formats()), IMAGES[:512])


def accuracy(logits: torch.Tensor) -> float:
    """Return the share of right answers on the test images."""
    return float((logits.argmax(1) == TEST_LABELS).double().mean())


def run(source: Path, network: Network) -> torch.Tensor:
    """Compile the C file with its own main, and return what it makes of the test images."""
    words = ["cc", "-std=c99", "-O2", "-Wall", "-Wextra", "-Werror", "-DDIGITS_MAIN"]
    program = source.with_suffix("").absolute()
    subprocess.run([*words, str(source), "-o", str(program)], check=True)
    codes = c.input_codes(network, TEST)  # images by rows, columns, channels
    lines = "\n".join(" ".join(map(str, image)) for image in codes.tolist())
    done = subprocess.run([program], input=lines, capture_output=True, text=True, check=True)
    rows = [[int(code) for code in line.split()] for line in done.stdout.splitlines()]
    return torch.tensor(rows) * 2.0 ** -network.values[network.output].fl


def main(steps: int = 600, width: int = 16, path: Path = Path("digits.c")) -> None:
    """Train, export, compile, compare."""
    network = train(steps, width)
    c.save(network, path, nibbles=True)
    written = c.write(network, path.stem, nibbles=True)
    logits = run(path, network)
    is_equal = torch.equal(logits.double(), integer.run(network, TEST))
    print(f"{path}: {accuracy(logits):.2%} of {len(TEST)} test images")
    print("equal to the integer reference" if is_equal else "NOT equal to the integer reference")
    madds = sum(cost.madds for cost in c.costs(network))
    memory = written.memory.size_bytes
    print(f"{written.tables_bytes:,} bytes of tables, {memory:,} of RAM, {madds:,} multiply-adds")


if __name__ == "__main__":
    main()
