"""Layers that no chain takes: one operation each, with the results of separate products."""

import copy
import pickle

import pytest
import torch
from torch import nn

import marvin
from fixedpoint_kernels import tokens
from marvin.hooks import rounders_of, state_of
from marvin.integer import convert
from tests.graphs import nodes_of

pytestmark = [
    pytest.mark.skipif(tokens.path() is None, reason="no path of tokens on this processor"),
    pytest.mark.usefixtures("full_memory"),
]

LAYERS = {
    "linear": (lambda: nn.Linear(32, 48), (5, 32)),
    "of one sample": (lambda: nn.Linear(32, 48), (1, 32)),
    "of tokens": (lambda: nn.Linear(32, 48, bias=False), (3, 7, 32)),
    "of a grid": (lambda: nn.Linear(32, 16), (2, 3, 5, 32)),
    "few outputs": (lambda: nn.Linear(32, 10), (5, 32)),
    "some more outputs": (lambda: nn.Linear(32, 17, bias=False), (5, 1, 32)),
    "few features": (lambda: nn.Linear(10, 48), (3, 7, 10)),
    "images of three channels": (lambda: nn.Conv2d(3, 32, 2, 2), (3, 3, 6, 8)),
    "places": (lambda: nn.Conv2d(32, 48, 1), (3, 32, 4, 5)),
    "patches": (lambda: nn.Conv2d(4, 32, (2, 4), (2, 4), bias=False), (3, 4, 8, 8)),
    "one patch": (lambda: nn.Conv2d(16, 48, (3, 2)), (5, 16, 3, 2)),
    "one place": (lambda: nn.Conv2d(32, 48, 1, 2), (5, 32, 1, 1)),
}
OTHERS = {
    "few outputs of tokens": (lambda: nn.Linear(32, 10), (3, 7, 32)),
    "cropped patches": (lambda: nn.Conv2d(4, 32, 2, 2), (3, 4, 7, 8)),
    "padding": (lambda: nn.Conv2d(32, 48, 1, padding=1), (3, 32, 4, 4)),
    "dilation": (lambda: nn.Conv2d(4, 32, 2, 2, dilation=2), (3, 4, 8, 8)),
    "stride": (lambda: nn.Conv2d(32, 48, 1, 2), (3, 32, 4, 4)),
    "groups": (lambda: nn.Conv2d(32, 32, 1, groups=2), (3, 32, 4, 4)),
    "windows": (lambda: nn.Conv2d(16, 16, 3), (3, 16, 5, 5)),
}


