"""One step of MSGD on ResNet20, beside SGD's and beside the whole training step it is part of.

The training step is float32, batch 128, CIFAR-10's shapes: forward, backward and SGD.
"""

from collections.abc import Iterator
from typing import Any

import torch

import marvin
from benchmarks.steps import training_step
from benchmarks.timing import Case
from train.resnet20 import resnet20

TESTS = "tests/marvin/test_optimizer.py"
BATCH = 128


def cases() -> Iterator[Case]:
    """Yield MSGD with its defaults for ResNet20, and with quantised gradients."""
    for name, settings in (("defaults", {}), ("quantised gradients", {"quantize_gradients": True})):
        yield _case(f"ResNet20, {name}", settings)


def _case(name: str, settings: dict[str, Any]) -> Case:
    ours, theirs = _model(), _model()
    msgd = marvin.MSGD(ours.named_parameters(), buffer_bits=8, **settings)
    sgd = torch.optim.SGD(
        theirs.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, foreach=True
    )
    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))
    whole = training_step(theirs, x, y, sgd.zero_grad, lambda _: sgd.step())
    whole()  # SGD now has gradients
    for p in ours.parameters():
        p.grad = torch.randn_like(p)
    contestants = {
        "ours": lambda: msgd.step(loss=1.0),
        "SGD(foreach=True)": sgd.step,
        "training step": whole,
    }
    return Case(name, sum(p.numel() for p in ours.parameters()), contestants)


def _model() -> torch.nn.Module:
    model = resnet20()
    marvin.tnvs_(model)
    return model
