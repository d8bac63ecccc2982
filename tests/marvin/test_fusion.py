"""Chains of layers that run fused: beside the same model unfused, and through what people do."""

import copy
import gc
import inspect
import io
import pickle
import random
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import marvin
from benchmarks import networks
from fixedpoint_kernels import FixedPoint, products, scratch
from fixedpoint_kernels.functions import Curve
from fixedpoint_kernels.fused import INPUT, Joined, Norm, Pooled, Value, execute
from fixedpoint_kernels.products.shapes import Window
from marvin.hooks import rounders_of, state_of
from marvin.integer import chain_run, convert, report, revert
from marvin.integer.formats import why_no_kernel
from marvin.integer.fusion import Fused
from marvin.integer.graph import Traced, trace
from marvin.integer.nodes import (
    concatenation,
    curve_of,
    flattening,
    repetition,
    zeros_around,
)
from marvin.integer.pools import let_windows_be_whole, mean_of_sides, pooling
from marvin.model_formats import encode_formats
from marvin.policies.observer import Observer, inputs_of
from marvin.rounder import channels_of, formats_of
from tests.graphs import nodes_of
from tests.observed import nearly_the_same
from train.resnet20 import Block

pytestmark = pytest.mark.skipif(
    not products.path().is_own, reason="no own path of products on this processor"
)


class Features(nn.Module):
    """Convolutions that all become one chain."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.blocks = nn.Sequential(Block(8, 8), Block(8, 16))

    def forward(self, x):
        return self.blocks(self.relu(self.bn(self.conv(x)))).mean((2, 3))


class Net(Features):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        return self.fc(super().forward(x))


CHAINED = 7  # convolutions of ``Net``, and its linear layer


def make(seed=0, model=None, fused=True, policy=None, steps=2):
    """Return a model and its optimizer, after the two steps that the policy observes first."""
    torch.manual_seed(seed)
    model = Net() if model is None else model
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.02, momentum=0.9)
    optimizer = marvin.Quantized(sgd, policy or marvin.LossBudgetPolicy(), seed=seed)
    optimizer.activations = marvin.quantize_activations(model, optimizer)
    convert(model, fused=fused)
    for i in range(steps):
        x, _ = batch(-i)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step(loss=loss)
    return model, optimizer


def batch(seed, n=8):
    generator = torch.Generator().manual_seed(100 + seed)
    x = torch.randn(n, 3, 8, 8, generator=generator)
    return x, torch.randint(0, 4, (n,), generator=generator)


def step(model, optimizer, seed, n=8):
    x, y = batch(seed, n)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step(loss=loss)
    return loss.item()


def train(model, optimizer, steps, first=0):
    return [step(model, optimizer, first + i) for i in range(steps)]


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def is_fused(model, *args):
    """Say whether a forward pass goes through chains."""
    y = model(*args or batch(0)[:1])
    return any("Chain" in type(node).__name__ for node in nodes_of(y))


class Wide(nn.Module):
    """Behind a chain, a convolution of so many channels that it is no part of one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.widens = nn.Conv2d(8, 2048, 1)
        self.wide = nn.Conv2d(2048, 4, 3, padding=1)

    def forward(self, x):
        x = F.relu(self.widens(F.relu(self.norm(self.first(x)))))
        return self.wide(x).mean((2, 3))


def test_layers_of_too_many_products_end_chains():
    model, _ = make(model=Wide())
    fused = {row.name for row in report(model).rows if row.is_fused}
    assert fused == {"first", "widens"}
    x, y = batch(3)
    gradients_are_near(model, unfused(model), unfused(model, rounded=True), x, y)


class Halved(nn.Module):
    """Cannot be traced as a whole: its input decides what is done."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return self.net(x / 2 if x.sum() > 1e9 else x)


@pytest.mark.parametrize("kind", [Net, Halved])
def test_chains_run_through_compile(kind):
    model, optimizer = make(model=kind())
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    compiled = torch.compile(model, backend="eager")
    assert train(compiled, optimizer, 3) == train(twin, twin_optimizer, 3)
    same(dict(model.state_dict()), dict(twin.state_dict()))
    assert is_fused(compiled)
    expected = unfused(model).eval()(batch(9)[0])
    found = [own for m in model.modules() if isinstance(own := vars(m).get("forward"), Fused)]
    for own in found:
        own.ran = False
    with torch.no_grad():
        same(compiled.eval()(batch(9)[0]), expected)
    assert any(own.ran for own in found)


class Opaque(nn.Module):
    """torch.compile cannot take it whole."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 4, 4)

    def forward(self, x):
        y = self.conv(x)
        return x if y.sum() > 1e30 else y


def test_what_was_compiled_for_a_frozen_model_is_not_taken_for_one_with_formats():
    torch.compiler.reset()
    x = batch(9)[0]
    frozen = marvin.freeze(make(model=Opaque())[0])
    model, optimizer = make()
    train(model, optimizer, 2)
    with torch.no_grad():
        torch.compile(frozen, backend="eager")(x)
        own = vars(model)["forward"]
        own.ran = False
        torch.compile(model, backend="eager").eval()(x)
    assert own.ran


def test_frozen_models_are_compiled_whole():
    model, optimizer = make()
    train(model, optimizer, 2)
    frozen = marvin.freeze(model)
    assert isinstance(frozen.forward, Fused)
    compiled = torch.compile(frozen, backend="eager", fullgraph=True)
    same(compiled(batch(9)[0]), frozen(batch(9)[0]))


def test_report_names_what_is_fused():
    model, _ = make()
    rows = {row.name: row for row in report(model).rows}
    assert sum(row.is_fused for row in rows.values()) == CHAINED
    assert rows["fc"].is_fused
    assert "conv: " in str(report(model))
    assert "(fused)" in str(report(model))
    assert is_fused(model)
    convert(model, fused=False)
    assert not any(row.is_fused for row in report(model).rows)
    assert not is_fused(model)


def gradients(model, x, y, draws=32):
    """Return the mean of gradients, each with other noise."""
    model.zero_grad()
    for _ in range(draws):
        (F.cross_entropy(model(x), y) / draws).backward()
    return [p.grad for p in model.parameters()]


class ToBfloat16(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.bfloat16().float()

    @staticmethod
    def backward(ctx, grad):
        return grad


def unfused(model, rounded=False):
    """Return a copy whose layers run one by one; rounded, what convolutions make is bfloat16."""
    twin = copy.deepcopy(model)
    convert(twin, fused=False)
    for module in twin.modules():
        if rounded and isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda module, args, y: ToBfloat16.apply(y))
    return twin


def gradients_are_near(model, twin, moved, x, y):
    """Those of fused layers differ from those of layers alone as rounding to bfloat16 moves these."""
    grads = (gradients(m, x, y, 16) for m in (model, twin, moved))
    for (name, _), a, b, c in zip(model.named_parameters(), *grads, strict=True):
        assert (a - b).norm() < 1.5 * (c - b).norm() + 0.03 * b.norm(), name


def apart(model):
    """Return a model whose layers have outputs of other sizes, for formats by channel."""
    with torch.no_grad():
        for _, layer in layers_of(model):
            places = torch.arange(len(layer.weight)).view(-1, *[1] * (layer.weight.dim() - 1))
            layer.weight *= 2.0 ** -(places % 4)
    return model


def by_channel(window=3):
    return marvin.LossBudgetPolicy(window=window, per_channel=True)


@pytest.mark.parametrize("policy", [lambda: None, by_channel])
def test_gradients_are_those_of_unfused_layers_as_far_as_bfloat16_goes(policy):
    """Of the sums before batch norm, chains keep bfloat16: rounding these moves others as far."""
    torch.manual_seed(0)
    model, optimizer = make(model=apart(Net()), policy=policy())
    train(model, optimizer, 4)
    twin, rounded = unfused(model), unfused(model, rounded=True)
    assert is_fused(copy.deepcopy(model))
    assert not is_fused(copy.deepcopy(twin))
    x, y = batch(9, 32)
    found, wanted, moved = (gradients(m, x, y, 8) for m in (model, twin, rounded))
    for (name, _), a, b, c in zip(model.named_parameters(), found, wanted, moved, strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() < 1.5 * (c - b).norm() + 0.01 * b.norm(), name
    for (name, a), b in zip(model.named_buffers(), twin.buffers(), strict=True):
        if "running" in name:
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


def test_what_forward_passes_count_is_counted():
    model, optimizer = make()
    twin, other = make(fused=False)
    for one in (model, twin):
        one(batch(0)[0]).sum().backward()
    state, wanted = (state_of(m) for m in (model, twin))
    assert (state.samples, state.gradients) == (wanted.samples, wanted.gradients)
    assert state.waiting == wanted.waiting == set()
    activations = [o.activations.saturation() for o in (optimizer, other)]
    assert activations[0].keys() == activations[1].keys()
    for name, share in activations[0].items():
        assert share == pytest.approx(activations[1][name], abs=2e-3), name


def test_what_another_thread_clamps_is_not_counted(monkeypatch):
    """It may run the same program as soon as this one has left it."""
    forward, shares = execute.forward, []

    def overtaken(program, *args):
        found = forward(program, *args)
        program.clamped[:] = 1000
        return found

    for run in (forward, overtaken):
        monkeypatch.setattr(execute, "forward", run)
        model, optimizer = make()
        model(batch(0)[0])
        shares.append(optimizer.activations.saturation())
    assert shares[0] == shares[1]


def test_running_statistics_are_those_of_batch_norm():
    """Of exact sums, where the norm itself would take float32 ones."""
    model, _ = make(model=Features())
    model.bn.momentum = None
    model.blocks[0].bn1.momentum = 0.3
    twin = copy.deepcopy(model)
    convert(twin, fused=False)
    for one in (model, twin):
        for i in range(3):
            one(batch(i, 3)[0])
    assert model.bn.num_batches_tracked == twin.bn.num_batches_tracked == 5
    for where in ("bn", "blocks.0.bn1"):
        a, b = model.get_submodule(where), twin.get_submodule(where)
        rtol = 1e-5 if where == "bn" else 2e-3  # of the second, inputs differ by codes
        torch.testing.assert_close(a.running_mean, b.running_mean, rtol=rtol, atol=rtol)
        torch.testing.assert_close(a.running_var, b.running_var, rtol=rtol, atol=rtol)


def test_a_norm_that_was_told_to_track_no_more_keeps_its_statistics():
    model, _ = make(model=Features())
    model.bn.track_running_stats = False
    before = [t.clone() for t in (model.bn.running_mean, model.bn.running_var)]
    assert is_fused(model)
    same([model.bn.running_mean, model.bn.running_var], before)


def test_the_policy_observes_and_changes_formats():
    model, optimizer = make(policy=marvin.LossBudgetPolicy(window=3), steps=0)
    before, fused = formats_of(model), []
    for i in range(9):
        fused.append(is_fused(copy.deepcopy(model)))
        step(model, optimizer, i)
    assert fused == [False] + 8 * [True]  # at first there are no formats
    assert formats_of(model) != before


def observe(model):
    """Let a step be observed; return what was seen of each layer, and all gradients."""
    observers = {}
    for i, (_, module) in enumerate(layers_of(model)):
        (rounder,) = rounders_of(module)
        rounder.observer = observers[i] = Observer()
    model.zero_grad()
    x, y = loud()
    F.cross_entropy(model(x), y).backward()
    for _, module in layers_of(model):
        rounders_of(module)[0].observer = None
    return inputs_of(observers, len(x)), [p.grad for p in model.parameters()]


def loud():
    """Return a batch of which much is clamped."""
    x, y = batch(3)
    return 4 * x, y


def layers_of(model):
    kinds = nn.Conv2d, nn.Linear
    return [(name, m) for name, m in model.named_modules() if isinstance(m, kinds)]


def test_observing_changes_no_bit():
    model, _ = make()
    twin = copy.deepcopy(model)
    x, y = loud()
    F.cross_entropy(twin(x), y).backward()
    assert is_fused(copy.deepcopy(model))
    same(observe(model)[1], [p.grad for p in twin.parameters()])


def test_chains_show_the_policy_what_layers_do():
    model, _ = make()
    twin = copy.deepcopy(model)
    convert(twin, fused=False)
    assert not is_fused(copy.deepcopy(twin))
    (found, _), (expected, _) = observe(model), observe(twin)
    assert len(found) == len(layers_of(model)) == CHAINED
    first, own = found[0], expected[0]
    assert (first.counts, first.lowest, first.power) == (own.counts, own.lowest, own.power)
    assert first.saturated > 0.05
    nearly_the_same(found, expected)


def test_what_is_shown_to_the_policy_takes_no_new_memory(monkeypatch):
    from fixedpoint_kernels import scratch

    model, _ = make()
    for _ in range(2):
        observe(model)
    taken, own = [], scratch.new_bytes
    monkeypatch.setattr(
        scratch, "new_bytes", lambda size, *kind: taken.append(size) or own(size, *kind)
    )
    found, _ = observe(model)
    assert len(found) == CHAINED
    assert taken == []


def saved(model, optimizer):
    """Save both, and return what loads that into others."""
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)

    def load(*others):
        file.seek(0)
        for other, state in zip(others, torch.load(file, weights_only=True), strict=True):
            other.load_state_dict(state)

    return load


