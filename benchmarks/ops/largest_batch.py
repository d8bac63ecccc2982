"""The largest batch that trains in 1 GiB, by real processes: ``--op largest_batch``.

A ResNet-18 for images of 32 px, and two layers of BERT of its usual width on 128 tokens (transformers, from a
configuration). ``python -m perfmodel batch`` does the same with any model. Bytes hold for one thread and the
malloc that is named; samples a second are of one step, on the machine as it is.
"""

import importlib
from collections.abc import Iterator

from torch import nn

from perfmodel.batch import WAYS, Trial, largest, lines
from perfmodel.zoo import MODELS

TESTS = "tests/perfmodel/test_batch.py"
MEMORY_BYTES = 2**30


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
    """Yield the lines of a table for each model."""
    for name, trial in TRIALS.items():
        yield from (f"{name}, {MEMORY_BYTES / 2**30:g} GiB", "")
        yield from lines([largest(trial._replace(way=way), MEMORY_BYTES) for way in WAYS])
        yield ""
