"""Inputs, settings and classes at the edges of what ``convert`` and ``saving`` take."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace
from torch.nn import functional as F

from fixedpoint_kernels import few_bit, forward_save
from fixedpoint_kernels.forward_save import sample

BOTH = {"few_bit": 3, "division": True}


def exact_bits(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0)


class Functions(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x):
        return F.gelu(self.inner(x) * self.inner(x))


class Copies(nn.Linear):
    """A class that is copied and pickled its own way."""

    def __init__(self, size=32):
        super().__init__(size, size)

    def __deepcopy__(self, memo):
        made = type(self)(self.in_features)
        made.load_state_dict(self.state_dict())
        return made

    def __reduce__(self):
        return type(self), (self.in_features,), {"weight": self.weight, "bias": self.bias}

    def __setstate__(self, state):
        self.load_state_dict(state) if len(state) == 2 else super().__setstate__(state)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("build", [Copies, lambda: symbolic_trace(Functions())])
def test_copies_of_classes_that_copy_themselves_are_converted(build, again):
    model, x = build(), torch.randn(64, 32)
    forward_save.convert(model, **BOTH)
    want, kept = model(x), sample.observe(model, x).size_bytes
    twin = again(model)
    exact_bits(twin(x), want)
    assert sample.observe(twin, x).size_bytes == kept
    forward_save.revert(twin)
    assert sample.observe(twin, x).size_bytes > kept == sample.observe(model, x).size_bytes


def test_a_graph_is_compiled_to_code_again():
    model, x = symbolic_trace(Functions()), torch.randn(64, 32)
    forward_save.convert(model, **BOTH)
    kept = sample.observe(model, x).size_bytes
    model.recompile()
    assert sample.observe(model, x).size_bytes == kept
    forward_save.revert(model)
    exact_bits(model(x), F.gelu(model.inner(x) * model.inner(x)))  # pyright: ignore


@pytest.mark.parametrize(
    "layer", [nn.GELU(), nn.ReLU(), nn.ReLU(inplace=True), nn.Dropout(0.5)], ids=str
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_take_torchs_own(layer):
    forward_save.convert(layer, **BOTH)
    parts = [torch.randn(3, 8), torch.randn(5, 8)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    layer(x * 1).values().sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    ("layer", "sides"),
    [
        (nn.MaxPool2d((2,)), 2),  # pyright: ignore
        (nn.AvgPool2d((2,)), 2),  # pyright: ignore
        (nn.MaxPool3d((2,)), 3),  # pyright: ignore
        (nn.AdaptiveAvgPool2d([2, 3]), 2),  # pyright: ignore
    ],
    ids=str,
)
def test_windows_of_one_number_and_lists(layer, sides):
    twin, x = copy.deepcopy(layer), torch.randn((2, 3) + (8,) * sides, requires_grad=True)
    forward_save.convert(twin, division=True)
    got, want = (torch.autograd.grad(m(x).square().sum(), x)[0] for m in (twin, layer))
    exact_bits(got, want)


def kept_twice(model, x):
    exact = sample.observe(model, x).size_bytes
    forward_save.convert(model, **BOTH)
    return sample.observe(model, x).size_bytes, exact


def test_what_would_not_get_smaller_is_kept_as_it_is():
    one = torch.randn(1, requires_grad=True)
    got, exact = kept_twice(nn.Sequential(nn.Sigmoid(), nn.GELU(), nn.Dropout(0.5)), one)
    assert got == exact
    got, exact = kept_twice(nn.Linear(2, 4).bfloat16(), torch.randn(3, 2).bfloat16())
    assert got == exact == 3 * 2 * 2
    got, exact = kept_twice(nn.Linear(32, 4), torch.randn(1, 32).expand(512, 32))
    assert got == exact == 4 * 32
    scope = forward_save.saving(**BOTH)
    with scope:
        torch.sigmoid(one)
        F.dropout(one)
    assert scope.handled == {}


def test_true_means_the_default_bits_and_weights_are_known():
    report = forward_save.convert(nn.GELU(), few_bit=True)
    assert report.replaced[0].keeps == "3 bits an element"
    for make in (lambda **kw: forward_save.convert(nn.GELU(), **kw), forward_save.saving):
        with pytest.raises(ValueError, match="weight must be 'uniform', 'normal' or a function"):
            make(few_bit={"weight": "foo"})
        with pytest.raises(TypeError, match="bits must be an integer, got False"):
            make(few_bit=False)


def test_a_table_without_borders():
    double, x = few_bit.Activation(lambda x: 2 * x), torch.randn(5000, requires_grad=True)
    double(x).sum().backward()
    exact_bits(x.grad, torch.full((5000,), 2.0))


def test_conversions_begin_in_inference_mode():
    layer = nn.Linear(32, 4)
    with torch.inference_mode():
        forward_save.convert(layer, division=True)
    layer(torch.randn(64, 32)).sum().backward()
    assert forward_save.state(layer)["count"] == 1


def test_bounds_of_hardtanh_in_the_wrong_order_are_torchs_error():
    x = torch.randn(500, requires_grad=True)
    with forward_save.saving(**BOTH), pytest.raises(ValueError, match="min_val cannot be greater"):
        F.hardtanh(x, 2.0, 1.0)
