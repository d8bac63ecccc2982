"""Models as others write them: what they hold, how often they name a tensor, what their classes share."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fixedpoint_kernels import forward_save
from fixedpoint_kernels.forward_save import known

EIGHT = {"bits": 8}


def gradient(run, p):
    """Return the gradient of a leaf."""
    p.grad = None
    run().square().sum().backward()
    assert p.grad is not None
    return p.grad.clone()


@pytest.mark.parametrize(
    "run",
    [
        lambda a, b: F.scaled_dot_product_attention(a, b, b),
        lambda a, b: F.scaled_dot_product_attention(query=a, key=b, value=b),
        lambda a, _: F.glu(a),
        lambda a, b: a.matmul(b),
        lambda a, b: torch.mul(a, b),
        lambda a, _: a.softmax(-1),
        lambda a, b: F.linear(a, b[0, 0]),
        lambda a, _: F.layer_norm(a, (16,)),
        lambda a, _: F.rms_norm(a, (16,)),
        lambda a, _: F.gelu(a),
    ],
)
def test_operands_are_let_go(run):
    source = torch.randn(2, 2, 4, 16, 16, requires_grad=True)
    with forward_save.saving(few_bit=3, division=True):
        run(source[0] * 2, source[1] * 2)  # compiles
    gc.collect()
    a, b = source[0] * 2, source[1] * 2
    is_weight = "linear" in run.__code__.co_names  # kept as it is, for the input's gradient
    seen = [weakref.ref(a), *([] if is_weight else [weakref.ref(b)])]
    with forward_save.saving(few_bit=3, division=True):
        out = run(a, b)
    del a, b
    assert not [ref for ref in seen if ref() is not None]
    out.sum().backward()


@pytest.mark.parametrize("times", [2, 3])
def test_a_leaf_that_stands_in_several_places_has_the_sum_of_its_gradients(times):
    q, memory = torch.randn(2, 4, 16, 16), nn.Parameter(torch.randn(2, 4, 16, 16))
    operands = [q, memory, memory] if times == 2 else [memory] * 3

    def run():
        return F.scaled_dot_product_attention(*operands)

    def saving():
        with forward_save.saving(division=True):
            return run()

    exact = gradient(run, memory)
    torch.testing.assert_close(gradient(saving, memory), exact)


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        return F.linear(x, self.w - self.w.mean())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.c, self.n = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x):
        return self.n(self.c(x)).relu()


class Following(nn.Module):
    """Moves a buffer, and reads it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        self.scale += 1
        return (x * self.scale).tanh()


forward_save.register(Centred, "recompute")
forward_save.register(Following, "recompute")
forward_save.register(Block, "recompute")


def test_hooks_of_a_weight_run_once_where_a_class_runs_again():
    model, x = nn.Sequential(Centred()), torch.randn(64, 16)
    w = model[0].w
    w.register_hook(lambda grad: 0.5 * grad)
    exact = gradient(lambda: model(x), w)
    forward_save.convert(model, division=EIGHT)
    torch.testing.assert_close(gradient(lambda: model(x), w), exact, rtol=0.02, atol=0.5)
    assert isinstance(model[0].w, nn.Parameter)
    assert model[0].w is w


@pytest.mark.parametrize("before", [[], [nn.Conv2d(4, 4, 1)]])
def test_running_statistics_move_once_where_a_class_runs_again(before):
    model = nn.Sequential(*before, Block())
    twin = copy.deepcopy(model)
    report = forward_save.convert(twin, division=EIGHT)
    assert not [row for row in report.replaced if row.layer.endswith((".c", ".n"))]
    x = torch.randn(8, 4, 16, 16)
    for own in (model, twin):
        own(x).sin().sum().backward()
    for own, other in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(own, other)
    for own, other in ((model[-1].c, twin[-1].c), (model[-1].n, twin[-1].n)):
        exact = own.weight.grad
        assert (
            other.weight.grad - exact
        ).norm() < 0.3 * exact.norm()  # some fall to the other side of 0


