"""Plans that may compile the model, and models that convert compiles."""

import copy
import dataclasses
import json
import pickle
import shutil
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from fixedpoint_kernels import forward_save
from fixedpoint_kernels.few_bit import solver
from fixedpoint_kernels.forward_save import compare, compiling, measure, sample, swap
from perfmodel import trial

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"  # Dynamo's
)
BITS = "few_bit", "division"
ALL = *BITS, "compile"


@pytest.fixture(autouse=True)
def no_code(monkeypatch):
    """Let the backend partition graphs, and run them by torch's operators; and try few budgets."""
    monkeypatch.setattr(compiling, "GRID", 2)
    monkeypatch.setattr(measure, "RUNS", 1)
    monkeypatch.setattr(compiling, "BACKEND", compiling.SEARCH)


class Net(nn.Sequential):
    def __init__(self, *last):
        part = lambda n: (nn.Conv2d(n, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU())  # noqa: E731
        pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
        super().__init__(*part(3), *part(8), *pooled, *last)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net().to(memory_format=torch.channels_last)


@pytest.fixture
def x():
    return torch.randn(8, 3, 16, 16).contiguous(memory_format=torch.channels_last)


@pytest.fixture
def times(monkeypatch):
    """Say what a step takes: of the plain model, the plan, the compiled one, the compiled plan."""
    found = {"plain": 1.0, "plan": 1.0, "compiled": 1.0, "compiled plan": 1.0}

    def seconds(run, device):
        run()
        made = run.args[0]
        if not isinstance(made, nn.Module):
            return 0.0
        is_plan = any(map(swap.is_converted, made.modules()))
        is_compiled = isinstance(made, compiling.Compiled)
        return found[
            ("compiled plan" if is_plan else "compiled")
            if is_compiled
            else "plan"
            if is_plan
            else "plain"
        ]

    monkeypatch.setattr(measure, "seconds", seconds)
    return found


def half(model, x):
    return sample.kept_bytes(model, x) // 2


def step(model, x):
    out = model(x)
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    return torch.autograd.grad((out * weights).sum(), list(model.parameters()))


def budgeted(memory_budget, layers=()):
    return forward_save.Plan(layers, 0, 0, 0, memory_budget=memory_budget)


def converted(model, memory_budget):
    made = copy.deepcopy(model)
    forward_save.convert(made, plan=budgeted(memory_budget))
    return made


def kept_after_a_step(model, x):
    step(model, x)
    return sample.kept_bytes(model, x)


def test_bytes_of_a_model_that_is_not_compiled_are_those_observed(model, x):
    assert sample.kept_bytes(model, x) == sample.observe(model, x).size_bytes


def test_the_largest_budget_within_the_bytes_is_taken(model, x, times, monkeypatch):
    monkeypatch.setattr(compiling, "GRID", 4)
    times["compiled"] = 0.5
    most = half(model, x)
    plan = forward_save.plan(model, x, budget_bytes=most, choices=ALL)
    assert plan.predicted_bytes <= most
    assert not any(row.is_changed for row in plan.layers)
    assert (plan.step_s, plan.peak_bytes) == (0.5, 0)
    assert plan.gradient_error < 1e-4  # sums in another order
    next_larger = plan.memory_budget + 1 / compiling.GRID
    assert kept_after_a_step(compiling.Compiled(model, next_larger), x) > most
    report = forward_save.convert(model, plan=plan)
    assert report.memory_budget == plan.memory_budget
    assert f"activation_memory_budget {plan.memory_budget:.4g}" in str(report)
    assert kept_after_a_step(model, x) == plan.predicted_bytes


def test_the_plan_is_compiled_where_that_is_fastest(model, x, times):
    times["compiled plan"] = 0.5
    most = half(model, x)
    plan = forward_save.plan(model, x, budget_bytes=most, choices=ALL)
    assert plan.memory_budget == 1
    assert any(row.is_changed for row in plan.layers)
    assert plan.gradient_error > 1e-4
    forward_save.convert(model, plan=plan)
    assert kept_after_a_step(model, x) == plan.predicted_bytes <= most


def test_a_compiled_plan_that_keeps_too_much_is_left_out(model, x, times, monkeypatch):
    times["compiled plan"] = 0.5
    most, count = half(model, x), sample.kept_bytes
    monkeypatch.setattr(
        sample, "kept_bytes", lambda made, x: count(made, x) + (made.memory_budget == 1) * most
    )
    plan = forward_save.plan(model, x, budget_bytes=most, choices=ALL)
    assert plan.candidates[-1].left_out == f"more than {most:,}"
    assert plan.memory_budget != 1


def test_noise_is_counted_as_time(model, x, times):
    most = half(model, x)
    error = forward_save.plan(model, x, budget_bytes=most, choices=BITS).gradient_error
    times["compiled plan"] = 10
    for share, memory_budget in [(0.5, True), (2, False)]:
        times["compiled"] = 1 + share * error**2
        plan = forward_save.plan(model, x, budget_bytes=most, choices=ALL)
        assert (plan.memory_budget is not None) == memory_budget


def test_it_prints_what_each_candidate_takes(model, x, times):
    times["compiled"] = 0.5
    most = half(model, x)
    plan = forward_save.plan(model, x, budget_bytes=most, choices=ALL)
    text = str(plan)
    assert f"compiled by torch.compile with activation_memory_budget {plan.memory_budget}" in text
    assert "peak of a step not counted" in text
    exact, planned, compiled, both = text.splitlines()[-4:]
    assert f"the model as it is: {plan.exact_bytes:,} bytes, left out: more than {most:,}" in exact
    assert "the plan: " in planned
    assert "1.00 of the time, error 0." in planned
    assert f"compiled with memory budget {plan.memory_budget}: {plan.predicted_bytes:,}" in compiled
    assert compiled.endswith("; taken")
    assert "the plan, compiled with memory budget 1: " in both
    assert text.count("taken") == 2


def test_compile_alone(model, x, times):
    most = half(model, x)
    plan = forward_save.plan(model, x, budget_bytes=most, choices="compile")
    assert plan.layers == ()
    assert plan.predicted_bytes <= most
    with pytest.raises(ValueError, match="budget_bytes must be at least") as error:
        forward_save.plan(model, x, budget_bytes=1, choices=["compile"])
    assert "the model as it is, compiled: more than 1" in str(error.value)
    least = int(str(error.value).split()[5].strip(",").replace(",", ""))
    plan = forward_save.plan(model, x, budget_bytes=least, choices=["compile"])
    assert plan.predicted_bytes == plan.smallest_bytes == least
    loose = forward_save.plan(model, x, budget_bytes=10**9, choices=["compile"])
    assert loose.memory_budget is None  # as fast without
    times["compiled"] = 0.9
    loose = forward_save.plan(model, x, budget_bytes=10**9, choices=["compile"])
    assert loose.memory_budget == 1


def test_compile_is_found_where_bits_are_not_enough(x, times):
    """Products keep whole tensors: bits save nothing, and a budget does."""

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.act = nn.Linear(64, 64), nn.GELU()

        def forward(self, x):
            y = self.act(self.first(x))
            for _ in range(4):
                y = y * y.sin()
            return y

    torch.manual_seed(0)
    model, x = Product(), torch.randn(64, 64)
    smallest = forward_save.plan(model, x, budget_bytes=10**9).smallest_bytes
    plan = forward_save.plan(model, x, budget_bytes=smallest - 1, choices=ALL)
    assert plan.memory_budget is not None
    assert plan.predicted_bytes == plan.smallest_bytes < smallest
    nothing = nn.Sequential(nn.Softmax(1))
    nothing.scale = nn.Parameter(torch.ones(1))
    nothing.forward = lambda x: x.softmax(1) * nothing.scale.exp()
    assert forward_save.plan(nothing, x, budget_bytes=10**9, choices=["few_bit", "compile"])


def broken(*_):
    raise RuntimeError("no compiler\nat all")


def test_what_does_not_compile_is_named(model, x, times, monkeypatch):
    most = half(model, x)
    want = forward_save.plan(model, x, budget_bytes=most, choices=BITS)
    monkeypatch.setattr(compiling, "compiled_graph", broken)
    plan = forward_save.plan(model, x, budget_bytes=most, choices=ALL)
    assert (plan.memory_budget, plan.layers) == (None, want.layers)
    assert plan.peak_bytes == want.peak_bytes
    for name in ("the model as it is, compiled", "the plan, compiled"):
        why = "left out: it does not compile: RuntimeError: no compiler\n"
        assert f"  {name}: {why}" in f"{plan}\n"
    with pytest.raises(ValueError, match=r"at least [\d,]+, .*; the model as it is, compiled: it "):
        forward_save.plan(model, x, budget_bytes=most, choices="compile")
    forward_save.convert(model, plan=plan)
    assert not compiling.is_compiled(model)


def test_graphs_that_break_are_named(x, times):
    class Breaks(nn.Module):
        def forward(self, x):
            torch._dynamo.graph_break()
            return x

    torch.manual_seed(0)
    model = Net(Breaks())
    plan = forward_save.plan(model, x, budget_bytes=half(model, x), choices=ALL)
    assert plan.memory_budget is None
    assert "left out: it does not compile: Unsupported: Call to `torch._dynamo.graph_break" in str(
        plan
    )


def test_errors_of_models_that_draw_are_those_of_their_parts(x, times):
    torch.manual_seed(0)
    model = Net(nn.Dropout(0.5)).to(memory_format=torch.channels_last)
    assert sample.draws_random_numbers(model, x)
    assert not sample.draws_random_numbers(Net(), x)
    times.update({"compiled": 0.5})
    plan = forward_save.plan(model, x, budget_bytes=half(model, x), choices=ALL)
    _, planned, compiled, both = plan.candidates
    assert plan.gradient_error == compiled.gradient_error == 0
    assert planned.gradient_error == both.gradient_error > 0
    assert compiled.note == both.note == compare.DRAWS
    assert compare.DRAWS in str(plan)


def test_what_is_refused(model, x):
    for limits in ({"peak_bytes": 10**6}, {"peak_bytes": 10**6, "budget_bytes": 10**6}):
        with pytest.raises(ValueError, match=r"'compile' needs budget_bytes alone.*=1000000"):
            forward_save.plan(model, x, choices=ALL, **limits)
    in_place = copy.deepcopy(model)
    in_place.compile(backend="eager")
    for compiled in (in_place, torch.compile(model, backend="eager")):
        with pytest.raises(ValueError, match="needs a model that is not compiled"):
            forward_save.plan(compiled, x, budget_bytes=10**6, choices=ALL)
        with pytest.raises(ValueError, match="must not be compiled yet"):
            forward_save.convert(compiled, plan=budgeted(0.5))
    forward_save.convert(model, plan=budgeted(0.5))
    for asked in ({"plan": budgeted(0.5)}, {"few_bit": 3}):
        with pytest.raises(ValueError, match="revert first"):
            forward_save.convert(model, **asked)
    assert "compile" not in forward_save.CHOICES


def test_the_largest_batch_is_not_looked_for_by_a_plan_that_compiles(model, tmp_path):
    budgeted(0.5).save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match="compiles the model"):
        trial.convert(model, str(tmp_path / "plan.json"))


