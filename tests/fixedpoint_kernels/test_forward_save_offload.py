"""Blocks whose tensors lie in the host's memory, and plans that choose them.

Here the tensors of a CPU go "to the host", too: into buffers, by the same code without streams.
"""

import copy
import dataclasses
import pickle
import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fixedpoint_kernels import forward_save
from fixedpoint_kernels.forward_save import ledger, measure, offload, sample

N = 128 * 64
WHOLE = 4 * N  # bytes
SMALL = 4 * 64  # means of a normalisation, or their inverse deviations
LARGEST_SMALL = 1024


class Block(nn.Module):
    """Keeps views of one memory; has statistics, noise, and a result that is written over."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(64, 192), nn.BatchNorm1d(64)
        self.smooth, self.noisy = nn.GELU(), nn.Dropout(0.5)
        self.second = nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.first(x).chunk(3, 1)
        y = self.noisy(self.smooth(self.norm(q * k + v * v)))
        return F.relu(self.second(y) + x, inplace=True)


class Model(nn.Module):
    """Three blocks and a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


NAMES = "blocks.0", "blocks.1", "blocks.2"


@pytest.fixture
def model():
    torch.manual_seed(1)
    return Model()


@pytest.fixture
def x():
    return torch.randn(128, 64)


@pytest.fixture
def counts(monkeypatch):
    """Tensors of a CPU go; count what is done."""
    found = Counter()

    def counted(owner, name):
        own = getattr(owner, name)

        def call(*args):
            found[name] += 1
            return own(*args)

        monkeypatch.setattr(owner, name, call)

    monkeypatch.setattr(offload, "DEVICE", "cpu")
    monkeypatch.setattr(offload, "LEAST_BYTES", LARGEST_SMALL + 1)
    monkeypatch.setattr(offload, "_HOSTS", {})
    for name in ("put", "get", "_begun"):
        counted(offload.Host, name)
    counted(offload, "_Buffer")
    return found


@pytest.fixture
def stopped_clock(monkeypatch):
    """Blocks cost what they are told to."""

    def costs(model, inputs, layers, blocks):
        return ledger.Costs(dict.fromkeys(layers, 0.001), dict.fromkeys(blocks, 0.01), {})

    monkeypatch.setattr(measure, "costs", costs)
    monkeypatch.setattr(measure, "offload_costs", lambda m, i, names: dict.fromkeys(names, 0.005))
    monkeypatch.setattr(measure, "RUNS", 1)
    monkeypatch.setattr(measure, "seconds", lambda run, device: (run(), 0.1)[1])


def plan_away(model, *names):
    """Return a plan that offloads some blocks, and nothing else."""
    rows = tuple(
        forward_save.PlannedLayer(
            n, type(model.get_submodule(n)).__name__, "", 0.0, (None, None), "offload"
        )
        for n in names
    )
    return forward_save.Plan(rows, 0, 0, 0)


def away(model, *names):
    forward_save.convert(model, plan=plan_away(model, *names))
    return model


def step(model, x):
    """Train a step by hand; return gradients, buffers and the random numbers after it."""
    torch.manual_seed(7)
    model.zero_grad()
    model(x).float().square().sum().backward()
    return (
        [p.grad.clone() for p in model.parameters()],
        {name: b.clone() for name, b in model.named_buffers()},
        torch.get_rng_state(),
    )


def assert_same(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("is_cast", [False, True])
def test_gradients_statistics_and_random_numbers_are_torchs(model, x, counts, is_cast):
    exact = copy.deepcopy(model)
    away(model, "blocks.0", "blocks.2")
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            assert_same(step(model, x), step(exact, x))
    assert counts["put"]


def test_each_memory_goes_once_and_comes_back_once(model, x, counts):
    away(model, "blocks.1")
    step(model, x)
    # x, first's output, norm's input, GELU's, dropout's mask, second's input, relu's output
    assert counts["put"] == counts["_begun"] == 7
    assert counts["get"] > 7  # the three views of first's output


def test_buffers_are_used_again(model, x, counts):
    away(model, *NAMES)
    for _ in range(3):
        step(model, x)
    assert counts["put"] == 3 * 3 * 7
    assert counts["_Buffer"] == 3 * 7
    (host,) = offload._HOSTS.values()
    assert sum(map(len, host._free.values())) == 3 * 7
    forward_save.revert(model)
    assert not host._free


def test_a_buffer_is_no_one_elses_while_it_is_needed(model, x, counts):
    exact = copy.deepcopy(model)
    away(model, *NAMES)
    losses = []
    for one in (model, exact):
        torch.manual_seed(3)
        losses.append(one(x).sum() + one(2 * x).sum())  # two passes before a backward pass
        one(3 * x)  # and one that has none
    for loss in losses:
        loss.backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in exact.parameters()])