def test_fractional_lengths_of_channels_change_and_programs_stay(monkeypatch):
    """A program is made for word lengths, and for the fewest fractional bits of a weight's channels."""
    from fixedpoint_kernels.fused import program

    policy = marvin.LossBudgetPolicy(window=1, per_channel=True, min_wl=6, max_wl=6)
    model, optimizer = make(model=apart(Net()), policy=policy)
    optimizer.param_groups[0]["lr"] = 0.005
    own, made, shifts, others = program.Program, [], set(), set()
    monkeypatch.setattr(program, "Program", lambda *args: made.append(args) or own(*args))
    for i in range(24):
        formats, known = [own for own in formats_of(model).values() if own.inputs], len(others)
        shifts.add(tuple(own.weights[0].shifts for own in formats))
        others.add(tuple((own.weights[0].fmt, own.inputs) for own in formats))
        assert is_fused(copy.deepcopy(model))
        made.clear()
        step(model, optimizer, i)
        assert not made or len(others) > known
    assert len(shifts) > len(others)


@pytest.mark.parametrize("policy", [lambda: None, by_channel])
def test_resume_changes_no_bit(policy):
    model, optimizer = make(model=apart(Net()), policy=policy())
    train(model, optimizer, 4)
    load = saved(model, optimizer)
    expected = train(model, optimizer, 4, 4)
    other, its_optimizer = make(seed=5, policy=marvin.LossBudgetPolicy(kappa=0.5), steps=0)
    load(other, its_optimizer)
    assert train(other, its_optimizer, 4, 4) == expected
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        same(a, b)


class Routed(nn.Module):
    """Has a weight of its own, and code that branches on values."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16))

    def forward(self, x):
        y = x @ self.weight
        return y if bool((y >= y.min()).all()) else x


def test_resume_changes_no_bit_where_a_trace_needs_formats():
    """Before a module rounds, its code is looked into: what cannot be traced then can be afterwards."""

    class Model(Features):
        def __init__(self):
            super().__init__()
            self.routed, self.fc = Routed(), nn.Linear(16, 4)

        def forward(self, x):
            return self.fc(self.routed(super().forward(x)))

    model, optimizer = make(model=Model(), steps=0)
    train(model, optimizer, 3)
    assert is_fused(model)
    load = saved(model, optimizer)
    expected = train(model, optimizer, 3, 3)
    other, its_optimizer = make(seed=5, model=Model(), steps=0)
    load(other, its_optimizer)
    assert train(other, its_optimizer, 3, 3) == expected
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        same(a, b)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_train_on_by_themselves(copied):
    pair = make()
    train(*pair, 3)
    twin = copied(pair)
    assert is_fused(copy.deepcopy(twin[0]))
    assert twin[0].forward.module is twin[0]
    expected = train(*pair, 3, 3)
    assert train(*twin, 3, 3) == expected


def test_training_mode_without_gradients_is_not_fused():
    model, optimizer = make()
    train(model, optimizer, 3)
    twin = unfused(model)
    x, _ = batch(3)
    with torch.no_grad():
        same(model(x), twin(x))
        assert model(x).grad_fn is None


def test_revert_leaves_nothing_and_freeze_a_copy():
    model, optimizer = make()
    train(model, optimizer, 2)
    frozen = marvin.freeze(model)
    assert isinstance(model.forward, Fused)
    assert frozen.forward.module is frozen
    revert(model)
    assert not any("forward" in vars(m) for m in model.modules())
    x, _ = batch(1)
    same(frozen(x), model.eval()(x))


def test_the_signature_stays():
    model, _ = make()
    assert list(inspect.signature(model.forward).parameters) == ["x"]
    same(model.forward(x=batch(0)[0]).shape, torch.Size([8, 4]))


@pytest.mark.parametrize("where", ["conv", "bn", "blocks.0", "blocks.1.relu2"])
def test_hooks_of_others_are_called(where):
    model, _ = make()
    calls = []
    handle = model.get_submodule(where).register_forward_hook(lambda *_: calls.append(1))
    assert not is_fused(model)
    assert calls
    handle.remove()
    assert is_fused(model)


@pytest.mark.parametrize("kind", ["full_backward_hook", "full_backward_pre_hook"])
def test_hooks_on_gradients_are_called(kind):
    model, _ = make()
    calls = []
    register = getattr(model.blocks[0].conv1, f"register_{kind}")  # what follows is not in place
    handle = register(lambda *_: calls.append(1))
    model(batch(0)[0]).sum().backward()
    assert calls
    handle.remove()
    assert is_fused(model)


@pytest.mark.parametrize("what", ["mode", "rounding", "formats", "other formats", "hook"])
def test_what_changes_after_a_pass_is_seen(what):
    model, _ = make()
    assert is_fused(model)
    rounder = rounders_of(model.conv)[0]
    wide = replace(rounder.formats(model.conv), inputs=FixedPoint(12, 4))
    if what == "mode":
        model.bn.eval()
    elif what == "rounding":
        rounder.state.rounding = "stochastic"
    elif what == "formats":
        rounder.write(model.conv, wide)
    elif what == "hook":
        model.conv.register_full_backward_hook(lambda *_: None)
    else:  # another tensor, written as often
        before = model.conv.fixed_point
        model.conv.fixed_point = encode_formats(wide, channels_of(model.conv))
        while model.conv.fixed_point._version < before._version:
            model.conv.fixed_point.add_(0)
    assert not is_fused(model)


def test_a_norm_that_rounds_is_not_passed_over():
    model, _ = make()
    rounder = rounders_of(model.bn)[0]
    rounder.write(model.bn, replace(rounder.formats(model.bn), inputs=FixedPoint(8, 4)))
    assert not is_fused(model)
    model, _ = make(model=WithNormAct())
    rounder = rounders_of(model.norm1)[0]
    assert "norm1" in {own.norm for chain in trace(model).chains for own in chain.layers}
    rounder.write(model.norm1, replace(rounder.formats(model.norm1), inputs=FixedPoint(3, 1)))
    assert "norm1" not in {own.norm for chain in trace(model).chains for own in chain.layers}
    x, _ = batch(0)
    torch.testing.assert_close(model(x), unfused(model)(x), rtol=0.05, atol=0.05)


def test_several_passes_before_one_backward():
    model, _ = make(model=Features())  # a layer that is not fused takes its noise in backward
    model.zero_grad()
    twin = copy.deepcopy(model)
    losses = [F.cross_entropy(model(x), y) for x, y in map(batch, range(3))]
    sum(losses).backward()
    for i in range(3):
        x, y = batch(i)
        F.cross_entropy(twin(x), y).backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)


def test_backward_twice_over_one_graph():
    model, _ = make(model=Features())
    model.zero_grad()
    x, y = batch(0)
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    model(batch(1)[0]).sum()  # other work in between
    model.zero_grad()
    loss.backward()
    for a, b in zip(first, model.parameters(), strict=True):
        same(a, b.grad)


def test_batches_of_other_sizes():
    model, optimizer = make()
    for i, n in enumerate((8, 3, 8, 1, 5, 8)):
        assert step(model, optimizer, i, n) < 10
    assert len(list(model.children())) == 5  # nothing became part of the model


def test_memory_does_not_pile_up_with_sizes_of_batches():
    """Each size has a program, and all work in the same memory."""
    model, optimizer = make()

    def held(n):
        step(model, optimizer, 0, n)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    step(model, optimizer, 0, 2)  # what is made once
    scratch._spare.clear()  # what other tests left
    tracemalloc.start()
    held(256)
    one = held(256)  # the policy observes this step, which takes memory that is kept
    several = [held(n) for n in (255, 254, 253)]
    tracemalloc.stop()
    assert one > 4_000_000
    assert several[-1] - one < 3 * 0.25 * one  # tables say where each position is


@pytest.mark.parametrize("offset", [0, 4, 16, 48])
def test_saved_tensors_may_come_back_as_copies(offset):
    """Hooks that save them elsewhere, as ``torch.autograd.graph.save_on_cpu`` does, lay them as they like."""
    (model, _), (twin, _) = make(), make()

    def moved(saved):
        place = torch.empty(saved.nbytes + 128, dtype=torch.uint8)
        start = -place.data_ptr() % 64 + offset if saved.dtype is torch.uint8 else 0
        return place[start : start + saved.nbytes].view(saved.dtype).view(saved.shape).copy_(saved)

    x, y = batch(7)
    with torch.autograd.graph.saved_tensors_hooks(moved, lambda saved: saved):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    F.cross_entropy(twin(x), y).backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


def test_weights_that_are_frozen_get_no_gradient():
    model, _ = make()
    model.zero_grad()
    model.blocks[0].conv1.weight.requires_grad_(False)
    model.fc.weight.requires_grad_(False)
    model.bn.bias.requires_grad_(False)
    x, y = batch(0)
    assert is_fused(model)
    F.cross_entropy(model(x), y).backward()
    assert model.blocks[0].conv1.weight.grad is None
    assert model.bn.bias.grad is None
    assert model.fc.weight.grad is None
    assert model.fc.bias.grad.shape == (4,)
    assert model.conv.weight.grad is not None


def test_weights_whose_negation_waits_are_read_as_they_are():
    own, _ = make(model=Pools())
    x, y = batch(3)
    expected = own(x).detach(), gradients(own, x, y)
    for layer in (own.a, own.b):
        weight = layer.weight.detach().clone()
        layer.weight.data = torch.complex(weight, -weight).conj().imag
        assert layer.weight.is_neg()
        assert torch.equal(layer.weight, weight)
    assert torch.equal(own(x), expected[0])
    pairs = zip(gradients(own, x, y), expected[1], strict=True)
    for a, b in pairs:
        assert (a - b).norm() < 0.02 * b.norm()


def test_weights_changed_between_forward_and_backward_are_refused():
    model, _ = make()
    loss = model(batch(0)[0]).sum()
    with torch.no_grad():
        model.conv.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_activation_checkpointing():
    """A second forward pass takes other noise."""
    model, _ = make()
    twin = copy.deepcopy(model)
    x, y = batch(0)
    one, other = gradients(twin, x, y, 1), gradients(twin, x, y, 1)
    model.zero_grad()
    F.cross_entropy(checkpoint(model, x, use_reentrant=False), y).backward()
    for p, a, b in zip(model.parameters(), one, other, strict=True):
        assert (p.grad - a).norm() <= 2 * (b - a).norm() + 0.02 * a.norm()


class Changing(nn.Module):
    """Reuses a value after it was changed in place."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        h = self.a(x)
        before = h
        h += self.b(x)
        return torch.relu(h + before)


