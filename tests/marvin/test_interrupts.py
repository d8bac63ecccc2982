"""What is interrupted leaves everything as it was."""

import contextlib
import copy
import dataclasses
import itertools
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import marvin
from fixedpoint_kernels import forward_save, watch
from fixedpoint_kernels._torch_private import modules as torch_modules
from fixedpoint_kernels.forward_save import conversion as saving
from fixedpoint_kernels.forward_save import measure, sample, swap
from fixedpoint_kernels.forward_save.settings import FewBit
from marvin import (
    activations,
    batch_norm,
    carriers,
    compact,
    groups,
    hooks,
    inner_optimizer,
    masters,
    quantized,
    rounder,
    stored,
)
from marvin import conversion as attaching
from marvin.calibration import layer_formats
from marvin.integer import conversion, fusion
from tests.same import assert_same


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)
    )


def attributes(thing):
    """Return an object's class, attributes and hooks, as the very objects that they are."""
    own = vars(thing)
    inner = {name: list(map(id, x.values())) for name, x in own.items() if isinstance(x, dict)}
    return type(thing), {name: id(value) for name, value in own.items()}, inner


def everything(model, optimizer):
    weights = [(p.data_ptr(), p.stride(), p.detach().clone()) for p in model.parameters()]
    state = optimizer.forward_state
    things = [
        attributes(thing) for thing in (*model.modules(), optimizer, optimizer._carriers, state)
    ]
    groups = *optimizer.param_groups, *optimizer.optimizer.param_groups
    return [*things, {*state.waiting}, [*map(id, groups)]], weights


def interrupted(call: Callable[[], object], files: set[str], line: int) -> bool:
    """Say whether ``call`` was interrupted before the n-th line that it runs in some files."""
    left = line

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def to_convert(model, optimizer):
    return lambda: marvin.integer.convert(model)


def to_revert(model, optimizer):
    marvin.integer.convert(model)
    return lambda: marvin.integer.revert(model)


def to_store(model, optimizer):
    return lambda: marvin.store_codes(model, optimizer)


def to_prepack(model, optimizer):
    marvin.integer.convert(model)
    for p in model.parameters():
        p.requires_grad_(False)
    marvin.quantize_activations(model, optimizer).remove()
    return lambda: marvin.integer.prepack(model)


def to_save(model, optimizer):
    return lambda: forward_save.convert(model, few_bit=3, division=True)


def to_save_no_more(model, optimizer):
    forward_save.convert(model, few_bit=3, division=True)
    return lambda: forward_save.revert(model)


def to_round(model, optimizer):
    marvin.quantize_activations(model, optimizer).remove()
    return lambda: marvin.quantize_activations(model, optimizer)


def to_round_otherwise(model, optimizer):
    model(torch.zeros(2, 1, 8, 8))
    return lambda: marvin.quantize_activations(model, optimizer, exclude="0")


def to_round_no_more(model, optimizer):
    handle = marvin.quantize_activations(model, optimizer)
    return handle.remove


def to_prepare(model, optimizer):
    return lambda: marvin.prepare(model)


def to_add(model, optimizer):
    model.append(nn.Linear(3, 2))
    marvin.quantize_activations(model, optimizer)
    new = model[-1]
    return lambda: optimizer.add_param_group({"params": new.named_parameters(prefix="5")})


ROUNDING = attaching, carriers, hooks, quantized, rounder
REMOVING = activations, hooks, torch_modules


@pytest.mark.parametrize(
    ("prepared", "modules"),
    [
        (to_round, ROUNDING),
        (to_round_otherwise, ROUNDING),
        (to_round_no_more, REMOVING),
        (to_prepare, ROUNDING),
        (to_add, (carriers, groups, masters, quantized, rounder)),
        (to_convert, (conversion, fusion)),
        (to_revert, (conversion,)),
        (to_prepack, (conversion,)),
        (to_store, (stored,)),
        (to_save, (saving, swap)),
        (to_save_no_more, (saving, swap)),
    ],
)
def test_an_interrupt_at_any_line_leaves_all_as_it_was(prepared, modules):
    model = net()
    optimizer = marvin.MSGD(model.named_parameters())
    marvin.quantize_activations(model, optimizer)
    call = prepared(model, optimizer)
    before, weights = everything(model, optimizer)
    line, files = 1, {module.__file__ for module in modules}
    while interrupted(call, files, line):
        line += 1
        after, now = everything(model, optimizer)
        assert after == before, line
        for (address, stride, x), (other, own, y) in zip(weights, now, strict=True):
            assert (address, stride) == (other, own), line
            torch.testing.assert_close(x, y, rtol=0, atol=0)
    assert line > 10
    assert everything(model, optimizer)[0] != before  # the last call was done


