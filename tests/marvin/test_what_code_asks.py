"""Code that asks Python what a value is, records that it makes, and classes that change: a converted model does as the model."""

import builtins
import copy
import dataclasses
import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, _assert, nn
from torch.fx.proxy import TraceError

import marvin
from marvin.integer import convert
from marvin.integer.graph import trace
from marvin.tracing import Tracer
from tests.marvin.test_fusion import batch, same


class Asking(nn.Module):
    """Two convolutions, and what ``rest`` does with what they give."""

    def __init__(self, rest):
        super().__init__()
        self.a, self.b, self.relu = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.ReLU()
        self.rest = rest

    def forward(self, x):
        return self.rest(self.b(self.relu(self.a(x))))


def prepared(model, first=lambda y: y):
    """Return a converted model after a step with formats, and one whose layers run one by one."""
    torch.manual_seed(0)
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.01)
    optimizer = marvin.Quantized(sgd, marvin.StaticPolicy(weights=8, activations=8))
    marvin.quantize_activations(model, optimizer)
    loss = first(model(batch(0)[0])).square().mean()
    loss.backward()
    optimizer.step(loss=loss.detach())
    optimizer.zero_grad()
    twin = copy.deepcopy(model)
    convert(model)
    convert(twin, fused=False)
    return model, twin


class Halves(nn.Module):
    """Returns its input times a parameter of its own, and None or the input."""

    def __init__(self, *, has_more=False):
        super().__init__()
        self.weight, self.has_more = nn.Parameter(torch.ones(4, 1, 1, 1)), has_more

    def forward(self, x):
        return x * self.weight.view(4, 1, 1), x if self.has_more else None


class Taking(nn.Module):
    """Adds what ``halves`` returns."""

    def __init__(self, count, *, has_more):
        super().__init__()
        self.halves, self.count = Halves(has_more=has_more), count

    def forward(self, x):
        found = self.halves(x)
        first, second = found if self.count is None else found[: self.count]
        return first if second is None else first + second


@pytest.mark.parametrize("has_more", [False, True])
@pytest.mark.parametrize("count", [None, 2])
def test_none_beside_a_value_is_none(count, has_more):
    model, twin = prepared(Asking(Taking(count, has_more=has_more)))
    reason = trace(model)
    assert isinstance(reason, str)
    assert "that rest.halves returns: others may be None" in reason
    x, _ = batch(0)
    for _ in range(2):
        same(model(x), twin(x))


def test_the_first_value_of_several_may_be_computed_with():
    model, _ = prepared(Asking(Halves()), lambda y: y[0])
    assert not isinstance(trace(model), str)


@dataclasses.dataclass
class Divided:
    logits: Tensor
    temperature: float = 2.0

    def __post_init__(self):
        self.logits = self.logits / self.temperature


@dataclasses.dataclass
class Counted:
    logits: Tensor
    count: int = dataclasses.field(init=False, default=3)


@dataclasses.dataclass
class Plain:
    logits: Tensor
    others: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Written:
    """Writes to what it takes, in an ``__init__`` of its own."""

    logits: Tensor

    def __init__(self, logits):
        self.logits = logits
        logits.mul_(2.0)


class Pair(NamedTuple):
    logits: Tensor
    aux: Any = None


class Doubled(Pair):
    def __new__(cls, logits, aux=None):
        return super().__new__(cls, logits * 2, aux)


class Listed(list):
    @property
    def logits(self):
        return self[0]


def with_more(logits):
    found = Plain(logits)
    found.more = logits * 2
    return found


RECORDS = {  # and whether a graph can make them
    "divided": (Divided, False),
    "counted": (Counted, False),
    "written": (Written, False),
    "more": (with_more, False),
    "doubled": (Doubled, False),
    "listed": (lambda logits: Listed([logits]), False),
    "plain": (lambda logits: Plain(logits, {"a": logits}), True),
    "pair": (Pair, True),
}


@pytest.mark.parametrize("name", RECORDS)
def test_records_are_what_the_model_makes(name):
    rest, is_made = RECORDS[name]
    model, twin = prepared(Asking(rest), lambda y: y.logits)
    reason = trace(model)
    assert isinstance(reason, str) is not is_made
    assert is_made or "which no graph can make anew" in reason
    x, _ = batch(0)
    y, wanted = model(x), twin(x)
    assert type(y) is type(wanted)
    assert getattr(y, "__dict__", {}).keys() == getattr(wanted, "__dict__", {}).keys()
    same(y.logits, wanted.logits)


@pytest.mark.parametrize("training", [True, False])
def test_a_class_that_changes_is_seen(training):
    model, twin = prepared(Asking(lambda y: y))
    x, _ = batch(0)
    for own in (model, twin):
        own.train(training)
    with torch.set_grad_enabled(training):
        model(x)
        for own in (model, twin):
            own.relu.__class__ = nn.Tanh
        same(model(x), twin(x))


def swallows(y):
    try:
        if y.abs().max() > 0:
            y = y * 2
    except Exception:
        pass
    return y


def counts(y):
    try:
        return y * float(y.detach().abs().max())
    except (TypeError, ValueError):
        return y


