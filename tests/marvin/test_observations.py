"""Steps whose inputs a policy looks at, beside steps where it does not."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
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


def scaled(policy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    optimizer = marvin.Quantized(adamw, policy)
    marvin.quantize_activations(model, optimizer)
    return model, optimizer, torch.amp.GradScaler("cpu", init_scale=1.0)


def scaled_step(model, optimizer, scaler, seed, *, late, overflows=False):
    """Do a step of two micro-batches; ``late``: gradients are dropped between forward and backward."""
    torch.manual_seed(seed)
    if not late:
        model.zero_grad()
    for i in range(2):
        x, y = torch.randn(8, 6), torch.randint(3, (8,))
        loss = F.cross_entropy(model(100 * x if overflows else x), y)
        if late and not i:
            model.zero_grad()
        scaler.scale(loss / 2).backward()
    if overflows:
        model[2].weight.grad[0, 0] = math.inf
    scaler.step(optimizer, loss=loss.detach())
    scaler.update(1.0)


POLICIES = [
    marvin.StaticPolicy(8, 8),
    marvin.LossBudgetPolicy(window=5),
    marvin.LossBudgetPolicy(window=6),  # the step that is left out is one that observes not
]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_batch_that_a_scaler_leaves_out_decides_nothing(policy, late):
    used, other = scaled(policy), scaled(policy)
    for seed in range(4):
        scaled_step(*used, seed, late=late)
        scaled_step(*other, seed, late=late)
    for _ in range(2):
        scaled_step(*used, 9, late=late, overflows=True)
    resumed = scaled(policy)
    for own, before in zip(resumed, used, strict=True):
        own.load_state_dict(copy.deepcopy(before.state_dict()))
    for seed in range(4, 8):
        for own in (used, other, resumed):
            scaled_step(*own, seed, late=late)
    for model, optimizer, _ in (used, resumed):
        assert optimizer.trace == other[1].trace
        assert optimizer.input_formats() == other[1].input_formats()
        torch.testing.assert_close([*model.parameters()], [*other[0].parameters()], rtol=0, atol=0)
    assert len(other[1].trace) > 4


def test_a_step_of_a_scaler_that_is_refused_may_be_tried_again():
    found = []
    for loss in ("0.5", 0.5):
        model, optimizer, scaler = scaled(marvin.LossBudgetPolicy())
        scaler.scale(F.cross_entropy(model(torch.ones(8, 6)), torch.arange(8) % 3)).backward()
        if isinstance(loss, str):
            with pytest.raises(TypeError, match="a loss must be a number"):
                scaler.step(optimizer, loss=loss)
        scaler.step(optimizer, loss=0.5)
        found.append(optimizer.input_formats())
    assert found[0] == found[1]
    assert found[0]


def test_what_a_scaler_left_out_is_not_taken_for_a_step_without_it():
    used, other = scaled(marvin.StaticPolicy(8, 8)), scaled(marvin.StaticPolicy(8, 8))
    for i, (model, optimizer, scaler) in enumerate((used, other)):
        if not i:
            scaled_step(model, optimizer, scaler, 9, late=False, overflows=True)
        torch.manual_seed(0)
        model.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
    assert used[1].input_formats() == other[1].input_formats()