SAMPLE = torch.randn(4, 1, 8, 8)


@pytest.mark.parametrize(
    "call",
    [
        lambda model, network: marvin.export.describe(model, SAMPLE),
        lambda model, network: marvin.export.compare(network, model, SAMPLE),
        lambda model, network: marvin.reestimate_batch_norm(model, [SAMPLE]),
        lambda model, network: layer_formats(model, [SAMPLE], 8),
    ],
    ids=["describe", "compare", "batch norm", "calibrate"],
)
def test_an_interrupt_behind_any_hook_leaves_no_hook(call, monkeypatch):
    model = marvin.freeze(marvin.calibrate(net(), [SAMPLE])).requires_grad_(True)
    network = marvin.export.describe(model, SAMPLE)
    before = [attributes(module) for module in model.modules()]
    state = copy.deepcopy(model.state_dict())
    left = 0

    def interrupting(register):
        def registered(*args, **kwargs):
            nonlocal left
            handle, left = register(*args, **kwargs), left - 1
            if not left:
                raise KeyboardInterrupt
            return handle

        return registered

    for name in ("register_forward_pre_hook", "register_forward_hook"):
        monkeypatch.setattr(nn.Module, name, interrupting(getattr(nn.Module, name)))
    for count in itertools.count(1):
        left = count
        with contextlib.suppress(KeyboardInterrupt):
            call(model, network)
            break
        assert [attributes(module) for module in model.modules()] == before, count
        assert_same(model.state_dict(), state)
    assert count > 1


def test_an_optimizer_that_is_interrupted_as_it_is_made_leaves_weights_and_the_one_it_wraps():
    model = net()
    wrapped = torch.optim.Adagrad(model.named_parameters(), initial_accumulator_value=0.5)
    state, inner = copy.deepcopy(model.state_dict()), copy.deepcopy(wrapped.state_dict())
    before, line = attributes(wrapped), 1
    files = {module.__file__ for module in (groups, inner_optimizer, masters, quantized)}
    while interrupted(lambda: marvin.Quantized(wrapped, marvin.FixedPolicy(8, 4)), files, line):
        assert attributes(wrapped) == before, line
        assert_same(wrapped.state_dict(), inner)
        assert_same(model.state_dict(), state)
        line += 7
    assert line > 200
    assert not torch.equal(model[0].weight, state["0.weight"])


def test_interrupted_estimation_leaves_the_statistics_of_before():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    before, state = [attributes(m) for m in model.modules()], copy.deepcopy(model.state_dict())
    line, files = 1, {batch_norm.__file__}
    while interrupted(lambda: marvin.reestimate_batch_norm(model, [SAMPLE]), files, line):
        assert [attributes(module) for module in model.modules()] == before, line
        assert_same(model.state_dict(), state)
        line += 1
    assert line > 50
    assert model[0].running_mean != state["0.running_mean"]


def test_an_interrupt_leaves_no_watch():
    running = watch.Running(net())

    def lines():
        line = 1
        while True:
            seen = watch.Watch(running, [])

            def watched(own=seen):
                with own:
                    torch.zeros(2)

            if not interrupted(watched, {torch.autograd.graph.__file__}, line):
                return line
            before = dict(seen.calls)
            torch.ones(2).exp()
            assert seen.calls == before, line
            line += 1

    with ThreadPoolExecutor(1) as thread:  # torch's own hooks may stay: they are a thread's
        assert thread.submit(lines).result() > 2


def test_a_sample_that_fails_leaves_the_model_as_it_was():
    class TooLarge(nn.Sequential):
        def forward(self, x):
            if any(map(swap.is_converted, self)):
                raise RuntimeError("no memory")
            return super().forward(x)

    model = TooLarge(*net())
    before = [attributes(module) for module in model.modules()]
    with pytest.raises(RuntimeError, match="no memory"):
        forward_save.convert(model, division=True, sample_input=torch.zeros(2, 1, 8, 8))
    assert [attributes(module) for module in model.modules()] == before


@pytest.mark.parametrize(
    "call",
    [
        lambda model: forward_save.convert(model, division=True, sample_input=SAMPLE),
        lambda model: sample.observe(model, SAMPLE),
    ],
    ids=["convert", "observe"],
)
def test_an_interrupted_sample_leaves_the_hooks_of_the_model(call):
    model = net()
    marvin.quantize_activations(model, marvin.MSGD(model.named_parameters()))
    before, line = [attributes(module) for module in model.modules()], 1
    while interrupted(lambda: call(model), {sample.__file__}, line):
        assert [attributes(module) for module in model.modules()] == before, line
        line += 101
    assert line > 300