def test_memory_that_is_used_again_is_not_taken_for_what_was_there(x, counts):
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Linear(1, 1)

        def forward(self, x):
            total = 0
            for power in range(1, 9):
                y = (x * power).sin() * self.scale.weight  # what is kept is free at once
                total = total + y.square().sum(1)
                del y
            return total

    outer = nn.Sequential(Many())
    exact = copy.deepcopy(outer)
    away(outer, "0")
    for one in (outer, exact):
        one(x).sum().backward()
    assert_same(outer[0].scale.weight.grad, exact[0].scale.weight.grad)
    assert counts["put"] == 8 * 2  # the sine and y


def test_a_backward_pass_may_run_twice_and_be_differentiated(x, counts):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)))
    exact = copy.deepcopy(model)
    away(model, "0")
    found = []
    for one in (model, exact):
        loss = one(x).square().sum()
        first = torch.autograd.grad(loss, [*one.parameters()], create_graph=True)
        again = torch.autograd.grad(loss, [*one.parameters()], retain_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), [*one.parameters()])
        found.append([*first, *again, *second])
    assert_same(*found)


def test_shapes_strides_and_parts_come_back(x, counts, monkeypatch):
    seen, sizes, own = [], [], offload.Host.put

    def put(host, flat):
        sizes.append(flat.numel())
        return own(host, flat)

    monkeypatch.setattr(offload.Host, "put", put)

    def views(x):
        rows = x[9, :4], x[9].expand(50, 64), x[70:90]
        return x.T, x[3:, ::2], x.double(), x[:, 5], *rows

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return sum(t.sum() for t in tensors)

        @staticmethod
        def backward(ctx, grad):
            seen.extend(ctx.saved_tensors)
            return tuple(grad.expand(t.shape) for t in ctx.saved_tensors)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Identity()

        def forward(self, x):
            x = self.part(x) * 1
            return Look.apply(*views(x))

    model = nn.Sequential(Block())
    away(model, "0")
    model(x.requires_grad_()).backward()
    for got, want in zip(seen, views(x.detach()), strict=True):
        assert got.stride() == want.stride()
        assert_same(got, want)
    # one memory in two precisions, and parts of it: a row, of which there is less too, and some
    assert sizes == [WHOLE, 2 * WHOLE, 4 * 4, 4 * 64, 20 * 4 * 64]
    assert counts["_begun"] == 5


def test_parameters_buffers_and_small_tensors_stay(x, counts):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(64, 64)
            self.register_buffer("mask", torch.ones(64, 64))

        def forward(self, x, weight):
            return F.linear(self.inner(x) @ self.mask, weight.T)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.weight = Block(), nn.Parameter(torch.randn(64, 64))

        def forward(self, x):
            return self.block(x, self.weight)

    model = away(Model(), "block")
    model(x).sum().backward()
    assert counts["put"] == 2  # the inputs of inner and of the last product
    counts.clear()
    model(x[:4].clone()).sum().backward()  # as small as what stays
    assert not counts["put"]


def test_sparse_tensors_stay(x, counts):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(64, 64)
            self.register_buffer("graph", torch.eye(128).to_sparse())

        def forward(self, x):
            return torch.sparse.mm(self.graph, self.inner(x))

    model = nn.Sequential(Block())
    model(x).sum().backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    away(model, "0")(x).sum().backward()
    assert_same([p.grad for p in model.parameters()], want)
    assert counts["put"] == 1


def test_a_parameter_that_was_written_to_is_an_error(x, counts):
    model = away(nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))), "0")
    loss = model(x).sum()
    with torch.no_grad():
        model[0][1].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_tensor_that_was_written_to_is_an_error(x, counts):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x):
            y = self.inner(x).exp()  # keeps its result
            return y.mul_(2)

    for model in (nn.Sequential(Block()), away(nn.Sequential(Block()), "0")):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(x).sum().backward()
    assert counts["put"] == 2


def test_copies_that_are_needed_next_begin_early(counts):
    host = offload.Host(torch.device("cpu"))
    bytes_ = [torch.full((100,), i, dtype=torch.uint8) for i in range(5)]
    handles = [host.put(one) for one in bytes_]
    for at, begun in [(4, 3), (3, 4), (2, 5), (1, 5), (0, 5)]:
        (want,) = set(bytes_[at].tolist())
        assert set(host.get(handles[at])[:100]) == {want}
        assert counts["_begun"] == begun


