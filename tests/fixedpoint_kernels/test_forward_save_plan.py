"""Bits for each layer, within a budget."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from fixedpoint_kernels import few_bit, forward_save
from fixedpoint_kernels.forward_save import measure, sample


class Model(nn.Module):
    """A perceptron whose hidden vector a product keeps too."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.first = nn.Linear(64, 64)
        self.smooth = nn.GELU()
        self.step = nn.ReLU()
        self.second, self.third = nn.Linear(64, 64), nn.Linear(64, 64)
        self.noisy = nn.Dropout(0.5)

    def forward(self, x):
        x = self.step(self.smooth(self.first(self.norm(x))))
        return (self.noisy(self.second(x)) * self.third(x)).sum(1)


@pytest.fixture
def model():
    torch.manual_seed(1)
    return Model()


@pytest.fixture
def x():
    return torch.randn(128, 64)


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch):
    """Let nothing take time, so that errors alone decide."""
    monkeypatch.setattr(measure, "RUNS", 1)
    monkeypatch.setattr(measure, "seconds", lambda run, device: (run(), 0.0)[1])


N = 128 * 64
WHOLE = 4 * N
ALWAYS = 2 * WHOLE + 2 * 4 * 128  # both factors of the product, and the statistics of the norm


def kept(model, x):
    return sample.observe(model, x).size_bytes


def test_without_need_nothing_changes(model, x):
    plan = forward_save.plan(model, x, budget_bytes=10**9)
    # x; first's input; GELU's; what ReLU, second and third keep; dropout's noise
    assert plan.exact_bytes == plan.predicted_bytes == ALWAYS + 5 * WHOLE == kept(model, x)
    assert plan.error == 0
    assert {row.keeps for row in plan.layers} == {"whole tensors"}
    with pytest.raises(ValueError, match="must have a layer to convert"):
        forward_save.convert(model, plan=plan)


def test_exact_savings_come_first(model, x):
    plan = forward_save.plan(model, x, budget_bytes=ALWAYS + 5 * WHOLE - 1)
    assert plan.error == 0
    rows = {row.layer: row.keeps for row in plan.layers}
    assert rows.pop("noisy") == "1 bit an element"
    assert set(rows.values()) == {"whole tensors"}


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5, 0.41])
def test_predicted_bytes_are_kept(model, x, share):
    budget = int(share * kept(model, x))
    plan = forward_save.plan(model, x, budget_bytes=budget)
    assert plan.predicted_bytes <= budget
    forward_save.convert(model, plan=plan)
    assert kept(model, x) == plan.predicted_bytes


def test_less_bytes_more_error(model, x):
    budgets = [int(share * kept(model, x)) for share in (0.9, 0.7, 0.5, 0.41)]
    errors = [forward_save.plan(model, x, budget_bytes=b).error for b in budgets]
    assert errors == sorted(errors)
    assert errors[0] < errors[-1]


def test_layers_that_keep_one_tensor_change_together(model, x):
    plan = forward_save.plan(model, x, budget_bytes=int(0.45 * kept(model, x)))
    settings = {row.layer: row.settings for row in plan.layers}
    assert settings["step"] == settings["second"] == settings["third"] != (None, None)


def test_estimates_fall_with_bits(model, x):
    smallest = forward_save.plan(model, x, budget_bytes=10**9).smallest_bytes
    plan = forward_save.plan(model, x, budget_bytes=smallest)
    assert plan.predicted_bytes == smallest
    errors = {row.layer: row.error for row in plan.layers}
    assert errors["step"] == errors["noisy"] == 0
    assert min(errors["smooth"], errors["norm"], errors["first"]) > 0.01


def test_errors_are_those_of_the_whole_gradient(model, x, monkeypatch):
    """An oracle of its own: the model with a few-bit GELU in its place."""

    def gradient(model):
        torch.set_rng_state(noise)
        found = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        return torch.cat([g.flatten() for g in found])

    budget, noise = kept(model, x) - WHOLE // 2, torch.get_rng_state()
    plan = forward_save.plan(
        model, x, budget_bytes=budget, choices=["few_bit"], loss=lambda out: out.square().sum()
    )
    (row,) = (row for row in plan.layers if row.layer == "smooth")
    few = copy.deepcopy(model)
    few.smooth = few_bit.GELU(bits=row.settings[0].bits)
    want = gradient(model)
    error = (gradient(few) - want).norm() / want.norm()
    assert plan.gradient_error == pytest.approx(float(error), rel=1e-4)  # float32 sums
    # at 3 bits it is measured, at others scaled by the squared error of the derivative
    assert row.error**0.5 == pytest.approx(float(error), rel=0.5)


