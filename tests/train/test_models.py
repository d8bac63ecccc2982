import pytest
import torch
from torch import nn

from train import alexnet, resnet20


def weights(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.ndim >= 2)


def test_weights_of_the_papers_models():
    assert weights(resnet20.resnet20()) == 270_896
    assert weights(alexnet.alexnet()) == 2_471_104


def test_resnet20_has_20_layers_beside_two_projections():
    model = resnet20.resnet20()
    sizes = [m.kernel_size for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert sizes.count((3, 3)) == 19
    assert sizes.count((1, 1)) == 2


@pytest.mark.parametrize(
    ("build", "side"), [(resnet20.resnet20, resnet20.MIN_SIDE), (alexnet.alexnet, alexnet.MIN_SIDE)]
)
@pytest.mark.parametrize(("classes", "channels", "width"), [(10, 3, 4), (100, 1, 2)])
def test_models_take_their_smallest_image(build, side, classes, channels, width):
    model = build(classes, channels, width)
    assert model(torch.zeros(2, channels, side, side)).shape == (2, classes)


def test_defaults_are_the_papers():
    assert (resnet20.DEFAULTS.width, resnet20.DEFAULTS.buffer_bits) == (16, 8)
    assert (alexnet.DEFAULTS.width, alexnet.DEFAULTS.buffer_bits) == (64, 4)
    assert resnet20.DEFAULTS.quantize_activations
    assert alexnet.DEFAULTS.quantize_activations


def test_functions_are_modules_so_that_hooks_see_them():
    for model in (resnet20.resnet20(width=2), alexnet.alexnet(width=2)):
        kinds = {type(m) for m in model.modules()}
        assert nn.ReLU in kinds
        assert kinds & {nn.AdaptiveAvgPool2d, nn.MaxPool2d}


@pytest.mark.parametrize("build", [resnet20.resnet20, alexnet.alexnet])
def test_every_activation_is_the_one_asked_for(build):
    kinds = [type(m) for m in build(10, 3, 2, nn.SiLU).modules()]
    assert nn.ReLU not in kinds
    assert kinds.count(nn.SiLU) == (19 if build is resnet20.resnet20 else 5)
