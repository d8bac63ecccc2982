"""The largest batch that trains in a memory, by real processes: ``--op largest_batch``.

A ResNet-18 for images of 32 px, and two layers of BERT of its usual width on 128 tokens (transformers, from a
configuration), in 1 GiB, of which Python, torch and compiled kernels take half or more. ``python -m perfmodel batch`` does the same
with any model. Bytes hold for one thread and the malloc that is named; samples a second are of one step, on the
machine as it is. Each row is written to ``results/largest_batch.csv`` once it is known, and not measured again while
it is there.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torch import nn

from benchmarks import runs
from perfmodel.batch import MALLOC, WAYS, Found, Trial, largest
from perfmodel.text import binary
from perfmodel.zoo import MODELS

TESTS = "tests/perfmodel/test_batch.py"
RESULTS = Path(__file__).parents[1] / "results/largest_batch.csv"
MEMORY_BYTES = 2**30
PRECISION = 0.05  # of the batch


class Case(NamedTuple):
    """What is trained, and in how much."""

    model: str
    memory_bytes: int


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
    case = Case(model, memory_bytes)
    if (case, trial.way) not in known_rows():
        runs.append(RESULTS, case, largest(trial, memory_bytes, precision=PRECISION))
    return known_rows()[case, trial.way]


def known_rows() -> dict[tuple[Case, str], Found]:
    """Return what is written, by case and way."""
    rows = zip(runs.read(Case, RESULTS), runs.read(Found, RESULTS), strict=True)
    return {(case, found.way): found for case, found in rows}
