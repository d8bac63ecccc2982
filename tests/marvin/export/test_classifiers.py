"""The classifiers of torchvision, by own small copies of their structure: exported, or refused by name.

Every output of the file equals the integers, and these are near the model in fixed point.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import marvin
from marvin.export import ExportError, describe, integer, onnx, round_sums
from marvin.export.graph.functions import Mul

pytest.importorskip("onnxruntime")


def conv_bn(width, out, kernel=3, stride=1, groups=1, function=nn.ReLU):
    padding = kernel // 2
    conv = nn.Conv2d(width, out, kernel, stride, padding, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out), function())


def head(width):
    return nn.Sequential(nn.Dropout(0.2), nn.Linear(width, 5))


class Squeeze(nn.Module):
    """Squeeze and excitation: each channel times a function of all means."""

    def __init__(self, width, function, gate):
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)
        self.activation, self.scale_activation = function(), gate()

    def forward(self, x):
        scale = self.fc2(self.activation(self.fc1(self.avgpool(x))))
        return self.scale_activation(scale) * x


class Inverted(nn.Module):
    """An inverted residual: of MobileNetV2 and V3, and of EfficientNet."""

    def __init__(self, width, out, stride, function, squeeze=None):
        super().__init__()
        inner = 2 * width
        layers = [conv_bn(width, inner, 1, function=function)]
        layers.append(conv_bn(inner, inner, 3, stride, inner, function))
        layers += [squeeze(inner)] if squeeze else []
        layers += [nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out)]
        self.conv, self.is_residual = nn.Sequential(*layers), stride == 1 and width == out

    def forward(self, x):
        return x + self.conv(x) if self.is_residual else self.conv(x)


class Pooled(nn.Module):
    """Features, means over positions, and a classifier."""

    def __init__(self, features, classifier):
        super().__init__()
        self.features, self.classifier = features, classifier

    def forward(self, x):
        x = F.adaptive_avg_pool2d(self.features(x), (1, 1))
        return self.classifier(torch.flatten(x, 1))


def mobile(function, squeeze=None):
    blocks = [Inverted(8, 8, 1, function, squeeze), Inverted(8, 12, 2, function, squeeze)]
    features = nn.Sequential(conv_bn(3, 8, 3, 2, function=function), *blocks)
    return Pooled(features, head(12))


def mobilenet_v2():
    return mobile(nn.ReLU6)


def mobilenet_v3():
    return mobile(nn.Hardswish, lambda width: Squeeze(width, nn.ReLU, nn.Hardsigmoid))


def efficientnet_b0():
    return mobile(nn.SiLU, lambda width: Squeeze(width, nn.SiLU, nn.Sigmoid))


class Fire(nn.Module):
    def __init__(self, width, inner, out):
        super().__init__()
        self.squeeze = nn.Conv2d(width, inner, 1)
        self.expand1x1 = nn.Conv2d(inner, out, 1)
        self.expand3x3 = nn.Conv2d(inner, out, 3, padding=1)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.activation(self.squeeze(x))
        parts = [self.activation(self.expand1x1(x)), self.activation(self.expand3x3(x))]
        return torch.cat(parts, 1)


def squeezenet():
    first = nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, ceil_mode=True)
    last = nn.Dropout(0.5), nn.Conv2d(12, 5, 1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d((1, 1))
    return nn.Sequential(*first, Fire(8, 4, 6), Fire(12, 4, 6), *last, nn.Flatten())


class Shuffle(nn.Module):
    """A unit of ShuffleNetV2."""

    def __init__(self, width):
        super().__init__()
        half = width // 2
        depthwise = nn.Conv2d(half, half, 3, padding=1, groups=half, bias=False)
        inner = conv_bn(half, half, 1), depthwise, nn.BatchNorm2d(half), conv_bn(half, half, 1)
        self.branch2 = nn.Sequential(*inner)

    def forward(self, x):
        x1, x2 = x.chunk(2, dim=1)
        x = torch.cat((x1, self.branch2(x2)), dim=1)
        batch, channels, height, width = x.size()
        x = x.view(batch, 2, channels // 2, height, width)
        return torch.transpose(x, 1, 2).contiguous().view(batch, channels, height, width)


class ShuffleNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.maxpool = conv_bn(3, 8, 3, 2), nn.MaxPool2d(3, 2, 1)
        self.stage2, self.conv5 = nn.Sequential(Shuffle(8), Shuffle(8)), conv_bn(8, 12, 1)
        self.fc = nn.Linear(12, 5)

    def forward(self, x):
        x = self.conv5(self.stage2(self.maxpool(self.conv1(x))))
        return self.fc(x.mean([2, 3]))  # globalpool


class Vgg(nn.Module):
    def __init__(self):
        super().__init__()
        first = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2, 2)
        second = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d(2, 2)
        self.features, self.avgpool = nn.Sequential(*first, *second), nn.AdaptiveAvgPool2d((2, 2))
        dense = nn.Linear(32, 16), nn.ReLU(True), nn.Dropout(), nn.Linear(16, 5)
        self.classifier = nn.Sequential(*dense)

    def forward(self, x):
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


class Bottleneck(nn.Module):
    def __init__(self, width, out, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, stride, 1, bias=False)
        self.bn2, self.bn3 = nn.BatchNorm2d(4), nn.BatchNorm2d(out)
        self.conv3, self.relu = nn.Conv2d(4, out, 1, bias=False), nn.ReLU(inplace=True)
        short = nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out)
        self.downsample = nn.Sequential(*short) if stride > 1 else None

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


def resnet50():
    stem = conv_bn(3, 8, 7, 2), nn.MaxPool2d(3, 2, 1)
    return Pooled(nn.Sequential(*stem, Bottleneck(8, 8, 1), Bottleneck(8, 16, 2)), nn.Linear(16, 5))


class Dense(nn.Module):
    """A layer of DenseNet."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.relu1 = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(width, 8, 1, bias=False)
        self.norm2, self.relu2 = nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(8, 4, 3, padding=1, bias=False)

    def forward(self, features):
        x = torch.cat(features, 1)
        return self.conv2(self.relu2(self.norm2(self.conv1(self.relu1(self.norm1(x))))))


class DenseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layers = conv_bn(3, 8, 3, 2), nn.ModuleList([Dense(8), Dense(12)])
        self.norm = nn.BatchNorm2d(16)
        conv = nn.Conv2d(16, 8, 1, bias=False)
        self.transition = nn.Sequential(nn.ReLU(True), conv, nn.AvgPool2d(2), nn.BatchNorm2d(8))
        self.classifier = nn.Linear(8, 5)

    def forward(self, x):
        features = [self.first(x)]
        for layer in self.layers:
            features.append(layer(features))
        x = F.relu(self.transition(self.norm(torch.cat(features, 1))), inplace=True)
        return self.classifier(F.adaptive_avg_pool2d(x, (1, 1)).flatten(1))


class Mixer(nn.Module):
    """MLP-Mixer; ``norm`` makes what is in the place of its layer normalisation."""

    def __init__(self, norm):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.norm1, self.norm2 = norm(), norm()
        self.tokens = nn.Sequential(nn.Linear(16, 12), nn.GELU(), nn.Linear(12, 16))
        self.channels = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norm2(x))
        return self.head(x.mean(dim=1))


MODELS = {
    "MobileNetV2": mobilenet_v2,
    "MobileNetV3": mobilenet_v3,
    "EfficientNet-B0": efficientnet_b0,
    "SqueezeNet": squeezenet,
    "ShuffleNetV2": ShuffleNet,
    "VGG": Vgg,
    "ResNet-50": resnet50,
    "DenseNet": DenseNet,
    "MLP-Mixer without norms": lambda: Mixer(nn.Identity),
    "MLP-Mixer": lambda: Mixer(lambda: nn.LayerNorm(8)),
}


def calibrated(build):
    torch.manual_seed(0)
    model, x = build(), torch.randn(24, 3, 16, 16)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model(x)
    return marvin.calibrate(model, [x], bits=8), x


@pytest.mark.parametrize("name", MODELS)
def test_classifiers_are_exported_with_every_output_equal(name):
    import onnxruntime

    fixed, x = calibrated(MODELS[name])
    with torch.no_grad():
        want = fixed(x)
    for network in (exact := describe(fixed, x), round_sums(exact, x)):
        found = integer.run(network, x)
        assert onnx.container_of(network) == "int8"
        assert onnx.in_floats(network) == {}
        content = onnx.to_model(network).SerializeToString()
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        (got,) = session.run(None, {network.input.name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(got).double(), found, rtol=0, atol=0)
        # of 8 bits each: what is added and averaged; more where functions and products are rounded
        most = 0.1 if any(isinstance(op, Mul) for op in network.operations) else 0.06
        assert (found - want).abs().mean() <= most * want.abs().mean()


def test_products_are_those_of_integers():
    """Every product of the network, in Python's integers."""
    fixed, x = calibrated(mobilenet_v3)
    network = describe(fixed, x)
    found = integer.run_all(network, x[:2])
    products = [op for op in network.operations if isinstance(op, Mul)]
    assert len(products) == 2
    for op in products:
        left, right = (found[name].astype(object) for name in op.inputs)
        assert (found[op.name] == left * right).all()
        value = network.values[op.name]
        assert value.fl == sum(network.values[name].fl for name in op.inputs)
        assert value.low <= found[op.name].min() <= found[op.name].max() <= value.high


def test_group_normalisation_is_refused_by_name():
    with pytest.raises(ExportError, match="norm1: GroupNorm cannot be exported: use BatchNorm"):
        describe(*calibrated(lambda: Mixer(lambda: nn.GroupNorm(4, 16))))
