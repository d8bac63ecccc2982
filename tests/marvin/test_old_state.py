"""States that earlier versions saved go on as they would have then."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from marvin import MSGD

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
