"""What a model's code reads and writes besides what its layers compute: a fused model does as the model would."""

import copy
import itertools
import linecache
import operator
import random
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from weakref import ref

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx import graph_module

import marvin
from marvin.integer import convert, fusion, report
from marvin.integer.graph import trace
from marvin.tracing import Tracer
from tests.marvin.test_fusion import batch, is_fused, make, same


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.on = nn.Conv2d(4, 4, 3, padding=1), True

    def forward(self, x):
        return self.conv(torch.relu(x))


class Helper(nn.Module):
    """Is never called."""

    def __init__(self):
        super().__init__()
        self.factor, self.table = 1.0, {"factor": 1.0}


class Reading(nn.Module):
    """Its code reads attributes of modules that it does not call, of layers, and what is in objects."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.blocks, self.helper = nn.ModuleList([Block(), Block()]), Helper()
        self.blocks[1].on = False
        self.b.gain, self.long = 1.0, [1.0] * 100
        self.config = SimpleNamespace(scale=1.0, act=torch.relu, kind=nn.ReLU)
        self.array = np.ones(8)

    def forward(self, x):
        x = self.config.act(self.b(torch.relu(self.a(x))))
        x = x * (self.b.gain * self.long[3] * self.config.scale * float(self.array[2]))
        x = x * (self.helper.factor * self.helper.table["factor"])
        for block in self.blocks:
            if block.on:
                x = block(x)
        return x.mean((2, 3))


def switched_on(model):
    model.blocks[1].on = True


def changed_array(model):
    model.array[2] = 4.0


CHANGES = {
    "a block that was left out": switched_on,
    "a number of a layer": lambda model: setattr(model.b, "gain", 4.0),
    "a long list": lambda model: model.long.__setitem__(3, 4.0),
    "beside functions": lambda model: setattr(model.config, "scale", 4.0),
    "an array": changed_array,
    "a module that is not called": lambda model: setattr(model.helper, "factor", 4.0),
    "a table of one": lambda model: model.helper.table.update(factor=4.0),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_code_reads_and_changes_is_seen(change, training):
    model, _ = make(model=Reading())
    twin = copy.deepcopy(model)
    convert(twin, fused=False)
    x, _ = batch(0)
    if training:
        assert is_fused(model, x)
    for own in (model, twin):
        own.train(training)
    with torch.set_grad_enabled(training):
        before = model(x)
        for own in (model, twin):
            change(own)
        y, wanted = model(x), twin(x)
    assert (y - before).abs().max() > 0.05 * before.abs().max()
    assert (y - wanted).abs().max() < 0.02 * wanted.abs().max()


def test_a_block_that_is_switched_on_is_trained():
    model, optimizer = make(model=Reading())
    x, _ = batch(0)
    model(x).sum().backward()
    assert model.blocks[1].conv.weight.grad is None
    switched_on(model)
    optimizer.zero_grad()
    model(x).sum().backward()
    assert model.blocks[1].conv.weight.grad.norm() > 0


class Valued(nn.Module):
    """Its code makes a number of a buffer; ``how`` says how."""

    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.how = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), how
        self.register_buffer("temperature", torch.ones(1))

    def forward(self, x):
        return self.b(torch.relu(self.a(x))) / self.how(self.temperature)


READS = {
    "item": lambda own: own.item(),
    "float": float,
    "bool": lambda own: 4.0 if own > 1 else 1.0,
    "computed": lambda own: (own * 2).item() / 2,
    "list": lambda own: own.tolist()[0],
    "array": lambda own: float(own.numpy()[0]),
    "equal": lambda own: 1.0 if torch.equal(own, torch.ones(1)) else 4.0,
    "close": lambda own: 1.0 if torch.allclose(own, torch.ones(1)) else 4.0,  # noqa: TID251  as models do
    "places": lambda own: 4.0 if len((own - 1).nonzero()) else 1.0,
    "mask": lambda own: 4.0 if own[own > 1].numel() else 1.0,
    "unique": lambda own: 4.0 if torch.cat([own, torch.ones(1)]).unique().numel() > 1 else 1.0,
}


@pytest.mark.parametrize("how", READS.values(), ids=READS)
def test_values_that_code_reads_are_of_now(how):
    model, _ = make(model=Valued(how))
    assert "reads the value of a buffer" in trace(model)
    x, _ = batch(0)
    before = model(x)
    model.temperature.fill_(4.0)
    same(model(x), before / 4)
    frozen = marvin.freeze(model.eval())
    with torch.no_grad():
        before = frozen(x)
        frozen.temperature.fill_(1.0)
        same(frozen(x), before * 4)


def test_a_buffer_that_is_computed_with_stays_in_chains():
    model, _ = make(model=Valued(lambda own: own))
    x, _ = batch(0)
    before = model(x)
    assert is_fused(model, x)
    model.temperature.fill_(4.0)
    same(model(x), before / 4)


class Averaging(nn.Module):
    """Keeps a running mean in a buffer of zeros, or in a tensor that is none."""

    def __init__(self, is_buffer):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        if is_buffer:
            self.register_buffer("center", torch.zeros(4))
        else:
            self.center = torch.zeros(4)

    def forward(self, x):
        y = torch.relu(self.b(torch.relu(self.a(x)))).mean((2, 3))
        self.center.mul_(0.9).add_(y.detach().mean(0) * 0.1)
        return y


class Replacing(Averaging):
    """Puts another tensor in the place of the buffer."""

    def forward(self, x):
        self.center = self.center * 0.9 + 0.1
        return torch.relu(self.b(torch.relu(self.a(x)))).mean((2, 3)) + self.center


class Setting(Averaging):
    """Puts a new tensor in the place of the buffer, which is the same at each call."""

    def forward(self, x):
        self.center = torch.full((4,), 0.5)
        return torch.relu(self.b(torch.relu(self.a(x)))).mean((2, 3))


class Doubling(Averaging):
    """Doubles a buffer, which is 0 while the model is traced."""

    def forward(self, x):
        self.center.mul_(2.0)
        return torch.relu(self.b(torch.relu(self.a(x)))).mean((2, 3)) + self.center


@pytest.mark.parametrize("is_buffer", [True, False])
def test_what_is_0_may_be_doubled_later(is_buffer):
    model, _ = make(model=Doubling(is_buffer))
    model.center.fill_(1.0)
    for wanted in (2.0, 4.0, 8.0):
        model(batch(0)[0])
        assert (model.center == wanted).all()


@pytest.mark.parametrize("kind", [Averaging, Replacing])
@pytest.mark.parametrize("is_buffer", [True, False])
def test_running_means_are_those_of_each_call(kind, is_buffer):
    model, _ = make(model=kind(is_buffer), steps=2)
    twin = copy.deepcopy(model)
    convert(twin, fused=False)
    x, _ = batch(0)
    for _ in range(5):
        same(model(x), twin(x))
        same(model.center, twin.center)
    assert model.center.norm() > 0


def test_a_buffer_that_code_replaces_is_replaced_at_each_call():
    model, _ = make(model=Setting(True), steps=2)
    x, _ = batch(0)
    model(x)
    for _ in range(3):
        model.center.zero_()
        model(x)
        same(model.center, torch.full((4,), 0.5))


class Clamping(nn.Module):
    """Clamps a weight before it multiplies."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x):
        self.b.weight.data.clamp_(-0.02, 0.02)
        return self.b(torch.relu(self.a(x)))


