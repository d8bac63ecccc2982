"""A forward that somebody set on a module, before or after ``marvin.integer.convert``, keeps running."""

import copy
import functools
import inspect
import pickle
from collections import OrderedDict
from types import MethodType

import pytest
import torch
from torch import nn

import marvin
from fixedpoint_kernels import products
from fixedpoint_kernels.watch import has_own_forward
from marvin.integer import convert, report, revert
from marvin.integer.fusion import Fused

pytestmark = pytest.mark.skipif(
    not products.path().is_own, reason="no own path of products on this processor"
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x, scale=1.0):
        return self.last(torch.relu(self.first(x))) * scale


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.net = nn.Linear(16, 16), Net()

    def forward(self, x):
        return self.net(torch.relu(self.head(x)))


class Shared(Outer):
    """torch.fx cannot trace it, so that its child has chains of its own."""

    def forward(self, x):
        return super().forward(x) if x.sum() < 1e9 else x


def listed():
    """Return what is one graph, and whose parts, too, are asked for chains of their own."""
    return nn.Sequential(OrderedDict(head=nn.Linear(16, 16), relu=nn.ReLU(), net=Net()))


def make(model):
    torch.manual_seed(0)
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.05)
    optimizer = marvin.Quantized(sgd, marvin.StaticPolicy(8, 8))
    marvin.quantize_activations(model, optimizer)
    return optimizer