class Counting(nn.Module):
    """Depends on what its code did before."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.b(self.a(x))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
        self.short = False

    def forward(self, x):
        h = F.relu(self.b(F.relu(self.a(x))))
        return h if self.short else self.c(h)


@pytest.mark.parametrize("kind", [Changing, Counting])
def test_code_that_a_trace_cannot_tell_runs_as_it_is(kind):
    model, _ = make(model=kind())
    twin = copy.deepcopy(model)
    convert(twin, fused=False)
    x, _ = batch(0)
    before = getattr(model, "calls", 0)
    assert not is_fused(model, x)
    model(x)
    same(model(x), twin(x))
    assert getattr(model, "calls", 3) == before + 3


class Viewing(nn.Module):
    """Changes a value in place by another name of its memory."""

    def __init__(self, change):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
        self.same, self.change = nn.Identity(), change
        self.register_buffer("zeros", torch.zeros(8, 4, 6, 6))

    def forward(self, x):
        h = F.relu(self.a(x)) * 1.0
        REWRITES[self.change](self, h)
        return self.c(F.relu(self.b(h)))


REWRITES = {
    "a part": lambda _, h: h[:, 0].zero_(),
    "flat": lambda _, h: h.flatten(1).mul_(2),
    "data": lambda _, h: h.data.mul_(2),
    "a module": lambda own, h: F.hardtanh(own.same(h), 0.0, 0.1, inplace=True),
    "out": lambda own, h: torch.mul(own.zeros, 2.0, out=h.data),
}


@pytest.mark.parametrize("change", REWRITES)
def test_what_changes_under_another_name_is_not_passed_over(change):
    model, _ = make(model=Viewing(change))
    twin = copy.deepcopy(model)
    convert(twin, fused=False)
    x, _ = batch(0)
    assert not is_fused(model, x)
    same(model(x), twin(x))
    for one in (model, twin):
        one.eval()
    with torch.no_grad():
        same(model(x), twin(x))


class Adding(nn.Module):
    """Changes values in place that nothing else uses."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
        self.c, self.same = nn.Conv2d(4, 4, 3), nn.Identity()

    def forward(self, x):
        h = self.same(self.a(x))
        h += self.b(x)
        return F.relu(self.c(F.relu(h, inplace=True)), inplace=True)


def test_changes_in_place_that_nobody_else_sees_stay_fused():
    model, _ = make(model=Adding())
    assert is_fused(model)
    assert all(row.is_fused for row in report(model).rows)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["relu", "bn", "conv", "blocks.0.conv1", "fc"])
def test_a_forward_that_is_set_on_an_object_is_called(name, training):
    model, _ = make()
    model.train(training)
    own, called, (x, _) = model.get_submodule(name), [], batch(3)
    with torch.set_grad_enabled(training):
        before = model(x)
        usual = own.forward

        def forward(x):
            called.append(x)
            return 2 * usual(x)

        own.forward = forward
        after = model(x)
        assert len(called) == 1
        assert (after - before).abs().max() > 0
        convert(model)
        model(x)
        assert len(called) == 2
        del own.forward
        model(x)
    assert len(called) == 2


@pytest.mark.parametrize("size", [1, 2])
def test_batch_norm_of_one_value_is_refused_as_by_pytorch(size):
    model, _ = make(model=Features())
    x = torch.randn(1, 3, size, size)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(x)
    assert is_fused(model, torch.randn(1, 3, 3, 3))
    assert is_fused(model, torch.randn(2, 3, size, size))
    with torch.no_grad():
        assert model.eval()(x).isfinite().all()


DRAWS = {
    "torch": lambda: torch.rand(()).item(),
    "random": random.random,
    "numpy": np.random.rand,
}


DRAWN = []  # no attribute of a model: those are watched too


class Skipping(nn.Module):
    """Leaves a layer out one time in a hundred: two traces in a row are alike."""

    def __init__(self, draw):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
        self.draw = draw

    def forward(self, x):
        h = F.relu(self.a(x))
        if self.training:
            DRAWN.append(DRAWS[self.draw]())
            if DRAWN[-1] < 0.01:
                return h
        return self.c(F.relu(self.b(h)))


@pytest.mark.parametrize("draw", DRAWS)
def test_code_that_draws_random_numbers_runs_as_it_is(draw):
    model, _ = make(model=Skipping(draw))
    x, _ = batch(0)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    convert(model)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert all(map(np.array_equal, np.random.get_state(), before[2]))
    assert not is_fused(model, x)
    found = len(DRAWN)
    for _ in range(3):
        model(x)
    assert len(DRAWN) == found + 3
    assert len({*DRAWN[-3:]}) == 3


def test_noise_that_code_adds_is_drawn_at_each_call():
    own = torch.Generator()  # of which a trace that looks at torch's own generator sees nothing

    class Noisy(Branching):
        def forward(self, x):
            return super().forward(x + torch.randn(3, 1, 1, generator=own))

    model, _ = make(model=Noisy())
    x, _ = batch(0)
    assert not torch.equal(model(x), model(x))


def test_a_flag_that_changes_is_seen():
    model, _ = make(model=Branching())
    x, _ = batch(0)
    assert model(x).shape[-1] == 2
    for short in (True, None, 1):
        model.short = short
        assert is_fused(model, x)
        assert model(x).shape[-1] == (4 if short else 2)


class Settings:
    """A configuration, as models of others have it."""

    def __init__(self):
        self.short = False


class Configured(Branching):
    """Branches on what is in its attributes."""

    def __init__(self):
        super().__init__()
        self.table, self.items, self.both = {"short": False}, [False], (False, False)
        self.config, self.act = Settings(), torch.relu

    def forward(self, x):
        is_short = self.table["short"] or self.items[0] or any(self.both) or self.config.short
        h = self.act(self.b(F.relu(self.a(x))))
        return h if is_short else self.c(h)


CHANGES = {
    "dictionary": lambda model: model.table.update(short=True),
    "list": lambda model: model.items.insert(0, True),
    "tuple": lambda model: setattr(model, "both", (False, True)),
    "record": lambda model: setattr(model.config, "short", True),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_in_attributes_and_changes_is_seen(change, training):
    model, _ = make(model=Configured())
    x, _ = batch(0)
    model.train(training)
    with torch.set_grad_enabled(training):
        assert model(x).shape[-1] == 2
        change(model)
        assert model(x).shape[-1] == 4


def test_a_function_that_another_takes_the_place_of_is_seen():
    model, _ = make(model=Configured())
    x, _ = batch(0)
    assert is_fused(model, x)
    model.act = torch.sign
    twin = copy.deepcopy(model)
    convert(twin, fused=False)
    same(model(x), twin(x))


def test_what_others_count_in_objects_of_theirs_is_not_traced_again():
    class Trainer:
        def __init__(self, model):
            self.model, self.steps, self.losses = model, 0, []

    model, _ = make(model=Branching())
    model.trainer = Trainer(model)
    x, _ = batch(0)
    assert is_fused(model, x)
    given = vars(model)["forward"]._given((x,), {})
    runs = vars(model)["forward"]._ready(given)
    assert runs is not None
    model.trainer.steps += 1
    model.trainer.losses.append(0.5)
    assert vars(model)["forward"]._ready(given) is runs


def test_models_of_many_modules_and_attributes_are_traced():
    model = Branching()
    model.others = nn.ModuleList(nn.Identity() for _ in range(100))
    for i in range(100):
        setattr(model, f"number_{i}", i)
    model.long = [0] * 100
    model, _ = make(model=model)
    assert is_fused(model, batch(0)[0])


class Keeping(Branching):
    """Keeps what it computed in attributes: in one, in a list and in a dictionary."""

    def __init__(self, kinds):
        super().__init__()
        self.kinds, self.items, self.table, self.kept = kinds, [], {}, None

    def forward(self, x):
        h = self.a(x)
        if "attribute" in self.kinds:
            self.kept = h
        if "list" in self.kinds:
            self.items.append(h)
        if "dictionary" in self.kinds:
            self.table["a"] = h
        return super().forward(x)


@pytest.mark.parametrize("kind", ["attribute", "list", "dictionary"])
def test_what_code_keeps_in_attributes_is_of_this_call(kind):
    model, _ = make(model=Keeping(kind))
    before = [model.kept, *model.items, *model.table.values()]
    convert(model)
    after = [model.kept, *model.items, *model.table.values()]
    assert len(after) == len(before)
    assert all(a is b for a, b in zip(after, before, strict=True))
    for i in range(2):
        x, _ = batch(i)
        model(x)
        kept = model.kept if kind == "attribute" else model.table.get("a")
        if kind == "list":
            assert len(model.items) == len(before) + i
            kept = model.items[-1]
        same(kept, model.a(x))


def test_hooks_that_code_adds_once_are_added_once():
    """Transformers notes in an attribute that it has added hooks, which collect what layers make."""
    found = []

    class Hooking(Net):
        def forward(self, x):
            if not hasattr(self, "is_hooked"):
                self.is_hooked = True
                self.bn.register_forward_hook(lambda module, args, y: found.append(y))
            return super().forward(x)

    torch.manual_seed(0)
    model = Hooking()
    optimizer = marvin.Quantized(
        torch.optim.SGD(model.parameters(), lr=0.1), marvin.StaticPolicy(8)
    )
    marvin.quantize_activations(model, optimizer)
    convert(model)
    assert "adds or removes hooks" in trace(model)
    assert not found
    x, _ = batch(0)
    for count in (1, 2):
        model(x)
        assert len(found) == count
        assert all(type(y) is torch.Tensor for y in found)


class Scaled(Features):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return super().forward(x) * self.scale


def louder(module):
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.weight.mul_(0.5)
    return other


def replace_convolution(model):
    model.blocks[0].conv1 = louder(model.blocks[0].conv1)


def replace_norm(model):
    model.bn = louder(model.bn)


def replace_head(model):
    model.fc = nn.Linear(16, 4)


def replace_parameter(model):
    model.scale = nn.Parameter(model.scale.detach() * 2)


def change_eps(model):
    model.bn.eps = 10.0


def delete_and_add(model):
    del model.flag
    model.other = True


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (Net, replace_convolution),
        (Net, replace_norm),
        (Net, replace_head),
        (Scaled, replace_parameter),
        (Net, change_eps),
    ],
)
def test_what_is_put_in_place_of_a_part_is_seen(kind, change):
    model, _ = make(model=kind())
    x, _ = batch(9)
    before = model(x)
    change(model)
    y = model(x)
    assert not torch.equal(y, before)
    convert(model)  # traces it anew
    same(y, model(x))


def test_an_attribute_that_is_deleted_is_seen():
    model = Net()
    model.flag = True
    make(model=model)
    delete_and_add(model)
    assert is_fused(model)


def test_a_weight_that_is_replaced_after_hooks_came_anew_is_seen():
    model, optimizer = make()
    marvin.quantize_activations(model, optimizer).remove()
    marvin.quantize_activations(model, optimizer)
    assert is_fused(model)
    x, _ = batch(9)
    before = model(x)
    model.conv.weight = nn.Parameter(torch.zeros_like(model.conv.weight))
    y = model(x)
    assert not torch.equal(y, before)
    convert(model)  # traces it anew
    same(y, model(x))


def test_layers_that_stop_fitting_run_unfused():
    model, _ = make(policy=marvin.StaticPolicy(12, 8))
    assert not is_fused(model)
    model, _ = make(policy=marvin.FixedPolicy(8, 5))  # rounds stochastically
    assert not is_fused(model)


