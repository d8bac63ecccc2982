"""Optimizers of other packages that take on the class of the one they wrap."""

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import marvin
from fixedpoint_kernels import Minifloat, quantize
from marvin.wrappers import unwrapped
from tests.same import assert_same


def by_hand(optimizer) -> Any:
    """As Lightning and Fabric do: reads go to the optimizer, writes stay."""

    class Wrapper:
        def __init__(self, optimizer):
            self._optimizer = optimizer
            kind = type(optimizer)
            self.__class__ = type("Wrapped" + kind.__name__, (Wrapper, kind), {})

        @property
        def optimizer(self):
            return self._optimizer

        def __getattr__(self, name):
            return getattr(self._optimizer, name)

    return Wrapper(optimizer)


def lightning(optimizer):
    module = pytest.importorskip("lightning.pytorch.core.optimizer")
    return module.LightningOptimizer(optimizer)


def fabric(optimizer):
    fabric = pytest.importorskip("lightning.fabric")
    return fabric.Fabric(accelerator="cpu", devices=1).setup_optimizers(optimizer)


WRAPPERS = {
    "by hand": by_hand,
    "two": lambda optimizer: by_hand(by_hand(optimizer)),
    "lightning": lightning,
    "fabric": fabric,
}


def muppet(model):
    policy = marvin.MuppetPolicy(levels=(32,), epochs_per_lr=2)
    return marvin.Quantized(torch.optim.Adam(model.named_parameters(), lr=0.01), policy)


def msgd(model):
    return marvin.MSGD(model.named_parameters(), lr=0.05, lookback=(2, 5), resolution=(10, 20))


def setup(make=msgd):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    return model, make(model)


def train(model, optimizer, steps, first=0):
    for i in range(first, first + steps):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())
        loss.backward()
        optimizer.step(loss=loss)


@pytest.fixture(params=WRAPPERS)
def wrap(request):
    return WRAPPERS[request.param]


def test_epochs_reach_the_policy(wrap):
    model, own = setup(muppet)
    wrapper = wrap(own)
    for _ in range(6):
        train(model, own, 1)
        wrapper.end_epoch()
    assert own.shared.epoch == wrapper.shared.epoch == 6
    assert own.should_stop
    assert wrapper.should_stop
    assert own.lr_scale == wrapper.lr_scale < 1
    assert own.param_groups[0]["lr"] == pytest.approx(0.01 * own.lr_scale)


@pytest.mark.parametrize("make", [msgd, muppet])
def test_states_are_those_of_the_optimizer(wrap, make):
    model, own = setup(make)
    train(model, own, 4)
    wrapper = wrap(own)
    saved = wrapper.state_dict()
    assert_same(saved, own.state_dict())
    assert wrapper.state_bytes() == own.state_bytes()
    assert repr(wrapper) == repr(own)
    other, its = setup(make)
    train(other, its, 1)
    wrap(its).load_state_dict(saved)
    train(model, own, 3, first=4)
    train(other, its, 3, first=4)
    assert_same(its.state_dict(), own.state_dict())
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


def test_groups_come_to_the_optimizer(wrap):
    model, own = setup()
    train(model, own, 2)
    new = nn.Linear(3, 3)
    model.append(new)
    wrapper = wrap(own)
    wrapper.add_param_group({"params": new.named_parameters(prefix="3")})
    wrapper.adopt_weights()
    before = new.weight.clone()
    train(model, own, 2)
    assert own.layers() == ["0.weight", "2.weight", "3.weight"]
    assert not torch.equal(new.weight, before)


def test_attributes_are_set_on_the_optimizer(wrap):
    _, own = setup()
    wrapper = wrap(own)
    wrapper.param_groups = [{**group, "lr": 0.5} for group in own.param_groups]
    assert own.param_groups[0]["lr"] == 0.5
    wrapper.shared = own.shared
    wrapper.of_the_wrapper = 3
    assert "shared" not in vars(wrapper)
    assert not hasattr(own, "of_the_wrapper")
    with pytest.raises(AttributeError, match="keeps its policy, MarvinPolicy"):
        wrapper.policy = marvin.FixedPolicy(8, 4)


def test_functions_of_an_optimizer_take_its_wrapper(wrap):
    model, own = setup()
    wrapper = wrap(own)
    marvin.quantize_activations(model, wrapper)
    train(model, own, 1)
    number = Minifloat(5, 2)
    marvin.round_state(wrapper, momentum=number)
    train(model, own, 2)
    momenta = [s["momentum_buffer"] for s in own.optimizer.state.values()]
    assert momenta
    for x in momenta:
        assert_same(x, quantize(x, number, rounding="nearest"))
    stored = marvin.store_codes(model, wrapper)
    assert own.stored == (stored,)
    stored.remove()
    assert own.stored == ()


def test_a_wrapper_without_a_step_of_its_own_steps_the_optimizer():
    model, own = setup()
    train(model, by_hand(own), 3)
    other, its = setup()
    train(other, its, 3)
    assert_same(own.state_dict(), its.state_dict())
    assert_same(dict(model.state_dict()), dict(other.state_dict()))


def test_methods_keep_their_signature():
    assert [*inspect.signature(marvin.Quantized.step).parameters] == ["self", "closure", "loss"]
    _, own = setup()
    assert unwrapped(own) is own
    assert unwrapped(by_hand(by_hand(own))) is own


def test_accelerate_leads_to_the_optimizer():
    accelerate = pytest.importorskip("accelerate")
    model, own = setup(muppet)
    wrapper = accelerate.Accelerator(cpu=True).prepare(own)
    train(model, own, 2)
    saved = wrapper.state_dict()
    assert_same(saved, own.state_dict())
    train(model, own, 1)
    wrapper.load_state_dict(saved)
    assert_same(own.state_dict(), saved)
    wrapper.optimizer.end_epoch()
    assert own.shared.epoch == 1
    wrapper.param_groups = [{**group, "lr": 0.5} for group in own.param_groups]
    assert own.param_groups[0]["lr"] == 0.5
