import copy
import pickle
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fixedpoint_kernels import few_bit, forward_save
from fixedpoint_kernels.forward_save import activations


def exact_bits(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def network():
    return nn.Sequential(
        OrderedDict(first=nn.Linear(4, 8), gelu=nn.GELU("tanh"), last=nn.Linear(8, 2))
    )


def gradients(model, x):
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return y.detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", activations.FEW_BIT, ids=lambda kind: kind.__name__)
def test_every_activation_becomes_its_namesake(kind):
    parameters = (0.1, 2.0) if kind is nn.Threshold else ()
    model = nn.Sequential(kind(*parameters))
    x = torch.randn(2000, requires_grad=True)
    want = model(x)
    report = forward_save.convert(model, few_bit=4)
    named = getattr(few_bit, kind.__name__)
    assert isinstance(model[0], named)
    assert [(r.layer, r.module) for r in report.replaced] == [("0", kind.__name__)]
    got = model(x)
    # of these torch rounds the last elements of each thread in another way: one unit, of tanh two
    rtol = {nn.Sigmoid: 2**-23, nn.SiLU: 2**-23, nn.Tanh: 2**-22}.get(kind, 0)
    torch.testing.assert_close(got, want, rtol=rtol, atol=0)
    (gradient,) = torch.autograd.grad(got.sum(), x)
    expected = named(*parameters, bits=1 if kind in activations.STEPWISE else 4)(x)
    exact_bits(gradient, torch.autograd.grad(expected.sum(), x)[0])


def test_arguments_and_settings_are_kept():
    model = nn.Sequential(nn.ELU(0.5), nn.LeakyReLU(0.2), nn.Softplus(2.0, 10.0))
    forward_save.convert(model, few_bit={"bits": 2, "weight": "normal"})
    assert str(model[0]) == "ELU(alpha=0.5, bits=2, weight='normal')"
    assert str(model[1]) == "LeakyReLU(negative_slope=0.2, bits=1, weight='normal')"
    assert (model[2].beta, model[2].threshold, model[2].bits) == (2.0, 10.0, 2)


def test_a_model_that_is_one_activation():
    model = nn.SiLU()
    assert forward_save.convert(model, few_bit=1).replaced[0].layer == ""
    assert isinstance(model, few_bit.SiLU)
    forward_save.revert(model)
    assert type(model) is nn.SiLU


def test_reverting_leaves_no_trace():
    model = network()
    modules, state = list(model.modules()), copy.deepcopy(model.state_dict())
    attributes = [{n: id(v) for n, v in vars(m).items()} for m in modules]
    x = torch.randn(5, 4)
    before = gradients(model, x)
    forward_save.convert(model, few_bit=1)
    assert gradients(model, x)[1][0].ne(before[1][0]).any()
    forward_save.revert(model)
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert [{n: id(v) for n, v in vars(m).items()} for m in modules] == attributes
    assert [type(m) for m in modules] == [nn.Sequential, nn.Linear, nn.GELU, nn.Linear]
    assert model.state_dict().keys() == state.keys()
    exact_bits(gradients(model, x), before)


class Hooks:
    """Counts every kind of hook."""

    def __init__(self, module):
        self.calls = []
        note = self.calls.append
        module.register_forward_pre_hook(lambda *_: note("pre"))
        module.register_forward_hook(lambda *_: note("forward"))
        module.register_full_backward_pre_hook(lambda *_: note("backward pre"))
        module.register_full_backward_hook(lambda *_: note("backward"))
        module.register_state_dict_pre_hook(lambda *_: note("state pre"))
        module._register_state_dict_hook(lambda *_: note("state"))
        module.register_load_state_dict_post_hook(lambda *_: note("loaded"))


def test_reverting_gives_attributes_of_the_same_name_back():
    model = nn.Sequential(nn.GELU(), nn.SiLU())
    model[0].bits = "mine"
    forward_save.convert(model, few_bit=3)
    assert model[0].bits == 3
    forward_save.revert(model)
    assert model[0].bits == "mine"
    assert "bits" not in vars(model[1])


def test_hooks_mode_and_ties_are_kept():
    act = nn.GELU()
    act.mine = "an attribute"
    model = nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act).double()
    act.eval()
    hooks = Hooks(act)
    report = forward_save.convert(model, few_bit=3)
    assert len(report.replaced) == 1
    assert model[1] is model[3] is act
    assert not act.training
    assert model[0].training
    assert act.mine == "an attribute"
    model(torch.randn(3, 4, dtype=torch.double, requires_grad=True)).sum().backward()
    model.load_state_dict(model.state_dict())
    assert set(hooks.calls) == {
        *("pre", "forward", "backward pre", "backward", "state pre", "state", "loaded")
    }
    assert hooks.calls.count("forward") == 2


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_converted_too_and_reverts_alone(again):
    class_of = [nn.Linear, nn.GELU, nn.Linear]
    model = network()
    forward_save.convert(model, few_bit=3)
    twin = again(model)
    x = torch.randn(6, 4)
    exact_bits(gradients(twin, x), gradients(model, x))
    assert isinstance(twin.gelu, few_bit.GELU)
    forward_save.revert(twin)
    assert [type(m) for m in twin] == class_of
    assert isinstance(model.gelu, few_bit.GELU)


