import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import marvin
from fixedpoint_kernels import FixedPoint, quantize
from marvin import MSGD, fake_quantize

FORMAT = FixedPoint(6, 3)  # -4 to 3.875


def make(**settings):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    optimizer = MSGD(model.named_parameters(), **settings)
    return model, optimizer


def neighbours(x, fmt):
    """Return the numbers of a format below and above each value: an oracle of its own, in float64."""
    last = 2 ** (fmt.wl - 1) - 1
    codes = [whole(x.detach().double() * 2.0**fmt.fl) for whole in (torch.floor, torch.ceil)]
    return [c.clamp(-last - 1, last) * 2.0**-fmt.fl for c in codes]


def nearest(x, fmt):
    """Return what rounding to nearest, ties to even, gives; of the same oracle."""
    last = 2 ** (fmt.wl - 1) - 1
    codes = torch.round(x.detach().double() * 2.0**fmt.fl).clamp(-last - 1, last)
    return codes * 2.0**-fmt.fl


def is_in(x, fmt):
    return torch.equal(nearest(x, fmt), x.detach().double())


def watch(model, optimizer, **options):
    """Quantise activations; return what each rounding takes and gives: ``{(name, side): [x, y]}``."""
    seen = {}

    def note(key):
        return lambda x: seen.setdefault(key, []).append(x.detach().clone())

    def notes(module, name):
        before, after = note((name, "in")), note((name, "out"))
        module.register_forward_pre_hook(lambda _m, x: before(x[0]))
        module.register_forward_hook(lambda _m, _x, y: after(y))

    for name, module in model.named_children():
        notes(module, name)
    handle = marvin.quantize_activations(model, optimizer, **options)
    for name, module in model.named_children():
        notes(module, name)
    return handle, seen


# of ``make``: what is rounded, and the layer whose format it takes
ROUNDED = {
    ("0", "in"): "0.weight",
    ("0", "out"): "0.weight",
    ("1", "out"): "0.weight",
    ("3", "in"): "0.weight",
    ("3", "out"): "0.weight",
    ("5", "in"): "5.weight",
    ("5", "out"): "5.weight",
}


@pytest.mark.parametrize("ste", ["clip", "identity"])
def test_straight_through_gradients(ste):
    x = torch.tensor([-9.0, -4.0, 0.3, 3.875, 4.2, 9.0], requires_grad=True)
    y = fake_quantize(x, FORMAT, rounding="nearest", ste=ste)
    y.backward(torch.arange(1.0, 7.0))
    assert y.tolist() == [-4, -4, 0.25, 3.875, 3.875, 3.875]
    inside = torch.tensor([0, 1, 1, 1, 0, 0]) if ste == "clip" else torch.ones(6)
    torch.testing.assert_close(x.grad, torch.arange(1.0, 7.0) * inside, rtol=0, atol=0)


def test_nothing_is_kept_for_backward_where_nothing_saturates():
    x = torch.ones(4, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fake_quantize(x, FORMAT)
        assert kept == []
        fake_quantize(x * 99, FORMAT)
    assert [t.dtype for t in kept if t.dtype is torch.bool] == [torch.bool]


class Spelled(nn.Module):
    """Rounds by torch's operators alone, with a straight-through gradient."""

    def __init__(self, fmt, clip):
        super().__init__()
        self.fmt, self.clip = fmt, clip

    def forward(self, x):
        low, high = -(2.0**self.fmt.il), 2.0**self.fmt.il - self.fmt.lsb
        y = (x.detach() / self.fmt.lsb).round().mul(self.fmt.lsb).clamp(low, high)
        through = x.clamp(low - self.fmt.lsb / 2, high + self.fmt.lsb / 2) if self.clip else x
        return y + (through - through.detach())


class Rounding(nn.Module):
    def __init__(self, fmt, ste):
        super().__init__()
        self.fmt, self.ste = fmt, ste

    def forward(self, x):
        return fake_quantize(x, self.fmt, rounding="nearest", ste=self.ste)


@pytest.mark.parametrize("ste", ["clip", "identity"])
def test_gradients_are_differentiated_again(ste):
    fmt = FixedPoint(5, 3)  # up to 2: some are clamped
    found = []
    for rounding in (Rounding(fmt, ste), Spelled(fmt, ste == "clip")):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 16), rounding, nn.Tanh(), nn.Linear(16, 16), rounding, nn.Linear(16, 1)
        )
        x = (3 * torch.randn(32, 4)).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        ((slope.norm(dim=1) - 1) ** 2).mean().backward()
        found.append([slope.detach(), x.grad, *(model[i].weight.grad for i in (0, 3, 5))])
    for own, spelled in zip(*found, strict=True):
        assert own.abs().sum() > 0
        torch.testing.assert_close(own, spelled, rtol=1e-5, atol=1e-6)  # sums in another order


