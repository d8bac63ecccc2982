"""timm's ``Linear``, which is ``nn.Linear`` but for TorchScript: products, files and exports."""

import copy
import pickle
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import marvin
from marvin.export import describe, integer, load_frozen

NAME = "timm.layers.linear"


@pytest.fixture
def linear(monkeypatch):
    """A class of this name, so that timm need not be there."""

    class Linear(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight, self.bias)

    Linear.__module__, Linear.__qualname__ = NAME, "Linear"
    parts = NAME.split(".")
    for i in range(len(parts)):
        name = ".".join(parts[: i + 1])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules[NAME], "Linear", Linear, raising=False)
    return Linear


def trained(kind, converted=True):
    torch.manual_seed(0)
    model = nn.Sequential(kind(32, 48), nn.ReLU(), kind(48, 16))
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = marvin.Quantized(sgd, marvin.StaticPolicy())
    marvin.quantize_activations(model, optimizer)
    if converted:
        marvin.integer.convert(model)
    for i in range(4):
        x = batch(i)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), (x.sum(1) > 0).long())
        loss.backward()
        optimizer.step(loss=loss)
    return model


def batch(seed=9):
    return torch.randn(20, 32, generator=torch.Generator().manual_seed(seed))


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_it_computes_as_torchs(linear):
    model, other = trained(linear), trained(nn.Linear)
    rows = marvin.integer.report(model).rows
    assert all(row.is_integer and row.is_fused and not row.reason for row in rows)
    same(model.state_dict(), other.state_dict())
    same(model.eval()(batch()), other.eval()(batch()))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        same(again(batch()), model(batch()))
    marvin.integer.revert(model)
    assert [type(own) for own in (model[0], model[2])] == [linear, linear]


def test_it_is_saved_and_exported(linear, tmp_path):
    model, path = trained(linear), tmp_path / "net.pt"
    frozen = marvin.freeze(model)
    torch.save(frozen, path)
    loaded = load_frozen(path, [f"{NAME}:Linear"])
    assert type(loaded[0]) is linear
    wanted = integer.run(describe(trained(nn.Linear), batch()), batch())
    for own in (loaded, model):
        same(integer.run(describe(own, batch()), batch()), wanted)
    with torch.no_grad():
        marvin.integer.convert(loaded)
        same(loaded(batch()), frozen(batch()))
