"""The contract of an optimizer, over the settings of MSGD."""

import copy
import io
import math
import pickle
import warnings

import pytest
import torch
from torch import nn

import marvin
from fixedpoint_kernels import FixedPoint, quantize
from marvin import MSGD
from tests.same import assert_same

SETTINGS = [
    {},
    {"quantize_gradients": True, "init_wl": 12, "init_fl": 8},
    {"normalize_gradients": False, "lr": 0.05},
    {"kl_counts": "sampled", "pushdown_range": "full"},
    {"l1": 1e-3, "l1_params": "all", "strategy_loss": "short", "strategy_margin": 0.1},
    {"one_dim": "float", "master_init": "quantized", "symmetric": True},
    {"pushup": "marvin", "kl_direction": "qp", "lookback_rounding": "nearest", "kl_eps": "noise"},
    {"strategy": "max", "buffer_bits": 8, "momentum": 0.0, "weight_decay": 0.0},
]
FAST = {"lr": 0.02, "lookback": (2, 5), "resolution": (10, 20)}
OTHER = {  # of an optimizer that loads a state: none of these may decide what follows
    "lr": 0.3,
    "momentum": 0.5,
    "weight_decay": 0.01,
    "l1": 0.1,
    "init_wl": 11,
    "max_wl": 20,
    "min_fl": 2,
    "buffer_bits": 6,
    "resolution": (30, 40),
    "lookback": (3, 7),
    "lookback_momentum": 0.5,
    "strategy": "mean",
    "kl_eps": 0.3,
    "kl_smoothing": 1.0,
    "normalize_gradients": True,
    "one_dim": "previous",
    "nonfinite": "skip",
    "seed": 99,
}


def make_model(dtype=torch.float32):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    return marvin.tnvs_(model).to(dtype)


def make_optimizer(model, **settings):
    return MSGD(model.named_parameters(), **{**FAST, **settings})


def batches(n, start=0):
    for i in range(start, start + n):
        g = torch.Generator().manual_seed(i)
        x = torch.randn(32, 6, generator=g)
        yield x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def train(model, optimizer, steps, start=0):
    dtype = next(model.parameters()).dtype
    for x, y in batches(steps, start):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(dtype)).float(), y)
        loss.backward()
        optimizer.step(loss=loss)
    return loss.item()


def momentum_of(optimizer, p):
    return optimizer.optimizer.state[optimizer.state[p]["master"]]["momentum_buffer"]