class ClampingAll(Clamping):
    def forward(self, x):
        with torch.no_grad():
            for p in self.parameters():
                p.clamp_(-0.02, 0.02)
        return self.b(torch.relu(self.a(x)))


@pytest.mark.filterwarnings("ignore:what is written into weight.data")
@pytest.mark.filterwarnings("ignore:weights changed outside of Quantized")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Clamping, "it changes a value in place that is used again"),
        (ClampingAll, "its forward changes parameters, or their gradients"),
    ],
    ids=["by attribute", "all"],
)
def test_what_code_writes_to_a_parameter_comes_first(kind, reason):
    model, _ = make(model=kind())
    assert trace(model) == reason
    model(batch(0)[0])
    with torch.no_grad():
        model.b.weight.fill_(0.5)
    model(batch(0)[0])
    assert model.b.weight.abs().max() <= 0.02


class Teaching(nn.Module):
    """Changes parameters that it does not read as attributes; ``how`` says how."""

    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.how = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), how
        self.slow = nn.Conv2d(3, 4, 3).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            self.how(self)
        return self.b(torch.relu(self.a(x) + self.slow(x))).mean((2, 3))


def each(change):
    """Return what changes each parameter of the slow layer, with that of the other."""

    def changes(model):
        for slow, own in zip(model.slow.parameters(), model.a.parameters(), strict=True):
            change(slow, own)

    return changes


def caught(model):
    with suppress(Exception):
        each(lambda p, own: p.zero_())(model)


def through_an_array(model):
    for p in model.slow.parameters():
        p.detach().numpy()[:] = 0.0


def put(p, own):
    p.data = p.data * 0.5 + own.data * 0.5


def frozen(model):
    model.a.requires_grad_(False)


