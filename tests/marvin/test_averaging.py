"""The average of masters: against float64, and that training does not notice."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import marvin
from fixedpoint_kernels import quantize

POLICIES = {
    "float": None,
    "marvin": lambda: marvin.MarvinPolicy(lookback=(2, 5), resolution=(10, 20), max_wl=8),
    "budget": lambda: marvin.LossBudgetPolicy(window=3),
    "channels": lambda: marvin.LossBudgetPolicy(window=3, per_channel=True),
}


def make(policy: str, seed: int = 1):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    if POLICIES[policy] is None:
        return model, sgd
    optimizer = marvin.Quantized(sgd, POLICIES[policy](), seed=3)
    marvin.quantize_activations(model, optimizer)
    return model, optimizer


def train(model, optimizer, steps: int, average=None, seed: int = 5):
    """Yield the masters after each step."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(16, 6, generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), (x[:, :3]).argmax(1))
        loss.backward()
        is_float = isinstance(optimizer, torch.optim.SGD)
        optimizer.step() if is_float else optimizer.step(loss=loss.item())
        if average is not None:
            average.update()
        state = optimizer.state
        yield [(p if is_float else state[p]["master"]).detach().clone() for p in model.parameters()]


def test_each_weight_has_the_format_of_its_own_optimizer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    made = [
        marvin.Quantized(torch.optim.SGD([*model[i].named_parameters()], lr=0.1), policy)
        for i, policy in ((0, marvin.FixedPolicy(8, 6)), (2, marvin.FixedPolicy(4, 2)))
    ]
    average = marvin.MasterAverage(model, made[0], decay=0.5)
    for _ in range(3):
        model(torch.randn(8, 6)).square().mean().backward()
        for optimizer in made:
            optimizer.step(loss=1.0)
        average.update()
        if average.steps == 1:  # it is all of the average
            master = made[1].state[model[2].weight]["master"]
            assert torch.equal(average.masters["2.weight"], master)
    found = average.averaged()
    for i, fl in ((0, 6), (2, 2)):
        values = found[i].weight * 2**fl
        assert torch.equal(values, values.round())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: m.append(nn.Linear(3, 3)),
            r"got 4\.weight of shape \(3, 3\) in the place of none",
        ),
        (
            lambda m: m.__setitem__(3, nn.Linear(12, 1)),
            r"of shape \(1, 12\) in the place of \(3, 12\)",
        ),
    ],
    ids=["added", "replaced"],
)
def test_other_parameters_are_named(change, message):
    model, optimizer = make("budget")
    average = marvin.MasterAverage(model, optimizer)
    average.update()
    before = {name: value.clone() for name, value in average.masters.items()}
    change(model)
    with pytest.raises(ValueError, match=message + ": make a new MasterAverage"):
        average.update()
    assert all(torch.equal(average.masters[name], value) for name, value in before.items())


@pytest.mark.parametrize("policy", POLICIES)
def test_it_is_the_moving_average_of_the_masters(policy):
    model, optimizer = make(policy)
    average = marvin.MasterAverage(model, optimizer, decay=0.7)
    want = [p.detach().double() * 0 for p in model.parameters()]
    for n, masters in enumerate(train(model, optimizer, 40, average)):
        keep = min(0.7, n / (n + 9))
        want = [keep * a + (1 - keep) * m.double() for a, m in zip(want, masters, strict=True)]
    got = [value.double() for value in average.masters.values()]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)  # float32 recursion
    assert not torch.equal(got[0].float(), masters[0])


@pytest.mark.parametrize("policy", ["budget", "marvin"])
def test_the_copy_has_weights_of_the_formats_of_now(policy):
    model, optimizer = make(policy)
    average = marvin.MasterAverage(model, optimizer)
    list(train(model, optimizer, 12, average))
    before = copy.deepcopy(model.state_dict())
    found = average.averaged()
    formats = optimizer.formats()
    for name, p in found.named_parameters():
        master = average.masters[name]
        want = quantize(master, formats[name], rounding="nearest") if name in formats else master
        torch.testing.assert_close(p.detach(), want, rtol=0, atol=0)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not torch.equal(next(found.parameters()), next(model.parameters()))
    x = torch.randn(5, 6)
    frozen = marvin.freeze(found)
    torch.testing.assert_close(frozen(x), found.eval()(x), rtol=0, atol=0)