def test_children_are_fused_where_the_model_cannot_be_traced():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, x):
            return self.net(x) if x.sum() > -1e9 else x

    model, _ = make(model=Outer())
    assert isinstance(model.net.forward, Fused)
    assert is_fused(model)


class Twice(nn.Module):
    """Takes what a convolution makes once with batch norm and once without."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, bias=False), nn.Conv2d(4, 4, 3)
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x):
        z = self.a(x)
        return self.bn(z).mean() + torch.relu(self.b(z))


def found(model):
    convert(model)
    traced = trace(model)
    return traced if isinstance(traced, str) else [chain.values for chain in traced.chains]


def test_chains_that_are_found():
    c, bn = nn.Conv2d, nn.BatchNorm2d
    assert "pass codes on" in found(nn.Sequential(c(3, 4, 3), nn.Flatten()))
    assert found(nn.Sequential(c(3, 4, 3, bias=False), bn(4), nn.LPPool2d(2, 2), c(4, 4, 3))) == [
        [Value(0, is_output=True)]
    ]
    assert found(
        nn.Sequential(c(3, 4, 3), nn.ReLU(), nn.Identity(), c(4, 4, 3, bias=False), bn(4))
    ) == [[Value(0, relu=True), Value(1, is_output=True)]]
    assert found(Twice()) == [
        [Value(0), Value(1, is_output=True), Value(2, relu=True, is_output=True)]
    ]
    bias_first = nn.Sequential(c(3, 4, 3), bn(4), c(4, 4, 3), nn.ReLU())
    assert found(bias_first) == [[Value(0), Value(1), Value(2, relu=True, is_output=True)]]
    assert found(Net())[0][4:] == [
        Value(4, other_layer=5, relu=True),
        Pooled(4, None, Window(), is_mean=True, is_flat=True),
        Value(6, is_output=True, is_flat=True),
    ]
    assert found(Net())[0][2] == Value(2, other_value=0, relu=True)


class Inverted(nn.Module):
    """As MobileNetV2 has it, between layers in groups."""

    def __init__(self, how):
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3, padding=1, groups=3)
        self.wide = nn.Conv2d(12, 48, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(48)
        self.each = nn.Conv2d(48, 48, 3, padding=1, groups=48, bias=False)
        self.bn2 = nn.BatchNorm2d(48)
        self.narrow = nn.Conv2d(48, 12, 1, groups=4, bias=False)
        self.bn3 = nn.BatchNorm2d(12)
        self.relu6 = nn.ReLU6(inplace=True) if how == "module" else F.relu6
        for norm in (self.bn1, self.bn2):
            nn.init.constant_(norm.weight, 5.0)  # much is above 6

    def forward(self, x):
        x = self.conv(x)
        y = self.relu6(self.bn1(self.wide(x)))
        y = self.relu6(self.bn2(self.each(y)))
        return (x + self.bn3(self.narrow(y))).mean((2, 3))


@pytest.mark.parametrize("how", ["module", "function"])
def test_groups_and_relu6_are_part_of_chains(how):
    model, optimizer = make(model=Inverted(how))
    assert all(row.is_fused for row in report(model).rows)
    (chain,) = trace(model).chains
    assert [getattr(value, "ceiling", None) for value in chain.values] == [None, 6, 6, None, None]
    twin, moved = unfused(model), unfused(model, rounded=True)
    x, y = batch(3, 64)
    assert is_fused(copy.deepcopy(model), x)
    assert not is_fused(copy.deepcopy(twin), x)
    assert (model(x) - twin(x)).norm() < 0.05 * twin(x).norm()
    gradients_are_near(model, twin, moved, x, y)
    assert train(model, optimizer, 3)


class Squeeze(nn.Module):
    """Squeeze and excitation: as torchvision has it, or timm, or with functions."""

    def __init__(self, channels, how, gate):
        super().__init__()
        self.how, self.gate = how, gate
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, channels // 4, 1)
        self.act = nn.SiLU() if how == "timm" else nn.ReLU()
        self.fc2 = nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x):
        s = self.mean(x) if self.how == "torchvision" else x.mean((2, 3), keepdim=True)
        s = self.fc2(self.act(self.fc1(s)))
        if self.how == "functions":
            return torch.mul(x, F.hardsigmoid(s))
        return self.gate(s) * x if self.how == "torchvision" else x * s.sigmoid()


class Efficient(nn.Module):
    """As EfficientNet and MobileNetV3: curves, gates, values added."""

    def __init__(self, how, act):
        super().__init__()
        self.act = act
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.each = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.squeeze = Squeeze(16, how, nn.Sigmoid())
        self.narrow = nn.Conv2d(16, 16, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(16)

    def forward(self, x):
        x = self.act(self.bn(self.conv(x)))
        y = self.squeeze(self.act(self.bn1(self.each(x))))
        return (x + self.bn2(self.narrow(y))).mean((2, 3))


EFFICIENT = {
    "torchvision": ("torchvision", nn.Hardswish(inplace=True)),
    "timm": ("timm", nn.SiLU(inplace=True)),
    "functions": ("functions", F.gelu),
    "leaky": ("timm", lambda x: F.leaky_relu(x, 0.2, inplace=True)),
}


@pytest.mark.parametrize("how", EFFICIENT)
def test_curves_and_gates_are_part_of_chains(how):
    model, optimizer = make(model=Efficient(*EFFICIENT[how]))
    assert all(row.is_fused for row in report(model).rows)
    (chain,) = trace(model).chains
    assert [len(chain.layers), len(chain.outputs)] == [5, 1]
    x, y = batch(3, 64)
    assert is_fused(copy.deepcopy(model), x)
    twin, moved = unfused(model), unfused(model, rounded=True)
    assert not is_fused(copy.deepcopy(twin), x)
    assert (model(x) - twin(x)).norm() < 0.05 * twin(x).norm()
    gradients_are_near(model, twin, moved, x, y)
    assert train(model, optimizer, 3)


class Summed(nn.Module):
    """As YOLO's blocks: a curve, then the input of the block is added; as ResNet's with gates."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.conv1 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(16)
        self.squeeze = Squeeze(16, "timm", None)

    def forward(self, x):
        x = F.silu(self.bn(self.stem(x)))
        x = x + F.silu(self.bn1(self.conv1(x)))
        return F.relu(self.squeeze(self.bn2(self.conv2(x))) + x).mean((2, 3))


def test_sums_of_two_values_are_part_of_chains():
    model, optimizer = make(model=Summed())
    (chain,) = trace(model).chains
    assert [len(chain.layers), len(chain.outputs)] == [5, 1]
    assert [v.values for v in chain.values if isinstance(v, Value) and v.layer is None] == [
        (0, 1),
        (7, 2),
    ]
    x, y = batch(3, 64)
    assert is_fused(copy.deepcopy(model), x)
    twin, moved = unfused(model), unfused(model, rounded=True)
    assert (model(x) - twin(x)).norm() < 0.05 * twin(x).norm()
    gradients_are_near(model, twin, moved, x, y)
    assert train(model, optimizer, 3)


class Gated(nn.Module):
    """What looks like a gate and is none, or is one that a chain does not have."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 1)
        self.conv3, self.conv4, self.conv5 = (nn.Conv2d(8, 8, 1) for _ in range(3))

    def forward(self, x):
        x = F.relu(self.bn(self.conv(x)))
        s = self.conv2(x.mean((2, 3), keepdim=True)).sigmoid()
        match self.how:
            case "places":  # a gate for each place
                x = x * self.conv2(x).sigmoid()
            case "two gates":
                x = s * s.mul(2)
            case "used again":
                x = x * s + s
            case "twice":
                y = self.conv5(x)
                x = y * s + y * self.conv4(x.mean((2, 3), keepdim=True)).sigmoid()
            case "number":
                x = x * 0.5
            case "sum":
                x = x + s
            case "curve of a sum":
                x = F.silu(x + self.conv3(x))
            case "itself":
                x = x * x
        return self.conv3(x).mean((2, 3))


GATED = "places", "two gates", "used again", "twice", "number", "sum", "curve of a sum", "itself"


@pytest.mark.parametrize("how", GATED)
def test_products_that_end_a_chain_give_what_layers_alone_give(how):
    model, optimizer = make(model=Gated(how))
    twin = unfused(model)
    x, y = batch(3, 16)
    assert (model(x) - twin(x)).norm() < 0.05 * twin(x).norm()
    train(model, optimizer, 2)
    grads = (gradients(m, x, y, 16) for m in (model, unfused(model)))
    for (name, _), a, b in zip(model.named_parameters(), *grads, strict=True):
        assert (a is None and b is None) or (a - b).norm() < 0.2 * b.norm() + 1e-6, name


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda x: F.silu(x, inplace=True), Curve("silu")),
        (lambda x: F.leaky_relu(x), Curve("leaky_relu", 0.01)),
        (lambda x: F.leaky_relu(x, 0.3), Curve("leaky_relu", 0.3)),
        (lambda x: F.leaky_relu(negative_slope=0.3, input=x), Curve("leaky_relu", 0.3)),
        (lambda x: F.gelu(x), Curve("gelu")),
        (lambda x: F.gelu(x, approximate="none"), Curve("gelu")),
        (lambda x: F.gelu(x, approximate="tanh"), Curve("gelu_tanh")),
        (lambda x: torch.sigmoid(x), Curve("sigmoid")),
        (lambda x: x.sigmoid_(), Curve("sigmoid")),
        (lambda x: F.hardswish(x, True), Curve("hardswish")),
        (lambda x: torch.sigmoid(x, out=x), None),
        (lambda x: F.leaky_relu(x, x.mean()), None),
        (lambda x: torch.tanh(x), None),
    ],
)
def test_calls_that_are_curves(call, found):
    graph = fx.Graph()
    call(fx.Proxy(graph.placeholder("x")))
    assert curve_of(list(graph.nodes)[-1], nn.Module()) == found


@pytest.mark.parametrize(
    ("own", "found"),
    [
        (nn.LeakyReLU(0.2), Curve("leaky_relu", 0.2)),
        (nn.GELU(), Curve("gelu")),
        (nn.GELU("tanh"), Curve("gelu_tanh")),
        (nn.Tanh(), None),
    ],
)
def test_modules_that_are_curves(own, found):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = own

        def forward(self, x):
            return self.act(x)

    model = Model()
    graph = fx.symbolic_trace(model).graph
    assert [curve_of(n, model) for n in graph.nodes if n.op == "call_module"] == [found]


def test_a_slope_that_changes_is_seen():
    model, _ = make(model=Efficient("timm", nn.LeakyReLU(0.2)))
    x, _ = batch(3)
    model(x)
    model.act.negative_slope = 0.9
    assert is_fused(model, x)
    twin = unfused(model)
    assert (model(x) - twin(x)).norm() < 0.05 * twin(x).norm()


class NormAct(nn.BatchNorm2d):
    """A batch norm with more behind it, whose code calls the function: as timm has it."""

    def __init__(self, channels, act, **more):
        super().__init__(channels, **more)
        self.drop, self.act = nn.Identity(), act

    def forward(self, x):
        torch._assert(x.ndim == 4, f"needs 4 dimensions, got {x.ndim}")
        factor = self.momentum
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / float(self.num_batches_tracked)
        keeps = not self.training or self.track_running_stats
        running = (self.running_mean, self.running_var) if keeps else (None, None)
        y = F.batch_norm(x, *running, self.weight, self.bias, self.training, factor, self.eps)
        return self.act(self.drop(y))


class WithNormAct(nn.Module):
    def __init__(self, **more):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm1 = NormAct(8, nn.ReLU(), **more)
        self.each = nn.Conv2d(8, 8, 3, groups=8, bias=False)
        self.norm2 = NormAct(8, nn.SiLU(), **more)
        self.last = nn.Conv2d(8, 4, 1, bias=False)
        self.first, self.bare = nn.Conv2d(3, 3, 1), NormAct(3, nn.Identity(), **more)

    def forward(self, x):
        x = self.norm2(self.each(self.norm1(self.conv(self.bare(self.first(x))))))
        return self.last(x).mean((2, 3))


def statistics_of(model):
    return {name: b.clone() for name, b in model.named_buffers() if "fixed_point" not in name}


def test_norms_with_activations_of_their_own_are_part_of_chains():
    fresh = WithNormAct()
    before = statistics_of(fresh)
    model, optimizer = make(model=fresh, steps=0)
    assert isinstance(trace(model), Traced)
    assert all(map(torch.equal, before.values(), statistics_of(model).values()))
    twin, other = make(model=WithNormAct(), steps=0, fused=False)
    for one, own in ((model, optimizer), (twin, other)):
        train(one, own, 3)
    rows = {row.name: row for row in report(model).rows}
    assert rows["conv"].is_fused
    assert rows["each"].is_fused
    assert is_fused(model)
    assert not is_fused(twin)
    (chain,) = trace(model).chains
    assert [layer.norm for layer in chain.layers] == [None, "bare", "norm1", "norm2", None]
    for name, found in statistics_of(model).items():
        wanted = dict(twin.named_buffers())[name]
        torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.02)
        assert "num" not in name or found == wanted == 4, name


@pytest.mark.parametrize("where", ["norm1", "norm1.act", "norm2.drop"])
def test_hooks_within_norms_with_activations_are_called(where):
    model, _ = make(model=WithNormAct())
    calls = []
    model.get_submodule(where).register_forward_hook(lambda *_: calls.append(1))
    model(batch(0)[0])
    assert calls


@pytest.mark.parametrize(
    "more", [{"momentum": None}, {"track_running_stats": False}, {"affine": False, "eps": 0.1}]
)
def test_norms_with_activations_keep_their_settings(more):
    model, _ = make(model=WithNormAct(**more), steps=3)
    twin, _ = make(model=WithNormAct(**more), steps=3, fused=False)
    assert is_fused(model) == ("momentum" not in more)
    assert not is_fused(twin)
    for name, found in statistics_of(model).items():
        wanted = dict(twin.named_buffers())[name]
        torch.testing.assert_close(found, wanted, rtol=0.1, atol=0.1)


def test_other_numbers_than_a_norms_own_run_as_they_are():
    model, _ = make(model=WithNormAct())
    assert is_fused(model)
    model.norm1.act = nn.Tanh()  # ends the chain
    model.norm2.forward = lambda x: F.batch_norm(x, None, None, training=True, eps=0.5)
    assert len(trace(model).chains) == 1


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "net", [Net, lambda: nn.Linear(3, 2), lambda: nn.Sequential(nn.Linear(3, 16), nn.Linear(16, 2))]
)
def test_gradients_that_are_differentiated_again_are_refused(net, fused):
    """Also where torch would take the first gradient for a constant: it depends on the weights."""
    model, inputs = net(), (4, 3, 8, 8) if net is Net else (4, 3)
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.02)
    optimizer = marvin.Quantized(sgd, marvin.LossBudgetPolicy())
    marvin.quantize_activations(model, optimizer)
    convert(model, fused=fused)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(inputs)).square().mean()
        loss.backward()
        optimizer.step(loss=loss)
    x = torch.randn(inputs, requires_grad=True)
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(
        RuntimeError, match="differentiate"
    ):  # the rounding of inputs may come first
        (grad.square().sum() + model(x).sum()).backward()


class Buffered(nn.Module):
    """Adds to a buffer at each call."""

    def __init__(self):
        super().__init__()
        self.inner = Features()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return self.inner(x)


def test_code_that_changes_a_buffer_runs_as_it_is():
    model, _ = make(model=Buffered(), steps=2)
    assert model.calls == 2
    assert trace(model) == "its forward changes a buffer or another tensor, calls"
    assert is_fused(model)  # of its child
    assert model.calls == 3


def test_groups_are_multiplied_one_by_one_on_a_gpu():
    assert why_no_kernel(torch.device("cpu"), groups=2) == ""
    assert why_no_kernel(torch.device("cuda")) == ""
    assert "it has 2 groups" in why_no_kernel(torch.device("cuda"), groups=2)


class Pools(nn.Module):
    """AlexNet in small: no batch norm, so that a chain's forward pass has the bits of its layers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 5, 3, padding=1)
        self.c = nn.Conv2d(5, 4, 1)
        self.first, self.last = nn.MaxPool2d(3, 2, 1), nn.MaxPool2d((2, 3))

    def forward(self, x):
        x = self.first(torch.relu(self.a(x)))
        x = F.max_pool2d(torch.relu(self.b(x)), kernel_size=2, stride=1)
        return self.last(F.pad(self.c(x), (0, 1))).flatten(1)[:, :4]