def test_buffers_are_found_as_they_were_where_a_class_runs_again():
    model = nn.Sequential(Following())
    twin = copy.deepcopy(model)
    forward_save.convert(twin, division=EIGHT)
    found = []
    for one in (model, twin):
        x = torch.linspace(-1, 1, 2048).view(8, 256).requires_grad_()
        found.append(torch.autograd.grad(one(x).sum(), x)[0])
    torch.testing.assert_close(*found, rtol=0.01, atol=0.01)  # 8 bits of a range of 2
    assert torch.equal(model[0].scale, twin[0].scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_norm_without_an_eps_has_torchs(dtype):
    model = nn.Sequential(nn.RMSNorm(64)).to(dtype)
    x = (torch.randn(64, 64) * 0.02).to(dtype).requires_grad_()
    weight, value = model[0].weight, model(x)
    value.float().square().sum().backward()
    exact = weight.grad
    weight.grad = None
    forward_save.convert(model, division=EIGHT)
    out = model(x)
    assert torch.equal(out, value)
    out.float().square().sum().backward()
    torch.testing.assert_close(weight.grad, exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("p", [torch.full((1,), 2.0), torch.linspace(1, 3, 64)])
def test_an_exponent_that_learns_gets_its_gradient(p):
    x, p = (torch.rand(8, 64) + 0.5).requires_grad_(), nn.Parameter(p)

    def run():
        with forward_save.saving(division=True):
            return x.pow(p)

    assert torch.equal(gradient(run, p), gradient(lambda: x.pow(p), p))


class Act(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x)


class Warm(nn.Module):
    def __init__(self, t):
        super().__init__()
        self.register_buffer("t", torch.tensor(t))

    def forward(self, x):
        return torch.tanh(x * self.t)


class Inner(nn.Module):
    def __init__(self, *slopes):
        super().__init__()
        self.slopes, self.inner = slopes, nn.ModuleList([Warm(slope) for slope in slopes])

    def forward(self, x):
        return torch.stack([own(x) for own in self.inner]).sum(0) * self.slopes[0]


class Swish(nn.Module):
    def __init__(self):
        super().__init__()
        self.beta = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


for kind in (Act, Warm, Inner, Swish):
    forward_save.register(kind, "activation")


def slopes(run):
    """Return derivatives between -2 and 2."""
    x = torch.linspace(-2, 2, 512, requires_grad=True)
    run(x).sum().backward()
    assert x.grad is not None
    return x.grad


def test_activations_of_one_class_that_differ_have_tables_of_their_own():
    own = [Act(torch.sin), Act(torch.cos), Warm(1.0), Warm(4.0), Inner(1.0), Inner(2.0, 3.0)]
    model = nn.Sequential(*copy.deepcopy(own))
    forward_save.convert(model, few_bit=8)
    for exact, made in zip(own, model, strict=True):
        torch.testing.assert_close(slopes(made), slopes(exact), rtol=0, atol=0.2)
    model[2].t.fill_(4.0)
    torch.testing.assert_close(slopes(model[2]), slopes(own[3]), rtol=0, atol=0.1)


def test_an_activation_that_learns_stays_as_it_is():
    model = nn.Sequential(Swish(), nn.GELU())
    report = forward_save.convert(model, few_bit=3)
    assert [(row.layer, row.reason) for row in report.kept] == [
        ("0", "a parameter of it learns, to which no table gives a gradient")
    ]
    forward_save.revert(model)
    model[0].beta.requires_grad_(False)
    assert len(forward_save.convert(model, few_bit=8).replaced) == 2
    model[0].beta.requires_grad_()
    assert gradient(lambda: model[0](torch.ones(4, requires_grad=True)), model[0].beta) > 0


def test_a_class_that_is_patched_later_runs_what_it_has_then():
    class Patched(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(8, 8)

        def forward(self, x):
            return self.l(x)

    forward_save.convert(Patched(), division=True)
    before = Patched()
    forward_save.convert(before, division=True)
    Patched.forward = lambda self, x: 100 * self.l(x)
    after, x = Patched(), torch.randn(4, 8)
    exact = after(x)
    forward_save.convert(after, division=True)
    assert torch.equal(after(x), exact)
    assert torch.equal(before(x), 100 * before.l(x))


@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize(
    "layer", [nn.Linear(64, 64), nn.Conv1d(256, 4, 1), nn.LayerNorm(64), nn.RMSNorm(64)]
)
def test_layers_keep_parameters_as_they_are(layer, is_autocast):
    class Queries(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.layer = nn.Parameter(torch.randn(256, 64)), copy.deepcopy(layer)

        def forward(self, x):
            return self.layer(self.q) + x

    model, x = Queries(), torch.zeros(64)

    def run():
        with torch.autocast("cpu", torch.bfloat16, is_autocast):
            return model(x).float()

    exact = [gradient(run, model.q), gradient(run, model.layer.weight)]
    forward_save.convert(model, division=True)
    tolerance = 0.05 if is_autocast else 1e-4
    for own, p in zip(exact, (model.q, model.layer.weight), strict=True):
        torch.testing.assert_close(gradient(run, p), own, rtol=tolerance, atol=tolerance * 50)


def test_norms_of_one_class_need_not_all_have_a_weight():
    class Plain(nn.Module):
        def __init__(self, has_weight):
            super().__init__()
            self.eps = 1e-6
            if has_weight:
                self.weight = nn.Parameter(torch.ones(16))

        def forward(self, x):
            out = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
            return out * self.weight if hasattr(self, "weight") else out

    Plain.__module__, Plain.__name__ = "transformers.models.mine", "PlainRMSNorm"
    own = [Plain(True), Plain(False)]
    assert [known.known(norm) is None for norm in own] == [False, True]
    model, x = nn.Sequential(*own), torch.randn(8, 16)
    exact = model(x)
    forward_save.convert(model, division=True)
    assert torch.equal(model(x), exact)


def test_rows_of_views_are_drawn_of_each():
    model, x = nn.ModuleList([nn.Linear(16, 4), nn.Linear(8, 4)]), torch.randn(8, 16)
    forward_save.convert(model, division={"rows": 0.5})
    (model[0](x).sum() + model[1](x.view(16, 8)).sum()).backward()
    assert [p.grad.shape for p in model.parameters() if p.grad is not None] == [
        p.shape for p in model.parameters()
    ]


def test_a_weight_that_is_drawn_is_read_once():
    class Drop(nn.Module):
        def forward(self, weight):
            return F.dropout(weight, 0.5)

    model = nn.Sequential(nn.BatchNorm1d(16))
    nn.utils.parametrize.register_parametrization(model[0], "weight", Drop())
    x = torch.randn(8, 16)
    torch.manual_seed(0)
    exact = model(x)
    forward_save.convert(model, division=True)
    torch.manual_seed(0)
    assert torch.equal(model(x), exact)


def test_a_first_layer_whose_weight_is_made_keeps_less():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 4, bias=False)))
    forward_save.convert(model, division=True)
    x, kept = torch.randn(1024, 64), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(x)
    assert not [t for t in kept if t.numel() == x.numel()]


def test_weights_of_one_row_and_sparse_features_are_torchs():
    x, w = torch.randn(4, 16), nn.Parameter(torch.randn(16))
    with forward_save.saving(division=True):
        assert F.linear(x, w).shape == (4,)
    layer = nn.Linear(16, 4)
    exact = gradient(lambda: layer(x.to_sparse()), layer.weight)
    forward_save.convert(layer, division=True)
    assert torch.equal(gradient(lambda: layer(x.to_sparse()), layer.weight), exact)
