"""Layers on integer units: against float64, against their own simulation, and through what people do."""

import copy
import gc
import io
import math
import pickle
import subprocess
import sys
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import marvin
from fixedpoint_kernels import FixedPoint, forward_save, products
from fixedpoint_kernels._torch_private.modes import fake_tensor_mode
from marvin.integer import IntegerConv2d, IntegerLinear, conversion, convert, report, revert
from marvin.integer.autograd import Layer, Noise, multiply
from marvin.integer.formats import Options, Product, has_nan, size_of
from marvin.integer.strayed import Strayed
from marvin.rounder import formats_of

POLICIES = {
    "marvin": lambda: marvin.MarvinPolicy(
        lookback=(2, 5), resolution=(10, 20), init_wl=6, max_wl=8, min_fl=2, buffer_bits=2
    ),
    "fixed": lambda: marvin.FixedPolicy(8, 5),
    "budget": lambda: marvin.LossBudgetPolicy(window=3),
    "channels": lambda: marvin.LossBudgetPolicy(window=3, per_channel=True),
    "static": lambda: marvin.StaticPolicy(5, 6),
}


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2, padding="valid"),
        nn.ReLU(),
        nn.Flatten(2),
        nn.Conv1d(12, 6, 2),
        nn.Flatten(),
        nn.Linear(18, 4),
    )


class Counting(nn.Module):
    """A parametrisation that counts how often it runs."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, weight):
        self.count += 1
        return weight


class OwnNorm(nn.Module):
    """An RMS norm of a class of its own."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-5

    def forward(self, x):
        return F.rms_norm(x, (16,), self.weight, self.eps)


forward_save.register(OwnNorm, "rms_norm")


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.Linear, nn.LayerNorm, OwnNorm])
def test_converting_runs_no_parametrisation(kind):
    """Spectral norm would move its power iteration."""
    if kind is nn.Conv2d:
        model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), *(nn.Conv2d(16, 16, 3) for _ in "ab"))
        own = model[0]
    else:
        own = OwnNorm() if kind is OwnNorm else kind(16, *[16] * (kind is nn.Linear))
        model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), own, nn.Linear(16, 16))
    counting = Counting()
    parametrize.register_parametrization(own, "weight", counting)
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.02)
    optimizer = marvin.Quantized(sgd, marvin.StaticPolicy(8, 8))
    marvin.quantize_activations(model, optimizer)
    counting.count = 0
    convert(model)
    report(model)
    revert(model)
    assert counting.count == 0


def make(policy="budget", seed=0, **options):
    model = net(seed)
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.02, momentum=0.9)
    optimizer = marvin.Quantized(sgd, POLICIES[policy](), seed=seed)
    marvin.quantize_activations(model, optimizer)
    if options.pop("converted", True):
        convert(model, **{"fused": False} | options)  # fused ones: test_fusion
    return model, optimizer


def images(seed, n=8):
    return torch.randn(n, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def train(model, optimizer, steps, start=0):
    model.train()
    for i in range(start, start + steps):
        x = images(i)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), (x[:, 0].mean((1, 2)) > 0).long())
        loss.backward()
        optimizer.step(loss=loss)
    return model


def outputs(model):
    return model.eval()(images(99)).detach()


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def run_layer(x, weight, bias, layer, grad):
    x, weight, bias = (t.clone().requires_grad_() for t in (x, weight, bias))
    y = multiply(x, weight, bias, layer)
    y.backward(grad)
    return y.detach(), x.grad, weight.grad, bias.grad


