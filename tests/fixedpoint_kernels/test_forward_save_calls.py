"""Functions that a forward calls: torch's values, gradients near, and what each keeps."""

import copy
import inspect
import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from fixedpoint_kernels import few_bit, forward_save
from fixedpoint_kernels.forward_save import handlers, maps, recompute, sample

BOTH = {"few_bit": 3, "division": {"block": 4, "bits": 2}}


def w(*shape):
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))


# each of a tensor (2, 3, 16, 8) that needs a gradient, and parameters
FUNCTIONS = {
    "product": lambda x, p: x * (x + 1),
    "broadcast product": lambda x, p: x * x.mean(-1, keepdim=True),
    "product with a parameter": lambda x, p: x * p[0],
    "product, half": lambda x, p: torch.mul(x.double(), x),
    "square": lambda x, p: x.square() + x.pow(2) + x**2,
    "matmul": lambda x, p: x @ x.mT,
    "matmul with a matrix": lambda x, p: torch.matmul(x, p[1]),
    "broadcast matmul": lambda x, p: x @ x[:, :1].mT,
    "bmm": lambda x, p: torch.bmm(x[0], x[1].mT),
    "softmax": lambda x, p: F.softmax(x, -1) * 1 + x.softmax(dim=-1),
    "attention": lambda x, p: F.scaled_dot_product_attention(x, x + 1, x * 2, is_causal=True),
    "attention with dropout": lambda x, p: F.scaled_dot_product_attention(x, x, x, dropout_p=0.4),
    "attention with a bias": lambda x, p: F.scaled_dot_product_attention(x, x, x, attn_mask=p[2]),
    "glu": lambda x, p: F.glu(x),
    "linear": lambda x, p: F.linear(x, p[1], p[0]),
    "addmm": lambda x, p: torch.addmm(p[0], x.reshape(-1, 8), p[1]),
    "convolution": lambda x, p: F.conv2d(x, p[3], p[4], stride=2, padding=(1, 0)),
    "convolution of one": lambda x, p: F.conv1d(x[0, 0], p[5], groups=16),
    "dropout": lambda x, p: F.dropout(x, 0.3) + F.dropout(x * 1, 0.3, inplace=True),
    "layer norm": lambda x, p: F.layer_norm(x, (8,), p[0], p[0]),
    "rms norm": lambda x, p: F.rms_norm(x, (8,), p[0]),
    "group norm": lambda x, p: F.group_norm(x, 3, p[4], p[4]),
    "batch norm": lambda x, p: F.batch_norm(x, None, None, p[4], p[4], training=True),
    "frozen batch norm": lambda x, p: F.batch_norm(x, p[4].detach(), p[4].detach().exp(), p[4]),
    "layer norm of pixels": lambda x, p: F.layer_norm(scaled(x), (8,), p[0], p[0]),
    "group norm of features": lambda x, p: F.group_norm(scaled(x)[0, 0].T, 4),
    "batch norm of features": lambda x, p: F.batch_norm(features(x), None, None, training=True),
    "frozen batch norm of features": lambda x, p: F.batch_norm(
        features(x), torch.zeros(16), SCALES.square(), p[2][0]
    ),
}
SCALES = 10 ** torch.linspace(-2, 4, 16)


def scaled(x):
    """Return ``x`` with rows of several scales."""
    return x * SCALES[:, None]


def features(x):
    """Return samples without pixels whose columns have several scales."""
    return scaled(x).mT.flatten(0, 2)


def parameters():
    shapes = (8,), (8, 8), (16, 16), (3, 3, 3, 3), (3,), (32, 1, 3)
    return [w(*shape) for shape in shapes]