def all_lerped(model):
    torch._foreach_lerp_([*model.slow.parameters()], [*model.a.parameters()], 0.5)


WRITES = {
    "clamped": each(lambda p, own: p.clamp_(min=0.2)),
    "averaged": each(lambda p, own: p.data.lerp_(own.data, 0.5)),
    "put": each(put),
    "of data": each(lambda p, own: p.data.mul_(0.5)),
    "detached": each(lambda p, own: p.detach().mul_(0.5)),
    "a part": each(lambda p, own: p[:1].zero_()),
    "copied": each(lambda p, own: p.copy_(own)),
    "out": each(lambda p, own: torch.mul(own, 2, out=p.detach())),
    "at once": all_lerped,
    "a state": lambda model: model.slow.load_state_dict(model.a.state_dict()),
    "a vector": lambda model: nn.utils.vector_to_parameters(torch.ones(112), model.slow.parameters()),
    "an array": through_an_array,
    "frozen": frozen,
    "no gradients": lambda model: model.zero_grad(),
    "no gradient": each(lambda p, own: delattr(own, "grad")),
    "a hook": each(lambda p, own: own.register_hook(print)),
    "a gradient": each(lambda p, own: own.grad.zero_()),
    "an error that is caught": caught,
    "a new module": lambda model: setattr(model, "teacher", copy.deepcopy(model.a)),
    "another module": lambda model: setattr(model, "slow", copy.deepcopy(model.a)),
    "another parameter": lambda model: setattr(model.slow, "bias", nn.Parameter(torch.ones(4))),
    "a new buffer": lambda model: model.register_buffer("mean", torch.zeros(4)),
}  # fmt: skip


def held(model):
    """Return what a model has: parameters, how they are, and their values."""
    found = {name: id(x) for name, x in [*model.named_modules(), *model.named_buffers()]}
    for name, p in model.named_parameters():
        grad = None if p.grad is None else p.grad.tolist()
        found[name] = id(p), p.data_ptr(), p.requires_grad, id(p.grad), grad, p.tolist()
    return found


@pytest.mark.parametrize("how", WRITES.values(), ids=WRITES)
def test_a_trace_leaves_parameters_as_they_are(how):
    model, _ = make(model=Teaching(lambda model: None))
    assert not isinstance(trace(model), str)
    model.how = how
    before = held(model)
    for infers in (False, True):
        assert isinstance(trace(model, infers=infers), str)
        assert held(model) == before


@pytest.mark.filterwarnings("ignore:what is written into weight.data")
@pytest.mark.parametrize("name", ["averaged", "put", "at once"])
def test_what_code_writes_to_parameters_is_written_at_each_call(name):
    model, twin = (make(model=Teaching(lambda model: None), fused=own)[0] for own in (True, False))
    x, _ = batch(0)
    for own in (model, twin):
        own.how = WRITES[name]
        own(x)
        with torch.no_grad():
            own.slow.weight.fill_(-0.5)
    for _ in range(3):
        same(model(x), twin(x))
        same(model.slow.weight, twin.slow.weight)
    assert (model.slow.weight != -0.5).all()


def test_numbers_that_code_makes_of_parameters_are_of_now():
    model, _ = make(model=Reading())
    model.config.act = lambda y: torch.relu(y) * sum(p.sum().item() for p in model.b.parameters())
    assert "reads the value" in trace(model)


def test_parameters_that_are_only_asked_for_stay_in_chains():
    model, _ = make(model=Teaching(lambda model: [p.dtype for p in model.parameters()]))
    assert not isinstance(trace(model), str)


def test_tensors_without_memory_may_be_in_a_model():
    model, _ = make(model=Valued(lambda own: own))
    model.register_buffer("places", torch.eye(3).to_sparse())
    assert not isinstance(trace(model), str)


def test_options_of_a_part_hold_in_a_model_that_ran():
    model, _ = make(model=Reading())
    x, _ = batch(0)
    assert is_fused(model, x)
    convert(model.b, gradient_bits=None)
    convert(model.a, gradient_bits=None)
    assert "float32 (gradient_bits=None)" in str(report(model))

    def gradient():
        return torch.autograd.grad(model(x).square().mean(), model.b.weight)[0]

    convert(model.blocks, gradient_bits=None)
    same(gradient(), gradient())  # no noise


class Annealed(nn.Module):
    """Its code reads ``alpha`` in some way, and not ``global_step``, ``metrics`` and ``beta``."""

    def __init__(self, read):
        super().__init__()
        self.a, self.b, self.read = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), read
        self.alpha, self.beta, self.global_step, self.metrics = 1.0, 1.0, 0, {"loss": 0.0}
        self.inner = Helper()

    @property
    def scale(self):
        return self.alpha

    def forward(self, x):
        return self.b(torch.relu(self.a(x))) * self.read(self)