class Stream:
    """Writes down what a stream of a GPU is told."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event.name}")

    def record_event(self, event):
        event.name = f"event {sum('is event' in line for line in self.log)}"
        self.log.append(f"here {self.name} is {event.name}")

    def __enter__(self):
        self.log.append(f"{self.name}: copy")

    def __exit__(self, *_):
        pass


def test_streams_wait_for_each_other(monkeypatch):
    log, own = [], torch.empty
    now, out, back = (Stream(name, log) for name in ("now", "out", "back"))
    monkeypatch.setattr(torch.cuda, "Event", type("Event", (), {}))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **how: own(*size, **how))
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda t, stream: log.append(f"held for {stream.name}")
    )
    host = offload.Host(torch.device("cpu"))
    host._lanes = out, back

    def said():
        lines = [*log]
        log[:] = [line for line in log if "is event" in line]
        return [line for line in lines if line not in before]

    before = []
    first = host.put(torch.ones(100, dtype=torch.uint8))
    assert said() == ["out waits for now", "out: copy", "held for out", "here out is event 0"]
    before = [*log]
    second = host.put(torch.ones(100, dtype=torch.uint8))
    assert said() == ["out waits for now", "out: copy", "held for out", "here out is event 1"]
    before = [*log]
    host.get(second)
    assert said() == [
        *("back waits for now", "back waits for event 1", "back: copy", "here back is event 2"),
        *("now waits for event 2", "held for now"),
        *("back waits for now", "back waits for event 0", "back: copy", "here back is event 3"),
    ]
    before = [*log]
    del first  # which began early, and nobody asked for
    assert said() == ["held for back"]
    del second
    assert said() == []
    third = host.put(torch.ones(100, dtype=torch.uint8))  # into the buffer of the second
    assert said() == [
        *("out waits for now", "out waits for event 2", "out: copy", "held for out"),
        "here out is event 4",
    ]
    before = [*log]
    host.get(third)
    host.get(third)
    assert said() == [
        *("back waits for now", "back waits for event 4", "back: copy", "here back is event 5"),
        *("now waits for event 5", "held for now"),
        *("now waits for event 5", "held for now"),
    ]


def test_what_came_back_is_let_go_with_its_last_use(x, counts, monkeypatch):
    alive, own = [], offload.Host.put

    def put(host, flat):
        handle = own(host, flat)
        alive.append(weakref.ref(handle))
        return handle

    monkeypatch.setattr(offload.Host, "put", put)
    model = away(nn.Sequential(nn.Sequential(*(nn.Tanh() for _ in range(9)))), "0")
    x = x.requires_grad_() * 1
    seen = []
    x.register_hook(lambda grad: seen.append(sum(one() is not None for one in alive)))
    model(x).sum().backward()
    assert len(alive) == 9
    assert seen == [0]


def test_where_nothing_goes(model, x, counts):
    away(model, *NAMES)
    with torch.no_grad():
        model(x)
    checkpoint(model, x, use_reentrant=False).sum().backward()  # keeps nothing anyway
    for block in model.blocks:
        block.norm = nn.Identity()  # torch.func writes to no buffer
        block.noisy = nn.Identity()  # nor does it draw
    torch.func.grad(lambda x: model(x).sum())(x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(x).sum().backward()
    model.eval()(x).sum().backward()
    assert not counts


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_checkpoint_inside_of_a_block(model, x, counts, is_reentrant):
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            x = self.first(x).tanh()
            return checkpoint(lambda x: self.second(x).tanh(), x, use_reentrant=is_reentrant)

    for block in model.blocks:
        block.norm = Inside()
    exact = copy.deepcopy(model)
    away(model, *NAMES)
    assert_same(step(model, x), step(exact, x))


def test_others_hooks_get_what_stays(model, x, counts):
    away(model, *NAMES)
    seen = []

    def keep(tensor):
        seen.append(tensor.numel())
        return tensor.clone()

    exact = step(model, x)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: (seen.append(0), kept)[1]):
        assert_same(step(model, x)[0], exact[0])
    assert Counter(seen)[64] >= 3 * 2  # statistics
    assert Counter(seen)[0] == len(seen) // 2


def test_reverting_copies_and_pickles(model, x, counts):
    kinds, keys = [type(m) for m in model.modules()], list(model.state_dict())
    plan = plan_away(model, "blocks.1")
    report = forward_save.convert(model, plan=plan, sample_input=x)
    assert [row.layer for row in report.replaced] == ["blocks.1"]
    assert "offloaded" in str(report)
    calls = {(c.layer, c.function): c.keeps for c in report.calls}
    assert calls["blocks.1.first", "linear"] == "nothing; offloaded"
    assert calls["blocks.0.first", "linear"] == ""
    assert report.saves_nothing == ()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        counts.clear()
        assert_same(step(other, x), step(copy.deepcopy(model), x))
        assert counts["put"] == 2 * 7
    forward_save.revert(model)
    assert [type(m) for m in model.modules()] == kinds
    assert list(model.state_dict()) == keys
    counts.clear()
    step(model, x)
    assert not counts


@pytest.mark.usefixtures("stopped_clock")
def test_the_fewest_blocks_that_fit_are_offloaded(model, x, counts):
    exact = sample.observe(model, x).size_bytes
    saved = 7 * WHOLE + N  # a mask has a byte an element; x or relu's output is the neighbour's
    plans = []
    for count in (1, 2, 3):
        plan = forward_save.plan(
            model, x, budget_bytes=exact - count * saved // 2, choices=["offload"]
        )
        assert plan.predicted_bytes <= exact - count * saved // 2
        assert plan.error == plan.gradient_error == 0
        forward_save.convert(model, plan=plan)
        assert sample.observe(model, x).size_bytes == plan.predicted_bytes
        forward_save.revert(model)
        plans.append(len(plan.layers))
    assert plans == sorted(plans)
    # what is least: statistics of the blocks, and the head's input
    assert plan.smallest_bytes == 3 * 2 * SMALL + WHOLE
    least = forward_save.plan(model, x, budget_bytes=plan.smallest_bytes, choices="offload")
    assert [row.way for row in least.layers] == ["offload"] * 3
    assert least.predicted_bytes == plan.smallest_bytes
    assert all(row.added_s == 0.005 for row in least.layers)
    assert str(least).count("offloaded") == 3
    with pytest.raises(ValueError, match=f"at least {plan.smallest_bytes:,}"):
        forward_save.plan(model, x, budget_bytes=plan.smallest_bytes - 1, choices="offload")


@pytest.mark.usefixtures("counts", "stopped_clock")
@pytest.mark.parametrize("share", [0.5, 0.1])
def test_all_choices_together_keep_what_was_predicted(model, x, share):
    budget = int(share * sample.observe(model, x).size_bytes)
    choices = *forward_save.CHOICES, "offload"
    plan = forward_save.plan(model, x, budget_bytes=budget, choices=choices)
    assert plan.predicted_bytes <= budget
    forward_save.convert(model, plan=plan)
    assert sample.observe(model, x).size_bytes == plan.predicted_bytes
    rows = {row.layer: row for row in plan.layers}
    words = {"recompute": "runs again", "offload": "is offloaded"}
    for block in NAMES:
        inner, way = rows[f"{block}.smooth"], rows[block].way if block in rows else ""
        if way:
            assert inner.keeps == f"nothing: {block} {words[way]}"
            assert inner.settings == (None, None)
    assert "offload" in {row.way for row in plan.layers}


@pytest.mark.usefixtures("counts", "stopped_clock")
def test_the_cheaper_of_two_ways_is_taken(model, x, monkeypatch):
    budget = int(0.5 * sample.observe(model, x).size_bytes)
    for seconds, way in [(0.0, "offload"), (100.0, "recompute")]:
        monkeypatch.setattr(
            measure, "offload_costs", lambda m, i, names, s=seconds: dict.fromkeys(names, s)
        )
        plan = forward_save.plan(model, x, budget_bytes=budget, choices=["recompute", "offload"])
        assert {row.way for row in plan.layers} == {way}


@pytest.mark.usefixtures("counts", "stopped_clock")
def test_what_is_not_needed_is_taken_back(x, monkeypatch):
    """The narrow block is cheaper for a byte and comes first; the wide one is enough alone."""
    monkeypatch.setattr(measure, "offload_costs", lambda m, i, names: {"0": 0.001, "1": 0.01})
    wide = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Tanh(), nn.Linear(256, 64))
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Tanh()), wide)
    assert sample.observe(model, x).size_bytes == (1 + 2 + 4 + 4) * WHOLE
    for budget, names in [(10 * WHOLE, ["0"]), (4 * WHOLE, ["1"]), (0, ["0", "1"])]:
        plan = forward_save.plan(model, x, budget_bytes=budget, choices=["offload"])
        assert [row.layer for row in plan.layers] == names


def test_a_block_has_one_way_and_its_parts_none():
    state = ledger.State((), frozenset({"a.b", "c"}), frozenset({"a.d"}))
    assert state.with_block("a", "away") == ledger.State((), frozenset({"c"}), frozenset({"a"}))
    assert state.with_block("c", "away").again == {"a.b"}
    assert state.without_block("a.d").blocks == {"a.b", "c"}
    assert state.with_block("a.d", "again") == ledger.State((), frozenset({"a.b", "c", "a.d"}))


def test_time_is_that_of_the_block_alone(model, x, counts, monkeypatch):
    ran = []
    clock = iter(range(10**6))
    monkeypatch.setattr(measure, "seconds", lambda run, d: (run(), ran.append(0), next(clock))[2])
    found = measure.offload_costs(model, x, ["blocks.0", "blocks.2"])
    assert found == {"blocks.0": 1, "blocks.2": 1}  # as it is, and offloaded: by turns
    assert len(ran) == 2 * 2 * measure.RUNS
    assert counts["put"] == 2 * 7 * measure.RUNS


@pytest.mark.usefixtures("counts", "stopped_clock")
def test_a_plan_is_written_and_read(model, x, tmp_path):
    plan = forward_save.plan(model, x, budget_bytes=4 * WHOLE, choices=["offload"])
    plan.save(tmp_path / "plan.json")
    assert forward_save.Plan.load(tmp_path / "plan.json") == plan
    assert "offload" in {row.way for row in plan.layers}
    wrong = dataclasses.replace(plan, layers=(dataclasses.replace(plan.layers[0], way="away"),))
    wrong.save(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="way must be empty, 'recompute' or 'offload'"):
        forward_save.Plan.load(tmp_path / "bad.json")


def test_a_model_that_is_not_on_a_gpu_is_refused(model, x):
    assert "offload" not in forward_save.CHOICES
    words = "'offload' needs a model on a GPU, got one on cpu: leave 'offload' out, or move"
    with pytest.raises(ValueError, match=words):
        forward_save.plan(model, x, budget_bytes=1, choices=["offload"])


@pytest.mark.usefixtures("counts")
def test_what_else_is_refused(model, x):
    with pytest.raises(ValueError, match="'offload' and 'compile' together"):
        forward_save.plan(model, x, budget_bytes=1, choices=["offload", "compile"])
    with pytest.raises(ValueError, match="a block to offload"):
        forward_save.plan(nn.Sequential(nn.Linear(64, 8)), x, budget_bytes=1, choices="offload")


@pytest.mark.usefixtures("stopped_clock")
def test_buffers_are_let_go_when_a_plan_is_there(model, x, counts):
    forward_save.plan(model, x, budget_bytes=4 * WHOLE, choices=["offload"])
    assert counts["_Buffer"]
    assert all(not host._free for host in offload._HOSTS.values())


def test_on_a_cpu_a_converted_block_runs_as_it_is(model, x):
    exact = copy.deepcopy(model)
    assert_same(step(away(model, *NAMES), x), step(exact, x))


@pytest.mark.gpu
def test_gradients_on_a_gpu_are_torchs():
    torch.manual_seed(1)
    model, x = Model().cuda(), torch.randn(4096, 64, device="cuda")
    exact = copy.deepcopy(model)
    away(model, *NAMES)
    torch.use_deterministic_algorithms(False)  # cuBLAS would want a setting of the process
    for _ in range(5):
        assert_same(step(model, x)[:2], step(exact, x)[:2])


@pytest.mark.gpu
def test_less_is_allocated_between_the_passes_on_a_gpu():
    torch.manual_seed(1)
    model, x = Model().cuda(), torch.randn(4096, 64, device="cuda")
    torch.use_deterministic_algorithms(False)
    found = []
    for one in (copy.deepcopy(model), away(model, *NAMES)):
        one(x).sum().backward()
        before = torch.cuda.memory_allocated()
        out = one(x).sum()
        found.append(torch.cuda.memory_allocated() - before)
        out.backward()
    assert found[1] < 0.3 * found[0]


@pytest.mark.gpu
def test_a_plan_for_a_gpu():
    torch.manual_seed(1)
    model, x = Model().cuda(), torch.randn(4096, 64, device="cuda")
    torch.use_deterministic_algorithms(False)
    budget = sample.observe(model, x).size_bytes // 2
    plan = forward_save.plan(model, x, budget_bytes=budget, choices=["offload"])
    assert plan.predicted_bytes <= budget
    assert "offload" in {row.way for row in plan.layers}