@pytest.mark.parametrize("policy", POLICIES)
def test_training_does_not_notice(policy):
    plain, averaged = make(policy), make(policy)
    average = marvin.MasterAverage(*averaged)
    for own, other in zip(train(*plain, 14), train(*averaged, 14, average), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0)
        marvin.reestimate_batch_norm(average.averaged(), [torch.randn(9, 6)])


def test_resumed_is_never_stopped():
    model, optimizer = make("budget")
    average = marvin.MasterAverage(model, optimizer, decay=0.9)
    list(train(model, optimizer, 5, average))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), average.state_dict()))
    list(train(model, optimizer, 5, average, seed=6))
    other, again = make("budget", seed=2)
    resumed = marvin.MasterAverage(other, again, decay=0.5)
    for own, state in zip((other, again, resumed), saved, strict=True):
        own.load_state_dict(state)
    list(train(other, again, 5, resumed, seed=6))
    assert resumed.steps == average.steps == 10
    torch.testing.assert_close(resumed.masters, average.masters, rtol=0, atol=0)


def test_models_and_optimizers_that_do_not_belong_together_are_refused():
    (model, optimizer), (other, _) = make("budget"), make("budget")
    call = r": write marvin\.MasterAverage\(model, optimizer\)"
    for wrong in ((optimizer, model), (model, None), (None, optimizer)):
        kinds = " and ".join(type(value).__name__ for value in wrong)
        with pytest.raises(TypeError, match=f"optimizer second, got {kinds}{call}"):
            marvin.MasterAverage(*wrong)
    with pytest.raises(
        TypeError, match=f"must be the Quantized, .* got the SGD that it wraps{call}"
    ):
        marvin.MasterAverage(model, optimizer.optimizer)
    with pytest.raises(ValueError, match="must have parameters of the model, got a Quantized of"):
        marvin.MasterAverage(other, optimizer)


def test_what_is_no_state_is_named():
    average = marvin.MasterAverage(*make("budget"))
    for state, got in (({}, "nothing"), ({"steps": 1}, "steps"), (None, "NoneType")):
        with pytest.raises(ValueError, match=f"must have decay, steps, masters, got {got}: give"):
            average.load_state_dict(state)
    with pytest.raises(ValueError, match=r"decay must be 0 or more and below 1, got '0\.9'"):
        average.load_state_dict({**average.state_dict(), "decay": "0.9"})
    for steps in (-9, 2.5, "3", None, True):
        with pytest.raises(ValueError, match=f"steps must be a whole number, .* got {steps!r}"):
            average.load_state_dict({**average.state_dict(), "steps": steps})
    with pytest.raises(ValueError, match="masters must have the names and shapes of 6"):
        average.load_state_dict({**average.state_dict(), "masters": None})


def test_refusals():
    model, optimizer = make("budget")
    with pytest.raises(ValueError, match=r"decay must be 0 or more and below 1, got '0\.9'"):
        marvin.MasterAverage(model, optimizer, decay="0.9")
    with pytest.raises(ValueError, match="decay must be 0 or more and below 1, got 1"):
        marvin.MasterAverage(model, optimizer, decay=1)
    average = marvin.MasterAverage(model, optimizer)
    with pytest.raises(ValueError, match="update\\(\\) must come before averaged"):
        average.averaged()
    other = nn.Linear(2, 2)
    strange = marvin.MasterAverage(other, torch.optim.SGD(other.parameters())).state_dict()
    with pytest.raises(ValueError, match="masters must have the names and shapes of 6"):
        average.load_state_dict(strange)
