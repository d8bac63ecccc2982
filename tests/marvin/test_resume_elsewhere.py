"""States in objects that were built otherwise, parameters that are frozen for a while, and weights that others set."""

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import marvin
from fixedpoint_kernels import FixedPoint


def build(frozen=False, seed=0, order=(0, 2)):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[0].requires_grad_(not frozen)
    groups = [{"params": [*model[i].named_parameters(prefix=str(i))]} for i in order]
    optimizer = marvin.MSGD(groups, lr=0.05)
    marvin.quantize_activations(model, optimizer)
    return model, optimizer


def train(model, optimizer, steps, seed=0, shape=(16, 8)):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(shape, generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), (x.flatten(1)[:, 0] > 0).long())
        loss.backward()
        optimizer.step(loss=loss)


def equal(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return [torch.equal(p, q) for p, q in pairs]


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_a_backbone_that_was_frozen_comes_back(order):
    """Its state has no masters, and the new script trains all of it."""
    model, optimizer = build(frozen=True)
    train(model, optimizer, 5)
    later, again = build(seed=1)
    loads = [
        (later.load_state_dict, model.state_dict()),
        (again.load_state_dict, optimizer.state_dict()),
    ]
    for load, state in loads if order == "model first" else loads[::-1]:
        load(state)
    assert all(equal(model, later))
    weight = model[0].weight.clone()
    again.param_groups[0]["lr"] = 0.0
    again.param_groups[0]["weight_decay"] = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(later, again, 1)
    assert torch.equal(again.state[later[0].weight]["master"], weight)


def test_a_backbone_that_nobody_loaded_is_float_again():
    model, optimizer = build(frozen=True)
    train(model, optimizer, 2)
    later, again = build()  # the same numbers, rounded
    assert not torch.equal(later[0].weight, model[0].weight)
    again.load_state_dict(optimizer.state_dict())
    assert torch.equal(later[0].weight, model[0].weight)


def test_groups_in_another_order_are_named():
    model, optimizer = build()
    train(model, optimizer, 2)
    later, again = build(seed=1, order=(2, 0))
    later.load_state_dict(model.state_dict())
    with pytest.raises(
        ValueError, match=r"got 0\.weight in the place of 2\.weight: make its groups"
    ):
        again.load_state_dict(optimizer.state_dict())
    assert all(equal(model, later))


def test_names_of_a_wrapped_model_are_of_the_same_parameters():
    model, optimizer = build()
    train(model, optimizer, 2)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["param_names"] = ["module." + name for name in group["param_names"]]
    later, again = build(seed=1)
    again.load_state_dict(state)
    assert all(equal(model, later))


def normed():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3)
    model = nn.Sequential(*layers)
    rules = {"lookback": (3, 6), "init_wl": 16, "init_fl": 12}
    optimizer = marvin.MSGD(model.named_parameters(), lr=0.05, **rules)
    marvin.quantize_activations(model, optimizer)
    return model, optimizer


def on_grid(x, fmt):
    return torch.equal(x * 2**fmt.fl, (x * 2**fmt.fl).round())


def test_a_norm_that_is_frozen_keeps_its_format_and_bits(tmp_path):
    model, optimizer = normed()
    train(model, optimizer, 2, shape=(32, 1, 8, 8))
    model[1].requires_grad_(False)
    held = [p.clone() for p in model[1].parameters()]
    before = optimizer.formats()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nobody writes to it
        train(model, optimizer, 100, shape=(32, 1, 8, 8))
    now = optimizer.formats()
    assert now["0.weight"] != before["0.weight"]
    for name in ("1.weight", "1.bias"):
        assert now[name] == before[name]
        assert on_grid(model.get_parameter(name), now[name])
    assert all(map(torch.equal, held, model[1].parameters()))

    saved = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), saved)
    later, again = normed()
    later[1].requires_grad_(False)
    saved.seek(0)
    states = torch.load(saved, weights_only=True)
    later.load_state_dict(states[0])
    again.load_state_dict(states[1])
    assert all(equal(model, later))
    assert again.formats() == now
    x = torch.randn(2, 1, 8, 8)
    marvin.export.describe(marvin.freeze(model), x)  # refuses values of another format

    for own, its in ((model, optimizer), (later, again)):
        own[1].requires_grad_(True)
        train(own, its, 3, seed=1, shape=(32, 1, 8, 8))
    assert all(equal(model, later))
    formats = optimizer.formats()
    assert formats["1.weight"] == formats["0.weight"]
    assert all(on_grid(model.get_parameter(name), fmt) for name, fmt in formats.items())


def test_an_error_in_a_step_leaves_what_is_frozen(monkeypatch):
    model, optimizer = normed()
    train(model, optimizer, 2, shape=(32, 1, 8, 8))
    model[1].requires_grad_(False)
    train(model, optimizer, 12, shape=(32, 1, 8, 8))
    held = [p.clone() for p in model[1].parameters()]

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(optimizer, "_move", fail)
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, 1, shape=(32, 1, 8, 8))
    assert all(map(torch.equal, held, model[1].parameters()))