def test_the_model_is_left_as_it_was(model, x, times):
    before = [{n: id(v) for n, v in vars(m).items()} for m in model.modules()]
    state, noise = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    forward_save.plan(model, x, budget_bytes=half(model, x), choices=ALL)
    assert [{n: id(v) for n, v in vars(m).items()} for m in model.modules()] == before
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    torch.testing.assert_close(torch.get_rng_state(), noise, rtol=0, atol=0)


def test_it_is_written_and_read(model, x, times, tmp_path):
    times["compiled"] = 0.5
    plan = forward_save.plan(model, x, budget_bytes=half(model, x), choices=ALL)
    file = tmp_path / "plan.json"
    plan.save(file)
    assert forward_save.Plan.load(file) == plan
    text = file.read_text()
    for value in ("2", "-0.5", "NaN", '"much"'):
        old = f'"memory_budget": {plan.memory_budget},\n "candidates"'
        assert old in text
        file.write_text(text.replace(old, old.replace(str(plan.memory_budget), value)))
        with pytest.raises(ValueError, match="memory_budget must be"):
            forward_save.Plan.load(file)
    record = json.loads(text)
    del record["memory_budget"], record["candidates"]  # as before there were any
    file.write_text(json.dumps(record))
    old = forward_save.Plan.load(file)
    assert old == dataclasses.replace(plan, memory_budget=None, candidates=())


