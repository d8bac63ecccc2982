"""Bounds of codes, against every input there is: sums in Python's integers and by torch."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fixedpoint_kernels import FixedPoint
from marvin.export import (
    ExportError,
    Formats,
    describe,
    integer,
    nearest_weights,
    onnx,
    round_sums,
)
from marvin.export.graph.bounds import value_of
from marvin.export.graph.functions import Table
from marvin.export.graph.nodes import Add, Affine, AveragePool, Conv, Linear, MaxPool, Relu, Value
from marvin.export.passes.rows import refitted

WORD = FixedPoint(8, 3)
INPUT = Formats(FixedPoint(16, 12), None)


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


def described(model, x, weights, inputs):
    """Return the network of a model whose weights and inputs of layers have formats."""
    with torch.no_grad():
        return describe(nearest_weights(model, weights), x, weights, inputs)


def normed(fl):
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5))
    nn.init.constant_(model[1].weight, 3.0)
    long = FixedPoint(32, fl)
    weights = {"0.weight": FixedPoint(16, 14), "1.weight": long, "1.bias": long}
    return described(model, torch.randn(5, 4), weights, {"0": INPUT})


def soft(fmt):
    model = nn.Sequential(nn.Linear(4, 300), nn.Softmax(-1), nn.Linear(300, 2))
    weights = {"0.weight": WORD, "2.weight": WORD}
    return described(model, torch.randn(5, 4), weights, {"0": INPUT, "2": Formats(fmt, None)})


def coarse_norm():
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2))
    weights = {"0.weight": WORD, "1.weight": FixedPoint(32, 31), "2.weight": WORD}
    formats = {"0": INPUT, "2": Formats(FixedPoint(8, -31), None)}
    return described(model, torch.randn(5, 4), weights, formats)


def chosen(*shape):
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 2))
    weights = {"0.weight": WORD, "1.weight": WORD}
    return described(model, torch.randint(7, shape), weights, {"1": INPUT})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: normed(29), "1: sums must take 61 bits at most, got 62: give its weight and bias"),
        (lambda: soft(FixedPoint(32, 31)), "1: sums must take 61 bits at most, got 64: round what"),
        (coarse_norm, "1 must have shifts of up to 61 bits: give its weight, what it takes"),
        (lambda: chosen(5, 3, 2), r"0 must take indices .*, got \(n, 3, 2\): flatten those"),
        (lambda: round_sums(soft(WORD), torch.zeros(2, 3)), r"have shape \(n, 4\), got \(2, 3\)"),
        (lambda: round_sums(soft(WORD), torch.zeros(0, 4)), r"have shape \(n, 4\), got \(0, 4\)"),
    ],
)
def test_what_the_integers_do_not_hold_is_named(make, message):
    torch.manual_seed(0)
    with pytest.raises(ExportError, match=message):
        make()
    assert normed(20).operations
    assert soft(FixedPoint(16, 15)).operations
    assert chosen(5, 3).operations


def test_the_sample_of_sums_is_a_tensor():
    with pytest.raises(TypeError, match=r"must be a tensor.*, got list"):
        round_sums(soft(WORD), [1.0])  # pyright: ignore[reportArgumentType]


def test_tables_have_codes_that_a_source_has_got():
    """A mean of rounded terms may be a step beyond one of exact terms, at the same ``fl``."""
    table = Table("t", ("x",), torch.tensor([3, 4, 6]), -1, 2, WORD, "Tanh")
    assert refitted(table, value(-1, 1)) is table
    wider = refitted(table, value(-2, 3))
    assert isinstance(wider, Table)
    assert (wider.low, wider.codes.tolist()) == (-2, [3, 3, 4, 6, 6, 6])
    assert value_of(wider, [value(-2, 3)]).high == 6


class Powers(nn.Module):
    """What a layer takes has more than 64 bits."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x)
        return self.last(x * x * x)


def test_a_layer_takes_codes_of_more_than_64_bits():
    torch.manual_seed(0)
    weights = {"first.weight": FixedPoint(16, 14), "last.weight": WORD}
    x = torch.randn(5, 4)
    network = described(Powers(), x, weights, {"first": INPUT})
    assert network.values["mul_1"].bits > 64
    found = integer.run(network, x)
    assert found.isfinite().all()


def test_long_unsigned_weights_are_stored_as_signed_ones():
    """ONNX dequantises no uint32."""
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    nn.init.uniform_(model[2].weight, 0, 0.4)
    weights = {"0.weight": WORD, "2.weight": FixedPoint(20, 12, signed=False)}
    rounds, x = Formats(FixedPoint(8, 5), None), torch.randn(9, 4)
    network = described(model, x, weights, {"0": rounds, "2": rounds})
    for container in ("int8", "float64"):
        content = onnx.to_model(network, container).SerializeToString()
        session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
        (got,) = session.run(None, {network.input.name: x.numpy()})
        assert (integer.run(network, x).numpy() == got).all()
