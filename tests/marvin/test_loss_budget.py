"""LossBudgetPolicy and StaticPolicy, as the optimizer drives them."""

import copy
import functools
import io
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import marvin
from fixedpoint_kernels import FixedPoint, quantize
from marvin import LossBudgetPolicy, Quantized, StaticPolicy
from marvin.hooks import detach
from marvin.policies.observer import weight_ranges
from marvin.policies.range_policy import LayerBudget
from marvin.policies.ranges import Limits, Range
from marvin.rounder import formats_of
from marvin.shards import Shard

POLICIES = {
    "budget": lambda: LossBudgetPolicy(window=4),
    "static": lambda: StaticPolicy(5, 6, window=4),
}


def make(policy=None, seed=0, groups=False, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.ReLU(),
        nn.Linear(8, 4),
    )
    params = list(model.named_parameters())
    if groups:
        params = [{"params": params[:4]}, {"params": params[4:], "min_wl": 7, "max_wl": 7}]
    sgd = torch.optim.SGD(params, lr=0.05, momentum=0.9)
    optimizer = Quantized(sgd, policy or LossBudgetPolicy(window=4), **options)
    return model, optimizer, marvin.quantize_activations(model, optimizer)


def batch(step, n=16):
    g = torch.Generator().manual_seed(step)
    labels = torch.randint(4, (n,), generator=g)
    images = torch.randn(n, 1, 8, 8, generator=g)
    images[torch.arange(n), 0, labels, labels] += 3
    return images, labels


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        images, labels = batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step(loss=loss)
    return loss.item()


def is_in(x, fmt):
    return torch.equal(quantize(x.detach(), fmt, rounding="nearest"), x.detach())


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_step_is_float_and_then_all_is_rounded(policy):
    model, optimizer, _ = make(POLICIES[policy]())
    assert optimizer.formats() == optimizer.input_formats() == {}
    assert optimizer.mean_word_length() == 32
    plain = copy.deepcopy(model)
    for module in plain.modules():
        detach(module)
    torch.testing.assert_close(model(batch(0)[0]), plain(batch(0)[0]), rtol=0, atol=0)
    train(model, optimizer, 1)
    assert list(optimizer.formats()) == ["0.weight", "5.weight", "7.weight"]
    for p in model.parameters():
        fmt = optimizer.format_of(p)
        if p.ndim < 2:
            assert fmt is None
        else:
            nearest = quantize(optimizer.state[p]["master"], fmt, rounding="nearest")
            torch.testing.assert_close(p.detach(), nearest, rtol=0, atol=0)
    inputs = optimizer.input_formats()
    assert [fmt.signed for fmt in inputs.values()] == [True, False, False]  # images, after ReLU
    seen = {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda _m, x, y, name=name: seen.update({name: (x[0], y)}))
    train(model, optimizer, 1, start=1)
    for name in "057":
        assert is_in(seen[name][0], inputs[f"{name}.weight"])
    assert seen["3"][0] is seen["2"][1]  # pooling is left alone


@pytest.mark.parametrize("frozen", [range(3, 6), range(3, 9)], ids=["once", "twice"])
def test_a_window_has_the_gradients_of_its_own_steps_alone(frozen):
    """Layer 5 is frozen in mid-window, and thawed in a later one."""
    model, optimizer, _ = make(LossBudgetPolicy(window=4))
    for step in range(13):
        model[5].requires_grad_(step not in frozen)
        train(model, optimizer, 1, start=step)
        counts = {
            name: optimizer.state[model[int(name)].weight]["layer"].count for name in ("0", "5")
        }
        begun = max(n for n in (0, 1, 2, 4, 5, 8, 12) if n <= step + 1)
        own = range(begun, step + 1)  # steps of this window, from 0
        assert counts["0"] == len(own)
        if step not in frozen:
            assert counts["5"] == len(set(own) - set(frozen)), step


