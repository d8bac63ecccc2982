"""Which network leaves by which target: a table, counted and not timed.

Each network has the layers of its family at a small width, random weights, and formats of 8 bits for weights and
what layers take. ``equal`` means that all outputs were run and are those of the integer reference, ``written`` that the
files were written and not run here. What a target cannot have stands below the table, as the target says it.
"""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import marvin
from benchmarks.networks import padded_resnet20
from marvin.export import (
    ExportError,
    Network,
    c,
    describe,
    hls4ml,
    integer,
    onnx,
    packed,
    qonnx,
    round_sums,
)
from marvin.export.targets.c.proof import prove
from train.alexnet import alexnet
from train.resnet20 import resnet20
from train.vit import vit

TESTS = "tests/marvin/export/test_coverage.py::test_a_concatenation_aligns_its_values"
_CHANNELS = 8
_WORDS = 12


class _Blocks(nn.Module):
    """A first layer, blocks, a mean, a linear layer."""

    def __init__(self, *blocks: nn.Module, channels: int = _CHANNELS) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, _CHANNELS, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(F.relu(self.first(x))).mean((2, 3)))


class _Inverted(nn.Module):
    """As MobileNetV2: wide, each channel by itself, narrow, and the sum."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        wide = 4 * _CHANNELS
        self.body = nn.Sequential(
            nn.Conv2d(_CHANNELS, wide, 1, bias=False), nn.BatchNorm2d(wide), function,
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), function,
            nn.Conv2d(wide, _CHANNELS, 1, bias=False), nn.BatchNorm2d(_CHANNELS),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class _Fire(nn.Module):
    """As SqueezeNet: two kernels on the same, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(_CHANNELS, 4, 1)
        self.one, self.three = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.one(x)), F.relu(self.three(x))], 1)


