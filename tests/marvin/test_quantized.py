"""Quantized: the contract of an optimizer, over the optimizers it may wrap."""

import copy
import io
import math
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import marvin
from fixedpoint_kernels import FixedPoint, quantize
from marvin import MSGD, FixedPolicy, MarvinPolicy, Quantized
from tests.same import assert_same

FAST = {"lookback": (2, 5), "resolution": (10, 20)}


class Muonlike(torch.optim.Optimizer):
    """Momentum made orthogonal by Newton-Schulz; touches ``p.grad`` and ``p.data`` alone."""

    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})
        for group in self.param_groups:  # as published ones do: state before the first step
            for p in group["params"]:
                self.state[p]["is_matrix"] = p.ndim >= 2

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                buffer = state.setdefault("buffer", torch.zeros_like(p.data))
                buffer.mul_(group["momentum"]).add_(p.grad)
                update = orthogonal(buffer) if state["is_matrix"] else buffer
                p.data.add_(update, alpha=-group["lr"])


class Novograd(torch.optim.Optimizer):
    """A second moment that is one number, and a first moment of few rows, under torch's names."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p[:2]), torch.zeros(())
            state["exp_avg"].lerp_(p.grad[:2], 0.1)
            state["exp_avg_sq"].lerp_(p.grad.square().sum(), 0.1)
            step = p.grad / (state["exp_avg_sq"].sqrt() + 1e-8)
            step[:2] += state["exp_avg"]
            p.sub_(step, alpha=self.param_groups[0]["lr"])


class Codes(torch.Tensor):
    """Numbers of 8 bits with their scale, of which torch knows no copy, like the states of torchao's optimizers."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __repr__(self):
        return f"Codes({self.codes.tolist()}, {self.scale.item()})"

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        return cls(**parts)

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        (x,) = args
        if operator in (torch.ops.aten._to_copy.default, torch.ops.aten.detach.default):
            return cls(x.codes, x.scale)
        raise NotImplementedError(operator)