@st.composite
def layers(draw):
    """A layer, its values and its output's gradient, so small that float32 sums are exact."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dims = draw(st.sampled_from([0, 1, 2]))
    samples, inputs, outputs = (
        draw(st.integers(1, 4)),
        draw(st.integers(1, 5)),
        draw(st.integers(1, 5)),
    )
    x_fmt = FixedPoint(
        draw(st.integers(2, 6)), draw(st.integers(-2, 6)), signed=draw(st.booleans())
    )
    fmt = FixedPoint(draw(st.integers(2, 5)), draw(st.integers(-2, 8)))
    shifts = tuple(draw(st.integers(0, 3)) for _ in range(outputs))
    w_fmt = marvin.channels.ChannelFormat(fmt, shifts) if draw(st.booleans()) else fmt

    def codes(fmt, *shape):
        return torch.randint(fmt.min_code, fmt.max_code + 1, shape, generator=generator) * fmt.lsb

    if dims:
        kernel = [draw(st.integers(1, 3)) for _ in range(dims)]
        size = [draw(st.integers(k + 2, 7)) for k in kernel]
        pick = [tuple(draw(st.integers(*r)) for _ in range(dims)) for r in ((1, 2), (0, 2), (1, 1))]
        x, weight = codes(x_fmt, samples, inputs, *size), codes(fmt, outputs, inputs, *kernel)
        window = tuple(pick)
    else:
        between = [draw(st.integers(1, 3))] * draw(st.integers(0, 2))
        x, weight = codes(x_fmt, samples, *between, inputs), codes(fmt, outputs, inputs)
        window = None
    if isinstance(w_fmt, marvin.channels.ChannelFormat):
        weight /= torch.tensor([2.0**s for s in shifts]).view(-1, *[1] * (weight.dim() - 1))
    product = Product(x_fmt, w_fmt, window)
    y = multiply(x, weight, None, Layer(product, Options()))
    grad = 1 + torch.rand(y.shape, generator=generator)  # alike: exponents of samples are near
    bias = torch.randn(outputs, generator=generator)
    return x, weight, bias, product, grad


@given(layers(), st.sampled_from([(8, 8), (8, None), (None, 8), (None, None)]))
def test_the_integer_step_equals_its_simulation(case, bits):
    x, weight, bias, product, grad = case
    noise = Noise(7, 3, 4)
    found = run_layer(x, weight, bias, Layer(product, Options(*bits), noise), grad)
    wanted = run_layer(x, weight, bias, Layer(product, Options(*bits, "simulation"), noise), grad)
    for got, other, is_exact in zip(found, wanted, (True, bits[0], bits[1], True), strict=True):
        if is_exact:
            same(got, other)
        else:
            torch.testing.assert_close(got, other)


@given(layers())
def test_the_integer_step_equals_float64(case):
    """Gradients in float, and the bias too: what autograd computes of the same values."""
    x, weight, bias, product, grad = case
    found = run_layer(x, weight, bias, Layer(product, Options(None, None)), grad)
    x, weight, bias = (t.double().requires_grad_() for t in (x, weight, bias))
    if product.window is None:
        y = F.linear(x, weight, bias)
    else:
        y = (F.conv1d if x.dim() == 3 else F.conv2d)(x, weight, bias, *product.window)
    y.backward(grad.double())
    for got, wanted in zip(found, (y.detach(), x.grad, weight.grad, bias.grad), strict=True):
        # sums whose terms cancel are as near as the largest
        near = {"rtol": 1.3e-6, "atol": 1e-5 * max(1.0, float(wanted.abs().max()))}
        torch.testing.assert_close(got, wanted.float(), **near)


@given(layers())
def test_rounded_gradients_are_near_those_of_float64(case):
    """Each element of the output's gradient moves by less than a code of its sample."""
    x, weight, bias, product, grad = case
    grad = grad * torch.tensor([4.0, 0.25, 1.0, 16.0])[: len(x)].view(-1, *[1] * (grad.dim() - 1))
    found = run_layer(x, weight, bias, Layer(product, Options(), Noise(1, 2, 3)), grad)
    plain = run_layer(x, weight, bias, Layer(product, Options(None, None)), grad)
    step = torch.exp2(torch.ceil(torch.log2(grad.flatten(1).amax(1) / 127)))  # of each sample
    shifts = torch.tensor([2.0**s for s in product.shifts or [0] * len(weight)])
    own = step.view(-1, *[1] * (grad.dim() - 1)) * torch.ones_like(grad)
    along = -1 if product.window is None else 1
    of_weight = own.movedim(along, -1).flatten(0, -2).amax(0)  # of each output
    sums = x.abs().double().flatten(1).amax(1) @ torch.ones(len(x)).double()
    places = grad.movedim(along, -1)[0].numel() // len(weight)
    assert ((found[2] - plain[2]).abs().flatten(1).amax(1) <= of_weight * sums * places).all()
    sizes = (weight * shifts.view(-1, *[1] * (weight.dim() - 1))).abs().sum()  # shifts go to grad
    errors = (found[1] - plain[1]).abs().flatten(1).amax(1)
    assert (errors <= step * sizes).all()
    if grad.numel() > 8:
        assert not torch.equal(found[2], plain[2]) or not x.any()


def test_noise_is_drawn_anew_for_each_product_and_each_rank(monkeypatch):
    model, _ = make("fixed")
    state = model[0]._forward_pre_hooks  # any rounder shares the model's state
    shared = next(iter(state.values())).rounder.state
    first = shared.noise_of_gradients()
    second = shared.noise_of_gradients()
    assert len({*first[1:], *second[1:]}) == 4
    monkeypatch.setattr(marvin.rounder, "rank", lambda: 1)
    shared.gradients -= 1
    assert not {*second[1:]} & {*shared.noise_of_gradients()[1:]}


@pytest.mark.parametrize("policy", POLICIES)
def test_forward_equals_that_of_rounded_floats(policy):
    """Sums of so few products are exact in float32."""
    model, optimizer = make(policy)
    twin, twin_optimizer = make(policy, converted=False)
    train(model, optimizer, 3)
    state = copy.deepcopy(optimizer.state_dict())
    twin.load_state_dict(model.state_dict())
    twin_optimizer.load_state_dict(state)
    assert sum(row.is_integer for row in report(model).rows) == 4
    for module in (model, twin):
        module.train()
    same(model(images(9)), twin(images(9)))
    same(outputs(model), outputs(twin))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_goes_on_to_the_bit(policy):
    """From a state that is loaded into a model and an optimizer made with other arguments."""
    model, optimizer = make(policy)
    train(model, optimizer, 4)
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    train(model, optimizer, 4, 4)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    other, other_optimizer = make(policy, seed=5)
    train(other, other_optimizer, 2)
    other.load_state_dict(state["model"])
    other_optimizer.load_state_dict(state["optimizer"])
    train(other, other_optimizer, 4, 4)
    same(dict(other.state_dict()), dict(model.state_dict()))
    counts = [o.state_dict()["marvin"]["gradients"] for o in (optimizer, other_optimizer)]
    assert counts[0] == counts[1] > 4 * 4


