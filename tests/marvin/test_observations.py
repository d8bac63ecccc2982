"""Steps whose inputs a policy looks at, beside steps where it does not."""

import pytest
import torch
from torch import nn

import marvin
from fixedpoint_kernels import FixedPoint
from marvin.policies.observer import Observer, inputs_of


def make(ste="clip"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.01)
    optimizer = marvin.Quantized(sgd, marvin.StaticPolicy(4, 3))
    handle = marvin.quantize_activations(model, optimizer, ste=ste)
    model(torch.randn(16, 6)).square().sum().backward()
    optimizer.step()  # the first formats
    optimizer.zero_grad()
    return model, optimizer, handle


@pytest.mark.parametrize("ste", ["clip", "identity"])
def test_looking_changes_nothing(ste, monkeypatch):
    found = []
    for looks in (True, False):
        model, optimizer, handle = make(ste)
        monkeypatch.setattr(
            marvin.StaticPolicy, "observes", lambda self, step, settings, looks=looks: looks
        )
        optimizer._observe_next()
        handle.saturation()
        x = (4 * torch.randn(32, 6)).requires_grad_()
        y = model(x)
        y.square().sum().backward()
        assert (inputs_of(optimizer._carriers.observers, 32) != {}) == looks
        gradients = [p.grad for p in model.parameters()]
        monkeypatch.undo()
        found.append([y, x.grad, *gradients, torch.tensor([*handle.saturation().values()])])
    assert ((found[0][1] == 0).any()) == (ste == "clip")  # some were clamped
    assert (found[0][-1].sum() > 0) == (ste == "clip")
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_images_get_no_gradient_that_nobody_asked_for():
    x = torch.randn(4, 3)
    y, clamped = Observer().round(x, FixedPoint(3, 1), clip=True)
    assert clamped == ((x * 2).round() > 3).sum() + ((x * 2).round() < -4).sum()
    leaf = y.grad_fn.next_functions[0][0].variable
    y.sum().backward()
    assert leaf.grad is None
    assert x.grad is None


def test_what_is_not_floating_and_what_is_empty_is_left_out():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2))
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.01)
    optimizer = marvin.Quantized(sgd, marvin.StaticPolicy(4, 4))
    marvin.quantize_activations(model, optimizer)
    for n in (3, 0):
        model(torch.zeros(n, dtype=torch.int64)).sum().backward()
    assert set(inputs_of(optimizer._carriers.observers, 3)) == {1}
    optimizer.step()
    assert optimizer.input_formats().keys() == {"1.weight"}