def test_an_interrupted_trial_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    before = [attributes(module) for module in model.modules()]
    choices = saving.choices_of(model, lambda _: (FewBit(3), None))
    with pytest.raises(KeyboardInterrupt), saving.converted(choices):
        raise KeyboardInterrupt
    assert [attributes(module) for module in model.modules()] == before


def test_an_interrupted_plan_leaves_the_model_as_it_was(monkeypatch):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))), torch.randn(8, 4)
    model.register_forward_hook(lambda *_: None)
    monkeypatch.setattr(measure, "seconds", lambda run, _: bool(run()) + 1.0)
    least = forward_save.plan(model, x, budget_bytes=10_000, choices="recompute").smallest_bytes
    state = copy.deepcopy(model.state_dict())
    before, left = [attributes(module) for module in model.modules()], 0

    def interrupting(function):
        def run(*args, **kwargs):
            nonlocal left
            found, left = function(*args, **kwargs), left - 1
            if not left:
                raise KeyboardInterrupt
            return found

        return run

    places = (swap, "swap_"), (swap, "restore_"), (sample, "is_torchs"), (torch.autograd, "grad")
    for module, name in places:
        monkeypatch.setattr(module, name, interrupting(getattr(module, name)))
    for count in itertools.count(1, 5):
        left = count
        try:
            forward_save.plan(model, x, budget_bytes=least, choices="recompute")
        except KeyboardInterrupt:
            assert [attributes(module) for module in model.modules()] == before, count
            assert_same(model.state_dict(), state)
        else:
            break
    assert count > 20


def mean_squares(optimizer):
    """Return the first weight's mean square of gradients, as RMSprop would find it."""
    state = copy.deepcopy(next(iter(optimizer.optimizer.state.values())))
    master = next(iter(optimizer._masters))
    compact._un_pack_moments(state, optimizer._layout.shards[master])
    return state["square_avg"]


@pytest.mark.parametrize("centered", [False, True])
def test_an_interrupt_in_a_step_leaves_moments_and_groups(centered):
    torch.manual_seed(0)
    model, x = nn.Linear(64, 2), torch.rand(8, 64)
    wrapped = torch.optim.RMSprop(
        model.named_parameters(), lr=1e-4, momentum=0.9, centered=centered
    )
    optimizer = marvin.Quantized(wrapped, marvin.FixedPolicy(8, 4), compact_state=True)

    def step():
        optimizer.zero_grad()
        loss = (4 - model(x)).square().mean()
        loss.backward()
        optimizer.step(loss=loss)

    step()
    line, files = 1, {compact.__file__, masters.__file__}
    before = mean_squares(optimizer)
    while interrupted(step, files, line):
        line += 1
        for group in (*optimizer.param_groups, *wrapped.param_groups):
            assert list(map(id, group["params"])) == list(map(id, model.parameters())), line
        assert (mean_squares(optimizer) >= 0.9 * before).all(), line
        optimizer.state_dict()
        step()
        state = next(iter(wrapped.state.values()))
        assert "square_avg" not in state, line
        before = mean_squares(optimizer)
    assert line > 50


def switching():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.5)
    optimizer = marvin.Quantized(sgd, marvin.StaticPolicy(5, 6, window=2))
    marvin.quantize_activations(model, optimizer)
    return model, optimizer


def step_on(model, optimizer, seed):
    torch.manual_seed(seed)
    x, y = torch.randn(8, 6) * 2**seed, torch.randint(2, (8,))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step(loss=loss)


def test_an_interrupt_in_a_step_that_switches_leaves_the_models_formats_right():
    files = {module.__file__ for module in (carriers, masters, quantized, rounder)}
    line, changed = 1, False
    while True:
        model, optimizer = switching()
        for seed in range(3):
            step_on(model, optimizer, seed)
        before = optimizer.formats(), optimizer.input_formats()
        if not interrupted(lambda own=(model, optimizer): step_on(*own, 3), files, line):
            break
        resumed = switching()
        for own, saved in zip(resumed, (model, optimizer), strict=True):
            own.load_state_dict(copy.deepcopy(saved.state_dict()))
        changed |= (optimizer.formats(), optimizer.input_formats()) != before
        for kind, carried in rounder.formats_of(model).items():
            if carried.weights:
                weight = f"{kind}.weight"
                assert carried.weights[0] == optimizer.formats()[weight], line
                assert carried.inputs == optimizer.input_formats()[weight], line
        for own in ((model, optimizer), resumed):
            step_on(*own, 4)
        torch.testing.assert_close(
            [*resumed[0].parameters()], [*model.parameters()], rtol=0, atol=0
        )
        line += 13
    assert changed
    assert line > 200


class Halving(marvin.MuppetPolicy):
    """Halves the learning rate where the level rises."""

    def lr_scale_at(self, shared):
        return 0.5**shared.level


