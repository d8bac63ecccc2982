"""Calls that Python takes for equal, one tensor given twice, and what code asks torch for: as the model's own code has it."""

import copy
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

import marvin
from fixedpoint_kernels import products
from marvin.integer import convert, revert
from marvin.integer.graph import trace
from marvin.integer.notes import noted

pytestmark = pytest.mark.skipif(
    not products.path().is_own, reason="no own path of products on this processor"
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)
        self.number = self.values = None

    def layers(self, x):
        return self.last(torch.relu(self.first(x)))


class Marked(Net):
    """What it adds tells numbers apart."""

    def forward(self, x, number=None):
        held = [number, self.number, *(self.values or ())]
        return self.layers(x) + sum(map(mark, held))


class Twice(Net):
    def forward(self, x, y=None, *, pair=()):
        other = pair[1] if pair else y
        first = pair[0] if pair else x
        return self.layers(x) + (100.0 if other is first else self.layers(other))


class Asks(Net):
    def forward(self, x):
        y = self.layers(x)
        if torch.is_inference_mode_enabled():
            return y + 100.0
        return y + 200.0 if torch.is_grad_enabled() else y


class HasParts(Net):
    """A part of it has no gradients, as rotary embeddings of transformers."""

    def forward(self, x):
        with torch.no_grad():
            y = x * 2
        return self.layers(x) + y


def mark(number):
    if number is None:
        return 0.0
    kind = [bool, int, float].index(type(number)) + 1
    return 1000.0 if math.isnan(number) else 10.0 * kind + math.copysign(1.0, number)


def made(kind):
    """Return a converted model in eval mode, and the same as layers in float."""
    torch.manual_seed(0)
    model = kind()
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.05)
    optimizer = marvin.Quantized(sgd, marvin.StaticPolicy(8, 8))
    marvin.quantize_activations(model, optimizer)
    convert(model)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model.layers(data()).square().mean()
        loss.backward()
        optimizer.step(loss=loss.detach())
    twin = copy.deepcopy(model.eval())
    revert(twin)
    return model, twin


def data():
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def same(model, twin, *args, **kwargs):
    torch.testing.assert_close(
        model(*args, **kwargs), twin(*args, **kwargs), rtol=0.02, atol=0.02
    )  # codes of the second layer may be one apart


NUMBERS = 0.0, -0.0, 0, False, True, 1, 1.0, math.nan


def test_numbers_that_are_equal_are_other_arguments():
    model, twin = made(Marked)
    with torch.no_grad():
        for number in NUMBERS:
            same(model, twin, data(), number)
            assert model.forward.ran
        for _ in range(20):
            same(model, twin, data(), float("nan"))  # one kind of call, whichever object
    assert len(model.forward._others) == len(NUMBERS)


@pytest.mark.parametrize("name", ["number", "values"])
def test_numbers_that_are_equal_are_other_attributes(name):
    model, twin = made(Marked)
    for number in NUMBERS:
        for own in (model, twin):
            setattr(own, name, [number] if name == "values" else number)
        with torch.no_grad():
            same(model, twin, data())
        assert model.forward.ran


@pytest.mark.parametrize(
    "pair", [(0.0, -0.0), (1, True), (1, 1.0), (np.float32(0), -np.float32(0))]
)
@pytest.mark.parametrize(
    "held", [lambda x: x, lambda x: [x], lambda x: {"a": x}, lambda x: {x}, lambda x: complex(1, x)]
)
def test_notes_tell_equal_numbers_apart(pair, held):
    first, second = map(held, pair)
    if isinstance(first, complex) and isinstance(pair[1], bool | int | float):
        first, second = complex(1, 0.0), complex(1, -0.0)
    assert noted(first) != noted(second)
    assert noted(first) == noted(copy.deepcopy(first))


def test_one_tensor_that_is_given_twice_is_another_kind_of_call():
    model, twin = made(Twice)
    x, y = data(), data() + 1
    for _ in range(2):
        for args, kwargs in (
            ((x, y), {}),
            ((x, x), {}),
            ((x, y), {}),
            ((x,), {"pair": (x, x)}),
            ((x,), {"pair": (y, y)}),
            ((x,), {"pair": (x, y)}),
            ((y,), {"pair": (x, y)}),
        ):
            for grad in (True, False):
                for own in (model, twin):
                    own.train(grad)
                with torch.set_grad_enabled(grad):
                    same(model, twin, *args, **kwargs)
                    assert model.forward.ran


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, nullcontext])
@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad, nullcontext])
def test_code_that_asks_for_a_mode_of_torch(first, mode):
    model, twin = made(Asks)
    for own in (model, twin):
        own.requires_grad_(False)
    for context in (first, mode):
        with context():
            same(model, twin, data())
    for own in (model, twin):
        own.train().requires_grad_(True)
    same(model, twin, data())
    assert model.forward.ran
    assert "asks whether gradients or inference mode are on" in trace(model, infers=True)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, nullcontext])
def test_code_that_does_not_ask_has_chains_in_each_mode(mode):
    model, twin = made(HasParts)
    for own in (model, twin):
        own.requires_grad_(False)
    with mode():
        same(model, twin, data())
    assert model.forward.ran
