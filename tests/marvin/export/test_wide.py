"""Integer kernels for every layer of words of 8 bits, and files that hold short weights in 4."""

import math

import pytest
import torch
from torch import nn

import marvin
from marvin.export import describe, integer, onnx, round_sums
from marvin.export.graph.nodes import Affine

ort = pytest.importorskip("onnxruntime")
ox = pytest.importorskip("onnx")


def trained(model, shape, bits=(8, 8), *, per_channel=False):
    """Return a model with formats of ranges, and samples."""
    torch.manual_seed(0)
    x = torch.randn(8, *shape)
    if per_channel:  # whose sizes differ
        for layer in (m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)):
            sizes = 2.0 ** -(torch.arange(len(layer.weight)) % 4)
            layer.weight.data *= sizes.view(-1, *[1] * (layer.weight.ndim - 1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    policy = marvin.StaticPolicy(*bits, per_channel=per_channel)
    optimizer = marvin.Quantized(sgd, policy, one_dim="float")
    marvin.quantize_activations(model, optimizer)
    for _ in range(2):  # the first is in floats
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(loss=loss)
    return model.eval(), x


def kinds_of(model):
    """Return how often each operation is in a file, as ONNX Runtime computes it."""
    return [node.op_type for node in model.graph.node]


def run(model, x, level=ort.GraphOptimizationLevel.ORT_ENABLE_ALL):
    options = ort.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = level, 3
    providers = ["CPUExecutionProvider"]
    session = ort.InferenceSession(model.SerializeToString(), options, providers=providers)
    (y,) = session.run(None, {model.graph.input[0].name: x.numpy()})
    return torch.from_numpy(y)


def assert_equal(model, network, x):
    want = integer.run(network, x)
    for level in (
        ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    ):  # fmt: skip
        torch.testing.assert_close(run(model, x, level).double(), want, rtol=0, atol=0)


def wide_output():
    return nn.Sequential(nn.Flatten(), nn.Linear(6000, 3))


def wide_between():
    """A layer whose sums float32 does not hold, ReLU, batch normalisation, and a rounding."""
    return nn.Sequential(nn.Linear(6000, 6), nn.ReLU(), nn.BatchNorm1d(6), nn.Linear(6, 3))


def wide_mean():
    """Averages sums that nothing rounds."""
    pool = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), pool, nn.Flatten(), nn.Linear(6, 3))


class WideSum(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6000, 3), nn.Linear(6000, 3)

    def forward(self, x):
        return self.one(x) + self.two(x)


WIDE = {
    "output": (wide_output, (6000, 1)),
    "between": (wide_between, (6000,)),
    "mean": (wide_mean, (4, 40, 40)),
    "sum": (WideSum, (6000,)),
}


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("per_channel", [False, True])
def test_a_wide_layer_is_spelled_alone(name, per_channel):
    build, shape = WIDE[name]
    model, x = trained(build(), shape, per_channel=per_channel)
    network = describe(model, x)
    assert any(value.significand > 2**24 for value in network.values.values())
    assert onnx.container_of(network) == "int8"
    assert onnx.in_floats(network) == {}
    written = onnx.to_model(network)
    assert {"MatMulInteger", "ConvInteger"} & set(kinds_of(written))
    assert_equal(written, network, x)
    # every weight at its smallest and largest, so that sums are as wide as they can be
    extreme = 99 * torch.sign(torch.randn(4, *shape))
    assert_equal(written, network, extreme)
    wide_output = network.values[network.output].significand > 2**24
    dtype = ox.TensorProto.DOUBLE if wide_output else ox.TensorProto.FLOAT
    assert written.graph.output[0].type.tensor_type.elem_type == dtype


def test_means_are_on_integer_kernels_where_what_they_take_is_rounded():
    model, x = trained(wide_mean(), (4, 8, 8))
    exact = describe(model, x)
    rounded = round_sums(exact, x)
    terms = {name: fmt for name, fmt in rounded.formats().items() if name.endswith(".term")}
    assert terms == {"1.term": terms["1.term"]}
    assert not terms["1.term"].signed
    assert "MatMulInteger" in kinds_of(onnx.to_model(exact))
    assert "MatMulInteger" not in kinds_of(onnx.to_model(rounded))
    assert_equal(onnx.to_model(rounded), rounded, x)


