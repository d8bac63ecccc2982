"""The loss budget beside HGQ2 on small dense networks: accuracy at equal EBOPs, and time of a step.

    make .venv-hgq/installed
    python -m benchmarks.hgq2 [--time]

Both train the same layers on the same images with Adam, the same batches, epochs and cosine schedule. Ours
has one format a layer and one run for each target of EBOPs; HGQ2 has bits for each weight and each
input, which its loss charges with EBOPs more and more: one run passes all targets, and what counts for a
target is the epoch with the best held-out accuracy among those with as few EBOPs as our run. As its way
down takes long, it has a second run of five times our epochs. The test images are looked at for the epochs
that were chosen.
"""

from perfmodel.arguments import Parser, stop_at_interrupt

PARSER = Parser("python -m benchmarks.hgq2", (__doc__ or "").partition("\n")[0])
PARSER.add_argument("--time", action="store_true", help="time steps instead, on an idle machine")

if __name__ == "__main__":  # --help and slips are answered before torch loads
    stop_at_interrupt()
    PARSER.parse_args()

import json
import os
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import marvin
from benchmarks.machine import describe
from marvin.files import write_atomic
from perfmodel import cost, layers
from perfmodel.trace import Trace
from train.data import load

PYTHON = os.environ.get("HGQ_PYTHON", ".venv-hgq/bin/python")
RUNNER = Path(__file__).with_name("hgq2_runner.py")
RESULTS = Path(__file__).with_name("results") / "hgq2.json"
BITS = 2, 3, 4, 5  # without a sign; their square is a target of EBOPs a multiply-add
HELD = 10  # one of so many training images is held out
LONGER = 5  # times our epochs, for HGQ2's second run
RATE, BETA = 3e-3, (1e-7, 1e-3)


@dataclass(frozen=True)
class Task:
    """What is learned.

    Args:
        name: In the table.
        dataset: As in ``train.data``.
        side: Images are averaged to so many pixels a side.
        sizes: Of the layers, inputs first.
        epochs: Passes over the training images.
        batch: Images of a step.
    """

    name: str
    dataset: str
    side: int
    sizes: tuple[int, ...]
    epochs: int
    batch: int


TASKS = (
    Task("digits, 64-32-32-10", "digits", 8, (64, 32, 32, 10), 200, 64),
    Task("Fashion-MNIST of 4x4 pixels, 16-64-32-32-10", "fashion-mnist", 4, (16, 64, 32, 32, 10), 40, 256),
)  # fmt: skip
SEEDS = range(3)
THEIRS = "hgq2", "hgq2, longer", "hgq2, float32"
Data = dict[str, Tensor]


def data_of(task: Task) -> Data:
    """Return pixels in [0, 1] and labels of three parts."""
    found = load(task.dataset, Path("data"))
    parts = {}
    for part, images in (("train", found.train), ("test", found.test)):
        x = F.adaptive_avg_pool2d(images.images.float() / 255, task.side).flatten(1)
        parts[part] = (x * 256).round().clamp(max=255) / 256, images.labels  # 8 bits
    (x, y), (x_test, y_test) = parts["train"], parts["test"]
    n = len(x) - len(x) // HELD
    names = {"x": x[:n], "y": y[:n], "x_held": x[n:], "y_held": y[n:]}
    return names | {"x_test": x_test, "y_test": y_test}


def model_of(task: Task) -> nn.Sequential:
    """Return the layers."""
    pairs = zip(task.sizes, task.sizes[1:], strict=False)
    found = [module for pair in pairs for module in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*found[:-1])


def ours(task: Task, data: Data, seed: int, bits: int | None) -> dict[str, float]:
    """Train to a target, or in float32; return EBOPs, accuracies and the median time of a step."""
    torch.manual_seed(seed)
    model = model_of(task)
    known = layers(model, (task.sizes[0],))
    adam = torch.optim.Adam(model.named_parameters(), lr=RATE)
    optimizer: torch.optim.Optimizer = adam
    if bits is not None:
        madds = tuple((row.weight, row.madds) for row in known if row.weight)
        target = bits**2 * sum(row.madds for row in known)
        policy = marvin.LossBudgetPolicy(target_ebops=target, madds=madds, min_wl=2)
        optimizer = marvin.Quantized(adam, policy, seed=seed)
        marvin.quantize_activations(model, optimizer)
    steps = len(data["x"]) // task.batch
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, task.epochs * steps)
    times = []
    for _ in range(task.epochs):
        began = time.perf_counter()
        for batch in torch.randperm(len(data["x"]))[: steps * task.batch].split(task.batch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data["x"][batch]), data["y"][batch])
            loss.backward()
            optimizer.step(loss=loss) if bits is not None else optimizer.step()  # type: ignore[call-arg]
            schedule.step()
        times.append((time.perf_counter() - began) / steps)
    row = {part: accuracy(model, data, part) for part in ("held", "test")}
    row |= {"seconds": statistics.median(times), "ebops": 0}
    if isinstance(optimizer, marvin.Quantized):
        trace = Trace(optimizer.trace, task.epochs * steps, 32, searches=False)
        row["ebops"] = cost.ebops(trace, known)
    return row