def test_the_rule_by_hand():
    model, optimizer, _ = make(
        LossBudgetPolicy(kappa=1e-4, max_noise=(0.01, 0.02), window=4, min_wl=2, max_wl=16)
    )
    layers, outputs, inputs = (0, 5, 7), {}, {}
    for i, module in enumerate(model):
        module.register_forward_hook(lambda _m, _x, y, i=i: outputs.update({i: y}))
        module.register_forward_pre_hook(lambda _m, x, i=i: inputs.update({i: x[0]}))
    train(model, optimizer, 2)  # both end a window; steps 3 and 4 are the next
    saved = [s["layer"] for s in optimizer.state_dict()["state"].values() if "layer" in s]
    losses, norms = [], []
    for step in (2, 3):
        optimizer.zero_grad()
        images, labels = batch(step)
        loss = F.cross_entropy(model(images), labels)
        for i in layers:
            if inputs[i].requires_grad:
                inputs[i].retain_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append([model[i].weight.grad.norm().item() ** 2 for i in layers])
        optimizer.step(loss=loss)
    share = 1e-4 * sum(losses) / 2 / 6
    masters = [optimizer.state[model[i].weight]["master"] for i in layers]
    ranges = weight_ranges(masters, [Shard(m.shape) for m in masters], [False] * 3)
    for k, (i, row) in enumerate(zip(layers, optimizer.trace[-3:], strict=True)):
        assert (row.step, row.layer, row.window, row.note) == (4, f"{i}.weight", 2, "")
        gradient = 16 * (norms[0][k] + norms[1][k]) / 2
        assert row.weight_gradient == pytest.approx(gradient, rel=1e-5)  # float32 norms
        weight = ranges[k]
        noise = min(2 * share / gradient, 0.01 * weight.power)
        fmt = Limits(2, 16).format(True, weight.integer_bits, noise, weight.clipping)
        assert optimizer.formats()[row.layer] == fmt
        raw = outputs[i - 1] if i else images
        new = 16 * (inputs[i].grad * (raw != 0)).square().sum().item()
        gradient = (saved[k]["input_gradient"] + new) / 2
        assert row.input_gradient == pytest.approx(gradient, rel=1e-2)  # some were clamped
        noise = min(2 * share / row.input_gradient, 0.02 * raw.square().mean().item())
        assert row.input_fl == math.ceil(-math.log2(12 * noise) / 2)


@pytest.mark.parametrize("steps", [1, 8])  # after the first there is no budget yet
def test_noise_is_limited_whatever_the_budget(steps):
    model, optimizer, _ = make(
        LossBudgetPolicy(kappa=1e3, max_noise=(0.01, 0.002), window=4, min_wl=2, max_wl=16)
    )
    inputs = {}
    for i in (0, 5, 7):  # before the policy's own hook, so that it sees what was not rounded
        model[i].register_forward_pre_hook(
            lambda _m, x, i=i: inputs.update({f"{i}.weight": x[0]}), prepend=True
        )
    train(model, optimizer, steps)
    lengths = optimizer.formats(), optimizer.input_formats()
    for name, p in model.named_parameters():
        if p.ndim > 1:
            signals = optimizer.state[p]["master"], inputs[name]
            for formats, x, most in zip(lengths, signals, (0.01, 0.002), strict=True):
                noise = 4.0 ** -formats[name].fl / 12 / x.square().mean().item()
                assert most / 4 < noise <= most