def test_pooling_is_part_of_chains():
    first, second = Window((2, 2), (1, 1)), Window((1, 1))
    assert found(Pools()) == [
        [
            Value(0, relu=True),
            Pooled(0, (3, 3), first),
            Value(1, relu=True),
            Pooled(2, (2, 2), second),
            Value(2, is_output=True),
        ]
    ]
    own, _ = make(model=Pools())
    other = copy.deepcopy(own)
    convert(other, fused=False)
    x, y = batch(3)
    assert is_fused(own)
    assert torch.equal(own(x), other(x))
    pairs = zip(gradients(own, x, y), gradients(other, x, y), strict=True)
    for a, b in pairs:
        assert (a - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d((2,), (2,), [0], (1,)),
        nn.AvgPool2d([2], [2], [0], count_include_pad=False),
        lambda x: F.avg_pool2d(x, [2]),
    ],
)
def test_a_tuple_or_list_of_one_number_is_for_both_sides(pool):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)
            self.pool = pool

        def forward(self, x):
            return self.b(self.pool(torch.relu(self.a(x))))

    ((_, pooled, _),) = found(Own())
    assert (pooled.kernel, pooled.window) == ((2, 2), Window((2, 2)))


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(2, dilation=2),
        nn.MaxPool2d((1, 257), padding=(0, 128)),
        nn.AvgPool2d(2, ceil_mode=True),
        nn.AvgPool2d(2, divisor_override=3),
        nn.AvgPool2d(2, padding=1, count_include_pad=False),
        nn.AdaptiveAvgPool2d((1, 2)),
        nn.AdaptiveMaxPool2d(2),
    ],
    ids=str,
)
def test_pooling_that_ends_a_chain(pool):
    c = nn.Conv2d
    chains = found(nn.Sequential(c(3, 4, 3), nn.ReLU(), c(4, 4, 3), pool, c(4, 4, 1), c(4, 4, 1)))
    assert [values[-1] for values in chains] == [Value(1, is_output=True)] * 2


@pytest.mark.parametrize("channels", [1, 2, 4, 6])
def test_images_of_other_channels_are_refused(channels):
    model, _ = make()
    with pytest.raises(ValueError, match=f"needs 3 input channels, got {channels}"):
        model(torch.randn(4, channels, 8, 8))


def test_groups_that_change_are_seen():
    model, _ = make(model=Inverted("module"), steps=3)
    assert is_fused(model)
    model.each.groups = 24
    with pytest.raises(ValueError, match="in 24 groups needs 24 input channels, got 48"):
        model(batch(0)[0])


def test_images_smaller_than_a_window_are_refused():
    model, _ = make(model=Pools())
    with pytest.raises(ValueError, match="windows of 2x2 must fit in the image, got 1x1 places"):
        model(torch.randn(2, 3, 1, 1))


FLATTENS = {
    "module": nn.Flatten(),
    "function": lambda x: torch.flatten(x, start_dim=1),
    "method": lambda x: x.flatten(1),
    "size": lambda x: x.reshape(x.size(0), -1),
    "sizes": lambda x: x.reshape((x.size()[0], -1)),
    "shape": lambda x: torch.reshape(x, (x.shape[0], 80)),
    "features": lambda x: x.reshape(-1, 80),
}


class Flat(nn.Module):
    """AlexNet in small, with its linear layers; its forward pass has the bits of its layers."""

    def __init__(self, flatten="module"):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 5, 3, padding=1)
        self.c, self.d, self.e = nn.Linear(80, 24), nn.Linear(24, 24), nn.Linear(24, 4)
        self.pool, self.drop, self.how = nn.MaxPool2d(2), nn.Dropout(0.0), flatten
        self.flat = nn.Flatten()

    def forward(self, x):
        x = torch.relu(self.b(self.pool(torch.relu(self.a(x)))))
        x = self.flat(x) if self.how == "module" else FLATTENS[self.how](x)
        x = self.drop(torch.relu(self.c(x)))
        return self.e(torch.relu(self.d(x) + x))


def pair(model):
    """Return a model whose chains run fused, and one with the same state whose layers run one by one."""
    own, _ = make(model=model)
    other = copy.deepcopy(own)
    convert(other, fused=False)
    return own, other


@pytest.mark.parametrize("how", FLATTENS)
def test_linear_layers_are_part_of_chains(how):
    own, other = pair(Flat(how))
    assert all(row.is_fused for row in report(own).rows)
    traced = trace(own)
    assert (len(traced.chains), len(traced.tokens)) == (1, 0)
    assert is_fused(copy.deepcopy(own))
    x, y = batch(3)
    same(own(x), other(x))
    for a, b in zip(gradients(own, x, y), gradients(other, x, y), strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() < 0.02 * b.norm()


def test_codes_of_the_last_gradient_are_those_of_the_layer_alone():
    own, other = pair(Flat())
    x, _ = batch(3)
    grad = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    for model in (own, other):
        model.zero_grad()
        model(x).backward(grad)
    same(own.e.weight.grad, other.e.weight.grad)
    torch.testing.assert_close(own.e.bias.grad, other.e.bias.grad, rtol=1e-5, atol=1e-6)


MEANS = {
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1),
    "method": lambda x: x.mean((2, 3)),
    "function": lambda x: torch.mean(x, dim=[-1, -2], keepdim=True).flatten(1),
    "windows": lambda x: F.avg_pool2d(x, (8, 8)).flatten(1),
    "parts": lambda x: F.avg_pool2d(x, 3, 2, 1).mean((2, 3)),
    "as wide": lambda x: F.avg_pool2d(x, x.size()[3]).flatten(1),
    "as high": lambda x: F.avg_pool2d(input=x, kernel_size=x.shape[-2]).flatten(1),
    "as large": lambda x: F.avg_pool2d(x, x.size()[2:]).flatten(1),
    "both sides": lambda x: F.avg_pool2d(x, (x.size(2), x.size(-1))).flatten(1),
}


class Means(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 16, 3, padding=1)
        self.c, self.how = nn.Linear(16, 4), how

    def forward(self, x):
        return self.c(MEANS[self.how](torch.relu(self.b(torch.relu(self.a(x))))))


