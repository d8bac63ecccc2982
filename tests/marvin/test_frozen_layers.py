"""The loss budget where layers are frozen in mid-training: they keep their formats, and count."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import marvin

MADDS = (("0.weight", 512), ("2.weight", 4096), ("4.weight", 192))


def make(policy):
    torch.manual_seed(0)
    layers = nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
    model = nn.Sequential(*layers)
    adam = torch.optim.Adam(model.named_parameters(), lr=1e-2)
    optimizer = marvin.Quantized(adam, policy)
    marvin.quantize_activations(model, optimizer)
    return model, optimizer


def train(model, optimizer, steps):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 8, generator=generator)
    labels = torch.randint(3, (64,), generator=generator)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step(loss=loss)


def ebops(optimizer):
    weights, inputs = optimizer.formats(), optimizer.input_formats()
    rows = ((n, weights[name], inputs[name]) for name, n in MADDS)
    return sum(n * (w.wl - w.signed) * (x.wl - x.signed) for n, w, x in rows)


def mean_bits(optimizer):
    return (optimizer.mean_word_length() + optimizer.mean_input_word_length()) / 2


@pytest.mark.parametrize(
    ("target", "found"),
    [({"target_ebops": 60_000, "madds": MADDS}, ebops), ({"target_bits": 5.0}, mean_bits)],
    ids=["ebops", "bits"],
)
def test_a_target_is_of_all_layers(target, found):
    model, optimizer = make(marvin.LossBudgetPolicy(window=5, **target))
    wanted = next(iter(target.values()))
    near = 1 / 6 if found is mean_bits else wanted / 10
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a target that is not met
        train(model, optimizer, 20)
        assert abs(found(optimizer) - wanted) <= near
        model[2].requires_grad_(False)
        optimizer.zero_grad()
        train(model, optimizer, 40)
        assert abs(found(optimizer) - wanted) <= near


@pytest.mark.parametrize("frozen", [0, 4])
@pytest.mark.parametrize(
    "policy",
    [
        marvin.LossBudgetPolicy(window=5, kappa=1, max_noise=(0.1, 0.1), ends_wl=8),
        marvin.StaticPolicy(4, 4, window=5, ends_wl=8),
    ],
    ids=["loss budget", "static"],
)
def test_the_first_and_the_last_layer_are_those_of_all(policy, frozen):
    model, optimizer = make(policy)
    train(model, optimizer, 20)
    before = {name: fmt.wl for name, fmt in optimizer.formats().items() if "weight" in name}
    assert [before[name] == 8 for name, _ in MADDS] == [True, False, True]
    model[frozen].requires_grad_(False)
    optimizer.zero_grad()
    train(model, optimizer, 20)
    now = {name: fmt.wl for name, fmt in optimizer.formats().items()}
    assert [now[name] == 8 for name, _ in MADDS] == [True, False, True]


def test_what_is_frozen_is_looked_up_once_a_step(monkeypatch):
    model, optimizer = make(marvin.LossBudgetPolicy())
    looks, frozen = [], marvin.Quantized._frozen
    monkeypatch.setattr(marvin.Quantized, "_frozen", lambda own: looks.append(0) or frozen(own))
    train(model, optimizer, 1)
    assert len({row.layer for row in optimizer.trace}) == 3  # all change their formats
    assert len(looks) == 1
