"""Figures of the papers, and of careful checks of them, on ResNet-18 for CIFAR."""

import pytest
import torch
from torch import nn

from fixedpoint_kernels import forward_save
from perfmodel.memory import saved_bytes
from perfmodel.zoo import MODELS


@pytest.fixture(scope="module")
def resnet():
    torch.manual_seed(0)
    return MODELS["ResNet-18/CIFAR"].build(nn.ReLU)


@pytest.fixture(scope="module")
def images():
    return torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def gradient(model, images):
    model.zero_grad()
    model(images).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.fixture(scope="module")
def exact(resnet, images):
    return gradient(resnet, images)


@pytest.fixture
def converted(resnet):
    """Convert the model until the test ends."""

    def convert(**settings):
        forward_save.convert(resnet, division=settings)
        return resnet

    yield convert
    forward_save.revert(resnet)


@pytest.mark.parametrize(
    ("block", "bits", "factor"),
    # the paper charges tensors that two layers keep twice: 10.18, 9.74, 5.74, 3.25
    [(12, 2, 11.0), (8, 2, 10.7), (8, 4, 6.4), (8, 8, 3.6)],
)
def test_bytes_saved(converted, images, block, bits, factor):
    model = converted(block=block, bits=bits)
    kept = saved_bytes(model, images, measure=True).total_bytes
    forward_save.revert(model)
    whole = saved_bytes(model, images).total_bytes
    forward_save.convert(model, division=True)
    assert whole / kept == pytest.approx(factor, rel=0.02)


def test_error_of_the_gradient(resnet, images, exact):
    """One draw of noise, random weights and images; relative to the exact gradient."""
    errors = []
    for bits in (2, 4, 8):
        forward_save.convert(resnet, division={"bits": bits})
        got = gradient(resnet, images)
        forward_save.revert(resnet)
        errors.append(float((got - exact).norm() / exact.norm()))
    # what was found depends on images and loss: between batches of 4 and 8 by a sixth
    assert errors == pytest.approx([0.60, 0.125, 0.007], rel=0.3)
    # noise is a share of the step, and the range has 3, 15 or 255 of them
    assert errors[0] / errors[1] == pytest.approx(15 / 3, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(255 / 15, rel=0.1)


def test_noise_averages_out_and_what_is_left_out_does_not(converted, images, exact):
    model = converted(bits=2)
    mean = sum(gradient(model, images) for _ in range(8)) / 8
    noisy = float((mean - exact).norm() / exact.norm())
    assert noisy == pytest.approx(0.22, rel=0.3)
    forward_save.revert(model)
    forward_save.convert(model, division={"method": "low"})
    assert float((gradient(model, images) - exact).norm() / exact.norm()) > 2 * noisy