class Alone(nn.Module):
    """A layer in code that cannot be traced."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x) if len(x) else x


def twins(
    layer, shape=(5, 32), form=torch.contiguous_format, policy=None, ste="clip", observed=False
):
    """Return two equal models, whose formats one step has found: the second multiplies layer by layer."""
    model = Alone(layer).to(memory_format=form)  # pyright: ignore[reportCallIssue]
    with torch.no_grad():
        if layer.bias is not None:
            layer.bias.uniform_(-1, 1)
    sgd = torch.optim.SGD(model.named_parameters(), lr=1e-6)
    optimizer = marvin.Quantized(sgd, policy or marvin.StaticPolicy(6, 7))
    marvin.quantize_activations(model, optimizer, ste=ste)
    loss = model(batch(shape)).square().mean()
    loss.backward()
    optimizer.step(loss=loss)
    optimizer.zero_grad()
    twin = copy.deepcopy(model)
    convert(model)
    convert(twin, fused=False)
    for own in (model, twin):
        rounder, *_ = rounders_of(own.layer)
        rounder.observer = rounder.observer if observed else None
    return model, twin


def batch(shape, form=torch.contiguous_format):
    x = 2 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x = x.contiguous(memory_format=form) if len(shape) == 4 else x
    return x.requires_grad_()


def grads(model, x, dy):
    """Return the output, and the gradients of what came in and of parameters, with the noise of the first step."""
    state = state_of(model)
    assert state is not None
    state.gradients = 0
    y = model(x)
    return y, *torch.autograd.grad(y, [x, *model.parameters()], dy)


def runs_alone(y):
    return any("Tokens" in type(node).__name__ for node in nodes_of(y))


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def compare(layer, shape, forms, threads=1, policy=None):
    model, twin = twins(layer, shape, forms[0], policy)
    x = batch(shape, forms[1])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    dy = torch.randn_like(twin(x)) * 2.0 ** -torch.arange(len(x)).view(-1, *[1] * (len(shape) - 1))
    found, wanted = grads(model, x, dy), grads(twin, x, dy)
    torch.set_num_threads(before)
    for own, other in zip(found[:3], wanted[:3], strict=True):  # output, input, weight
        same(own, other)
    y, other = found[0], wanted[0]
    assert y.is_contiguous() == other.is_contiguous()
    if y.dim() == 4:
        form = torch.channels_last
        assert y.is_contiguous(memory_format=form) == other.is_contiguous(memory_format=form)
    for own, other in zip(found[3:], wanted[3:], strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)
    assert not runs_alone(wanted[0])
    return runs_alone(found[0])


FORMS = [
    (weight, x)
    for weight in (torch.contiguous_format, torch.channels_last)
    for x in (torch.contiguous_format, torch.channels_last)
]


@pytest.mark.parametrize("forms", FORMS, ids=lambda f: "-".join(str(m)[6:] for m in f))
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_alone_have_the_bits_of_separate_products(kind, forms):
    make, shape = LAYERS[kind]
    assert compare(make(), shape, forms)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_layers_run_as_they_did(kind):
    make, shape = OTHERS[kind]
    assert not compare(make(), shape, FORMS[-1])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", LAYERS)
def test_formats_by_channel_have_the_bits_of_separate_products(kind, threads):
    make, shape = LAYERS[kind]
    layer = make()
    with torch.no_grad():
        places = torch.arange(len(layer.weight)).view(-1, *[1] * (layer.weight.dim() - 1))
        layer.weight *= 2.0 ** -(places % 4)
    assert compare(
        layer, shape, FORMS[0], threads, marvin.LossBudgetPolicy(window=1, per_channel=True)
    )


def test_two_threads_give_the_bits_of_separate_products():
    assert compare(nn.Linear(256, 256), (16, 32, 256), FORMS[0], threads=2)


@pytest.mark.parametrize("outputs", [8, 32])
def test_sums_of_more_products_than_int32_holds_do_not_wrap(outputs):
    """Flattened images of 224x224."""
    layer, shape = nn.Linear(150_528, outputs), (4, 150_528)
    model, twin = twins(layer, shape, policy=marvin.StaticPolicy(8, 8))
    for own in (model, twin):
        own.layer.weight.detach().fill_(1.0)  # as large as its format has it
    x = torch.full(shape, 100.0, requires_grad=True)
    y = model(x)
    assert y.min() > 0
    same(y, twin(x))


def test_values_that_lie_otherwise():
    model, twin = twins(nn.Linear(32, 48))
    x = batch((4, 32, 6)).detach().transpose(1, 2).requires_grad_()
    dy = torch.randn(4, 6, 48)
    found, wanted = grads(model, x, dy), grads(twin, x, dy)
    assert runs_alone(found[0])
    for own, other in zip(found[:3], wanted[:3], strict=True):
        same(own, other)


def test_what_is_frozen_gets_no_gradient():
    model, twin = twins(nn.Linear(32, 48))
    for own in (model, twin):
        own.layer.weight.requires_grad_(False)
    x = batch((5, 32))
    y, dx, db = grads_of(model, x)
    other, dx2, db2 = grads_of(twin, x)
    same(y, other)
    same(dx, dx2)
    torch.testing.assert_close(db, db2)
    assert model.layer.weight.grad is None


def grads_of(model, x):
    state = state_of(model)
    assert state is not None
    state.gradients = 0
    y = model(x)
    return y, *torch.autograd.grad(y.square().sum(), [x, model.layer.bias])


def test_one_layer_may_be_called_twice():
    model, twin = twins(nn.Linear(32, 32))
    x = batch((5, 32))
    found, wanted = ([], [])
    for own, out in ((model, found), (twin, wanted)):
        state = state_of(own)
        assert state is not None
        state.gradients = 0
        y = own(own(x))
        out += [y, *torch.autograd.grad(y, [x, own.layer.weight], torch.ones_like(y))]
    assert runs_alone(found[0])
    for a, b in zip(found, wanted, strict=True):
        same(a, b)


@pytest.mark.parametrize("way", ["functional_call", "data"])
def test_weights_of_a_call_between_are_not_those_of_its_gradient(way):
    model, _ = twins(nn.Linear(32, 48))
    x, dy = batch((5, 32)), torch.randn(5, 48)
    wanted = grads(model, x, dy)
    state = state_of(model)
    assert state is not None
    state.gradients = 0
    y, own = model(x), {name: p.detach().clone() for name, p in model.named_parameters()}
    if way == "data":  # as means of weights are swapped in: torch counts no such write
        for p in model.parameters():
            p.data.copy_(-p.data)
        model(x)
        for name, p in model.named_parameters():
            p.data.copy_(own[name])
    else:
        others = {name: (-p).requires_grad_() for name, p in own.items()}
        torch.func.functional_call(model, others, (x,))
    assert runs_alone(y)
    same((y, *torch.autograd.grad(y, [x, *model.parameters()], dy)), wanted)


def test_a_gradient_that_is_not_finite_is_seen():
    model, _ = twins(nn.Linear(32, 48))
    x, dy = batch((5, 32)), torch.ones(5, 48)
    dy[2, 3] = float("nan")
    _, dx, dw, _ = grads(model, x, dy)
    assert dx[2].isnan().all()
    assert dx[[0, 1, 3, 4]].isfinite().all()
    assert not dw.isfinite().all()


@pytest.mark.parametrize("kind", ["bfloat16", "autocast", "eval", "no gradients"])
def test_where_it_cannot_run_layers_multiply_as_before(kind):
    model, twin = twins(nn.Linear(32, 48))
    x = batch((5, 32)).detach()
    if kind == "bfloat16":
        model, twin, x = model.bfloat16(), twin.bfloat16(), x.bfloat16()
    if kind == "eval":
        model, twin = model.eval(), twin.eval()
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast")
    with autocast, torch.set_grad_enabled(kind != "no gradients"):
        found, wanted = model(x), twin(x)
    assert not runs_alone(found)
    same(found, wanted)


def test_a_copy_and_a_pickle_run_alone_too():
    model, _ = twins(nn.Linear(32, 48))
    x = batch((5, 32))
    y = model(x)
    for own in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        again = own(x)
        assert runs_alone(again)
        same(again, y)


# ------------------------------------------------------------------ codes are made of floats


@pytest.fixture
def rounded(monkeypatch):
    """Inputs that hooks of linear layers were asked to round."""
    from marvin.freezing import _Inputs
    from marvin.rounder import Rounder

    found = []
    for kind, name in ((Rounder, "round_inputs"), (_Inputs, "__call__")):
        own = getattr(kind, name)

        def counted(self, module, args, kwargs, own=own):
            found.extend(args if isinstance(module, nn.Linear) else ())
            return own(self, module, args, kwargs)

        monkeypatch.setattr(kind, name, counted)
    return found


def counts(model):
    """Return what a layer has counted, and what its model's layers share."""
    (rounder,) = rounders_of(model.layer)
    state = rounder.state
    clamped = [(own.count, own.total) for own in (rounder.tally, rounder.data)]
    return clamped, state.samples, state.gradients, state.waiting