def test_in_place_stays_in_place():
    def build():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))

    class Model(nn.Module):  # reads what the activation overwrote
        def __init__(self):
            super().__init__()
            self.branch = build()
            self.act = nn.LeakyReLU(0.5, inplace=True)

        def forward(self, x):
            y = self.branch(x)
            z = self.act(y * 2 - 1)
            w = y + 1
            self.act(w)  # w itself changes
            return z + w

    model = Model()
    x = torch.randn(7, 4)
    want = gradients(model, x)
    report = forward_save.convert(model, few_bit=3)
    assert [r.note for r in report.replaced] == ["works in place by a copy"] * 2
    assert "inplace=True" in str(model.act)
    exact_bits(gradients(model, x), want)
    with torch.no_grad():
        y = torch.tensor([-1.0])
        assert model.act(y) is y
        assert y.item() == -0.5


class Blocks(nn.Module):
    """Activations in place, of layers and of functions, and dropout in place."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 20, 3)
        self.norm, self.act = nn.BatchNorm2d(16), nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5, inplace=True)

    def forward(self, x):
        seen = []
        for layer in (self.first, self.norm, self.act, self.drop, F.relu_, self.second):
            x = layer(x)
            x = x * 1  # hooks are not for what is changed
            x.register_hook(lambda grad: seen.append(grad.is_contiguous(memory_format=LAST)))
        return x, seen


LAST = torch.channels_last


def test_gradients_of_what_is_changed_in_place_lie_as_it_does():
    model, x = Blocks().to(memory_format=LAST), torch.randn(3, 4, 9, 7).to(memory_format=LAST)
    forward_save.convert(model, few_bit=3, division=True)
    out, seen = model(x)
    out.backward(torch.randn(out.shape).to(memory_format=LAST))
    assert seen == [True] * 6


def test_a_view_may_be_changed_in_place():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.act = nn.Linear(4, 6), nn.LeakyReLU(0.5, inplace=True)

        def forward(self, x):
            y = self.linear(x)
            self.act(y[:, :2])
            return y.sin()

    model, x = Half(), torch.randn(5, 4)
    want = gradients(model, x)
    forward_save.convert(model, few_bit=3)
    exact_bits(gradients(model, x), want)


def test_a_leaf_may_not_be_changed_in_place():
    act = nn.Sequential(nn.ReLU(inplace=True))
    forward_save.convert(act, few_bit=3)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        act(torch.randn(3, requires_grad=True))


class OwnForward(nn.GELU):
    def forward(self, input):
        return super().forward(input) * 2


class Renamed(nn.GELU):
    """Inherits torch's forward."""