class LowBits(torch.optim.Optimizer):
    """Momentum that is kept in codes."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            own = self.state[p].setdefault("exp_avg", Codes(p.to(torch.int8) * 0, p.new_ones(())))
            moment = own.codes * own.scale * 0.9 + p.grad
            own.scale.copy_(moment.abs().max() / 127)
            own.codes.copy_((moment / own.scale).round())
            p.sub_(moment, alpha=self.param_groups[0]["lr"])


def orthogonal(matrix):
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=5e-3),
    "AdamW foreach amsgrad": lambda p: torch.optim.AdamW(p, lr=5e-3, foreach=True, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "Muonlike": Muonlike,
    "Novograd": Novograd,
}
POLICIES = {
    "marvin": lambda: MarvinPolicy(**FAST),
    "fixed": lambda: FixedPolicy(10, 6),
}


def make_model(dtype=torch.float32):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))
    return marvin.tnvs_(model, 2.0).to(dtype)


def make(kind="AdamW", policy="marvin", dtype=torch.float32, **options):
    model = make_model(dtype)
    wrapped = OPTIMIZERS[kind](list(model.named_parameters()))
    return model, Quantized(wrapped, POLICIES[policy](), **options)


def batches(n, start=0):
    for i in range(start, start + n):
        g = torch.Generator().manual_seed(i)
        x = torch.randn(32, 6, generator=g)
        yield x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def train(model, optimizer, steps, start=0, scheduler=None):
    dtype = next(model.parameters()).dtype
    for x, y in batches(steps, start):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(dtype)).float(), y)
        loss.backward()
        optimizer.step(loss=loss)
        if scheduler is not None:
            scheduler.step()
    return loss.item()


def assert_same_bits(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def assert_same_run(first, second):
    (model, optimizer), (model2, optimizer2) = first, second
    assert_same_bits(dict(model.state_dict()), dict(model2.state_dict()))
    one, two = optimizer.state_dict(), optimizer2.state_dict()
    assert repr(one["marvin"]) == repr(two["marvin"])
    assert repr(one["state"]) == repr(two["state"])
    for key in ("state", "optimizer"):
        states = [s[key] if key == "state" else s[key]["state"] for s in (one, two)]
        tensors = [
            [v for values in s.values() for v in values.values() if torch.is_tensor(v)]
            for s in states
        ]
        assert_same_bits(*tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_resume_equals_never_stopping(kind, policy, dtype):
    model, optimizer = make(kind, policy, dtype, quantize_gradients=policy == "fixed")
    marvin.quantize_activations(model, optimizer)
    train(model, optimizer, 7)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    resumed, resumed_optimizer = make(kind, policy, dtype, seed=99)
    marvin.quantize_activations(resumed, resumed_optimizer)
    resumed.load_state_dict(saved["model"])
    resumed_optimizer.load_state_dict(saved["optimizer"])
    train(model, optimizer, 7, start=7)
    train(resumed, resumed_optimizer, 7, start=7)
    assert_same_run((model, optimizer), (resumed, resumed_optimizer))
    assert (len(optimizer.trace) >= 4) == (policy == "marvin")
    for state in optimizer.optimizer.state.values():
        assert all(v.dtype is torch.float32 for v in state.values() if torch.is_tensor(v))


@pytest.mark.parametrize("steps", [0, 3])
def test_states_of_tensors_that_are_made_of_others_are_copied(steps):
    def build():
        model = make_model()
        return model, Quantized(LowBits(model.named_parameters()), FixedPolicy(10, 6))

    (model, optimizer), (resumed, resumed_optimizer) = build(), build()
    train(model, optimizer, 5)
    if steps:
        train(resumed, resumed_optimizer, steps)
    state = optimizer.state_dict()
    resumed.load_state_dict(model.state_dict())
    resumed_optimizer.load_state_dict(state)
    train(model, optimizer, 5, start=5)
    train(resumed, resumed_optimizer, 5, start=5)
    assert_same_bits(dict(model.state_dict()), dict(resumed.state_dict()))
    runs = optimizer, resumed_optimizer
    one, two = (own.state_dict()["optimizer"]["state"] for own in runs)
    assert repr(one) == repr(two)
    assert one[0]["exp_avg"].codes.unique().numel() > 10
    size = model[0].weight.numel()  # codes, their scale, and a master
    assert optimizer.state_bytes()["0.weight"] == 5 * size + 4
    assert one[0]["exp_avg"].codes.data_ptr() != two[0]["exp_avg"].codes.data_ptr()


@pytest.mark.parametrize("normalize", [True, False])
def test_sgd_wrapped_is_msgd(normalize):
    options = {"normalize_gradients": normalize, "seed": 5}
    model, model2 = make_model(), make_model()
    msgd = MSGD(model.named_parameters(), lr=0.03, l1=1e-4, **options, **FAST)
    sgd = torch.optim.SGD(model2.named_parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    wrapped = Quantized(sgd, MarvinPolicy(**FAST), l1=1e-4, **options)
    for m, o in ((model, msgd), (model2, wrapped)):
        marvin.quantize_activations(m, o)
        train(m, o, 20)
    assert_same_bits(dict(model.state_dict()), dict(model2.state_dict()))
    assert msgd.formats() == wrapped.formats()
    assert repr(msgd.trace) == repr(wrapped.trace)
    assert len(msgd.trace) > 4
    masters = [[o.state[p]["master"] for p in o.state] for o in (msgd, wrapped)]
    assert_same_bits(*masters)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_masters_move_as_the_wrapped_optimizer_moves_weights(kind):
    """The same gradients give the same float32 weights, quantised or not."""
    model, optimizer = make(kind, "fixed")
    plain = make_model()
    expected = OPTIMIZERS[kind](list(plain.named_parameters()))
    for i in range(4):
        g = torch.Generator().manual_seed(i)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=g)
            q.grad = p.grad.clone()
        optimizer.step()
        expected.step()
    masters = [optimizer.state[p]["master"] for p in model.parameters()]
    assert_same_bits(masters, [q.detach() for q in plain.parameters()])
    for p, master in zip(model.parameters(), masters, strict=True):
        assert_same_bits(p.detach(), quantize(p.detach(), FixedPoint(10, 6), rounding="nearest"))
        assert (p - master).abs().max() < FixedPoint(10, 6).lsb


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_learns(kind):
    model, optimizer = make(kind, "marvin")
    assert train(model, optimizer, 150) < 0.75  # ln 3 = 1.1 at the start


@pytest.mark.parametrize("wrap", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_go_on_alike(wrap):
    first = make()
    train(*first, 6)
    second = wrap(first)
    train(*first, 6, start=6)
    train(*second, 6, start=6)
    assert_same_run(first, second)


@pytest.mark.parametrize("on_wrapped", [True, False])
def test_schedulers_on_either_optimizer(on_wrapped):
    model, optimizer = make("SGD", "fixed")
    target = optimizer.optimizer if on_wrapped else optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(target, 1, gamma=0.5)
    train(model, optimizer, 3, scheduler=scheduler)
    assert optimizer.param_groups[0]["lr"] == 0.05 / 8
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.05 / 8
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.load_state_dict(saved)
    train(model, optimizer, 1, scheduler=scheduler)
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.05 / 16


def test_one_cycle_changes_momentum_too():
    model, optimizer = make("AdamW")
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    train(model, optimizer, 3, scheduler=scheduler)
    assert optimizer.optimizer.param_groups[0]["betas"][0] != 0.9


@pytest.mark.parametrize(
    ("policy", "setting"),
    [
        (FixedPolicy(8, 4), {"seed": 1}),
        (FixedPolicy(8, 4), {"nonfinite": "skip"}),
        (marvin.StaticPolicy(), {"window": 5}),
        (marvin.LossBudgetPolicy(), {"target_bits": 5.0}),
        (marvin.LossBudgetPolicy(), {"late": True}),
        (marvin.MarvinPolicy(), {"strategy_loss": "short"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_of_the_first_group_alone_are_refused_elsewhere(policy, setting):
    model = make_model()
    first, second = (list(model[i].named_parameters(prefix=str(i))) for i in (0, 3))
    groups = [{"params": first, **setting}, {"params": second}]
    Quantized(torch.optim.SGD(groups, lr=0.1), policy)
    (name,) = setting
    wrong = [{"params": first}, {"params": second, **setting}]
    message = rf"{name} is read from the first parameter group and must be .*, got {name}="
    with pytest.raises(ValueError, match=message):
        Quantized(torch.optim.SGD(wrong, lr=0.1), policy)
    optimizer = Quantized(torch.optim.SGD(wrong[:1], lr=0.1), policy)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": second, **setting})
    assert len(optimizer.param_groups) == len(optimizer.optimizer.param_groups) == 1


def test_groups_have_their_own_settings_and_can_come_later():
    model = make_model()
    adamw = torch.optim.AdamW([{"params": list(model[0].named_parameters(prefix="0")), "wl": 12}])
    optimizer = Quantized(adamw, FixedPolicy(8, 4))
    late = {"params": list(model[3].named_parameters(prefix="3")), "lr": 0.5, "fl": 6}
    optimizer.add_param_group(late)
    formats = optimizer.formats()
    assert (formats["0.weight"], formats["3.bias"]) == (FixedPoint(12, 4), FixedPoint(8, 6))
    assert [group["lr"] for group in adamw.param_groups] == [1e-3, 0.5]
    with pytest.raises(ValueError, match="word length must be 2 to 32"):
        optimizer.add_param_group({"params": [("x", nn.Parameter(torch.ones(2, 2)))], "wl": 99})
    assert len(optimizer.param_groups) == len(adamw.param_groups) == 2
    train(model, optimizer, 3)
    assert len(adamw.state) == 4


def test_hooks_fire_once_each():
    model, optimizer = make()
    fired = []
    optimizer.register_step_pre_hook(lambda *_: fired.append("before"))
    optimizer.register_step_post_hook(lambda *_: fired.append("after"))
    optimizer.optimizer.register_step_post_hook(lambda *_: fired.append("wrapped"))
    train(model, optimizer, 1)
    assert fired == ["before", "wrapped", "after"]


def test_closure_grad_scaler_and_clipping():
    model, optimizer = make()
    x, y = next(batches(1))

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert norm < 100
    scaler.step(optimizer, loss=loss)
    scaler.update()
    assert optimizer.state_dict()["marvin"]["step"] == 2
    scaler.scale(loss.detach())
    model[0].weight.grad.fill_(math.inf)
    scaler.step(optimizer, loss=loss)
    assert optimizer.state_dict()["marvin"]["step"] == 2


def test_the_users_gradients_stay():
    model, optimizer = make("SGD", normalize_gradients=True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step(loss=1.0)
    assert all((p.grad == 1).all() for p in model.parameters())


def test_nonfinite_changes_nothing():
    model, optimizer = make()
    train(model, optimizer, 3)
    before = copy.deepcopy((model, optimizer))
    model[3].weight.grad[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match=r"gradient of 3\.weight with norm nan"):
        optimizer.step(loss=1.0)
    assert_same_run((model, optimizer), before)


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize(
    "policy",
    [FixedPolicy(12, 8), marvin.StaticPolicy(8, 8, per_channel=True), marvin.MuppetPolicy()],
    ids=lambda policy: type(policy).__name__,
)
def test_an_infinite_gradient_is_refused_where_gradients_are_rounded(policy, rounds):
    """Rounding would make the largest number of a format of it."""
    model = make_model()
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = Quantized(sgd, policy, quantize_gradients=rounds)
    train(model, optimizer, 2)
    before = copy.deepcopy((model, optimizer))
    model[3].weight.grad[0, 0] = -math.inf
    with pytest.raises(FloatingPointError, match=r"gradient of 3\.weight with norm inf"):
        optimizer.step(loss=1.0)
    assert_same_run((model, optimizer), before)


def test_gradients_are_divided_by_the_norm_that_they_have_once_rounded():
    weight = nn.Parameter(torch.zeros(8, 8))
    sgd = torch.optim.SGD([weight], lr=1.0)
    options = {"quantize_gradients": True, "normalize_gradients": True}
    optimizer = Quantized(sgd, FixedPolicy(8, 0), **options)
    weight.grad = torch.full((8, 8), 0.25)  # 0 or 1 once rounded
    optimizer.step()
    norm = optimizer.state[weight]["master"].norm()
    torch.testing.assert_close(norm, torch.tensor(1.0), rtol=1e-6, atol=0)  # float32


def test_a_wrapped_optimizer_may_have_stepped_before():
    model = make_model()
    adamw = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    adamw.step()
    moments = adamw.state[model[0].weight]["exp_avg"]
    optimizer = Quantized(adamw, FixedPolicy())
    assert adamw.state[optimizer.state[model[0].weight]["master"]]["exp_avg"] is moments
    optimizer.step(loss=1.0)
    assert all(s["step"] == 2 for s in adamw.state.values())


class Sharp(torch.optim.SGD):
    """Of the shape of SAM: its step needs a closure, and its signature does not say so."""

    def first_step(self):
        raise NotImplementedError

    second_step = first_step


class Around(torch.optim.SGD):
    """Of the shape of Lookahead: its state is not torch's."""

    def state_dict(self):
        return {"slow": {}, "base": super().state_dict()}