def test_one_pass_makes_codes_and_counts_as_rounding_does(rounded):
    model, twin = twins(nn.Linear(32, 48))
    for own in (model, twin):
        state_of(own).waiting.add("layer")
    x = (4 * batch((5, 32))).detach().requires_grad_()
    dy = torch.randn(5, 48)
    rounded.clear()
    found = grads(model, x, dy)
    assert not rounded
    wanted = grads(twin, x, dy)
    assert rounded
    for own, other in zip(found[:3], wanted[:3], strict=True):
        same(own, other)
    assert counts(model) == counts(twin)
    assert counts(model)[0][0][0] > 0  # something was clamped
    assert (found[1] == 0).any()  # and got no gradient


def test_no_gradient_of_the_input_counts_nothing_clamped(rounded):
    model, twin = twins(nn.Linear(32, 48))
    x = batch((5, 32)).detach()
    for own in (model, twin):
        rounders_of(own.layer)[0].data.total = 0
    for _ in range(2):  # data is counted in the first pass
        rounded.clear()
        y = model(x)
        own = len(rounded)
        same(y, twin(x))
        assert counts(model) == counts(twin)
    assert own == 0
    assert counts(model)[0][1][1] == x.numel()


def test_identity_lets_gradients_of_clamped_inputs_through(rounded):
    model, twin = twins(nn.Linear(32, 48), ste="identity")
    x, dy = (4 * batch((5, 32))).detach().requires_grad_(), torch.randn(5, 48)
    rounded.clear()
    found = grads(model, x, dy)
    assert not rounded
    wanted = grads(twin, x, dy)
    for own, other in zip(found[:3], wanted[:3], strict=True):
        same(own, other)
    assert counts(model) == counts(twin)


