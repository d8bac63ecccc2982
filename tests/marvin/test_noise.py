"""Which noise each draw of a run takes, as numbers: no two draws share a stream."""

import numpy as np
import pytest
import torch
from torch import nn

import marvin
from fixedpoint_kernels import FixedPoint, histogram_candidates, quantize
from marvin import MSGD
from marvin.noise import Purpose, stream
from marvin.policies.push_down import kl

FORMAT = FixedPoint(8, 4)
SEED = 7


def make(**settings):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(9, 5)), nn.Parameter(torch.randn(4, 3))]
    options = {"lr": 0.5, "momentum": 0.0, "weight_decay": 0.0, "normalize_gradients": False}
    floats = [p.detach().clone() for p in params]
    optimizer = MSGD(params, seed=SEED, strategy="min", **{**options, **settings})
    return floats, params, optimizer


def step(params, optimizer):
    for p in params:
        p.grad = torch.randn(p.shape)
    optimizer.step()


def same(actual, expected):
    return torch.equal(actual.detach(), expected)


def test_first_weights():
    floats, params, _ = make()
    for j, (x, p) in enumerate(zip(floats, params, strict=True)):
        assert same(p, quantize(x, FORMAT, seed=SEED, stream=j))


def test_parameters_that_come_later_have_noise_of_their_own():
    floats = torch.randn(9, 5)
    params = [nn.Parameter(floats.clone()) for _ in range(3)]
    optimizer = MSGD(params[:1], seed=SEED)
    for p in params[1:]:
        optimizer.add_param_group({"params": [p]})
    for j, p in enumerate(params):
        assert same(p, quantize(floats, FORMAT, seed=SEED, stream=j))


def test_weights_that_others_changed_have_noise_of_their_own():
    """Not that of the step before: it rounded the first parameter."""
    _, params, optimizer = make()
    step(params, optimizer)
    floats = torch.randn(4, 3)
    with torch.no_grad():
        params[1].copy_(floats)
    with pytest.warns(UserWarning, match="the new masters"):
        optimizer.end_epoch()
    fmt = optimizer.formats()["1"]
    assert same(params[1], quantize(floats, fmt, seed=SEED, stream=stream(Purpose.INITIAL, 1, 1)))


def test_weights_of_each_step():
    _, params, optimizer = make()
    for number in (1, 2, 3):
        step(params, optimizer)
        for j, p in enumerate(params):
            stream = 1 << 60 | number << 20 | j
            master = optimizer.state[p]["master"]
            assert same(p, quantize(master, FORMAT, seed=SEED, stream=stream))


@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_of_each_step(groups):
    _, params, _ = make()
    of_groups = [[p] for p in params] if groups == 2 else [params]
    optimizer = MSGD(
        [{"params": group} for group in of_groups],
        lr=1.0,
        momentum=0.0,
        weight_decay=0.0,
        normalize_gradients=False,
        quantize_gradients=True,
        seed=SEED,
        strategy="min",
    )
    for number in (0, 1):
        before = [optimizer.state[p]["master"].clone() for p in params]
        step(params, optimizer)
        for j, (p, old) in enumerate(zip(params, before, strict=True)):
            stream = 2 << 60 | number << 20 | j
            rounded = quantize(p.grad, FORMAT, seed=SEED, stream=stream)
            assert same(optimizer.state[p]["master"], old - rounded)


@pytest.mark.parametrize("sizes", [[1] * 257, [4097, 1]], ids=["groups", "layers"])
def test_many_gradients_share_no_noise(sizes, monkeypatch):
    groups = [{"params": [nn.Parameter(torch.zeros(2, 2)) for _ in range(n)]} for n in sizes]
    optimizer = MSGD(groups, lr=0.0, quantize_gradients=True, seed=SEED, strategy="min")
    ranges, rounded = [], marvin.gradients.round_many

    def noted(xs, *args, stream, **more):
        ranges.append(range(stream, stream + len(xs)))
        return rounded(xs, *args, stream=stream, **more)

    monkeypatch.setattr(marvin.gradients, "round_many", noted)
    for _ in range(2):
        step([p for group in groups for p in group["params"]], optimizer)
    assert len({place for own in ranges for place in own}) == 2 * sum(sizes)


def test_push_down_of_each_layer():
    settings = {"lookback": (1, 1), "resolution": (20, 20), "kl_counts": "sampled", "lr": 0.0}
    _, params, optimizer = make(**settings, init_wl=5, init_fl=1, min_fl=1)
    for number in (1, 2):
        step(params, optimizer)
        for index, row in enumerate(optimizer.trace[-2:]):
            master = optimizer.state[params[index]]["master"]
            stream = 3 << 60 | number << 20 | index
            fmt = FixedPoint(row.wl_min, row.fl_min)
            counts = histogram_candidates(master, [fmt], 20, seed=SEED, stream=stream)
            own, rounded = counts.numpy().astype(np.float64)
            assert row.kl == kl(rounded, own)


def test_activations_of_each_pass_and_process(monkeypatch):
    layer = nn.Linear(5, 2)
    optimizer = MSGD(layer.named_parameters(), seed=SEED)
    marvin.quantize_activations(layer, optimizer)
    seen = []
    layer.register_forward_pre_hook(lambda _m, x: seen.append(x[0]))
    x = torch.randn(8, 5)
    layer(x)
    assert same(seen[0], quantize(x, FORMAT, seed=SEED, stream=4 << 60 | 1 << 20))
    monkeypatch.setattr(marvin.rounder, "rank", lambda: 3)
    layer(x)
    before = 2  # the first input and output
    assert same(seen[1], quantize(x, FORMAT, seed=SEED, stream=4 << 60 | before + 1 << 20 | 3))
