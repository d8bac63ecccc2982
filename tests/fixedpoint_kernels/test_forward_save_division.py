"""Whole models whose activations are kept in few bits."""

import copy
import pickle
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fixedpoint_kernels import forward_save


class Block(nn.Module):
    """A residual block and a head; the block's input feeds two convolutions."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.act = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.shortcut = nn.Conv2d(8, 8, 1)
        self.pool = nn.MaxPool2d(2)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8 * 16, 5)

    def features(self, x):
        x = self.act(self.first(x))
        return self.act(self.norm(self.conv(x)) + self.shortcut(x))

    def forward(self, x):
        return self.head(self.drop(self.pool(self.features(x))).flatten(1))


def build(**settings):
    torch.manual_seed(2)
    model = Block()
    if settings:
        forward_save.convert(model, **settings)
    return model


def images(n=4):
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(5))


def step(model, x, rng=7):
    torch.manual_seed(rng)
    y = model(x)
    y.square().sum().backward()
    return y.detach(), [p.grad.clone() for p in model.parameters()]


def error(got, want):
    a, b = (torch.cat([g.flatten() for g in gs]) for gs in (got, want))
    return float((a - b).norm() / b.norm())


def exact_bits(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def kept_dtypes(model, x):
    """Return how many elements of each type are kept, parameters apart."""
    own = {p.data_ptr() for p in model.parameters()}
    found = {}

    def note(t):
        if t.data_ptr() not in own:
            found[t.data_ptr()] = t
        return t

    with saved_tensors_hooks(note, lambda t: t):
        y = model(x)
    counts = Counter()
    for t in found.values():
        counts[t.dtype] += t.numel()
    del y
    return counts


DIVISION = {"block": 4, "bits": 2}


def test_values_are_torchs_and_gradients_near():
    x = images()
    value, want = step(build(), x)
    errors = []
    for bits in (2, 4, 8):
        got_value, got = step(build(division={"block": 4, "bits": bits}), x)
        exact_bits(got_value, value)
        errors.append(error(got, want))
    assert errors[0] > 4 * errors[1] > 16 * errors[2] > 0  # each bit halves the step


def test_a_tensor_that_two_layers_keep_is_packed_once():
    model = build(division=DIVISION)
    counts = kept_dtypes(model, images())
    n = 4 * 8 * 64
    maps = 4 * 3 * 64, n, n, 4 * 8 * 16  # image, both convolutions' input, norm's input, head's
    index = 4 * 8 * 16
    assert counts[torch.uint8] == sum(maps) // 4 + index
    assert counts[torch.float32] == 2 * 8  # the statistics of the norm
    assert counts[torch.int32] == -(2 * n // 1024) * -32 + 32  # two masks, and dropout's
    assert forward_save.state(model) == {"seed": 0, "count": 4}


def of_one_norm(make, x, bits):
    """Return gradients of input and parameters, with the layer converted and exact."""
    noise, found = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)), []
    for settings in ({"division": {"bits": bits}}, None):
        model, given = nn.Sequential(nn.Identity(), make()), x.clone().requires_grad_()
        if settings:
            forward_save.convert(model, **settings)
        (model(given) * noise).sum().backward()
        found.append([given.grad, *(p.grad for p in model.parameters())])
    return found


@pytest.mark.parametrize("shape", [(64, 32), (32, 32), (64, 32, 1, 1)])
@pytest.mark.parametrize(("bits", "bound"), [(2, 1.0), (8, 0.02)])  # 3 and 255 steps of a range
def test_columns_of_several_scales_have_a_range_each(shape, bits, bound):
    scales = 10 ** torch.linspace(-2, 4, 32)
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))[: shape[0]] * scales
    norm = {2: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    got, want = of_one_norm(lambda: norm(32), x.view(shape), bits)
    for a, b in zip(got, want, strict=True):
        assert error(a, b) < bound


@pytest.mark.parametrize("groups", [8, 64, 128])
@pytest.mark.parametrize(("bits", "bound"), [(2, 1.0), (8, 0.02)])  # 3 and 255 steps of a range
@pytest.mark.parametrize("pixels", [(), (1, 1)])
def test_groups_without_pixels_have_a_range_each(groups, bits, bound, pixels):
    x = torch.randn(64, 256, *pixels, generator=torch.Generator().manual_seed(0))
    got, want = of_one_norm(lambda: nn.GroupNorm(groups, 256), x, bits)
    for a, b in zip(got, want, strict=True):
        assert error(a, b) < bound


def test_groups_of_one_number_are_exact():
    got, want = of_one_norm(lambda: nn.GroupNorm(64, 64), torch.randn(8, 64), 2)
    exact_bits(got, want)


def test_a_norm_does_not_take_a_pack_whose_planes_are_coarser():
    """The linear layer packs rows of all groups before the norm asks for its own."""
    torch.manual_seed(0)
    linear, norm = nn.Linear(256, 1), nn.GroupNorm(64, 256)
    model = nn.ModuleList([linear, norm])
    x = torch.randn(64, 256, requires_grad=True)
    (want,) = torch.autograd.grad(norm(x * 1).pow(3).sum(), x)
    forward_save.convert(model, division={"bits": 8})
    y = x * 1
    loss = 0 * linear(y).sum() + norm(y).pow(3).sum()
    assert error(torch.autograd.grad(loss, x)[0], want) < 0.05
    assert forward_save.state(model)["count"] == 2


def test_a_tensor_written_to_is_packed_again():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8, bias=False) for _ in range(3))

        def forward(self, x):
            y = self.a(x)
            z = self.b(y)
            y.mul_(-3)
            return z + self.c(y)

    torch.manual_seed(0)
    model, x = Model(), torch.randn(6, 8)
    forward_save.convert(model, division={"bits": 8})
    model(x).sum().backward()
    got = [model.b.weight.grad, model.c.weight.grad]
    y = model.a(x).detach()
    want = [y.sum(0).expand(8, 8), -3 * y.sum(0).expand(8, 8)]
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.05)  # 255 steps of the range


@pytest.mark.parametrize("requires_grad", [False, True])
def test_nothing_stays_on_a_tensor_of_the_user(requires_grad):
    model, x = build(division=DIVISION), images().requires_grad_(requires_grad)
    _, first = step(model, x)
    assert not vars(x)
    model.zero_grad()
    assert error(step(model, x)[1], first) > 0.01  # its noise is new


def test_random_numbers_of_the_user_are_untouched():
    states = []
    for model in (build(), build(division=DIVISION, seed=3)):
        step(model, images())
        states.append(torch.get_rng_state())
    exact_bits(*states)


def test_noise_is_of_seed_and_count():
    x = images()
    first, second = (step(build(division=DIVISION, seed=1), x)[1] for _ in range(2))
    exact_bits(first, second)
    assert error(step(build(division=DIVISION, seed=2), x)[1], first) > 0.01
    model = build(division=DIVISION, seed=1)
    step(model, x)
    model.zero_grad()
    assert error(step(model, x)[1], first) > 0.01


def test_state_continues_the_noise():
    x = images()
    model = build(division=DIVISION, seed=1)
    step(model, x)
    state, twin = forward_save.state(model), build(division=DIVISION, seed=9)
    twin.load_state_dict(model.state_dict())
    forward_save.load_state(twin, state)
    for m in (model, twin):
        m.zero_grad()
    exact_bits(step(twin, x), step(model, x))
    assert forward_save.state(build(few_bit=3)) == {}
    with pytest.raises(ValueError, match=r"must have \['count', 'seed'\], got \[\]"):
        forward_save.load_state(twin, {})


def test_parts_converted_one_by_one_have_a_state_each():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for i, part in enumerate(model):
        forward_save.convert(part, division=DIVISION, seed=i)
    model(torch.randn(2, 4)).sum().backward()
    with pytest.raises(ValueError, match="one conversion, got layers '0' and '1' of two"):
        forward_save.state(model)
    assert [forward_save.state(part) for part in model] == [
        {"seed": 0, "count": 1},
        {"seed": 1, "count": 1},
    ]
    forward_save.revert(model)
    assert type(model[1]) is nn.Linear


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_has_the_same_noise_to_come_and_its_own_count(again):
    model, x = build(division=DIVISION, seed=4), images()
    twin = again(model)
    exact_bits(step(twin, x), step(model, x))
    assert forward_save.state(twin) == forward_save.state(model)
    step(twin, x)
    assert forward_save.state(twin)["count"] == 2 * forward_save.state(model)["count"]
    forward_save.revert(twin)
    assert [type(m) for m in twin.modules()] == [type(m) for m in build().modules()]


def test_reverting_leaves_no_trace():
    model = build()
    before = [{n: id(v) for n, v in vars(m).items()} for m in model.modules()]
    keys = list(model.state_dict())
    forward_save.convert(model, division=DIVISION, few_bit=3)
    assert list(model.state_dict()) == keys
    forward_save.revert(model)
    assert [{n: id(v) for n, v in vars(m).items()} for m in model.modules()] == before
    exact_bits(step(model, images()), step(build(), images()))


def test_gradients_accumulate():
    model, x = build(division=DIVISION), images()
    _, first = step(model, x)
    _, both = step(model, x)
    model.zero_grad()
    forward_save.load_state(model, {"seed": 0, "count": 4})
    _, second = step(model, x)
    torch.testing.assert_close(both, [a + b for a, b in zip(first, second, strict=True)])


def test_two_forwards_before_backward():
    model, x = build(division=DIVISION), images(8)
    model.drop.p = 0.0
    model.norm.eval()
    (model(x[:4]).square().sum() + model(x[4:]).square().sum()).backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    forward_save.load_state(model, {"seed": 0, "count": 0})
    for part in x.split(4):
        model(part).square().sum().backward()
    torch.testing.assert_close(got, [p.grad for p in model.parameters()], rtol=1e-5, atol=1e-4)


def test_weights_tied_between_layers():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    forward_save.convert(model, division=DIVISION)
    assert model[2].weight is model[0].weight
    model(torch.randn(3, 8)).sum().backward()
    assert model[0].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant):
    class Checkpointed(Block):
        def features(self, x):
            return checkpoint(super().features, x, use_reentrant=use_reentrant)

    x = images().requires_grad_()  # a reentrant checkpoint asks for it
    torch.manual_seed(2)
    model = Checkpointed()
    plain = build()
    plain.norm.eval()
    model.norm.eval()  # a second forward pass would move the statistics
    value, want = step(plain, x)
    forward_save.convert(model, division={"block": 4, "bits": 8})
    got_value, got = step(model, x)
    exact_bits(got_value, value)
    assert error(got, want) < 0.01  # 8 bits
    assert kept_dtypes(model, x)[torch.int32] == 32 + 0 * use_reentrant  # dropout's mask alone


def test_save_on_cpu_sees_what_is_kept():
    model, x = build(division=DIVISION), images()
    torch.manual_seed(7)
    with save_on_cpu():
        y = model(x)
    y.square().sum().backward()
    exact_bits([p.grad for p in model.parameters()], step(build(division=DIVISION), x)[1])


@pytest.mark.parametrize("way", ["backward", "grad"])
@pytest.mark.parametrize("head", [torch.square, torch.neg])
def test_differentiating_twice_is_refused(head, way):
    """Also where the gradient that comes in is a constant: nobody may take the second one for 0."""
    model, x = build(division=DIVISION), images().requires_grad_()
    (gradient,) = torch.autograd.grad(head(model(x)).sum(), x, create_graph=True)
    loss = model(x).sum() + gradient.square().sum()
    with pytest.raises(RuntimeError, match=r"no second derivative.* forward_save.revert"):
        loss.backward() if way == "backward" else torch.autograd.grad(loss, [*model.parameters()])


def test_hessians_are_refused():
    """They are asked for by what the input is a view of."""
    layer = nn.Linear(8, 4)
    forward_save.convert(layer, division=DIVISION)
    with pytest.raises(RuntimeError, match=r"no second derivative.* forward_save.revert"):
        torch.autograd.functional.hessian(lambda x: layer(x).sum(), torch.randn(3, 8))


EXACT = {
    "dropout": (nn.Dropout(0.3), (2, 3, 8, 8)),
    "max pool": (nn.MaxPool2d(3, 2, 1), (2, 3, 8, 8)),
    "max pool, 1-D": (nn.MaxPool1d(2), (2, 3, 8)),
    "mean pool": (nn.AvgPool2d(2), (2, 3, 8, 8)),
    "mean pool, 3-D": (nn.AvgPool3d(2), (2, 3, 4, 4, 4)),
    "adaptive pool": (nn.AdaptiveAvgPool2d(3), (2, 3, 8, 8)),
    "adaptive pool, 3-D": (nn.AdaptiveAvgPool3d(3), (2, 3, 4, 4, 4)),
}


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("name", EXACT)
def test_second_derivatives_go_through_what_is_exact(name, is_last):
    layer, shape = EXACT[name]
    if is_last and len(shape) != 4:
        pytest.skip("channels last is of four dimensions")
    torch.manual_seed(3)
    x, v = torch.randn(shape), torch.randn(shape)
    if is_last:
        x = x.to(memory_format=torch.channels_last)
    found = []
    for settings in ({"division": True}, None):
        model = nn.Sequential(copy.deepcopy(layer))
        if settings:
            forward_save.convert(model, **settings)

        def loss(x, model=model):
            torch.manual_seed(4)
            return model(x).exp().sum()

        found.append(torch.autograd.functional.vhp(loss, x, v)[1])
    got, want = found
    assert want.norm() > 0
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)  # sums in another order


@pytest.mark.parametrize("name", EXACT)
def test_few_bits_behind_what_is_exact_refuse_to_be_differentiated_twice(name):
    layer, shape = EXACT[name]
    model = nn.Sequential(copy.deepcopy(layer), nn.Flatten(), nn.LazyLinear(2), nn.Tanh())
    x = torch.randn(shape)
    model(x)
    forward_save.convert(model, few_bit=3, division=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.functional.hessian(lambda x: model(x).square().sum(), x)


LAYERS = {
    "linear": (nn.Linear(8, 4), (3, 8)),
    "convolution": (nn.Conv1d(2, 4, 3), (3, 2, 8)),
    "transposed": (nn.ConvTranspose1d(2, 4, 3), (3, 2, 8)),
    "batch norm": (nn.BatchNorm1d(8), (3, 8)),
    "layer norm": (nn.LayerNorm(8), (3, 8)),
    "group norm": (nn.GroupNorm(2, 8), (3, 8, 8)),
    "rms norm": (nn.RMSNorm(8), (3, 8)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_gradient_of_a_single_layer_is_no_constant(name):
    layer, shape = LAYERS[name]
    model, x = nn.Sequential(copy.deepcopy(layer)), torch.randn(shape, requires_grad=True)
    forward_save.convert(model, division=True)
    y = model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(gradient.square().sum(), model[0].weight)


@pytest.mark.parametrize("name", [*EXACT, *LAYERS])
def test_gradients_of_many_at_once(name):
    layer, shape = (EXACT | LAYERS)[name]
    model, x = nn.Sequential(copy.deepcopy(layer)), torch.randn(shape, requires_grad=True)
    forward_save.convert(model, division=True)
    y = model(x)
    many = torch.randn(3, *y.shape)
    want = [torch.autograd.grad(y, x, each, retain_graph=True)[0] for each in many]
    (got,) = torch.autograd.grad(y, x, many, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(got, torch.stack(want))  # sums in another order
    if "pool" not in name:  # whose backward torch itself differentiates
        with pytest.raises(RuntimeError, match=r"create_graph=True.*: ask for one gradient after"):
            torch.autograd.grad(y, x, many, is_grads_batched=True, create_graph=True)


def test_gradients_may_be_told_to_have_a_graph_and_none_is_asked_for():
    model, x = build(division=DIVISION), images()
    want = step(model, x)[1]
    model = build(division=DIVISION)
    torch.manual_seed(7)  # of dropout
    loss = model(x).square().sum()
    got = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    exact_bits([gradient.detach() for gradient in got], want)


def test_torch_func_is_refused_by_name_and_exact_in_eval_mode():
    model, x = build(division=DIVISION), images()

    def loss(parameters, model):
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    weights = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.raises(TypeError, match=r"layer '.*torch.func: use it in eval mode"):
        torch.func.grad(loss)(weights, model)
    with pytest.raises(TypeError, match=r"torch.func: use it in eval mode"):
        torch.func.jvp(model, (x,), (x,))
    exact = build().eval()
    exact.load_state_dict(model.state_dict())
    want = torch.func.grad(loss)(weights, exact)
    exact_bits([*torch.func.grad(loss)(weights, model.eval()).values()], [*want.values()])


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_forward_mode_is_refused_by_name_and_exact_in_eval_mode(name, is_leaf):
    layer, shape = LAYERS[name]
    model, x = nn.Sequential(copy.deepcopy(layer)), torch.randn(shape)
    forward_save.convert(model, division=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.clone().requires_grad_(is_leaf), x)
        with pytest.raises(
            TypeError, match=r"in reverse mode, got .*torch.func: use it in eval mode, .*revert"
        ):
            model(dual)
        got = forward_ad.unpack_dual(model.eval()(dual)).tangent
        forward_save.revert(model)
        exact_bits(got, forward_ad.unpack_dual(model(dual)).tangent)


@pytest.mark.parametrize("name", EXACT)
def test_what_is_exact_is_torchs_in_transformations(name):
    layer, shape = EXACT[name]
    x, model, found = torch.randn(shape), nn.Sequential(copy.deepcopy(layer)), []
    forward_save.convert(model, division=True)
    for run in (model, layer):
        torch.manual_seed(7)
        gradient = torch.func.grad(lambda x, run=run: run(x).square().sum())(x)
        with forward_ad.dual_level():
            torch.manual_seed(7)
            dual = forward_ad.make_dual(x.clone().requires_grad_(), x)
            found.append([gradient, forward_ad.unpack_dual(run(dual)).tangent])
    exact_bits(*found)


def test_autocast():
    x = images()
    with torch.autocast("cpu"):
        value, want = step(build(), x)
        got_value, got = step(build(division={"block": 4, "bits": 8}), x)
    exact_bits(got_value, value)
    assert {g.dtype for g in got} == {torch.float32}
    assert error(got, want) < 0.02  # 8 bits of a map, 8 bits of bfloat16


def test_channels_last():
    x = images().to(memory_format=torch.channels_last)
    plain, model = build(), build(division={"block": 4, "bits": 8})
    for m in (plain, model):
        m.to(memory_format=torch.channels_last)
    (value, want), (got_value, got) = step(plain, x), step(model, x)
    exact_bits(got_value, value)
    assert error(got, want) < 0.01


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_graph_breaks(backend):
    torch._dynamo.reset()
    model, x = build(division=DIVISION), images()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    value, want = step(build(), x)
    for count in (1, 2):
        model.zero_grad()
        got_value, got = step(compiled, x)
        torch.testing.assert_close(got_value, value)  # a backend may fuse
        assert 0 < error(got, want) < 1
        assert forward_save.state(model)["count"] == 5 * count  # two layers keep their own


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo
def test_a_compiled_dropout_has_the_probability_of_now():
    torch._dynamo.reset()
    layer, x = nn.Dropout(0.25), torch.randn(64, 32)
    forward_save.convert(layer, division=DIVISION)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for layer.p in (0.25, 0.5, 0.6):
        found = []
        for run in (compiled, layer):
            torch.manual_seed(7)
            leaf = x.clone().requires_grad_()
            run(leaf).square().sum().backward()
            found.append(leaf.grad)
        exact_bits(*found)


def _train(rank, folder):
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    forward_save.convert(model, division=DIVISION, seed=rank)
    model = DistributedDataParallel(model)
    for _ in range(2):
        model(torch.randn(4, 8)).square().sum().backward()
    torch.save([p.grad for p in model.parameters()], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow  # two processes import torch
def test_data_parallel(tmp_path):
    mp.spawn(_train, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    exact_bits(first, second)
    assert all(g.abs().sum() > 0 for g in first)


def test_the_report_names_all_that_still_keeps_a_tensor():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.smooth, self.pool = (
                nn.Linear(8, 8),
                nn.GELU(),
                nn.AdaptiveAvgPool1d(1),
            )
            self.attention = nn.MultiheadAttention(8, 2)
            self.table = nn.PReLU()
            self.picks = nn.MaxPool1d(2, return_indices=True)
            self.wide = nn.MaxPool2d(17)

        def forward(self, x):
            y = self.smooth(self.linear(x))
            return (y @ y.transpose(-1, -2)).softmax(-1)

    report = forward_save.convert(Odd(), division=DIVISION, sample_input=torch.randn(2, 3, 8))
    assert [r.layer for r in report.replaced] == ["linear", "attention"]
    assert {k.layer: k.reason for k in report.kept} == {
        "smooth": "few_bit is not asked for",
        "pool": "it keeps no tensor",
        "table": "its slope learns",
        "picks": "its indices are asked for",
        "wide": "its window has 289 places, more than 8 bits",
    }
    assert {(c.layer, c.function) for c in report.calls} == {("", "matmul"), ("", "softmax")}
    assert "(model)  softmax  values of 8 bits, one range a row" in str(report)
    twin = Odd()
    report = forward_save.convert(
        twin, division=True, sample_input=torch.randn(2, 3, 8), calls=False
    )
    assert "(model)  softmax  no small form is known of it, or it is not asked for" in str(report)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 3}, r"bits of division must be one of \(1, 2, 4, 8\), got 3"),
        ({"block": 0}, "block must be a whole number of at least 1, got 0"),
        ({"method": "jpeg"}, "method must be one of division, low, high, .*, got 'jpeg'"),
        ({"edge": 4}, "division takes block, bits, method, rows, got edge"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        build(division=settings)
    with pytest.raises(ValueError, match="seed and stream must be 0"):
        build(division=True, seed=-1)


SAMPLE = torch.ones(4, 8).numpy()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: forward_save.convert(m, few_bit=True, plan=True), ValueError, "a plan alone"),
        (lambda m: forward_save.convert(m, plan="x"), TypeError, "forward_save.plan .* got 'x'"),
        (
            lambda m: forward_save.convert(m, few_bit=3, sample_input=SAMPLE),
            TypeError,
            "a sample must be .* got ndarray: write torch.from_numpy",
        ),
        (
            lambda m: forward_save.plan(m, SAMPLE, budget_bytes=100),
            TypeError,
            "a sample must be .* got ndarray: write torch.from_numpy",
        ),
        (
            lambda m: forward_save.plan(None, SAMPLE, budget_bytes=100),
            TypeError,
            "plan needs a model .* got NoneType",
        ),
        (lambda m: forward_save.revert(None), TypeError, "revert needs a model .* got NoneType"),
        (lambda m: forward_save.state(None), TypeError, "state needs a model .* got NoneType"),
        (lambda m: forward_save.load_state({}, m), TypeError, "load_state needs a model .* dict"),
    ],
)
def test_what_is_no_model_plan_or_sample_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call(nn.Sequential(nn.Linear(8, 8), nn.GELU()))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("settings", [{"few_bit": 3}, {"division": True}])
@pytest.mark.parametrize("is_part", [False, True])
def test_jit_script_is_refused_by_name(settings, is_part):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    forward_save.convert(model, **settings)
    with pytest.raises(RuntimeError, match=r"torch.jit.script .* forward_save.revert\(model\)"):
        torch.jit.script(nn.Sequential(model) if is_part else model)
    forward_save.revert(model)
    assert torch.jit.script(model)(torch.ones(2, 8)).shape == (2, 8)


def test_a_map_of_complex_numbers_names_the_layer():
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.cfloat))
    forward_save.convert(model, division=DIVISION)
    with pytest.raises(TypeError, match=r"layer '0': .* must be floating, got torch.complex64"):
        model(torch.randn(2, 4, dtype=torch.cfloat))


@pytest.mark.parametrize("method", forward_save.METHODS)
def test_other_methods_run_through_the_same_layers(method):
    x = images()
    value, want = step(build(), x)
    got_value, got = step(build(division={"bits": 4, "block": 4, "method": method}), x)
    exact_bits(got_value, value)
    limits = {"low": 1.0, "high": 3.0}
    assert 0 < error(got, want) < limits.get(method, 0.3)


def test_packs_are_shared_by_those_of_one_noise_alone():
    """A noise that is gone may leave its address to the next one."""
    layer, x = nn.Linear(64, 8), (torch.randn(64, 64, requires_grad=True) * 1)
    kept = []
    for seed in range(50):
        forward_save.convert(layer, division=True, seed=seed)
        kept.append(layer(x))
        assert forward_save.state(layer)["count"] == 1
        forward_save.revert(layer)


@pytest.mark.parametrize("is_function", [False, True])
def test_memory_rewritten_behind_autograds_back_is_packed_again(is_function):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            if is_function:
                return F.linear(x, self.a.weight) + F.linear(x, self.b.weight)
            return self.a(x) + self.b(x)

    model = Model()
    forward_save.convert(model, division={"bits": 8})
    x = torch.randn(64, 16)
    alive = model(x)
    assert forward_save.state(model)["count"] == 1
    x.numpy()[:] *= -3
    model(x).sum().backward()
    assert forward_save.state(model)["count"] == 2
    got = [model.a.weight.grad, model.b.weight.grad]
    want = x.sum(0).expand(16, 16)
    torch.testing.assert_close(got, [want, want], rtol=0.02, atol=0.5)  # 255 steps of the range
    assert alive.requires_grad


def test_a_negated_view_is_packed_by_itself():
    first, second = nn.Linear(16, 4), nn.Linear(16, 4)
    model = nn.ModuleList([first, second])
    forward_save.convert(model, division={"bits": 8})
    z = torch.randn(32, 16, dtype=torch.complex64)
    (first(z.imag) + second(z.conj().imag)).sum().backward()
    torch.testing.assert_close(first.weight.grad, -second.weight.grad, rtol=0.02, atol=0.2)


def test_linear_layers_without_inputs():
    layer = nn.Linear(3, 4)
    layer.weight = nn.Parameter(torch.empty(4, 0))
    forward_save.convert(layer, division=True)
    layer(torch.empty(2, 3, 0)).sum().backward()
    assert layer.weight.grad.shape == (4, 0)
    exact_bits(layer.bias.grad, torch.full((4,), 6.0))


def test_values_of_inputs_not_in_one_piece_are_torchs():
    layer = nn.Linear(256, 128)
    twin = copy.deepcopy(layer)
    forward_save.convert(twin, division=True)
    whole = torch.randn(32, 9, 512)
    for x in (whole[..., :256].transpose(0, 1), whole[..., ::2], whole[:1, :, :256]):
        exact_bits(twin(x), layer(x))