@pytest.mark.parametrize("mode", ["training", "eval", "frozen"])
def test_nan_is_seen_in_that_pass(mode):
    model, twin = twins(nn.Linear(32, 48))
    if mode == "eval":
        model, twin = model.eval(), twin.eval()
    elif mode == "frozen":
        model, twin = marvin.freeze(model), marvin.freeze(twin)
    x = batch((5, 32)).detach()
    x[1, 7], x[2, 3], x[3, 31] = float("nan"), float("inf"), -float("inf")
    x.requires_grad_(mode == "training")  # else it is data, which is looked at once
    with torch.set_grad_enabled(mode == "training"):
        found, wanted = model(x), twin(x)
    assert found[1].isnan().all()
    same(found, wanted)
    if mode != "frozen":
        assert counts(model) == counts(twin)


@pytest.mark.parametrize("shape", [(64, 64, 4096), (2**20, 16)])
def test_nan_alone_is_seen_however_much_it_is(shape):
    model, _ = twins(nn.Linear(shape[-1], 16), (5, shape[-1]))
    with torch.no_grad():
        assert model.eval()(torch.full(shape, torch.nan)).isnan().all()


@pytest.mark.parametrize("mode", ["eval", "frozen"])
def test_inference_makes_codes_at_once_too(mode, rounded):
    model, twin = twins(nn.Linear(32, 48))
    if mode == "eval":
        model, twin = model.eval(), twin.eval()
    else:
        model, twin = marvin.freeze(model), marvin.freeze(twin)
    x = batch((5, 7, 32)).detach()
    rounded.clear()
    with torch.no_grad():
        y = model(x)
        assert not rounded
        same(y, twin(x))


def test_hooks_of_others_see_what_is_rounded():
    model, _ = twins(nn.Linear(32, 48))
    seen = []
    model.layer.register_forward_hook(lambda _module, args, _y: seen.append(args[0]))
    model(batch((5, 32)))
    assert (seen[0] * 2**7 % 1 == 0).all()


@pytest.mark.parametrize("kind", ["instance", "all modules"])
def test_who_replaces_forward_or_watches_all_modules_is_asked(kind):
    model, _ = twins(nn.Linear(32, 48))
    called = []
    if kind == "instance":
        own = model.layer.forward
        model.layer.forward = lambda x: called.append(x) or own(x)
        model(batch((5, 32)))
    else:
        hook = nn.modules.module.register_module_forward_hook(lambda m, *_: called.append(m))
        model(batch((5, 32)))
        hook.remove()
        called = [own for own in called if own is model.layer]
    assert called