@pytest.mark.parametrize("wrap", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copied_pair_goes_on_alike(wrap):
    model, optimizer = make()
    train(model, optimizer, 4)
    pair = wrap((model, optimizer))
    train(model, optimizer, 3, 4)
    train(*pair, 3, 4)
    same(dict(model.state_dict()), dict(pair[0].state_dict()))
    same(outputs(model), outputs(pair[0]))


def test_a_prepared_model_computes_the_same():
    model, optimizer = make("channels")
    train(model, optimizer, 3)
    other = net(4)
    marvin.prepare(other)
    convert(other)
    other.load_state_dict(model.state_dict())
    assert sum(row.is_integer for row in report(other).rows) == 4
    same(outputs(other), outputs(model))


def test_a_state_without_the_count_of_gradients_loads():
    model, optimizer = make(converted=False)
    train(model, optimizer, 2)
    state = optimizer.state_dict()
    del state["marvin"]["gradients"]
    other, other_optimizer = make()
    train(other, other_optimizer, 1)
    other_optimizer.load_state_dict(state)
    assert other_optimizer.forward_state.gradients == 0


def test_revert():
    model, optimizer = make("static")
    train(model, optimizer, 3)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    revert(model)
    assert [type(m) for m in model] == [type(m) for m in net()]
    assert vars(model[0]).keys() == vars(make(converted=False)[0][0]).keys()
    assert "converted" in str(report(model))
    assert isinstance(twin[0], IntegerConv2d)
    train(model, optimizer, 2, 3)
    train(twin, twin_optimizer, 2, 3)
    masters = [
        o.state[m[0].weight]["master"] for m, o in ((model, optimizer), (twin, twin_optimizer))
    ]
    assert not torch.equal(*masters)  # gradients are rounded in one alone


class Viewing(nn.Module):
    """Takes views of what a convolution returns, as many models do."""

    def __init__(self):
        super().__init__()
        self.wide, self.long = nn.Conv2d(3, 4, 3, padding=1), nn.Conv1d(4, 6, 3, padding=1)
        self.fc = nn.Linear(6 * 36, 4)

    def forward(self, x):
        y = self.wide(x)
        assert y.is_contiguous(memory_format=self.form)
        z = self.long(y.flatten(2))
        return self.fc(z.view(len(z), -1))


RUNS = {
    "fused": {},
    "unfused": {"fused": False},
    "simulation": {"execution": "simulation"},
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_results_lie_as_those_of_torch(form, run):
    model, x = Viewing(), images(0)
    model.form, x = form, x.contiguous(memory_format=form)
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.01)
    optimizer = marvin.Quantized(sgd, marvin.StaticPolicy(8))
    marvin.quantize_activations(model, optimizer)
    marvin.integer.convert(model, **RUNS[run])
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step(loss=loss)
    same(marvin.freeze(model)(x), model.eval()(x))


def trained(model, x, steps=2, **options):
    """Return a converted copy of a model after some steps on ``x``."""
    model = copy.deepcopy(model)
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.01)
    optimizer = marvin.Quantized(sgd, marvin.StaticPolicy(8))
    marvin.quantize_activations(model, optimizer)
    marvin.integer.convert(model, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step(loss=loss)
    return model


ONE = {  # channel, or place
    "one channel": (lambda: nn.Sequential(nn.Conv2d(3, 1, 3, bias=False)), (4, 3, 8, 8)),
    "one channel in": (lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU()), (4, 1, 8, 8)),
    "one channel in and out": (lambda: nn.Sequential(nn.Conv2d(1, 1, 3)), (4, 1, 8, 8)),
    "one place": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 6)), (4, 3, 8, 8)),
    "one place in": (lambda: nn.Sequential(nn.Conv2d(16, 8, 1), nn.ReLU()), (4, 16, 1, 1)),
    "a mean": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)), (4, 3, 8, 8)),
    "a patch": (lambda: nn.Sequential(nn.Conv2d(3, 16, 8)), (4, 3, 8, 8)),
    "one long channel": (lambda: nn.Sequential(nn.Conv1d(3, 1, 3, bias=False)), (4, 3, 8)),
    "one place of a length": (lambda: nn.Sequential(nn.Conv1d(3, 8, 8)), (4, 3, 8)),
}  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", ONE)
def test_maps_of_one_channel_or_place_lie_as_those_of_torch(kind, form, run):
    """They lie in both formats, and the layers behind them go by strides."""
    make, shape = ONE[kind]
    torch.manual_seed(0)
    x = torch.randn(shape)
    if len(shape) == 4:
        x = x.clone(memory_format=form)
    stock = make()
    wanted, model = stock(x).stride(), trained(stock, x, **RUNS[run])
    frozen = marvin.freeze(model)
    assert model(x).stride() == wanted
    assert frozen(x).stride() == wanted
    with torch.no_grad():
        assert model.eval()(x).stride() == wanted
    if form is torch.contiguous_format:  # rounding in a trace keeps one channel no other way
        assert torch.jit.trace(frozen, x)(x).stride() == wanted


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Linear(6, 10, bias=False), (4, 6)),
        (lambda: nn.Linear(6, 10, bias=False), (4, 5, 6)),
        (lambda: nn.Conv1d(6, 4, 3, bias=False), (4, 6, 8)),
        (lambda: nn.Conv1d(6, 1, 3, bias=False), (4, 6, 8)),
        (lambda: nn.Conv2d(6, 4, 3, bias=False), (4, 6, 8, 8)),
    ],
)
def test_what_a_layer_returns_may_be_changed_in_place(layer, shape, fused):
    torch.manual_seed(0)
    x = torch.randn(shape)
    model = trained(nn.Sequential(layer(), nn.Dropout(0.0, inplace=True)), x, fused=fused)
    y = model[0](x)
    y += 1
    y.sum().backward()
    assert model[0].weight.grad.any()