@pytest.mark.parametrize("how", MEANS)
def test_means_are_part_of_chains(how):
    """They differ in the last bits from PyTorch's, which may move a code by one."""
    own, other = pair(Means(how))
    assert all(row.is_fused for row in report(own).rows)
    assert len(trace(own).chains) == 1
    x, y = batch(3)
    assert is_fused(copy.deepcopy(own))
    assert (own(x) - other(x)).norm() < 0.01 * other(x).norm()
    for a, b in zip(gradients(own, x, y), gradients(other, x, y), strict=True):
        assert (a - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize("size", [(8, 8), (4, 8), (9, 4)])
@pytest.mark.parametrize("how", ["as wide", "as large"])
@pytest.mark.parametrize("infers", [False, True])
def test_windows_as_large_as_images_of_any_sides(how, size, infers):
    """Square windows make a chain of square images alone; of others they take the part that PyTorch's take."""

    class Pools(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 16, 3, padding=1)

        def forward(self, x):
            return MEANS[how](torch.relu(self.b(torch.relu(self.a(x)))))

    own, other = pair(Pools())
    x = torch.randn(5, 3, *size, generator=torch.Generator().manual_seed(0))
    if infers:
        own, other = marvin.freeze(own.eval()), marvin.freeze(other.eval())
    try:
        wanted = other(x)
    except RuntimeError:  # windows are wider than the image is high
        with pytest.raises(RuntimeError, match="too small"):
            own(x)
        return
    found = own(x)
    assert found.shape == wanted.shape
    assert (found - wanted).norm() < 0.01 * wanted.norm()


@pytest.mark.parametrize(
    "how",
    [
        lambda x: F.avg_pool2d(x, x.shape[0]),
        lambda x: F.avg_pool2d(x, x.shape[1:3]),
        lambda x: F.avg_pool2d(x, x.size(3), 1),
        lambda x: F.avg_pool2d(x, (x.size(2), 1)),
        lambda x: F.avg_pool2d(x, torch.relu(x).size(3)),
        lambda x: F.max_pool2d(x, x.size(3)),
    ],
)
def test_windows_of_other_sizes_are_left(how):
    class Called(nn.Module):
        def forward(self, x):
            return how(x)

    graph = fx.symbolic_trace(Called()).graph
    let_windows_be_whole(graph)
    assert mean_of_sides not in [node.target for node in graph.nodes]


def test_the_policy_sees_the_shapes_of_layers():
    class Shapes(Observer):
        def see(self, x, fmt):
            shapes.append(tuple(x.shape))
            return lambda grad: shapes.append(tuple(grad.shape))

    shapes = []
    model, _ = make(model=Flat())
    for _, module in layers_of(model):
        rounders_of(module)[0].observer = Shapes()
    model(batch(0)[0]).sum().backward()
    assert shapes == 2 * [(8, 3, 8, 8), (8, 6, 4, 4), (8, 80), (8, 24), (8, 24)]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.mean((1, 2)),
        lambda x: x.mean(2),
        lambda x: torch.mean(x, (2, 3), dtype=torch.float64),
        lambda x: F.adaptive_avg_pool2d(x, (1, 2)),
        lambda x: F.avg_pool2d(x, 2, ceil_mode=True),
        lambda x: x.flatten(2),
        lambda x: torch.flatten(x),
        lambda x: x.flatten(1, 2),
        lambda x: x.reshape(x.size(0), 16, -1),
        lambda x: x.reshape(x.size(1), -1),
        lambda x: x.reshape(x.shape[0], x.shape[1]),
        lambda x: x.reshape(8, -1),
        lambda x: x.reshape(-1, 80) + 1,
        lambda x: x.view(x.size(0), 80),
    ],
)
def test_what_neither_averages_nor_flattens(call):
    class Called(nn.Module):
        def forward(self, x):
            return call(x)

    module = Called()
    for node in fx.symbolic_trace(module).graph.nodes:
        assert pooling(node, module) is None
        assert flattening(node, module) is None


class Halves(nn.Module):
    """Makes two rows of each image, which no trace can know."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 5, 3, 2, 1, bias=False), nn.Linear(40, 4)
        self.bn = nn.BatchNorm2d(5)

    def forward(self, x):
        return self.b(torch.relu(self.bn(self.a(x))).reshape(-1, 40))


class Squeezed(nn.Module):
    """Adds to each place what was made of their mean."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(5, 5, 1)

    def forward(self, x):
        x = torch.relu(self.a(x))
        return torch.relu(self.b(x.mean((2, 3), keepdim=True)) + x)


class Rows(nn.Module):
    """Multiplies the rows of images."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 1, (8, 1)), nn.Linear(8, 4)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


@pytest.mark.parametrize("kind", [Halves, Squeezed, Rows])
def test_shapes_that_chains_do_not_have_run_as_they_are(kind):
    own, other = pair(kind())
    x, _ = batch(3)
    assert not is_fused(own)
    other(x)
    for model in (own, other):
        model.zero_grad()
        model(x).square().sum().backward()
    for a, b in zip(own.parameters(), other.parameters(), strict=True):
        if a.dim() > 1:
            same(a.grad, b.grad)
        else:  # sums for a bias, in another order
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-5)


class Reused(nn.Module):
    """Takes values out of a chain by other names and in other shapes."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 5, 3, padding=1, bias=False), nn.Linear(320, 4)
        self.bn, self.same = nn.BatchNorm2d(5), nn.Identity()

    def forward(self, x):
        x = torch.relu(self.bn(self.a(x)))
        flat = x.flatten(1)
        return self.b(flat) + flat[:, :4] + self.same(x)[:, 1:, 3, 3]


def long_words(model):
    (rounder,) = rounders_of(model.fc)
    rounder.write(model.fc, replace(rounder.formats(model.fc), inputs=FixedPoint(12, 8)))


def hooked(model):
    model.fc.register_forward_hook(lambda *_: calls.append(1))


calls = []


@pytest.mark.parametrize("change", [long_words, hooked])
def test_a_linear_layer_that_does_not_fit_leaves_the_others_fused(change):
    model, _ = make()
    x, _ = batch(0)
    assert "Chain" in type(model(x).grad_fn).__name__
    calls.clear()
    change(model)
    y = model(x)
    assert is_fused(model)
    assert "Chain" not in type(y.grad_fn).__name__
    assert len(calls) == (2 if change is hooked else 0)


def test_what_leaves_a_chain_by_another_name_is_computed_once():
    own, other = pair(Reused())
    x, y = batch(3)
    assert is_fused(own)
    other(x)
    assert own.bn.num_batches_tracked == other.bn.num_batches_tracked == 3
    torch.testing.assert_close(own(x), other(x), rtol=0.01, atol=0.05)  # sums are kept as bfloat16
    for a, b in zip(gradients(own, x, y, 4), gradients(other, x, y, 4), strict=True):
        assert (a - b).norm() < 0.1 * b.norm()


def test_dropout_that_is_turned_on_is_not_passed_over():
    model, _ = make(model=Flat())
    x, _ = batch(0)
    same(model(x), model(x))
    model.drop.p = 0.5
    assert not torch.equal(model(x), model(x))


def test_linear_layers_among_norms_stay_with_them():
    conv, flat = nn.Conv2d(3, 4, 3, padding=1), nn.Flatten()
    ends = nn.Linear(256, 32), nn.GELU(), nn.Linear(32, 16)
    model = nn.Sequential(conv, nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), flat, *ends)
    assert found(model) == [[Value(0, relu=True), Value(1, relu=True, is_output=True)]]
    traced = trace(model)
    assert [chain.layers for chain in traced.tokens] == [["5", "7"]]
    own, other = pair(model)
    x, _ = batch(3)
    same(own(x).shape, other(x).shape)
    assert (own(x) - other(x)).norm() < 0.02 * other(x).norm()
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 16))
    assert found(model) == []
    assert [chain.layers for chain in trace(model).tokens] == [["1", "3"]]


def test_the_input_of_a_chain_may_be_added():
    class Added(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(3, 4, 3, groups=1, padding=1, padding_mode="circular")
            self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x):
            x = self.first(x)
            return torch.relu(self.b(torch.relu(self.a(x))) + x)

    model = Added()
    values = found(model)
    assert values == [[Value(0, relu=True), Value(1, other_value=INPUT, relu=True, is_output=True)]]


class Second(nn.Module):
    """Its chain takes the second argument, or some images of it."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
        self.b = nn.Conv2d(16, 4, 3)

    def forward(self, first, x, kept=None):
        x = x if kept is None else x[kept]
        return self.b(torch.relu(self.norm(self.a(x)))).mean((2, 3)) + first.mean()


def stepped(model, steps, *args):
    """Return a converted model after steps on the same arguments."""
    model, _ = make(model=model, steps=0)
    optimizer = marvin.Quantized(torch.optim.SGD(model.parameters()), marvin.StaticPolicy(8, 8))
    marvin.quantize_activations(model, optimizer)
    convert(model)
    for _ in range(steps):
        model(*args).sum().backward()
        optimizer.step(loss=1.0)
    return model


@pytest.mark.parametrize("training", [True, False])
def test_a_chain_takes_float32_alone_wherever_its_input_comes_from(training):
    first, x = torch.ones(8, 1, 2, 2), batch(0)[0]
    model = stepped(Second(), 2, first, x).train(training)
    twin = unfused(model)
    with torch.set_grad_enabled(training):
        assert model(first, x).dtype is torch.float32
        assert model.forward.ran
        same(model(first, x.half()), twin(first, x.half()))
        for own in (model, twin):
            with pytest.raises(RuntimeError, match=r"Input type \(double\)"):
                own(first, x.double())


@pytest.mark.parametrize("training", [True, False])
def test_a_chain_may_get_no_image_within_a_model(training):
    first, x = torch.ones(8, 1, 2, 2), batch(0)[0]
    kept = torch.ones(8, dtype=torch.bool)
    model = stepped(Second(), 1, first, x, kept).train(training)
    with torch.set_grad_enabled(training):
        assert model(first, x, kept).shape == (8, 4)
        assert model(first, x, ~kept).shape == (0, 4)


class Again(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.norm.momentum, self.fc = None, nn.Linear(8, 4)
        self.first = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = torch.relu(self.norm(self.conv(x)))
        return self.fc(x.mean((2, 3)))


def test_an_average_of_all_batches_counts_each_use_of_a_batch_norm():
    model, _ = make(model=Again())
    twin, (x, _) = unfused(model), batch(0)
    assert is_fused(copy.deepcopy(model), x)
    for own in (model, twin):
        own.norm.reset_running_stats()
        for _ in range(3):
            own(x)
        assert own.norm.num_batches_tracked == 6
    torch.testing.assert_close(model.norm.running_var, twin.norm.running_var, rtol=0.01, atol=1e-4)
    torch.testing.assert_close(
        model.norm.running_mean, twin.norm.running_mean, rtol=0.01, atol=1e-3
    )


class UsedTwice(nn.Module):
    """Uses one batch norm at two places."""

    def __init__(self, uses, norm):
        super().__init__()
        self.uses, self.norm = uses, norm
        self.a, self.b = (nn.Conv2d(3, 3, 3, padding=1, bias=False) for _ in "ab")
        self.last = nn.Conv2d(3, 4, 1)
        self.other = self.norm

    def forward(self, x):
        return self.last(self.uses(self, x)).mean((2, 3))


def _later_branch_first(model, x):
    u, v = model.a(x), model.b(x)
    q = F.relu(model.norm(v))
    return F.relu(model.norm(u)) + q


def _by_two_names(model, x):
    u, v = model.a(x), model.b(x)
    q = F.relu(model.other(v))
    return F.relu(model.norm(u)) + q


def _outside_first(model, x):
    y = torch.tanh(model.norm(x))
    return F.relu(model.norm(model.a(x))) + y


def _earlier_input_later(model, x):
    p = F.relu(model.norm(model.a(torch.tanh(x))))
    return torch.tanh(p) + F.relu(model.norm(model.b(x)))


def _read_before(model, x):
    y = (x.movedim(1, 3) - model.norm.running_mean).movedim(3, 1)
    return F.relu(model.norm(model.a(x))) + y


def _one_behind_the_other(model, x):
    return F.relu(model.norm(model.b(F.relu(model.norm(model.a(x))))))


USES = {
    "the later branch first": (_later_branch_first, nn.BatchNorm2d, {"a", "b"}),
    "by two names": (_by_two_names, nn.BatchNorm2d, {"a", "b"}),
    "by the function": (_later_branch_first, lambda n: NormAct(n, nn.Identity()), {"a", "b"}),
    "outside of chains first": (_outside_first, nn.BatchNorm2d, set()),
    "an earlier input later": (_earlier_input_later, nn.BatchNorm2d, set()),
    "read before it moves": (_read_before, nn.BatchNorm2d, set()),
    "one behind the other": (_one_behind_the_other, nn.BatchNorm2d, {"a", "b", "last"}),
}


@pytest.mark.parametrize("kind", USES)
def test_running_statistics_move_in_the_order_of_the_code(kind):
    """The last use of a batch norm weighs most; in eval mode nothing moves, and chains are whole."""
    uses, norm, fused = USES[kind]
    model = UsedTwice(uses, norm(3))
    model.norm.momentum = 0.5
    model, _ = make(model=model, policy=marvin.StaticPolicy(8, 8))
    assert {row.name for row in report(model).rows if row.is_fused} == fused
    twin, (x, _) = unfused(model), batch(0)
    for own in (model, twin):
        for _ in range(3):
            own(x + 1)
    near = {"rtol": 0.01, "atol": 2e-3}  # of codes that bfloat16 moves
    torch.testing.assert_close(model.norm.running_mean, twin.norm.running_mean, **near)
    torch.testing.assert_close(model.norm.running_var, twin.norm.running_var, **near)
    assert any("norm" in chain.modules for chain in trace(model.eval(), infers=True).chains)


def _behind_another_by_two_names(model, x):
    return F.relu(model.other(model.b(F.relu(model.norm(model.a(x))))))


def _twice_outside(model, x):
    y = F.softplus(model.b(F.relu(model.a(x))))
    return model.norm(y) + model.norm(torch.tanh(y))


@pytest.mark.parametrize(
    "uses",
    [_later_branch_first, _one_behind_the_other, _behind_another_by_two_names, _twice_outside],
)
def test_each_use_of_a_norm_with_an_activation_counts(uses):
    model, _ = make(model=UsedTwice(uses, NormAct(3, nn.ReLU())), policy=marvin.StaticPolicy(8, 8))
    assert vars(model)["forward"].ran
    assert model.norm.num_batches_tracked == 2 * 2


@pytest.mark.parametrize("fused", [True, False])
def test_nan_in_an_input_is_seen(fused):
    """There is no code for it; the loss must show it, as in the simulation."""
    model, optimizer = make(fused=fused)
    x, _ = batch(0)
    x[0, 0, 0, 0] = float("nan")
    loss = model(x).square().mean()
    assert loss.isnan()
    loss.backward()
    with pytest.raises(FloatingPointError, match="nan"):
        optimizer.step(loss=loss)
    x[0, 0, 0, 0] = float("inf")  # is clamped
    x[0, 0, 0, 1] = -float("inf")
    assert model(x).isfinite().all()


def test_nan_in_an_input_is_seen_by_what_is_frozen():
    model, _ = make()
    frozen = marvin.freeze(model.eval())
    x, _ = batch(0)
    x[0, 0, 0, 0] = float("nan")
    y = frozen(x)
    assert y[0].isnan().all()
    assert y[1:].isfinite().all()


def before_convolutions():
    """Batch norm of images, of sums, of what leaves too; and of a convolution with a bias."""
    layers = nn.BatchNorm2d(3), nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
    blocks = networks.PreActivated(16, 16), networks.PreActivated(16, 32)
    head = nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4)
    return nn.Sequential(*layers, *blocks, *head)


def dense():
    """As DenseNet, with two stages."""
    one = nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 16, 1, bias=False), nn.AvgPool2d(2)
    layers = nn.Conv2d(3, 16, 3, padding=1), networks.Dense(16, 8), networks.Dense(24, 8), *one
    head = nn.BatchNorm2d(24), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 4)
    return nn.Sequential(*layers, networks.Dense(16, 8), *head)


class AllBefore(nn.Module):
    """As torchvision's DenseNet: each layer takes all outputs before it; images are among them."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(n, 8, 3, padding=1) for n in (3, 11, 19))
        self.norms = nn.ModuleList(map(nn.BatchNorm2d, (11, 19)))
        self.last = nn.Conv2d(27, 4, 1)

    def forward(self, x):
        found = [x, self.convs[0](x)]
        for norm, conv in zip(self.norms, self.convs[1:], strict=True):
            found.append(conv(norm(torch.cat(found, 1)).relu()))
        return self.last(torch.cat(found, dim=1)).mean((2, 3))