def test_models_of_the_same_code_keep_their_own_budgets(model, x):
    plain = torch.compile(copy.deepcopy(model), backend=compiling.SEARCH, fullgraph=True)
    whole = kept_after_a_step(plain, x)
    made = [converted(model, step / 9) for step in range(10)]  # more than Dynamo lets share code
    found = [kept_after_a_step(one, x) for one in made]
    assert found == sorted(found)
    assert found[0] < found[5] < found[9] == whole
    assert kept_after_a_step(made[0], x[:5]) < kept_after_a_step(made[9], x[:5]) / 2  # anew
    assert [kept_after_a_step(one, x) for one in made] == found


def test_copies_and_pickles_are_compiled_and_reverting_undoes(model, x):
    want, names = step(model, x), [*vars(model)]
    exact = sample.kept_bytes(model, x)
    made = converted(model, 0.25)
    few = kept_after_a_step(made, x)
    assert few < exact / 2
    for one in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), made):
        assert compiling.is_compiled(one)
        assert [*one.state_dict()] == [*model.state_dict()]
        assert kept_after_a_step(one, x) == few
        # operators of another decomposition, in float32
        torch.testing.assert_close(step(one, x), want, rtol=1e-3, atol=1e-4)
        forward_save.revert(one)
        assert (type(one), [*vars(one)]) == (type(model), names)
        assert sample.kept_bytes(one, x) == exact
    with pytest.raises(ValueError, match="must have converted layers"):
        forward_save.revert(made)