def test_a_budget_too_small_says_how_much_is_needed(model, x):
    smallest = forward_save.plan(model, x, budget_bytes=10**9).smallest_bytes
    with pytest.raises(ValueError, match=f"must be at least {smallest:,}, .* got {smallest - 1:,}"):
        forward_save.plan(model, x, budget_bytes=smallest - 1)


def test_the_model_is_left_as_it_was(model, x):
    model.norm.register_forward_hook(lambda *_: pytest.fail("a hook was called"))
    before = [{n: id(v) for n, v in vars(m).items()} for m in model.modules()]
    state, noise = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    forward_save.plan(model, x, budget_bytes=int(0.5 * 9 * WHOLE))
    assert [{n: id(v) for n, v in vars(m).items()} for m in model.modules()] == before
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    torch.testing.assert_close(torch.get_rng_state(), noise, rtol=0, atol=0)


def test_a_plan_for_another_model_names_the_layer(model, x):
    plan = forward_save.plan(model, x, budget_bytes=int(0.5 * kept(model, x)))
    with pytest.raises(ValueError, match="layer 'norm' must be LayerNorm, got no such layer"):
        forward_save.convert(nn.Sequential(nn.GELU()), plan=plan)
    model.third = nn.Bilinear(1, 1, 1)
    with pytest.raises(ValueError, match="layer 'third' must be Linear, got Bilinear"):
        forward_save.convert(model, plan=plan)


def test_what_a_plan_needs(model, x):
    with pytest.raises(ValueError, match="in training mode, got eval"):
        forward_save.plan(model.eval(), x, budget_bytes=1)
    model.train()
    with pytest.raises(ValueError, match="block must be"):
        forward_save.plan(model, x, budget_bytes=1, block=0)
    plan = forward_save.plan(model, x, budget_bytes=int(0.5 * kept(model, x)))
    with pytest.raises(ValueError, match="or a plan alone"):
        forward_save.convert(model, plan=plan, few_bit=3)
    forward_save.convert(model, few_bit=3)
    with pytest.raises(ValueError, match="got layer 'smooth' converted"):
        forward_save.plan(model, x, budget_bytes=10**9)


def test_it_prints(model, x):
    plan = forward_save.plan(model, x, budget_bytes=int(0.5 * kept(model, x)))
    lines = str(plan).splitlines()
    assert lines[0].startswith(f"{plan.predicted_bytes:,} bytes of {plan.exact_bytes:,}")
    assert lines[1].startswith(f"peak of a step {plan.peak_bytes:,} bytes of")
    assert [line.split()[0] for line in lines[2:]] == [row.layer for row in plan.layers]
    assert "GELU" in lines[4]
    assert str(dataclasses.replace(plan, layers=plan.layers[:1]))


def test_a_layer_called_twice_ties_what_shares_its_inputs(x):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
            self.both = nn.Linear(64, 64)

        def forward(self, x):
            y, z = x + 1, x - 1
            return self.a(y) + self.both(y) + self.b(z) + self.both(z)

    torch.manual_seed(0)
    model = Twice()
    plan = forward_save.plan(model, x, budget_bytes=kept(model, x) - 1)
    assert len({row.settings for row in plan.layers}) == 1  # one alone would save nothing
    forward_save.convert(model, plan=plan)
    assert kept(model, x) == plan.predicted_bytes


def test_more_choices_never_need_more_bytes():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            parts = nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)
            self.inner = nn.Sequential(*parts)

        def forward(self, x):
            return x + self.inner(x)

    model = nn.Sequential(nn.Linear(32, 32), Residual(), Residual(), nn.Linear(32, 4))
    x, loose = torch.randn(256, 32), 10**9
    least = {
        choices: forward_save.plan(model, x, budget_bytes=loose, choices=choices).smallest_bytes
        for choices in (("few_bit", "division"), ("recompute",), forward_save.CHOICES)
    }
    few = least["few_bit", "division"]
    assert least[forward_save.CHOICES] <= min(least.values()) == few < least["recompute",]
    plan = forward_save.plan(model, x, budget_bytes=few, choices=forward_save.CHOICES)
    assert plan.predicted_bytes <= few
    with pytest.raises(ValueError, match=f"at least {least[forward_save.CHOICES]:,}, .* found"):
        forward_save.plan(model, x, budget_bytes=1, choices=forward_save.CHOICES)
