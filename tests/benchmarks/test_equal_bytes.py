"""Plans beside checkpointing and the compiler's own budget, on a model of a moment."""

import pytest
import torch
from torch import nn

from benchmarks.ops import equal_bytes
from fixedpoint_kernels.forward_save import compiling


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


def test_bytes_are_those_that_autograd_keeps():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)), torch.randn(10, 4)
    want = 4 * (10 * 4 + 10 * 8 + 10 * 8)  # inputs of the three; weights are parameters
    assert equal_bytes.kept_bytes(model, x) == want


def test_a_gradient_has_every_parameter():
    model, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)), torch.randn(10, 4)
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    found = equal_bytes.gradient(model, x)
    assert found.numel() == sum(p.numel() for p in model.parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's
def test_all_ways_keep_what_they_may(monkeypatch):
    monkeypatch.setattr(compiling, "GRID", 2)  # each step of the search compiles
    monkeypatch.setattr(compiling, "BACKEND", compiling.SEARCH)
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(2))).train(), torch.randn(64, 32)
    most = equal_bytes.kept_bytes(model, x) // 2
    made = equal_bytes.ways(model, x, most, backend=compiling.SEARCH)
    found = {row.way: row for row in equal_bytes.rows(made, x, turns=1)}
    budgeted = "compiled, activation_memory_budget"
    within = "plan", budgeted, "compiled, plan", "plan, which may compile"
    for way in ("checkpointing of each block", *within):
        assert found[way].kept_bytes <= most, way
    for way in ("checkpointing of each block", "compiled", budgeted):
        assert found[way].error < 1e-5, way
    assert found["plan"].error < 0.3
    assert found["plan, which may compile"].error < 0.3