def matches(y):
    match y:
        case Tensor():
            return y * 2
    return y


def asserts(y):
    torch._assert(isinstance(y, Tensor), f"needs a tensor, got one of {y.shape}")
    _assert(callable(y.mean), f"needs a tensor, got one of {y.shape}")
    return y * 2


def is_a_tensor(y):
    return type(y) is Tensor


@functools.lru_cache
def is_kind(kind):
    return issubclass(kind, Tensor)


class Deep:
    def __call__(self, y):
        return is_a_tensor(y)


deep = Deep()


class Gated(Asking):
    """Asks for its argument."""

    def forward(self, x):
        x = x * 100 if hasattr(x, "weights") else x * getattr(x, "gain", 1.0)
        return super().forward(x)


class Recurrent(Asking):
    def __init__(self, rest):
        super().__init__(rest)
        self.rnn = nn.GRU(4, 4, batch_first=True)

    def forward(self, x):
        y = self.rnn(super().forward(x).flatten(2).transpose(1, 2))
        return y[0] if isinstance(y, tuple) else y


ASKS = {  # and whether what they ask is known
    "isinstance": (lambda y: y * 2 if isinstance(y, Tensor) else y, True),
    "of some": (lambda y: y if isinstance(y, (list, tuple)) else y * 2, True),
    "or": (lambda y: y * 2 if isinstance(y, Tensor | int) else y, True),
    "is_tensor": (lambda y: y * 2 if torch.is_tensor(y) else y, True),
    "a parameter": (lambda y: y if isinstance(y, nn.Parameter) else y * 2, True),
    "type": (lambda y: y * 2 if type(y) is Tensor else y, True),
    "the name of a type": (lambda y: y * 2 if type(y).__name__ == "Tensor" else y, True),
    "a helper": (lambda y: y * 2 if is_a_tensor(y) else y, True),
    "a helper of a helper": (lambda y: y * 2 if deep(y) else y, True),
    "__class__": (lambda y: y * 2 if y.__class__ is Tensor else y, True),
    "match": (matches, True),
    "a type's key": (lambda y: y * 2 if is_kind(type(y)) else y, True),
    "an assertion": (asserts, True),
    "a size": (lambda y: y * 2 if isinstance(y.shape[0], int) and isinstance(y.shape, tuple) else y, True),
    "callable": (lambda y: y if callable(y) else y * 2, True),
    "a method": (lambda y: y * 2 if callable(y.mean) and hasattr(y, "shape") else y, True),
    "hasattr": (lambda y: y if hasattr(y, "weights") else y * 2, False),
    "getattr": (lambda y: y * 2 if getattr(y, "weights", None) is None else y, False),
    "a method that is not there": (lambda y: y if callable(getattr(y, "foo", None)) else y * 2, False),
    "a text": (lambda y: y * len(f"{y.shape[-1]}"), False),
    "str": (lambda y: y * len(str(y.shape)), False),
    "repr": (lambda y: y * len(repr(y.dtype)), False),
    "a key": (lambda y: y * {4: 2.0}.get(y.shape[-1], 1.0), False),
    "an error that is caught": (swallows, False),
    "a number that is caught": (counts, False),
    "an item": (lambda y: y * 2 if isinstance(y.max(1), tuple) else y, False),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKS)
def test_code_that_asks_what_a_value_is_gets_the_answer_of_the_value(name):
    rest, is_known = ASKS[name]
    model, twin = prepared(Asking(rest))
    reason = trace(model)
    assert isinstance(reason, str) is not is_known, reason
    assert is_known or reason.startswith("torch.fx cannot trace it")
    x, _ = batch(0)
    same(model(x), twin(x))
    for own in (model, twin):
        own.eval()
    with torch.no_grad():
        same(model(x), twin(x))


@pytest.mark.parametrize(("kind", "is_known"), [(Gated, False), (Recurrent, True)])
def test_arguments_and_tuples_are_asked_for(kind, is_known):
    model, twin = prepared(kind(lambda y: y))
    assert isinstance(trace(model), str) is not is_known
    x, _ = batch(0)
    same(model(x), twin(x))


def test_keys_of_sizes_are_those_of_the_model():
    model, twin = prepared(Asking(lambda y: {f"f{y.shape[-1]}": y}), lambda y: y["f4"])
    x, _ = batch(0)
    same(model(x), twin(x))


def test_python_answers_as_before_when_a_trace_is_over():
    before = builtins.isinstance, builtins.callable
    Tracer().trace(Asking(ASKS["type"][0]))
    with pytest.raises(TraceError, match="has an attribute, weights"):
        Tracer().trace(Asking(ASKS["hasattr"][0]))
    assert (builtins.isinstance, builtins.callable) == before
    assert "type" not in globals()


def test_assertions_are_those_of_torch_when_a_trace_is_over():
    check = torch._assert
    Tracer().trace(Asking(asserts))
    assert torch._assert is check
    assert asserts.__globals__["_assert"] is check
    with pytest.raises(AssertionError, match="needs 2"):
        Tracer().trace(Asking(lambda y: _assert(y is None, "needs 2")))