def test_an_observer_sees_what_comes_in():
    model, _ = twins(nn.Linear(32, 48), observed=True)
    (rounder,) = rounders_of(model.layer)
    assert rounder.observer is not None
    y = model(batch((5, 32)))
    assert "Tokens" in str(y.grad_fn)
    assert "AccumulateGrad" not in str(y.grad_fn.next_functions[0][0])  # but of rounding


# ------------------------------------------------------------------ weights of (features, outputs)


def conv1d(outputs=48, inputs=32):
    transformers = pytest.importorskip("transformers.pytorch_utils")
    return transformers.Conv1D(outputs, inputs)


@pytest.mark.parametrize(
    ("shape", "outputs"), [((5, 32), 48), ((3, 7, 32), 48), ((3, 7, 10), 48), ((5, 33), 20)]
)
def test_transposed_weights_have_the_bits_of_the_simulation(shape, outputs):
    model, twin = twins(conv1d(outputs, shape[-1]), shape)
    simulated = copy.deepcopy(twin)
    convert(simulated, execution="simulation")
    x, dy = batch(shape), torch.randn(*shape[:-1], outputs)
    found, wanted, float32 = (grads(own, x, dy) for own in (model, twin, simulated))
    assert runs_alone(found[0])
    assert found[2].shape == (shape[-1], outputs)
    assert found[2].is_contiguous()
    for a, b, c in zip(found[:3], wanted[:3], float32[:3], strict=True):
        same(a, b)
        same(a, c)
    torch.testing.assert_close(found[3], wanted[3], rtol=1e-5, atol=1e-5)


def test_transposed_layers_are_copied_pickled_frozen_and_reverted():
    model, twin = twins(conv1d())
    stock = type(conv1d())
    assert isinstance(model.layer, stock)
    (row,) = marvin.integer.report(model).rows
    assert row.is_integer
    assert not row.reason
    x = batch((5, 32))
    y = model(x)
    for own in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        same(own(x), y)
        assert runs_alone(own(x))
    with torch.no_grad():
        same(marvin.freeze(model)(x), twin.eval()(x))
    marvin.integer.revert(model)
    assert type(model.layer) is stock
    (row,) = marvin.integer.report(model).rows
    assert row.reason == "not converted"


def by_channel(apart=4, shape=(5, 32), outputs=48):
    """Return two equal models of a transposed layer, whose inputs' weights have fractional lengths of their own."""
    layer = conv1d(outputs, shape[-1])
    with torch.no_grad():
        layer.weight *= 2.0 ** -(torch.arange(shape[-1]) % apart).view(-1, 1)
    return twins(layer, shape, policy=marvin.LossBudgetPolicy(window=1, per_channel=True))


def numbers_of(model):
    """Return the formats of a layer's inputs and weight."""
    (rounder,) = rounders_of(model.layer)
    formats = rounder.formats(model.layer)
    return formats.inputs, formats.weights[0]


def exact(x, weight, inputs, fmt):
    """Return a layer's sums in float64, of numbers that are rounded one by one."""
    points = torch.tensor([fmt.fl + shift for shift in fmt.shifts]).view(-1, 1)
    x = (x.double() * 2.0**inputs.fl).round().clamp(inputs.min_code, inputs.max_code)
    weight = (weight.double() * 2.0**points).round().clamp(fmt.fmt.min_code, fmt.fmt.max_code)
    return (x * 2.0**-inputs.fl) @ (weight * 2.0**-points)


