"""What keeping less for backward costs in accuracy when pretrained models learn something else.

    python -m benchmarks.fine_tuning --threads 1

Two tasks. ``text``: a GPT-2 of transformers, byte by byte, goes from Python's documentation (``pydoc_data``) to Python's
code (``asyncio``), both parts of Python itself. ``images``: a ViT of timm goes from one half of Fashion-MNIST to the other,
turned by 90 degrees. Pretraining is exact, once for each seed; then each way fine-tunes the same weights on the same
batches, so that differences are taken seed by seed. Losses are of what no training has seen. A run takes a minute or
two on a core; each is written to ``results/fine_tuning.csv`` when it ends, and not made again while it is there.
"""

from pathlib import Path
from typing import Any, NamedTuple

from perfmodel.arguments import Parser, stop_at_interrupt, whole

_DIVISION = {"block": 8, "bits": 2}
WAYS: dict[str, dict[str, Any]] = {
    "exact": {},
    "few bits: 3": {"few_bit": 3},
    "DIVISION: 2 bits": {"division": _DIVISION},
    "both": {"few_bit": 3, "division": _DIVISION},
    "recompute": {},
}
PARSER = Parser("python -m benchmarks.fine_tuning", (__doc__ or "").partition("\n")[0])
PARSER.add_argument("--tasks", nargs="+", choices=["text", "images"], help="(default: all)")
PARSER.add_argument("--ways", nargs="+", choices=[*WAYS], default=[*WAYS])
PARSER.add_argument("--seeds", type=whole(1), default=3)
PARSER.add_argument("--steps", type=whole(1), default=400, help="of each training")
PARSER.add_argument("--threads", type=whole(1), help="torch's (default: as torch chooses)")
PARSER.add_argument("--folder", type=Path, default=Path("runs/fine_tuning"))

if __name__ == "__main__":  # --help and slips are answered before torch loads
    stop_at_interrupt()
    PARSER.parse_args()

import argparse
import importlib
import importlib.util
import pydoc_data.topics
import time
from collections.abc import Callable, Iterator
from statistics import mean, stdev

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import runs
from fixedpoint_kernels import forward_save
from fixedpoint_kernels.forward_save import sample
from perfmodel.trial import convert as convert_trial
from train import fashion_mnist

RESULTS = Path(__file__).parent / "results/fine_tuning.csv"
LENGTH = 128  # bytes of a text
HELD_OUT = 512  # texts or images
LR = {"before": 1e-3, "after": 3e-4}


class Data(NamedTuple):
    """Inputs and labels of training, and those that are held out."""

    x: Tensor
    y: Tensor
    held_x: Tensor
    held_y: Tensor


class Task(NamedTuple):
    """What a model is, and what it learns before and after.

    Args:
        package: What the model needs.
        build: Makes the model.
        data: Of ``"before"`` and ``"after"``.
        batch: Samples of a step.
    """

    package: str
    build: Callable[[], nn.Module]
    data: Callable[[str], Data]
    batch: int


class Run(NamedTuple):
    """One fine-tuning: the held-out loss, the share that is right, and bytes kept of a batch."""

    task: str
    way: str
    seed: int
    steps: int
    loss: float
    accuracy: float
    kept_bytes: int
    time_s: float


def gpt2() -> nn.Module:
    """Return a small GPT-2 on bytes."""
    transformers = importlib.import_module("transformers")
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 128, "n_layer": 4, "n_head": 4}
    no_ends = dict.fromkeys(("bos_token_id", "eos_token_id"))
    config = transformers.GPT2Config(**sizes, **dropout, **no_ends, use_cache=False)
    return transformers.GPT2LMHeadModel(config)


def vit() -> nn.Module:
    """Return a small vision transformer for images of 28 px."""
    timm = importlib.import_module("timm.models.vision_transformer")
    sizes = {"img_size": 28, "patch_size": 4, "in_chans": 1, "num_classes": 10}
    return timm.VisionTransformer(**sizes, embed_dim=96, depth=4, num_heads=4, mlp_ratio=4)


def text(part: str) -> Data:
    """Return pieces of documentation (``"before"``) or code, and the bytes that follow each."""
    if part == "before":
        topics = pydoc_data.topics.topics
        whole = "\n".join(topics[name] for name in sorted(topics))
    else:
        folder = Path(importlib.import_module("asyncio").__file__ or "").parent
        whole = "\n".join(path.read_text() for path in sorted(folder.glob("*.py")))
    data = torch.frombuffer(bytearray(whole.encode()), dtype=torch.uint8).long()
    pieces = data[: len(data) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    pieces = pieces[torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))]
    return _split(pieces[:, :-1], pieces[:, 1:])


def images(part: str) -> Data:
    """Return the first half of Fashion-MNIST's training images, or the second, turned."""
    train = fashion_mnist.load(Path("data")).train
    half = len(train.labels) // 2
    own = slice(half) if part == "before" else slice(half, None)
    x = train.images[own].float().view(-1, 1, 28, 28) / 255.0 - 0.5
    return _split(x if part == "before" else x.rot90(1, (2, 3)), train.labels[own])