def test_gradients_to_inputs_by_hand():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2))
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = Quantized(sgd, LossBudgetPolicy())
    marvin.quantize_activations(model, optimizer)
    x, w = torch.tensor([[1.0, 0.0, 2.0], [0.5, 1.0, -1.0]]), model[0].weight.detach().clone()
    loss = model(x).sum() / 2
    loss.backward()
    assert x.grad is None
    optimizer.step(loss=loss)
    columns = w.sum(0).square()  # the gradient of a sample to each of its inputs, squared
    by_sample = [columns[0] + columns[2], columns.sum()]  # not where an input is 0
    expected = sum(by_sample).item() / 2
    assert optimizer.trace[0].input_gradient == pytest.approx(expected, rel=1e-5)  # float32
    mean_gradient = 2 * (x.sum(0) / 2).square().sum() * 2  # two samples, two outputs
    assert optimizer.trace[0].weight_gradient == pytest.approx(mean_gradient.item(), rel=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("stop", [3, 4, 6])
def test_resume_equals_never_stopping(policy, stop):
    model, optimizer, _ = make(POLICIES[policy]())
    train(model, optimizer, stop)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model2, optimizer2, _ = make(POLICIES[policy](), seed=1)
    train(model2, optimizer2, 2)  # something to forget
    model2.load_state_dict(saved["model"])
    optimizer2.load_state_dict(saved["optimizer"])
    assert repr(optimizer2.state_dict()["marvin"]) == repr(saved["optimizer"]["marvin"])
    train(model, optimizer, 10, stop)
    train(model2, optimizer2, 10, stop)
    torch.testing.assert_close(model.state_dict(), model2.state_dict(), rtol=0, atol=0)
    one, two = optimizer.state_dict(), optimizer2.state_dict()
    assert repr(one["marvin"]) == repr(two["marvin"])
    assert [s.get("layer") for s in one["state"].values()] == [
        s.get("layer") for s in two["state"].values()
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_and_copies_go_on_alike(dtype):
    model, _, handle = make()
    handle.remove()
    model.to(dtype)
    adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    optimizer = Quantized(adamw, LossBudgetPolicy(window=4))
    handle = marvin.quantize_activations(model, optimizer)
    runs = [(model, optimizer)]
    for step in range(6):
        if step == 3:
            handle.remove()  # hooks cannot be copied
            runs.append(copy.deepcopy((model, optimizer)))
            for pair in runs:
                marvin.quantize_activations(*pair)
        for m, o in runs:
            images, labels = batch(step)
            o.zero_grad()
            loss = F.cross_entropy(m(images.to(dtype)).float(), labels)
            loss.backward()
            o.step(loss=loss)
    (_, one), (_, two) = runs
    assert repr(one.state_dict()["marvin"]) == repr(two.state_dict()["marvin"])
    assert all(is_in(p, one.format_of(p)) for p in model.parameters() if p.ndim > 1)
    assert len(one.input_formats()) == 3


def test_evaluating_between_steps_changes_nothing():
    runs = []
    for evaluates in (False, True):
        model, optimizer, _ = make()
        for step in range(6):
            if evaluates:
                model.eval()
                model(torch.randn(3, 1, 8, 8) * 99)
                model.train()
                with torch.no_grad():
                    model[5](torch.randn(3, 64) * 99)
            train(model, optimizer, 1, step)
        runs.append((model.state_dict(), repr(optimizer.state_dict()["marvin"])))
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=0, atol=0)
    assert runs[0][1] == runs[1][1]


def test_gradient_accumulation_decides_the_same():
    traces = []
    for parts in (1, 4):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        optimizer = Quantized(
            torch.optim.SGD(model.named_parameters(), lr=0.05), LossBudgetPolicy()
        )
        marvin.quantize_activations(model, optimizer)
        for step in range(13):
            g = torch.Generator().manual_seed(step)
            x, y = torch.randn(16, 6, generator=g), torch.randint(4, (16,), generator=g)
            optimizer.zero_grad()
            total = 0.0
            for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
                loss = F.cross_entropy(model(xs), ys) / parts
                loss.backward()
                total += loss.item()
            optimizer.step(loss=total)
        traces.append([(r.wl, r.fl, r.input_wl, r.input_fl) for r in optimizer.trace])
    assert traces[0] == traces[1]


def test_two_models_of_one_optimizer_count_a_sample_once():
    first, second = nn.Linear(4, 3), nn.Linear(3, 2)
    named = [*first.named_parameters("first"), *second.named_parameters("second")]
    optimizer = Quantized(torch.optim.SGD(named, lr=0.1), LossBudgetPolicy())
    marvin.quantize_activations(first, optimizer)
    handle = marvin.quantize_activations(second, optimizer)
    loss = second(first(torch.ones(5, 4))).square().mean()
    loss.backward()
    assert optimizer.forward_state.samples == 5
    optimizer.step(loss=loss)
    handle.remove()
    marvin.quantize_activations(second, optimizer)
    second(first(torch.ones(7, 4)))
    assert optimizer.forward_state.samples == 7


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_counts_a_sample_once(use_reentrant):
    """It runs the first layer twice; samples that counted twice would double the gradients' power."""
    formats = []
    for checkpoints in (False, True):
        model, optimizer, _ = make()
        for step in range(6):
            images, labels = batch(step)
            images.requires_grad_()  # else a reentrant checkpoint gives no gradients
            optimizer.zero_grad()
            outputs = (
                checkpoint(model, images, use_reentrant=use_reentrant)
                if checkpoints
                else model(images)
            )
            loss = F.cross_entropy(outputs, labels)
            loss.backward()
            assert optimizer.forward_state.samples == len(images)
            optimizer.step(loss=loss)
        formats.append((optimizer.formats(), optimizer.input_formats()))
    assert formats[0] == formats[1]


def test_a_selective_checkpoint_does_not_see_what_is_counted():
    keep = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    runs = []
    for options in ({}, {"context_fn": keep}):
        model, optimizer, _ = make(StaticPolicy(8, 8, window=4))
        for step in range(3):
            images, labels = batch(step)
            optimizer.zero_grad()
            inner = model[:4](images)
            out = checkpoint(model[4:], inner, use_reentrant=False, **options)
            loss = F.cross_entropy(out, labels)
            loss.backward()
            optimizer.step(loss=loss)
        runs.append((model.state_dict(), optimizer.formats()))
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=0, atol=0)
    assert runs[0][1] == runs[1][1]


def test_an_unfinite_step_leaves_nothing_behind():
    model, optimizer, _ = make(nonfinite="skip")
    train(model, optimizer, 3)
    other, optimizer2, _ = make(nonfinite="skip")
    train(other, optimizer2, 3)
    state = copy.deepcopy(model.state_dict())
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch(77)[0] * 1e20), batch(77)[1]) * math.inf
    loss.backward()
    optimizer.step(loss=loss)
    assert optimizer.skipped_steps == 1
    model.load_state_dict(state)  # batch norm's statistics saw it
    train(model, optimizer, 3, 3)
    train(other, optimizer2, 3, 3)
    assert repr(optimizer.trace) == repr(optimizer2.trace)