def assert_same_bits(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def save_and_load(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_resume_equals_never_stopping(settings, dtype):
    model = make_model(dtype)
    optimizer = make_optimizer(model, **settings)
    activations = marvin.quantize_activations(model, optimizer)
    train(model, optimizer, 9)
    saved = save_and_load({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    resumed = make_model(dtype)
    resumed_optimizer = MSGD(resumed.named_parameters(), **OTHER)
    marvin.quantize_activations(resumed, resumed_optimizer)
    resumed.load_state_dict(saved["model"])
    resumed_optimizer.load_state_dict(saved["optimizer"])
    for p in optimizer.state:
        assert all(
            v.dtype is torch.float32 for v in optimizer.state[p].values() if torch.is_tensor(v)
        )
    train(model, optimizer, 9, start=9)
    train(resumed, resumed_optimizer, 9, start=9)

    assert_same_bits(dict(model.state_dict()), dict(resumed.state_dict()))
    first, second = optimizer.state_dict(), resumed_optimizer.state_dict()
    assert len(first["marvin"]["trace"]) >= 4
    assert repr(first["marvin"]) == repr(second["marvin"])
    assert repr(first["state"]) == repr(second["state"])
    assert_same_bits(
        [s["master"] for s in first["state"].values()],
        [s["master"] for s in second["state"].values()],
    )
    activations.remove()


def test_each_part_of_a_state_comes_back():
    weight, bias = (nn.Parameter(torch.randn(s)) for s in ((3, 4), (3,)))
    optimizer = MSGD([weight, bias], lookback=(2, 2), nonfinite="skip", seed=5)
    for loss in (1.0, 1.0, 2.0, 3.0, math.inf, 4.0):
        for p in (weight, bias):
            p.grad = torch.randn(p.shape)
        optimizer.step(loss=loss)
    optimizer.forward_state.options(is_training=True, eval_rounding="nearest")
    saved = save_and_load(optimizer.state_dict())
    kept = saved["marvin"]
    assert (kept["step"], kept["skipped"], kept["forwards"]) == (5, 1, 1)
    assert kept["policy"]["shared"] == {"level": "max", "losses": (3.0, 4.0)}
    assert len(kept["trace"]) == 2
    other = MSGD([nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3))], **OTHER)
    other.load_state_dict(saved)
    assert repr(other.state_dict()) == repr(saved)
    assert (other.strategy, other.skipped_steps) == ("max", 1)
    assert repr(other.trace) == repr(optimizer.trace)  # with NaN in it


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_weights_are_numbers_of_their_format(settings):
    model = make_model()
    optimizer = make_optimizer(model, **settings)
    for _ in range(2):  # before the first step, and after some
        for name, p in model.named_parameters():
            fmt = optimizer.formats().get(name)
            if fmt is None:
                assert settings["one_dim"] == "float"
                assert p.ndim < 2
                assert_same_bits(p.detach(), optimizer.state[p]["master"])
            else:
                assert_same_bits(p.detach(), quantize(p.detach(), fmt, rounding="nearest"))
        train(model, optimizer, 12)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_training_learns(settings):
    model = make_model()
    optimizer = make_optimizer(model, **{**settings, "lookback": (25, 100)})
    assert train(model, optimizer, 150) < 0.75  # ln 3 = 1.1 at the start


@pytest.mark.parametrize("wrap", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_go_on_alike(wrap):
    model = make_model()
    optimizer = make_optimizer(model)
    train(model, optimizer, 8)
    model_copy, optimizer_copy = wrap((model, optimizer))
    train(model, optimizer, 8, start=8)
    train(model_copy, optimizer_copy, 8, start=8)
    assert_same_bits(dict(model.state_dict()), dict(model_copy.state_dict()))
    assert repr(optimizer.trace) == repr(optimizer_copy.trace)  # with NaN in it


def test_one_step_is_sgd_on_the_masters():
    weight = nn.Parameter(torch.tensor([[0.3, -0.2]]))
    optimizer = MSGD([weight], lr=0.5, momentum=0.9, weight_decay=0.1, strategy="min")
    masters = torch.tensor([[0.3, -0.2]])
    velocity = torch.zeros(1, 2)
    for _ in range(3):
        weight.grad = torch.tensor([[3.0, 4.0]])
        optimizer.step()
        velocity = 0.9 * velocity + torch.tensor([[0.6, 0.8]]) + 0.1 * masters
        masters = masters - 0.5 * velocity
        torch.testing.assert_close(optimizer.state[weight]["master"], masters)
        assert (weight - masters).abs().max() < FixedPoint(8, 4).lsb
    assert weight.grad.tolist() == [[3.0, 4.0]]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("quantize_gradients", [True, False])
@pytest.mark.parametrize("l1", [0.0, 0.1])
def test_gradients_stay_the_users(normalize, quantize_gradients, l1):
    model = make_model()
    options = {"normalize_gradients": normalize, "quantize_gradients": quantize_gradients}
    optimizer = make_optimizer(model, l1=l1, l1_params="all", weight_decay=0.1, **options)
    given = [torch.randn(p.shape) for p in model.parameters()]
    for p, grad in zip(model.parameters(), given, strict=True):
        p.grad = grad.clone()
    optimizer.step(loss=1.0)
    assert_same_bits([p.grad for p in model.parameters()], given)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": True},
        {"maximize": True},
        {"dampening": 0.5},
        {"momentum": 0.0},
        {"weight_decay": 0.0},
        {"normalize_gradients": False},
    ],
    ids=str,
)
def test_the_bits_are_those_of_torchs_sgd(options):
    models = make_model(), make_model()
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01, **options}
    group = {"params": list(models[0].named_parameters()), **settings}
    ours = MSGD([group], lookback=(2, 5), resolution=(10, 20))
    normalizes = settings.pop("normalize_gradients", True)
    sgd = torch.optim.SGD(models[1].named_parameters(), **settings, foreach=True)
    policy = marvin.MarvinPolicy(lookback=(2, 5), resolution=(10, 20))
    torchs = marvin.Quantized(sgd, policy, normalize_gradients=normalizes)
    for model, optimizer in zip(models, (ours, torchs), strict=True):
        model[3].bias.requires_grad_(False)
        train(model, optimizer, 4)
        model[3].bias.requires_grad_(True)  # its momentum begins when others have one
        train(model, optimizer, 4, 4)
    assert_same_bits(*(dict(model.state_dict()) for model in models))
    assert_same_bits(*(o.state_dict()["optimizer"]["state"] for o in (ours, torchs)))