def convolutions():
    first = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 7, 3, bias=False)
    return nn.Sequential(*first, nn.ReLU(), nn.Flatten(), nn.Linear(112, 5))


@pytest.mark.parametrize("bits", [(4, 6), (3, 4), (2, 8), (5, 6)])
@pytest.mark.parametrize("per_channel", [False, True])
def test_weights_of_4_bits_take_4_bits(bits, per_channel):
    model, x = trained(convolutions(), (3, 8, 8), bits, per_channel=per_channel)
    network = round_sums(describe(model, x), x)
    plain, short = (onnx.to_model(network, int4=int4) for int4 in (False, True))
    assert_equal(short, network, x)
    stored = [t for t in short.graph.initializer if t.data_type == ox.TensorProto.INT4]
    assert len(stored) == (3 if bits[0] <= 4 else 0)
    assert all(len(t.raw_data) == (math.prod(t.dims) + 1) // 2 for t in stored)
    saved = sum(math.prod(t.dims) // 2 for t in stored)
    lost = 300 * len(stored)  # names and nodes that make bytes of them
    assert len(short.SerializeToString()) <= len(plain.SerializeToString()) - saved + lost


def test_weights_of_4_bits_of_a_layer_that_is_called_several_times_are_stored_once():
    torch.manual_seed(0)
    layer, x = nn.Linear(40, 40), torch.rand(8, 40)
    model = nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), layer)
    network = describe(marvin.calibrate(model.eval(), [x], bits=8, weight_bits=4), x)
    short = onnx.to_model(network, int4=True)
    stored = [t for t in short.graph.initializer if t.data_type == ox.TensorProto.INT4]
    assert len(stored) == 1
    assert_equal(short, network, x)


def test_weights_of_4_bits_keep_the_integer_kernels(tmp_path):
    model, x = trained(convolutions(), (3, 8, 8), (4, 6))
    network = round_sums(describe(model, x), x)
    found = []
    for int4 in (False, True):
        options = ort.SessionOptions()
        options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "it"), 3
        content = onnx.to_model(network, int4=int4).SerializeToString()
        ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        found.append(sorted(kinds_of(ox.load(tmp_path / "it"))))
    assert found[0] == found[1]
    assert found[1].count("QLinearConv") == 2


def test_offsets_that_32_bits_hardly_hold_leave_a_layer_one_kernel():
    """Small weights make fine products, large offsets coarse ones: the scale gives up a bit."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    model.append(nn.Sequential(nn.Flatten(), nn.Linear(8 * 36, 4)))
    with torch.no_grad():
        model[0].weight.mul_(0.02)
        model[1].bias.fill_(20.0)
    x = torch.randn(64, 8, 8, 8)
    marvin.reestimate_batch_norm(model, [x])
    fixed = marvin.calibrate(model.eval(), [x], bits=8)
    network = describe(fixed, x)
    (norm,) = (op for op in network.operations if isinstance(op, Affine))
    of_products = network.values[norm.inputs[0]].fl
    assert norm.scale_fmt.fl + of_products == norm.offset_fmt.fl
    assert norm.scale_fmt.fl < _finest(norm)
    assert not {"MatMulInteger", "ConvInteger"} & set(kinds_of(onnx.to_model(network)))
    assert_equal(onnx.to_model(network), network, x)
    difference = integer.run(network, x).float() - fixed(x)  # a code that fell the other way
    assert difference.norm() < 0.02 * fixed(x).norm()


def _finest(norm):
    """Return the fractional length that the scale's 16 bits would allow."""
    largest = norm.scale.abs().max().item() * norm.scale_fmt.lsb
    return 15 - math.ceil(math.log2(largest))


def test_windows_of_convolutions_are_multiplied_as_matrices():
    """Strides, dilation, borders, and one side alone."""
    convolutions = (
        (nn.Conv2d(40, 3, 5, stride=2, padding=2), (40, 9, 11)),
        (nn.Conv2d(60, 3, 3, dilation=2, padding=1), (60, 8, 7)),
        (nn.Conv1d(200, 3, 5, stride=3, padding=1), (200, 17)),
    )
    for convolution, shape in convolutions:
        model, x = trained(convolution, shape)
        network = describe(model, x)
        written = onnx.to_model(network)
        assert "MatMulInteger" in kinds_of(written)
        assert_equal(written, network, x)