def test_formats_may_switch_while_training():
    """What becomes longer than 8 bits is computed in float, and comes back."""
    model, optimizer = make("static")
    train(model, optimizer, 1)
    rows = {row.name: row for row in report(model).rows}
    assert all(row.is_integer for row in rows.values())
    hook = next(iter(model[3]._forward_pre_hooks.values()))
    formats = formats_of(model)["3"]
    long = FixedPoint(12, 8)
    hook.rounder.write(model[3], type(formats)(inputs=long, weights=formats.weights))
    row = report(model).rows[1]
    assert (row.forward, row.reason) == ("float32", "its inputs have 12 bits, more than 8")
    before = optimizer.forward_state.gradients
    train(model, optimizer, 1)
    assert optimizer.forward_state.gradients == before + 3
    hook.rounder.write(model[3], formats)
    assert report(model).rows[1].is_integer


def test_bits_of_gradients_are_chosen_for_each_product():
    grads = {}
    for bits in (8, None, (8, None), (None, 8)):
        model, _ = make("fixed", gradient_bits=bits)
        x = images(0).requires_grad_()
        F.cross_entropy(model(x), torch.zeros(8, dtype=torch.long)).backward()
        grads[bits] = model[8].weight.grad, model[6].weight.grad
    same(grads[8][0], grads[None, 8][0])
    same(grads[None][0], grads[8, None][0])
    assert not torch.equal(grads[8][0], grads[None][0])
    assert not torch.equal(grads[8, None][1], grads[None][1])  # what comes in was rounded


def test_eval_mode_has_gradients_in_float():
    model, _ = make("fixed")
    twin, _ = make("fixed", converted=False)
    found = []
    for module in (model.eval(), twin.eval()):
        x = images(0).requires_grad_()
        module(x).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model, optimizer = make("fixed")
    with torch.autocast("cpu", dtype):
        y = model[8](torch.ones(2, 18))
        assert y.dtype is dtype
        loss = F.cross_entropy(model(images(0)).float(), torch.zeros(8, dtype=torch.long))
    loss.backward()
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())
    wanted = model[8](torch.ones(2, 18))
    torch.testing.assert_close(y.float(), wanted, rtol=torch.finfo(dtype).eps * 2, atol=1e-3)
    optimizer.step(loss=loss)


@pytest.mark.parametrize("way", ["called", "exported"])
def test_channels_far_finer_than_others_in_float16(way):
    """Their powers of two, 2**16 and more, are not in float16."""
    model, x = nn.Sequential(nn.Linear(32, 4)), torch.randn(4, 32)
    with torch.no_grad():
        model[0].weight[1] *= 2.0**-16
        model[0].bias.zero_()
    frozen = marvin.freeze(marvin.calibrate(model, [x], per_channel=True).half())
    x = x.half()
    with torch.no_grad():
        wanted = frozen(x)
        convert(frozen)
        own = frozen if way == "called" else torch.export.export(frozen, (x,)).module()
        torch.testing.assert_close(own(x), wanted, rtol=2e-3, atol=1e-7)  # float16