def test_each_gradient_is_divided_by_its_own_norm():
    params = [nn.Parameter(torch.zeros(1, 2)), nn.Parameter(torch.zeros(2))]
    optimizer = MSGD(params, lr=1.0, momentum=0.0, weight_decay=0.0, strategy="min")
    params[0].grad, params[1].grad = torch.tensor([[3.0, 4.0]]), torch.tensor([-60.0, 80.0])
    optimizer.step()
    moved = [optimizer.state[p]["master"] for p in params]
    torch.testing.assert_close(moved, [torch.tensor([[-0.6, -0.8]]), torch.tensor([0.6, -0.8])])


def test_l1_pulls_towards_zero_and_counts_as_loss():
    weight = nn.Parameter(torch.full((1, 2), 0.5))
    bias = nn.Parameter(torch.full((2,), 0.5))
    settings = {"normalize_gradients": False, "weight_decay": 0.0, "momentum": 0.0, "lr": 1.0}
    optimizer = MSGD([weight, bias], l1=0.25, **settings)
    for p in (weight, bias):
        p.grad = torch.zeros_like(p)
    optimizer.step(loss=1.0)
    assert optimizer.state[weight]["master"].tolist() == [[0.25, 0.25]]
    assert optimizer.state[bias]["master"].tolist() == [0.5, 0.5]
    assert optimizer.state_dict()["marvin"]["policy"]["shared"]["losses"] == (1.25,)


def test_zero_gradients_move_nothing_and_count_in_the_window():
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = MSGD([weight], weight_decay=0.0, strategy="min")
    weight.grad = torch.zeros(2, 2)
    optimizer.step()
    assert_same_bits(optimizer.state[weight]["master"], torch.ones(2, 2))
    layer = optimizer.state[weight]["layer"]
    assert (layer.count, layer.norm_sum) == (1, 0.0)


def test_windows_hold_one_sum_whatever_the_lookback():
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer = MSGD([weight], lookback=(50, 100), strategy="min")
    total = torch.zeros(3, 2)
    for i in range(5):
        weight.grad = torch.randn(3, 2, generator=torch.Generator().manual_seed(i))
        total += weight.grad / weight.grad.norm()
        optimizer.step()
    torch.testing.assert_close(optimizer.state[weight]["grad_sum"], total)
    master = optimizer.state[weight]["master"]
    states = [*optimizer.state[weight].values(), *optimizer.optimizer.state[master].values()]
    tensors = [v for v in states if torch.is_tensor(v)]
    assert sum(t.numel() for t in tensors) == 3 * weight.numel()  # master, momentum, window


def test_trace_tells_each_switch():
    model = make_model()
    optimizer = make_optimizer(model, init_wl=9)
    train(model, optimizer, 20)
    first, *_ = optimizer.trace
    assert (first.wl_before, first.fl_before) == (9, 4)
    assert first.window >= first.lookback
    last = {row.layer: FixedPoint(row.wl, row.fl) for row in optimizer.trace}
    formats = optimizer.formats()
    assert last == {name: formats[name] for name in optimizer.layers()}
    assert optimizer.mean_word_length() == sum(f.wl for f in last.values()) / len(last)
    assert formats["1.weight"] == formats["0.weight"]  # batch norm follows the layer before it
    assert list(formats) == [name for name, _ in model.named_parameters()]


def test_parameters_without_names_go_by_position():
    assert list(MSGD(make_model().parameters()).formats()) == ["0", "1", "2", "3", "4", "5"]


def test_groups_have_their_own_settings_and_can_come_later():
    model = make_model()
    optimizer = MSGD(model[0].named_parameters(prefix="0"), **FAST, init_wl=10)
    late = {"params": list(model[3].named_parameters(prefix="3")), "lr": 0.5}
    late |= {"init_wl": 7, "max_wl": 7, "buffer_bits": 2}
    optimizer.add_param_group(late)
    assert optimizer.formats()["0.bias"].wl == 10
    assert optimizer.formats()["3.weight"].wl == 7
    train(model, optimizer, 8)
    assert {row.layer for row in optimizer.trace} == {"0.weight", "3.weight"}
    longest = {row.layer: row.wl for row in sorted(optimizer.trace, key=lambda row: row.wl)}
    assert longest["3.weight"] <= 7 < longest["0.weight"]


