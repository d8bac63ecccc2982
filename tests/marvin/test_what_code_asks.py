"""Code that asks Python what a value is, records that it makes, and classes that change: a converted model does as the model."""

import copy
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import marvin
from marvin.integer import convert
from marvin.integer.graph import trace
from tests.marvin.test_fusion import batch, same


class Asking(nn.Module):
    """Two convolutions, and what ``rest`` does with what they give."""

    def __init__(self, rest):
        super().__init__()
        self.a, self.b, self.relu = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.ReLU()
        self.rest = rest

    def forward(self, x):
        return self.rest(self.b(self.relu(self.a(x))))


def prepared(model, first=lambda y: y):
    """Return a converted model after a step with formats, and one whose layers run one by one."""
    torch.manual_seed(0)
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.01)
    optimizer = marvin.Quantized(sgd, marvin.StaticPolicy(weights=8, activations=8))
    marvin.quantize_activations(model, optimizer)
    loss = first(model(batch(0)[0])).square().mean()
    loss.backward()
    optimizer.step(loss=loss.detach())
    optimizer.zero_grad()
    twin = copy.deepcopy(model)
    convert(model)
    convert(twin, fused=False)
    return model, twin


@dataclasses.dataclass
class Divided:
    logits: Tensor
    temperature: float = 2.0

    def __post_init__(self):
        self.logits = self.logits / self.temperature


@dataclasses.dataclass
class Counted:
    logits: Tensor
    count: int = dataclasses.field(init=False, default=3)


@dataclasses.dataclass
class Plain:
    logits: Tensor
    others: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Written:
    """Writes to what it takes, in an ``__init__`` of its own."""

    logits: Tensor

    def __init__(self, logits):
        self.logits = logits
        logits.mul_(2.0)


class Pair(NamedTuple):
    logits: Tensor
    aux: Any = None


class Doubled(Pair):
    def __new__(cls, logits, aux=None):
        return super().__new__(cls, logits * 2, aux)


class Listed(list):
    @property
    def logits(self):
        return self[0]


def with_more(logits):
    found = Plain(logits)
    found.more = logits * 2
    return found


RECORDS = {  # and whether a graph can make them
    "divided": (Divided, False),
    "counted": (Counted, False),
    "written": (Written, False),
    "more": (with_more, False),
    "doubled": (Doubled, False),
    "listed": (lambda logits: Listed([logits]), False),
    "plain": (lambda logits: Plain(logits, {"a": logits}), True),
    "pair": (Pair, True),
}


@pytest.mark.parametrize("name", RECORDS)
def test_records_are_what_the_model_makes(name):
    rest, is_made = RECORDS[name]
    model, twin = prepared(Asking(rest), lambda y: y.logits)
    reason = trace(model)
    assert isinstance(reason, str) is not is_made
    assert is_made or "which no graph can make anew" in reason
    x, _ = batch(0)
    y, wanted = model(x), twin(x)
    assert type(y) is type(wanted)
    assert getattr(y, "__dict__", {}).keys() == getattr(wanted, "__dict__", {}).keys()
    same(y.logits, wanted.logits)


@pytest.mark.parametrize("training", [True, False])
def test_a_class_that_changes_is_seen(training):
    model, twin = prepared(Asking(lambda y: y))
    x, _ = batch(0)
    for own in (model, twin):
        own.train(training)
    with torch.set_grad_enabled(training):
        model(x)
        for own in (model, twin):
            own.relu.__class__ = nn.Tanh
        same(model(x), twin(x))