class Needy(torch.optim.SGD):
    """Says in its step that it needs a closure."""

    def step(self, closure=None):
        assert closure is not None, "Needy requires closure, but it was not provided"


def test_an_optimizer_that_needs_a_closure_after_all_is_named():
    model = make_model()
    optimizer = Quantized(Needy(model.parameters()), FixedPolicy())
    model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(ValueError, match=r"step needs no closure, got Needy$"):
        optimizer.step(lambda: torch.tensor(1.0))


def test_what_cannot_be_wrapped_is_refused():
    weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match="needs no closure, got LBFGS"):
        Quantized(torch.optim.LBFGS([weight]), FixedPolicy())
    with pytest.raises(ValueError, match=r"got Sharp: make it around Quantized, Sharp\(params"):
        Quantized(Sharp([weight]), FixedPolicy())
    with pytest.raises(ValueError, match=r"got Around's with slow, base: give marvin\.Quantized"):
        Quantized(Around([weight]), FixedPolicy())
    around = torch.optim.SGD.__new__(torch.optim.SGD)  # as Accelerate makes its own around another
    with pytest.raises(TypeError, match="needs the optimizer itself, got SGD, which is around one"):
        marvin.Quantized(around, marvin.FixedPolicy(8, 4))
    with pytest.raises(TypeError, match="needs a float optimizer, got MSGD"):
        Quantized(MSGD([weight]), FixedPolicy())
    with pytest.raises(ValueError, match="buffer_bits must be 1 to"):
        MarvinPolicy(buffer_bits=0)
    sgd = torch.optim.SGD([weight])
    sgd.defaults["seed"] = 3
    with pytest.raises(ValueError, match="SGD must have no hyper-parameter"):
        Quantized(sgd, FixedPolicy())


