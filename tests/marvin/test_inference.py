"""Chains in eval mode, and of frozen models: to the bit what their layers compute one by one, or what is defined."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import marvin
from benchmarks import networks
from benchmarks.networks import mobilenet_v2
from fixedpoint_kernels import products
from fixedpoint_kernels.functions import Curve
from fixedpoint_kernels.fused import Pooled, inference
from marvin.integer import convert, inference_run, report
from marvin.integer.formats import rounding_of
from marvin.integer.graph import trace
from marvin.rounder import formats_of
from train.resnet20 import ResNet20

pytestmark = [
    pytest.mark.skipif(
        not products.path().is_own, reason="no own path of products on this processor"
    ),
    pytest.mark.usefixtures("full_memory"),
]


@pytest.fixture
def runs(monkeypatch):
    """How many chains ran in eval mode, and how many gave up."""
    found, own = {"fused": 0, "left": 0}, inference.run

    def counted(*args):
        outputs = own(*args)
        found["left" if outputs is None else "fused"] += 1
        return outputs

    monkeypatch.setattr(inference, "run", counted)
    return found


def batch(seed, n=8):
    generator = torch.Generator().manual_seed(100 + seed)
    x = torch.randn(n, 3, 12, 12, generator=generator)
    return x, torch.randint(0, 4, (n,), generator=generator)


def train(model, optimizer, steps, first=0):
    model.train()
    for i in range(first, first + steps):
        x, y = batch(i)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step(loss=loss)


def trained(model=None, policy=None):
    """Return a model in eval mode that was trained for some steps, and its optimizer."""
    torch.manual_seed(0)
    model = ResNet20(width=8) if model is None else model
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.02, momentum=0.9)
    optimizer = marvin.Quantized(sgd, policy or marvin.LossBudgetPolicy(), seed=0)
    marvin.quantize_activations(model, optimizer)
    convert(model)
    train(model, optimizer, 5)
    return model.eval(), optimizer


def unfused(model):
    twin = copy.deepcopy(model)
    convert(twin, fused=False)
    return twin


class Parts(nn.Module):
    """Convolutions of other kinds, an activation in between, and sums."""

    def __init__(self, act, drop=0.0):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(16)
        self.each = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False)
        self.bn3 = nn.BatchNorm2d(16, affine=False)
        self.narrow = nn.Conv2d(16, 12, 1, stride=2)
        self.drop, self.act, self.pool = nn.Dropout(drop), act, nn.MaxPool2d(3, 2, 1)
        self.fc = nn.Linear(12, 10)

    def forward(self, x):
        x = self.act(self.conv1(x))
        y = self.drop(self.act(self.bn2(self.conv2(x))))
        x = x + y if self.training else y + x  # the code depends on the mode
        y = self.bn3(self.each(x))
        x = self.act(self.pool(y + x)) if self.act is F.relu6 else self.pool(F.relu(y + x))
        return self.fc(self.narrow(x).mean((2, 3)))


class NormAct(nn.BatchNorm2d):
    """Batch norm whose code calls the function, as timm has it."""

    def forward(self, x):
        norm = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training,
            self.momentum, self.eps,
        )  # fmt: skip
        return F.relu(norm)


def with_norm_act():
    layers = nn.Conv2d(3, 8, 3, bias=False), NormAct(8), nn.Conv2d(8, 8, 3, bias=False), NormAct(8)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


def bare():
    """A chain whose floats leave the model as they are."""
    layers = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()
    return nn.Sequential(*layers, nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Flatten())


def before_convolutions():
    layers = nn.BatchNorm2d(3), nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()
    blocks = networks.PreActivated(16, 16), networks.PreActivated(16, 32), nn.BatchNorm2d(32)
    return nn.Sequential(*layers, *blocks, nn.MaxPool2d(5), nn.Flatten(), nn.Linear(32, 4))


def dense():
    layers = nn.Conv2d(3, 16, 3, padding=1), networks.Dense(16, 8), networks.Dense(24, 8)
    pool = nn.MaxPool2d(12), nn.Flatten(), nn.Linear(32, 4)
    return nn.Sequential(*layers, nn.BatchNorm2d(32), nn.ReLU(), *pool)


def segmenting():
    below = networks.Level(8, 16, nn.Conv2d(16, 32, 3, padding=1))
    last = nn.Conv2d(8, 4, 1), nn.MaxPool2d(12), nn.Flatten()
    return nn.Sequential(networks.Level(3, 8, below), *last)


def padded():
    stem = nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), networks.Padded(16, 40)
    return nn.Sequential(*stem, nn.MaxPool2d(5), nn.Flatten(), nn.Linear(40, 4))


MODELS = {
    "padded": padded,
    "bare": bare,
    "relu6": lambda: Parts(F.relu6),
    "relu": lambda: Parts(nn.ReLU(inplace=True)),
    "dropout": lambda: Parts(F.relu, 0.5),
    "hardswish": lambda: Parts(nn.Hardswish(inplace=True)),
    "hardsigmoid": lambda: Parts(F.hardsigmoid),
    "leaky": lambda: Parts(nn.LeakyReLU(0.2)),
    "norm with activation": with_norm_act,
    "resnet20": lambda: ResNet20(width=8),
    "mobilenet": mobilenet_v2,
    "before": before_convolutions,
    "dense": dense,
    "unet": segmenting,
}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_eval_mode_gives_the_bits_of_layers_one_by_one(name, last, runs, guards):
    model, _ = trained(MODELS[name]())
    x, _ = batch(3, 19)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    twin = unfused(model)
    with torch.no_grad():
        wanted, nothing = twin(x), dict(runs)
        found = model(x)
    assert nothing == {"fused": 0, "left": 0}
    assert runs["fused"] > 0
    assert runs["left"] == 0
    assert torch.equal(found, wanted)
    assert found.stride() == wanted.stride()
    frozen = marvin.freeze(model)  # with gradients on, of which there are none
    assert torch.equal(frozen(x), wanted)
    assert guards.passes


@pytest.mark.parametrize("name", ["resnet20", "mobilenet", "relu6", "before"])
def test_formats_by_channel_give_the_bits_of_layers_one_by_one(name, runs):
    model, optimizer = trained(MODELS[name](), marvin.LossBudgetPolicy(window=2, per_channel=True))
    x, _ = batch(3, 19)
    for _ in range(2):  # other formats, the same program
        found = [own.weights[0].shifts for own in formats_of(model).values() if own.inputs]
        assert max(map(max, found)) > 0
        with torch.no_grad():
            wanted, before = unfused(model)(x), runs["fused"]
            assert torch.equal(model(x), wanted)
            assert torch.equal(marvin.freeze(model)(x), wanted)
        assert runs["fused"] > before
        train(model, optimizer, 2, 5)
        model.eval()


def test_most_of_a_network_is_one_chain():
    model = trained()[0]
    assert [len(c.layers) for c in trace(model, infers=True).chains] == [21]
    assert [len(c.layers) for c in trace(model.train()).chains] == [22]


def test_only_what_has_the_bits_of_torch_is_part_of_exact_chains():
    """Sums of many terms, and functions that are not a few operations, have other last bits."""
    ends = nn.Sequential(*bare()[:3], nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.SiLU())
    ends = nn.Sequential(ends, nn.MaxPool2d(8), nn.Flatten(), nn.Linear(8, 10))
    models = {"hardswish": Parts(nn.Hardswish()), "max": Parts(nn.ReLU()), "silu": ends}
    for name, own in models.items():
        model, _ = trained(own)
        kinds = {"hardswish"} & {name}  # SiLU at the end joins no convolutions
        chains = trace(model, infers=True).chains
        values = [value for c in chains for value in c.values]
        assert {value.curve.name for value in values if value.curve} == kinds
        assert any(isinstance(value, Pooled) for value in values) is (name != "silu")
        assert not any(getattr(value, "is_mean", False) for value in values)
        assert all(chain.is_exact for chain in chains)
        assert all(row.is_exact for row in report(model).rows)
        assert "last bits" not in str(report(model))


class Sliced(nn.Module):
    """Every second place leaves a chain, or goes on in it, too."""

    def __init__(self, goes_on):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.second, self.third = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)
        self.goes_on, self.fc = goes_on, nn.Linear(16, 4)

    def forward(self, x):
        x = self.norm(self.first(x))[:, :, ::2, ::2]
        shown = x.sum((2, 3))
        if self.goes_on:
            shown = shown + torch.tanh(self.third(F.relu(self.second(x)))).amax((2, 3))
        return self.fc(shown)


@pytest.mark.parametrize("goes_on", [True, False])
def test_slices_that_leave_a_chain_lie_as_those_of_torch(goes_on):
    """A sum over them adds up in another order where they are no views, as where they join convolutions."""
    model, _ = trained(Sliced(goes_on))
    x, twin = batch(3, 19)[0][..., :9, :9], unfused(model)
    assert {row.is_exact for row in report(model).rows if row.is_fused} == {not goes_on}
    with torch.no_grad():
        found, wanted = model(x), twin(x)
    assert torch.equal(found, wanted) or goes_on
    torch.testing.assert_close(found, wanted)
    assert vars(model)["forward"].ran


class Cut(nn.Module):
    """Batch norm takes every second place of what a chain makes."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.second, self.conv = nn.BatchNorm2d(16), nn.Conv2d(16, 16, 1, bias=False)

    def forward(self, x):
        shown = self.second(self.norm(self.first(x))[:, :, ::2, ::2])
        return torch.cat([shown, self.conv(F.relu(shown))], 1).amax((2, 3))


