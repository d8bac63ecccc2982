"""The contract of a policy: a state decides the future, whatever arguments its object had."""

import dataclasses
import functools
import importlib
import inspect
import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import marvin
from fixedpoint_kernels import BlockFloat, FixedPoint, Minifloat, quantize
from marvin import (
    FixedPolicy,
    LossBudgetPolicy,
    MarvinPolicy,
    MuppetPolicy,
    Quantized,
    StaticPolicy,
)
from marvin.policies.records import ActivationFormats, Layer, LayerFormat, Measured, Rules, Update
from marvin.policies.trace import Switch
from marvin.rounder import formats_of
from marvin.shards import Shard

# of each policy: the run that is saved, and the object that loads its state; no argument is shared
PAIRS = {
    FixedPolicy: ({"wl": 10, "fl": 6}, {"wl": 5, "fl": 2, "symmetric": True}),
    MarvinPolicy: (
        {
            "init_wl": 10,
            "init_fl": 6,
            "max_wl": 24,
            "min_fl": 2,
            "buffer_bits": 5,
            "resolution": (10, 20),
            "lookback": (2, 5),
            "lookback_momentum": 0.8,
            "lookback_rounding": "nearest",
            "strategy_loss": "short",
            "strategy_margin": 0.1,
            "kl_eps": 0.05,
            "kl_smoothing": 0.7,
            "kl_direction": "qp",
            "kl_counts": "sampled",
            "pushdown_range": "full",
            "pushup": "marvin",
            "symmetric": True,
        },
        {"strategy": "max"},
    ),
    MuppetPolicy: (
        {
            "levels": (4, 6, 10, 32),
            "window": 2,
            "patience": 1,
            "window_kind": "block",
            "threshold_epoch": "since_switch",
            "epochs_per_lr": 2,
            "lr_decays": 1,
            "lr_factor": 0.5,
        },
        {},
    ),
    LossBudgetPolicy: (
        {
            "kappa": 1e-12,  # so small that all words are as long as they may be
            "max_noise": (0.02, 0.003),
            "window": 3,
            "sat_tol": 0.01,
            "min_wl": 3,
            "max_wl": 9,
            "ends_wl": 7,
            "per_channel": True,
            "batch_size": 16,
        },
        {},
    ),
    StaticPolicy: (
        {
            "weights": 5,
            "activations": 7,
            "window": 3,
            "sat_tol": 0.01,
            "ends_wl": 8,
            "per_channel": True,
        },
        {},
    ),
}


def make(policy, lr, momentum, **options):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)
    )
    sgd = torch.optim.SGD(model.named_parameters(), lr=lr, momentum=momentum)
    optimizer = Quantized(sgd, policy, **options)
    marvin.quantize_activations(model, optimizer)
    return model, optimizer


def train(model, optimizer, steps):
    for step in steps:
        g = torch.Generator().manual_seed(min(step, 6))  # then gradients differ no more
        x, y = torch.randn(16, 6, generator=g), torch.randint(4, (16,), generator=g)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step(loss=loss)
        optimizer.end_epoch()


@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        ("policy", "Update", "policies"),
        ("policy", "word_length", "policies"),
        ("marvin_policy", "Losses", "policies.marvin"),
        ("push_up", "diversity", "policies.push_up"),
        ("record", "PlainRecord", "policies.records"),
        ("observations", "Observer", "policies.observer"),
    ],
)
def test_modules_are_found_at_their_old_places(old, name, new):
    with pytest.warns(DeprecationWarning, match=rf"^marvin\.{old} is now marvin\.{new}$") as seen:
        found = getattr(importlib.import_module(f"marvin.{old}"), name)
    assert found is getattr(importlib.import_module(f"marvin.{new}"), name)
    assert seen[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="is now"):
        exec(f"from marvin.{old} import {name}", {})


def test_tools_that_look_at_every_module_get_no_warning():
    assert not hasattr(marvin.policy, "__file__")
    with (
        pytest.warns(DeprecationWarning, match="is now"),
        pytest.raises(AttributeError, match="has no attribute 'nothing'"),
    ):
        marvin.push_down.nothing  # noqa: B018


def test_all_policies_are_here():
    classes = [c for _, c in inspect.getmembers(marvin, inspect.isclass)]
    assert {c for c in classes if issubclass(c, marvin.Policy) and not inspect.isabstract(c)} == {
        *PAIRS
    }