def test_states_of_another_kind_are_refused():
    _, optimizer = make("SGD", "marvin")
    _, fixed = make("SGD", "fixed")
    with pytest.raises(ValueError, match="must be of FixedPolicy, got MarvinPolicy"):
        fixed.load_state_dict(optimizer.state_dict())
    with pytest.raises(
        ValueError, match=r"must be of marvin\.Quantized or marvin\.MSGD, got one with"
    ):
        optimizer.load_state_dict(torch.optim.SGD(make_model().parameters()).state_dict())
    msgd = MSGD(make_model().named_parameters())
    _, adamw = make("AdamW", "marvin")
    with pytest.raises(ValueError, match="must be of AdamW on masters, got SGD"):
        adamw.load_state_dict(msgd.state_dict())


class Block(nn.Module):
    """A pre-norm GPT block: causal attention and an MLP."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        n, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, -1).unbind(2)
        y = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(y.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Two blocks over tokens of an alphabet of 8."""

    def __init__(self, width=32, length=12):
        super().__init__()
        self.tokens, self.places = nn.Embedding(8, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(Block(width, 4), Block(width, 4))
        self.head = nn.Linear(width, 8)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1])
        return self.head(self.blocks(self.tokens(tokens) + self.places(places)))


def test_a_small_gpt_learns_to_copy():
    torch.manual_seed(0)
    model = GPT()
    adamw = torch.optim.AdamW(model.named_parameters(), lr=3e-3)
    optimizer = Quantized(adamw, MarvinPolicy(buffer_bits=6, strategy="min"))
    marvin.quantize_activations(model, optimizer)
    losses = []
    for i in range(120):
        tokens = torch.randint(0, 8, (16, 6), generator=torch.Generator().manual_seed(i))
        text = torch.cat([tokens, tokens], 1)  # the second half repeats the first
        optimizer.zero_grad()
        logits = model(text[:, :-1])[:, 5:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 6:].flatten())
        loss.backward()
        optimizer.step(loss=loss)
        losses.append(loss.item())
    assert losses[0] > 1.8  # ln 8 = 2.08
    assert losses[-1] < 1.0
    assert {row.layer for row in optimizer.trace} == set(optimizer.layers())


