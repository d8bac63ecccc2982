"""The largest batch that trains in a memory, by real processes: ``--op largest_batch``.

A ResNet-18 for images of 32 px, and two layers of BERT of its usual width on 128 tokens (transformers, from a
configuration), in 1 GiB, of which Python, torch and compiled kernels take half or more. ``python -m perfmodel batch`` does the same
with any model. Bytes hold for one thread and the malloc that is named; samples a second are of one step, on the
machine as it is. Each row is written to ``results/largest_batch.csv`` once it is known, and not measured again while
it is there.
"""

import csv
import importlib
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from perfmodel.batch import MALLOC, WAYS, Found, Trial, largest
from perfmodel.text import binary
from perfmodel.zoo import MODELS

TESTS = "tests/perfmodel/test_batch.py"
RESULTS = Path(__file__).parents[1] / "results/largest_batch.csv"
MEMORY_BYTES = 2**30
PRECISION = 0.05  # of the batch
_KEY = "model", "memory_bytes", "way"


def resnet18() -> nn.Module:
    """Return a ResNet-18 for small images."""
    entry = MODELS["ResNet-18/CIFAR"]
    return entry.build(entry.activation)


def bert() -> nn.Module:
    """Return two layers of BERT."""
    transformers = importlib.import_module("transformers")
    config = transformers.BertConfig(vocab_size=1000, num_hidden_layers=2)
    return transformers.BertModel(config)


TRIALS = {
    "ResNet-18, 32 px": Trial(f"{__name__}:resnet18", (3, 32, 32), "float32", "", 0),
    "BERT, 2 layers, 128 tokens": Trial(f"{__name__}:bert", (128,), "int64", "", 0),
}


def table() -> Iterator[str]:
    """Yield the lines of a table for each model, a row when it is known."""
    for model, trial in TRIALS.items():
        yield f"| {model}, {binary(MEMORY_BYTES)} | batch | times | process | kept | samples/s |"
        yield "|---|---:|---:|---:|---:|---:|"
        exact = None
        for way in WAYS:
            found = row(model, trial._replace(way=way))
            exact = exact or found.batch
            cells = str(found.batch), f"{found.batch / exact:.1f}", binary(found.peak_bytes)
            more = binary(found.kept_bytes), f"{found.batch / found.step_s:.1f}"
            yield f"| {way} | {' | '.join((*cells, *more))} |"
        yield ""
    yield f"malloc: {' '.join(f'{name}={value}' for name, value in MALLOC.items())}"


def row(model: str, trial: Trial, memory_bytes: int = MEMORY_BYTES) -> Found:
    """Return the largest batch of one model and way: as written before, or searched for now."""
    key = model, str(memory_bytes), trial.way
    known = known_rows()
    if key not in known:
        found = largest(trial, memory_bytes, precision=PRECISION)
        is_new = not RESULTS.exists()
        with RESULTS.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if is_new:
                writer.writerow([*_KEY[:2], *Found._fields])
            writer.writerow([model, memory_bytes, *found])
        known = known_rows()
    return known[key]


def known_rows() -> dict[tuple[str, ...], Found]:
    """Return what is written, by model, memory and way."""
    if not RESULTS.exists():
        return {}
    with RESULTS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    kinds = {"way": str, "step_s": float}
    return {
        tuple(own[name] for name in _KEY): Found(
            **{name: kinds.get(name, int)(own[name]) for name in Found._fields}
        )
        for own in rows
    }