@pytest.mark.parametrize("plateau", [False, True])
def test_schedulers_change_the_rate(plateau):
    model = make_model()
    optimizer = make_optimizer(model, lr=0.1)
    if plateau:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    else:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, 1)
    for _ in range(2):
        scheduler.step(*([1.0] if plateau else []))
    assert optimizer.param_groups[0]["lr"] < 0.1
    before = copy.deepcopy(optimizer.state[model[0].weight])
    train(model, optimizer, 1)
    step = optimizer.state[model[0].weight]["master"] - before["master"]
    expected = -optimizer.param_groups[0]["lr"] * momentum_of(optimizer, model[0].weight)
    torch.testing.assert_close(step, expected, rtol=0, atol=2**-22)  # of a difference near 1


def test_a_tensor_rate():
    masters = []
    for lr in (torch.tensor(0.03), 0.03):
        model = make_model()
        optimizer = make_optimizer(model, lr=lr)
        train(model, optimizer, 3)
        masters.append([state["master"] for state in optimizer.state.values()])
    torch.testing.assert_close(*masters, rtol=1e-6, atol=1e-7)  # 0.03 is no float32


def test_accumulated_gradients_and_clipping_are_one_step():
    model = make_model()
    optimizer = make_optimizer(model)
    for x, y in batches(4):
        (nn.functional.cross_entropy(model(x), y) / 4).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step(loss=1.0)
    assert optimizer.state[model[0].weight]["layer"].count == 1


def test_grad_scaler():
    model, plain = make_model(), make_model()
    optimizer, unscaled = (make_optimizer(m, normalize_gradients=False) for m in (model, plain))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, y = next(batches(1))
    loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer, loss=loss)
    scaler.update()
    assert optimizer.state[model[0].weight]["layer"].count == 1
    train(plain, unscaled, 1)
    assert_same_bits(dict(model.state_dict()), dict(plain.state_dict()))  # 1024 is a power of 2
    model[0].weight.grad.fill_(math.inf)
    scaler.scale(torch.ones(1))
    scaler.step(optimizer, loss=loss)
    assert optimizer.state[model[0].weight]["layer"].count == 1


@pytest.mark.parametrize("loss", [None, 0.25])
def test_a_closure_that_returns_none_leaves_the_loss_that_was_given(loss):
    """Lightning's manual optimization gives one that does nothing."""
    p = nn.Parameter(torch.zeros(2, 2))
    optimizer = MSGD([p], lr=1.0)
    p.grad = torch.ones(2, 2)
    assert optimizer.step(lambda: loss, loss=0.5) == (loss or 0.5)
    assert optimizer.state_dict()["marvin"]["policy"]["shared"]["losses"] == (loss or 0.5,)


def test_closure_loss_is_returned():
    model = make_model()
    optimizer = make_optimizer(model)
    x, y = next(batches(1))

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.requires_grad
    assert optimizer.state_dict()["marvin"]["policy"]["shared"]["losses"] == (loss.item(),)