@pytest.mark.parametrize("kind", PAIRS, ids=lambda kind: kind.__name__)
def test_a_state_decides_whatever_the_arguments_were(kind):
    settings, others = PAIRS[kind]
    for name, value in settings.items():
        assert value != getattr(kind(**others), name), name
    model, optimizer = make(kind(**settings), 0.05, 0.9, seed=3, l1=1e-4, one_dim="previous")
    train(model, optimizer, range(9))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, loaded = make(kind(**others), 0.7, 0.2, one_dim="float", normalize_gradients=True)
    train(other, loaded, range(20, 23))  # something to forget
    other.load_state_dict(saved["model"])
    loaded.load_state_dict(saved["optimizer"])
    assert repr(loaded.state_dict()) == repr(saved["optimizer"])
    for pair in ((model, optimizer), (other, loaded)):
        train(*pair, range(9, 20))
    torch.testing.assert_close(dict(model.state_dict()), dict(other.state_dict()), rtol=0, atol=0)
    first, second = optimizer.state_dict(), loaded.state_dict()
    assert repr(first) == repr(second)
    assert optimizer.formats() == loaded.formats()
    assert optimizer.input_formats() == loaded.input_formats()
    assert (kind is FixedPolicy) != bool(optimizer.trace)
    if kind is LossBudgetPolicy:
        assert optimizer.formats()["3.weight"].wl == 9


def test_a_fixed_format_follows_a_group_whose_settings_change():
    model, optimizer = make(FixedPolicy(8, 4), 0.05, 0.0, seed=3)
    train(model, optimizer, range(2))
    optimizer.param_groups[0]["wl"] = 5
    assert {fmt.wl for fmt in optimizer.formats().values() if fmt} == {8}
    train(model, optimizer, range(2, 4))
    assert {(fmt.wl, fmt.fl) for fmt in optimizer.formats().values() if fmt} == {(5, 4)}
    assert {(row.step, row.wl_before, row.wl) for row in optimizer.trace} == {(3, 8, 5)}
    weight = model.state_dict()["0.weight"]
    torch.testing.assert_close(weight, quantize(weight, FixedPoint(5, 4)), rtol=0, atol=0)
    optimizer.param_groups[0]["wl"] = 0
    before = weight.clone()
    with pytest.raises(ValueError, match="word length must be"):
        train(model, optimizer, range(4, 5))
    torch.testing.assert_close(model.state_dict()["0.weight"], before, rtol=0, atol=0)


def test_a_layer_with_other_values_has_its_fields_alone():
    own = torch.zeros(2, 3)
    layer = Layer(0, "0.weight", {}, None, {}, own, Shard(own.shape), norm=1.0)
    changed = layer.but(record="new", norm=2.0)
    assert changed == dataclasses.replace(layer, record="new", norm=2.0)
    assert (layer.record, layer.norm) == (None, 1.0)
    with pytest.raises(TypeError, match="no field word_length"):
        layer.but(word_length=8)


@dataclasses.dataclass(frozen=True)
class Note:
    """A record, and a shared one, with a table of its own."""

    fmt: FixedPoint | Minifloat | None
    seen: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Silent(marvin.Policy):
    """Changes formats without a switch."""

    def init_shared(self):
        return Note(None)

    def init(self, settings, shared):
        return Note(FixedPoint(12, 6))

    def update(self, shared, layers, step):
        shared = dataclasses.replace(shared, seen=shared.seen | {str(step.number): 1})
        record = Note(FixedPoint(5, 3)) if step.number > 1 else layers[0].record
        return Update(shared, [layer.but(record=record) for layer in layers])

    def end_epoch(self, shared, layers, step):
        return Update(shared, [layer.but(record=Note(FixedPoint(4, 2))) for layer in layers])


def own(policy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = Quantized(torch.optim.SGD(model.named_parameters(), lr=0.05), policy)
    marvin.quantize_activations(model, optimizer)
    return model, optimizer


def steps(model, optimizer, count):
    for _ in range(count):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 6)).square().mean()
        loss.backward()
        optimizer.step(loss=loss)