def test_the_gradient_of_an_input_through_fine_channels_in_float16():
    grads = []
    for converts in (False, True):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(64, 32)), torch.randn(16, 64).half()
        with torch.no_grad():
            model[0].weight[1:] *= 2.0**-16
        model.half()
        sgd = torch.optim.SGD(model.named_parameters(), lr=0.0)
        optimizer = marvin.Quantized(sgd, marvin.StaticPolicy(8, 8, per_channel=True))
        marvin.quantize_activations(model, optimizer)
        for _ in range(2):
            loss = model(x).float().mean()
            loss.backward()
            optimizer.step(loss=loss)
        assert max(optimizer.formats()["0.weight"].shifts) >= 16
        if converts:
            convert(model)
        own = x.clone().requires_grad_()
        model(own)[:, 1:].float().sum().backward()
        grads.append(own.grad)
    wanted, found = (grad.float() for grad in grads)
    assert (found - wanted).norm() < 0.02 * wanted.norm()  # 8 bits, and float16 below 2**-14


def test_activation_checkpointing():
    """What is computed again has the same codes, where rounding draws no noise."""
    grads = []
    for way in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=False)):
        model, _ = make("static", gradient_bits=None)
        way(model.train(), images(0).requires_grad_()).sum().backward()
        grads.append([p.grad for p in model.parameters()])
    same(*grads)


def test_accumulated_gradients_have_noise_of_their_own():
    model, _ = make("fixed")
    grads, grad = [], torch.rand(2, 4, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        model.zero_grad()
        model[8](torch.full((2, 18), 0.5)).backward(grad)  # on the grid: no noise of its own
        grads.append(model[8].weight.grad.clone())
    assert not torch.equal(*grads)


@pytest.mark.parametrize("policy", ["fixed", "channels"])
def test_frozen(policy):
    """A frozen model multiplies integers too, in operators that can be exported."""
    model, optimizer = make(policy)
    train(model, optimizer, 3)
    frozen, wanted = marvin.freeze(model), outputs(model)
    assert sum(row.is_integer for row in report(frozen).rows) == 4
    same(frozen(images(99)), wanted)
    with torch.inference_mode():
        same(frozen(images(99)), wanted)
    program = torch.export.export(frozen, (images(99),))
    assert "products_convolve" in str(program.graph)
    same(program.module()(images(99)), wanted)
    traced = torch.jit.trace(frozen, (images(98),))
    same(traced(images(99)), wanted)
    saved = io.BytesIO()
    torch.save(frozen, saved)
    saved.seek(0)
    same(torch.load(saved, weights_only=False)(images(99)), wanted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("policy", ["fixed", "channels"])
def test_torchs_export_to_onnx_takes_a_frozen_model(policy):
    """Products are those of floats there, whose sums are exact here."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    model, optimizer = make(policy)
    train(model, optimizer, 3)
    file = io.BytesIO()
    torch.onnx.export(marvin.freeze(model), (images(99),), file, dynamo=False)
    session = onnxruntime.InferenceSession(file.getvalue())
    (y,) = session.run(None, {session.get_inputs()[0].name: images(99).numpy()})
    same(torch.from_numpy(y), outputs(model))


def watched(call):
    with FlopCounterMode(display=False):
        return call()


@pytest.mark.parametrize("fused", [True, False])
def test_operations_are_counted_as_those_of_floats(fused):
    model, optimizer = make(converted=False)
    train(model, optimizer, 3)

    def counted():
        counts = []
        for own in (model.train(), model.eval(), marvin.freeze(model)):
            with FlopCounterMode(display=False) as counter:
                y = own(images(0))
                if own.training:
                    y.sum().backward()
            counts.append(counter.get_total_flops())
        return counts

    floats = counted()
    assert all(row.is_integer for row in convert(model, fused=fused).rows)
    assert counted() == floats


@pytest.mark.parametrize("policy", ["budget", "channels"])
@pytest.mark.parametrize("last", [8, 6, 3])
@pytest.mark.parametrize("way", ["eval", "train", "compiled", "watched"])
def test_the_last_layer_of_a_frozen_model_is_fine_tuned(policy, last, way, request):
    """It has the gradients of floats, and outputs of codes."""
    model, optimizer = make(policy)
    train(model, optimizer, 3)
    wanted = copy.deepcopy(model)
    revert(wanted)
    frozen, floats = (marvin.freeze(own)[: last + 1] for own in (model, wanted))
    frozen[last].requires_grad_(True)
    floats[last].requires_grad_(True)
    frozen[last].train(way == "train")
    runs = frozen
    if way == "compiled":
        torch.compiler.reset()  # or it would be one of too many models
        request.addfinalizer(torch.compiler.reset)
        runs = torch.compile(frozen, backend="eager", fullgraph=True)
    y = watched(lambda: runs(images(99))) if way == "watched" else runs(images(99))
    with torch.no_grad():
        same(y.detach(), frozen(images(99)))
    y.square().sum().backward()
    floats(images(99)).square().sum().backward()
    for p, q in zip(frozen[last].parameters(), floats[last].parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_a_frozen_model_gives_shapes_without_values():
    model, _ = make("fixed")
    frozen = marvin.freeze(model)
    x, shape = images(99), outputs(model).shape
    with fake_tensor_mode() as mode, torch.no_grad():
        mode.allow_non_fake_inputs = True
        assert frozen(mode.from_tensor(x)).shape == shape
    with torch.no_grad():
        assert frozen.to("meta")(x.to("meta")).shape == shape


def test_a_gradient_that_is_not_finite_reaches_the_optimizer():
    model, optimizer = make("fixed")
    loss = model(images(0)).sum() * float("inf")
    loss.backward()
    with pytest.raises(FloatingPointError, match="finite"):
        optimizer.step(loss=1.0)


def test_a_gradient_that_is_not_finite_reaches_the_input():
    """Whatever the fractional length of the weight is."""
    product = Product(FixedPoint(8, 4), FixedPoint(8, 6), None)
    grad = torch.tensor([[1.0, float("inf")], [1.0, 2.0]])
    _, of_input, of_weight, _ = run_layer(
        torch.ones(2, 3),
        torch.ones(2, 3),
        torch.zeros(2),
        Layer(product, Options(), Noise(1, 2, 3)),
        grad,
    )
    assert not of_input[0].isfinite().any()
    assert of_input[1].isfinite().all()
    assert not of_weight.isfinite().any()


class Own(nn.Conv2d):
    """A convolution that may compute anything."""


def test_a_model_without_values_is_converted_and_loaded():
    own = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    optimizer = marvin.Quantized(torch.optim.SGD(own.parameters(), lr=0.1), marvin.StaticPolicy())
    marvin.quantize_activations(own, optimizer)
    for _ in range(2):
        loss = own(torch.randn(4, 3, 8, 8)).square().mean()
        loss.backward()
        optimizer.step(loss=loss)
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    marvin.prepare(model)
    reasons = {row.reason for row in convert(model).rows}
    assert reasons == {"it is on the meta device, which has no values"}
    model.load_state_dict(own.state_dict(), assign=True)
    x = torch.randn(4, 3, 8, 8)
    convert(own)
    torch.testing.assert_close(model.eval()(x), own.eval()(x), rtol=0, atol=0)


def test_the_report_is_of_the_device_of_the_layers(monkeypatch):
    """On a GPU it named the processor's instructions, and chains that run on a CPU alone."""
    model, optimizer = make("static", fused=True)
    train(model, optimizer, 1)
    assert any(row.is_fused for row in report(model).rows)
    monkeypatch.setattr(conversion, "_device", lambda module: torch.device("cuda"))
    found = report(model)
    assert str(found).startswith("4 of 4 layers multiply integers (triton: the codes are on a GPU)")
    assert {(row.forward, row.input_gradient, row.is_fused) for row in found.rows} == {
        ("triton", "triton", False)
    }
    assert products.path(torch.device("cpu")) == products.path()
    assert products.path(torch.device("mps")).name == "reference"


def folded(model):
    model[0] = nn.utils.fuse_conv_bn_eval(model[0], model[1])
    model[1] = nn.Identity()


def written(model):
    with torch.no_grad():
        model[4].weight.mul_(0.7)


def given_other_memory(model):
    model[4].weight.data = model[4].weight * 0.7


STRAYED = r"got others in a converted Integer\w+ of [\dx ]+: they count as the nearest ones, which moves them by \d+% "


@pytest.mark.skipif(not products.path().is_own, reason="no own path of products on this processor")
@pytest.mark.parametrize("change", [folded, written, given_other_memory])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["trained", "frozen"])
def test_weights_that_count_as_far_others_are_named_once(kind, fused, change):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 3)
    )
    adam = torch.optim.Adam(model.named_parameters(), lr=1e-2)
    optimizer = marvin.Quantized(adam, marvin.StaticPolicy(4, 8))
    marvin.quantize_activations(model, optimizer)
    convert(model, fused=fused)
    x, y = torch.rand(16, 3, 8, 8), torch.arange(16) % 3
    for _ in range(6):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step(loss=loss)
    model = marvin.freeze(model) if kind == "frozen" else model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            model(x)
        model(x)
    change(model)
    with pytest.warns(UserWarning, match=STRAYED), torch.no_grad():
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)