def segmenting():
    """A small U-Net, and the mean over all places."""
    below = networks.Level(8, 16, nn.Conv2d(16, 32, 3, padding=1))
    last = nn.Conv2d(8, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(networks.Level(3, 8, below), *last)


def padded():
    """As the ResNets of the paper for CIFAR: a short-cut without weights."""
    stem = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 4)
    return nn.Sequential(*stem, networks.Padded(16, 40), *head)


JOINING = {
    "padded": padded,
    "before": before_convolutions,
    "dense": dense,
    "all before": AllBefore,
    "unet": segmenting,
}


@pytest.mark.parametrize("name", JOINING)
def test_norms_before_convolutions_and_joined_values_are_part_of_chains(name):
    model, optimizer = make(model=JOINING[name]())
    rows = report(model).rows
    assert len(rows) == sum(isinstance(m, nn.Conv2d | nn.Linear) for m in model.modules())
    assert all(row.is_fused for row in rows)
    (chain,) = trace(model).chains
    assert len(chain.outputs) == 1
    x, y = batch(3, 64)
    assert is_fused(copy.deepcopy(model), x)
    twin, moved = unfused(model), unfused(model, rounded=True)
    assert not is_fused(copy.deepcopy(twin), x)
    made, one_by_one = model(x), twin(x)
    assert (made - one_by_one).norm() < 0.05 * one_by_one.norm()
    buffers = dict(twin.named_buffers())
    for key, own in statistics_of(model).items():
        torch.testing.assert_close(own, buffers[key], rtol=0.01, atol=0.01)
    found, wanted, others = (
        torch.cat([g.flatten() for g in gradients(m, x, y, 16)]) for m in (model, twin, moved)
    )
    # as far as rounding to bfloat16 moves them, which is far where batch norm is before the last layer
    assert (found - wanted).norm() < 1.5 * (others - wanted).norm() + 0.01 * wanted.norm()
    assert train(model, optimizer, 3)


@pytest.mark.parametrize("name", JOINING)
def test_networks_that_join_values_resume_and_are_reverted(name):
    model, optimizer = make(model=JOINING[name]())
    train(model, optimizer, 2)
    load = saved(model, optimizer)
    expected = train(model, optimizer, 3, 2)
    other, its_optimizer = make(seed=5, model=JOINING[name](), steps=0)
    load(other, its_optimizer)
    assert train(other, its_optimizer, 3, 2) == expected
    frozen = marvin.freeze(model)
    revert(model)
    assert not any("forward" in vars(m) for m in model.modules())
    x, _ = batch(1)
    torch.testing.assert_close(frozen(x), model.eval()(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", JOINING)
def test_the_policy_sees_what_layers_take_of_joined_values(name):
    model, _ = make(model=JOINING[name]())
    (found, _), (expected, _) = observe(model), observe(unfused(model))
    assert len(found) == len(layers_of(model))
    for i, own in expected.items():
        assert sum(found[i].counts) == sum(own.counts)
        assert found[i].power == pytest.approx(own.power, rel=0.02)
        assert found[i].gradient == pytest.approx(own.gradient, rel=0.2)


def test_batch_norm_sees_raw_data_as_it_is():
    """Kelvin: bfloat16 has steps of 2 there."""
    model, _ = make(model=before_convolutions())
    x = 290 + batch(0)[0]
    model.train()
    twin = unfused(model)
    made, wanted = model(x), twin(x)
    assert is_fused(model, x)
    assert (made - wanted).norm() < 0.05 * wanted.norm()


def test_infinity_before_batch_norm_is_seen():
    """Batch norm of it is NaN, which has no code."""
    model, _ = make(model=before_convolutions())
    x, _ = batch(0)
    assert is_fused(model, x)
    x[0, 0, 0, 0] = float("inf")
    assert model(x).isnan().any()
    model.eval()
    with torch.no_grad():
        same(model(x), unfused(model)(x))


@pytest.mark.parametrize(
    ("call", "joins"),
    [
        (lambda x, y: torch.cat([x, y], 1), True),
        (lambda x, y: torch.cat((x, y), dim=-3), True),
        (lambda x, y: torch.concat(tensors=[x, y], dim=1), True),
        (lambda x, y: torch.cat([x, y], 2), False),
        (lambda x, y: torch.cat([x, y]), False),
        (lambda x, y: torch.stack([x, y], 1), False),
    ],
)
def test_calls_that_join_channels(call, joins):
    nodes = [*fx.symbolic_trace(call).graph.nodes]
    assert concatenation(nodes[-2]) == (nodes[:2] if joins else None)


@pytest.mark.parametrize(
    ("call", "zeros"),
    [
        (lambda x: F.pad(x, (0, 0, 0, 0, 4, 8)), (4, 8)),
        (lambda x: F.pad(x, [0, 0, 0, 0, 0, 1], "constant", 0), (0, 1)),
        (lambda x: F.pad(x, pad=(0, 0, 0, 0, 2, 0), value=0.0), (2, 0)),
        (lambda x: F.pad(x, (0, 0, 0, 0, 2, 0), value=1.0), None),
        (lambda x: F.pad(x, (0, 1, 0, 0, 2, 0)), None),
        (lambda x: F.pad(x, (0, 0, 0, 0, -1, 2)), None),
        (lambda x: F.pad(x, (1, 1)), None),
        (lambda x: F.pad(x, (0, 0, 0, 0, 1, 1, 0, 0)), None),
        (lambda x: F.pad(x, (0, 0, 0, 0, 1, 1), "replicate"), None),
    ],
)
def test_calls_that_put_channels_of_zeros_around(call, zeros):
    nodes = [*fx.symbolic_trace(call).graph.nodes]
    assert zeros_around(nodes[1]) == zeros


@pytest.mark.parametrize(
    ("call", "stride"),
    [
        (lambda x: x[:, :, ::2, ::2], (2, 2)),
        (lambda x: x[..., ::3, ::1], (3, 1)),
        (lambda x: x[:, :, 0::2, :], (2, 1)),
        (lambda x: x[:, ..., ::2], (1, 2)),
        (lambda x: F.avg_pool2d(x, 1, 2), (2, 2)),
        (lambda x: x[:, :, 1::2, ::2], None),
        (lambda x: x[:, :, :8:2, ::2], None),
        (lambda x: x[:, ::2, :, ::2], None),
        (lambda x: x[::2], None),
        (lambda x: x[:, :, ::2], None),
        (lambda x: x[:, :, 0, ::2], None),
        (lambda x: x[:, :, None, ::2], None),
        (lambda x: x[0], None),
    ],
)
def test_calls_that_take_every_second_place(call, stride):
    nodes = [*fx.symbolic_trace(call).graph.nodes]
    found = pooling(nodes[1], nn.Module())
    if stride is None:
        assert found is None
        return
    assert found == Pooled(INPUT, (1, 1), Window(stride))
    x = torch.randn(2, 3, 9, 8)
    same(call(x), F.max_pool2d(x, 1, stride))


@pytest.mark.parametrize(
    ("call", "times"),
    [
        (lambda x: F.interpolate(x, scale_factor=2), (2, 2)),
        (lambda x: F.interpolate(x, None, (2.0, 3), "nearest"), (2, 3)),
        (nn.Upsample(scale_factor=4), (4, 4)),
        (nn.UpsamplingNearest2d(scale_factor=(1, 2)), (1, 2)),
        (nn.Upsample(scale_factor=2, mode="bilinear"), None),
        (nn.Upsample(scale_factor=2, mode="nearest-exact"), None),
        (nn.Upsample(size=8), None),
        (lambda x: F.interpolate(x, size=(8, 8)), None),
        (lambda x: F.interpolate(x, scale_factor=2.5), None),
        (lambda x: F.interpolate(x, scale_factor=0.5), None),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True), None),
        (lambda x: F.interpolate(x, scale_factor=64), None),
        (nn.ReLU(), None),
    ],
)
def test_calls_that_repeat_places(call, times):
    own = nn.Sequential(call) if isinstance(call, nn.Module) else nn.Module()
    nodes = [*fx.symbolic_trace(own if len(own._modules) else call).graph.nodes]
    assert repetition(nodes[1], own) == times


