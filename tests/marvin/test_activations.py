import pytest
import torch
from torch import nn

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


def is_in(x, fmt):
    return torch.equal(quantize(x.detach(), fmt, rounding="nearest"), x.detach())


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


def test_differentiating_twice_raises():
    x = torch.ones(3, requires_grad=True)
    (grad,) = torch.autograd.grad(fake_quantize(x, FORMAT).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
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


def test_training_rounds_stochastically_and_eval_to_nearest():
    model, optimizer = make()
    x = torch.randn(4, 2, 8, 8)
    marvin.quantize_activations(model, optimizer)
    model[1].momentum = 0.0
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


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
    assert is_in(output, fmt)
    assert isinstance(h, torch.Tensor)
    assert isinstance(c, torch.Tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    model, optimizer = make()
    marvin.quantize_activations(model, optimizer)
    with torch.autocast("cpu", dtype=dtype):
        loss = model(torch.randn(2, 2, 8, 8)).float().square().sum()
    loss.backward()
    optimizer.step(loss=loss)