def alone(count):
    """Converted layers that run one by one, for an ``if`` on values is between them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(count)))
    wrapped = torch.optim.SGD(model.named_parameters(), lr=0.1)
    marvin.quantize_activations(model, marvin.Quantized(wrapped, marvin.FixedPolicy(8, 5)))
    frozen = marvin.freeze(model)
    convert(frozen, fused=False)
    return frozen


@pytest.mark.skipif(not products.path().is_own, reason="no own path of products on this processor")
def test_layers_that_ran_alone_in_eval_mode_go_with_their_model():
    model = alone(2)
    model(torch.rand(16, 16))
    layers = [weakref.ref(layer) for layer in model]
    del model
    gc.collect()
    assert [layer() for layer in layers] == [None, None]


def test_a_weight_of_another_class_hides_no_other_that_strayed():
    class Own(nn.Parameter):
        pass

    model = alone(3)
    model[2].weight = Own(model[2].weight.detach(), requires_grad=False)
    strayed = Strayed(model)
    strayed.look()
    with torch.no_grad():
        model[0].weight *= 0.01
    with pytest.warns(UserWarning, match=STRAYED):
        strayed.look()


@pytest.mark.parametrize("change", [prune.identity, parametrizations.weight_norm])
def test_a_layer_whose_weight_is_computed_since_strays_no_more(change):
    model = alone(3)
    strayed = Strayed(model)
    strayed.look()
    change(model[2], "weight")
    with torch.no_grad():
        model[0].weight *= 0.01
    with pytest.warns(UserWarning, match=STRAYED):
        strayed.look()


def test_the_report_names_what_a_module_multiplies_by_itself():
    class Projected(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.projection = nn.Linear(4, 4), nn.Parameter(torch.eye(4))

        def forward(self, x):
            return self.body(x) @ self.projection

    model = Projected()
    adam = torch.optim.Adam(model.named_parameters(), lr=0.1)
    marvin.quantize_activations(model, marvin.Quantized(adam, marvin.FixedPolicy(8, 4)))
    own = next(row for row in convert(model).rows if row.reason)
    assert own.reason.startswith("there is no integer product for its own projection: put that")


def test_the_report_says_why_not():
    model = nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 4, 2, padding="same"),
        nn.ConvTranspose2d(4, 4, 1),
        Own(4, 4, 1),
        nn.Conv2d(4, 4, 1),
        nn.Conv2d(4, 4, 1),
    )
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = marvin.Quantized(sgd, marvin.FixedPolicy(8, 4))
    marvin.quantize_activations(model, optimizer, exclude="5")
    shown = convert(model)
    reasons = [row.reason for row in shown.rows]
    assert [r.split(",")[0].split(":")[0] for r in reasons] == [
        "",
        "its border is not 0",
        "padding='same' of an even kernel pads one side more than the other",
        "there is no integer product for ConvTranspose2d",
        f"there is no integer product for {__name__}.Own",
        "it carries no formats",
        "",
    ]
    assert str(shown).startswith("2 of 7 layers multiply integers")
    x = images(0)[:, :1].expand(-1, 4, -1, -1)
    y = model.eval()(x)
    revert(model)
    torch.testing.assert_close(model(x), y)


class Unused(nn.Module):
    """A layer, and one that is never called."""

    def __init__(self):
        super().__init__()
        self.layer, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.layer(x)


def test_the_report_says_what_was_not_called():
    model = Unused()
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = marvin.Quantized(sgd, marvin.StaticPolicy())
    handle = marvin.quantize_activations(model, optimizer)
    convert(model)
    for _ in range(2):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step(loss=loss)
    assert "not unused: not called yet" in str(handle.report)
    reasons = {row.name: row.reason for row in report(model).rows}
    assert reasons == {"layer": "", "unused": "its inputs are float32: not called yet"}


def test_what_does_not_fit_is_refused_or_left_to_torch():
    model, _ = make("fixed")
    assert "it carries no formats: marvin.quantize_activations" in str(convert(net()))
    for bits in (4, (8, 4), (8,), "8"):
        with pytest.raises(ValueError, match="gradient_bits must be 8, None, or a pair"):
            convert(model, gradient_bits=bits)
    with pytest.raises(ValueError, match="execution must be"):
        convert(model, execution="int8")
    assert model[0](images(0)[0]).shape == (8, 6, 6)  # no samples: in float
    assert model[0](images(0, 0)).shape == (0, 8, 6, 6)
    with pytest.raises(ValueError, match="needs 3 input channels, got 2"):
        model[0](torch.ones(1, 2, 6, 6))
    linear = next(own for own in model if isinstance(own, IntegerLinear))
    for layer in (model[0], linear):
        for wrong in (np.ones((8, 3, 6, 6), np.float32), [[1.0]], None):
            with pytest.raises(TypeError, match=r"^(conv2d|linear)\(\)"):  # torch's own words
                layer(wrong)


def test_forward_save_and_integers_say_what_they_leave():
    """Each takes the layers that the other has not taken."""
    from fixedpoint_kernels import forward_save

    model, optimizer = make("fixed")
    forward_save.convert(model, few_bit=3)
    assert sum(row.is_integer for row in report(model).rows) == 4
    train(model, optimizer, 2)


def test_compiled():
    model, optimizer = make("static")
    train(model, optimizer, 2)
    wanted = outputs(model)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        same(outputs(compiled), wanted)
    frozen = torch.compile(marvin.freeze(model), backend="aot_eager", fullgraph=True)
    same(frozen(images(99)), wanted)


def test_every_path_gives_the_same_step():
    weights = []
    for name in ("amx", "avx512_vnni", "avx_vnni", "avx2", "stock", "float"):
        try:
            with products.force(name):
                weights.append([*train(*make("static"), 3).parameters()])
        except ValueError:  # this processor has it not
            continue
    assert len(weights) >= 1
    for other in weights[1:]:
        same(weights[0], other)


def test_without_a_kernel_nothing_is_slower(monkeypatch):
    """What PyTorch alone could do with integers takes many times as long as floats."""
    model, optimizer = make("static")
    twin, twin_optimizer = make("static", converted=False)
    missing = products.Path("float", "no amx: the processor lacks it")
    monkeypatch.setattr(products.paths, "_best", lambda: missing)
    train(model, optimizer, 3)
    train(twin, twin_optimizer, 3)
    same(dict(model.state_dict()), dict(twin.state_dict()))
    row = report(model).rows[0]
    assert (row.is_integer, row.reason) == (
        False,
        "this processor has no kernel of integers: no amx: the processor lacks it",
    )
    with products.force("float"):
        assert report(model).rows[0].is_integer


RANKS = """
import sys, torch, torch.distributed as dist
from importlib.util import module_from_spec, spec_from_file_location
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import marvin
spec = spec_from_file_location("own", {file!r})
own = module_from_spec(spec)
spec.loader.exec_module(own)
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://{folder}/meet", rank=rank, world_size=2)