class Looking(Annealed):
    """Looks for its attributes in a way of its own."""

    def __getattribute__(self, name):
        return object.__getattribute__(self, name)


def of_a_copy(model):
    return copy.copy(model).alpha


WAYS = {
    "by name": lambda model: model.alpha,
    "getattr": lambda model: getattr(model, "al" + "pha", 2.0),
    "a property": lambda model: model.scale,
    "vars": lambda model: vars(model)["alpha"],
    "__dict__": lambda model: model.__dict__["alpha"],
    "attrgetter": lambda model: operator.attrgetter("alpha")(model),
    "a copy": of_a_copy,
    "a branch": lambda model: 4.0 if model.alpha > 2 else 1.0,
    "torch's look": lambda model: nn.Module.__getattribute__(model, "alpha"),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("kind", "read"),
    [*((Annealed, read) for read in WAYS.values()), (Looking, WAYS["by name"])],
    ids=[*WAYS, "a class's own look"],
)
def test_a_number_that_code_reads_counts_at_once(kind, read, training):
    model, _ = make(model=kind(read))
    x, _ = batch(0)
    model.train(training)
    with torch.set_grad_enabled(training):
        before = model(x).detach()
        assert model.forward.ran
        for alpha in (4.0, 1.0):
            model.alpha = alpha
            model.global_step += 1
            same(model(x), before * alpha)


class Slotted:
    __slots__ = ("alpha", "unset")

    def __init__(self, alpha):
        self.alpha = alpha


@dataclass
class Whole:
    """A configuration with more than plain values."""

    alpha: float
    path: Path = Path()
    classes: np.ndarray = field(default_factory=lambda: np.arange(3))
    rest: tuple[object, ...] = (range(3), np.float32(1), frozenset({1}), b"1", nn.ReLU(), print)


class Callable:
    def __init__(self, alpha):
        self.alpha = alpha

    def __call__(self):
        return self.alpha


def nested(alpha, depth):
    return {"alpha": alpha} if not depth else {"inner": nested(alpha, depth - 1)}


def innermost(table):
    while "inner" in table:
        table = table["inner"]
    return table


def put(name):
    return lambda held, alpha: setattr(held, name, alpha)


PLACES = {  # what holds a number, how code reads it, how it is changed; whether a chain may know it
    "slots": (Slotted, lambda held: held.alpha, put("alpha"), True),
    "a record": (Whole, lambda held: held.alpha, put("alpha"), True),
    "what is called": (Callable, lambda held: held(), put("alpha"), True),
    "a method": (lambda a: Callable(a).__call__, lambda held: held(), lambda held, a: put("alpha")(held.__self__, a), True),
    "a queue": (lambda a: deque([a]), lambda held: held[0], lambda held, a: held.__setitem__(0, a), True),
    "a part of a function": (lambda a: partial(float, a), lambda held: held(), None, True),
    "a reference": (lambda a: [own := Callable(a), ref(own)], lambda held: held[1]().alpha, lambda held, a: put("alpha")(held[0], a), True),
    "a table of many": (lambda a: {i: [a] for i in range(200)}, lambda held: held[150][0], lambda held, a: held[150].__setitem__(0, a), True),
    "a table in a table": (lambda a: nested(a, 5), lambda held: innermost(held)["alpha"], lambda held, a: innermost(held).update(alpha=a), True),
    "too deep": (lambda a: nested(a, 20), lambda held: innermost(held)["alpha"], lambda held, a: innermost(held).update(alpha=a), False),
    "beside a generator": (lambda a: SimpleNamespace(alpha=a, dice=torch.Generator()), lambda held: held.alpha, put("alpha"), False),
}  # fmt: skip


class Held(nn.Module):
    def __init__(self, held, read):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.held, self.read = held, read

    def forward(self, x):
        return self.b(torch.relu(self.a(x))) * self.read(self.held)


@pytest.mark.parametrize("name", PLACES)
def test_what_is_in_objects_that_code_reads_is_of_now(name):
    make_it, read, change, is_known = PLACES[name]
    model, _ = make(model=Held(make_it(1.0), read))
    x, _ = batch(0)
    reason = trace(model)
    assert isinstance(reason, str) is not is_known
    assert is_known or "reads held, of which not all" in reason
    before = model(x).detach()
    if change is None:
        model.held = make_it(4.0)
    else:
        change(model.held, 4.0)
    same(model(x), before * 4)


def closed(alpha):
    return lambda: alpha[0]


