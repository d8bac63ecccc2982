"""What happens to weights and states around a training: the masters follow, nothing is lost."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import marvin
from fixedpoint_kernels import quantize
from marvin.rounder import formats_of

FAST = {"lr": 0.05, "lookback": (2, 5), "resolution": (10, 20)}


def net(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))
    return model.to(dtype)


def train(model, optimizer, steps, start=0):
    dtype = next(model.parameters()).dtype
    for i in range(start, start + steps):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(dtype)).float(), (x[:, 0] > 0).long())
        loss.backward()
        optimizer.step(loss=loss)


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def wrapped(kind, model):
    if kind == "msgd":
        return marvin.MSGD(model.named_parameters(), **FAST)
    optimizer = getattr(torch.optim, kind)(model.named_parameters(), lr=0.05)
    return marvin.Quantized(optimizer, marvin.MarvinPolicy(lookback=(2, 5), resolution=(10, 20)))


@pytest.mark.parametrize("order", ["model first", "optimizer first", "optimizer alone"])
@pytest.mark.parametrize("kind", ["msgd", "Adagrad", "AdamW"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loading_gives_the_weights_of_the_moment_of_saving(order, kind, dtype):
    model = net(dtype=dtype)
    optimizer = wrapped(kind, model)
    train(model, optimizer, 7)
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other = net(5, dtype)
    resumed = wrapped(kind, other)
    if order == "model first":
        other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    if order == "optimizer first":
        other.load_state_dict(saved["model"])
    same(weights(other), weights(model))
    train(model, optimizer, 7, 7)
    train(other, resumed, 7, 7)  # a warning would be an error
    same(weights(other), weights(model))
    assert repr(resumed.state_dict()) == repr(optimizer.state_dict())


def test_sums_of_a_low_precision_model_grow_in_float32():
    model = net(dtype=torch.bfloat16)
    optimizer = wrapped("Adagrad", model)
    train(model, optimizer, 2)
    sums = [own["sum"] for own in optimizer.optimizer.state.values()]
    assert [s.dtype for s in sums] == [torch.float32] * 6
    assert len(optimizer.optimizer.state) == 6  # none is left of the parameters themselves


class Counting(torch.optim.SGD):
    """Counts steps with each weight in int16, as optimizers with packed states do."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            own = self.state[p]
            own["count"] = own.get("count", torch.zeros_like(p, dtype=torch.int16)) + 1
        return super().step(closure)


def test_a_wrapped_optimizers_state_keeps_its_dtypes():
    runs = [net(), net()]
    pairs = [
        (m, marvin.Quantized(Counting(m.named_parameters(), lr=0.05), marvin.FixedPolicy()))
        for m in runs
    ]
    train(*pairs[0], 3)
    pairs[1][1].load_state_dict(copy.deepcopy(pairs[0][1].state_dict()))
    counts = [own["count"] for own in pairs[1][1].optimizer.state.values()]
    assert [c.dtype for c in counts] == [torch.int16] * 6
    assert all((c == 3).all() for c in counts)


@pytest.mark.parametrize("change", ["load", "zero", "one element"])
def test_weights_that_change_between_steps_are_the_new_weights(change):
    model = net()
    optimizer = marvin.MSGD(model.named_parameters(), **FAST, momentum=0.0, weight_decay=0.0)
    train(model, optimizer, 3)
    weight, first = model[3].weight, model[0].weight
    before = optimizer.state[weight]["master"].clone()
    untouched = optimizer.state[first]["master"].clone()
    with torch.no_grad():
        if change == "load":
            model[3].load_state_dict(net(7)[3].state_dict())
        elif change == "zero":
            weight.zero_()
        else:
            weight[1, 2] = 0.75
    old = quantized(before, optimizer, weight)
    if change == "zero":
        assert (old == 0).any()
        assert before[old == 0].any()  # which do not stay
    wanted = weight.detach().clone()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.warns(UserWarning, match=r"are the new masters, rounded: 3\.weight"):
        optimizer.step(loss=1.0)
    if change == "one element":
        assert optimizer.state[weight]["master"][1, 2] == 0.75
        changed = optimizer.state[weight]["master"] != before
        assert changed.sum() == 1
    else:
        same(optimizer.state[weight]["master"], wanted)
    same(optimizer.state[first]["master"], untouched)