def test_a_penalty_trains_a_model_whose_inputs_are_measured():
    x, found = torch.randn(16, 2), []
    for weight in (0.0, 10.0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
        sgd = torch.optim.SGD(model.named_parameters(), lr=0.02)
        optimizer = marvin.Quantized(sgd, marvin.LossBudgetPolicy(window=1, batch_size=16))
        marvin.quantize_activations(model, optimizer)
        for _ in range(40):
            optimizer.zero_grad()
            own = x.clone().requires_grad_()
            y = model(own)
            (slope,) = torch.autograd.grad(y.sum(), own, create_graph=True)
            loss = (y - 5 * x[:, :1]).square().mean() + weight * slope.square().mean()
            loss.backward()
            optimizer.step(loss=loss)
        found.append(slope.square().mean().item())
    assert found[1] < found[0] / 4


def test_gradients_of_many_losses_at_once_are_those_of_each():
    x, weights = torch.randn(8, 5, requires_grad=True), torch.randn(3, 8, 5)
    y = fake_quantize(4 * x, FixedPoint(4, 2), seed=3)
    each = [torch.autograd.grad(y, x, weight, retain_graph=True)[0] for weight in weights]
    (together,) = torch.autograd.grad(y, x, weights, is_grads_batched=True)
    assert torch.equal(together, torch.stack(each))
    assert (together == 0).any()  # where the value was clamped


def test_gradients_that_are_rounded_are_not_differentiated_again():
    rounding = marvin.Quantizer(backward_format=FixedPoint(8, 4))
    x = torch.ones(3, requires_grad=True)
    (grad,) = torch.autograd.grad(rounding(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative: .* use a policy"):
        grad.sum().backward()


@pytest.mark.parametrize("training", [True, False])
def test_layers_see_and_give_numbers_of_their_format(training):
    model, optimizer = make()
    model.train(training)
    marvin.quantize_activations(model, optimizer)
    seen = {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda _m, x, y, name=name: seen.update({name: (x[0], y)}))
    model(torch.randn(2, 2, 8, 8))
    for name in ("0", "1", "3", "5"):
        fmt = optimizer.formats()["5.weight" if name == "5" else "0.weight"]
        assert all(is_in(x, fmt) for x in seen[name])


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_gradients", [True, False])
@pytest.mark.parametrize("eval_rounding", ["nearest", "stochastic"])
def test_eval_rounds_as_asked(autocast, has_gradients, eval_rounding):
    model, optimizer = make()
    _, seen = watch(model.eval(), optimizer, eval_rounding=eval_rounding)
    with (
        torch.set_grad_enabled(has_gradients),
        torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None),
    ):
        model(torch.randn(16, 2, 8, 8))
    off_nearest = 0
    for key, owner in ROUNDED.items():
        (x, y), fmt = seen[key], optimizer.formats()[owner]
        assert y.dtype is x.dtype
        to_nearest = nearest(x, fmt)
        if eval_rounding == "nearest":
            assert torch.equal(y.double(), to_nearest), key
        below, above = neighbours(x, fmt)
        assert ((y == below) | (y == above)).all(), key
        off_nearest += (y != to_nearest).sum()
    assert not torch.equal(*seen["0", "in"])
    assert not torch.equal(*seen["0", "out"])
    assert (off_nearest > 0) == (eval_rounding == "stochastic")


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
def test_training_rounds_stochastically(autocast):
    model, optimizer = make()
    _, seen = watch(model, optimizer)
    x = torch.randn(16, 2, 8, 8)
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        loss = model(x).float().square().sum()
        model(x)
    for key, owner in ROUNDED.items():
        first, second = seen[key][:2], seen[key][2:]
        fmt = optimizer.formats()[owner]
        for before, after in (first, second):
            assert after.dtype is before.dtype
            below, above = neighbours(before, fmt)
            assert ((after == below) | (after == above)).all(), key
    # in the input of the first layer both neighbours come, as often as the distance says, and
    # the second pass has noise of its own
    (x, one), (_, two) = seen["0", "in"][:2], seen["0", "in"][2:]
    below, above = neighbours(x, FixedPoint(8, 4))
    is_between = (below < x) & (x < above)
    share = (x - below)[is_between] * 16
    up = (one == above)[is_between]
    deviation = (share * (1 - share)).sum().sqrt()
    assert (up.sum() - share.sum()).abs() < 5 * deviation
    assert (up != (share > 0.5)).any()
    assert not torch.equal(one, two)
    before = {p: state["master"].clone() for p, state in optimizer.state.items()}
    loss.backward()
    optimizer.step(loss=loss)
    assert not any(torch.equal(optimizer.state[p]["master"], old) for p, old in before.items())


@pytest.mark.parametrize("ste", ["clip", "identity"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_gradients_pass_where_nothing_was_clamped(ste, autocast):
    """A layer that is the identity: its gradient is 1 between both roundings, and 0 outside."""
    layer = nn.Linear(1, 1)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.bias.fill_(0.0)
    optimizer = MSGD(layer.named_parameters(), init_wl=4, init_fl=2)  # -2 to 1.75
    marvin.quantize_activations(layer, optimizer, ste=ste)
    x = torch.tensor([[-9.0], [-2.0], [-0.5], [0.25], [1.75], [2.25], [9.0]], requires_grad=True)
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        y = layer(x)
    y.float().backward(torch.arange(1.0, 8.0)[:, None])
    assert y.flatten().tolist() == [-2, -2, -0.5, 0.25, 1.75, 1.75, 1.75]
    inside = [0, 2, 3, 4, 5, 0, 0] if ste == "clip" else [1, 2, 3, 4, 5, 6, 7]
    assert x.grad.flatten().tolist() == inside


def test_removing_restores_the_model():
    model, optimizer = make()
    model.eval()
    x = torch.randn(4, 2, 8, 8)
    before, keys = model(x), list(model.state_dict())
    handle = marvin.quantize_activations(model, optimizer)
    assert not torch.equal(model(x), before)
    assert [key for key in model.state_dict() if not key.endswith("fixed_point")] == keys
    handle.remove()
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)
    assert list(model.state_dict()) == keys


def test_formats_are_the_current_ones():
    model, optimizer = make(init_wl=6, init_fl=1, lookback=(1, 1))
    marvin.quantize_activations(model, optimizer)
    model(torch.randn(2, 2, 8, 8)).sum().backward()
    optimizer.step(loss=1.0)
    assert optimizer.formats()["5.weight"] != FixedPoint(6, 1)
    output = model.eval()(torch.randn(50, 2, 8, 8) * 5)
    assert is_in(output, optimizer.formats()["5.weight"])
    assert not is_in(output, FixedPoint(6, 1))


def test_saturation_is_counted_since_the_last_call():
    model, optimizer = make(init_wl=4, init_fl=2)  # -2 to 1.75
    handle = marvin.quantize_activations(model, optimizer)
    assert handle.layers() == ["0", "1", "3", "5"]
    model(torch.full((2, 2, 8, 8), 9.0, requires_grad=True))
    assert handle.saturation()["0"] > 0.1
    assert set(handle.saturation().values()) == {0.0}


def test_saturated_values_get_no_gradient_and_others_do():
    model, optimizer = make(init_wl=4, init_fl=2)
    marvin.quantize_activations(model, optimizer)
    x = torch.randn(2, 2, 8, 8) * 2
    x.requires_grad_()
    model(x).sum().backward()
    clamped = (x < -2.25) | (x > 2)
    assert clamped.any()
    assert (x.grad[clamped] == 0).all()
    assert (x.grad[(x > -2) & (x < 1.75)] != 0).any()


def test_what_has_the_format_is_not_rounded_again(monkeypatch):
    model, optimizer = make()
    marvin.quantize_activations(model, optimizer)
    calls = []
    monkeypatch.setattr(
        marvin.straight_through,
        "round_one",
        lambda x, fmt, **kw: calls.append(fmt) or quantize(x, fmt, **kw),
    )
    with torch.no_grad():
        model(torch.randn(2, 2, 8, 8))
    # conv in and out, norm out (its input is the conv's output), pool in and out, linear in and out
    assert len(calls) == 7


class Shrink(nn.Module):
    def forward(self, x):
        return x.mul_(0.3)


def test_what_was_changed_in_place_is_rounded_again():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Shrink(), nn.AvgPool1d(1))
    optimizer = MSGD(model.named_parameters())
    _, seen = watch(model.eval(), optimizer)
    with torch.no_grad():
        model(torch.randn(4, 6))
    given, rounded = seen["2", "in"]
    assert not is_in(given, FixedPoint(8, 4))
    assert torch.equal(rounded.double(), nearest(given, FixedPoint(8, 4)))


def test_other_modules_are_refused():
    _, optimizer = make()
    with pytest.raises(ValueError, match="no module of the model has a parameter"):
        marvin.quantize_activations(nn.ReLU(), optimizer)
    with pytest.raises(ValueError, match=r"ste must be one of .* got 'none'"):
        fake_quantize(torch.ones(1), FORMAT, ste="none")


def test_embeddings_and_tuples():
    torch.manual_seed(0)
    model = nn.ModuleDict({"e": nn.Embedding(5, 4), "r": nn.LSTM(4, 3)})
    optimizer = MSGD(model.named_parameters())
    marvin.quantize_activations(model, optimizer)
    embedded = model["e"](torch.tensor([[1, 2]]))
    output, (h, c) = model["r"](embedded)
    fmt = optimizer.formats()["r.weight_ih_l0"]
    assert is_in(embedded, optimizer.formats()["e.weight"])
    assert is_in(output, fmt)
    assert not is_in(output * 0.3, fmt)
    assert isinstance(h, torch.Tensor)
    assert isinstance(c, torch.Tensor)


def test_a_checkpoint_takes_other_noise_that_clamps():
    seeds = []

    def rounded(x):
        seeds.append(len(seeds))
        return fake_quantize(x, FixedPoint(4, 0), seed=seeds[-1])  # -8.5 is clamped or not

    found = set()
    for _ in range(10):
        x = torch.full((1,), -8.5, requires_grad=True)
        checkpoint(rounded, x, use_reentrant=False).backward()
        found.add(x.grad.item())
    assert found == {0.0, 1.0}
    assert len(seeds) == 20
