"""Parameters have one optimizer: what an earlier one may still do."""

import pytest
import torch
from torch import nn

import marvin


def make():
    """Return a model and its optimizer, after a step."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = another(model, marvin.FixedPolicy(8, 4))
    step(model, optimizer)
    return model, optimizer


def another(model, policy):
    """Return one optimizer more."""
    return marvin.Quantized(torch.optim.SGD(model.named_parameters(), lr=0.1), policy)


def step(model, optimizer):
    """Do a step."""
    optimizer.zero_grad()
    loss = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    optimizer.step(loss=loss.detach())


def test_a_state_keeps_its_masters_where_another_optimizer_rounded_the_weights_since():
    """What the warning of the other optimizer asks for: these weights are no new masters of the first."""
    model, before = make()
    wanted = [before.state[p]["master"].clone() for p in model.parameters()]
    after = another(model, marvin.FixedPolicy(8, 2))
    after.load_state_dict(before.state_dict())
    for optimizer in (before, after):
        found = [optimizer.state[p]["master"] for p in model.parameters()]
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("write", ["step", "end_epoch", "adopt_weights"])
def test_an_optimizer_that_another_has_followed_writes_no_weights(write):
    model, before = make()
    after = another(model, marvin.FixedPolicy(16, 12))
    with pytest.warns(UserWarning, match="are the masters of the new optimizer"):
        step(model, after)
    wanted = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="a parameter must have one optimizer"):
        getattr(before, write)()
    assert all(map(torch.equal, model.parameters(), wanted))


@pytest.mark.parametrize("write", ["step", "end_epoch"])
def test_a_model_that_was_made_float64_is_refused(write):
    model, optimizer = make()
    model.double()
    with pytest.raises(TypeError, match="float64"):
        getattr(optimizer, write)()