def test_repeated_places_are_those_of_pytorch():
    """By up to 31 times; 41 would not be."""
    for times in range(1, 32):
        x = torch.arange(200.0)
        y = F.interpolate(x.view(1, 1, 1, -1), scale_factor=(1, times)).flatten()
        assert torch.equal(y, x.repeat_interleave(times)), times


class Joins(nn.Module):
    """Two convolutions of a value, and what a call makes of both."""

    def __init__(self, call):
        super().__init__()
        self.first, self.a, self.b = (nn.Conv2d(n, 4, 3, padding=1) for n in (3, 4, 4))
        self.call, self.last = call, nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = self.first(x)
        return self.last(self.call(self.a(x), self.b(x)))


def test_a_value_beside_itself_ends_a_chain():
    assert found(Joins(lambda a, b: torch.cat([a, b], 1))) == [
        [Value(0), Value(1), Value(2), Joined((1, 2)), Value(3, is_output=True)]
    ]
    twice = found(Joins(lambda a, b: torch.cat([a, a], 1) + torch.cat([b, b], 1)))
    assert twice == [[Value(0), Value(1, is_output=True), Value(2, is_output=True)]]


def test_an_upsampling_that_changes_is_seen():
    up = nn.Upsample(scale_factor=2)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), up, nn.Conv2d(8, 4, 1), nn.Flatten()
    model, _ = make(model=nn.Sequential(*layers))
    x, _ = batch(3)
    assert model(x).shape == (8, 4 * 16 * 16)
    up.scale_factor = 3
    assert model(x).shape == (8, 4 * 24 * 24)
    assert is_fused(model, x)
    up.mode = "bilinear"
    same(model(x), unfused(model)(x))


def test_chains_keep_what_batch_norm_alone_is():
    model, _ = make(model=before_convolutions())
    (chain,) = trace(model).chains
    assert [own.norm for own in chain.layers if not own.name] == ["2", "4.bn1", "5.bn1", "6"]
    runs = model.forward._modes[True].ready({"x": batch(0)[0]})
    (run,) = (own for own in runs.chains if hasattr(own, "chain"))
    assert run._segment.layers[1] == Norm(0, 16, 1e-5)
    model[2].eps = 0.5
    x, _ = batch(0)
    y = model(x)
    torch.testing.assert_close(y, unfused(model)(x), rtol=0.05, atol=0.05)
    (run,) = (
        own for own in model.forward._modes[True].ready({"x": x}).chains if hasattr(own, "chain")
    )
    assert run._segment.layers[1] == Norm(0, 16, 0.5)


def _strided(weight):
    weight.data = torch.randn(8, 8, 5, 5)[..., 1:4, 1:4]


FOREIGN = {
    "another window": lambda m: setattr(
        m.blocks[0].conv1, "weight", nn.Parameter(torch.randn(8, 8, 1, 1))
    ),
    "fewer outputs": lambda m: setattr(
        m.blocks[0].conv1, "weight", nn.Parameter(torch.randn(4, 8, 3, 3))
    ),
    "a part of a window": lambda m: _strided(m.blocks[0].conv1.weight),
    "a weight of half": lambda m: setattr(
        m.blocks[0].conv1, "weight", nn.Parameter(m.blocks[0].conv1.weight.detach().half())
    ),
    "a bias before batch norm": lambda m: setattr(
        m.blocks[0].conv1, "bias", nn.Parameter(torch.ones(8))
    ),
    "a short running mean": lambda m: setattr(m.blocks[0].bn1, "running_mean", torch.zeros(64)[:2]),
    "a long running variance": lambda m: setattr(m.blocks[0].bn1, "running_var", torch.ones(64)),
    "a short scale": lambda m: setattr(m.blocks[0].bn1, "weight", nn.Parameter(torch.ones(64)[:2])),
    "one shift": lambda m: setattr(m.blocks[0].bn1, "bias", nn.Parameter(torch.ones(1))),
    "one bias": lambda m: setattr(m.fc, "bias", nn.Parameter(torch.ones(1))),
    "a bias of half": lambda m: setattr(m.fc, "bias", nn.Parameter(torch.ones(4).half())),
    "fewer features": lambda m: setattr(m.fc, "weight", nn.Parameter(torch.randn(4, 8))),
}


def outcome(model, x, training):
    try:
        with torch.set_grad_enabled(training):
            return model.train(training)(x).detach()
    except (RuntimeError, ValueError) as error:
        return type(error), str(error)


@pytest.mark.filterwarnings("ignore:weights must be numbers of their format")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN)
def test_chains_leave_what_their_kernels_would_read_wrongly(change, training):
    """They know shapes of before, and go through memory by them."""
    model, _ = make()
    assert is_fused(model)
    x = batch(1)[0]
    outcome(model, x, training)
    change(model)
    twin = copy.deepcopy(model)
    convert(twin, fused=False)
    found, wanted = outcome(model, x, training), outcome(twin, x, training)
    if isinstance(wanted, torch.Tensor):
        same(found, wanted)
    else:
        assert found == wanted


def test_a_chain_whose_layers_got_fewer_channels_is_fused_again():
    model, _ = make()
    assert is_fused(model)
    block = model.blocks[0]
    block.conv1.weight = nn.Parameter(block.conv1.weight.detach()[:4].clone())
    block.conv2.weight = nn.Parameter(block.conv2.weight.detach()[:, :4].clone())
    for name in ("weight", "bias", "running_mean", "running_var"):
        own = getattr(block.bn1, name).detach()[:4].clone()
        setattr(block.bn1, name, own if name.startswith("running") else nn.Parameter(own))
    assert is_fused(model)
    twin = copy.deepcopy(model)
    convert(twin, fused=False)
    same(outcome(model, batch(1)[0], False), outcome(twin, batch(1)[0], False))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.float() if x.dtype is torch.uint8 else x,
        lambda x: x[:-64] if x.dtype is torch.uint8 else x,
        lambda x: x.double() if x.dtype is torch.float32 else x,
        lambda x: torch.cat([x, x]) if x.dtype is torch.float32 else x,
    ],
    ids=["codes as floats", "fewer codes", "float64 weights", "more outputs"],
)
def test_hooks_that_give_back_something_else_are_refused(change):
    model, _ = make()
    x, _ = batch(1)
    with torch.autograd.graph.saved_tensors_hooks(lambda own: own, change):
        y = model(x)
    assert any("Chain" in type(node).__name__ for node in nodes_of(y))
    with pytest.raises(ValueError, match="hooks on saved tensors must give back what they got"):
        y.sum().backward()


def test_a_chain_that_is_interrupted_at_new_formats_takes_them(monkeypatch):
    """It took those of before for new ones, and went on with them."""
    x, outputs = torch.randn(4, 3, 8, 8), []
    for is_interrupted in (False, True):
        model, optimizer = make(policy=marvin.StaticPolicy(8, 8))
        model(x)
        for entry in optimizer.activations.entries:
            own = entry.rounder.formats(entry.module)
            if isinstance(own.inputs, FixedPoint):
                coarse = replace(own.inputs, fl=own.inputs.fl - 3)
                entry.rounder.write(entry.module, replace(own, inputs=coarse))

        def interrupt(*_):
            raise KeyboardInterrupt

        if is_interrupted:
            with monkeypatch.context() as patch:
                patch.setattr(chain_run.ChainRun, "_described", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    model(x)
        outputs.append(model(x).detach())
    assert torch.equal(*outputs)


class Shows(nn.Module):
    """Returns its logits, and a value in the middle if it is told to; see ``SHOWN``."""

    def __init__(self, middle):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.Linear(16, 4)
        self.norm, self.norm2 = nn.BatchNorm2d(16), nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.same, self.middle, self.shows = nn.Identity(), middle, False

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        x, shown = self.middle(self, x)
        y = self.last(x.mean((2, 3)))
        return (y, shown) if self.shows else y


def _second(model, x):
    return F.relu(model.norm2(model.second(x)))


def _sum(model, x):
    return F.relu(model.norm2(model.second(x)) + x)


def _side_by_side(model, x):
    return torch.cat([model.second(x), x], 1)[:, :16]


SHOWN = {
    "plain": (lambda model, x: (_second(model, x), x), [1, 2]),
    "goes past": (lambda model, x: (_sum(model, x), x), [1, 2]),
    "side by side": (lambda model, x: (_side_by_side(model, x), x), [1]),
    "largest": (lambda model, x: (F.relu(model.second(F.max_pool2d(x, 2))), x), [1, 2]),
    "a module returns what it takes": (lambda model, x: (_second(model, x), model.same(x)), [1, 2]),
    "a module takes it": (lambda model, x: (_second(model, model.same(x)), x), [1, 2]),
    "a call returns what it takes": (lambda model, x: (_second(model, x), x.float()), [1, 2]),
    "a record": (lambda model, x: (_second(model, x), {"value": x}), [1, 2]),
    "the last": (lambda model, x: (x := _second(model, x), x), [2]),
}


@pytest.mark.parametrize("kind", SHOWN)
def test_values_that_a_model_returns_have_whole_gradients(kind):
    middle, layers = SHOWN[kind]
    model, _ = make(model=Shows(middle), policy=marvin.StaticPolicy(8, 8))
    model.shows = True
    twin = copy.deepcopy(model)
    convert(twin, fused=False)
    assert [len(chain.products) for chain in trace(model).chains] == layers
    for alone in (True, False):
        grads = []
        for own in (model, twin):
            y, shown = own(batch(3)[0])
            shown = shown["value"] if isinstance(shown, dict) else shown
            loss = y.square().sum() + (0 if alone else 1e-4 * shown.square().sum())
            grads += torch.autograd.grad(loss, shown)
        assert (grads[0] - grads[1]).norm() < 0.25 * grads[1].norm()  # noise of 8 bits


def test_a_view_whose_features_an_image_does_not_have_is_an_error():
    class Last(nn.Sequential):
        def forward(self, x):
            x = super().forward(x)
            return x.view(x.size(0), 4 * 8 * 8)

    model, _ = make(model=Last(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)))
    assert is_fused(model)
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        model(torch.randn(8, 3, 10, 10))


def test_linear_layers_tell_what_a_view_of_some_features_flattens():
    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
            self.second, self.last = nn.Conv2d(8, 4, 1), nn.Linear(4 * 8 * 8, 4)

        def forward(self, x):
            x = F.relu(self.second(F.relu(self.norm(self.first(x)))))
            return self.last(x.view(x.size(0), 4 * 8 * 8))

    model, _ = make(model=Between())
    assert [row.is_fused for row in report(model).rows] == [True] * 3
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        model(torch.randn(8, 3, 10, 10))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "numbers", [{"stride": 2}, {"padding": 2}, {"dilation": 2, "padding": [1]}], ids=str
)
def test_one_number_for_both_sides_of_a_window(numbers, fused):
    c = nn.Conv2d
    model, _ = make(model=nn.Sequential(c(3, 8, 3), nn.ReLU(), c(8, 4, 1)), fused=fused)
    twin = copy.deepcopy(model)
    for own, both in ((model, False), (twin, True)):
        for name, number in numbers.items():
            pair = (number, number) if isinstance(number, int) else tuple(number * 2)
            setattr(own[0], name, pair if both else number)
    x, _ = batch(3)
    assert is_fused(model, x) is fused
    same(model(x), twin(x))
    with torch.no_grad():
        same(model.eval()(x), twin.eval()(x))
        same(marvin.freeze(model)(x), marvin.freeze(twin)(x))