@pytest.mark.parametrize("how", ["trained", "not trained", "loaded", "new weights"])
def test_masters_that_are_weights_another_optimizer_rounded_are_named(how):
    model = make_model()
    before = make_optimizer(model)
    batch = next(batches(1))

    def step(optimizer):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step(loss=loss)

    if how != "not trained":
        step(before)
    optimizer = make_optimizer(model)
    if how == "loaded":
        optimizer.load_state_dict(before.state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if how == "new weights":
            with torch.no_grad():
                for p in model.parameters():
                    p.normal_()
        step(optimizer)
        step(optimizer)
    words = [str(w.message) for w in caught if "weights that MSGD has rounded" in str(w.message)]
    assert len(words) == (how == "trained")
    assert all("write optimizer.load_state_dict(before.state_dict())" in word for word in words)


def test_parameters_without_gradients_stay():
    model = make_model()
    optimizer = make_optimizer(model)
    frozen = model[3].weight.detach().clone()
    for x, _ in batches(8):
        optimizer.zero_grad()
        loss = model[:3](x).square().mean()
        loss.backward()
        optimizer.step(loss=loss)
    assert_same_bits(model[3].weight.detach(), frozen)
    assert {row.layer for row in optimizer.trace} == {"0.weight"}
    optimizer.zero_grad()
    assert optimizer.step(loss=1.0) == 1.0  # nothing to do


def test_tied_parameters_are_one_layer():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    optimizer = make_optimizer(model)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step(loss=1.0)
    assert list(optimizer.formats()) == ["0.weight"]


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_nonfinite_raises_by_name_and_changes_nothing(what):
    model = make_model()
    optimizer = make_optimizer(model)
    train(model, optimizer, 4)
    before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    model[3].weight.grad[0, 0] = math.nan if what == "gradient" else 0.0
    match = "gradient of 3.weight with norm nan" if what == "gradient" else "loss inf"
    with pytest.raises(FloatingPointError, match=match):
        optimizer.step(loss=math.inf if what == "loss" else 1.0)
    assert repr(optimizer.state_dict()) == repr(before[0])
    assert_same_bits(dict(model.state_dict()), dict(before[1]))


def test_nonfinite_names_a_few_of_many_gradients():
    params = [nn.Parameter(torch.zeros(2)) for _ in range(500)]
    optimizer = MSGD(params, lr=0.1, strategy="min")
    for p in params:
        p.grad = torch.full((2,), math.nan)
    with pytest.raises(
        FloatingPointError, match="gradient of 2 with norm nan and 497 more"
    ) as raised:
        optimizer.step()
    assert len(str(raised.value)) < 250


def test_nonfinite_can_be_skipped():
    model = make_model()
    optimizer = make_optimizer(model, nonfinite="skip")
    train(model, optimizer, 4)
    before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    model[3].weight.grad.fill_(math.inf)
    optimizer.step(loss=1.0)
    assert optimizer.skipped_steps == 1
    before[0]["marvin"]["skipped"] = 1  # nothing else has changed
    assert repr(optimizer.state_dict()) == repr(before[0])
    assert_same_bits(
        [s["master"] for s in optimizer.state_dict()["state"].values()],
        [s["master"] for s in before[0]["state"].values()],
    )
    assert_same_bits(dict(model.state_dict()), dict(before[1]))


def test_constant_weights_keep_their_lengths():
    weight = nn.Parameter(torch.zeros(2, 2))
    optimizer = MSGD([weight], lr=0.0, lookback=(1, 1), strategy="min")
    weight.grad = torch.ones(2, 2)
    optimizer.step()
    row = optimizer.trace[0]
    assert math.isnan(row.kl)
    assert (row.wl_min, row.fl_min) == (8, 4)


def test_adopted_weights_become_masters():
    model = make_model()
    optimizer = make_optimizer(model)
    with torch.no_grad():
        model[0].weight.fill_(0.3)
    optimizer.adopt_weights()
    master = optimizer.state[model[0].weight]["master"]
    assert_same_bits(master, torch.full_like(master, 0.3))
    fmt = optimizer.formats()["0.weight"]
    assert_same_bits(
        model[0].weight.detach(), quantize(model[0].weight.detach(), fmt, rounding="nearest")
    )


def test_the_strategy_follows_the_loss():
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = MSGD([weight], lookback=(2, 2))
    levels = []
    for loss in (1.0, 1.0, 1.0, 1.0, 0.5):
        weight.grad = torch.ones(2, 2)
        optimizer.step(loss=loss)
        levels.append(optimizer.strategy)
    assert levels == ["min", "min", "mean", "max", "min"]


def test_the_short_loss_is_the_mean_over_the_shortest_window():
    # of the last three before the fourth step the mean is 3; of the last three with it, 10 / 3
    levels = {}
    for strategy_loss in ("last", "short"):
        weight = nn.Parameter(torch.ones(2, 2))
        optimizer = MSGD([weight], lookback=(3, 3), strategy_loss=strategy_loss)
        for loss in (1.0, 4.0, 4.0, 2.0):
            weight.grad = torch.ones(2, 2)
            optimizer.step(loss=loss)
        levels[strategy_loss] = optimizer.strategy
    assert levels == {"last": "min", "short": "mean"}


def test_the_short_loss_is_the_mean_over_the_shortest_window_of_all_groups():
    levels = []
    for bounds in [(1, 3), (3, 3)], [(3, 3), (1, 3)], [(1, 3), (1, 3)]:
        weights = [nn.Parameter(torch.ones(2, 2)) for _ in bounds]
        groups = [{"params": [p], "lookback": own} for p, own in zip(weights, bounds, strict=True)]
        optimizer = MSGD(groups, strategy_loss="short")
        for loss in (1.0, 4.0, 4.0, 2.0):
            for p in weights:
                p.grad = torch.ones(2, 2)
            optimizer.step(loss=loss)
        levels.append(optimizer.strategy)
    assert levels == ["min", "min", "min"]


def test_windows_start_anew_after_a_switch():
    weight = nn.Parameter(torch.randn(3, 2))
    optimizer = MSGD([weight], lookback=(2, 2), strategy="min")
    for i in range(5):
        weight.grad = torch.randn(3, 2, generator=torch.Generator().manual_seed(i))
        optimizer.step()
        last = weight.grad / weight.grad.norm()
        if i in (1, 3):
            assert not optimizer.state[weight]["grad_sum"].any()
            assert optimizer.trace[-1].window == 2
    torch.testing.assert_close(optimizer.state[weight]["grad_sum"], last)


def trace_of(weights, **settings):
    weight = nn.Parameter(weights.clone())
    options = {"lookback": (1, 1), "resolution": (50, 50), "strategy": "min", "lr": 0.0}
    optimizer = MSGD([weight], **{**options, **settings})
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return optimizer.trace[0]


def test_the_tolerance_of_noise_falls_with_the_number_of_weights():
    weights = torch.randn(50, 40)
    settings = {"init_wl": 20, "init_fl": 16, "min_fl": 0}
    by_name, by_value, looser = (
        trace_of(weights, kl_eps=eps, **settings) for eps in ("noise", 49 / 4000, 0.49)
    )
    assert repr(by_name) == repr(by_value)
    assert looser.fl_min < by_name.fl_min


def test_the_full_range_goes_beyond_the_current_format():
    weights = torch.randn(60, 50) * 0.01
    current, full = (trace_of(weights, pushdown_range=r) for r in ("current", "full"))
    assert (current.wl_min, current.fl_min) == (8, 4)
    assert current.kl > 0.01
    assert full.kl <= 0.01
    # steps of about a quarter of a bin lose nothing
    bins = (weights.max() - weights.min()).item() / 50
    assert full.fl_min == pytest.approx(math.log2(4 / bins), abs=1.5)


def test_a_missing_loss_warns_once():
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    optimizer = MSGD([weight])
    with pytest.warns(UserWarning, match=r"needs step\(loss=loss\)"):
        optimizer.step()
    optimizer.step()


def test_the_users_generator_is_left_alone():
    model = make_model()
    optimizer = make_optimizer(model)
    marvin.quantize_activations(model, optimizer)
    before = torch.get_rng_state()
    train(model, optimizer, 6)
    assert torch.equal(before, torch.get_rng_state())


def test_seeds_differ():
    weights = [nn.Parameter(torch.full((50, 50), 0.3)) for _ in range(2)]
    for seed, weight in enumerate(weights):
        MSGD([weight], seed=seed)
    assert not torch.equal(*weights)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1}, "lr must be 0 or more, got lr=-1"),
        ({"lr": float("inf")}, "lr must be finite, got lr=inf"),
        ({"lr": torch.ones(2)}, "lr must be one number, got a tensor of 2"),
        ({"momentum": 1.0}, "momentum must be 0 or more and below 1"),
        ({"init_wl": 40}, "init_wl must be 2 bits to max_wl, got init_wl=40"),
        ({"buffer_bits": 0}, "buffer_bits must be 1 to max_wl - min_fl bits"),
        pytest.param(
            {"max_wl": 8, "buffer_bits": 5},
            "bits, got buffer_bits=5 with max_wl=8, min_fl=4$",
            id="with others",
        ),
        ({"lookback": (30, 20)}, "lookback must be two step counts"),
        ({"strategy": "up"}, "strategy must be one of .* got 'up'"),
        ({"kl_smoothing": 0}, "kl_smoothing must be above 0"),
        ({"kl_smoothing": float("inf")}, "kl_smoothing must be above 0 and finite, got"),
        ({"kl_eps": "exact"}, "kl_eps must be"),
        ({"kl_eps": float("inf")}, "kl_eps must be finite and >= 0, or"),
        ({"init_wl": 8.5}, r"init_wl must be a whole number of bits, got init_wl=8\.5"),
        ({"symmetric": "no"}, r"symmetric must be one of \(False, True\), got 'no'"),
        ({"normalize_gradients": "no"}, r"normalize_gradients must be one of \(False, True\)"),
        ({"quantize_gradients": 8}, r"quantize_gradients must be one of \(False, True\), got 8"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        MSGD([nn.Parameter(torch.ones(2, 2))], **settings)


def test_bad_parameters_are_named():
    with pytest.raises(TypeError, match=r"float16 parameters, got torch\.float64"):
        MSGD([nn.Parameter(torch.ones(2, 2, dtype=torch.float64))])
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = MSGD([weight])
    weight.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(RuntimeError, match="needs dense gradients, got a sparse one"):
        optimizer.step(loss=1.0)


def test_names_must_be_unique():
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizer = MSGD(layers[0].named_parameters())
    with pytest.raises(ValueError, match=r"must be unique, got \['bias', 'weight'\]"):
        optimizer.add_param_group({"params": list(layers[1].named_parameters())})
    assert list(optimizer.formats()) == ["weight", "bias"]


def test_loading_twice_adds_nothing_to_a_state():
    optimizer = make_optimizer(make_model())
    state = optimizer.state_dict()
    for _ in range(2):
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.state_dict()["param_groups"] == state["param_groups"]
    with_key = {**state["param_groups"][0], "differentiable": False}  # earlier versions added it
    optimizer.load_state_dict({**state, "param_groups": [with_key]})
    assert optimizer.state_dict()["param_groups"] == state["param_groups"]


def test_the_state_of_another_model_is_refused():
    optimizer = MSGD([("w", nn.Parameter(torch.ones(2, 3)))])
    other = MSGD([("w", nn.Parameter(torch.ones(3, 2)))])
    with pytest.raises(ValueError, match=r"state of w must have shape \(2, 3\), got \(3, 2\)"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.state_dict()["state"][0]["master"].shape == (2, 3)


def test_another_optimizers_state_is_refused():
    weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"the state must be of marvin\.Quantized or marvin\.MSGD"):
        MSGD([weight]).load_state_dict(torch.optim.SGD([weight]).state_dict())


@pytest.mark.gpu
def test_the_formats_are_the_same_on_both_devices():
    runs = []
    for device in ("cpu", "cuda"):
        weight = nn.Parameter(
            torch.randn(50, 40, generator=torch.Generator().manual_seed(0)).to(device)
        )
        optimizer = MSGD([weight], lookback=(3, 5))
        for i in range(20):
            weight.grad = torch.randn(50, 40, generator=torch.Generator().manual_seed(i)).to(device)
            optimizer.step(loss=1.0)
        runs.append(optimizer.formats())
    assert runs[0] == runs[1]


@pytest.mark.parametrize("name", ["grad_sum", "momentum_buffer"])
@pytest.mark.parametrize(
    "change",
    [lambda x: x[:1], lambda x: x.T, lambda x: x.flatten(), lambda x: torch.stack([x, x])],
    ids=["row", "turned", "flat", "stack"],
)
def test_windows_and_moments_of_another_shape_are_refused(change, name):
    """Sums would spread them, and kernels take as many elements for the same ones."""
    optimizer, other = (MSGD([("w", nn.Parameter(torch.ones(2, 3)))]) for _ in range(2))
    for own in (optimizer, other):
        own.param_groups[0]["params"][0].grad = torch.ones(2, 3)
        own.step(loss=1.0)
    state = copy.deepcopy(optimizer.state_dict())
    own = state["state"][0] if name == "grad_sum" else state["optimizer"]["state"][0]
    own[name] = change(own[name]).clone()
    before = other.state_dict()["state"][0]["master"].clone()
    with pytest.raises(ValueError, match=rf"of w must have {name} of shape \(2, 3\), got \("):
        other.load_state_dict(state)
    assert torch.equal(other.state_dict()["state"][0]["master"], before)


def test_adagrad_has_sums_where_a_state_has_none():
    """Torch 2.11's makes them in its constructor alone."""
    optimizer, other = (
        marvin.Quantized(
            torch.optim.Adagrad(
                [("w", nn.Parameter(torch.ones(2, 3)))], initial_accumulator_value=0.5
            ),
            marvin.FixedPolicy(8, 4),
        )
        for _ in range(2)
    )
    for own in (optimizer, other):
        own.param_groups[0]["params"][0].grad = torch.ones(2, 3)
        own.step(loss=1.0)
    state = optimizer.state_dict()
    del state["optimizer"]["state"][0]
    other.load_state_dict(state)
    (own,) = other.optimizer.state.values()
    assert_same(dict(own), {"step": torch.tensor(0.0), "sum": torch.full((2, 3), 0.5)})
    other.step(loss=1.0)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.Adamax, {}),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adadelta, {}),
    ],
)
def test_what_the_wrapped_optimizers_state_lacks_is_named(kind, options, compact):
    """Adam's next step stopped at a KeyError, SGD's momentum began anew."""
    optimizer, other = (
        marvin.Quantized(
            kind([("w", nn.Parameter(torch.ones(64, 64)))], 0.01, **options),
            marvin.FixedPolicy(8, 4),
            compact_state=compact,
        )
        for _ in range(2)
    )
    for own in (optimizer, other):
        own.param_groups[0]["params"][0].grad = torch.ones(64, 64)
        own.step(loss=1.0)
    whole = optimizer.state_dict()
    other.load_state_dict(whole)
    before = copy.deepcopy(other.state_dict())
    for key in whole["optimizer"]["state"][0]:
        state = copy.deepcopy(whole)
        del state["optimizer"]["state"][0][key]
        with pytest.raises(ValueError, match=key.removesuffix("_codes").removesuffix("_scales")):
            other.load_state_dict(state)
        assert_same(other.state_dict(), before)
    state = copy.deepcopy(whole)
    del state["optimizer"]["state"][0]  # as the error says
    other.load_state_dict(state)
    other.step(loss=1.0)