def optimizer_of(model):
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.02, momentum=0.9)
    optimizer = marvin.Quantized(sgd, own.POLICIES["static"]())
    marvin.quantize_activations(model, optimizer)
    return optimizer

def train(model, optimizer):
    for i in range(3):
        x = own.images(2 * i + rank)
        optimizer.zero_grad()
        y = model(x)
        loss = own.F.cross_entropy(y, (x[:, 0].mean((1, 2)) > 0).long())
        loss.backward()
        optimizer.step(loss=loss)
        yield y.detach()

model = own.net()
own.convert(model, fused=False)
whole = [*train(DistributedDataParallel(model), optimizer_of(model))]
sharded = own.net()
own.convert(sharded)
sharded[1].requires_grad_(True)
for layer in (sharded[0], sharded[3]):
    fully_shard(layer)
fully_shard(sharded)
outputs = [*train(sharded, optimizer_of(sharded))]
assert sum(row.is_integer for row in own.report(sharded).rows) == 4
chained = own.net()
own.convert(chained)
fused = [*train(DistributedDataParallel(chained), optimizer_of(chained))]
assert sum(row.is_fused for row in own.report(chained).rows) == 2
for a, b in zip(fused, whole):
    assert (a - b).norm() < 0.1 * b.norm(), (a, b)
