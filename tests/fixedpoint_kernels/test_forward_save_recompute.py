"""Blocks that run again in the backward pass, and plans that choose them."""

import copy
import importlib
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from fixedpoint_kernels import forward_save
from fixedpoint_kernels.forward_save import checkpoint, ledger, measure, peak, sample, search

planner = importlib.import_module("fixedpoint_kernels.forward_save.plan")  # not the function
N = 128 * 64
WHOLE = 4 * N


class Block(nn.Module):
    """Keeps its input three times over; has statistics, noise, and arguments by keyword."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)
        self.smooth, self.noisy = nn.GELU(), nn.Dropout(0.5)
        self.second = nn.Linear(64, 64)

    def forward(self, x, *, scale):
        y = self.noisy(self.smooth(self.norm(self.first(x))))
        return F.relu(self.second(y) * scale["by"] + x, inplace=True)


class Model(nn.Module):
    """Three blocks that share a tensor, and a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        scale = {"by": torch.full((1, 64), 0.5)}
        for block in self.blocks:
            x = block(x, scale=scale)
        return self.head(x)


@pytest.fixture
def model():
    torch.manual_seed(1)
    return Model()


@pytest.fixture
def x():
    return torch.randn(128, 64)


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch):
    """Layers and blocks cost what they are told to: a block's time is that of its layers."""

    def costs(model, inputs, layers, blocks):
        return ledger.Costs(dict.fromkeys(layers, 0.001), dict.fromkeys(blocks, 0.01), {})

    monkeypatch.setattr(measure, "costs", costs)
    monkeypatch.setattr(measure, "RUNS", 1)
    monkeypatch.setattr(measure, "seconds", lambda run, device: (run(), 0.1)[1])


def plan_again(model, x, *names):
    """Return a plan by which some blocks run again, and nothing else."""
    rows = tuple(
        forward_save.PlannedLayer(
            n, type(model.get_submodule(n)).__name__, "", 0.0, (None, None), "recompute"
        )
        for n in names
    )
    return forward_save.Plan(rows, 0, 0, 0)


def step(model, x):
    """Train a step by hand; return gradients, buffers and the random numbers after it."""
    torch.manual_seed(7)
    model.zero_grad()
    model(x).square().sum().backward()
    return (
        [p.grad.clone() for p in model.parameters()],
        {name: b.clone() for name, b in model.named_buffers()},
        torch.get_rng_state(),
    )


def test_gradients_statistics_and_random_numbers_are_torchs(model, x):
    exact = copy.deepcopy(model)
    forward_save.convert(model, plan=plan_again(model, x, "blocks.0", "blocks.2"))
    for _ in range(2):
        torch.testing.assert_close(step(model, x), step(exact, x), rtol=0, atol=0)


def test_blocks_run_again_with_the_tensors_of_a_functional_call(model, x):
    exact = copy.deepcopy(model)
    for own in (model, exact):
        for block in own.blocks:
            block.register_buffer("by", torch.ones(64))
            block.second.register_forward_hook(lambda layer, args, y, block=block: y * block.by)
    forward_save.convert(model, plan=plan_again(model, x, "blocks.0", "blocks.2"))
    found = []
    for own in (model, exact):
        torch.manual_seed(7)
        given = {name: (p.detach() / -2).requires_grad_() for name, p in own.named_parameters()}
        given |= {f"blocks.{i}.by": torch.full((64,), 3.0) for i in range(3)}
        before = [*own.parameters(), *own.buffers()]
        torch.func.functional_call(own, given, (x,)).square().sum().backward()
        after = [*own.parameters(), *own.buffers()]
        assert all(a is b for a, b in zip(before, after, strict=True))
        assert all(p.grad is None for p in own.parameters())
        found.append([p.grad for p in given.values()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_block_keeps_its_inputs_alone(model, x):
    # a block keeps x, norm's input and statistics, GELU's input, dropout's mask, second's input,
    # scale, and what relu gives: which is the next block's x
    block = 5 * WHOLE + 2 * 4 * 64
    scale = 4 * 64
    exact = sample.observe(model, x)
    assert exact.size_bytes == 3 * block + scale + WHOLE
    forward_save.convert(model, plan=plan_again(model, x, "blocks.0", "blocks.2"))
    assert sample.observe(model, x).size_bytes == block + scale + 3 * WHOLE
    assert (
        sample.observe(model.eval(), x).size_bytes == sample.observe(exact_of(model), x).size_bytes
    )


def exact_of(model):
    """Return a copy as it was before the conversion."""
    copied = copy.deepcopy(model)
    forward_save.revert(copied)
    return copied


def test_reverting_copies_and_pickles(model, x):
    kinds = [type(m) for m in model.modules()]
    keys = list(model.state_dict())
    report = forward_save.convert(model, plan=plan_again(model, x, "blocks.1"), sample_input=x)
    assert [row.layer for row in report.replaced] == ["blocks.1"]
    calls = {(c.layer, c.function): c.keeps for c in report.calls}
    assert calls["blocks.1.first", "linear"] == "nothing; runs again"
    assert calls["blocks.0.first", "linear"] == ""
    assert report.saves_nothing == ()
    want = sample.observe(model, x).size_bytes
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert sample.observe(other, x).size_bytes == want
    forward_save.revert(model)
    assert [type(m) for m in model.modules()] == kinds
    assert list(model.state_dict()) == keys


def test_no_block_is_in_another_and_none_is_the_model(model):
    assert checkpoint.blocks(model) == ["blocks.0", "blocks.1", "blocks.2"]
    nested = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU()), nn.GELU())
    assert checkpoint.blocks(nested) == ["0", "0.0"]
    attention = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8))
    assert checkpoint.blocks(attention) == ["0", "0.self_attn"]


