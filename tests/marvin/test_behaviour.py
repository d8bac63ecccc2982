"""What a correct build shows when it trains: the word lengths of a small network on digits."""

from pathlib import Path

import pytest
import torch
from torch import nn

import marvin
from train.data import load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:values are clamped"),  # logits, as in the paper
]


def network():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 24, 3, stride=2, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24 * 16, 10),
    )
    return marvin.tnvs_(model)


@pytest.fixture(scope="module")
def digits():
    data = load("digits", Path("."))

    def ready(images):
        x = images.images.float() / 255
        return (x - 0.31) / 0.38, images.labels

    return ready(data.train), ready(data.test)


def train(digits, *, steps=400, optimizer=None, **settings):
    (x, y), (x_test, y_test) = digits
    model = network()
    if optimizer is None:
        optimizer = marvin.MSGD(model.named_parameters(), lr=0.02, **settings)
        marvin.quantize_activations(model, optimizer)
    else:
        optimizer = optimizer(model.parameters())
    order = torch.Generator().manual_seed(0)
    means = []
    for step in range(steps):
        chosen = torch.randint(0, len(x), (64,), generator=order)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
        loss.backward()
        if isinstance(optimizer, marvin.MSGD):
            optimizer.step(loss=loss)
            means.append(optimizer.mean_word_length())
        else:
            optimizer.step()
        if step == steps * 3 // 5:
            optimizer.param_groups[0]["lr"] /= 10
    with torch.no_grad():
        accuracy = (model.eval()(x_test).argmax(1) == y_test).float().mean().item()
    return optimizer, means, accuracy


def late(means):
    return sum(means[len(means) // 2 :]) / (len(means) - len(means) // 2)


def test_word_lengths_climb_to_a_plateau_and_accuracy_stays(digits):
    optimizer, means, accuracy = train(digits, strategy="min")
    assert means[0] == 8
    assert 11 <= late(means) <= 16  # four buffer bits: 13 to 16 in the prototype's runs
    assert max(means[:150]) >= late(means) - 2  # within about five windows
    plateau = [row for row in optimizer.trace if row.step > 200]
    assert len({row.wl for row in plateau}) > 1  # layers differ, and change
    assert {row.wl > row.wl_before for row in plateau} == {True, False}  # up and down
    _, _, accuracy_float = train(
        digits, optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-4)
    )
    assert accuracy >= accuracy_float - 0.03  # two standard errors of a difference on 359 images


def test_windows_are_about_26_steps_in_noisy_training(digits):
    optimizer, _, _ = train(digits, strategy="min")
    windows = [row.window for row in optimizer.trace if row.step > 150]
    assert 25 <= sum(windows) / len(windows) <= 35
    assert all(row.window >= row.lookback for row in optimizer.trace)


def test_the_strategy_decides_the_raise(digits):
    words = {
        level: late(train(digits, steps=200, strategy=level)[1]) for level in ("min", "mean", "max")
    }
    assert words["min"] + 2 < words["mean"] < words["max"]


def test_the_adaptive_strategy_jumps_for_single_windows(digits):
    optimizer, means, _ = train(digits)
    assert {row.strategy for row in optimizer.trace} >= {"min"}
    assert len({row.strategy for row in optimizer.trace}) > 1
    assert 12 <= late(means) <= 26
    assert max(row.wl for row in optimizer.trace) >= 20


def test_more_buffer_bits_are_more_bits(digits):
    narrow, wide = (
        late(train(digits, steps=200, strategy="min", buffer_bits=b)[1]) for b in (4, 8)
    )
    assert wide == pytest.approx(narrow + 4, abs=1)


def test_identity_straight_through_lets_saturated_values_run_away(digits):
    sizes = {ste: size_of_logits(digits, ste) for ste in ("clip", "identity")}
    assert sizes["identity"] > 1.2 * sizes["clip"]


def size_of_logits(digits, ste):
    """Train with few buffer bits, so that logits saturate; return their size before rounding."""
    (x, y), _ = digits
    model = network()
    optimizer = marvin.MSGD(model.named_parameters(), lr=0.02, strategy="min", buffer_bits=2)
    marvin.quantize_activations(model, optimizer, ste=ste)
    order = torch.Generator().manual_seed(0)
    for _ in range(150):
        chosen = torch.randint(0, len(x), (64,), generator=order)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
        loss.backward()
        optimizer.step(loss=loss)
    with torch.no_grad():
        last = model[7]
        return nn.functional.linear(model[:7](x[:512]), last.weight, last.bias).abs().mean().item()
