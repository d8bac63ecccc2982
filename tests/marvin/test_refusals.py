"""Mistakes at the door: what to write instead is said, and nothing has changed."""

import copy
import math

import pytest
import torch
from torch import nn

import marvin


def model():
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


@pytest.mark.parametrize("loss", [0.5, torch.tensor(0.5), torch.tensor(0.5, requires_grad=True)])
def test_a_loss_goes_by_its_name(loss):
    net = model()
    optimizers = [
        marvin.MSGD(net.parameters()),
        marvin.Quantized(torch.optim.Adam(model().parameters()), marvin.FixedPolicy()),
    ]
    for optimizer in optimizers:
        with pytest.raises(
            TypeError, match=r"step takes a closure, got .*: write step\(loss=loss\)"
        ):
            optimizer.step(loss)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (marvin.FixedPolicy, r"got the class FixedPolicy: write FixedPolicy\(\)"),
        (None, r"must be one such as marvin.MarvinPolicy\(\), got NoneType"),
        ("marvin", r"must be one such as marvin.MarvinPolicy\(\), got str"),
    ],
)
def test_a_policy_is_an_object(policy, message):
    net = model()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(TypeError, match=message):
        marvin.Quantized(torch.optim.SGD(net.parameters(), lr=0.1), policy)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.parametrize("wrong", [torch.optim.SGD, list(model().parameters()), None])
def test_quantized_wants_an_optimizer(wrong):
    with pytest.raises(TypeError, match=r"such as torch.optim.SGD\(model.named_parameters\(\)"):
        marvin.Quantized(wrong, marvin.FixedPolicy())


def test_activations_want_an_optimizer_with_formats():
    net = model()
    with pytest.raises(TypeError, match=r"marvin.MSGD\(.*\) or marvin.Quantized\(.*\), got SGD"):
        marvin.quantize_activations(net, torch.optim.SGD(net.parameters(), lr=0.1))


@pytest.mark.parametrize("loss", [math.nan, math.inf, torch.tensor(math.nan, requires_grad=True)])
def test_a_loss_that_is_not_finite_is_one_without_gradients_too(loss):
    optimizer = marvin.MSGD(model().parameters())
    with pytest.raises(FloatingPointError, match=r"got loss (nan|inf) after 0 steps"):
        optimizer.step(loss=loss)
    with pytest.raises(FloatingPointError, match=r"got loss (nan|inf) after 0 steps"):
        optimizer.step(lambda: loss)
    skipping = marvin.MSGD(model().parameters(), nonfinite="skip")
    skipping.step(loss=loss)
    assert skipping.skipped_steps == 1
    for finite in (0.5, torch.tensor(0.5, requires_grad=True), None):
        assert optimizer.step(loss=finite) is finite