def test_the_fewest_blocks_that_fit_run_again(model, x):
    exact = sample.observe(model, x).size_bytes
    saved = 4 * WHOLE + 2 * 4 * 64  # by one block
    for count in (1, 2, 3):
        plan = forward_save.plan(
            model, x, budget_bytes=exact - count * saved, choices=["recompute"]
        )
        assert [row.way for row in plan.layers] == ["recompute"] * count
        assert plan.error == plan.gradient_error == 0
        assert plan.exact_bytes - plan.predicted_bytes == count * saved
        forward_save.convert(model, plan=plan)
        assert sample.observe(model, x).size_bytes == plan.predicted_bytes
        forward_save.revert(model)
    with pytest.raises(ValueError, match=f"at least {exact - 3 * saved:,}"):
        forward_save.plan(model, x, budget_bytes=exact - 3 * saved - 1, choices=["recompute"])


@pytest.mark.parametrize("share", [0.8, 0.5, 0.3, 0.17])
def test_bits_and_blocks_together_keep_what_was_predicted(model, x, share):
    budget = int(share * sample.observe(model, x).size_bytes)
    plan = forward_save.plan(model, x, budget_bytes=budget, choices=forward_save.CHOICES)
    assert plan.predicted_bytes <= budget
    forward_save.convert(model, plan=plan)
    assert sample.observe(model, x).size_bytes == plan.predicted_bytes
    within = [row for row in plan.layers if "runs again" in row.keeps and not row.way]
    assert all(row.settings == (None, None) for row in within)


def costs_of(seconds, model, inputs, layers, blocks):
    return ledger.Costs(dict.fromkeys(layers, 0.0), dict.fromkeys(blocks, seconds), {})


def test_what_is_dear_is_not_chosen(model, x, monkeypatch):
    budget = int(0.6 * sample.observe(model, x).size_bytes)
    found = []
    for seconds in (0.0, 100.0):
        monkeypatch.setattr(measure, "costs", partial(costs_of, seconds))
        plan = forward_save.plan(model, x, budget_bytes=budget, choices=forward_save.CHOICES)
        found.append({row.way for row in plan.layers})
    assert found == [{"", "recompute"}, {""}]


def test_what_is_not_needed_is_taken_back(x, monkeypatch):
    """The narrow block is cheaper for a byte and comes first; the wide one is enough alone."""

    def costs(model, inputs, layers, blocks):
        return ledger.Costs({}, {"0": 0.001, "1": 0.01}, {})

    monkeypatch.setattr(measure, "costs", costs)
    wide = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Tanh(), nn.Linear(256, 64))
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Tanh()), wide)
    exact = sample.observe(model, x).size_bytes
    assert exact == (1 + 2 + 4 + 4) * WHOLE
    for budget, names in [(10 * WHOLE, ["0"]), (4 * WHOLE, ["1"]), (2 * WHOLE, ["0", "1"])]:
        plan = forward_save.plan(model, x, budget_bytes=budget, choices=["recompute"])
        assert [row.layer for row in plan.layers] == names


def test_errors_add_up_to_that_of_the_gradient(model, x, monkeypatch):
    """One draw of noise, many layers: their squares add, but for chance."""
    monkeypatch.setattr(planner, "LEVELS", ((3, 2),))
    monkeypatch.setattr(planner, "MEASURED", 0)
    exact = forward_save.plan(model, x, budget_bytes=10**9)
    plan = forward_save.plan(model, x, budget_bytes=exact.smallest_bytes)
    assert len({row.error for row in plan.layers if row.module == "Linear"}) > 3
    assert 0.8 < plan.error**0.5 / plan.gradient_error < 1.25


