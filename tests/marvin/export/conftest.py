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


class Branches(nn.Module):
    """What folding meets: strides, channels one by one, short-cuts, pooling, dead channels."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.conv = nn.Conv2d(2, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.pool1 = nn.MaxPool2d(3, 2, padding=1)
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.bn1 = nn.BatchNorm2d(width)
        self.pointwise = nn.Conv2d(width, width, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(width, width, 1, stride=2, bias=False)
        self.bn4 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.pool = nn.AvgPool2d(2)
        self.fc = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool1(self.relu(self.bn(self.conv(x))))
        y = self.relu(self.bn1(self.depthwise(x)))
        x = self.relu(self.bn2(self.pointwise(y)) + x)
        x = self.relu(self.bn3(self.down(x)) + self.bn4(self.shortcut(x)))
        return self.fc(self.pool(x).flatten(1))


@pytest.fixture
def ranged() -> Callable[..., tuple[nn.Module, Network, Tensor]]:
    """Return a model whose layers' inputs have formats of their own: model, network, sample.

    Unsigned where nothing is below 0; outputs and sums are not rounded. Every batch normalisation
    has a scale below 0 and one of 0.
    """

    def do(
        build: Callable[[], nn.Module] = Branches,
        bits: tuple[int, int] = (6, 6),
        shape: tuple[int, ...] = (2, 8, 8),
        **options: Any,
    ) -> tuple[nn.Module, Network, Tensor]:
        torch.manual_seed(0)
        model, x = build(), torch.randn(16, *shape)
        settle(model)
        formats = trained(model, x, marvin.StaticPolicy(*bits))
        return model, describe(model.eval(), x, formats, **options), x

    return do


@pytest.fixture
def channelled() -> Callable[..., tuple[nn.Module, Any, Tensor]]:
    """Return a model whose weights have a format by channel: model, formats of weights, sample.

    Channels differ in size by up to ``2**spread``, their biases and statistics with them; one is
    0 in every layer.
    """

    def do(
        build: Callable[[], nn.Module] = Branches,
        bits: tuple[int, int] = (6, 6),
        shape: tuple[int, ...] = (2, 8, 8),
        *,
        spread: int = 8,
        seed: int = 0,
    ) -> tuple[nn.Module, Any, Tensor]:
        torch.manual_seed(seed)
        model, x = build(), torch.randn(16, *shape)
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                sizes = 2.0 ** -torch.randint(0, spread + 1, (len(module.weight),)).float()
                sizes[:3] = torch.tensor([1, 2.0**-spread, 0])
                module.weight.data *= sizes.reshape(-1, *[1] * (module.weight.ndim - 1))
                if module.bias is not None:
                    module.bias.data *= sizes
        settle(model, x)
        formats = trained(model, x, marvin.StaticPolicy(*bits, per_channel=True))
        return model.eval(), formats, x

    return do


def trained(model: nn.Module, x: Tensor, policy: marvin.StaticPolicy) -> Any:
    """Put a model into fixed point by a policy, activations too; return the weights' formats."""
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.0)
    optimizer = marvin.Quantized(sgd, policy, one_dim="float")
    marvin.quantize_activations(model, optimizer)
    for _ in range(2):  # the first is in floats
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(loss=loss)
    return optimizer.formats()


def settle(model: nn.Module, x: Tensor | None = None) -> None:
    """Give batch normalisation statistics, of ``x`` if it is given, and scales, two of them odd."""
    generator = torch.Generator().manual_seed(1)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.momentum = None if x is not None else 0.0  # of 0, statistics stay as they are
        norm.running_mean.normal_(0, 0.2, generator=generator)
        norm.running_var.uniform_(0.05, 2, generator=generator)
        norm.weight.data.uniform_(0.2, 1.5, generator=generator)
        norm.bias.data.normal_(0, 0.3, generator=generator)
        norm.weight.data[0] *= -1
        norm.weight.data[1] = 0
    if x is not None:
        model(x)
    for norm in norms:
        norm.momentum = 0.0
