"""Networks to export: small, with batch-norm statistics as if they were trained."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import marvin
from marvin.export import Network, describe


class Residual(nn.Module):
    """A convolution with batch normalisation beside a short-cut."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x)) + x)


def digits_net(width: int = 6) -> nn.Module:
    """Convolution, norm, max pooling, a residual block, average pooling, linear; for 8x8."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        Residual(width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 10),
    )


def plain_net() -> nn.Module:
    """No batch normalisation: the trained model itself is in fixed point throughout."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 8, (3, 1), padding=(1, 0), groups=2, dilation=(1, 1)),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 12),
        nn.ReLU(),
        nn.Linear(12, 5),
    )


def quantized(model: nn.Module, wl: int = 8, fl: int = 5, **settings: Any) -> marvin.MSGD:
    """Put ``model`` into fixed point, activations too, with settled batch normalisation."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
            module.running_mean.normal_(0, 0.2, generator=generator)
            module.running_var.uniform_(0.3, 2, generator=generator)
            module.weight.data.uniform_(0.5, 1.5, generator=generator)
            module.bias.data.normal_(0, 0.3, generator=generator)
    optimizer = marvin.MSGD(model.named_parameters(), init_wl=wl, init_fl=fl, **settings)
    marvin.quantize_activations(model, optimizer)
    return optimizer


@pytest.fixture
def make() -> Callable[..., tuple[nn.Module, Network, Tensor]]:
    """Return a model in fixed point, its network and a sample."""

    def do(
        build: Callable[[], nn.Module],
        shape: tuple[int, ...],
        wl: int = 8,
        fl: int = 5,
        **options: Any,
    ) -> tuple[nn.Module, Network, Tensor]:
        torch.manual_seed(0)
        model = build().eval()
        optimizer = quantized(model, wl, fl)
        sample = 1.5 * torch.randn(5, *shape)
        return model, describe(model, sample, optimizer.formats(), **options), sample

    return do


@pytest.fixture
def digits(make):
    """Return the digits CNN for a word length: model, network, sample."""
    return lambda wl=8, fl=5, **options: make(digits_net, (1, 8, 8), wl, fl, **options)


@pytest.fixture
def plain(make):
    """Return the network without batch normalisation: model, network, sample."""
    return lambda wl=8, fl=5: make(plain_net, (2, 8, 8), wl, fl)
