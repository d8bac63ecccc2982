"""Accuracy with compact optimizer states, beside float32 ones: two small tasks, 5 seeds of each.

    python -m benchmarks.states --tasks digits
    python -m benchmarks.states --tasks text --threads 1

``digits``: a perceptron (64, 128, 128, 10) on the digits inside the package, 20 epochs in batches of 64. ``text``: a transformer of
4 blocks reads Python's documentation (``pydoc_data``), byte by byte, 400 steps of AdamW, 16 texts of 128 bytes each; its layers
multiply integers, formats are the loss budget's. A share that is right is of what no training has seen. Runs of ``text`` take a
minute on a core; each is written to ``results/states.csv`` when it ends, and not made again while it is there.
"""

from perfmodel.arguments import Parser, stop_at_interrupt, whole

PARSER = Parser("python -m benchmarks.states", (__doc__ or "").partition("\n")[0])
PARSER.add_argument("--tasks", nargs="+", choices=["digits", "text"], default=["digits", "text"])
PARSER.add_argument("--seeds", type=whole(1), default=5)
PARSER.add_argument("--steps", type=whole(1), default=400, help="of text")
PARSER.add_argument("--threads", type=whole(1), help="torch's (default: as torch chooses)")

if __name__ == "__main__":  # --help and slips are answered before torch loads
    stop_at_interrupt()
    PARSER.parse_args()

import csv
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import marvin
from benchmarks.fine_tuning import LENGTH, judged, text
from marvin.policies.records import word_length
from train.data import load

RESULTS = Path(__file__).parent / "results/states.csv"
COLUMNS = "run", "seed", "train_loss", "test_accuracy", "test_loss", "weight_bits", "input_bits"
WAYS = {"float32-states": False, "compact-states": True}
EPOCHS, BATCH = 20, 64  # of digits
WIDTH, HEADS, DEPTH, TEXTS, LR = 128, 4, 4, 16, 1e-3  # of text


class Block(nn.Module):
    """Causal attention and a perceptron, each normalised before and beside a short-cut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens as those that came, shape ``(n, tokens, WIDTH)``."""
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*parts, is_causal=True)  # (n, HEADS, tokens, ...)
        x = x + self.projection(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Predicts each next byte of texts, (n, LENGTH) integers, as (n, LENGTH, 256) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        places = torch.arange(x.shape[1], device=x.device)
        return self.out(self.norm(self.blocks(self.bytes(x) + self.places(places))))


def text_run(compact: bool, seed: int, steps: int) -> tuple[float, float, float, float, float]:
    """Return what comes of a training: ``COLUMNS`` from the third on.

    The training loss is the mean of the last tenth of the steps.
    """
    torch.manual_seed(seed)
    model, data = Transformer(), text("before")
    wrapped = AdamW(model.named_parameters(), lr=LR)
    policy = marvin.LossBudgetPolicy()
    optimizer = marvin.Quantized(wrapped, policy, seed=seed, compact_state=compact)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=steps)
    marvin.quantize_activations(model, optimizer)
    marvin.integer.convert(model)
    g, losses = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        rows = torch.randint(len(data.x), (TEXTS,), generator=g)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.x[rows]).flatten(0, 1), data.y[rows].flatten())
        loss.backward()
        optimizer.step(loss=loss.detach())
        schedule.step()
        losses.append(loss.item())
    test_loss, accuracy = judged(model, data, TEXTS)
    return mean(losses[-max(1, steps // 10) :]), accuracy, test_loss, *_bits(optimizer)


def _bits(optimizer: marvin.Quantized) -> tuple[float, float]:
    """Return mean word lengths of weights and of inputs, as training ends."""
    formats, inputs = optimizer.formats(), optimizer.input_formats()
    weights = [word_length(formats.get(name)) for name in optimizer.layers()]
    return mean(weights), mean(word_length(fmt) for fmt in inputs.values())


def _text(chosen: Namespace) -> None:
    """Make the runs that are missing, seed by seed, and write them."""
    RESULTS.parent.mkdir(exist_ok=True)
    for seed in range(chosen.seeds):
        for way, compact in WAYS.items():
            name = f"text-{chosen.steps}-{way}"
            if (name, str(seed)) in _known():
                continue
            found = text_run(compact, seed, chosen.steps)
            _keep(name, seed, found)
            print(f"{name}, seed {seed}: right {100 * found[1]:.2f} %", flush=True)
    names = (f"text-{chosen.steps}-{way}" for way in ("compact-states", "float32-states"))
    print(f"python -m benchmarks.welch {RESULTS} {' '.join(names)}")


def _known() -> set[tuple[str, str]]:
    """Return the name and seed of each run that is written."""
    if not RESULTS.exists():
        return set()
    with RESULTS.open(newline="") as file:
        return {(row["run"], row["seed"]) for row in csv.DictReader(file)}


def _keep(name: str, seed: int, values: Sequence[float]) -> None:
    """Write a run behind the others."""
    is_new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(COLUMNS)
        writer.writerow((name, seed, *values))


def _digits(chosen: Namespace) -> None:
    """Print a row for each optimizer."""
    print("| optimizer | float32 state, % | compact, % | difference, with its standard error |")
    print("|---|---:|---:|---:|")
    for kind in ("MSGD", "SGD", "AdamW"):
        plain, few = ([_accuracy(kind, c, s) for s in range(chosen.seeds)] for c in (False, True))
        gains = [b - a for a, b in zip(plain, few, strict=True)]
        error = f" ± {stdev(gains) / len(gains) ** 0.5:.2f}" if len(gains) > 1 else ""
        cells = f"{mean(plain):.2f} | {mean(few):.2f} | {mean(gains):+.2f}{error}"
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
            loss = F.cross_entropy(model(train[0][batch]), train[1][batch])
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


TASKS: dict[str, Callable[[Namespace], None]] = {"digits": _digits, "text": _text}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    chosen = PARSER.parse_args(arguments)
    torch.set_num_threads(chosen.threads or torch.get_num_threads())
    for task in chosen.tasks:
        TASKS[task](chosen)


if __name__ == "__main__":
    main()
