"""What a converted model is measured to keep is what the options predict."""

import pytest
import torch
from torch import nn

from fixedpoint_kernels import forward_save
from perfmodel.forward_save import Division
from perfmodel.memory import division, few_bit, saved_bytes
from perfmodel.zoo import MODELS
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


def per_layer_norm(tokens):
    """Bytes of float32 mean and scale, of which ``division`` predicts that 2 each are kept."""
    return 2 * 2 * tokens


@pytest.mark.parametrize("settings", [(8, 2), (8, 4), (12, 2), (3, 1)])
def test_division_on_a_resnet(settings):
    block, bits = settings
    model, x = ResNet(SMALL), torch.randn(2, 3, 32, 32)
    exact = saved_bytes(model, x)
    forward_save.convert(model, division={"block": block, "bits": bits})
    assert measured(model, x) == exact.with_option(division(Division(block, bits)))
    assert forward_save.state(model)["count"] == 0  # measured on a copy
    forward_save.revert(model)
    assert measured(model, x) == exact.total_bytes


def test_division_and_few_bit_on_a_transformer_block():
    model, x = block(), torch.randn(2, 3, 32, 32)
    exact, tokens = saved_bytes(model, x), 2 * 17
    forward_save.convert(model, division=True, few_bit=3, calls=False)

    def both(kept):
        is_smooth = {s.op for s in kept.savers} == {"gelu"}
        return (few_bit(3) if is_smooth else division())(kept)

    # the head reads one token of 17: packed by itself, where the option keeps the whole storage
    token = tokens * 64 * 4 - Division().size_bytes((2, 64))
    assert measured(model, x) == exact.with_option(both) + 3 * per_layer_norm(tokens) - token


@pytest.mark.parametrize("calls", [False, True])
def test_a_converted_transformer_is_predicted_on_shapes(calls):
    model, x = block(), torch.randn(2, 3, 32, 32)
    forward_save.convert(model, division=True, few_bit=3, calls=calls)
    assert saved_bytes(model, x).total_bytes == measured(model, x)


def test_a_plan_keeps_what_it_predicts():
    model, x = ResNet(SMALL), torch.randn(2, 3, 32, 32)
    exact = measured(model, x)
    plan = forward_save.plan(model, x, budget_bytes=exact // 4)
    assert plan.exact_bytes == exact
    forward_save.convert(model, plan=plan)
    assert measured(model, x) == plan.predicted_bytes <= exact // 4


@pytest.mark.parametrize(
    ("name", "batch", "factor"), [("ResNet-18/CIFAR", 128, 10.75), ("ResNet-50", 64, 11.66)]
)
def test_the_papers_networks_keep_a_tenth(name, batch, factor):
    """On shapes alone: no tensor of this size is made."""
    entry = MODELS[name]
    with torch.device("meta"):
        model, x = entry.build(entry.activation), torch.empty(batch, *entry.input_shape)
    exact = saved_bytes(model, x).total_bytes
    forward_save.convert(model, division=True)
    assert exact / saved_bytes(model, x).total_bytes == pytest.approx(factor, abs=0.01)