def test_a_wrapped_state_of_other_groups_is_refused_before_anything_changes():
    """torch refused it when the masters were those of the state already: neither a step nor a state went on."""
    optimizer = MSGD([("w", nn.Parameter(torch.ones(2, 3))), ("v", nn.Parameter(torch.ones(2, 3)))])
    optimizer.param_groups[0]["params"][0].grad = torch.arange(6.0).view(2, 3)
    optimizer.step(loss=1.0)
    before = optimizer.state_dict()
    state = copy.deepcopy(before)
    state["optimizer"]["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters, .* got \[1\]: load a whole"):
        optimizer.load_state_dict(state)
    assert_same(optimizer.state_dict(), before)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (("optimizer",), "the state must have optimizer, got"),
        (("optimizer", "state"), "optimizer, in the state, must have state, got"),
        (("marvin", "policy"), "marvin, in the state, must have policy, got"),
        (("marvin", "policy", "shared"), "the policy of the state must have shared, got"),
        (("marvin", "trace", 0, "wl"), "a row of the state's trace must have wl, got"),
        (("state", 0, "grad_sum"), "the state of w must have grad_sum, got"),
        (("state", 0, "layer"), "the state of w must have layer, got"),
        (("state", 0, "layer", "fmt"), "the layer of w must have fmt, got"),
        (("state", 0, "layer", "fmt", "wl"), "fmt of w must be a whole format, got"),
    ],
    ids=lambda part: ".".join(map(str, part)) if isinstance(part, tuple) else "",
)
def test_what_a_state_lacks_is_named_before_anything_changes(path, message):
    """Otherwise the next step stops at a KeyError, or goes on with formats and momentum of no training."""
    optimizer, other = (
        MSGD([("w", nn.Parameter(torch.ones(2, 3)))], lookback=(1, 1)) for _ in range(2)
    )
    for own in (optimizer, other):
        for _ in range(3):
            own.param_groups[0]["params"][0].grad = torch.arange(6.0).view(2, 3)
            own.step(loss=1.0)
    state = copy.deepcopy(optimizer.state_dict())
    table = state
    for key in path[:-1]:
        table = table[key]
    del table[path[-1]]
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)
    assert other.state_dict()["marvin"] == before["marvin"]
    assert torch.equal(other.state_dict()["state"][0]["master"], before["state"][0]["master"])