def test_an_interrupted_step_leaves_a_run_that_goes_on():
    """Who stops a cell of a notebook goes on, or saves."""
    model, optimizer = make()
    train(model, optimizer, 2)

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = optimizer.optimizer.register_step_post_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, 1)
    handle.remove()
    for group in optimizer.optimizer.param_groups:  # the model's again, not the masters
        assert all(p in optimizer for p in group["params"])
    assert all(master.grad is None for master in optimizer._masters.values())
    with pytest.raises(RuntimeError, match="got the AdamW's own"):
        optimizer.optimizer.step()
    train(model, optimizer, 2)
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other, later = make(compact_state=False, seed=5)
    other.load_state_dict(state[0])
    later.load_state_dict(state[1])
    assert_same_run((other, later), (model, optimizer))


@pytest.mark.parametrize("compact", [False, True])
def test_weights_of_an_interrupted_step_are_no_new_masters(compact, monkeypatch):
    """The next step took them for the user's: masters lost what rounding takes, and a warning blamed the user."""
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
        runs.append((model, Quantized(adamw, FixedPolicy(8, 4), compact_state=compact)))
        model(torch.ones(2, 64)).sum().backward()
        runs[-1][1].step(loss=1.0)

    def stop(*_):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(runs[0][1], "_note_written", stop)
    with pytest.raises(KeyboardInterrupt):
        runs[0][1].step(loss=1.0)
    runs[1][1].step(loss=1.0)
    for _, optimizer in runs:
        optimizer.step(loss=1.0)
    assert_same(*(optimizer.state_dict() for _, optimizer in runs))
    assert_same(*(model.state_dict() for model, _ in runs))


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.filterwarnings("error")
def test_a_weight_that_is_not_finite_is_no_new_master(value, runs, nonfinite, compact):
    """Nor is a finite one that was changed beside it, as long as the step is refused."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(64, 4), "b": nn.Linear(64, 4), "aux": nn.Linear(64, 4)})
    adam = torch.optim.Adam(model.named_parameters(), lr=0.1)
    optimizer = Quantized(
        adam, marvin.StaticPolicy(6, 6), nonfinite=nonfinite, compact_state=compact
    )

    def evaluate():
        optimizer.zero_grad()
        layers = [model[n] for n in (("a", "b", "aux") if runs else ("a", "b"))]
        loss = sum(layer(torch.ones(2, 64)).square().mean() for layer in layers)
        loss.backward()
        return loss.detach()

    optimizer.step(loss=evaluate())
    before = copy.deepcopy((model, optimizer.state_dict()))
    with torch.no_grad():
        model["a"].weight.zero_()
        model["aux"].weight[0, 0] = value
    loss = evaluate()
    if nonfinite == "raise":
        with pytest.raises(FloatingPointError, match=r"got weights aux\.weight \(optimizer\.load"):
            optimizer.step(loss=loss)
    else:
        with pytest.warns(UserWarning, match=r"skipped while weights are not finite: aux\.weight"):
            optimizer.step(loss=loss)
        assert optimizer.skipped_steps == 1
        before[1]["marvin"]["skipped"] = 1
    with pytest.raises(FloatingPointError, match=r"got others in aux\.weight; nothing"):
        optimizer.adopt_weights()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = optimizer.state_dict()
    assert_same(state, before[1])
    optimizer.load_state_dict(state)
    assert_same(dict(model.state_dict()), dict(before[0].state_dict()))
    optimizer.step(loss=evaluate())
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("loss", [None, 1.0])
def test_a_weight_that_is_not_finite_is_refused_without_gradients_too(loss):
    model, optimizer = make()
    train(model, optimizer, 1)
    optimizer.zero_grad()
    with torch.no_grad():
        model[3].weight[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match=r"got weights 3\.weight"):
        optimizer.step(loss=loss)


def test_l1_shrinks_weights_under_maximize_too():
    found = []
    for maximize in (False, True):
        weight = nn.Parameter(torch.tensor([[2.0, -2.0, 1.0, -1.0]]))
        sgd = torch.optim.SGD([weight], lr=0.5, maximize=maximize)
        optimizer = Quantized(sgd, marvin.FixedPolicy(16, 8), l1=0.5)
        weight.grad = torch.zeros(1, 4)
        optimizer.step(loss=0.0)
        found.append(optimizer.state[weight]["master"].tolist())
    assert found[0] == found[1] == [[1.75, -1.75, 0.75, -0.75]]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_hooks_of_all_optimizers_see_a_step_once(make, fails):
    def refuse(*_):
        raise RuntimeError("refused by a hook")

    model = nn.Linear(4, 2)
    optimizer = Quantized(make(model.parameters()), FixedPolicy(8, 4))
    seen = []
    own = optimizer.optimizer.register_step_post_hook(lambda *_: seen.append("wrapped"))
    handles = [
        register_optimizer_step_pre_hook(lambda found, *_: seen.append(found)),
        register_optimizer_step_post_hook(lambda found, *_: seen.append(found)),
    ]
    try:
        if fails:
            bad = optimizer.optimizer.register_step_pre_hook(refuse)
            model(torch.ones(3, 4)).sum().backward()
            with pytest.raises(RuntimeError, match="refused by a hook"):
                optimizer.step(loss=1.0)
            assert seen == [optimizer]
            bad.remove()
            seen.clear()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step(loss=1.0)
    finally:
        for handle in (own, *handles):
            handle.remove()
    assert seen == [optimizer, "wrapped", optimizer]
    optimizer.step(loss=1.0)
    assert len(seen) == 3


FUSED = {
    "SGD": lambda p, fused: torch.optim.SGD(p, lr=1e-2, fused=fused),
    "momentum": lambda p, fused: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=fused),
    "AdamW": lambda p, fused: torch.optim.AdamW(p, lr=1e-3, amsgrad=True, fused=fused),
    "Adagrad": lambda p, fused: torch.optim.Adagrad(p, lr=1e-3, fused=fused),
}


def convolutions(kind, fused, compact, is_last, is_last_later):
    """Return a model whose channels lie last before its optimizer is made, and before it is wrapped."""
    torch.manual_seed(0)
    layers = nn.Conv2d(8, 12, 3), nn.ReLU(), nn.Conv2d(12, 8, 3), nn.Flatten()
    net = nn.Sequential(*layers).to(memory_format=order(is_last))
    optimizer = FUSED[kind](net.parameters(), fused)
    net.to(memory_format=order(is_last_later))
    return net, Quantized(optimizer, FixedPolicy(24, 21), compact_state=compact)


def order(is_last):
    return torch.channels_last if is_last else torch.contiguous_format


def train_convolutions(net, optimizer, steps):
    for i in steps:
        x = torch.randn(6, 8, 5, 5, generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step(loss=loss.detach())


def in_other_order(state):
    """Return a state whose moments lie in memory as its masters do not."""
    state = copy.deepcopy(state)
    for own in state["optimizer"]["state"].values():
        for name, x in own.items():
            if (
                torch.is_tensor(x)
                and x.ndim == 4
                and x.is_floating_point()
                and "_scales" not in name
            ):
                is_last = x.is_contiguous(memory_format=torch.channels_last)
                own[name] = x.contiguous(memory_format=order(not is_last))
    return state


def moved(case, kind, fused, compact):
    begins_last, later_last = case in ("last", "loaded last"), case in ("last", "between")
    net, optimizer = convolutions(kind, fused, compact, begins_last, later_last)
    if case == "after":
        net.to(memory_format=torch.channels_last)
    train_convolutions(net, optimizer, range(3))
    if case in ("between", "loaded", "loaded last", "moments"):
        state = optimizer.state_dict()
        if case == "moments":
            state = in_other_order(state)
        net, optimizer = convolutions(kind, fused, compact, case == "loaded", case == "loaded")
        optimizer.load_state_dict(state)
    train_convolutions(net, optimizer, range(3, 6))
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("compact", [False, True], ids=["float", "compact"])
@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("case", ["last", "between", "after", "loaded", "loaded last", "moments"])
def test_fused_steps_in_any_memory_order(case, kind, compact):
    """They go through flat memory: gradients and moments must lie as the masters do."""
    found, wanted = (moved(case, kind, fused, compact) for fused in (True, False))
    # a few units of the format; gradients of other elements give 1e-3 and more
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 if not compact else 2e-4)


def test_gradients_in_the_order_of_the_masters_are_not_copied(monkeypatch):
    net, optimizer = convolutions("AdamW", True, False, True, True)
    train_convolutions(net, optimizer, range(1))
    seen = []
    optimizer.optimizer.register_step_pre_hook(
        lambda own, *_: seen.extend(p.grad.data_ptr() for p in own.param_groups[0]["params"])
    )
    train_convolutions(net, optimizer, range(1))
    assert seen == [p.grad.data_ptr() for p in net.parameters()]


class ScheduleFree(torch.optim.Optimizer):
    """SGD whose weights, while it trains, lie between its steps and their mean; evaluates the mean."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    def _move(self, mode, weight):
        for group in self.param_groups:
            if group["train_mode"] is not mode:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight(group["beta"]))
            group["train_mode"] = mode

    @torch.no_grad()
    def train(self):
        self._move(True, lambda beta: 1 - beta)

    @torch.no_grad()
    def eval(self):
        self._move(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            assert group["train_mode"]
            group["k"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["k"])
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1))
                z.sub_(p.grad, alpha=group["lr"])