def test_batch_norm_of_a_slice_has_the_bits_of_torch():
    """PyTorch rounds otherwise what lies apart."""
    model, _ = trained(Cut())
    x, twin = batch(3, 19)[0][..., :9, :9], unfused(model)
    assert all(row.is_exact for row in report(model).rows)
    with torch.no_grad():
        assert torch.equal(model(x), twin(x))
    assert vars(model)["forward"].ran


class Gated(nn.Module):
    """As EfficientNets have it: curves, squeeze and excitation, a sum, windows of means, and a head of linear layers."""

    def __init__(self, act, width=24):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm, self.act = nn.BatchNorm2d(16), act
        self.widen, self.norm1 = nn.Conv2d(16, width, 1, bias=False), nn.BatchNorm2d(width)
        self.each = nn.Conv2d(width, width, 5, padding=2, groups=width, bias=False)
        self.norm2, self.mean = nn.BatchNorm2d(width), nn.AdaptiveAvgPool2d(1)
        self.reduce, self.expand = nn.Conv2d(width, 6, 1), nn.Conv2d(6, width, 1)
        self.gate, self.drop = nn.Sigmoid(), nn.Dropout(0.2)
        self.narrow, self.norm3 = nn.Conv2d(width, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.halve, self.last = nn.AvgPool2d(2), nn.Conv2d(16, 40, 1)
        self.flat, self.fc1, self.fc2 = nn.Flatten(), nn.Linear(40, 20), nn.Linear(20, 10)

    def forward(self, x):
        x = self.act(self.norm(self.stem(x)))
        y = self.act(self.norm2(self.each(self.act(self.norm1(self.widen(x))))))
        y = y * self.gate(self.expand(self.act(self.reduce(self.mean(y)))))
        x = self.halve(x + self.norm3(self.narrow(y)))
        x = self.flat(self.mean(self.act(self.last(x))))
        return self.fc2(self.drop(F.relu(self.fc1(x))))


class Defined(nn.Module):
    """A curve or a mean as it is defined, in plain PyTorch."""

    def __init__(self, own):
        super().__init__()
        self.own = own

    def forward(self, x):
        if isinstance(self.own, nn.AdaptiveAvgPool2d):
            x = x.flatten(2)
        elif isinstance(self.own, nn.AvgPool2d):
            x = x.unfold(2, 2, 2).unfold(3, 2, 2).flatten(4)
        else:
            return Curve(type(self.own).__name__.lower()).value(x)
        total = torch.zeros_like(x[..., 0])
        for place in x.unbind(-1):
            total = total + place
        total = total * total.new_tensor(1 / x.shape[-1])
        return total if total.dim() == 4 else total[..., None, None]


def defined(model):
    """Return the model layer by layer, its curves and means as they are defined."""
    twin = unfused(model)
    for name, own in [*twin.named_children()]:
        if isinstance(own, nn.SiLU | nn.GELU | nn.Sigmoid | nn.AdaptiveAvgPool2d | nn.AvgPool2d):
            setattr(twin, name, Defined(own))
    return twin


def test_all_threads_lay_out_the_weights_of_one_image(runs, monkeypatch):
    model, _ = trained()
    packed, own = [], inference.pack_weights

    def pack_weights(parallel):
        def pack(*args):
            packed.append((parallel, args[-1]))
            own(parallel)(*args)

        return pack

    monkeypatch.setattr(inference, "pack_weights", pack_weights)
    monkeypatch.setattr(inference_run, "thread_count", lambda: 3)
    monkeypatch.setattr(inference_run, "is_parallel", lambda _: True)
    x = batch(1, 1)[0]
    with torch.no_grad():
        assert torch.equal(model(x), unfused(model)(x))
    assert runs == {"fused": 1, "left": 0}
    assert packed == [(True, 3)]


class NormFirst(nn.Module):
    """Begins with batch norm, which it also returns."""

    def __init__(self):
        super().__init__()
        self.norm, self.a = nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3, padding=1)
        self.b = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        y = F.relu(self.norm(x))
        return torch.cat([y, self.b(F.relu(self.a(y)))], 1).flatten(1)


