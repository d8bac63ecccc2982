"""transformers' ``Conv1D``, a linear layer whose weight is (features, outputs): files and exports."""

import sys
import types

import pytest
import torch
from torch import nn

import marvin
from marvin.export import ExportError, describe, integer, load_frozen, packed, weight_formats

pytest.importorskip("transformers.pytorch_utils")


class Conv1D(nn.Module):
    """Another's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 48))

    def forward(self, x):
        return x @ self.weight


def net(seed=0, outputs=16):
    from transformers import pytorch_utils

    torch.manual_seed(seed)
    layer = pytorch_utils.Conv1D
    model = nn.Sequential(layer(48, 32), nn.ReLU(), layer(outputs, 48))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.mul_(8 * 2.0 ** -(torch.arange(len(layer.weight)) % 4).view(-1, 1))
            layer.bias.copy_(torch.randint(-9, 9, layer.bias.shape) / 8)
    return model


def calibrated(per_channel=False, seed=0, bits=7):
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randn(64, 32, generator=generator)]
    return marvin.calibrate(net(seed), batches, bits, per_channel=per_channel)


def batch():
    return torch.randn(20, 32, generator=torch.Generator().manual_seed(7))


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("converted", [False, True])
def test_it_is_exported_as_a_linear_layer(per_channel, converted):
    model, x = calibrated(per_channel), batch()
    if converted:
        marvin.integer.convert(model)
    classes, weight = [type(m) for m in model], model[0].weight.clone()
    network = describe(model, x)
    with torch.no_grad():
        same(integer.run(network, x), model(x).double())
    assert [type(m) for m in model] == classes
    same(model[0].weight, weight)
    found = packed.pack_state(model.state_dict(), weight_formats(model), None, network)
    same(integer.run(found.network, x), integer.run(network, x))


@pytest.mark.parametrize("per_channel", [False, True])
def test_it_is_loaded_to_the_bit(per_channel, tmp_path):
    model, x, path = calibrated(per_channel), batch(), tmp_path / "net.pt"
    marvin.integer.convert(model)
    frozen = marvin.freeze(model)
    torch.save(frozen, path)
    with pytest.raises(ExportError, match=r"add --allow transformers\.pytorch_utils:Conv1D$"):
        load_frozen(path)
    loaded = load_frozen(path, ["transformers.pytorch_utils:Conv1D"])
    assert type(loaded[0]) is type(net()[0])
    with torch.no_grad():
        same(loaded(x), frozen(x))
        marvin.integer.convert(loaded)
        same(loaded(x), frozen(x))


@pytest.mark.parametrize("way", ["frozen", "packed"])
def test_its_state_goes_into_a_model_of_other_arguments(way):
    model, x = calibrated(per_channel=True), batch()
    marvin.integer.convert(model)
    state = marvin.freeze(model).state_dict()
    if way == "packed":
        found = packed.pack_state(state, weight_formats(model))
        state = packed.from_bytes(packed.to_bytes(found)).state_dict()
    other = calibrated(per_channel=False, seed=3, bits=5)
    marvin.integer.convert(other, gradient_bits=None, fused=False)
    other.load_state_dict(state)
    with torch.no_grad():
        same(other(x), model(x))
        same(marvin.freeze(other)(x), model(x))


def test_a_class_of_the_same_name_is_none():
    model = nn.Sequential(Conv1D())
    (row,) = marvin.integer.convert(model).rows
    path = f"{__name__}.Conv1D"
    assert row.reason.startswith(f"there is no integer product for {path}: where it computes what")


def test_without_transformers_nothing_is_imported(monkeypatch, tmp_path):
    """A file that has no such layer does not need the package."""
    model = marvin.calibrate(nn.Sequential(nn.Linear(32, 16)), [torch.randn(9, 32)])
    marvin.integer.convert(model)
    torch.save(marvin.freeze(model), tmp_path / "net.pt")
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    monkeypatch.delitem(sys.modules, "transformers.pytorch_utils")
    assert type(load_frozen(tmp_path / "net.pt")[0]) is nn.Linear
