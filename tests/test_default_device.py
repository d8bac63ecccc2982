"""``torch.set_default_device`` changes no bit of what models on a CPU compute."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import marvin
from fixedpoint_kernels import forward_save
from marvin import integer
from tests import test_default_dtype
from tests.same import assert_same

ROOT = Path(__file__).parents[1]


def convolutions():
    return test_default_dtype.convolutions(channels=3)


def mixed():
    """Layers that are in no chain, too."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=2),
        nn.Softplus(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 5),
    )


def perceptron():
    layers = nn.Flatten(), nn.Linear(192, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 5)
    return nn.Sequential(*layers)


def encoder():
    block = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.1)
    layers = nn.Flatten(2), nn.Linear(64, 32), block, nn.Linear(32, 5), test_default_dtype.Mean()
    return marvin.spell_attention(nn.Sequential(*layers))


def quantized(model, policy=None, **options):
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.05, momentum=0.9)
    optimizer = marvin.Quantized(sgd, policy or marvin.LossBudgetPolicy(window=2), **options)
    marvin.quantize_activations(model, optimizer)
    return optimizer


def on_integers(model):
    optimizer = quantized(model)
    integer.convert(model)
    return optimizer


def by_channel(model):
    optimizer = quantized(model, marvin.LossBudgetPolicy(window=2, per_channel=True))
    integer.convert(model)
    return optimizer


def compact(model):
    return quantized(model, marvin.MarvinPolicy(lookback=(2, 4)), compact_state=True)


def compact_adamw(model):
    adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    policy = marvin.StaticPolicy(weights=8, activations=8)
    optimizer = marvin.Quantized(adamw, policy, compact_state=True)
    marvin.quantize_activations(model, optimizer)
    return optimizer


def saving(model):
    forward_save.convert(model, few_bit=3, division={"block": 8, "bits": 2})
    return torch.optim.SGD(model.parameters(), lr=0.05)


WAYS = {
    "convolutions": (convolutions, on_integers),
    "layers alone": (mixed, on_integers),
    "by channel": (convolutions, by_channel),
    "perceptron": (perceptron, on_integers),
    "encoder": (encoder, on_integers),
    "simulated": (mixed, quantized),
    "compact": (mixed, compact),
    "compact AdamW": (perceptron, compact_adamw),
    "forward_save": (mixed, saving),
}


def results(way, device):
    """Train, evaluate and freeze under a default device."""
    torch.manual_seed(0)
    make, prepare = WAYS[way]
    model = make()
    optimizer = prepare(model)
    batches = [(torch.randn(8, 3, 8, 8), torch.arange(8) % 5) for _ in range(5)]
    found = []
    with torch.device(device):
        for x, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), labels)
            loss.backward()
            own = {"loss": loss} if isinstance(optimizer, marvin.Quantized) else {}
            optimizer.step(**own)
            found.append(loss.detach())
        model.eval()
        with torch.no_grad():
            found.append(model(x))
            if isinstance(optimizer, marvin.Quantized):
                found.append(marvin.freeze(model)(x))
        found += [model.state_dict(), optimizer.state_dict()]
    return found


@pytest.mark.parametrize("way", WAYS)
def test_training_evaluation_and_freezing_have_the_same_bits(way):
    """``torch.empty`` without a device gives kernels an address of nothing, so another process runs them."""
    command = [sys.executable, "-m", "tests.test_default_device", way]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":
    torch.set_num_threads(1)
    changed = results(sys.argv[1], "meta")  # first: nothing is known yet
    assert_same(changed, results(sys.argv[1], "cpu"))