@pytest.mark.parametrize("policy", [marvin.FixedPolicy(6, 2), marvin.StaticPolicy(4, 4)])
def test_weights_that_are_set_to_0_are(policy):
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(64, 10) * 0.1)
    optimizer = marvin.Quantized(torch.optim.SGD([p], lr=0.0), policy)
    for _ in range(2):
        p.grad = torch.ones_like(p)
        optimizer.step(loss=1.0)
    assert 0 < (p == 0).sum() < p.numel()
    with torch.no_grad():
        p.zero_()
    with pytest.warns(UserWarning, match="are the new masters"):
        optimizer.step(loss=1.0)
    assert not optimizer.state[p]["master"].any()


def test_weights_that_are_changed_in_part_keep_the_rest_of_their_masters():
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(64, 10))
    optimizer = marvin.Quantized(torch.optim.SGD([p], lr=0.0), marvin.FixedPolicy(8, 4))
    master = optimizer.state[p]["master"].clone()
    with torch.no_grad():
        p.clamp_(-1, 1)
    p.grad = torch.ones_like(p)
    with pytest.warns(UserWarning, match="are the new masters"):
        optimizer.step(loss=1.0)
    wanted = torch.where(master.abs() < 1 - 1 / 16, master, optimizer.state[p]["master"])
    assert torch.equal(optimizer.state[p]["master"], wanted)


@pytest.mark.parametrize("is_later", [False, True])
def test_biases_before_their_weights_are_rounded(is_later):
    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3))
        named = [*model.named_parameters()]
        first, second = ([q for q in named if (q[1].ndim > 1) is layer] for layer in (False, True))
        if not is_later:
            return model, marvin.MSGD([{"params": first}, {"params": second}], lr=0.05)
        optimizer = marvin.MSGD(first, lr=0.05)
        optimizer.add_param_group({"params": second})
        return model, optimizer

    model, optimizer = made()
    formats = optimizer.formats()
    assert formats["0.bias"] == formats["0.weight"] == FixedPoint(8, 4)
    assert all(on_grid(p, formats[name]) for name, p in model.named_parameters())
    other, again = made()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1)
    again.load_state_dict(optimizer.state_dict())
    assert all(equal(model, other))


def test_groups_have_noise_of_their_own():
    a, b, later = (nn.Parameter(torch.full((64, 64), 0.03)) for _ in range(3))
    optimizer = marvin.MSGD([{"params": [a]}, {"params": [b]}], lr=0.05)
    optimizer.add_param_group({"params": [later]})
    assert not torch.equal(a, b)
    assert not torch.equal(a, later)


@pytest.mark.parametrize("compact", [False, True])
def test_a_state_that_was_loaded_stays_as_it_is(compact):
    """It may be loaded again, as early stopping does."""

    def made(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
        adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
        policy = marvin.StaticPolicy(6, 6, window=2)
        optimizer = marvin.Quantized(adamw, policy, compact_state=compact)
        marvin.quantize_activations(model, optimizer)
        return model, optimizer

    model, optimizer = made(0)
    train(model, optimizer, 3)
    best = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    found = []
    for seed in range(2):
        later, again = made(seed)
        later.load_state_dict(best[0])
        again.load_state_dict(best[1])
        train(later, again, 3, seed=5)
        found.append(later)
    assert all(equal(*found))


def test_another_policy_is_refused():
    model, optimizer = build()
    with pytest.raises(
        AttributeError, match="keeps its policy, MarvinPolicy, got another, StaticP"
    ):
        optimizer.policy = marvin.StaticPolicy(4, 4)
    train(model, optimizer, 1)
    copy.deepcopy(optimizer).load_state_dict(optimizer.state_dict())
    assert isinstance(optimizer.policy, marvin.MarvinPolicy)


def with_rate(optimizer, state):
    return {**state, "param_groups": [{**g, "lr": 0.5} for g in state["param_groups"]]}


def set_rate(optimizer):
    for group in optimizer.param_groups:
        group["lr"] = 0.5


@pytest.mark.parametrize(("kind", "hook"), [("pre", with_rate), ("post", set_rate)])
def test_hooks_change_what_is_loaded(kind, hook):
    _, optimizer = build()
    getattr(optimizer, f"register_load_state_dict_{kind}_hook")(hook)
    optimizer.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
    assert [group["lr"] for group in optimizer.optimizer.param_groups] == [0.5, 0.5]


def test_a_look_at_the_wrapped_optimizers_state_changes_nothing():
    model = nn.Linear(8, 3)
    adam = torch.optim.Adam(model.named_parameters(), lr=0.01)
    optimizer = marvin.Quantized(adam, marvin.FixedPolicy(8, 6))
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step(loss=1.0)
    before = optimizer.state_dict()
    assert not adam.state[model.weight]  # its moments are its master's
    assert (
        optimizer.state_dict()["optimizer"]["state"].keys() == before["optimizer"]["state"].keys()
    )