def test_a_model_that_is_one_layer_is_converted_and_compiled():
    model, x = nn.Linear(64, 64), torch.randn(64, 64)
    exact = sample.kept_bytes(model, x)
    plan = forward_save.plan(model, x, budget_bytes=exact // 3, choices=["division"])
    report = forward_save.convert(model, plan=dataclasses.replace(plan, memory_budget=1.0))
    assert [row.layer for row in report.replaced] == [""]
    assert kept_after_a_step(model, x) == plan.predicted_bytes
    forward_save.revert(model)
    assert type(model) is nn.Linear
    assert not compiling.is_compiled(model)


def test_what_the_compiler_does_not_know_is_asked_outside(monkeypatch):
    """Torch 2.11's does not know ``is_autocast_available``."""
    unknown = torch.compiler.disable(torch.amp.is_autocast_available)
    monkeypatch.setattr(torch.amp, "is_autocast_available", unknown)
    test_a_model_that_is_one_layer_is_converted_and_compiled()


def test_eval_mode_and_no_gradients(model, x, times):
    plan = forward_save.plan(model, x, budget_bytes=half(model, x))
    made = copy.deepcopy(model)
    report = forward_save.convert(
        made, plan=dataclasses.replace(plan, memory_budget=1.0), sample_input=x
    )
    assert len(report.replaced) > 1
    assert {call.function for call in report.calls} >= {"conv2d"}
    found = []

    def run():  # in a thread, where nothing ran before
        made.train()
        step(made, x)
        with torch.no_grad():
            found.extend([made(x), made.eval()(x)])
        found.append(made(x).detach())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    model.load_state_dict(made.state_dict())
    want = model.eval()(x).detach()
    # the same operators but batch norm's decomposition, in float32
    torch.testing.assert_close(found[1:], [want, want], rtol=1e-4, atol=1e-5)


def test_another_number_of_threads_keeps_the_same(model, x):
    made, threads = converted(model, 0.5), torch.get_num_threads()
    want = kept_after_a_step(made, x)
    try:
        torch.set_num_threads(threads + 1)
        assert kept_after_a_step(made, x) == want
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_real_code_keeps_what_the_plan_says(model, x, monkeypatch):
    monkeypatch.setattr(compiling, "BACKEND", "inductor")
    most, want = half(model, x), step(model, x)
    plan = forward_save.plan(model, x, budget_bytes=most, choices=["compile"])
    assert 0 <= plan.memory_budget < 1
    assert plan.step_s > 0
    forward_save.convert(model, plan=plan)
    assert kept_after_a_step(model, x) == plan.predicted_bytes <= most
    # fused float32 kernels
    torch.testing.assert_close(step(model, x), want, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_a_missing_compiler_is_named(model, x, monkeypatch):
    from torch._functorch import config
    from torch._inductor import config as inductor

    monkeypatch.setattr(compiling, "BACKEND", "inductor")
    no_caches = config.patch(enable_autograd_cache=False)
    with no_caches, inductor.patch({"cpp.cxx": ("no-such-compiler",), "fx_graph_cache": False}):
        plan = forward_save.plan(model, x, budget_bytes=10**9, choices=["compile"])
    assert plan.memory_budget is None
    assert "compiled: left out: it does not compile: InvalidCxxCompiler: No working C++" in str(
        plan
    )


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.down(F.gelu(self.up(x))) * x


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's, of its input
@pytest.mark.parametrize("is_converted", [True, False])
def test_a_part_that_is_compiled_is_one_graph_inside_of_a_scope(is_converted):
    torch.compiler.reset()
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), Gate(), nn.Tanh()), torch.randn(256, 64)
    want, settings = model(x), {"few_bit": 3, "division": True}
    scope, graphs = forward_save.saving(**settings), CompileCounterWithBackend("aot_eager")
    if is_converted:
        forward_save.convert(model, **settings)
    model[1].compile(fullgraph=True, backend=graphs)
    with nullcontext() if is_converted else scope:
        got = model(x)
        got.sum().backward()
    torch.testing.assert_close(got, want)
    assert graphs.frame_count == 1
    assert scope.handled == ({} if is_converted else {"linear": 1, "tanh": 1})