def test_formats_that_change_without_a_switch_reach_the_model():
    model, optimizer = own(Silent())
    steps(model, optimizer, 3)
    rows = [
        (row.step, row.layer, row.wl, row.fl, row.wl_before, row.fl_before)
        for row in optimizer.trace
    ]
    assert rows == [(2, "0.weight", 5, 3, 12, 6), (2, "2.weight", 5, 3, 12, 6)]
    for bits in (3, 2):
        for values in (model[:1].eval()(torch.randn(4, 6)), model.get_parameter("0.weight")):
            assert torch.equal(values * 2**bits, (values * 2**bits).round())
        optimizer.end_epoch()
    assert len(optimizer.trace) == 4


@pytest.mark.parametrize("policy", PAIRS)
def test_steps_without_layers_go_with_a_loss(policy):
    model = nn.Linear(6, 3)
    optimizer = Quantized(torch.optim.SGD([model.bias], lr=0.1), policy())
    before = model.bias.detach().clone()
    steps(model, optimizer, 2)
    assert not torch.equal(model.bias, before)


def test_tables_of_a_policy_are_saved_as_they_are():
    model, optimizer = own(Silent())
    steps(model, optimizer, 2)
    other = own(Silent())[1]
    other.load_state_dict(optimizer.state_dict())
    assert other.shared == optimizer.shared == Note(None, {"1": 1, "2": 1})


class Late(Silent):
    """Changes formats once masters have moved."""

    def update(self, shared, layers, step):
        return Update(shared, layers)

    def after_move(self, shared, layers, step):
        if step.number != 2:
            return None
        return Update(shared, [layers[0].but(record=Note(FixedPoint(5, 3))), *layers[1:]])


def test_formats_that_change_after_the_move_are_those_of_the_step():
    model, optimizer = own(Late())
    steps(model, optimizer, 2)
    assert [(row.step, row.layer, row.wl) for row in optimizer.trace] == [(2, "0.weight", 5)]
    assert formats_of(model)["0"].weights == (FixedPoint(5, 3),) * 2  # its bias has it, too
    for p, bits in ((model[0].weight, 3), (model[0].bias, 3), (model[2].weight, 6)):
        assert torch.equal(p * 2**bits, (p * 2**bits).round())
    other, again = own(Late())
    again.load_state_dict(optimizer.state_dict())
    for pair in ((model, optimizer), (other, again)):
        steps(*pair, 2)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)


class Twice(Silent):
    """Changes formats in steps, and at the end of epochs."""

    def update(self, shared, layers, step):
        record = Note(FixedPoint(8 - step.number % 2, 5))
        return Update(shared, [layer.but(record=record) for layer in layers])


def test_a_layer_has_one_row_in_a_step_that_ends_epochs():
    model, optimizer = own(Twice())
    for _ in range(2):
        steps(model, optimizer, 1)
        optimizer.end_epoch()
    optimizer.end_epoch()
    rows = [(row.step, row.layer, row.wl_before, row.wl) for row in optimizer.trace]
    names = "0.weight", "2.weight"
    assert rows == [(1, n, 12, 4) for n in names] + [(2, n, 4, 4) for n in names]


@dataclasses.dataclass(frozen=True)
class Epochs:
    count: int = 0


@dataclasses.dataclass(frozen=True)
class Scaled(marvin.Policy):
    """Multiplies learning rates by a number of its own in each epoch."""

    scales: tuple[float, ...] = (1.0,)

    def init_shared(self):
        return Epochs()

    def init(self, settings, shared):
        return Note(FixedPoint(12, 6))

    def end_epoch(self, shared, layers, step):
        return Update(Epochs(shared.count + 1), layers)

    def lr_scale_at(self, shared):
        return self.scales[shared.count]


def test_scales_of_the_learning_rate_begin_at_1_and_are_above_0():
    optimizer = own(Scaled((1.0, 10.0, 0.5)))[1]
    for lr in (0.05, 0.5, 0.025):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(lr)
        if lr > 0.03:
            optimizer.end_epoch()
    with pytest.raises(ValueError, match=r"must be 1 before the first epoch ends, .* got 0\.1"):
        own(Scaled((0.1, 1.0)))
    for wrong in (0.0, -1.0, float("nan"), float("inf"), "1"):
        optimizer = own(Scaled((1.0, wrong)))[1]
        with pytest.raises(ValueError, match="lr_scale_at must be a finite number above 0, got"):
            optimizer.end_epoch()
        assert optimizer.shared == Epochs()
        assert optimizer.param_groups[0]["lr"] == 0.05