def test_zero_statistics_keep_the_format_and_are_reported():
    model, optimizer, _ = make()
    train(model, optimizer, 3)
    formats, inputs = optimizer.formats(), optimizer.input_formats()
    optimizer.zero_grad()
    images, labels = batch(3)
    loss = F.cross_entropy(model(images), labels)
    (loss * 0).backward()
    for p in model.parameters():  # the window's earlier gradient is forgotten too
        if "layer" in optimizer.state[p]:
            record = optimizer.state[p]["layer"]
            values = {"weight_sum": 0.0, "input_gradient": 0.0}
            optimizer.state[p]["layer"] = type(record)(**{**vars(record), **values})
    optimizer.step(loss=loss)
    assert optimizer.trace[-1].step == 4
    assert (optimizer.formats(), optimizer.input_formats()) == (formats, inputs)
    for row in optimizer.trace[-3:]:
        assert row.note.count("loss or gradient 0, or not finite") == 2


class Adapted(nn.Module):
    """A layer beside which another begins at 0, as in LoRA."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base, self.a, self.b = nn.Linear(64, 4), nn.Linear(64, 4), nn.Linear(4, 4, bias=False)
        self.base.requires_grad_(False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        x = x.flatten(1)
        return self.base(x) + self.b(self.a(x))


GROWING = {
    "static": lambda: StaticPolicy(16, 16),
    "budget": lambda: LossBudgetPolicy(min_wl=16, max_wl=16),
    "channels": lambda: StaticPolicy(16, 16, per_channel=True),
}


def growing(policy, compact_state=False):
    model = Adapted()
    params = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = Quantized(
        torch.optim.Adam(params, lr=0.1), GROWING[policy](), compact_state=compact_state
    )
    marvin.quantize_activations(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("compact_state", [False, True])
@pytest.mark.parametrize("policy", GROWING)
def test_a_weight_that_begins_at_0_is_not_clamped(policy, compact_state):
    model, optimizer = growing(policy, compact_state)
    for step in range(30):
        train(model, optimizer, 1, start=step)
        fmt = optimizer.format_of(model.b.weight)
        assert (fmt is None) == (step == 0)
        if fmt is None:
            continue
        master = marvin.compact.master_of(optimizer.state[model.b.weight])
        steps = [fmt.channel(i).lsb if policy == "channels" else fmt.lsb for i in range(4)]
        error = (model.b.weight - master).abs() / torch.tensor(steps).view(-1, 1)
        assert error.max() <= 0.5 + 1e-3  # rounded, and not clamped
        assert formats_of(model)["b"].weights == (fmt,)
        last = [row for row in optimizer.trace if row.layer == "b.weight"][-1]
        assert (last.wl, last.fl) == (16, fmt.fl)
    assert any("grew" in row.note for row in optimizer.trace)
    assert len({(row.step, row.layer) for row in optimizer.trace}) == len(optimizer.trace)
    grown = [row for row in optimizer.trace if "grew" in row.note]
    assert any(row.saturated == row.saturated for row in grown)  # what led to a switch is kept


@pytest.mark.parametrize("policy", GROWING)
@pytest.mark.parametrize("stop", [1, 3, 6])
def test_resume_among_weights_that_grow_equals_never_stopping(policy, stop):
    model, optimizer = growing(policy)
    train(model, optimizer, stop)
    state = copy.deepcopy(optimizer.state_dict())
    model2, optimizer2 = growing(policy)
    optimizer2.load_state_dict(state)
    for pair in ((model, optimizer), (model2, optimizer2)):
        train(*pair, 24, stop)
    torch.testing.assert_close(model.state_dict(), model2.state_dict(), rtol=0, atol=0)
    assert repr(optimizer.state_dict()["marvin"]) == repr(optimizer2.state_dict()["marvin"])


def test_a_weight_is_looked_at_ever_more_rarely():
    record = LayerBudget(FixedPoint(8, 4), first=100)
    found = [step for step in range(100, 1200) if record.is_watched(step)]
    assert found[:50] == [*range(100, 149), 149]
    assert len([step for step in found if step > 1000]) < 10
    assert not LayerBudget().is_watched(1)


def test_clamping_that_pays_changes_nothing_between_switches():
    """At few bits the largest weights are clamped for the sake of the others."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    nn.init.normal_(model.weight)
    sgd = torch.optim.SGD(model.named_parameters(), lr=1e-9)
    optimizer = Quantized(sgd, StaticPolicy(4, 8, window=50))
    marvin.quantize_activations(model, optimizer)
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 64)).square().mean()
        loss.backward()
        optimizer.step(loss=loss)
    (fmt,) = optimizer.formats().values()
    assert model.weight.max() < 2.0**fmt.il < optimizer.state[model.weight]["master"].max()
    assert not any("grew" in row.note for row in optimizer.trace)


