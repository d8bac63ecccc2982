"""LossBudgetPolicy and StaticPolicy when they train: a small network on digits."""

from pathlib import Path

import pytest
import torch
from torch import nn

import marvin
from train.data import load

pytestmark = pytest.mark.slow
STEPS, STANDARD_ERROR = 250, 0.01  # of an accuracy of 96 % on 359 images


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 24, 3, stride=2, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24 * 16, 10),
    )


@pytest.fixture(scope="module")
def digits():
    data = load("digits", Path("."))
    return [((p.images.float() / 255 - 0.31) / 0.38, p.labels) for p in (data.train, data.test)]


def train(digits, policy):
    """Return test accuracy and the optimizer; without a policy, of float32."""
    (x, y), (x_test, y_test) = digits
    model = network()
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    optimizer = sgd
    if policy is not None:
        optimizer = marvin.Quantized(sgd, policy)
        marvin.quantize_activations(model, optimizer)
    order = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        chosen = torch.randint(0, len(x), (64,), generator=order)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
        loss.backward()
        optimizer.step() if policy is None else optimizer.step(loss=loss)
        if step == STEPS * 3 // 5:
            sgd.param_groups[0]["lr"] /= 10
    with torch.no_grad():
        accuracy = (model.eval()(x_test).argmax(1) == y_test).float().mean().item()
    return accuracy, optimizer


@pytest.fixture(scope="module")
def in_float(digits):
    accuracy, _ = train(digits, None)
    assert accuracy > 0.95
    return accuracy


def test_the_accuracy_is_that_of_float32_at_less_than_7_bits(digits, in_float):
    accuracy, optimizer = train(digits, marvin.LossBudgetPolicy())
    assert accuracy >= in_float - 3 * STANDARD_ERROR
    assert optimizer.mean_word_length() <= 7
    assert optimizer.mean_input_word_length() <= 7
    inputs = optimizer.input_formats()
    assert [fmt.signed for fmt in inputs.values()] == [True, False, False]
    lengths = {row.wl for row in optimizer.trace if row.step > 100}
    assert len(lengths) > 1  # layers differ, or change
    assert {row.note for row in optimizer.trace} <= {"", "weight: it grew beyond its format"}


@pytest.mark.parametrize(("bits", "is_enough"), [(6, True), (2, False)])
def test_static_words_of_six_bits_are_enough_and_of_two_are_not(digits, in_float, bits, is_enough):
    accuracy, _ = train(digits, marvin.StaticPolicy(bits, bits))
    assert (accuracy >= in_float - 3 * STANDARD_ERROR) is is_enough
