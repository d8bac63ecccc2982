"""Well-known models, written from their papers' descriptions, to check the arithmetic on.

Loads torch. ``MODELS`` builds each by name; they are meant for shapes alone, so build them under
``torch.device("meta")``.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from perfmodel.zoo.densenet import densenet
from perfmodel.zoo.inverted import efficientnet, mobilenet_v2
from perfmodel.zoo.resnet import ResNet, Shape
from perfmodel.zoo.transformer import GPT2, LanguageLSTM, NewGELU, Roberta, Size, ViT
from perfmodel.zoo.vgg import vgg

__all__ = ["MODELS", "Entry", "NewGELU"]

Activation = Callable[[], nn.Module]
GPT2_SMALL = (12, 768, 12, 1024, 50257)


@dataclass(frozen=True)
class Entry:
    """One model of the zoo.

    Args:
        build: Makes it with a given activation function.
        activation: The one it is known with.
        input_shape: One sample at the model's usual size.
        is_tokens: Whether the input is token numbers.
    """

    build: Callable[[Activation], nn.Module]
    activation: Activation = nn.ReLU
    input_shape: tuple[int, ...] = (3, 224, 224)
    is_tokens: bool = False


def _resnet(shape: Shape, side: int = 224) -> Entry:
    return Entry(lambda act: ResNet(shape, act), input_shape=(3, side, side))


def _densenet(growth: int, first: int, counts: tuple[int, int, int, int]) -> Entry:
    return Entry(lambda act: densenet(growth, first, counts, act))


def _efficientnet(width: float, depth: float) -> Entry:
    return Entry(lambda act: efficientnet(width, depth, act), nn.SiLU)


def _roberta(layers: int, width: int, heads: int) -> Entry:
    return Entry(lambda act: Roberta(Size(layers, width, heads), act), nn.GELU, (256,), True)


MODELS: dict[str, Entry] = {
    "ResNet-18": _resnet(Shape((2, 2, 2, 2), is_bottleneck=False)),
    "ResNet-50": _resnet(Shape((3, 4, 6, 3))),
    "ResNet-101": _resnet(Shape((3, 4, 23, 3))),
    "ResNet-152": _resnet(Shape((3, 8, 36, 3))),
    "WRN-50-2": _resnet(Shape((3, 4, 6, 3), width=2)),
    "ResNet-18/CIFAR": _resnet(Shape((2, 2, 2, 2), False, is_small=True, classes=10), 32),
    "DenseNet-121": _densenet(32, 64, (6, 12, 24, 16)),
    "DenseNet-161": _densenet(48, 96, (6, 12, 36, 24)),
    "DenseNet-169": _densenet(32, 64, (6, 12, 32, 32)),
    "DenseNet-201": _densenet(32, 64, (6, 12, 48, 32)),
    "EfficientNet-B0": _efficientnet(1.0, 1.0),
    "EfficientNet-B3": _efficientnet(1.2, 1.4),
    "EfficientNet-B7": _efficientnet(2.0, 3.1),
    "MobileNetV2": Entry(mobilenet_v2, nn.ReLU6),
    "VGG-11": Entry(lambda act: vgg((1, 1, 2, 2, 2), act)),
    "VGG-16": Entry(lambda act: vgg((2, 2, 3, 3, 3), act)),
    "VGG-19": Entry(lambda act: vgg((2, 2, 4, 4, 4), act)),
    "RoBERTa-base": _roberta(12, 768, 12),
    "RoBERTa-large": _roberta(24, 1024, 16),
    "GPT-2": Entry(lambda act: GPT2(Size(*GPT2_SMALL), act), NewGELU, (256,), True),
    "GPT-2, fused attention": Entry(
        lambda act: GPT2(Size(*GPT2_SMALL, is_eager=False), act), NewGELU, (256,), True
    ),
    "ViT-S/16": Entry(
        lambda act: ViT(Size(12, 384, 6, 196, 1000, is_eager=False), 16, act), nn.GELU
    ),
    "LSTM": Entry(lambda _: LanguageLSTM(), nn.Tanh, (35,), True),
}