def schedule_free(wraps=True, compact=False, policy=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
    model[0].bias.requires_grad_(False)
    optimizer = ScheduleFree(model.named_parameters())
    if wraps:
        optimizer = Quantized(optimizer, policy or FixedPolicy(20, 14), compact_state=compact)
    return model, optimizer


def train_schedule_free(model, optimizer, steps):
    for i in steps:
        optimizer.zero_grad()
        x = torch.randn(9, 8, generator=torch.Generator().manual_seed(i))
        loss = (model(x) - 2).square().sum(1).mean()
        loss.backward()
        optimizer.step(**({"loss": loss} if isinstance(optimizer, Quantized) else {}))


def copied(model):
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:compact_state keeps")
@pytest.mark.parametrize("compact", [False, True], ids=["float", "compact"])
@pytest.mark.parametrize("calls", ["Quantized", "wrapped"])
def test_schedule_free_weights_are_evaluated(calls, compact):
    """The masters become the mean, the weights are these, rounded; and back."""
    plain, free = schedule_free(wraps=False)
    model, optimizer = schedule_free(compact=compact)
    modes = optimizer if calls == "Quantized" else optimizer.optimizer
    few = 8 * 2.0**-14  # units of the format in 20 steps
    for steps in (range(10), range(10, 20)):
        for net, own, switch in ((plain, free, free), (model, optimizer, modes)):
            switch.train()
            train_schedule_free(net, own, steps)
        trained, bias = copied(model), model[0].bias.detach().clone()
        free.eval()
        modes.eval()
        assert (trained[0] - model[0].weight).abs().max() > 10 * few
        assert (trained[2] - model[2].weight).abs().max() > 10 * few  # the compact one
        torch.testing.assert_close(copied(model), copied(plain), rtol=0, atol=few)
        assert torch.equal(model[0].weight * 2**14, (model[0].weight * 2**14).round())
        assert torch.equal(model[0].bias, bias)
        before = optimizer.state_dict()["marvin"]
        with pytest.raises(RuntimeError, match=r"got ScheduleFree in eval mode: write .*train\(\)"):
            optimizer.step(loss=1.0)
        assert optimizer.state_dict()["marvin"] == before
        modes.train()
        torch.testing.assert_close(copied(model), trained, rtol=0, atol=2.0**-14)


def test_a_state_that_is_saved_in_eval_mode_goes_on():
    """It has the mean in its masters, and the mode in its groups."""
    model, optimizer = schedule_free()
    optimizer.train()
    train_schedule_free(model, optimizer, range(5))
    optimizer.eval()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed, other = schedule_free()
    other.train()
    train_schedule_free(resumed, other, range(2))
    resumed[0].bias.copy_(model[0].bias)
    other.load_state_dict(torch.load(file))
    assert_same_bits(copied(resumed), copied(model))
    for net, own in ((model, optimizer), (resumed, other)):
        own.train()
        train_schedule_free(net, own, range(5, 8))
        own.eval()
    assert_same_run((model, optimizer), (resumed, other))


@pytest.mark.parametrize("copies", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_switch_their_own_weights(copies):
    model, optimizer = schedule_free()
    optimizer.train()
    train_schedule_free(model, optimizer, range(5))
    twin, own = copies((model, optimizer))
    before = copied(model)
    own.optimizer.eval()
    assert_same_bits(copied(model), before)
    assert not torch.equal(twin[0].weight, before[0])
    wrapped = own.optimizer
    del own
    with pytest.raises(RuntimeError, match=r"train\(\) must be that of a Quantized"):
        wrapped.train()


def test_weights_that_are_not_finite_are_not_switched():
    model, optimizer = schedule_free()
    optimizer.train()
    train_schedule_free(model, optimizer, range(2))
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match=r"eval\(\) must have finite weights, got weights"):
        optimizer.eval()
    assert optimizer.param_groups[0]["train_mode"]


def test_optimizers_without_modes_have_nothing_to_switch():
    model, optimizer = make("AdamW", "fixed")
    train(model, optimizer, 2)
    before = copied(model)
    optimizer.eval()
    optimizer.train()
    assert_same_bits(copied(model), before)
    assert not hasattr(optimizer.optimizer, "eval")