def test_the_peak_of_a_step_by_hand():
    x = torch.randn(64, 64, requires_grad=True)

    def run():
        y = x * 2  # 1 alive
        z = y.exp() + 1  # exp keeps its result: 3 at once, y is gone, then 2
        del y
        big = torch.zeros(64, 640)  # 10 more
        del big
        return z.view(-1)[:1]

    assert peak.peak_of(run, torch.device("cpu")) == 12 * 4 * 64 * 64
    with peak.LiveBytes() as live:
        kept = run()
        assert live.now == 2 * 4 * 64 * 64
        del kept
        assert live.now == 0


def test_a_limit_for_the_peak_holds_in_a_step(model, x):
    def peak_of(model):
        run = lambda: sample.gradients(model, x)  # noqa: E731
        return peak.peak_of(run, torch.device("cpu"))

    exact = peak_of(model)
    limit = int(0.75 * exact)
    plan = forward_save.plan(model, x, peak_bytes=limit, choices=["recompute"])
    assert plan.exact_peak_bytes == exact
    assert plan.peak_bytes <= limit
    forward_save.convert(model, plan=plan)
    assert peak_of(model) == plan.peak_bytes
    forward_save.revert(model)
    with pytest.raises(ValueError, match="peak_bytes must be at least") as error:
        forward_save.plan(model, x, peak_bytes=exact // 10, choices=["recompute"])
    least = int(str(error.value).split()[5].strip(",").replace(",", ""))
    assert forward_save.plan(model, x, peak_bytes=least, choices=["recompute"]).peak_bytes <= least
    loose = forward_save.plan(model, x, peak_bytes=exact, choices=["recompute"])
    assert not any(row.is_changed for row in loose.layers)
    both = forward_save.plan(
        model, x, peak_bytes=limit, budget_bytes=plan.predicted_bytes - 1, choices=["recompute"]
    )
    assert both.peak_bytes <= limit
    assert both.predicted_bytes < plan.predicted_bytes


def test_one_block_that_is_nearly_all_does_not_lower_the_peak(x):
    """What runs again is there as a whole: the outer block saves most bytes, and no peak."""
    torch.manual_seed(0)
    part = lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Tanh())  # noqa: E731
    model = nn.Sequential(nn.Sequential(*(part() for _ in range(6))), nn.Linear(64, 1))
    few = forward_save.plan(model, x, budget_bytes=3 * WHOLE, choices=["recompute"])
    assert [row.layer for row in few.layers] == ["0"]
    plan = forward_save.plan(model, x, peak_bytes=int(0.75 * few.peak_bytes), choices=["recompute"])
    assert plan.peak_bytes <= 0.75 * few.peak_bytes
    assert "0" not in [row.layer for row in plan.layers]


def test_the_first_that_fits_on_a_path():
    peaks = [90, 80, 85, 70, 60, 65, 40, 30, 35, 20, 10]
    for limit in (90, 84, 70, 62, 40, 10):
        state, _ = search.first_under(list(range(len(peaks))), peaks.__getitem__, limit)
        assert peaks[state] <= limit
        assert state == 0 or peaks[state - 1] > limit
    assert search.first_under(list(range(len(peaks))), peaks.__getitem__, 9) == (None, 10)
    assert search.first_under([], peaks.__getitem__, 9)[0] is None


def test_a_plan_is_written_and_read(model, x, tmp_path):
    budget = int(0.45 * sample.observe(model, x).size_bytes)
    plan = forward_save.plan(model, x, budget_bytes=budget, choices=["few_bit", "recompute"])
    plan.save(tmp_path / "plan.json")
    assert forward_save.Plan.load(tmp_path / "plan.json") == plan
    for text in ("", "[]", "{}", '{"version": 2}', '{"version": 1, "layers": []}', "[" * 10**5):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match=r"bad\.json must be a plan that save wrote"):
            forward_save.Plan.load(tmp_path / "bad.json")
    text = (tmp_path / "plan.json").read_text()
    for old, new in [('"recompute"', '"run"'), ('"error": 0.0', '"error": "much"')]:
        assert old in text
        (tmp_path / "bad.json").write_text(text.replace(old, new))
        with pytest.raises(ValueError, match="must be a plan"):
            forward_save.Plan.load(tmp_path / "bad.json")


