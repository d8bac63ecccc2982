"""Batch norm's statistics estimated anew: against float64 means, and what must not change."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import marvin

POLICIES = {
    "float": None,
    "marvin": lambda: marvin.MarvinPolicy(lookback=(2, 5), resolution=(10, 20), max_wl=8),
    "budget": lambda: marvin.LossBudgetPolicy(window=3),
    "static": lambda: marvin.StaticPolicy(4, 4),
}


class Net(nn.Module):
    """Two layers of batch norm, the second called by keyword, and dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.drop = nn.Dropout(0.5)
        self.conv2 = nn.Conv2d(6, 4, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(4, momentum=None)
        self.unused = nn.BatchNorm1d(5)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.relu(self.bn1(self.conv1(x))))
        return self.fc(F.relu(self.bn2(input=self.conv2(x))).mean((2, 3)))


def trained(policy: str, *, converted: bool = False, steps: int = 7):
    """A model after some steps of training; its optimizer, or None."""
    torch.manual_seed(1)
    model = Net()
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.05)
    if (make := POLICIES[policy]) is None:
        optimizer = sgd
    else:
        optimizer = marvin.Quantized(sgd, make(), seed=3)
        marvin.quantize_activations(model, optimizer)
    if converted:
        marvin.integer.convert(model)
    train(model, optimizer, steps)
    return model, optimizer


def train(model, optimizer, steps: int, seed: int = 5) -> None:
    torch.manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(8, 3, 6, 6) * 2 + 1
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), torch.randint(3, (8,)))
        loss.backward()
        is_float = isinstance(optimizer, torch.optim.SGD)
        optimizer.step() if is_float else optimizer.step(loss=loss.item())


def batches(count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(8 + i, 3, 6, 6, generator=generator) - 1 for i in range(count)]


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {n: b.clone() for n, b in model.named_buffers() if "running" in n}


def captured(model: nn.Module, name: str, found: list[Tensor]):
    """Keep what goes into a module, after all other hooks have changed it."""
    module = model.get_submodule(name)

    def keep(_module, args, kwargs):
        found.append((args[0] if args else kwargs["input"]).detach().double())

    return module.register_forward_pre_hook(keep, with_kwargs=True)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("converted", [False, True])
def test_statistics_are_the_float64_means_of_what_the_norms_see(policy, converted):
    if converted and policy == "float":
        pytest.skip("a float model has no formats to convert")
    model, _ = trained(policy, converted=converted)
    for name in ("bn1", "bn2"):
        seen: list[Tensor] = []
        hook = captured(model, name, seen)
        names = marvin.reestimate_batch_norm(model, batches())
        hook.remove()
        assert names == ("bn1", "bn2")
        assert len(seen) == 4
        module = model.get_submodule(name)
        mean = torch.stack([x.mean((0, 2, 3)) for x in seen]).mean(0)
        variance = torch.stack([x.transpose(0, 1).flatten(1).var(1) for x in seen]).mean(0)
        # float32 statistics of a batch, each rounded a few times
        torch.testing.assert_close(module.running_mean.double(), mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(module.running_var.double(), variance, rtol=1e-5, atol=1e-6)


def test_the_second_norm_sees_what_the_first_makes_of_its_batch():
    """An oracle of its own: the whole network in float64, layer by layer."""
    model, _ = trained("float")
    with torch.no_grad():
        model.bn1.running_mean.fill_(50.0)  # far off: nothing may depend on it
        model.bn1.running_var.fill_(1e-3)
    means, variances = [], []
    own = copy.deepcopy(model).double()
    for x in batches():
        y = F.conv2d(x.double(), own.conv1.weight, padding=1)
        flat = y.transpose(0, 1).flatten(1)
        shape = (1, -1, 1, 1)
        y = (y - flat.mean(1).view(shape)) / (flat.var(1, correction=0).view(shape) + 1e-5).sqrt()
        y = F.relu(y * own.bn1.weight.view(shape) + own.bn1.bias.view(shape))
        y = F.conv2d(y, own.conv2.weight, own.conv2.bias, padding=1).transpose(0, 1).flatten(1)
        means.append(y.mean(1))
        variances.append(y.var(1))
    marvin.reestimate_batch_norm(model, batches())
    got = model.bn2.running_mean.double(), model.bn2.running_var.double()
    want = torch.stack(means).mean(0), torch.stack(variances).mean(0)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)  # float32 convolutions