def quantized(master, optimizer, p):
    noise = {"seed": 0, "stream": optimizer.state[p]["stream"]}
    return quantize(master, optimizer.format_of(p), **noise)


def test_a_change_is_saved_too():
    model = net()
    optimizer = marvin.MSGD(model.named_parameters(), **FAST)
    train(model, optimizer, 3)
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    state = optimizer.state_dict()
    assert (state["state"][0]["master"] == 0.5).all()
    with pytest.warns(UserWarning, match=r"are the new masters, rounded: 0\.weight"):
        train(model, optimizer, 1)


def test_a_state_that_is_asked_for_before_one_is_loaded_needs_no_warning():
    # as Accelerate does, and with it the Trainer of transformers when it resumes
    model = net()
    optimizer = marvin.MSGD(model.named_parameters(), **FAST)
    train(model, optimizer, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other = net(5)
    resumed = marvin.MSGD(other.named_parameters(), **FAST)
    other.load_state_dict(saved[0])
    asked = resumed.state_dict()
    assert torch.equal(asked["state"][0]["master"], model[0].weight)
    resumed.load_state_dict(saved[1])
    train(other, resumed, 3, start=3)  # without a warning, which would be an error here
    train(model, optimizer, 3, start=3)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_an_optimizer_that_lost_its_masters_says_so():
    model = net()
    optimizer = marvin.MSGD(model.named_parameters(), **FAST)
    train(model, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.state.clear()
    message = (
        r"must keep the masters, got none of 0\.weight, .* optimizer\.optimizer\.state\.clear\(\)"
    )
    for call in (optimizer.step, optimizer.state_dict, optimizer.end_epoch):
        with pytest.raises(RuntimeError, match=message):
            call()
    optimizer.load_state_dict(saved)
    assert (optimizer.state[model[0].weight]["master"] == saved["state"][0]["master"]).all()
    optimizer.optimizer.state.clear()  # as the message says
    train(model, optimizer, 1, start=3)


def test_a_change_counts_at_the_end_of_an_epoch():
    model = net()
    optimizer = marvin.MSGD(model.named_parameters(), **FAST)
    train(model, optimizer, 3)
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    with pytest.warns(UserWarning, match="new masters"):
        optimizer.end_epoch()
    assert (optimizer.state[model[0].weight]["master"] == 0.5).all()


def test_a_frozen_parameter_takes_its_optimizers_state_along():
    model = net()
    model[0].requires_grad_(False)
    optimizer = wrapped("Adagrad", model)  # makes its state in its constructor
    train(model, optimizer, 2)
    model[0].requires_grad_(True)
    train(model, optimizer, 2, 2)
    steps = [own["step"].item() for own in optimizer.state_dict()["optimizer"]["state"].values()]
    assert sorted(steps) == [2, 2, 4, 4, 4, 4]


def test_masters_keep_no_gradients():
    model = net()
    optimizer = wrapped("AdamW", model)
    train(model, optimizer, 2)
    assert [master.grad for master in optimizer.optimizer.state] == [None] * 6


def test_a_state_of_a_later_version_is_refused():
    optimizer = wrapped("AdamW", net())
    state = optimizer.state_dict()
    state["marvin"]["version"] = 3
    with pytest.raises(ValueError, match="must be of version 1 or 2, got version 3"):
        optimizer.load_state_dict(state)


def test_what_was_written_back_as_it_was_changes_nothing():
    model, twin = net(), net()
    optimizer, other = (marvin.MSGD(m.named_parameters(), **FAST) for m in (model, twin))
    for i in range(6):
        train(model, optimizer, 1, i)
        train(twin, other, 1, i)
        model.load_state_dict(copy.deepcopy(model.state_dict()))  # as exchanging with an average
    same(weights(model), weights(twin))


def test_a_layer_whose_bias_alone_is_trained_does_not_round():
    model = net()
    model[0].weight.requires_grad_(False)
    optimizer = marvin.Quantized(
        torch.optim.SGD(model.named_parameters()), marvin.FixedPolicy(8, 4)
    )
    handle = marvin.quantize_activations(model, optimizer)
    train(model, optimizer, 2)
    assert not formats_of(model)["0"].rounds
    assert "frozen" in handle.report.left["0"]
    assert handle.report.rounded == ("3",)
    model[0].weight.requires_grad_(True)
    train(model, optimizer, 2)
    assert formats_of(model)["0"].rounds
    assert "0" in handle.report.rounded


def test_frozen_parameters_stay_float_until_they_are_trained():
    model = net()
    model[0].requires_grad_(False)
    backbone = weights(model[0])
    optimizer = marvin.MSGD(model.named_parameters(), **FAST)
    handle = marvin.quantize_activations(model, optimizer)
    train(model, optimizer, 6)
    same(weights(model[0]), backbone)
    assert optimizer.layers() == ["3.weight"]
    assert not {"0.weight", "0.bias"} & set(optimizer.formats())
    assert "frozen" in handle.report.left["0"]
    state = copy.deepcopy(optimizer.state_dict())
    model[0].requires_grad_(True)
    train(model, optimizer, 6, 6)
    assert optimizer.layers() == ["0.weight", "3.weight"]
    assert "0" not in handle.report.left
    fmt = optimizer.formats()["0.weight"]
    same(model[0].weight.detach(), quantize(model[0].weight.detach(), fmt, rounding="nearest"))
    other = net(4)
    other.load_state_dict(net().state_dict())
    resumed = marvin.MSGD(other.named_parameters(), **FAST)  # nothing is frozen here
    resumed.load_state_dict(state)
    same(weights(other[0]), backbone)


def test_a_layer_that_is_trained_later_than_its_bias_moves():
    model = net()
    model[3].weight.requires_grad_(False)
    optimizer = marvin.MSGD(model.named_parameters(), **FAST)
    train(model, optimizer, 3)
    optimizer.state_dict()  # the bias's format was looked for in the layer's state
    assert not optimizer.state[model[3].weight]  # who looks there makes an entry, which stays
    train(model, optimizer, 1, 2)
    model[3].weight.requires_grad_(True)
    train(model, optimizer, 3, 3)
    before = optimizer.state[model[3].weight]["master"].clone()
    train(model, optimizer, 1, 6)
    after = optimizer.state[model[3].weight]["master"]
    assert (after != before).any()
    assert len(optimizer.state_dict()["optimizer"]["state"]) == len(list(model.parameters()))
    assert "3.weight" in {row.layer for row in optimizer.trace}  # the policy sees it


@pytest.mark.parametrize("kind", ["msgd", "AdamW"])
def test_dictionaries_that_a_trainer_puts_into_the_state_are_used(kind):
    model, other = net(), net()
    optimizer, moved = wrapped(kind, model), wrapped(kind, other)
    for start in range(0, 12, 2):
        train(model, optimizer, 2, start)
        train(other, moved, 2, start)
        for p in moved.state:  # as Lightning does, to move a state to a device
            moved.state[p] = dict(moved.state[p])
    same(weights(other), weights(model))
    assert moved.trace == optimizer.trace
    assert [own["layer"] for own in moved.state.values() if "layer" in own] == [
        own["layer"] for own in optimizer.state.values() if "layer" in own
    ]


def test_a_layer_that_is_frozen_later_keeps_its_bits():
    model = net()
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.05)
    optimizer = marvin.Quantized(sgd, marvin.StaticPolicy(4, 4, window=1))
    train(model, optimizer, 3)
    model[0].requires_grad_(False)
    kept, switches = weights(model[0]), len(optimizer.trace)
    optimizer.zero_grad(set_to_none=True)
    train(model, optimizer, 4, 3)
    same(weights(model[0]), kept)
    assert {row.layer for row in optimizer.trace[switches:]} == {"3.weight"}


def test_a_bias_that_is_frozen_later_keeps_its_bits_when_its_layer_switches():
    model = net()
    optimizer = marvin.MSGD(model.named_parameters(), **FAST)
    train(model, optimizer, 1)
    model[0].bias.requires_grad_(False)
    kept, fmt = model[0].bias.detach().clone(), optimizer.formats()["0.bias"]
    optimizer.zero_grad(set_to_none=True)
    train(model, optimizer, 8, 1)
    same(model[0].bias.detach(), kept)
    assert optimizer.formats()["0.weight"] != fmt


def test_one_policy_object_may_serve_two_optimizers():
    policy = marvin.MarvinPolicy(lookback=(2, 5), resolution=(10, 20))
    found = []
    for shared in (True, False):
        pair = []
        for seed in (0, 1):
            model = net(seed)
            own = policy if shared else marvin.MarvinPolicy(lookback=(2, 5), resolution=(10, 20))
            sgd = torch.optim.SGD(model.named_parameters(), lr=0.05)
            pair.append((model, marvin.Quantized(sgd, own)))
        for i in range(12):
            for model, optimizer in pair:
                train(model, optimizer, 1, i)
        found.append([(weights(m), repr(o.trace)) for m, o in pair])
    assert repr(found[0]) == repr(found[1])


def test_a_policy_cannot_be_changed_after_it_was_made():
    with pytest.raises(AttributeError, match="cannot assign"):
        marvin.MarvinPolicy().max_wl = 4
    with pytest.raises(AttributeError, match=r"read optimizer\.should_stop instead"):
        marvin.MuppetPolicy().should_stop  # noqa: B018


@pytest.mark.parametrize(
    ("saved", "fresh"),
    [
        (marvin.MuppetPolicy(levels=(4, 6, 10, 32), window=2, patience=1), marvin.MuppetPolicy()),
        (marvin.LossBudgetPolicy(kappa=0.1, window=3), marvin.LossBudgetPolicy()),
        (marvin.StaticPolicy(5, 4, window=2), marvin.StaticPolicy()),
        (marvin.FixedPolicy(6, 4), marvin.FixedPolicy(9, 2)),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_all_settings_come_back_with_the_state(saved, fresh):
    runs = []
    for policy in (saved, fresh):
        model = net()
        sgd = torch.optim.SGD(model.named_parameters(), lr=0.05)
        optimizer = marvin.Quantized(sgd, policy)
        marvin.quantize_activations(model, optimizer)
        runs.append((model, optimizer))
    (model, optimizer), (other, resumed) = runs
    for i in range(4):
        train(model, optimizer, 2, 2 * i)
        optimizer.end_epoch()
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.policy == saved
    for i in range(4, 9):
        for m, o in runs:
            train(m, o, 2, 2 * i)
            o.end_epoch()
    same(dict(model.state_dict()), dict(other.state_dict()))
    assert repr(optimizer.trace) == repr(resumed.trace)


@pytest.mark.parametrize("on_wrapped", [False, True])
def test_groups_are_common_to_both_optimizers_after_loading(on_wrapped):
    model = net()
    optimizer = wrapped("AdamW", model)
    train(model, optimizer, 2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    masters = [optimizer.state[p]["master"].clone() for p in model.parameters()]
    for group in (optimizer.optimizer if on_wrapped else optimizer).param_groups:
        group["lr"] = 0.0
    train(model, optimizer, 3, 2)
    same([optimizer.state[p]["master"] for p in model.parameters()], masters)


def test_the_earlier_name_of_the_class_warns():
    with pytest.warns(DeprecationWarning, match=r"marvin\.QuantizingOptimizer is now"):
        assert marvin.QuantizingOptimizer is marvin.Quantized


def test_a_policy_written_for_the_earlier_interface_is_refused():
    with pytest.raises(TypeError, match="on_step is now update, start is now init"):

        class Old(marvin.Policy):
            def start(self, settings): ...

            def on_step(self, layers, step): ...


def test_hyper_parameters_may_have_names_of_earlier_functions():
    @dataclass(frozen=True)
    class Mine(marvin.Policy):
        start: int = 8

        def init(self, settings, shared): ...

    assert Mine().start == 8