def accuracy(model: nn.Module, data: Data, part: str) -> float:
    """Return the share of images that are right."""
    with torch.no_grad():
        right = model.eval()(data[f"x_{part}"]).argmax(1) == data[f"y_{part}"]
    return right.float().mean().item()


def hgq(task: Task, data: Data, seed: int, *, beta: bool) -> tuple[list[dict], dict[str, str]]:
    """Return what HGQ2 has at the end of each epoch, and versions."""
    settings = {"sizes": task.sizes, "epochs": task.epochs, "batch": task.batch, "lr": RATE}
    settings |= {"seed": seed, "beta": BETA if beta else None}
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder) / "data.npz", Path(folder) / "out.json"
        np.savez(given, allow_pickle=False, **{name: part.numpy() for name, part in data.items()})
        words = [PYTHON, str(RUNNER), str(given), str(out), json.dumps(settings)]
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"HGQ2 must run in {PYTHON}, got {done.stderr[-600:]}")
        found = json.loads(out.read_text())
    return found["rows"], found["versions"]


def record(task: Task) -> dict:
    """Run all seeds of one task."""
    data, found = data_of(task), {"task": task.name, "ours": {}, **{name: {} for name in THEIRS}}
    longer = replace(task, epochs=LONGER * task.epochs)
    for seed in SEEDS:
        rows: dict[str, dict] = {}
        for bits in (None, *BITS):
            rows["float32" if bits is None else str(bits)] = ours(task, data, seed, bits)
        found["ours"][str(seed)] = rows
        found["hgq2"][str(seed)], found["versions"] = hgq(task, data, seed, beta=True)
        found["hgq2, longer"][str(seed)] = hgq(longer, data, seed, beta=True)[0]
        found["hgq2, float32"][str(seed)] = hgq(task, data, seed, beta=False)[0][-1:]
        print(task.name, seed, flush=True)
    return found


def best(epochs: list[dict], most: float) -> dict | None:
    """Return the epoch with the best held-out accuracy among those of so many EBOPs, the last of equals."""
    able = [row for row in epochs if row["ebops"] <= most]
    return max(able, key=lambda row: (row["held"], row["epoch"]), default=None)


def tables(found: list[dict]) -> str:
    """Return a table for each task."""
    lines = []
    for one in found:
        heads = "EBOPs", "ours, %", "HGQ2, same epochs, %", "HGQ2, 5 times the epochs, %"
        lines += [f"{one['task']}:", "", f"| {' | '.join(heads)} |", "|---:|---:|---:|---:|"]
        floats = [rows["float32"]["test"] for rows in one["ours"].values()]
        theirs = [rows[-1]["test"] for rows in one["hgq2, float32"].values()]
        lines.append(f"| float32 | {mean(floats)} | {mean(theirs)} | |")
        for bits in map(str, BITS):
            own = {seed: rows[bits] for seed, rows in one["ours"].items()}
            cells = [f"{statistics.mean(row['ebops'] for row in own.values()):,.0f}"]
            cells.append(mean([row["test"] for row in own.values()]))
            for name in THEIRS[:2]:
                picked = [best(one[name][seed], row["ebops"]) for seed, row in own.items()]
                got = [row["test"] for row in picked if row]
                cells.append(mean(got) if len(got) == len(own) else "none so small")
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def mean(values: list[float]) -> str:
    """Return mean and standard deviation over seeds in %."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.mean(values):.2f} ± {100 * spread:.2f}"


def timed() -> str:
    """Return what a step takes over float32, of both; for an idle machine."""
    lines = ["| step over own float32 | ours | HGQ2 |", "|---|---:|---:|"]
    for task in TASKS:
        short = replace(task, epochs=12)
        data = data_of(short)
        own = [ours(short, data, 0, bits)["seconds"] for bits in (4, None)]
        other = [
            statistics.median(row["seconds"] for row in hgq(short, data, 0, beta=beta)[0][1:])
            for beta in (True, False)
        ]
        steps = len(data["x"]) // task.batch
        cells = [f"{a / b:.2f} ({1e3 * a:.2f} ms)" for a, b in (own, [t / steps for t in other])]
        lines.append(f"| {task.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run what is not in the results yet, and print the tables."""
    given = PARSER.parse_args()
    torch.set_num_threads(1)
    if given.time:
        print(timed())
        return
    found = json.loads(RESULTS.read_text())["tasks"] if RESULTS.exists() else []
    for task in TASKS[len(found) :]:
        found.append(record(task))
        text = json.dumps({"machine": describe(), "tasks": found})
        write_atomic(RESULTS, text)
    print(tables(found))


if __name__ == "__main__":
    main()