def test_what_a_plan_needs(model, x):
    with pytest.raises(ValueError, match="budget_bytes, peak_bytes, or both, got neither"):
        forward_save.plan(model, x)
    for name in ("budget_bytes", "peak_bytes"):
        for value in (float("nan"), "12", -1):
            with pytest.raises(ValueError, match=f"{name} must be a number of bytes, .*{value}"):
                forward_save.plan(model, x, **{name: value})
    with pytest.raises(ValueError, match="division, recompute, offload, compile, got 'fast'"):
        forward_save.plan(model, x, budget_bytes=1, choices=["fast", "few_bit"])
    with pytest.raises(TypeError, match="got neither"):
        forward_save.plan(model, budget_bytes=1)
    with pytest.raises(TypeError, match="got both"):
        forward_save.plan(model, x, sample_args=(x,), budget_bytes=1)
    with pytest.raises(ValueError, match="a block to run again"):
        forward_save.plan(nn.Sequential(nn.Linear(64, 8)), x, budget_bytes=1, choices="recompute")
    with pytest.raises(ValueError, match="that needs a gradient, got Tensor; loss="):
        forward_save.plan(model.requires_grad_(False), x, budget_bytes=10**9)


def test_arguments_by_position_and_keyword(x):
    torch.manual_seed(0)
    model, by = Block(), {"scale": {"by": torch.ones(1, 64)}}
    plan = forward_save.plan(
        model, sample_args=(x,), sample_kwargs=by, budget_bytes=3 * WHOLE, loss=torch.sum
    )
    assert plan.predicted_bytes <= 3 * WHOLE


def test_compiled_without_a_break(model, x):
    names = ["blocks.0", "blocks.1", "blocks.2"]
    for block in model.blocks:
        block.noisy = nn.Identity()  # compiled code draws other numbers
    exact = copy.deepcopy(model)
    forward_save.convert(model, plan=plan_again(model, x, *names))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        got, want = step(compiled, x), step(exact, x)
        torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-4)  # sums in another order
        got = {name.removeprefix("_orig_mod."): b for name, b in got[1].items()}
        torch.testing.assert_close(got, want[1], rtol=1e-5, atol=1e-6)  # so are the statistics


def test_a_block_whose_input_is_written_to_afterwards_is_left_alone(x):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(64, 64)
            self.inner = nn.Sequential(nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
            self.last = nn.Sequential(nn.Linear(64, 64), nn.Tanh())

        def forward(self, x):
            x = self.first(x)
            y = self.inner(x)
            x += y
            return self.last(x)

    model = Writes()
    loose = forward_save.plan(model, x, budget_bytes=10**9, choices=["recompute"])
    assert loose.refused == (("inner", "its input is written to after it ran"),)
    few = {"budget_bytes": loose.smallest_bytes, "choices": ["recompute"]}
    plan = forward_save.plan(model, x, **few)
    assert [row.layer for row in plan.layers if row.is_changed] == ["last"]


class Moving(nn.Module):
    """Reads buffers that it moves: a centre in place, a step that it puts anew, a power iteration."""

    def __init__(self):
        super().__init__()
        self.first, self.last = spectral_norm(nn.Linear(64, 64)), nn.Linear(64, 64)
        self.register_buffer("centre", torch.zeros(64))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        y = self.first(x)
        with torch.no_grad():
            self.centre.lerp_(y.mean(0), 0.5)
        self.scale = self.scale * 1.5
        return x + self.last(torch.tanh((y - self.centre) * self.scale))


def test_a_block_finds_buffers_again_as_the_first_run_did(x):
    torch.manual_seed(0)
    exact = nn.Sequential(Moving(), nn.Tanh(), Moving())
    model = copy.deepcopy(exact)
    plan = forward_save.plan(model, x, budget_bytes=2 * WHOLE, choices=["recompute"])
    assert plan.refused == ()
    assert [row.way for row in plan.layers] == ["recompute"] * 2
    forward_save.convert(model, plan=plan)
    for _ in range(2):
        torch.testing.assert_close(step(model, x), step(exact, x), rtol=0, atol=0)
    found = []
    for one in (model, exact):  # both calls before the backward pass of the first
        first, second = one(x).square().sum(), one(-x).square().sum()
        found.append([torch.autograd.grad(y, list(one.parameters())) for y in (first, second)])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_plan_compares_runs_of_a_block_on_the_same_buffers(model, x, monkeypatch):
    monkeypatch.undo()  # the costs are measured
    block = Moving()
    found = measure.costs(nn.Sequential(block), x, {}, ["0"])
    assert found.refused == {}


def test_a_block_runs_as_often_as_it_is_differentiated(x):
    torch.manual_seed(0)
    exact = nn.Sequential(Moving(), nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)))
    model = copy.deepcopy(exact)
    forward_save.convert(model, plan=plan_again(model, x, "0", "1"))
    found = []
    for one in (model, exact):
        y, parameters = one(x).square(), list(one.parameters())
        grads = [
            torch.autograd.grad(y[:, 0].sum(), parameters[:2], retain_graph=True),
            torch.autograd.grad(y[:, 1].sum(), parameters),
        ]
        found.append((grads, dict(one.named_buffers())))
    torch.testing.assert_close(*found, rtol=0, atol=0)