def _split(x: Tensor, y: Tensor) -> Data:
    return Data(x[:-HELD_OUT], y[:-HELD_OUT], x[-HELD_OUT:], y[-HELD_OUT:])


TASKS = {
    "text": Task("transformers", gpt2, text, 16),
    "images": Task("timm", vit, images, 64),
}


def learn(model: nn.Module, data: Data, batch: int, steps: int, lr: float, seed: int) -> None:
    """Train a model in place; the batches depend on the seed alone."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    g = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(steps):
        rows = torch.randint(len(data.x), (batch,), generator=g)
        optimizer.zero_grad()
        _loss(model, data.x[rows], data.y[rows])[0].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean loss, and which are right."""
    out = model(x)
    logits = getattr(out, "logits", out).flatten(0, -2)
    return F.cross_entropy(logits, y.flatten()), logits.argmax(-1) == y.flatten()


@torch.no_grad()
def judged(model: nn.Module, data: Data, batch: int) -> tuple[float, float]:
    """Return loss and share that is right of what is held out."""
    model.eval()
    parts = [
        _loss(model, x, y)
        for x, y in zip(data.held_x.split(batch), data.held_y.split(batch), strict=True)
    ]
    loss = mean(loss.item() for loss, _ in parts)  # all parts are of one size
    return loss, mean(right.float().mean().item() for _, right in parts)


def pretrained(name: str, seed: int, steps: int, folder: Path) -> nn.Module:
    """Return a model that has learned what comes before; kept in ``folder`` for the other ways."""
    task, path = TASKS[name], folder / f"{name}-{seed}-{steps}.pt"
    torch.manual_seed(seed)
    model = task.build()
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model
    learn(model, task.data("before"), task.batch, steps, LR["before"], seed)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model


def converted(model: nn.Module, way: str, x: Tensor, seed: int) -> int:
    """Make a model keep less, in place, and return the bytes that it keeps of a batch."""
    model.train()
    if way == "recompute":
        convert_trial(model, "checkpointing")
    elif WAYS[way]:
        forward_save.convert(model, **WAYS[way], seed=seed)
    return sample.observe(model, x.clone()).size_bytes  # a part of a tensor keeps all of it


def run(name: str, way: str, seed: int, steps: int, folder: Path) -> Run:
    """Fine-tune one model in one way."""
    task, start = TASKS[name], time.perf_counter()
    model, data = pretrained(name, seed, steps, folder), TASKS[name].data("after")
    kept = converted(model, way, data.x[: task.batch], seed)
    learn(model, data, task.batch, steps, LR["after"], 1000 + seed)
    loss, accuracy = judged(model, data, task.batch)
    return Run(name, way, seed, steps, loss, accuracy, kept, time.perf_counter() - start)


def table(found: list[Run]) -> Iterator[str]:
    """Yield a row for each task and way: means over seeds, and differences seed by seed."""
    yield "| task | way | kept, MB | held-out loss | over exact, with its standard error | right, % | seeds |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for task, steps in dict.fromkeys((run.task, run.steps) for run in found):
        of = {(r.way, r.seed): r for r in found if (r.task, r.steps) == (task, steps)}
        for way in WAYS:
            pairs = [(r, of.get(("exact", seed))) for (w, seed), r in of.items() if w == way]
            if not pairs:
                continue
            gains = [r.loss - exact.loss for r, exact in pairs if exact is not None]
            over = ""
            if way != "exact" and gains:
                error = f" ± {stdev(gains) / len(gains) ** 0.5:.4f}" if len(gains) > 1 else ""
                over = f"{mean(gains):+.4f}{error}"
            own = [r for r, _ in pairs]
            cells = f"{own[0].kept_bytes / 1e6:.1f}", f"{mean(r.loss for r in own):.4f}", over
            right = f"{100 * mean(r.accuracy for r in own):.2f}"
            name = f"{task}, {steps} steps"
            yield f"| {name} | {way} | {' | '.join(cells)} | {right} | {len(own)} |"


def main(arguments: list[str] | None = None) -> None:
    """Make the runs that are missing, seed by seed, and print the table."""
    chosen = PARSER.parse_args(arguments)
    torch.set_num_threads(chosen.threads or torch.get_num_threads())
    chosen.tasks = chosen.tasks or list(TASKS)
    for seed in range(chosen.seeds):
        for task in chosen.tasks:
            for way in chosen.ways:
                _make(task, way, seed, chosen)
    for name, task in TASKS.items():
        if name in chosen.tasks and not importlib.util.find_spec(task.package):
            print(f"{name}: left out, {task.package} is not installed")
    print("\n".join(table(runs.read(Run, RESULTS))))


def _make(task: str, way: str, seed: int, chosen: argparse.Namespace) -> None:
    """Make a run, unless it is written or cannot be."""
    key = task, way, seed, chosen.steps
    is_known = any(r[:4] == key for r in runs.read(Run, RESULTS))
    if is_known or not importlib.util.find_spec(TASKS[task].package):
        return
    found = run(task, way, seed, chosen.steps, chosen.folder)
    runs.append(RESULTS, found)
    print(f"{task}, {way}, seed {seed}: loss {found.loss:.4f}, {found.time_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