def test_a_dead_layer_stays_float_until_it_lives():
    model, optimizer, _ = make(StaticPolicy(window=4))
    with torch.no_grad():
        model[7].weight.zero_()
    optimizer.adopt_weights()
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, 1)
    assert "7.weight" not in optimizer.formats()
    row = optimizer.trace[2]
    assert (row.wl, row.note) == (32, "weight: all 0, or not finite")
    optimizer.param_groups[0]["lr"] = 0.1
    train(model, optimizer, 4, 1)
    assert optimizer.formats()["7.weight"].wl == 6


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("sides", [(0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", [LossBudgetPolicy, StaticPolicy])
def test_a_weight_without_elements_stays_float(kind, per_channel, sides):
    """As that of a layer that takes inputs of a kind which a data set has none of."""
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Linear(*sides), nn.Linear(8, 3)])
    policy = kind(window=2, per_channel=per_channel)
    optimizer = Quantized(torch.optim.SGD(net.named_parameters(), lr=0.1), policy)
    marvin.quantize_activations(net, optimizer)
    for _ in range(5):
        optimizer.zero_grad()
        outputs = net[1](torch.randn(4, 8)), net[0](torch.randn(4, sides[0]))
        loss = sum(y.square().sum() for y in outputs)
        loss.backward()
        optimizer.step(loss=loss)
    assert "1.weight" in optimizer.formats()
    assert "0.weight" not in optimizer.formats()
    (found,) = weight_ranges([torch.empty(sides)], [Shard(torch.Size(sides))], [per_channel])
    assert found == Range(True, None, 0.0, clipping=(0.0, 0.0))


def test_a_window_has_its_own_losses_alone():
    model, optimizer, _ = make()
    train(model, optimizer, 2)  # both end a window
    found = optimizer.state_dict()["marvin"]["policy"]["shared"]
    assert (found["loss_sum"], found["losses"]) == (0.0, 0)
    loss = train(model, optimizer, 1, start=2)
    found = optimizer.state_dict()["marvin"]["policy"]["shared"]
    assert (found["loss_sum"], found["losses"]) == (loss, 1)


def test_a_layer_without_a_gradient_is_rounded_too():
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = Quantized(sgd, StaticPolicy(4, 4))
    floats = model[1].weight.detach().clone()
    loss = model[0](torch.ones(4, 3)).square().sum()
    loss.backward()
    optimizer.step(loss=loss)
    fmt = optimizer.formats()["1.weight"]
    assert fmt.wl == 4
    assert torch.equal(model[1].weight, quantize(floats, fmt, rounding="nearest"))
    assert not torch.equal(model[1].weight, floats)


def test_static_words_follow_the_range():
    model, optimizer, _ = make(StaticPolicy(5, 7, window=4, sat_tol=0.0))
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, 2)
    for name, fmt in optimizer.formats().items():
        largest = optimizer.state[model.get_parameter(name)]["master"].abs().max().item()
        assert fmt.wl == 5
        assert 2.0 ** (fmt.il - 1) < largest <= 2.0**fmt.il
    assert {fmt.wl for fmt in optimizer.input_formats().values()} == {7}
    fmt = optimizer.input_formats()["0.weight"]
    with torch.no_grad():
        images, labels = batch(2)
    loss = F.cross_entropy(model(images * 64), labels)
    loss.backward()
    optimizer.step(loss=loss)
    loss = F.cross_entropy(model(images * 64), labels)
    loss.backward()
    optimizer.step(loss=loss)  # the fourth: a switch
    assert optimizer.input_formats()["0.weight"].il == fmt.il + 6
    assert optimizer.trace[-3].saturated > 0.5
    train(model, optimizer, 1, 5)  # small again
    assert optimizer.input_formats()["0.weight"].il == fmt.il + 2
    train(model, optimizer, 3, 6)  # one bit less
    assert optimizer.input_formats()["0.weight"].il == fmt.il + 1