class Blocks(Silent):
    """Goes to and fro between fixed point and block floating point."""

    def update(self, shared, layers, step):
        fmt = BlockFloat(6) if step.number % 2 else FixedPoint(8, 4)
        return Update(shared, [layer.but(record=Note(fmt)) for layer in layers])

    def activation_formats(self, record):
        return ActivationFormats(inputs=BlockFloat(record.fmt.wl + 1))


def test_switches_to_block_floating_point_have_no_fractional_length():
    model, optimizer = own(Blocks())
    steps(model, optimizer, 2)
    found = [(row.fl, row.fl_before, row.input_wl, row.input_fl) for row in optimizer.trace[::2]]
    assert found == [(0, 6, 7, 0), (4, 0, 9, 0)]
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = own(Blocks())[1]
    other.load_state_dict(torch.load(file, weights_only=True))
    assert str(other.trace) == str(optimizer.trace)  # NaN is not itself


@dataclasses.dataclass(frozen=True)
class Own:
    """A record of a policy of one's own."""

    fmt: FixedPoint
    value: object


def of_value(value, later=None, *, at="record"):
    """Return an optimizer whose policy keeps ``value``, from its second step on ``later``."""

    class Keeper(Silent):
        def init_shared(self):
            return value if at == "shared" else None

        def init(self, settings, shared):
            return Own(FixedPoint(8, 4), value if at == "record" else 0)

        def update(self, shared, layers, step):
            if later is None or at == "shared":
                return Update(shared if later is None else later, layers)
            records = [dataclasses.replace(layer.record, value=later) for layer in layers]
            pairs = zip(layers, records, strict=True)
            return Update(shared, [layer.but(record=record) for layer, record in pairs])

        def end_epoch(self, shared, layers, step):
            return Update(shared, layers)

    return own(Keeper())


@pytest.mark.parametrize(
    "value",
    [
        ActivationFormats(FixedPoint(5, 2), None, BlockFloat(6)),
        (FixedPoint(5, 2), (1, "a"), ActivationFormats()),
        {"a": 1, "b": None},
        FixedPoint(5, 0, signed=False),
    ],
    ids=["activation formats", "formats", "table", "unsigned"],
)
@pytest.mark.parametrize("at", ["record", "shared"])
def test_values_of_a_record_come_back(value, at):
    first = Own(FixedPoint(2, 1), 0) if at == "shared" else 0
    later = dataclasses.replace(first, value=value) if at == "shared" else value
    model, optimizer = of_value(first, later, at=at)
    steps(model, optimizer, 1)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = of_value(first, later, at=at)[1]
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.shared == optimizer.shared
    records = [own.state[own.param_groups[0]["params"][0]]["layer"] for own in (optimizer, other)]
    assert records[0] == records[1]
    assert (other.shared if at == "shared" else records[1]).value == value


WRONG_VALUES = {
    "list": [1],
    "dataclass": Note(None),
    "format-like": {"wl": 8},
    "tensor": torch.ones(()),
    "numpy": np.float64(1.0),
    "minifloat": Minifloat(4, 3),
    "a tuple of lists": (1, [2]),
}


@pytest.mark.parametrize("value", WRONG_VALUES.values(), ids=WRONG_VALUES)
@pytest.mark.parametrize("is_first", [True, False])
def test_values_that_would_not_come_back_are_refused_at_once(value, is_first):
    message = r"a layer's record must have numbers, .*, got value=.*: write tuple\(...\) of a list"
    with pytest.raises(TypeError, match=message):
        steps(*(of_value(value) if is_first else of_value(0, value)), 1)


@dataclasses.dataclass(frozen=True)
class Computed:
    """A record with a field that its constructor does not take."""

    fmt: FixedPoint | None = None
    bits: int = dataclasses.field(default=8, init=False)


@pytest.mark.parametrize("at", ["a layer's record", "the shared record"])
def test_fields_that_no_constructor_takes_are_refused_at_once(at):
    """States with them did not load, with Python's message."""
    function = "init" if "layer" in at else "init_shared"
    wrong = type("Wrong", (Silent,), {function: lambda *_: Computed()})
    message = rf"{at} must have fields that its constructor takes, .*, got bits .*: write a prop"
    with pytest.raises(TypeError, match=message):
        own(dataclasses.dataclass(frozen=True)(wrong)())


