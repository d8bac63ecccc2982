"""A state of which any part is wrong is refused and changes nothing, if it does not load."""

import copy

import pytest
import torch
from torch import Tensor, nn

import marvin
from marvin.owners import owner_of


def adam(params):
    return torch.optim.AdamW(params, lr=1e-2)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


MAKERS = {
    "msgd": lambda params: marvin.MSGD(params, lr=0.1, lookback=(2, 4)),
    "compact": lambda params: marvin.MSGD(params, lookback=(2, 4), compact_state=True),
    "loss": lambda params: marvin.Quantized(adam(params), marvin.LossBudgetPolicy(batch_size=4)),
    "muppet": lambda params: marvin.Quantized(sgd(params), marvin.MuppetPolicy()),
}
GONE = object()
WRONG = {
    "text": "abc",
    "None": None,
    "list": [1, "a"],
    "table": {"a": 1},
    "gone": GONE,
    "tensor": torch.zeros(2, 3),
    "object": object(),
}
OF_TENSORS = {
    "shape": lambda x: torch.zeros(*x.shape, 2),
    "flat": lambda x: torch.zeros(1),
    "whole": lambda x: x.long(),
    "complex": lambda x: x.to(torch.complex64),
    "sparse": lambda x: torch.zeros(3, 3).to_sparse(),
}


def trained(kind, seed, steps):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 3))
    optimizer = MAKERS[kind](model.named_parameters())
    marvin.quantize_activations(model, optimizer)
    step(model, optimizer, steps)
    return model, optimizer


def step(model, optimizer, count=1):
    for i in range(count):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step(loss=loss)


def paths(value, path=()):
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from paths(value[key], (*path, key))
    elif isinstance(value, list | tuple):
        for i in range(min(len(value), 2)):
            yield from paths(value[i], (*path, i))


def at(value, path):
    for key in path:
        value = value[key]
    return value


def put(value, path, new):
    """Return a copy of nested values, with another one at a place."""
    if not path:
        return new
    key, *rest = path
    inner = copy.copy(value) if isinstance(value, dict) else list(value)
    if new is GONE and not rest:
        del inner[key]
    else:
        inner[key] = put(value[key], rest, new)
    return type(value)(inner) if isinstance(value, tuple) else inner


def same(x, y):
    if isinstance(x, Tensor):
        return isinstance(y, Tensor) and x.dtype == y.dtype and torch.equal(x, y)
    if isinstance(x, dict):
        return isinstance(y, dict) and [*x] == [*y] and all(same(x[key], y[key]) for key in x)
    if isinstance(x, list | tuple):
        return type(x) is type(y) and len(x) == len(y) and all(map(same, x, y))
    return type(x) is type(y) and (x == y or x != x)


def everything(model, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def mutants(whole):
    """Yield a place, what is wrong there, and the state with it."""
    for path in paths(whole):
        old = at(whole, path)
        wrong = dict(WRONG)
        if isinstance(old, Tensor):
            wrong |= {name: make(old) for name, make in OF_TENSORS.items()}
        for name, new in wrong.items():
            if new is not GONE or path:
                yield (path, name), put(whole, path, new)


def error_of(call):
    """Return what a call raises; None where it raises nothing."""
    try:
        call()
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize(
    "kind",
    [kind if kind == "msgd" else pytest.param(kind, marks=pytest.mark.slow) for kind in MAKERS],
)
@pytest.mark.filterwarnings("ignore")
def test_a_wrong_part_loads_or_is_refused_and_nothing_changes(kind):
    whole = trained(kind, 1, 5)[1].state_dict()
    other = trained(kind, 2, 3)
    before = everything(*other)
    step(*other)
    after = everything(*other)
    model, optimizer = trained(kind, 2, 3)
    refused = 0
    for where, bad in mutants(whole):
        error = error_of(lambda own=optimizer, bad=bad: own.load_state_dict(bad))
        if error is None:
            model, optimizer = trained(kind, 2, 3)
            continue
        refused += 1
        assert type(error) is ValueError, where
        assert same(everything(model, optimizer), before), where
        if refused % 50 == 1:  # a step takes long
            step(model, optimizer)
            assert same(everything(model, optimizer), after), where
            model, optimizer = trained(kind, 2, 3)
    assert refused > 100


@pytest.mark.filterwarnings("ignore")
def test_an_interrupt_of_loading_leaves_all_as_it_was(monkeypatch):
    whole = trained("msgd", 1, 5)[1].state_dict()
    model, optimizer = trained("msgd", 2, 3)
    before = everything(model, optimizer)

    def interrupted(*_):
        raise KeyboardInterrupt

    for name in ("_conform", "_write_as_saved", "_observe_next", "__setstate__"):
        with monkeypatch.context() as patch:
            patch.setattr(marvin.MSGD, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.load_state_dict(whole)
        assert same(everything(model, optimizer), before), name
    optimizer.load_state_dict(whole)
    assert same(optimizer.state_dict(), whole)


def test_a_state_that_does_not_load_takes_parameters_from_no_other_optimizer():
    model = nn.Linear(4, 3)
    old = marvin.MSGD(model.named_parameters())
    new = marvin.MSGD(model.named_parameters())
    bad = put(old.state_dict(), ("param_groups", 0, "seed"), "abc")
    with pytest.raises(ValueError, match="does not load"):
        old.load_state_dict(bad)
    assert owner_of(model.weight) is new