def test_what_functions_compute_with_is_of_now():
    cell = [1.0]
    model, _ = make(model=Held(closed(cell), lambda held: held()))
    x, _ = batch(0)
    assert is_fused(model, x)
    before = model(x).detach()
    cell[0] = 4.0
    same(model(x), before * 4)


DICE = {
    "Python's": lambda: random.Random(4).random,
    "NumPy's old": lambda: np.random.RandomState(3).rand,
    "NumPy's": lambda: np.random.default_rng(0).random,
    "torch's": lambda: partial(torch.rand, (), generator=torch.Generator().manual_seed(6)),
    "a count": lambda: partial(next, itertools.count()),
}


@pytest.mark.parametrize("name", DICE)
def test_what_code_draws_from_a_generator_of_its_own_is_another_each_time(name):
    model, _ = make(model=Held(DICE[name](), lambda held: float(held())))
    x, _ = batch(0)
    assert isinstance(trace(model), str)
    assert len({model(x).sum().item() for _ in range(4)}) == 4


def test_a_generator_is_as_it_was_when_a_model_was_traced():
    dice = torch.Generator().manual_seed(6)
    model, _ = make(model=Held(dice, lambda held: torch.rand((), generator=dice).item()), steps=0)
    state = dice.get_state()
    assert "draws random numbers" in trace(model)
    same(dice.get_state(), state)


KEPT = []


class Keeping(nn.Module):
    """Its code keeps a value in a queue, or in a list of the process."""

    def __init__(self, is_own):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.kept = deque(maxlen=2) if is_own else nn.Identity()

    def forward(self, x):
        x = torch.relu(self.a(x))
        (self.kept if isinstance(self.kept, deque) else KEPT).append(x)
        return self.b(x)


@pytest.mark.parametrize("is_own", [True, False])
def test_code_that_keeps_values_is_not_traced(is_own):
    model, _ = make(model=Keeping(is_own))
    before = [*model.kept] if is_own else []
    assert len(before) == 2 * is_own
    assert ("changes attributes" if is_own else "keeps values elsewhere") in trace(model)
    if is_own:
        assert all(map(operator.is_, model.kept, before))
        assert len(model.kept) == 2
    x, _ = batch(0)
    y = model(x)
    same(model.b((model.kept if is_own else KEPT)[-1]), y)
    assert not is_own or all(isinstance(own, torch.Tensor) for own in model.kept)


def test_what_code_does_not_read_may_change(monkeypatch):
    model, _ = make(model=Annealed(WAYS["by name"]))
    x, _ = batch(0)
    before = model(x)
    traced = []
    monkeypatch.setattr(fusion, "trace", lambda *args, **kwargs: traced.append(args))
    for step in range(3):
        model.global_step, model.inner.factor = step, float(step)
        model.metrics["loss"] += 0.5
        model.metrics[f"loss {step}"] = 1.0
        same(model(x), before)
        assert model.forward.ran
    assert traced == []


def test_a_name_that_comes_in_another_ones_place_is_seen():
    model, _ = make(model=Annealed(lambda model: getattr(model, "gamma", 1.0)))
    x, _ = batch(0)
    before = model(x)
    del model.beta
    model.gamma = 4.0
    same(model(x), before * 4)


def test_modules_are_looked_into_as_before_when_a_trace_is_over():
    def wrong(model):
        raise ValueError

    with pytest.raises(ValueError):
        Tracer().trace(Annealed(wrong))
    Tracer().trace(Annealed(lambda model: Tracer().trace(nn.Linear(1, 1)) and 1.0))
    assert "__getattribute__" not in vars(nn.Module)


def test_what_another_thread_reads_is_not_noted():
    def read(model):
        thread = threading.Thread(target=lambda: model.beta)
        thread.start()
        thread.join()
        return model.alpha

    model, tracer = Annealed(read), Tracer()
    tracer.trace(model)
    assert tracer.reads.may_have(model, "alpha")
    assert not tracer.reads.may_have(model, "beta")


def sources():
    """Return how many sources of traces torch keeps."""
    kept = [name for name in linecache.cache if name.startswith("<eval_with_key>")]
    return len(kept), len(graph_module._loader.eval_cache)


def test_no_source_of_a_trace_is_kept():
    before = sources()
    model, _ = make(model=Annealed(WAYS["by name"]))
    x, _ = batch(0)
    for alpha in (1.0, 2.0, 3.0):
        model.alpha = alpha
        model(x).sum().backward()
    frozen = marvin.freeze(model.eval())
    marvin.integer.prepack(frozen)
    with torch.no_grad():
        frozen(x)
    assert model.forward._modes[True]._runs
    assert frozen.forward.ran
    assert sources() == before