VIEWS = {
    "turned": (lambda x: x.transpose(2, 3), 0),
    "cut": (lambda x: x[:, :, ::2, 1:], 0),
    "repeated": (lambda x: x[:, :, :1].expand_as(x), 0),
    "as it lies": (lambda x: x, 1),
    "channels last": (lambda x: x.contiguous(memory_format=torch.channels_last), 1),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_batch_norm_of_a_view_has_the_bits_of_its_layer(kind, runs):
    """PyTorch has another kernel for what does not lie densely, which rounds otherwise."""
    view, count = VIEWS[kind]
    model, _ = trained(NormFirst())
    x = view(batch(3)[0])
    with torch.no_grad():
        assert torch.equal(model(x), unfused(model)(x))
    assert runs == {"fused": count, "left": 0}
    assert all(row.is_exact for row in report(model).rows)


@pytest.mark.parametrize("count", [1, 19])
@pytest.mark.parametrize("act", [nn.SiLU, nn.GELU, nn.Hardswish, nn.ReLU])
def test_curves_means_and_gates_are_as_they_are_defined(act, count, runs, monkeypatch, guards):
    layout = torch.contiguous_format if count == 1 else torch.channels_last
    model, _ = trained(Gated(act()).to(memory_format=layout))
    assert [len(c.layers) for c in trace(model, infers=True).chains] == [9]
    x, _ = batch(3, count)
    with torch.no_grad():
        wanted = defined(model)(x)
        assert torch.equal(model(x), wanted)
        last = x.contiguous(memory_format=torch.channels_last)
        assert torch.equal(model(last), wanted)
        monkeypatch.setattr(inference, "_CACHE", 1)
        assert torch.equal(copy.deepcopy(model)(x), wanted)
    assert torch.equal(marvin.freeze(model)(x), wanted)
    assert runs == {"fused": 4, "left": 0}
    assert guards.passes
    assert not any(row.is_exact for row in report(model).rows)
    assert str(report(model)).count("other last bits in eval mode") == 9


def test_layers_one_by_one_differ_by_a_code_where_a_value_lies_between_two(runs):
    """Of codes of SiLU, those may that float64 has within some units of the last place of the border."""
    torch.manual_seed(1)
    layers = nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.SiLU()
    model, _ = trained(nn.Sequential(*layers, nn.Conv2d(16, 8, 1), nn.Flatten(), nn.Linear(800, 4)))
    chain = nn.Sequential(*model[:4])
    convert(chain)
    twin, x = unfused(chain.eval()), batch(3, 400)[0]
    taken = []
    twin[2].register_forward_hook(lambda _m, args, _y: taken.append(args[0]))
    with torch.no_grad():
        wanted, found = twin(x), chain(x)
        (formats, *_) = rounding_of(twin[3])
        exact = F.silu(taken[0].double()) * formats.inputs.scale
        # 2^-20: some units of the last place of float32, of a value and of what its exponential had
        between = ((exact - exact.floor() - 0.5).abs() <= 2.0**-20 * exact.abs()).float()
        reach = F.conv2d(between * formats.inputs.lsb, twin[3].weight.abs())
    assert runs["fused"] == 1
    assert between.mean() < 1e-3
    assert ((found - wanted).abs() <= reach * (1 + 2.0**-20)).all()


def test_a_linear_layer_that_does_not_fit_runs_behind_the_chain(runs):
    model, _ = trained(Gated(nn.SiLU()))
    model.fc2.register_forward_hook(lambda *_: None)
    x, _ = batch(3)
    with torch.no_grad():
        assert torch.equal(model(x), defined(model)(x))
    assert runs == {"fused": 1, "left": 0}


def test_turns_of_one_image_change_nothing(runs, monkeypatch):
    monkeypatch.setattr(inference, "_CACHE", 1)
    model, _ = trained()
    x, _ = batch(1, 7)
    with torch.no_grad():
        assert torch.equal(model(x), unfused(model)(x))
    assert runs["fused"] == 1


@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_batches_of_any_size(count, runs):
    model, _ = trained()
    x, _ = batch(1, count)
    with torch.inference_mode():
        assert torch.equal(model(x), unfused(model)(x))
    assert runs["fused"] == 1


def test_what_changes_between_two_calls_is_seen(runs):
    """Weights by their data, running statistics, formats, and modules."""
    model, optimizer = trained()
    x, _ = batch(2)

    def check(change):
        change()
        with torch.no_grad():
            assert torch.equal(model(x), unfused(model)(x)), change

    check(lambda: None)
    check(lambda: model.conv.weight.data.mul_(-1))
    check(lambda: model.bn.running_mean.data.add_(0.5))
    check(lambda: setattr(model.bn, "eps", 0.1))
    check(lambda: setattr(model, "bn", nn.BatchNorm2d(8).eval()))
    check(lambda: (train(model, optimizer, 2), model.eval()))
    check(lambda: marvin.reestimate_batch_norm(model, [batch(7)[0]]))
    assert runs["fused"] == 7
    assert runs["left"] == 0


def goes_backward(model, _x):
    return model(_x.requires_grad_())


def trains(model, x):
    return model(x)


def norm_in_training(model, x):
    model.bn.train()
    with torch.no_grad():
        return model(x)


def no_statistics(model, x):
    model.blocks[0].bn1 = nn.BatchNorm2d(8, track_running_stats=False).eval()
    with torch.no_grad():
        return model(x)


def not_finite(model, x):
    model.bn.running_var.fill_(float("nan"))
    with torch.no_grad():
        return model(x)


def not_a_number(model, x):
    with torch.no_grad():
        return model(torch.where(x > 1, float("nan"), x))


def hooked(model, x):
    model.bn.register_forward_hook(lambda *_: None)
    with torch.no_grad():
        return model(x)


def in_bfloat16(model, x):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return model(x)


def mapped(model, x):
    with torch.no_grad():
        return torch.vmap(model)(x[:, None])[:, 0]


def traced(model, x):
    return torch.jit.trace(model, x)(x)


OTHERS = (
    goes_backward, trains, norm_in_training, no_statistics, not_finite, not_a_number, hooked, in_bfloat16,
)  # fmt: skip


@pytest.mark.parametrize("call", OTHERS)
def test_what_a_chain_does_not_do_runs_layer_by_layer(call, runs):
    model, _ = trained()
    x, _ = batch(4)
    twin = unfused(model)
    found, wanted = call(model, x.clone()), call(twin, x.clone())
    assert runs["fused"] == 0
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("call", [mapped, traced])
def test_transformations_see_torchs_own_operators(call, runs):
    model = marvin.freeze(trained()[0])
    x, _ = batch(4)
    torch.testing.assert_close(call(model, x), unfused(model)(x), rtol=1e-5, atol=1e-6)
    assert call is traced or runs["fused"] == 0


def test_rounding_that_is_stochastic_in_eval_mode_is_not_fused(runs):
    model, optimizer = trained()
    marvin.quantize_activations(model, optimizer, eval_rounding="stochastic")
    train(model, optimizer, 1)
    model.eval()
    with torch.no_grad():
        model(batch(1)[0])
    assert runs == {"fused": 0, "left": 0}


def test_a_frozen_model_is_saved_and_exported(runs):
    model = marvin.freeze(trained()[0])
    x, _ = batch(5)
    wanted = unfused(model)(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert again.forward.module is again
    assert torch.equal(again(x), wanted)
    assert runs["fused"] == 1
    exported = torch.export.export(model, (x,)).module()
    assert torch.equal(exported(x), wanted)
    assert runs["fused"] == 1
    assert all(row.is_integer for row in report(model).rows)


def test_prepared_models_that_no_optimizer_trains_are_fused(runs):
    model, _ = trained()
    other = ResNet20(width=8)
    marvin.prepare(other)
    other.load_state_dict(model.state_dict())
    convert(other)
    x, _ = batch(6)
    with torch.no_grad():
        assert torch.equal(other.eval()(x), unfused(model)(x))
    assert runs["fused"] == 1


def test_torchs_batch_norm_is_known():
    """How it rounds on this processor; and its factors, as it tells them."""
    assert inference.rounds_once() in (True, False)
    own = inference.Norm(*torch.rand(4, 5).add(0.1).unbind(), 1e-3)
    factor, shift = inference.factors(own)
    assert factor.shape == shift.shape == (5,)
    x = torch.rand(7, 5)
    exact = F.batch_norm(*(t.double() for t in (x, *own[:4])), eps=1e-3)
    torch.testing.assert_close(x.double() * factor + shift, exact, rtol=1e-5, atol=1e-6)