def run(function, scope=None):
    x = torch.randn(2, 3, 16, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    given = parameters()
    torch.manual_seed(2)
    if scope is None:
        y = function(x * 1, given)
    else:
        with scope:
            y = function(x * 1, given)
    noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    found = torch.autograd.grad((y * noise).sum(), [x, *given], allow_unused=True)
    return y.detach(), [g for g in found if g is not None]


def exact_bits(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.fixture
def whole(monkeypatch):
    """Keep tensors as they are, so that nothing but the formulas is tested."""
    monkeypatch.setattr(handlers.Keeper, "_pack", lambda self, x, *_: maps.whole(x))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_torchs(whole, name):
    scope = forward_save.saving(**BOTH)
    (got, gradients), (want, expected) = run(FUNCTIONS[name], scope), run(FUNCTIONS[name])
    assert scope.handled
    exact_bits(got, want)
    # the same products, added up in another order
    torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_near_with_eight_bits(name):
    scope = forward_save.saving(division={"bits": 8})
    (got, gradients), (want, expected) = run(FUNCTIONS[name], scope), run(FUNCTIONS[name])
    exact_bits(got, want)
    for a, b in zip(gradients, expected, strict=True):
        assert (a - b).norm() < 0.05 * b.norm()  # 8 bits of a range


def test_a_linear_function_takes_any_bias():
    for shape, bias in [((16, 8), (16, 4)), ((16, 8), (1, 4)), ((2, 16, 8), (16, 4)), ((8,), (1,))]:
        x = w(*shape)

        found = []
        for scope in (nullcontext(), forward_save.saving(division={"bits": 8})):
            given = [w(4, 8), w(*bias)]
            with scope:
                y = F.linear(x * 1, *given)
            found.append((y, torch.autograd.grad(y.square().sum(), [x, *given])))
        exact_bits(found[1][0], found[0][0])
        torch.testing.assert_close(found[1][1], found[0][1], rtol=0.05, atol=0.05)  # 8 bits


def test_few_bit_activations_are_those_of_the_function():
    x = torch.randn(1000, requires_grad=True)
    for name, call in {
        "gelu": lambda x: F.gelu(x, approximate="tanh"),
        "silu": F.silu,
        "sigmoid": torch.Tensor.sigmoid,
        "elu": lambda x: F.elu(x, 0.5),
        "relu": torch.relu_,
    }.items():
        with forward_save.saving(**BOTH):
            y = call(x * 1)
        got = torch.autograd.grad(y.sum(), x)[0]
        options = {"gelu": {"approximate": "tanh"}, "elu": {"alpha": 0.5}}.get(name, {})
        want = getattr(few_bit, name)(x, bits=3, **options)
        exact_bits(y, want)
        exact_bits(got, torch.autograd.grad(want.sum(), x)[0])


def test_noise_of_a_product_is_without_bias():
    x, total = torch.randn(4, 64), torch.zeros(4, 64)
    for seed in range(400):
        a, b = x.clone().requires_grad_(), (x + 1).requires_grad_()
        with forward_save.saving(division={"bits": 1}, seed=seed):
            y = (a * 1) * (b * 1)
        total += torch.autograd.grad(y.sum(), a)[0]
    # residuals of 2 bits: steps below 2 where values span 6, deviation at most half a step
    torch.testing.assert_close(total / 400, x + 1, rtol=0, atol=5 * 1.0 / 20)


class Gated(nn.Module):
    """A gated block with attention of its own, as transformers write them."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.gate = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(64, 128)
        self.down, self.scale = nn.Linear(128, 64), nn.Parameter(torch.ones(64))
        self.drop = nn.Dropout(0.1)

    def forward(self, x, factor=1.0):
        """Attend, then gate."""
        h = self.norm(x)
        heads = h.view(*h.shape[:2], 4, 16).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads)
        y = y.transpose(1, 2).reshape(x.shape) * self.scale
        return x + self.drop(self.down(F.silu(self.gate(y)) * self.up(y))) * factor


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), Gated(), Gated())


X = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(9))


def kept(model):
    return sample.observe(model, X).size_bytes


def step(model, x=X):
    model.zero_grad()
    torch.manual_seed(5)
    y = model(x)
    y.square().sum().backward()
    return y.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def test_a_conversion_takes_calls_along_and_gives_them_back():
    model = build()
    before, (value, want) = kept(model), step(model)
    attributes = [{n: id(v) for n, v in vars(m).items()} for m in model.modules()]
    forward_save.convert(model, few_bit=3, division=True, calls=False)
    modules = kept(model)
    forward_save.revert(model)
    report = forward_save.convert(model, few_bit=3, division=True, sample_input=X)
    assert forward_save.state(model) == {"seed": 0, "count": 0}  # the sample used none
    assert kept(model) < 0.45 * modules < 0.45 * before
    got_value, got = step(model)
    exact_bits(got_value, value)
    assert 0 < (got - want).norm() < want.norm()
    found = {(c.layer, c.function): c.keeps for c in report.calls}
    assert found["1", "silu"] == "3 bits an element"
    assert "computed again" in found["2", "scaled_dot_product_attention"]
    assert "residuals of 4 bits" in found["2", "mul"]
    assert not [call for call, keeps in found.items() if not keeps]
    forward_save.revert(model)
    assert [{n: id(v) for n, v in vars(m).items()} for m in model.modules()] == attributes
    assert (kept(model), type(model[1])) == (before, Gated)


def test_the_scope_alone_does_what_a_conversion_does():
    model = build()
    before = kept(model)
    wrapped = Wrapped(model)
    assert kept(wrapped) < before / 5
    assert set(wrapped.scope.handled) >= {"linear", "layer_norm", "mul", "silu", "dropout"}


class Wrapped(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.scope = model, forward_save.saving(few_bit=3, division=True)

    def forward(self, x):
        with self.scope:
            return self.model(x)


def test_eval_mode_is_exact():
    model = build()
    forward_save.convert(model, few_bit=1, division={"bits": 1})
    plain = build()
    for m in (model, plain):
        m.eval()
    exact_bits(step(model), step(plain))
    assert forward_save.state(model)["count"] == 0


def test_a_part_in_eval_mode_is_exact_inside_of_a_model_that_trains():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = build()
            self.model[1].drop.p = 0.0
            self.model[2].eval()

        def forward(self, x):
            return self.model(x)

    plain, model = Root(), Root()
    forward_save.convert(model, few_bit=1, division={"bits": 1})
    seen = []
    for m in (model, plain):
        y = m(X)
        part = list(m.model[2].parameters())
        seen.append((y, torch.autograd.grad(y.square().sum(), part)))
    exact_bits(*seen)
    assert forward_save.state(model)["count"] > 0


@pytest.mark.parametrize("is_trained", [False, True])
def test_batch_norm_in_eval_mode_keeps_no_map_in_a_model_that_trains(is_trained):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(8).requires_grad_(is_trained)

        def forward(self, x):
            return self.norm(x * 1).sum((2, 3))

    model, x = Model(), torch.randn(4, 8, 16, 16, requires_grad=True)
    model.norm.running_var.uniform_(1, 2)
    model.train().norm.eval()
    want = torch.autograd.grad(model(x).square().sum(), x)[0]
    whole = sample.observe(model, x).size_bytes
    forward_save.convert(model, division=True)
    got = torch.autograd.grad(model(x).square().sum(), x)[0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)  # the same formula
    packed = 4 * 8 * (2 * 4 + 256 // 4 + 4)
    assert whole >= 4 * 8 * 256 * 4
    assert sample.observe(model, x).size_bytes == (packed if is_trained else 0)


def test_frozen_layers_keep_nothing():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), Low(), nn.Linear(64, 64))
    for p in (*model[0].parameters(), *model[2].parameters(), model[1].base.weight):
        p.requires_grad_(False)
    forward_save.convert(model, division=True)
    rows = 2 * 32
    inputs = rows * (2 * 8 + 64 // 4 + 4)  # of the first factor
    low = rows * (2 * 1 + 4 // 4 + 4)  # of the second
    assert kept(model) == inputs + low


class Low(nn.Module):
    """A frozen layer with a product of two small matrices beside it, as LoRA has."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(64, 64, bias=False)
        self.a, self.b = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x)) * 2.0


