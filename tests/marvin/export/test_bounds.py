"""Bounds of codes, against every input there is: sums in Python's integers and by torch."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from fixedpoint_kernels import FixedPoint
from marvin.export.graph.bounds import value_of
from marvin.export.graph.nodes import Add, Affine, AveragePool, Conv, Linear, MaxPool, Relu, Value

WORD = FixedPoint(8, 3)


def value(low, high, shape=(2,), fl=2):
    return Value(shape, fl, low, high, max(-low, high))


@pytest.mark.parametrize(("low", "high"), [(-4, 7), (0, 7), (-8, 0), (-1, 1)])
def test_a_linear_layer(low, high):
    weight, bias = [[3, -2], [-1, -5], [4, 0]], [5, -6, 0]
    op = Linear("l", ("x",), torch.tensor(weight), WORD, torch.tensor(bias), FixedPoint(8, 6))
    found = value_of(op, [value(low, high)])
    assert found.fl == 6  # of the bias, which is finer than products by one bit
    inputs = list(itertools.product(range(low, high + 1), repeat=2))
    sums = [
        2 * (row[0] * x[0] + row[1] * x[1]) + b
        for row, b in zip(weight, bias, strict=True)
        for x in inputs
    ]
    assert (found.low, found.high) == (min(sums), max(sums))
    assert found.magnitude >= max(map(abs, sums))


@pytest.mark.parametrize("kind", ["conv", "average"])
def test_zeros_around_an_image_count(kind):
    x = value(3, 7, (1, 4, 4))
    images = [torch.full((1, 1, 4, 4), float(code)) for code in (3, 7)]
    ones, around = torch.ones(1, 1, 3, 3), ((1, 1), (1, 1))
    if kind == "conv":
        weight = ones.to(torch.int64)
        op = Conv("c", ("x",), weight, WORD, None, WORD, *around, (1, 1), 1)
        outputs = [F.conv2d(image, ones, padding=1) for image in images]
    else:
        op = AveragePool("a", ("x",), (3, 3), *around, FixedPoint(16, 2))
        outputs = [F.avg_pool2d(image, 3, 1, 1).round() for image in images]
    found = value_of(op, [x])
    assert found.low <= min(int(y.min()) for y in outputs)
    assert found.high == max(int(y.max()) for y in outputs)


def test_operations_on_single_codes():
    x = value(-5, 9)
    relu = value_of(Relu("r", ("x",)), [x])
    assert (relu.low, relu.high, relu.fl) == (0, 9, 2)
    below = value_of(Relu("r", ("x",)), [value(-5, -2)])
    assert (below.low, below.high) == (0, 0)
    added = value_of(Add("a", ("x", "y")), [x, value(0, 7, fl=4)])
    assert (added.low, added.high, added.fl) == (-5 * 4, 9 * 4 + 7, 4)
    image = value(-5, 9, (1, 4, 4))
    pooled = value_of(MaxPool("m", ("x",), (2, 2), (2, 2), (0, 0), (1, 1)), [image])
    assert (pooled.low, pooled.high, pooled.shape) == (-5, 9, (1, 2, 2))


def test_a_batch_normalisation():
    scale, offset = [3, -2], [-7, 11]
    op = Affine("n", ("x",), torch.tensor(scale), WORD, torch.tensor(offset), FixedPoint(16, 5))
    found = value_of(op, [value(-5, 9)])
    codes = [s * x + o for s, o in zip(scale, offset, strict=True) for x in range(-5, 10)]
    assert (found.low, found.high, found.fl) == (min(codes), max(codes), 5)