@pytest.mark.parametrize(("apart", "digits"), [(4, 2), (10, 2), (14, 3)])
@pytest.mark.parametrize("shape", [(5, 32), (3, 7, 40), (3, 4096)])
def test_transposed_weights_by_channel_multiply_integers(apart, digits, shape):
    model, _ = by_channel(apart, shape)
    inputs, fmt = numbers_of(model)
    assert -((fmt.wl + max(fmt.shifts)) // -8) == digits
    (row,) = marvin.integer.report(model).rows
    assert row.is_integer
    assert not row.reason
    simulated = copy.deepcopy(model)
    convert(simulated, execution="simulation")
    x, dy = batch(shape), torch.randn(*shape[:-1], 48)
    found, wanted = (grads(own, x, dy) for own in (model, simulated))
    sums = exact(x.detach(), model.layer.weight.detach(), inputs, fmt).float()
    same(found[0].detach(), sums + model.layer.bias.detach())
    if apart < 10 and shape[-1] < 100:  # else float32 does not hold the simulation's sums
        same(found[0], wanted[0])
    assert (found[1] != 0).any()
    for own, other in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(own, other, rtol=2e-6, atol=1e-5)  # sums of float32


def test_sums_of_digits_beyond_float32_are_rounded_once():
    model, _ = by_channel(10, (3, 16384))
    inputs, fmt = numbers_of(model)
    left = max(fmt.shifts) - torch.tensor(fmt.shifts)  # places that codes move up
    codes = (127 >> left).clamp(max=fmt.fmt.max_code)  # so that low digits are positive and large
    codes[left > 7] = 1
    with torch.no_grad():
        weight = codes * 2.0 ** -(fmt.fl + torch.tensor(fmt.shifts)).double()
        model.layer.weight.copy_(weight.view(-1, 1))
        x = (inputs.max_code - torch.randint(2, (200, 16384))) * inputs.lsb
        sums = exact(x, model.layer.weight, inputs, fmt)
        same(model(x), sums.float() + model.layer.bias)
    assert (codes << left)[
        left < 8
    ].sum() * inputs.max_code > 2**25  # float32 holds even numbers there


@pytest.mark.parametrize("bits", [(8, None), (None, 8), None])
def test_gradients_of_transposed_weights_by_channel_in_float(bits):
    model, _ = by_channel()
    other = copy.deepcopy(model)
    convert(model, gradient_bits=bits)
    convert(other, gradient_bits=bits, execution="simulation")
    x, dy = batch((5, 32)), torch.randn(5, 48)
    found = grads(model, x, dy)
    for a, b in zip(found, grads(other, x, dy), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-6)  # sums of float32
    inputs, fmt = numbers_of(model)
    weight = exact(torch.eye(32) * inputs.max, model.layer.weight, inputs, fmt) / inputs.max
    codes = (x.detach() * inputs.scale).round()
    inside = (codes >= inputs.min_code) & (codes <= inputs.max_code)
    wanted = torch.where(inside, dy.double() @ weight.T, 0.0)
    least = 0.05 if isinstance(bits, tuple) and bits[0] else 1e-6  # codes have 8 bits
    assert (found[1] - wanted).norm() < least * wanted.norm()


def test_transposed_weights_by_channel_are_frozen_and_exported():
    model, _ = by_channel()
    x = batch((5, 32)).detach()
    with torch.no_grad():
        y = model.eval()(x)
        frozen = marvin.freeze(model)
        same(frozen(x), y)
        same(torch.export.export(frozen, (x,)).module()(x), y)


def test_transposed_weights_whose_points_lie_far_apart_stay_in_float():
    model, _ = by_channel(28)
    (row,) = marvin.integer.report(model).rows
    assert row.reason.startswith("fractional lengths of its weight differ so much")
    assert not runs_alone(model(batch((5, 32))))


@pytest.mark.parametrize("count", [1, 49])
def test_a_bias_of_another_length_is_what_torch_makes_of_it(count):
    model, twin = twins(nn.Linear(32, 48))
    x, own = batch((5, 32)), torch.ones(64)[:count]
    for each in (model, twin):
        each.layer.bias = nn.Parameter(own.clone())
    if count == 1:  # it is spread
        assert not runs_alone(model(x))
        same(model(x), twin(x))
        return
    for each in (model, twin):
        with pytest.raises(RuntimeError, match="must match the size of tensor b"):
            each(x)
