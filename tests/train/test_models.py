import pytest
import torch
from torch import nn

from train import alexnet, resnet20, vit
from train.errors import UserError

MODELS = resnet20.resnet20, alexnet.alexnet, vit.vit


def weights(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.ndim >= 2)


def test_weights_of_the_papers_models():
    assert weights(resnet20.resnet20()) == 270_896
    assert weights(alexnet.alexnet()) == 2_471_104


def test_weights_of_the_transformer():
    assert weights(vit.vit()) == 8 * 8 * 3 * 64 + 4 * 8 * 64**2 + 64 * 10


def test_resnet20_has_20_layers_beside_two_projections():
    model = resnet20.resnet20()
    sizes = [m.kernel_size for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert sizes.count((3, 3)) == 19
    assert sizes.count((1, 1)) == 2


@pytest.mark.parametrize(
    ("build", "side"),
    [
        (resnet20.resnet20, resnet20.MIN_SIDE),
        (alexnet.alexnet, alexnet.MIN_SIDE),
        (vit.vit, vit.MIN_SIDE),
    ],
)
@pytest.mark.parametrize(("classes", "channels", "width"), [(10, 3, 4), (100, 1, 8)])
def test_models_take_their_smallest_image(build, side, classes, channels, width):
    model = build(classes, channels, width)
    assert model(torch.zeros(2, channels, side, side)).shape == (2, classes)


def test_defaults_are_the_papers():
    assert (resnet20.DEFAULTS.width, resnet20.DEFAULTS.buffer_bits) == (16, 8)
    assert (alexnet.DEFAULTS.width, alexnet.DEFAULTS.buffer_bits) == (64, 4)
    assert resnet20.DEFAULTS.quantize_activations
    assert alexnet.DEFAULTS.quantize_activations
    assert vit.DEFAULTS.activation == "gelu"


def test_functions_are_modules_so_that_hooks_see_them():
    for model in (resnet20.resnet20(width=2), alexnet.alexnet(width=2)):
        kinds = {type(m) for m in model.modules()}
        assert nn.ReLU in kinds
        assert kinds & {nn.AdaptiveAvgPool2d, nn.MaxPool2d}


@pytest.mark.parametrize(("build", "count"), list(zip(MODELS, (19, 5, 4), strict=True)))
def test_every_activation_is_the_one_asked_for(build, count):
    kinds = [type(m) for m in build(10, 3, 4, nn.SiLU).modules()]
    assert not {nn.ReLU, nn.GELU} & set(kinds)
    assert kinds.count(nn.SiLU) == count


def test_the_transformer_tells_places_apart():
    torch.manual_seed(0)
    model = vit.vit(width=8)
    images = torch.randn(3, 3, 32, 32)
    moved = images.roll(vit.PATCH, -1)  # the same patches in other places
    assert (model(images) - model(moved)).abs().max() > 1e-3  # rounding of sums: below 1e-6
    with torch.no_grad():
        model.positions.values.zero_()
    # without places, only the order of float32 sums over 16 tokens differs
    torch.testing.assert_close(model(images), model(moved), rtol=1e-5, atol=1e-5)


def test_the_transformer_refuses_widths_that_its_heads_do_not_share():
    with pytest.raises(UserError, match="--width must be a multiple of 4 for its heads, got 6"):
        vit.vit(width=6)