def train(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(data()).square().mean()
        loss.backward()
        optimizer.step(loss=loss.detach())


def data():
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def lambda_of(module):
    old = module.forward
    return lambda *xs: 3 * old(*xs)


def method_of(module):
    return MethodType(lambda self, *xs: 3 * Net.forward(self, *xs), module)


def partial_of(module):
    old = module.forward
    return functools.partial(lambda own, *xs: 3 * old(*xs), module)


@pytest.mark.parametrize("wrap", [lambda_of, method_of, partial_of])
@pytest.mark.parametrize("kind", [Net, Outer, Shared, listed])
@pytest.mark.parametrize("then", ["before", "after"])
def test_a_forward_set_on_an_object_keeps_running(wrap, kind, then):
    model = kind()
    optimizer = make(model)
    inner = model if kind is Net else model.net
    twin = copy.deepcopy(model)
    if then == "after":
        convert(model)
        with torch.no_grad():
            model.eval()(data())  # what was traced of the outer module has none of it yet
        model.train()
    own = inner.forward = wrap(inner)
    if then == "before":
        convert(model)
    train(model, optimizer)
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = 3 * twin.eval()(data())
        near = {"rtol": 0.02, "atol": 0.02}  # codes of the layer before may be one apart
        torch.testing.assert_close(model.eval()(data()), expected, **near)
        revert(model)
        assert inner.forward is own
        torch.testing.assert_close(model(data()), expected, **near)
    assert "set on the object" not in str(report(kind()))


def test_the_report_says_which_forwards_stay():
    model = Outer()
    optimizer = make(model)
    model.net.forward = lambda_of(model.net)
    convert(model)
    train(model, optimizer)
    found = report(model)
    assert found.own_forwards == ("net",)
    assert "net: runs part by part, for a forward was set on the object" in str(found)
    assert [row.name for row in found.rows if row.is_fused] == ["head"]
    model.forward = model.forward  # that of its class, bound: nothing of its own
    assert convert(model).own_forwards == ("net",)


def test_what_is_inside_keeps_its_chains():
    model = nn.Sequential(Net(), Net())
    optimizer = make(model)
    model.forward = MethodType(lambda self, x: nn.Sequential.forward(self, x), model)
    convert(model)
    train(model, optimizer)
    assert all(row.is_fused for row in report(model).rows)
    assert all(own.forward.ran for own in model)


def test_a_forward_that_others_wrapped_runs_its_class_after_revert():
    model = Net()
    optimizer = make(model)
    convert(model)
    train(model, optimizer)
    own = model.forward
    model.forward = lambda *xs: own(*xs)
    model(data())
    assert own.ran
    convert(model)
    model(data())
    assert not own.ran  # the model has the options of a later call
    revert(model)
    assert model(data()).grad_fn is not None
    assert not own.ran


def as_accelerate(model):
    """Wrap a forward as Accelerate does with mixed precision: by its function, if it has one."""
    model._original_forward = model.forward
    bound = hasattr(model.forward, "__func__")
    function = model.forward.__func__ if bound else model.forward

    @functools.wraps(function)
    def forward(*args, **kwargs):
        return 1 * function(*args, **kwargs)

    model.forward = MethodType(forward, model) if bound else forward


@pytest.mark.parametrize("made", [copy.deepcopy, marvin.freeze, "average"])
def test_copies_of_a_wrapped_model_compute_with_weights_of_their_own(made):
    model = Net()
    optimizer = make(model)
    convert(model)
    as_accelerate(model)
    average = marvin.MasterAverage(model, optimizer, decay=0.5)
    train(model, optimizer)
    average.update()
    other = average.averaged() if made == "average" else made(model)
    assert vars(model)["_original_forward"].ran
    with torch.no_grad():
        assert other(data()).abs().max() > 0
        for p in other.parameters():
            p.zero_()
        assert other(data()).abs().max() == 0
        assert model(data()).abs().max() > 0


def hooked(model):
    """Wrap the forwards of a model and its parts as Accelerate's hooks do: a partial with all that the forward has."""

    def run(module, *args, **kwargs):
        return module._old_forward(*args, **kwargs)

    for module in model.modules():
        module._old_forward = module.forward
        own = functools.partial(run, module)
        module.forward = functools.update_wrapper(own, module._old_forward)


@pytest.mark.parametrize("made", [copy.deepcopy, marvin.freeze])
def test_a_model_whose_forwards_are_partials_is_copied(made):
    model = Net()
    optimizer = make(model)
    convert(model)
    train(model, optimizer)
    model.eval()
    with torch.no_grad():
        y = model(data())
        hooked(model)
        assert not {"module", "_end", "_modes"} & {*vars(model.forward)}
        torch.testing.assert_close(model(data()), y, rtol=0, atol=0)
        other = made(model)
        torch.testing.assert_close(other(data()), y, rtol=0, atol=0)
        for p in other.parameters():
            p.zero_()
        assert other(data()).abs().max() == 0
        assert model(data()).abs().max() > 0


def test_forwards_that_others_keep_run_after_revert():
    model = Net()
    optimizer = make(model)
    convert(model)
    train(model, optimizer)
    model.eval()
    expected = copy.deepcopy(model)
    revert(expected)
    hooked(model)
    revert(model)
    torch.testing.assert_close(model(data()), expected(data()), rtol=0, atol=0)
    for module in model.modules():  # as when Accelerate takes its hooks off
        module.forward = vars(module).pop("_old_forward")
    torch.testing.assert_close(model(data()), expected(data()), rtol=0, atol=0)


def cloned(module):
    """Copy attributes and tensors, as libraries for meta-learning do."""
    clone = module.__new__(type(module))
    clone.__dict__ = module.__dict__.copy()
    clone._parameters = {name: p.detach().clone() for name, p in module._parameters.items()}
    clone._modules = {name: cloned(child) for name, child in module._modules.items()}
    return clone


@pytest.mark.parametrize("net", [Net, Shared, listed])
@pytest.mark.parametrize("training", [True, False])
def test_a_clone_of_attributes_computes_with_weights_of_its_own(net, training):
    model = net()
    optimizer = make(model)
    convert(model)
    train(model, optimizer)
    model.train(training)
    expected = copy.deepcopy(model)(data())
    clone = cloned(model)
    with torch.no_grad():
        for p in clone.parameters():
            p.zero_()
    clone.requires_grad_(True)
    with torch.set_grad_enabled(training):
        y, again = clone(data()), model(data())
    assert y.abs().max() == 0
    if training:
        y.sum().backward()
        assert all(p.grad is not None for p in clone.parameters())
    assert not any(row.is_fused for row in report(clone).rows)
    torch.testing.assert_close(again, expected, rtol=0.1, atol=0.1)  # other noise
    forwards = [own.forward for own in model.modules() if isinstance(own.forward, Fused)]
    assert any(own.ran for own in forwards)


def test_a_copy_computes_with_modules_that_were_put_into_it():
    model = Net()
    optimizer = make(model)
    convert(model)
    train(model, optimizer)
    model.eval()
    for bind in (False, True):
        other = copy.copy(model)
        if bind:
            other.forward = MethodType(model.forward.__func__, other)
        other._modules = {**model._modules, "last": nn.Identity()}
        with torch.no_grad():
            assert other(data(), scale=1.0).shape == (8, 32)
            assert model(data(), scale=1.0).shape == (8, 16)
    revert(other)
    assert vars(model)["forward"].module is model


def test_a_wrapped_forward_has_the_arguments_of_the_class():
    model = Net()
    make(model)
    expected = inspect.signature(model.forward)
    convert(model)
    as_accelerate(model)
    assert inspect.signature(model.forward) == expected
    assert has_own_forward(model)
    revert(model)
    assert inspect.signature(model.forward) == expected
    assert model(data(), scale=0.0).abs().max() == 0


def test_an_unwrapped_forward_runs_chains_and_goes_with_revert():
    model = Net()
    optimizer = make(model)
    convert(model)
    as_accelerate(model)
    train(model, optimizer)
    own = vars(model).pop("_original_forward")
    model.forward = MethodType(model.forward.__wrapped__, model)
    own.ran = False
    y = model(data())
    assert own.ran
    assert not has_own_forward(model)
    assert all(row.is_fused for row in report(model).rows)
    read = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(read(data()), y, rtol=0.02, atol=0.02)  # layers one by one
    revert(model)
    assert not {"forward", "_kept_forward"} & {*vars(model)}


@pytest.mark.filterwarnings("ignore")  # those of the package
def test_accelerate_with_bfloat16():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = Net()
    optimizer = make(model)
    convert(model)
    model, prepared = accelerator.prepare(model, optimizer)
    for _ in range(3):
        loss = model(data()).square().mean()
        accelerator.backward(loss)
        prepared.step(lambda loss=loss: loss.detach())
        prepared.zero_grad()
    with torch.no_grad():
        y = model(data())
        torch.testing.assert_close(y, y.bfloat16().float(), rtol=0, atol=0)
        other, frozen = copy.deepcopy(model), marvin.freeze(model)
        for p in (*other.parameters(), *frozen.parameters()):
            p.zero_()
        assert other(data()).abs().max() == 0
        assert frozen(data()).abs().max() == 0
        plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        assert isinstance(vars(plain)["_kept_forward"], Fused)
        assert plain(data()).abs().max() > 0
        plain.eval()(data())
        assert vars(plain)["_kept_forward"].ran


@pytest.mark.filterwarnings("ignore")  # those of the package
def test_a_model_that_accelerate_prepared_keeps_bfloat16_when_it_is_converted():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = Net()
    optimizer = make(model)
    model, _ = accelerator.prepare(model, optimizer)
    own = model.forward
    assert convert(model).own_forwards == ("",)
    for change in (lambda model: None, revert):
        change(model)
        y = model(data())
        torch.testing.assert_close(y, y.bfloat16().float(), rtol=0, atol=0)
        assert model.forward is own