@pytest.mark.parametrize("shared", [0, {"a": 1}, (1, 2), "x", Own])
def test_a_shared_record_is_a_dataclass(shared):
    with pytest.raises(TypeError, match=r"the shared record must be a dataclass.*, got"):
        of_value(shared, at="shared")


def test_records_stay_of_one_class():
    with pytest.raises(
        TypeError, match=r"shared record must be of one class .* Own after NoneType"
    ):
        steps(*of_value(None, Own(FixedPoint(2, 1), 0), at="shared"), 1)
    update = lambda _, shared, layers, step: Update(  # noqa: E731
        shared, [layer.but(record=Own(layer.record.fmt, 0)) for layer in layers]
    )
    with pytest.raises(TypeError, match=r"layer's record must be of one class .* Own after Note"):
        steps(*own(type("Wrong", (Silent,), {"update": update})()), 1)


@dataclasses.dataclass(frozen=True)
class Formatted(Silent):
    """A policy whose hyper-parameters are formats."""

    fmt: FixedPoint | None = None
    later: tuple[FixedPoint | BlockFloat, ...] = ()
    acts: ActivationFormats | None = None


def test_hyper_parameters_that_are_formats_are_saved_as_plain_values():
    """A file of such a state did not load with ``weights_only=True``."""
    later, acts = (FixedPoint(5, 3), BlockFloat(6)), ActivationFormats(FixedPoint(7, 2))
    model, optimizer = own(Formatted(FixedPoint(6, 2), later, acts))
    optimizer.param_groups[0]["fmt"] = FixedPoint(9, 3)
    steps(model, optimizer, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = own(Formatted())[1]
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.policy == optimizer.policy
    for group in (other.param_groups[0], other.optimizer.param_groups[0]):
        assert (group["fmt"], group["later"], group["acts"]) == (FixedPoint(9, 3), later, acts)


@pytest.mark.parametrize(
    "value", [[1, 2], ([1],), {"wl": 8}, {"fl": 4, "other": 1}, ({"fmt": 1},)], ids=str
)
def test_hyper_parameters_that_would_not_come_back_are_refused_at_once(value):
    """A state gave tuples for lists, and did not load where a dictionary looked like a format."""
    with pytest.raises(
        TypeError, match=r"hyper-parameters of Formatted .* got later: write tuples"
    ):
        own(Formatted(later=value))


class Plain(marvin.Policy):
    """No dataclass; what it remembers is lost where training goes on."""

    def init(self, settings, shared):
        return LayerFormat(FixedPoint(8, 4))

    def update(self, shared, layers, step):
        self.count = getattr(self, "count", 0) + 1
        return Update(shared, layers)


class Remembers(Plain):
    def __init__(self):
        self.count = 0


@dataclasses.dataclass
class Unfrozen(Plain):
    bits: int = 8


@pytest.mark.parametrize(
    ("make", "got"), [(Remembers, "count"), (Unfrozen, "a class that is not frozen")]
)
def test_a_policy_that_a_state_would_not_have_is_refused(make, got):
    optimizer = torch.optim.SGD(nn.Linear(2, 2).named_parameters(), lr=0.1)
    with pytest.raises(
        TypeError, match=f"{make.__name__} must be a frozen dataclass.*got {got}: write"
    ):
        marvin.Quantized(optimizer, make())


def test_a_policy_that_begins_to_remember_is_refused_when_its_state_is_asked_for():
    model = nn.Linear(2, 2)
    optimizer = marvin.Quantized(torch.optim.SGD(model.named_parameters(), lr=0.1), Plain())
    optimizer.state_dict()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step(loss=1.0)
    with pytest.raises(TypeError, match=r"Plain must be a frozen dataclass.*got count: write"):
        optimizer.state_dict()


def test_what_a_policy_caches_is_no_memory():
    class Cached(marvin.FixedPolicy):
        @functools.cached_property
        def twice(self):
            return 2 * self.wl

    policy = Cached(8, 4)
    assert policy.twice == 16
    model = nn.Linear(2, 2)
    optimizer = marvin.Quantized(torch.optim.SGD(model.named_parameters(), lr=0.1), policy)
    assert "twice" not in optimizer.state_dict()["marvin"]["policy"]["settings"]


def test_records_that_are_not_frozen_are_refused():
    """Changed in place, they would be the ones before: nothing would be written or shown."""

    @dataclasses.dataclass
    class Record:
        fmt: FixedPoint

    class Mutable(Plain):
        def init(self, settings, shared):
            return Record(FixedPoint(8, 4))

    optimizer = torch.optim.SGD(nn.Linear(2, 2).named_parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"a layer's record must be frozen.*got Record: write"):
        marvin.Quantized(optimizer, Mutable())


@pytest.mark.parametrize("number", [np.int64(8), (np.float64(1e-3), 1e-4)])
def test_numbers_of_numpy_are_refused_where_a_state_would_have_them(number):
    """``torch.load`` takes a state with them only where it may run code."""
    name = "max_noise" if isinstance(number, tuple) else "window"
    optimizer = torch.optim.SGD(nn.Linear(2, 2).named_parameters(), lr=0.1)
    with pytest.raises(TypeError, match=rf"got {name}: write .*\.item\(\) of NumPy's numbers"):
        marvin.Quantized(optimizer, marvin.LossBudgetPolicy(**{name: number}))


def test_options_may_be_numbers_of_numpy(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = marvin.MSGD(model.named_parameters(), lr=0.1, seed=np.int64(3), l1=np.float64(0.5))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert (state["param_groups"][0]["seed"], state["param_groups"][0]["l1"]) == (3, 0.5)


def test_hyper_parameters_that_no_constructor_takes_are_refused_at_once():
    """States of such policies did not load."""

    @dataclasses.dataclass(frozen=True)
    class Counts(Silent):
        bits: int = dataclasses.field(default=8, init=False)

    with pytest.raises(TypeError, match=r"hyper-parameters of Counts .* got bits: .* a property"):
        own(Counts())


def test_what_came_into_a_record_later_is_refused_when_it_is_saved():
    model, optimizer = of_value(0)
    steps(model, optimizer, 1)
    optimizer.shared = [1]
    with pytest.raises(TypeError, match="the shared record must be a dataclass"):
        optimizer.state_dict()
    optimizer.shared = None
    weight = optimizer.param_groups[0]["params"][0]
    optimizer.state[weight]["layer"] = Own(FixedPoint(8, 4), [1])
    with pytest.raises(TypeError, match="a layer's record must have numbers"):
        optimizer.state_dict()


def _without_formats(_, shared, layers, step):
    return Update(shared, [layer.but(record=5) for layer in layers])


@pytest.mark.parametrize(
    ("function", "result", "message"),
    [
        ("init", lambda *_: 5, r"a layer's record must have a field fmt, got int: write"),
        ("init", lambda *_: Note(Minifloat(4, 3)), r"fmt must be FixedPoint, .* got e4m3"),
        ("update", _without_formats, r"a layer's record must have a field fmt, got int: write"),
        ("update", lambda _, *given: given[1], r"must return an Update .*, got list: write Update"),
        ("update", lambda *_: None, r"must return an Update .*, got NoneType: write Update"),
        (
            "update",
            lambda _, shared, layers, step: Update(shared, [layer.record for layer in layers]),
            r"an Update with layers, got Note\(.*: write Update\(shared, \[layer\.but",
        ),
        (
            "update",
            lambda _, shared, layers, step: Update(shared, layers, None),
            r"switches of Wrong's Update must be a list of Switch, got None: leave them out",
        ),
        (
            "update",
            lambda _, shared, layers, step: Update(shared, layers, [layers[0].name]),
            r"must be a list of Switch, got \['0\.weight'\]: leave them out",
        ),
        (
            "settings",
            lambda _: None,
            r"settings\(\) of Wrong must return a dictionary .*, got None",
        ),
        (
            "activation_formats",
            lambda _, record: (record.fmt, record.fmt),
            r"activation_formats must return ActivationFormats, got \(FixedPoint.*: write Act",
        ),
        (
            "activation_formats",
            lambda _, record: ActivationFormats(Minifloat(4, 3)),
            r"inputs of Wrong\.activation_formats must be FixedPoint, .*, got Minifloat",
        ),
        (
            "activation_formats",
            lambda _, record: record.fmt if record.fmt.wl == 5 else ActivationFormats(),
            r"activation_formats must return ActivationFormats, got FixedPoint\(wl=5",
        ),
        ("rules", {"tensors": ("last",)}, r"rules of Wrong must be Rules, got \{.*: write rules ="),
        (
            "measure",
            lambda _, shared, tensors, grads: Measured(norms=[1.0 for _ in grads]),
            r"measure must give norms as tensors, got 1\.0: write .*grad\.double\(\)\.norm",
        ),
    ],
    ids=[
        "record",
        "minifloat",
        "another record",
        "list",
        "nothing",
        "records",
        "no switches",
        "names for switches",
        "no settings",
        "a tuple of formats",
        "inputs in minifloat",
        "a format, later",
        "rules",
        "numbers",
    ],
)
def test_what_a_policy_must_not_give_is_refused(function, result, message):
    wrong = dataclasses.dataclass(frozen=True)(type("Wrong", (Silent,), {function: result}))
    with pytest.raises(TypeError, match=message):
        steps(*own(wrong()), 2)


@pytest.mark.parametrize(
    ("function", "result", "message"),
    [
        ("measure", lambda *_: None, "must return a Measured, got NoneType: write Measured"),
        (
            "measure",
            lambda *_: Measured({"mean": ()}),
            "rules name, which are none, got mean: write",
        ),
        (
            "measure",
            lambda _, shared, tensors, grads: Measured(norms=[grads[0].norm()]),
            r"must give norms for each of 2 layers, got 1: write",
        ),
        (
            "measure",
            lambda _, shared, tensors, grads: Measured(norms=[g.norm(dim=0) for g in grads]),
            r"must give norms as tensors of shape \(\), got \(6,\): write",
        ),
        ("measure", lambda *_: Measured({"last": ()}), "give last for each of 2 layers, got 0"),
        (
            "update",
            lambda _, shared, layers, step: Update(shared, layers[:1]),
            "must return the 2 layers .*, got 1: write Update",
        ),
        (
            "update",
            lambda _, shared, layers, step: Update(shared, layers[::-1]),
            "must return the 2 layers .* in their order, got 2: write Update",
        ),
        (
            "update",
            lambda _, shared, layers, step: Update(shared, layers, [Switch(1, "head", 8, 4, 8, 4)]),
            "must be of layers that train, got 'head': write layer.name",
        ),
    ],
    ids=[
        "nothing",
        "a tensor without a name",
        "a norm",
        "norms by column",
        "tensors",
        "a layer",
        "their order",
        "another layer's switch",
    ],
)
def test_what_a_policy_leaves_out_is_named(function, result, message):
    rules = Rules(tensors=("last",) if "give last" in message else ())
    wrong = dataclasses.dataclass(frozen=True)(
        type("Wrong", (Silent,), {function: result, "rules": rules})
    )
    model, optimizer = own(wrong())
    before = [p.clone() for p in model.parameters()]
    with pytest.raises((TypeError, ValueError), match=message):
        steps(model, optimizer, 1)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("name", ["seed", "params"])
def test_a_policy_has_no_setting_of_the_optimizers(name):
    kind = dataclasses.make_dataclass("Own", [(name, int, 3)], bases=(Silent,), frozen=True)
    with pytest.raises(ValueError, match=f"Own must have no .* got {name}: give it another name"):
        own(kind())


def test_inputs_that_are_observed_are_rounded_to_nearest():
    with pytest.raises(ValueError, match=r'must be "nearest" where .*, got \'stochastic\''):
        marvin.policies.Rules(observes_inputs=True)


def levels(*, long_first):
    """Return the strategy of each step, with groups of short and of long lookbacks."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    short, *long = model
    groups = [
        {"params": short.parameters(), "lookback": (2, 3)},
        {"params": nn.Sequential(*long).parameters(), "lookback": (10, 12)},
    ]
    sgd = torch.optim.SGD(groups[::-1] if long_first else groups, lr=0.0)
    optimizer, found = Quantized(sgd, MarvinPolicy()), []
    torch.manual_seed(1)
    for _ in range(40):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step(loss=torch.rand(()))
        found.append(optimizer.shared.level)
    return found


def test_the_order_of_groups_changes_no_decision():
    found = levels(long_first=True)
    assert levels(long_first=False) == found
    assert len(set(found)) > 1