def test_what_is_not_replaced_has_a_reason():
    patched = nn.ReLU()
    patched.forward = F.relu
    model = nn.Sequential(
        OwnForward(), Renamed(), nn.PReLU(), nn.Softmax(-1), patched, few_bit.GELU(), nn.ReLU()
    )
    report = forward_save.convert(model, few_bit=3)
    assert [r.layer for r in report.replaced] == ["1", "6"]
    assert isinstance(model[1], Renamed)
    assert isinstance(model[1], few_bit.GELU)
    assert {k.layer: k.reason for k in report.kept} == {
        "0": "it has a forward of its own",
        "2": "its slope learns",
        "3": "it is not a function of one element",
        "4": "its forward was put on the object",
    }
    assert type(pickle.loads(pickle.dumps(model))[1]).__bases__ == type(model[1]).__bases__
    forward_save.revert(model)
    assert type(model[1]) is Renamed


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.act, self.norm = nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4)

    def forward(self, x, scale=1.0):
        x = self.act(self.linear(self.norm(x))) + 1
        x = F.gelu(x) + torch.relu(x * 3) + x.sigmoid()
        return (x * scale).relu_() + F.dropout(x)


def test_functional_calls_are_named_and_the_sample_changes_nothing():
    model = nn.Sequential(nn.Identity(), Functional())
    called = []
    model[1].register_forward_hook(lambda *_: called.append(1))
    x = torch.randn(300, 4)
    before, noise = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    report = forward_save.convert(model, few_bit=3, sample_input=x)
    few = "3 bits an element"
    calls = [(c.layer, c.function, c.keeps) for c in report.calls]
    assert calls == [
        ("1", "gelu", few),
        ("1", "relu", ""),
        ("1", "sigmoid", few),
        ("1", "relu_", ""),
    ]
    assert not called
    exact_bits(torch.get_rng_state(), noise)
    exact_bits(model.state_dict(), before)
    assert all(p.grad is None for p in model.parameters())
    model(torch.randn(3, 4))
    assert called == [1]


def test_a_relu_before_a_linear_layer_saves_nothing_and_warns():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
    with pytest.warns(UserWarning, match=r"save nothing, .* tensor: 1$"):
        report = forward_save.convert(model, few_bit=3, sample_input=torch.randn(3, 4))
    assert report.saves_nothing == ("1",)


def test_the_report_reads_well():
    model = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.PReLU(), nn.Hardtanh())
    report = forward_save.convert(model, few_bit=3, sample_input=(torch.randn(3, 4),))
    assert str(report) == (
        "replaced: 2\n"
        "  1  SiLU      3 bits an element\n"
        "  3  Hardtanh  1 bit an element\n"
        "not replaced: 1\n"
        "  2  PReLU  its slope learns\n"
        "called, and keep less: nothing\n"
        "called, and keep all: nothing"
    )


def test_errors_change_nothing():
    model = network()
    with pytest.raises(
        ValueError, match="convert needs few_bit and division, one of them, or a plan"
    ):
        forward_save.convert(model)
    with pytest.raises(ValueError, match="bits must be 1 to 8, got"):
        forward_save.convert(model, few_bit=9)
    with pytest.raises(ValueError, match="few_bit takes bits, weight, got colour"):
        forward_save.convert(model, few_bit={"colour": 1})
    with pytest.raises(ValueError, match="must have converted layers to revert, got none"):
        forward_save.revert(model)
    with pytest.raises(ValueError, match=r"layer to convert, got Linear; .*division=True other"):
        forward_save.convert(nn.Linear(2, 2), few_bit=3)
    with pytest.raises(
        ValueError, match=r"got AdaptiveAvgPool2d \(.*\), GELU \(few_bit is not asked"
    ):
        forward_save.convert(
            nn.Sequential(nn.GELU(), nn.AdaptiveAvgPool2d(1)), division=True, calls=False
        )
    assert type(model.gelu) is nn.GELU


def test_converting_twice_is_refused():
    model = network()
    forward_save.convert(model, few_bit=3)
    with pytest.raises(ValueError, match="got layer 'gelu' converted: revert first"):
        forward_save.convert(model, few_bit=2)
    assert model.gelu.bits == 3


def test_a_class_changed_since_is_not_reverted():
    model = nn.Sequential(nn.ReLU(), nn.GELU())
    forward_save.convert(model, few_bit=3)
    model[1].__class__ = nn.Tanh
    with pytest.raises(ValueError, match=r"layer '1' must have the class .* got Tanh"):
        forward_save.revert(model)
    assert isinstance(model[0], few_bit.ReLU)  # all or nothing
