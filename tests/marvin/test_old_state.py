"""States that earlier versions saved go on as they would have then."""

import gzip
import io
import json
import pickle
import tarfile
from pathlib import Path

import pytest
import torch
from torch import nn

import marvin
from marvin import MSGD, FixedPolicy, LossBudgetPolicy, MuppetPolicy, Quantized, StaticPolicy
from marvin.hooks import rounders_of

STORED = Path(__file__).parent / "data" / "msgd_state.json"  # 8 steps of commit 13e76a3


def parameters():
    g = torch.Generator().manual_seed(100)
    shapes = {"fc.weight": (2, 3), "fc.bias": (2,), "out.weight": (2, 2)}
    return {name: nn.Parameter(torch.randn(s, generator=g)) for name, s in shapes.items()}


def restored(value):
    if isinstance(value, dict):
        if set(value) == {"tensor"}:
            return torch.tensor(value["tensor"])
        return {int(k) if k.isdigit() else k: restored(v) for k, v in value.items()}
    return value


def go_on(optimizer, params, steps):
    for i in steps:
        g = torch.Generator().manual_seed(i)
        for p in params.values():
            p.grad = torch.randn(p.shape, generator=g)
        optimizer.step(loss=2.0 - 0.1 * i if i % 3 else 3.0)


@pytest.mark.parametrize("stored", [True, False])
def test_weights_and_formats_are_those_of_the_version_that_saved_it(stored):
    file = json.loads(STORED.read_text())
    params = parameters()
    optimizer = MSGD(list(params.items()), lr=0.1, lookback=(3, 5), resolution=(5, 9), seed=7)
    if stored:
        for name, p in params.items():
            p.data.copy_(torch.tensor(file["weights"][name]))
        state = {k: [*v] if isinstance(v, list) else restored(v) for k, v in file["state"].items()}
        optimizer.load_state_dict(state)
    else:
        go_on(optimizer, params, range(8))
    go_on(optimizer, params, range(8, 20))
    later = file["later"]
    assert {name: p.tolist() for name, p in params.items()} == later["weights"]
    masters = [optimizer.state[p]["master"].tolist() for p in params.values()]
    # norms were added up in float32 then: a last bit in each of 20 steps
    torch.testing.assert_close(masters, later["masters"], rtol=0, atol=2e-6)
    trace = optimizer.state_dict()["marvin"]["trace"]
    rows = [{k: row[k] for k in old} for row, old in zip(trace, later["trace"], strict=True)]
    for row, old in zip(rows, later["trace"], strict=True):  # the columns there were
        for name, value in old.items():
            is_float = isinstance(value, float)
            wanted = pytest.approx(value, rel=1e-5, abs=1e-7, nan_ok=True) if is_float else value
            assert row[name] == wanted, name
    assert len(trace) == 8


# 13 of 25 steps of each policy at commit 453cc9f, before models carried their formats
BEFORE = Path(__file__).parent / "data" / "before_carried_formats.pt.gz"
OPTIMIZERS = {
    "msgd": lambda ps: MSGD(ps, lr=0.1, lookback=(3, 5), resolution=(5, 9), seed=7),
    "muppet": lambda ps: Quantized(torch.optim.AdamW(ps, lr=0.01), MuppetPolicy(), seed=3),
    "loss_budget": lambda ps: Quantized(
        torch.optim.SGD(ps, lr=0.05, momentum=0.9), LossBudgetPolicy(window=4), seed=5
    ),
    "static": lambda ps: Quantized(torch.optim.Adam(ps, lr=0.01), StaticPolicy(window=4), seed=6),
    "fixed": lambda ps: Quantized(torch.optim.SGD(ps, lr=0.05), FixedPolicy(8, 4), seed=8),
}


def small_model(seed):
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) / 2)
    return model


def train(model, optimizer, steps):
    for i in steps:
        g = torch.Generator().manual_seed(100 + i)
        x, y = torch.randn(4, 6, generator=g), torch.randn(4, 3, generator=g)
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step(loss=loss.detach())
        if i % 10 == 9:
            optimizer.end_epoch()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_of_before_goes_on_as_it_would_have(name):
    saved = torch.load(io.BytesIO(gzip.decompress(BEFORE.read_bytes())), weights_only=True)[name]
    model = small_model(seed=2)  # not those it was saved from
    optimizer = OPTIMIZERS[name](list(model.named_parameters()))
    marvin.quantize_activations(model, optimizer)
    train(model, optimizer, range(2))  # it has a past of its own
    with torch.no_grad():
        for p, weight in zip(model.parameters(), saved["weights"], strict=True):
            p.copy_(weight)
    optimizer.load_state_dict(saved["state"])
    train(model, optimizer, range(13, 25))
    # PyTorch's own products have other last bits on another processor
    torch.testing.assert_close([*model.parameters()], saved["later"], rtol=0, atol=1e-7)
    assert {n: str(fmt) for n, fmt in optimizer.formats().items()} == saved["formats"]


def test_a_sharded_checkpoint_of_before_loads(tmp_path):
    with tarfile.open(BEFORE.with_name("before_carried_formats_sharded.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    model = small_model(seed=2)
    optimizer = OPTIMIZERS["msgd"](list(model.named_parameters()))
    marvin.quantize_activations(model, optimizer)
    train(model, optimizer, range(2))
    assert marvin.load_sharded(tmp_path / "shard", model, optimizer) == {"a": 1}
    train(model, optimizer, range(13, 25))
    content = io.BytesIO(gzip.decompress(BEFORE.read_bytes()))
    later = torch.load(content, weights_only=True)["msgd"]["later"]
    torch.testing.assert_close([*model.parameters()], later, rtol=0, atol=0)


def test_a_whole_model_that_was_saved_before_there_were_such_counts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    marvin.quantize_activations(model, MSGD(model.named_parameters()))
    for module in model.modules():
        for rounder in rounders_of(module):
            del rounder.outputs, rounder.data  # as they were
            rounder.state.__dict__.pop("gradients", None)
    loaded = pickle.loads(pickle.dumps(model))
    optimizer = MSGD(loaded.named_parameters())
    x = torch.randn(8, 4)
    loaded(x).square().mean().backward()
    optimizer.step(loss=1.0)
    assert rounders_of(loaded[2])[0].outputs.total == 16