def test_batches_may_be_pairs_or_keywords():
    model, _ = trained("float")
    marvin.reestimate_batch_norm(model, batches())
    want = statistics(model)
    for own in (
        [(x, torch.zeros(1)) for x in batches()],
        [[x, None] for x in batches()],
        ({"x": x} for x in batches()),
    ):
        train(model, torch.optim.SGD(model.named_parameters(), lr=0.0), 2)
        assert not torch.equal(statistics(model)["bn1.running_var"], want["bn1.running_var"])
        marvin.reestimate_batch_norm(model, own)
        torch.testing.assert_close(statistics(model), want, rtol=0, atol=0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("converted", [False, True])
def test_training_goes_on_as_without_it(policy, converted):
    plain, first = trained(policy, converted=converted)
    again, second = trained(policy, converted=converted)
    again.conv2.eval()
    modes = [module.training for module in again.modules()]
    random = torch.get_rng_state()
    before = again.state_dict()
    kept = {name: value.clone() for name, value in before.items() if "running" not in name}
    handles = [len(m._forward_pre_hooks) for m in again.modules()]
    marvin.reestimate_batch_norm(again, batches())
    torch.testing.assert_close(torch.get_rng_state(), random, rtol=0, atol=0)
    assert [module.training for module in again.modules()] == modes
    assert [len(m._forward_pre_hooks) for m in again.modules()] == handles
    after = again.state_dict()
    for name, value in kept.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=0)
    again.conv2.train()
    train(plain, first, 4, seed=6)
    train(again, second, 4, seed=6)
    weights = [list(model.parameters()) for model in (plain, again)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    assert repr(first.state_dict()) == repr(second.state_dict())


def test_a_frozen_copy_computes_the_same():
    model, _ = trained("budget")
    frozen = marvin.freeze(model)
    marvin.reestimate_batch_norm(model, batches())
    marvin.reestimate_batch_norm(frozen, batches())
    torch.testing.assert_close(statistics(frozen), statistics(model), rtol=0, atol=0)
    x = batches()[0]
    torch.testing.assert_close(frozen(x), model.eval()(x), rtol=0, atol=0)


def test_what_fails_leaves_the_statistics():
    model, _ = trained("float")
    before = statistics(model)
    with pytest.raises(ValueError, match="at least one batch must come through"):
        marvin.reestimate_batch_norm(model, [])
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        marvin.reestimate_batch_norm(model, [*batches(1), torch.randn(1, 3, 1, 1)])
    torch.testing.assert_close(statistics(model), before, rtol=0, atol=0)
    assert all(module.training for module in model.modules())


def test_a_model_without_batch_norm_takes_no_batch():
    def none():
        raise AssertionError
        yield

    assert marvin.reestimate_batch_norm(nn.Linear(3, 3), none()) == ()
    untracked = nn.BatchNorm1d(3, track_running_stats=False)
    assert marvin.reestimate_batch_norm(untracked, none()) == ()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e30])
def test_statistics_that_are_not_finite_are_refused_and_nothing_changes(wrong):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    before = copy.deepcopy(model.state_dict())
    batches = [torch.randn(5, 3), torch.randn(5, 3) * wrong]
    with pytest.raises(ValueError, match="must see finite values, got others at 1"):
        marvin.reestimate_batch_norm(model, batches)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_batch_of_no_samples_counts_for_nothing():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    other, x = copy.deepcopy(model), torch.randn(5, 3)
    marvin.reestimate_batch_norm(model, [x[:0], x, x[:0]])
    marvin.reestimate_batch_norm(other, [x])
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("policy", ["float", "static"])
@pytest.mark.parametrize("converted", [False, True])
def test_frozen_norms_keep_the_statistics_that_training_reads(policy, converted):
    if converted and policy == "float":
        pytest.skip("a float model has no formats to convert")
    model, _ = trained(policy, converted=converted)
    model.bn1.eval()
    before = statistics(model)
    seen: list[Tensor] = []
    hook = captured(model, "bn2", seen)
    assert marvin.reestimate_batch_norm(model, batches()) == ("bn2",)
    hook.remove()
    after = statistics(model)
    for name in ("bn1.running_mean", "bn1.running_var"):
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=0)
    assert not torch.equal(after["bn2.running_mean"], before["bn2.running_mean"])
    want: list[Tensor] = []  # what comes behind a norm that its own statistics normalise
    other = copy.deepcopy(model).eval()
    captured(other, "bn2", want)
    with torch.no_grad():
        for x in batches():
            other(x)
    torch.testing.assert_close(seen, want, rtol=0, atol=0)
    for name in ("bn2", "unused"):  # in a model that trains, all are frozen now
        model.get_submodule(name).eval()
    assert marvin.reestimate_batch_norm(model, []) == ()
    model.eval()
    assert marvin.reestimate_batch_norm(model, batches()) == ("bn1", "bn2")
    assert not torch.equal(statistics(model)["bn1.running_mean"], before["bn1.running_mean"])
