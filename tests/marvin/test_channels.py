"""Weights with a fractional length for each channel."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import marvin
from fixedpoint_kernels import FixedPoint, quantize
from marvin import LossBudgetPolicy, Quantized, StaticPolicy
from marvin.channels import ChannelFormat, channel_format
from marvin.rounding import round_many, round_one

FMT = ChannelFormat(FixedPoint(5, 2), (0, 3, 1, 7))
X = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(4, 3, 3, 3), (4, 27)])
def test_each_channel_is_rounded_to_its_own_format(shape):
    x = X.view(shape)
    y = round_one(x, FMT, rounding="nearest")
    for c in range(4):
        wanted = quantize(x[c], FMT.channel(c), rounding="nearest")
        torch.testing.assert_close(y[c], wanted, rtol=0, atol=0)
    assert [FMT.channel(c).fl for c in range(4)] == [2, 5, 3, 9]


def test_noise_is_that_of_the_position_in_the_whole_tensor():
    out = [torch.empty_like(X), torch.empty(2, 27)]
    fixed = FixedPoint(6, 3)
    whole = round_many([X, X.view(4, 27)[:2]], [FMT, fixed], seed=3, stream=5, out=out)
    assert whole[0] is out[0]
    again = round_one(X, FMT, seed=3, stream=5)
    torch.testing.assert_close(out[0], again, rtol=0, atol=0)
    alone = quantize(X.view(4, 27)[:2], fixed, seed=3, stream=6)
    torch.testing.assert_close(out[1], alone, rtol=0, atol=0)
    (rows,) = round_many([X[2:]], [FMT], seed=3, stream=5, offsets=[2 * 27])
    torch.testing.assert_close(rows, again[2:], rtol=0, atol=0)


def test_the_whole_format_has_every_value():
    y = round_one(8 * X, FMT)
    torch.testing.assert_close(quantize(y, FMT.whole()), y, rtol=0, atol=0)
    assert FMT.whole() == FixedPoint(12, 9)
    with pytest.raises(ValueError, match="word length must be 2 to 32 bits"):
        ChannelFormat(FixedPoint(30, 0), (0, 3)).whole()


@pytest.mark.parametrize("shifts", [(-1,), (-1, 2), (0.5,), (True,), (), [0, 1], 3])
def test_shifts_are_whole_numbers_from_0_on(shifts):
    with pytest.raises(ValueError, match="shifts must be a tuple of a whole number for each"):
        ChannelFormat(FixedPoint(8, 4), shifts)


def test_channels_are_of_a_fixed_point_format():
    with pytest.raises(TypeError, match=r"fmt must be a FixedPoint, .* got 8"):
        ChannelFormat(8, (0,))  # pyright: ignore[reportArgumentType]
    with pytest.raises(IndexError, match="one of 4 channels, got 5"):
        FMT.channel(5)
    unsigned = ChannelFormat(FixedPoint(8, 4, signed=False), (0, 2))
    assert unsigned.channel(1) == FixedPoint(8, 6, signed=False)
    assert unsigned.whole() == FixedPoint(10, 6, signed=False)


def test_spare_integer_bits_become_fractional_ones():
    fmt = channel_format(
        FixedPoint(6, 3), [2, 0, None, -40, 3]
    )  # the last needs more than there is
    assert fmt.shifts == (0, 2, 0, 28, 0)
    assert (fmt.wl, fmt.fl) == (6, 3)


def make(policy, lr=0.02, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    with torch.no_grad():
        model[0].weight.mul_(torch.tensor([4.0, 1.0, 1.0, 0.25, 0.01, 0.0]).view(-1, 1))
    optimizer = Quantized(torch.optim.SGD(model.named_parameters(), lr=lr), policy, **options)
    marvin.quantize_activations(model, optimizer)
    return model, optimizer


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
        loss.backward()
        optimizer.step(loss=loss)


def test_static_words_reach_each_channels_largest_value():
    model, optimizer = make(StaticPolicy(5, 8, window=3, per_channel=True), lr=0.0)
    train(model, optimizer, 3)
    fmt, master = optimizer.formats()["0.weight"], optimizer.state[model[0].weight]["master"]
    assert isinstance(fmt, ChannelFormat)
    for c, row in enumerate(master):
        if row.abs().max() > 0:
            own = fmt.channel(c)
            largest = (own.max_code + 1) * own.lsb
            assert largest / 2 < row.abs().max() <= largest
    torch.testing.assert_close(
        model[0].weight.detach(), round_one(master, fmt, rounding="nearest"), rtol=0, atol=0
    )
    coarse = quantize(master, fmt.fmt, rounding="nearest")
    assert (model[0].weight - master).norm() < (coarse - master).norm()
    row = next(row for row in reversed(optimizer.trace) if row.layer == "0.weight")
    assert (row.wl, row.fl) == (5, fmt.fl)
    assert optimizer.mean_word_length() == 5


def test_a_budget_counts_the_noise_that_is_spared():
    found = {}
    for per_channel in (False, True):
        policy = LossBudgetPolicy(window=4, min_wl=2, max_wl=16, per_channel=per_channel)
        model, optimizer = make(policy)
        train(model, optimizer, 1)  # float until its end: the same gradients and masters
        train(model, optimizer, 1, start=1)
        found[per_channel] = optimizer.formats()["0.weight"].wl
    assert found[True] < found[False]


def test_biases_may_have_the_layers_format():
    model, optimizer = make(StaticPolicy(6, 6, per_channel=True), one_dim="previous")
    train(model, optimizer, 2)
    assert optimizer.formats()["0.bias"] == optimizer.formats()["0.weight"].fmt


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("last", [False, True])
def test_a_layer_whose_channels_were_cut_computes_in_float(last, training):
    """As pruning leaves it: formats are of the channels that there were."""
    torch.manual_seed(0)
    layers = nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for own in (layers[0], layers[2]):
            own.weight *= 2.0 ** -(torch.arange(len(own.weight)) % 4)[:, None]
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.01)
    optimizer = marvin.Quantized(sgd, StaticPolicy(6, 6, per_channel=True))
    marvin.quantize_activations(model, optimizer)
    marvin.integer.convert(model)
    x = torch.randn(8, 16)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    cut, kept = (layers[2], 8) if last else (layers[0], 16)
    cut.weight, cut.bias = (nn.Parameter(p.detach()[:kept]) for p in cut.parameters())
    if not last:
        layers[2].weight = nn.Parameter(layers[2].weight.detach()[:, :16].clone())
    model.train(training)
    twin = copy.deepcopy(model)
    marvin.integer.revert(twin)
    torch.testing.assert_close(model(x), twin(x))
    rows = marvin.integer.report(model).rows
    left, count = (rows[1], (8, 16)) if last else (rows[0], (16, 32))
    assert f"its weight has {count[0]} channels, its formats are of {count[1]}" in left.reason
    assert [row.reason for row in rows if row is not left] == [""]


@pytest.mark.parametrize(
    "policy",
    [
        lambda: StaticPolicy(per_channel=True, window=3),
        lambda: LossBudgetPolicy(per_channel=True, window=3),
    ],
)
def test_resume_equals_never_stopping(policy):
    model, optimizer = make(policy())
    train(model, optimizer, 4)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, 5, start=4)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, resumed = make(policy())
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(other, resumed, 5, start=4)
    assert resumed.formats() == optimizer.formats()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
