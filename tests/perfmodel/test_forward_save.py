"""What a converted model is measured to keep is what the options predict."""

import pytest
import torch
from torch import nn

from fixedpoint_kernels import forward_save
from perfmodel.memory import few_bit, saved_bytes
from perfmodel.zoo.resnet import ResNet, Shape
from perfmodel.zoo.transformer import Size, ViT

SMALL = Shape((1, 1, 1, 1), is_bottleneck=False, is_small=True, classes=10)


def block():
    return ViT(Size(1, 64, 4, tokens=16, vocabulary=10), 8)


def measured(model, x):
    return saved_bytes(model, x, measure=True).total_bytes


@pytest.mark.parametrize(
    ("act", "bits"), [(nn.ReLU, 3), (nn.GELU, 1), (nn.GELU, 3), (nn.SiLU, 8), (nn.Hardtanh, 1)]
)
def test_few_bit_on_a_resnet(act, bits):
    model, x = ResNet(SMALL, act), torch.randn(2, 3, 32, 32)
    exact = saved_bytes(model, x)
    forward_save.convert(model, few_bit=bits)
    assert measured(model, x) == exact.with_option(few_bit(bits))
    forward_save.revert(model)
    assert measured(model, x) == exact.total_bytes


@pytest.mark.parametrize("bits", [1, 3])
def test_few_bit_on_a_transformer_block(bits):
    model, x = block(), torch.randn(3, 3, 32, 32)
    exact = saved_bytes(model, x)
    forward_save.convert(model, few_bit=bits)
    got = measured(model, x)
    assert got == exact.with_option(few_bit(bits))
    code = -(3 * 17 * 256 // -1024) * 128 * bits  # 17 tokens of 4 * 64 features
    assert exact.total_bytes - got == 3 * 17 * 256 * 4 - code
