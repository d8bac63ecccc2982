"""Under autocast nothing is kept twice: weights are parameters, and casts and views share a pack."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from fixedpoint_kernels import forward_save
from fixedpoint_kernels.forward_save import sample


def kept(model, *args):
    return sample.observe(model, args)


class Repeated(nn.Module):
    """One layer, called six times."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        with torch.autocast("cpu"):
            for _ in range(6):
                x = self.layer(x)
        return x


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Linear(64, 64), (4, 64)),
        (lambda: nn.Conv1d(64, 64, 1), (1, 64, 8)),
        (lambda: nn.ConvTranspose1d(64, 64, 1), (1, 64, 8)),
        (lambda: weight_norm(nn.Linear(64, 64)), (4, 64)),
    ],
)
def test_a_layer_that_is_used_again_keeps_its_weight_once(layer, shape):
    model, x = Repeated(layer()), torch.randn(shape)
    stock = kept(model, x).size_bytes
    forward_save.convert(model, division=True)
    assert kept(model, x).size_bytes < stock


def test_the_parameter_itself_is_kept():
    model = Repeated(nn.Linear(64, 64))
    forward_save.convert(model, division=True)
    packs = 5 * 4 * (2 * 8 + 64 // 4 + 4) + 4 * (2 * 8 + 64 // 4 + 4)  # means, codes, ranges
    assert kept(model, torch.randn(4, 64)).size_bytes == packs


class Three(nn.Module):
    """Queries, keys and values of one tensor, each from a view of its own."""

    def __init__(self, view):
        super().__init__()
        self.first = nn.LayerNorm(64)  # float32, also under autocast
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))
        self.view = view

    def forward(self, x):
        y = self.first(x)
        return self.q(self.view(y)) + self.k(self.view(y)) + self.v(self.view(y))


VIEWS = {
    "itself": lambda y: y,
    "rows": lambda y: y.view(-1, 64),
    "detached and back": lambda y: y.detach().requires_grad_(),
    "heads": lambda y: y.view(2, 3, 1, 64),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_views_and_casts_share_a_pack(view, autocast):
    model, x = Three(VIEWS[view]), torch.randn(2, 3, 64)
    forward_save.convert(model, division=True)
    with torch.autocast("cpu", enabled=autocast):
        model(x).sum().backward()
    assert forward_save.state(model)["count"] == 2
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_a_part_of_a_tensor_is_packed_by_itself():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x):
            y = x * 1
            return self.a(y[:3]) + self.b(y[3:])

    torch.manual_seed(0)
    model, x = Halves(), torch.randn(6, 8)
    forward_save.convert(model, division={"bits": 8})
    model(x).sum().backward()
    want = [x[:3].sum(0).expand(8, 8), x[3:].sum(0).expand(8, 8)]
    got = [model.a.weight.grad, model.b.weight.grad]
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.05)  # 255 steps of the range


def test_what_was_packed_goes_with_the_graph():
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(6, 8)
    forward_save.convert(model, division=True)
    noise = []
    for _ in range(2):
        model(x).sum().backward()
        noise.append(forward_save.state(model)["count"])
    assert noise == [1, 2]  # the batch is the same, its noise is not
    y = model(x), model(x)
    assert forward_save.state(model)["count"] == 4  # two passes at once: x may have been rewritten
    z = x.requires_grad_() * 1
    y = model(z), model(z)
    assert forward_save.state(model)["count"] == 5  # what the graph made is shared
    del y


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Linear(24, 16), (2, 3, 24)),
        (lambda: nn.Linear(24, 16, bias=False), (2, 3, 4, 24)),
        (lambda: nn.Conv1d(4, 6, 3), (4, 16)),
    ],
)
@pytest.mark.parametrize("act", [nn.ReLU, nn.SiLU])
def test_an_activation_in_place_may_follow(layer, shape, act):
    model, x = nn.Sequential(layer(), act(inplace=True)), torch.randn(shape)
    want = torch.autograd.grad(model(x).square().sum(), model[0].weight)[0]
    forward_save.convert(model[0], division={"bits": 8})  # the activation stays torch's own
    got = torch.autograd.grad(model(x).square().sum(), model[0].weight)[0]
    torch.testing.assert_close(got, want, rtol=0.03, atol=0.03 * float(want.abs().max()))  # 8 bits


@pytest.mark.parametrize("settings", [{"few_bit": 1}, {"few_bit": 1, "division": {"bits": 1}}])
def test_in_eval_mode_gradients_are_exact(settings):
    model = nn.Sequential(
        *(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.SiLU(inplace=True), nn.Linear(16, 4))
    )
    x = torch.randn(5, 16, requires_grad=True)
    want = torch.autograd.grad(model.eval()(x).square().sum(), [x, *model.parameters()])
    forward_save.convert(model, **settings)
    got = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    noisy = torch.autograd.grad(model.train()(x).square().sum(), [x, *model.parameters()])
    assert (noisy[0] - want[0]).abs().max() > 1e-3


class Named(nn.Module):
    """Takes keywords alone."""

    def __init__(self):
        super().__init__()
        self.linear, self.act = nn.Linear(16, 16), nn.GELU()

    def forward(self, *, ids, scale=1.0):
        return self.act(input=self.linear(input=ids)) * scale


def test_a_sample_may_be_keywords():
    model, sample_input = Named(), {"ids": torch.randn(64, 16), "scale": 2.0}
    plan = forward_save.plan(model, sample_input, budget_bytes=2000)
    assert plan.predicted_bytes <= 2000 < plan.exact_bytes
    assert all(row.error > 0 for row in plan.layers)
    report = forward_save.convert(model, few_bit=3, sample_input=sample_input)
    assert report.calls == ()


@pytest.mark.parametrize("multiply", [F.linear, lambda x, weight: x @ weight.mT])
def test_values_of_transposed_inputs_are_torchs(multiply):
    """Torch asks whether a weight learns, and then multiplies by it in one piece."""
    for seed in range(6):
        torch.manual_seed(seed)
        x, weight = torch.randn(3, 64, 40).mT, torch.randn(32, 64, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.float16):
            want = multiply(x, weight)
            with forward_save.saving(division=True):
                got = multiply(x, weight)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
