"""Time of a training step that keeps less, over that of the exact one: ``--op forward_save_steps``.

A ResNet-18 on 32 images of 32 px, and two layers of BERT on 4 texts of 128 tokens, without dropout. Steps without an
optimizer; medians of turns, each in an order of its own, on ``--threads``. Throughput is the inverse. BERT
needs transformers.
"""

import copy
import importlib
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.machine import keep_freed_memory
from benchmarks.ops import largest_batch
from fixedpoint_kernels import forward_save
from fixedpoint_kernels.forward_save import sample
from perfmodel import trial

TESTS = "tests/fixedpoint_kernels/test_forward_save_layers.py"
TURNS = 15
WAYS: dict[str, dict[str, Any]] = {
    "few bits: 3": {"few_bit": 3},
    "DIVISION: 2 bits": {"division": {"block": 8, "bits": 2}},
    "both": {"few_bit": 3, "division": {"block": 8, "bits": 2}},
}


def resnet18() -> tuple[nn.Module, Tensor]:
    """Return a ResNet-18 and a batch."""
    return largest_batch.resnet18(), torch.randn(32, 3, 32, 32)


def bert() -> tuple[nn.Module, Tensor]:
    """Return two layers of BERT and a batch."""
    transformers = importlib.import_module("transformers")
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=1000, num_hidden_layers=2, **dropout)
    return transformers.BertModel(config), torch.randint(0, 1000, (4, 128))


def made(model: nn.Module) -> dict[str, nn.Module]:
    """Return a copy for each way."""
    found = {"exact": copy.deepcopy(model), "checkpointing of each block": copy.deepcopy(model)}
    trial.convert(found["checkpointing of each block"], "checkpointing")
    for way, settings in WAYS.items():
        found[way] = copy.deepcopy(model)
        forward_save.convert(found[way], **settings)
    return found


def step_s(model: nn.Module, batch: Tensor) -> float:
    """Return the seconds of one step."""
    start = time.perf_counter()
    out = model(batch)
    out = getattr(out, "last_hidden_state", out)
    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    parameters = [p for p in model.parameters() if p.requires_grad]
    torch.autograd.grad((out * noise).sum(), parameters, allow_unused=True)
    return time.perf_counter() - start


def medians_s(models: dict[str, nn.Module], batch: Tensor, turns: int = TURNS) -> dict[str, float]:
    """Return the seconds of a step of each; in each turn the order is another."""
    draw = random.Random(0)  # what ran before has a part in a step's time
    orders = [draw.sample(list(models), len(models)) for _ in range(turns + 1)]
    times = [{way: step_s(models[way], batch) for way in order} for order in orders]
    return {way: statistics.median(turn[way] for turn in times[1:]) for way in models}


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    kept = "kept" if keep_freed_memory() else "as malloc likes"
    for name, make in {"ResNet-18, 32 px, batch 32": resnet18, "BERT, 4 x 128": bert}.items():
        torch.manual_seed(0)
        model, batch = make()
        models = made(model.train())
        sizes = {way: sample.observe(m, batch).size_bytes for way, m in models.items()}
        medians = medians_s(models, batch)
        yield f"| {name} | kept, MB | step over exact | throughput over exact |"
        yield "|---|---:|---:|---:|"
        for way, seconds in medians.items():
            ratio = seconds / medians["exact"]
            yield f"| {way} | {sizes[way] / 1e6:.1f} | {ratio:.2f} | {1 / ratio:.2f} |"
        yield ""
    yield f"{torch.get_num_threads()} threads; freed memory: {kept}."
