import math

import pytest
import torch
from torch import nn

from marvin import tnvs_

STD = 0.8146  # of a normal distribution cut off at sqrt(3) standard deviations


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_a_large_draw(scale):
    n = 400
    weight = tnvs_(torch.empty(1000, n), scale)
    sigma = math.sqrt(scale / n)
    assert weight.abs().max() <= math.sqrt(3) * sigma
    # relative error of a standard deviation over m draws: below 1 / sqrt(2 m), 5 times that
    assert weight.std() == pytest.approx(STD * sigma, rel=5 / math.sqrt(2 * weight.numel()))


def test_corrected_variance():
    weight = tnvs_(torch.empty(1000, 100), 1.0, correct_variance=True)
    assert weight.std() == pytest.approx(0.1, rel=5 / math.sqrt(2 * weight.numel()))


def test_fan_in_of_a_grouped_convolution():
    conv = nn.Conv2d(64, 64, 3, groups=4)
    tnvs_(conv)
    assert conv.weight.abs().max() <= math.sqrt(3 * 0.5 / (16 * 9))
    assert conv.weight.abs().max() > math.sqrt(3 * 0.5 / (16 * 9)) * 0.9


def test_the_rest_of_a_module():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.PReLU())
    for p in model.parameters():
        nn.init.constant_(p, 7)
    assert tnvs_(model) is model
    assert model[0].bias.eq(0).all()
    assert model[1].weight.eq(1).all()
    assert model[1].bias.eq(0).all()
    assert model[2].weight.eq(7).all()


def test_a_generator_is_used():
    draws = [tnvs_(torch.empty(4, 5), generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    torch.testing.assert_close(*draws, rtol=0, atol=0)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="scale must be above 0 and finite, got"):
        tnvs_(torch.empty(2, 2), 0)
    with pytest.raises(ValueError, match=r"2 or more dimensions, got \(3,\)"):
        tnvs_(torch.empty(3))


def test_a_weight_without_elements_stays():
    assert tnvs_(torch.empty(3, 0)).shape == (3, 0)
    assert tnvs_(torch.empty(0, 3)).shape == (0, 3)