class Scaled(nn.Module):
    """Registered without a name: its table is solved for on its own forward."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return torch.tanh(x * self.scale)


@pytest.fixture
def registered(monkeypatch):
    known = forward_save.known
    monkeypatch.setattr(known, "_entries", {**known._entries})
    forward_save.register(Scaled, "activation")
    known._lookup.cache_clear()
    yield
    known._lookup.cache_clear()


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("most", [1, 8])
def test_compiled_modules_of_one_class_have_tables_of_their_own(most):
    """So they have where torch.compile has given up on their class."""
    torch.compiler.reset()
    x, found = torch.linspace(-3, 3, 977), []
    with torch._dynamo.config.patch(recompile_limit=most):
        for scale, bits in ((0.7, 2), (0.7, 3), (0.7, 4), (1.4, 2), (2.1, 2), (2.8, 2)):
            act = nn.Sequential(Scaled(scale))
            forward_save.convert(act, few_bit=bits)
            for run in (torch.compile(act, backend="eager"), act):
                z = x.clone().requires_grad_()
                run(z).sum().backward()
                found.append(z.grad)
            assert torch.equal(*found[-2:])


@pytest.mark.usefixtures("registered")
def test_torch_compile_does_not_look_into_how_tables_are_solved_for(monkeypatch):
    """Where it gave up on a module it compiles what that calls: NumPy too, which ends in an error."""
    optimum, callbacks = solver._optimum, []

    def watched(*args):
        callbacks.append(torch._C._dynamo.eval_frame.get_eval_frame_callback())
        return optimum(*args)

    monkeypatch.setattr(solver, "_optimum", watched)
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        for scale in (0.123, 0.234):
            act = nn.Sequential(Scaled(scale))
            forward_save.convert(act, few_bit=2)
            torch.compile(act, backend="eager")(torch.ones(300, requires_grad=True))
    assert callbacks == [None, None]