torch.save([whole, outputs, *model.parameters(), *chained.parameters()], f"{folder}/{{rank}}")
"""


@pytest.mark.slow
def test_ranks_train_alike_whole_and_sharded(tmp_path):
    """Two processes: weights end equal, and FSDP2 computes what DDP does."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(file=__file__, folder=tmp_path))
    runs = [subprocess.Popen([sys.executable, script, str(rank)]) for rank in range(2)]
    assert [run.wait() for run in runs] == [0, 0]
    first, second = torch.load(tmp_path / "0"), torch.load(tmp_path / "1")
    same(first[2:], second[2:])
    for whole, sharded, *_ in (first, second):
        same(whole, sharded)


def test_layers_that_keep_less_say_what_to_call_first():
    model = nn.Sequential(nn.Linear(4, 4))
    forward_save.convert(model, division=True)
    assert "forward_save.convert came first" in str(marvin.integer.convert(model))


@pytest.mark.parametrize("execution", ["integer", "simulation"])
def test_batches_of_no_sample_give_gradients_of_zero(execution):
    model, optimizer = make("fixed", execution=execution)
    train(model, optimizer, 1)
    optimizer.zero_grad()
    y = model(images(0, n=0))
    y.sum().backward()
    assert y.shape == (0, 4)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == len([*model.parameters()])
    for grad in gradients:
        same(grad, torch.zeros_like(grad))
    optimizer.step()


@pytest.mark.parametrize("count", [10, 2**15, 2**20 + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_value_of_many_that_is_not_finite_is_seen(count, dtype):
    for values, of_nan in (([], False), ([torch.inf, -torch.inf], False), ([torch.nan], True)):
        for x in (torch.randn(count, dtype=dtype), torch.randn(count, 2, dtype=dtype)[:, 1]):
            x[-len(values) - 1 : -1] = torch.tensor(values, dtype=dtype)
            assert has_nan(x) == of_nan
            assert math.isfinite(size_of(x)) == (not values)


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_master_that_is_not_finite_is_refused(nonfinite):
    """Codes have no NaN: the loss stayed finite, and training went on with the weight as 0."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    adam = torch.optim.Adam(model.named_parameters(), lr=0.01, eps=0.0)
    optimizer = marvin.Quantized(adam, marvin.StaticPolicy(8, 8), nonfinite=nonfinite)
    marvin.quantize_activations(model, optimizer)
    marvin.integer.convert(model)
    x = torch.randn(16, 8)
    x[:, 3] = 0  # Adam divides 0 by 0

    def step():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step(loss=loss)
        return loss

    step()
    assert model.weight[:, 3].isnan().all()
    if nonfinite == "raise":
        with pytest.raises(
            FloatingPointError, match=r"masters of weight \(load an earlier state\)"
        ):
            step()
    else:
        assert step().isfinite()
        assert optimizer.skipped_steps == 1