class TestPowersOfTwo:
    """Flags, thresholded images, and what ``Hardtanh`` and saturated functions give."""

    def optimizer(self, policy):
        torch.manual_seed(0)
        layer = nn.Linear(32, 3)
        sgd = torch.optim.SGD(layer.named_parameters(), lr=0.05)
        optimizer = Quantized(sgd, policy())
        marvin.quantize_activations(layer, optimizer)
        return layer, optimizer

    def train(self, layer, optimizer, steps, value):
        for step in steps:
            g = torch.Generator().manual_seed(step)
            x = (torch.rand(16, 32, generator=g) < 0.5).float() * value
            optimizer.zero_grad()
            loss = F.cross_entropy(layer(x), torch.randint(3, (16,), generator=g))
            loss.backward()
            optimizer.step(loss=loss)
        return optimizer.input_formats()["weight"]

    @pytest.mark.parametrize("value", [1.0, 0.998], ids=["at", "below"])
    @pytest.mark.parametrize("policy", POLICIES)
    def test_they_are_clamped_in_one_window_alone(self, policy, value):
        layer, optimizer = self.optimizer(POLICIES[policy])
        fmt = self.train(layer, optimizer, range(21), value)
        assert is_in(torch.ones(1), fmt)
        over = [row.step for row in optimizer.trace if row.saturated > 2e-3]
        assert over == [2]

    @pytest.mark.parametrize("lacks", [(), ("clamping",)], ids=["its own", "an older one"])
    def test_a_state_goes_on(self, lacks):
        layer, optimizer = self.optimizer(POLICIES["static"])
        self.train(layer, optimizer, range(4), 1.0)
        state = optimizer.state_dict()
        for own in state["state"].values():
            for name in lacks:
                own.get("layer", {}).pop(name, None)
        other, resumed = self.optimizer(POLICIES["static"])
        other.load_state_dict(layer.state_dict())
        resumed.load_state_dict(state)
        before = len(resumed.trace)
        assert is_in(torch.ones(1), self.train(other, resumed, range(4, 21), 1.0))
        over = [row.step for row in resumed.trace[before:] if row.saturated > 2e-3]
        assert over == ([8] if lacks else [])

    def test_the_format_follows_smaller_values(self):
        layer, optimizer = self.optimizer(POLICIES["static"])
        assert self.train(layer, optimizer, range(8), 1.0).il == 1
        assert self.train(layer, optimizer, range(8, 12), 0.4).il == 0
        assert self.train(layer, optimizer, range(12, 16), 0.4).il == -1
        with pytest.warns(UserWarning, match=r"inputs of weight clamped in step 20"):
            fmt = self.train(layer, optimizer, range(16, 20), 0.9)
        assert fmt.il == 0  # clamps none


