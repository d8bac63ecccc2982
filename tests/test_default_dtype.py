"""``torch.set_default_dtype`` changes no bit of what float32 models compute."""

import copy

import pytest
import torch
from torch import nn

import marvin
from fixedpoint_kernels import compact, forward_save, sgd
from fixedpoint_kernels.compact import cpu as compact_cpu
from fixedpoint_kernels.fused import inference
from marvin import integer


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=2),
        nn.SiLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 5),
    )


def convolutions(channels=8):
    """A network whose layers multiply integers as a chain of convolutions, from images to logits."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Conv2d(16, 5, 1),
        nn.Flatten(),
    )


def encoder():
    """A block of a transformer, whose layers are a chain of tokens."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    layers = nn.Flatten(2), nn.Linear(16, 32), block, nn.Linear(32, 5), Mean()
    return marvin.spell_attention(nn.Sequential(*layers))


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


def msgd(net):
    optimizer = marvin.MSGD(net.named_parameters(), lr=0.05, lookback=(2, 4), resolution=(5, 9))
    marvin.quantize_activations(net, optimizer)
    return optimizer


def compact_msgd(net):
    return marvin.MSGD(net.named_parameters(), lr=0.05, lookback=(2, 4), compact_state=True)


def adamw(net):
    wrapped = torch.optim.AdamW(net.named_parameters(), lr=1e-2)
    return marvin.Quantized(wrapped, marvin.MarvinPolicy(lookback=(2, 4)))


def compact_adamw(net):
    wrapped = torch.optim.AdamW(net.named_parameters(), lr=1e-2)
    return marvin.Quantized(wrapped, marvin.FixedPolicy(8, 6), compact_state=True)


def loss_budget(net):
    wrapped = torch.optim.SGD(net.named_parameters(), lr=0.05, momentum=0.9)
    optimizer = marvin.Quantized(wrapped, marvin.LossBudgetPolicy(window=2))
    marvin.quantize_activations(net, optimizer)
    integer.convert(net)
    return optimizer


def tokens(net):
    """The same of a transformer."""
    return loss_budget(net)


def few_bit_and_division(net):
    forward_save.convert(net, few_bit=3, division={"block": 8, "bits": 2})
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def trained(prepare, dtype, batches=5):
    """Return losses and weights; the optimizer is made, and steps are done, under a default dtype."""
    net = {loss_budget: convolutions, tokens: encoder}.get(prepare, network)()
    torch.set_default_dtype(dtype)
    try:
        optimizer = prepare(net)
        losses = []
        for i in range(batches):
            g = torch.Generator().manual_seed(i)
            x = torch.randn(8, 8, 4, 4, generator=g, dtype=torch.float32)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), torch.arange(8) % 5)
            loss.backward()
            if isinstance(optimizer, marvin.Quantized):
                optimizer.step(loss=loss)
            else:
                optimizer.step()
            losses.append(loss.detach())
        with torch.no_grad():
            losses.append(net.eval()(x))
        return losses, copy.deepcopy(net.state_dict())
    finally:
        torch.set_default_dtype(torch.float32)


WAYS = msgd, compact_msgd, adamw, compact_adamw, loss_budget, tokens, few_bit_and_division


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("prepare", WAYS, ids=lambda f: f.__name__)
def test_training_has_the_same_bits(prepare, dtype):
    """``torch.empty`` without a dtype gives kernels, which write float32, memory of another size."""
    torch.testing.assert_close(
        trained(prepare, dtype), trained(prepare, torch.float32), rtol=0, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_what_torch_rounds_is_found_the_same(dtype):
    """By functions that ask once, and keep the answer."""
    asked = sgd.has_bits_of_torch, compact_cpu.has_bits_of_torch, inference.rounds_once
    wanted = [ask.__wrapped__() for ask in asked]
    torch.set_default_dtype(dtype)
    try:
        assert [ask.__wrapped__() for ask in asked] == wanted
        assert compact.zeros(torch.ones(2, 3), "signed").scales.dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