class _Dense(nn.Module):
    """As DenseNet: what is new beside all that was."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(F.relu(self.norm(x)))], 1)


class _Shuffle(nn.Module):
    """As ShuffleNetV2: half of the channels are worked on, then both are mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(_CHANNELS // 2, _CHANNELS // 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, 1)
        x = torch.cat([left, F.relu(self.conv(right))], 1)
        n, channels, height, width = x.shape
        x = x.view(n, 2, channels // 2, height, width).transpose(1, 2).contiguous()
        return x.view(n, channels, height, width)


class _Bottleneck(nn.Module):
    """As ResNet-50: narrow, a kernel, wide, and the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(_CHANNELS, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
            nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
            nn.Conv2d(4, _CHANNELS, 1, bias=False), nn.BatchNorm2d(_CHANNELS),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


class _Mixer(nn.Module):
    """As MLP-Mixer: linear layers over positions, then over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, stride=8)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.mixes = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x + self.mixes[0](self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return self.head((x + self.mixes[1](self.norms[1](x))).mean(1))


class _Text(nn.Module):
    """As BERT: words and positions, layers of torch's encoder, a linear head on the first word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(50, 16), nn.Embedding(_WORDS, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, activation="gelu", batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 10)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.positions(torch.arange(_WORDS))
        return self.head(self.encoder(x)[:, 0])


class _Encoder(nn.Module):
    """Patches, two layers of torch's encoder, and a linear head on the mean of all."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, stride=8)
        layer = nn.TransformerEncoderLayer(16, 4, 32, activation="gelu", batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


def _vgg() -> nn.Module:
    layers = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    return _Blocks(*layers)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 32), nn.ReLU(), nn.Linear(32, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "ResNet20": lambda: resnet20(10, 3, 8),
    "ResNet20 with padded short-cuts": lambda: padded_resnet20(8),
    "ResNet-50": lambda: _Blocks(_Bottleneck(), _Bottleneck()),
    "AlexNet": lambda: alexnet(10, 3, 8),
    "VGG": _vgg,
    "MobileNetV2": lambda: _Blocks(_Inverted(nn.ReLU6())),
    "MobileNetV3, EfficientNet: Hardswish, SiLU": lambda: _Blocks(_Inverted(nn.Hardswish()), _Inverted(nn.SiLU())),
    "SqueezeNet": lambda: _Blocks(_Fire(), _Fire()),
    "DenseNet": lambda: _Blocks(_Dense(8), _Dense(12), channels=16),
    "ShuffleNetV2": lambda: _Blocks(_Shuffle(), _Shuffle()),
    "MLP on images": _mlp,
    "MLP-Mixer": _Mixer,
    "vision transformer": lambda: vit(10, 3, 16),
    "encoder of `nn.TransformerEncoderLayer`": _Encoder,
    "the same behind `nn.Embedding`, as BERT": _Text,
}  # fmt: skip


def table() -> list[str]:
    """Return the lines of the table, and what was refused."""
    lines = ["| | packed | ONNX | QONNX | hls4ml | C |", "|---|---|---|---|---|---|"]
    said: dict[str, str] = {}
    for name, build in MODELS.items():
        x = samples_of(build)
        try:
            network = _network(build, x)
        except ExportError as error:
            said[f"{name}"] = str(error)
            lines.append(f"| {name} | refused | refused | refused | refused | refused |")
            continue
        cells = []
        for label, run in _TARGETS.items():
            try:
                cells.append(run(network, x))
            except ExportError as error:
                said[f"{name}, {label}"] = str(error)
                cells.append("refused")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, "", *(f"- {what}: {why}" for what, why in said.items())]


def samples_of(build: Callable[[], nn.Module], count: int = 8) -> Tensor:
    """Return what a network of the table takes."""
    generator = torch.Generator().manual_seed(0)
    if build is _Text:
        return torch.randint(0, 50, (count, _WORDS), generator=generator)
    return torch.randn(count, 3, 32, 32, generator=generator)


def _network(build: Callable[[], nn.Module], x: Tensor) -> Network:
    torch.manual_seed(0)
    model = marvin.spell_attention(build())
    sgd = torch.optim.SGD(model.named_parameters(), lr=1e-3)
    optimizer = marvin.Quantized(sgd, marvin.StaticPolicy(8, 8), one_dim="float")
    marvin.quantize_activations(model, optimizer)
    for _ in range(2):  # formats come at the end of the first step
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(loss=loss)
    return round_sums(describe(model.eval(), x, optimizer.formats()), x)


def _equal(network: Network, x: Tensor, got: Tensor) -> str:
    return "equal" if torch.equal(got.double(), integer.run(network, x)) else "**different**"


def _packed(network: Network, x: Tensor) -> str:
    again = packed.from_bytes(packed.to_bytes(packed.pack_network(network))).network
    assert again is not None
    return _equal(network, x, integer.run(again, x))


def _onnx(network: Network, x: Tensor) -> str:
    container = onnx.container_of(network)
    content = onnx.to_model(network, container).SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {network.input.name: x.numpy()})
    return f"{container}, {_equal(network, x, torch.from_numpy(got))}"


def _qonnx(network: Network, _x: Tensor) -> str:
    with tempfile.TemporaryDirectory() as folder:
        qonnx.save(network, Path(folder) / "network.onnx")
    return "written"


def _hls4ml(network: Network, _x: Tensor) -> str:
    with tempfile.TemporaryDirectory() as folder:
        hls4ml.save(network, Path(folder) / "network")
    return "written"


def _c(network: Network, x: Tensor) -> str:
    if not shutil.which("gcc"):
        raise ExportError("gcc is not installed")
    source = c.write(network)
    with tempfile.TemporaryDirectory() as folder:
        c.save(network, Path(folder) / "network.c")
        (got,), _ = prove(network, source, Path(folder) / "network.c", x)
        return _equal(network, x, got)


_TARGETS: dict[str, Callable[[Network, Tensor], str]] = {
    "packed": _packed,
    "ONNX": _onnx,
    "QONNX": _qonnx,
    "hls4ml": _hls4ml,
    "C": _c,
}