def ending():
    """Return a run whose next epoch goes to another level, and another learning rate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.5)
    policy = Halving(levels=(8, 12, 32), patience=1, window=1)
    optimizer = marvin.Quantized(sgd, policy)
    marvin.quantize_activations(model, optimizer)
    step_on(model, optimizer, 0)
    optimizer.shared = dataclasses.replace(optimizer.shared, largest=1e6)
    return model, optimizer


@pytest.mark.parametrize("at", ["_note_written", "publish", "_scale_lrs"])
def test_an_interrupt_at_the_end_of_an_epoch_leaves_formats_and_rates_of_one_epoch(at, monkeypatch):
    runs = [ending(), ending()]
    (model, optimizer), (wanted_model, wanted) = runs
    wanted.end_epoch()
    assert wanted.trace
    assert wanted.param_groups[0]["lr"] == 0.25

    def stop(*_):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(optimizer._carriers if at == "publish" else optimizer, at, stop)
    with pytest.raises(KeyboardInterrupt):
        optimizer.end_epoch()
    for _ in range(2):
        assert optimizer.formats() == wanted.formats()
        assert rounder.formats_of(model) == rounder.formats_of(wanted_model)
        assert optimizer.param_groups[0]["lr"] == wanted.param_groups[0]["lr"]
        for own, other in zip(model.parameters(), wanted_model.parameters(), strict=True):
            assert torch.equal(own, other)
        for run in runs:
            step_on(*run, 1)


def trained(optimizer_of, ask):
    """Train, and call ``ask(optimizer)`` in each step of the wrapped optimizer; return weights and optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = optimizer_of(model)
    marvin.quantize_activations(model, optimizer)
    optimizer.optimizer.register_step_pre_hook(lambda *_: ask(optimizer))
    for x in torch.randn(6, 16, 8, generator=torch.Generator().manual_seed(1)):
        optimizer.zero_grad()
        loss = (model(x) - x[:, :3]).square().mean()
        loss.backward()
        optimizer.step(loss=loss)
    return [p.detach().clone() for p in model.parameters()], optimizer


def adamw(model):
    return marvin.Quantized(
        torch.optim.AdamW(model.named_parameters(), lr=1e-2), marvin.StaticPolicy(6, 6)
    )


def sgd(model):
    wrapped = torch.optim.SGD(model.named_parameters(), lr=0.05, momentum=0.9, foreach=True)
    return marvin.Quantized(wrapped, marvin.MuppetPolicy(), compact_state=True)


@pytest.mark.parametrize("optimizer_of", [adamw, sgd])
@pytest.mark.parametrize(
    "call",
    [
        lambda optimizer: optimizer.state_dict(),
        lambda optimizer: optimizer.load_state_dict({}),
        lambda optimizer: optimizer.add_param_group({"params": []}),
        lambda optimizer: optimizer.step(),
        lambda optimizer: optimizer.end_epoch(),
        lambda optimizer: optimizer.adopt_weights(),
    ],
)
@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signals on this system")
def test_a_handler_that_asks_inside_of_a_step_is_refused_and_harms_nothing(optimizer_of, call):
    refused = []

    def ask(optimizer):
        def handler(*_):
            with pytest.raises(RuntimeError, match=r"between two steps, .* set a flag") as error:
                call(optimizer)
            refused.append(error)

        before = signal.signal(signal.SIGUSR1, handler)
        try:
            signal.raise_signal(signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, before)

    weights, optimizer = trained(optimizer_of, ask)
    assert len(refused) == 6
    for own, other in zip(weights, trained(optimizer_of, lambda _: None)[0], strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0)
    optimizer.state_dict()


@pytest.mark.parametrize("optimizer_of", [adamw, sgd])
def test_a_thread_that_saves_waits_for_the_end_of_the_step(optimizer_of):
    threads, states = [], []

    def ask(optimizer):
        before = optimizer._counts.step
        thread = threading.Thread(target=lambda: states.append((before, optimizer.state_dict())))
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
        threads.append(thread)

    weights, _ = trained(optimizer_of, ask)
    for thread in threads:
        thread.join()
    assert len(states) == 6
    assert all(state["marvin"]["step"] >= number for number, state in states)
    for own, other in zip(weights, trained(optimizer_of, lambda _: None)[0], strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0)


def test_copies_of_an_optimizer_take_turns_of_their_own():
    _, optimizer = trained(adamw, lambda _: None)
    with optimizer._turn:
        copy.deepcopy(optimizer).state_dict()
        pickle.loads(pickle.dumps(optimizer)).state_dict()


def test_a_closure_may_ask_for_the_state_before_the_step():
    _, optimizer = trained(adamw, lambda _: None)
    found = []
    optimizer.step(lambda: found.append(optimizer.state_dict()))
    assert found[0]["marvin"]["step"] == 6