class TestUnusualInputs:
    def train(self, batches, policy=StaticPolicy, layer=None):
        torch.manual_seed(0)
        layer = nn.Linear(16, 3) if layer is None else layer
        sgd = torch.optim.SGD(layer.named_parameters(), lr=0.0)
        optimizer = Quantized(sgd, policy(window=2))
        marvin.quantize_activations(layer, optimizer)
        formats = []
        for x in batches:
            optimizer.zero_grad()
            y = layer(x)
            loss = F.cross_entropy(y, torch.zeros(len(y), dtype=torch.int64))
            loss.backward()
            optimizer.step(loss=loss)
            formats.append(optimizer.input_formats().get("weight"))
        return optimizer, formats

    def ramp(self, sign=1.0):
        return sign * torch.arange(1.0, 257.0).view(16, 16) / 256

    def test_zeros_are_no_values_that_may_be_clamped(self):
        x = torch.zeros(2000, 16)
        x[:, 0] = torch.linspace(1, 3, 2000)
        x[1000:] = 0  # one in 32
        x[1, 1:] = 3
        x[:1000, 0] *= (torch.arange(1000) % 32 == 0).float()  # one in a thousand
        optimizer, formats = self.train([x] * 3)
        assert formats[-1].il == 2
        assert optimizer.trace[-1].saturated == 0
        assert not optimizer.trace[-1].note

    def test_a_sign_goes_after_four_switches_without_values_below_0(self):
        _, formats = self.train([self.ramp(-1), *[self.ramp()] * 9])
        assert [fmt.signed for fmt in formats] == [True] * 5 + [False] * 5
        _, formats = self.train([self.ramp(), *[self.ramp(-1)] * 2])
        assert [fmt.signed for fmt in formats] == [False, True, True]

    def test_a_single_value_below_0_renews_a_sign(self):
        batches = [self.ramp(-1), *[self.ramp()] * 4, self.ramp(-1), *[self.ramp()] * 4]
        assert all(fmt.signed for fmt in self.train(batches)[1])

    def test_a_mistake_is_forgotten(self):
        wild = self.ramp()
        wild[0, 0] = 1e6
        _, formats = self.train([self.ramp(), wild, *[self.ramp()] * 8])
        assert formats[1].il == 20
        assert [formats[i].il for i in (3, 4, 9)] == [2, 1, 1]

    def test_what_is_clamped_does_not_decide_the_noise(self):
        x = torch.randn(4000, 16, generator=torch.Generator().manual_seed(0))
        wild = x.clone()
        wild[0, :4] = 1e4  # fewer than ``sat_tol``
        own = functools.partial(LossBudgetPolicy, kappa=1e3)
        (_, wanted), (_, found) = self.train([x], own), self.train([wild], own)
        assert wanted[0].wl > 5
        assert wanted[0].wl - found[0].wl <= 1  # magnitudes are known by powers of two

    def with_one_in_4096(self):
        x = torch.rand(256, 16, generator=torch.Generator().manual_seed(0)) * 0.75
        x[0, 0] = 100
        return [x] * 3

    @pytest.mark.parametrize(
        ("wl", "bits"), [(4, 0), (8, 0), (11, 0), (12, 7 + 1), (15, 7 + 1), (16, 7 + 2)]
    )
    def test_long_words_clamp_nothing_and_have_headroom(self, wl, bits):
        for policy in (
            functools.partial(StaticPolicy, 8, wl),
            functools.partial(StaticPolicy, 5, 5, ends_wl=wl),
            functools.partial(LossBudgetPolicy, min_wl=wl, max_wl=wl),
        ):
            optimizer, formats = self.train(self.with_one_in_4096(), policy)
            assert [(fmt.wl, fmt.il) for fmt in formats] == [(wl, bits)] * 3
            is_clamped = optimizer.trace[-1].saturated > 0
            assert is_clamped == (wl < 12)

    @pytest.mark.parametrize(("tolerance", "bits"), [(1e-3, 0), (0, 7)])
    @pytest.mark.parametrize("wl", [8, 12, 16])
    def test_a_tolerance_that_is_given_holds_at_every_length(self, wl, tolerance, bits):
        policy = functools.partial(StaticPolicy, 8, wl, sat_tol=tolerance)
        assert [fmt.il for fmt in self.train(self.with_one_in_4096(), policy)[1]] == [bits] * 3

    @pytest.mark.parametrize(("noise", "bits"), [(1e-3, {0}), (1e-9, {8, 9})])
    def test_the_length_that_is_chosen_decides(self, noise, bits):
        own = functools.partial(
            LossBudgetPolicy, kappa=1e6, max_noise=(1, noise), min_wl=2, max_wl=16
        )
        formats = self.train(self.with_one_in_4096(), own)[1]
        assert all(fmt.il in bits and (fmt.wl >= 12) == (fmt.il > 0) for fmt in formats)

    def test_batches_of_zeros_change_nothing(self):
        x, zeros = self.ramp(), torch.zeros(16, 16)
        one, formats = self.train([x, x, x, zeros])
        before = [row.input_gradient for row in one.trace]
        assert before[-1] == before[-2]
        assert "inputs: all 0" in one.trace[-1].note
        assert formats[-1] == formats[-2]

    def test_layers_that_observed_steps_leave_out_are_named_once(self):
        class Heads(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.steps = nn.Linear(16, 16), 0
                self.heads = nn.ModuleList(nn.Linear(16, 3) for _ in range(2))

            def forward(self, x):
                self.steps += 1
                return self.heads[self.steps % 2](self.body(x))

        with pytest.warns(UserWarning, match=r"without heads\.1\.weight: they keep") as told:
            optimizer, _ = self.train([self.ramp()] * 40, layer=Heads())
        assert len(told) == 1
        assert "heads.1.weight" in optimizer.input_formats()  # of the first step
        rows = [row for row in optimizer.trace if row.layer == "heads.1.weight" and row.step > 5]
        assert all("inputs: not observed" in row.note for row in rows if row.step % 2 == 0)


def test_ends_and_groups_have_words_of_their_own():
    model, optimizer, _ = make(LossBudgetPolicy(window=4, max_wl=5, ends_wl=8))
    train(model, optimizer, 4)
    for formats in (optimizer.formats(), optimizer.input_formats()):
        assert [formats[f"{i}.weight"].wl == 8 for i in (0, 5, 7)] == [True, False, True]
    model, optimizer, _ = make(LossBudgetPolicy(window=4, max_wl=5), groups=True)
    train(model, optimizer, 4)
    for formats in (optimizer.formats(), optimizer.input_formats()):
        assert [formats[f"{i}.weight"].wl == 7 for i in (0, 5, 7)] == [False, True, True]


def test_a_smaller_budget_gives_longer_words():
    lengths = []
    for kappa in (1e-4, 1e-3, 1.0):
        model, optimizer, _ = make(
            LossBudgetPolicy(kappa=kappa, max_noise=(1e3, 1e3), window=4, min_wl=2, max_wl=16)
        )
        train(model, optimizer, 12)
        lengths.append(optimizer.mean_word_length() + optimizer.mean_input_word_length())
    assert lengths[0] > lengths[1] > lengths[2]


def test_the_first_module_that_is_called_counts_where_the_models_first_is_not():
    """A shared embedding of transformers is not called, but those that have its weight are."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = nn.Linear(4, 4)
            self.second, self.first = nn.Linear(4, 2), nn.Linear(4, 4)
            self.asks_shared = False

        def forward(self, x):
            x = self.first(self.first(x))  # twice, and other sizes behind it
            return self.second(self.shared(x[:3]) if self.asks_shared else x[:2])

    model = Shared()
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = Quantized(sgd, LossBudgetPolicy())
    marvin.quantize_activations(model, optimizer)
    for asks, wanted in ((False, 5), (True, 3), (False, 5)):
        model.asks_shared = asks
        loss = model(torch.ones(5, 4)).square().mean()
        loss.backward()
        assert optimizer.forward_state.counted == wanted
        assert copy.deepcopy(optimizer.forward_state).counted == wanted
        optimizer.step(loss=loss)
        assert optimizer.forward_state.counted == 0


def test_without_activations_the_batch_size_must_be_given():
    model = nn.Sequential(nn.Linear(3, 2))
    for batch_size in (None, 4):
        sgd = torch.optim.SGD(model.named_parameters(), lr=0.1)
        optimizer = Quantized(sgd, LossBudgetPolicy(batch_size=batch_size))
        loss = model(torch.ones(4, 3)).square().sum()
        loss.backward()
        if batch_size is None:
            with pytest.raises(ValueError, match=r"got no samples.*quantize_activations\(model"):
                optimizer.step(loss=loss)
            continue
        with pytest.raises(ValueError, match=r"needs the loss, got none"):
            optimizer.step()
        optimizer.step(loss=loss)
        assert isinstance(optimizer.formats()["0.weight"], FixedPoint)
        assert optimizer.input_formats() == {}


@pytest.mark.parametrize(
    ("make_policy", "message"),
    [
        (lambda: LossBudgetPolicy(kappa=0), "kappa must be above 0 and finite, got kappa=0"),
        (lambda: LossBudgetPolicy(max_noise=0.01), "max_noise must be two finite numbers above 0"),
        (
            lambda: LossBudgetPolicy(max_noise=(0.01, 0)),
            "max_noise must be two finite numbers above 0",
        ),
        (lambda: LossBudgetPolicy(max_noise=(math.inf, 1)), "max_noise must be two finite numbers"),
        (lambda: LossBudgetPolicy(window=0), "window must be a whole number of steps from 1 on"),
        (lambda: StaticPolicy(window=2.5), "window must be a whole number of steps from 1 on"),
        (lambda: LossBudgetPolicy(batch_size=2.5), "batch_size must be a whole number from 1 on"),
        (lambda: LossBudgetPolicy(min_wl=5.0), "min_wl must be a whole number from 2 to max_wl"),
        (lambda: LossBudgetPolicy(sat_tol=1), "sat_tol must be 0 or more and below 1"),
        (lambda: LossBudgetPolicy(min_wl=9), "a whole number from 2 to max_wl bits, got min_wl=9"),
        (lambda: LossBudgetPolicy(max_wl=17), "max_wl must be an int, 2 to 16 bits"),
        (lambda: LossBudgetPolicy(ends_wl=1), "ends_wl must be an int, 2 to 16 bits"),
        (lambda: LossBudgetPolicy(target_bits=1.5), "target_bits must be 2 to 16 bits"),
        (lambda: LossBudgetPolicy(batch_size=0), "batch_size must be a whole number from 1"),
        (lambda: StaticPolicy(weights=1), "weights must be an int, 2 to 16 bits"),
        (lambda: StaticPolicy(activations=6.0), "activations must be an int, 2 to 16 bits"),
    ],
)
def test_bad_arguments_are_named(make_policy, message):
    with pytest.raises(ValueError, match=message):
        make_policy()


@pytest.mark.parametrize(
    ("make_policy", "message"),
    [
        (lambda: LossBudgetPolicy(target_bits="5"), "target_bits must be .* got target_bits='5'"),
        (lambda: marvin.MarvinPolicy(lookback=5), "lookback must be two .* got lookback=5"),
        (lambda: StaticPolicy(sat_tol="0"), "sat_tol must be 0 or more .* got sat_tol='0'"),
        (lambda: StaticPolicy(window=None), "window must be a whole number .* got window=None"),
    ],
    ids=["text", "one", "text of a number", "none"],
)
def test_arguments_of_another_kind_are_named(make_policy, message):
    with pytest.raises(TypeError, match=message):
        make_policy()
