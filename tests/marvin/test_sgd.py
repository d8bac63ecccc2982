"""Plain SGD moves and rounds in one pass, to the bits of torch's step; anything special is left to torch."""

import copy

import pytest
import torch
from torch import nn

import marvin
from fixedpoint_kernels import sgd
from marvin import quantized

pytestmark = pytest.mark.skipif(
    not sgd.has_bits_of_torch(), reason="torch rounds sums of products twice on this processor"
)
SGD = torch.optim.SGD
PLAIN = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
FUSED = {
    "msgd": lambda ps: marvin.MSGD(ps, lr=0.05, lookback=(2, 4), resolution=(5, 9)),
    "raw": lambda ps: marvin.MSGD(ps, normalize_gradients=False, one_dim="float"),
    "fixed": lambda ps: marvin.Quantized(SGD(ps, **PLAIN, nesterov=True), marvin.FixedPolicy(8, 4)),
    "no_momentum": lambda ps: marvin.Quantized(SGD(ps, lr=0.1), marvin.FixedPolicy(6, 3)),
    "static": lambda ps: marvin.Quantized(SGD(ps, **PLAIN), marvin.StaticPolicy(window=3)),
}
NOT_FUSED = {
    "per_channel": lambda ps: marvin.Quantized(
        SGD(ps, **PLAIN), marvin.StaticPolicy(window=3, per_channel=True)
    ),
    "blocks": lambda ps: marvin.Quantized(SGD(ps, **PLAIN), marvin.MuppetPolicy()),
    "foreach": lambda ps: marvin.Quantized(
        SGD(ps, **PLAIN, foreach=True), marvin.FixedPolicy(8, 4)
    ),
    "dampening": lambda ps: marvin.Quantized(
        SGD(ps, lr=0.1, momentum=0.9, dampening=0.1), marvin.FixedPolicy(8, 4)
    ),
    "maximize": lambda ps: marvin.Quantized(
        SGD(ps, lr=0.1, maximize=True), marvin.FixedPolicy(8, 4)
    ),
    "tensor_lr": lambda ps: marvin.Quantized(
        SGD(ps, lr=torch.tensor(0.1)), marvin.FixedPolicy(8, 4)
    ),
    "adam": lambda ps: marvin.Quantized(torch.optim.Adam(ps), marvin.FixedPolicy(8, 4)),
}


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 3)
    )


def train(net, optimizer, steps, frozen=()):
    for i in steps:
        g = torch.Generator().manual_seed(i)
        optimizer.zero_grad()
        loss = net(torch.randn(6, 2, 4, 4, generator=g)).square().mean()
        loss.backward()
        for p in frozen:
            p.grad = None
        optimizer.step(loss=loss.detach())


def facts(net, optimizer):
    state = optimizer.state_dict()
    own = [{k: v for k, v in values.items() if k != "layer"} for values in state["state"].values()]
    return [dict(net.state_dict()), own, [*state["optimizer"]["state"].values()]]


@pytest.fixture
def launches(monkeypatch):
    """Count the steps that were done in one pass."""
    found = []
    own = sgd.step_many

    def counted(*args, **options):
        done = own(*args, **options)
        found.append(done)
        return done

    monkeypatch.setattr("marvin.masters.step_many", counted)
    return found


def run(make, steps=9):
    net = model()
    optimizer = make(list(net.named_parameters()))
    marvin.quantize_activations(net, optimizer)
    train(net, optimizer, range(steps), frozen=[net[1].bias])  # one never moves
    return facts(net, optimizer)


@pytest.mark.parametrize("name", FUSED)
def test_one_pass_has_the_bits_of_torchs_step(name, launches, monkeypatch):
    fused = run(FUSED[name])
    first = 1 if name == "static" else 0  # whose first step has no formats
    assert launches[first:] == [True] * (9 - first)
    monkeypatch.setattr(quantized, "moves_of", lambda *_: None)
    del launches[:]
    torch.testing.assert_close(run(FUSED[name]), fused, rtol=0, atol=0)
    assert launches == []


@pytest.mark.parametrize("name", NOT_FUSED)
def test_what_is_special_is_left_to_torch(name, launches, monkeypatch):
    found = run(NOT_FUSED[name])
    assert not any(launches[1:])
    monkeypatch.setattr(quantized, "moves_of", lambda *_: None)
    torch.testing.assert_close(run(NOT_FUSED[name]), found, rtol=0, atol=0)


def test_hooks_and_schedulers_of_the_wrapped_optimizer_are_called(launches):
    net, calls = model(), []
    optimizer = FUSED["fixed"](list(net.named_parameters()))
    handle = optimizer.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    train(net, optimizer, range(3))
    assert len(calls) == 3
    assert launches == []
    handle.remove()
    train(net, optimizer, range(3, 5))
    assert launches == [True, True]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1)
    train(net, optimizer, range(5, 7))
    scheduler.step()  # a warning, if it saw no step of the optimizer
    assert len(launches) == 2


def test_a_state_goes_from_one_way_to_the_other(monkeypatch, launches):
    net, other = model(), model()
    optimizer, twin = (FUSED["msgd"](list(m.named_parameters())) for m in (net, other))
    train(net, optimizer, range(5))
    train(other, twin, range(3))  # a past of its own
    other.load_state_dict(net.state_dict())
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares its tensors
    train(net, optimizer, range(5, 9))
    assert all(launches)
    monkeypatch.setattr(quantized, "moves_of", lambda *_: None)
    train(other, twin, range(5, 9))
    torch.testing.assert_close(facts(other, twin), facts(net, optimizer), rtol=0, atol=0)


def test_noise_for_channels_last_is_left_to_torch(launches):
    net = model().to(memory_format=torch.channels_last)
    optimizer = FUSED["fixed"](list(net.named_parameters()))
    train(net, optimizer, range(2))
    assert launches == [False, False]
    twin = model()
    same = FUSED["fixed"](list(twin.named_parameters()))
    train(twin, same, range(2))
    assert launches[2:] == [True, True]


@pytest.mark.parametrize("is_last", [True, False], ids=["model", "gradients alone"])
def test_channels_last_moves_in_one_pass_to_the_bits_of_torch(is_last, launches, monkeypatch):
    def run_last():
        net = model()
        if is_last:
            net = net.to(memory_format=torch.channels_last)
        else:  # they lie otherwise than their masters
            net[0].weight.register_post_accumulate_grad_hook(
                lambda p: setattr(p, "grad", p.grad.contiguous(memory_format=torch.channels_last))
            )
        policy = marvin.LossBudgetPolicy(window=4, batch_size=6)
        optimizer = marvin.Quantized(SGD(net.named_parameters(), **PLAIN, nesterov=True), policy)
        train(net, optimizer, range(6))
        return facts(net, optimizer)

    found = run_last()
    assert launches == [is_last] * 6
    monkeypatch.setattr(quantized, "moves_of", lambda *_: None)
    torch.testing.assert_close(run_last(), found, rtol=0, atol=0)