def test_autocast_keeps_less_than_stock():
    model = build()
    want = step_autocast(model)
    with torch.autocast("cpu"):
        before = kept(model)
    forward_save.convert(model, few_bit=8, division={"bits": 8})
    with torch.autocast("cpu"):
        assert kept(model) < before
    value, gradient = step_autocast(model)
    exact_bits(value, want[0])
    assert (gradient - want[1]).norm() < 0.05 * want[1].norm()  # bfloat16, and 8 bits


def step_autocast(model):
    with torch.autocast("cpu"):
        return step(model)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints(use_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = build()

        def forward(self, x):
            y = self.model[0](x)
            return checkpoint(self.inner, y, use_reentrant=use_reentrant)

        def inner(self, y):
            return self.model[2](self.model[1](y)) * y

    model = Checkpointed()
    value, want = step(model)
    forward_save.convert(model, few_bit=8, division={"bits": 8})
    got_value, got = step(model)
    exact_bits(got_value, value)
    assert (got - want).norm() < 0.05 * want.norm()


def test_copies_signatures_and_two_scopes():
    model = build()
    forward_save.convert(model, few_bit=3, division=True)
    assert list(inspect.signature(model[1].forward).parameters) == ["x", "factor"]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        exact_bits(step(twin), step(copy.deepcopy(model)))
        assert kept(twin) == kept(copy.deepcopy(model))
    with forward_save.saving(few_bit=1), forward_save.saving(few_bit=8):
        y = F.gelu(X.clone().requires_grad_())
    assert y.grad_fn.saved_tensors[0].numel() == 8 * 32 * -(X.numel() // -1024)


@pytest.mark.parametrize("name", ["matmul", "mul", "softmax", "layer_norm", "dropout"])
def test_functions_are_torchs_in_transformations(name):
    function = {
        "matmul": lambda x: x @ x.T,
        "mul": lambda x: x * x,
        "softmax": lambda x: F.softmax(x, -1),
        "layer_norm": lambda x: F.layer_norm(x, (64,)),
        "dropout": lambda x: F.dropout(x, 0.5),
    }[name]
    x, found = torch.randn(64, 64), []
    for scope in (forward_save.saving(division=True), nullcontext()):
        with scope, forward_ad.dual_level():
            torch.manual_seed(0)
            tangent = forward_ad.unpack_dual(function(forward_ad.make_dual(x, x))).tangent
            torch.manual_seed(0)
            found.append([tangent, torch.func.grad(lambda x: function(x).square().sum())(x)])
    exact_bits(*found)


def test_gradients_of_many_at_once_go_through_a_product_of_matrices():
    x, weight = torch.randn(2, 40, 30), torch.randn(30, 20, requires_grad=True)
    with forward_save.saving(division=True):
        y = x @ weight
    many = torch.randn(3, *y.shape)
    want = [torch.autograd.grad(y, weight, each, retain_graph=True)[0] for each in many]
    (got,) = torch.autograd.grad(y, weight, many, is_grads_batched=True)
    torch.testing.assert_close(got, torch.stack(want))  # sums in another order


def test_differentiating_twice_is_refused():
    x = torch.randn(4, 64, requires_grad=True)
    for name in ("product", "matmul", "softmax", "attention"):
        for head in (torch.square, torch.neg):  # of which the gradient is a constant
            with forward_save.saving(division=True):
                y = FUNCTIONS[name](torch.randn(2, 3, 16, 8) * x.sum(), parameters())
            (gradient,) = torch.autograd.grad(head(y).sum(), x, create_graph=True)
            with pytest.raises(RuntimeError, match="no second derivative"):
                (x.sum() + gradient.sum()).backward()


def test_what_saving_needs():
    with pytest.raises(ValueError, match="needs few_bit, division, or both"):
        forward_save.saving()
    with pytest.raises(ValueError, match="bits must be 1 to 8"):
        forward_save.saving(few_bit=9)


def test_an_attention_mask_may_have_infinities():
    mask = torch.zeros(16, 16).masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf)
    bias = torch.zeros(16, 16, requires_grad=True)
    x = torch.randn(2, 3, 16, 8, requires_grad=True)
    with forward_save.saving(division=True):
        y = F.scaled_dot_product_attention(x * 1, x * 1, x * 1, attn_mask=bias + mask)
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), [x, bias]))


def test_random_numbers_are_drawn_again_and_nothing_else_moves():
    x = torch.randn(2, 3, 16, 8, requires_grad=True)

    def noisy(x):
        return x * torch.rand_like(x)

    torch.manual_seed(4)
    y = recompute.again(noisy, [x], maps.whole, is_random=True)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    (got,) = torch.autograd.grad(y.sum(), x)
    exact_bits(torch.get_rng_state(), state)
    torch.manual_seed(4)
    exact_bits(got, torch.rand_like(x))


def test_nan_of_a_row_that_is_masked_away_stay_there():
    x = torch.randn(2, 3, 16, 16).requires_grad_()
    row = torch.zeros(2, 3, 16, 16)
    row[0, 0, 2] = float("-inf")
    weights = torch.randn(2, 3, 16, 16)

    def gradient():
        shares = (x + row).softmax(-1).nan_to_num()
        return torch.autograd.grad((shares * weights).sum(), x)[0]

    want = gradient()
    with forward_save.saving(division=True):
        got = gradient()
    exact_bits(got.isnan(), want.isnan())
    assert got.isnan().any(-1).sum() == 1
    assert (got - want).nan_to_num().norm() < 0.05 * want.nan_to_num().norm()
