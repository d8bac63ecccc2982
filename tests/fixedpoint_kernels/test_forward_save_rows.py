"""Linear layers that keep some rows of their input: unbiased, and as many bytes as are said."""

import copy

import pytest
import torch
from torch import nn

from fixedpoint_kernels import forward_save
from fixedpoint_kernels.forward_save import sample

ROWS = {"rows": 0.25}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.LayerNorm(20), nn.ReLU(), nn.Linear(20, 5))


def gradients(net, x):
    x = x.clone().requires_grad_()
    net.zero_grad()
    net(x).square().sum().backward()
    return x.grad, [p.grad.clone() for p in net.parameters()]


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(16, 12), (4, 8, 12), (3, 12), (1, 12), (0, 12)])
def test_weight_gradients_are_products_of_random_rows(shape):
    """Each row that is kept counts as many times as there are rows for one of them."""
    layer, x = nn.Linear(12, 20), torch.randn(shape)
    twin = copy.deepcopy(layer)
    forward_save.convert(layer, division=ROWS)
    dx, (dw, db) = gradients(layer, x)
    exact_x, (exact_w, exact_b) = gradients(twin, x)
    same((dx, db), (exact_x, exact_b))
    rows = x.reshape(-1, 12)
    n, count = len(rows), -(-len(rows) // 4)
    if n <= 1:
        torch.testing.assert_close(dw, exact_w)
        return
    grad = (2 * twin(rows)).detach()
    parts = torch.einsum("no,ni->noi", grad, rows).flatten(1) * (n / count)
    share = torch.linalg.lstsq(parts.t().double(), dw.flatten().double()[:, None]).solution[:, 0]
    torch.testing.assert_close(share.round(), share, rtol=0, atol=1e-4)  # float32 sums
    assert sorted(share.round().tolist()) == [0.0] * (n - count) + [1.0] * count


def test_the_mean_over_many_draws_is_the_exact_gradient():
    net, x = model(), torch.randn(32, 12)
    _, exact = gradients(copy.deepcopy(net), x)
    forward_save.convert(net, division={"rows": 0.25, "bits": 8})
    draws = [gradients(net, x)[1] for _ in range(300)]
    for i in (0, 4):  # the weights of linear layers
        found = torch.stack([draw[i] for draw in draws])
        deviation = found.std(0).norm() / 300**0.5
        assert 0 < (found.mean(0) - exact[i]).norm() < 5 * deviation


def test_forward_input_gradients_and_other_layers_are_as_division_has_them():
    net, x = model(), torch.randn(32, 12)
    few = copy.deepcopy(net)
    same(net(x), few(x))
    report = forward_save.convert(net, division=ROWS)
    keeps = {row.layer: row.keeps for row in report.replaced}
    assert keeps["0"] == keeps["3"] == "0.25 of the rows, by chance"
    assert keeps["1"] == "means of blocks of 8, residuals of 2 bits"
    assert "keeps=0.25 of the rows" in repr(net[0])
    same(net(x), few(x))
    forward_save.revert(net)
    same(gradients(net, x)[1], gradients(few, x)[1])


def test_bytes_and_layers_that_share_an_input():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))

        def forward(self, x):
            x = x * 1
            return self.q(x) + self.k(x) + self.v(x)

    net, x = Heads(), torch.randn(8, 25, 64)
    forward_save.convert(net, division={"rows": 0.1})
    kept = sample.observe(net, x).size_bytes
    assert kept == 20 * (64 * 4 + 4)  # rows and their numbers, once


def test_functions_in_a_scope_and_autocast():
    weight, x = nn.Parameter(torch.randn(5, 12)), torch.randn(40, 12)
    saved = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t),
        forward_save.saving(division=ROWS),
    ):
        out = nn.functional.linear(x, weight)
    assert set(saved) == {(10, 12), (10,)}
    out.sum().backward()
    assert not torch.equal(weight.grad, x.sum(0).expand(5, 12))
    layer = nn.Linear(12, 5)
    forward_save.convert(layer, division=ROWS)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    out.float().sum().backward()
    assert layer.weight.grad.dtype is torch.float32
    assert layer.weight.grad.isfinite().all()


def test_a_state_repeats_the_draws():
    net, x = nn.Linear(12, 5), torch.randn(40, 12)
    forward_save.convert(net, division=ROWS)
    state = forward_save.state(net)
    first = gradients(net, x)[1]
    other = gradients(net, x)[1]
    assert not torch.equal(first[0], other[0])
    forward_save.load_state(net, state)
    same(gradients(net, x)[1], first)


@pytest.mark.parametrize("rows", [0, 1, 1.5, -0.1])
def test_shares_out_of_range_are_refused(rows):
    with pytest.raises(ValueError, match="rows must be a share above 0 and below 1, got"):
        forward_save.convert(model(), division={"rows": rows})
