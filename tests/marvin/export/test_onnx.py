from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import marvin
from fixedpoint_kernels import FixedPoint
from marvin.export import (
    ExportError,
    Formats,
    describe,
    integer,
    nearest_weights,
    round_sums,
)
from marvin.export import onnx as exporter
from marvin.export.graph.bounds import first_value, value_of
from marvin.export.graph.functions import Mul
from marvin.export.graph.nodes import (
    Add,
    AveragePool,
    Conv,
    Input,
    MaxPool,
    Network,
    Relu,
    Round,
    Weighted,
)
from marvin.export.graph.views import Concat
from marvin.hooks import detach
from train.resnet20 import resnet20

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")

CPU = Path("/proc/cpuinfo")
HAS_VNNI = CPU.exists() and "vnni" in CPU.read_text()
LEVELS = runtime.GraphOptimizationLevel.__members__


def run(model, x, level="ORT_ENABLE_ALL"):
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.graph_optimization_level = LEVELS[level]
    session = runtime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return torch.from_numpy(got)


def assert_exact(network, x, container=None, **options):
    model = exporter.to_model(network, container, **options)
    want = integer.run(network, x)
    torch.testing.assert_close(run(model, x).double(), want, rtol=0, atol=0)
    return model


def kernels(model, file):
    """Return how often ONNX Runtime runs each kind of kernel."""
    options = runtime.SessionOptions()
    options.optimized_model_filepath = str(file)
    options.log_severity_level = 3  # that the file is for this processor
    runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(file).graph.node)


@pytest.mark.parametrize(
    ("wl", "fl", "container"),
    [(4, 2, "int8"), (7, 5, "int8"), (8, 5, "int8"), (8, 3, "int8"), (20, 14, "float64")],
)
def test_outputs_equal_the_integer_reference(digits, plain, wl, fl, container):
    for make in (digits, plain):
        _, network, x = make(wl, fl)
        assert exporter.container_of(network) == container
        for scale in (0.1, 1, 30):  # the last saturates
            assert_exact(network, x * scale)


@pytest.mark.parametrize("container", ["int16", "float64"])
@pytest.mark.parametrize(("wl", "fl"), [(8, 5), (9, 6), (10, 7)])
def test_the_longer_containers_are_exact_too(plain, wl, fl, container):
    _, network, x = plain(wl, fl)
    assert_exact(network, x, container)


def test_integer_containers_of_short_words(plain):
    _, network, x = plain(6, 4)
    model = assert_exact(network, x)
    kinds = {onnx.TensorProto.DataType.Name(c.data_type) for c in model.graph.initializer}
    assert {"INT8", "UINT8", "INT32", "FLOAT"} == kinds  # weights, activations, biases, scales
    clips = [node for node in model.graph.node if node.op_type == "Clip"]
    assert all(node.input[0].endswith(".codes") for node in clips)  # on integers, each once
    assert "Relu" not in {node.op_type for node in model.graph.node}


@pytest.mark.parametrize("bits", [(4, 4), (6, 6), (5, 8), (8, 5), (8, 8)])
@pytest.mark.parametrize("scale", [0.3, 1, 20])
def test_batch_norm_and_sums_are_integer_kernels(ranged, bits, scale, tmp_path):
    """Strides, short-cuts, depthwise, pooling; scales of all signs; unsigned inputs."""
    _, network, x = ranged(bits=bits)
    network = round_sums(network, x)
    for options in ({}, {"vnni": True}) if HAS_VNNI else ({},):
        model = assert_exact(network, scale * x, "int8", **options)
    found = kernels(model, tmp_path / "optimized.onnx")
    assert found["QLinearConv"] == 5
    assert found["QLinearAdd"] >= 2
    assert not {"Conv", "FusedConv", "Mul", "Gemm"} & set(found)


def rounded_again(wl, low=0, taken_by="layer"):
    """Return a network that rounds bytes to ``wl`` bits, unsigned, and samples with ties and ends."""
    first, second = FixedPoint(8, 4, signed=low < 0), FixedPoint(wl, 2, signed=False)
    weight = torch.randint(-31, 32, (5, 4, 3, 3), generator=torch.Generator().manual_seed(0))
    options = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    operations = [
        Input("x", (), (4, 8, 8)),
        Round("in", ("x",), first),
        Round("again", ("in",), second),
        Conv("conv", ("again",), weight, FixedPoint(6, 5), None, FixedPoint(16, 7), **options),
        Round("y", ("conv",), FixedPoint(8, 0)),
    ]
    if taken_by == "pool":
        operations[2] = Round("again", ("pool",), second)
        operations.insert(2, MaxPool("pool", ("in",), (3, 3), (1, 1), (1, 1), (1, 1)))
    elif taken_by == "output":
        operations[-1] = Add("y", ("again", "in"))
    elif taken_by == "both":
        operations += [Round("sum", ("in",), second), Add("z", ("sum", "in"))]
        operations += [Concat("both", ("z", "y"), 0)]
    values = {"in": first_value(operations[1], (4, 8, 8))}
    for op in operations[2:]:
        values[op.name] = value_of(op, [values[name] for name in op.inputs])
    network = Network(tuple(operations), values, "trained")
    codes = torch.arange(256).repeat(4)[: 4 * 64 * 4].reshape(4, 4, 8, 8) + min(low, 0)
    return network, codes / 16


@pytest.mark.parametrize("wl", [3, 6, 7])
@pytest.mark.parametrize(
    ("low", "taken_by", "clips"),
    [(0, "layer", 0), (-128, "layer", 1), (0, "pool", 1), (0, "output", 1), (0, "both", 1)],
)
def test_the_largest_byte_is_the_largest_code_where_nothing_else_takes_it(wl, low, taken_by, clips):
    """A clip costs more than the rounding; where bytes end at 255, it is not there."""
    network, x = rounded_again(wl, low, taken_by)
    for options in ({}, {"vnni": True}) if HAS_VNNI else ({},):
        model = assert_exact(network, x, "int8", **options)
        assert sum(node.op_type == "Clip" for node in model.graph.node) == clips
        options = runtime.SessionOptions()
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = runtime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        (got,) = session.run(None, {"x": x.numpy()})
        assert torch.equal(torch.from_numpy(got).double(), integer.run(network, x))


def headed(shape, sides):
    """Return convolution, ReLU, global pooling and a linear layer, in one or two dimensions."""
    conv, pool = [(nn.Conv1d, nn.AdaptiveAvgPool1d), (nn.Conv2d, nn.AdaptiveAvgPool2d)][sides - 1]
    return nn.Sequential(
        conv(shape[0], 8, 3, padding=1), nn.ReLU(), pool(1), nn.Flatten(), nn.Linear(8, 5)
    )


@pytest.mark.parametrize("bits", [(6, 6), (8, 8)])
@pytest.mark.parametrize("sides", [1, 2])
def test_what_is_pooled_is_not_transposed_back(ranged, bits, sides, tmp_path):
    """ONNX Runtime puts channels last before the first convolution; nothing puts them first again."""
    shape = (4, *[4] * sides)
    _, network, x = ranged(lambda: headed(shape, sides), bits, shape)
    network = round_sums(network, x)
    model = assert_exact(network, 2 * x, "int8")
    if sides == 2:
        assert kernels(model, tmp_path / "optimized.onnx")["Transpose"] == 1


def test_a_sum_that_a_sum_takes_is_rounded_for_a_layer_from_above():
    """The layer's bytes are made of those of the sum: no clip, and no second sum."""
    layer, term = FixedPoint(6, 2, signed=False), FixedPoint(7, 3)
    weight = torch.randint(-31, 32, (4, 4, 1, 1), generator=torch.Generator().manual_seed(0))
    options = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    operations = (
        Input("x", (), (4, 8, 8)),
        Round("in", ("x",), term),
        Add("sum", ("in", "in")),
        Relu("relu", ("sum",)),
        Round("layer.in", ("relu",), layer),
        Conv("layer", ("layer.in",), weight, FixedPoint(6, 5), None, FixedPoint(16, 7), **options),
        Round("layer.out", ("layer",), FixedPoint(8, 1)),
        Add("y", ("layer.out", "relu")),
    )
    values = {"in": first_value(operations[1], (4, 8, 8))}
    for op in operations[2:]:
        values[op.name] = value_of(op, [values[name] for name in op.inputs])
    x = (torch.arange(128).repeat(8)[: 4 * 4 * 64].reshape(4, 4, 8, 8) - 64) / 8
    model = assert_exact(Network(operations, values, "trained"), x, "int8")
    found = Counter(node.op_type for node in model.graph.node)
    # clips of what comes in and of the ReLU; the sum, its codes for the layer, the last
    assert (found["Clip"], found["Add"]) == (2, 3)


def test_a_layer_with_two_roundings_is_written_twice(tmp_path):
    """A sum in floats would be exact too, and several times as slow."""

    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
            self.left, self.right = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x):
            x = torch.relu(self.bn(self.conv(x)))
            return torch.flatten(self.left(x) + self.right(x), 1)

    torch.manual_seed(0)
    weights = {f"{name}.weight": FixedPoint(6, 5) for name in ("conv", "left", "right")}
    model, x = nearest_weights(Fork().eval(), weights), torch.randn(6, 4, 9, 9)
    rounds = {
        "conv": Formats(FixedPoint(8, 5), None),
        "left": Formats(FixedPoint(5, 2, signed=False), FixedPoint(8, 4)),
        "right": Formats(FixedPoint(7, 5, signed=False), FixedPoint(8, 5)),
    }
    network = describe(model, x, weights, rounds)
    found = kernels(assert_exact(network, x), tmp_path / "optimized.onnx")
    assert found["QLinearConv"] == 4
    assert not {"Conv", "FusedConv"} & set(found)


@pytest.mark.parametrize("wl", [6, 8])
def test_vectors_are_normalised_in_integers_too(ranged, wl, tmp_path):
    def build():
        norm = nn.BatchNorm1d(12)
        model = nn.Sequential(nn.Linear(20, 12), norm, nn.ReLU(), nn.Linear(12, 5))
        norm.running_var.uniform_(0.1, 2)
        norm.weight.data = torch.linspace(-1, 1.2, 12)
        norm.weight.data[3] = 0
        return model

    _, network, x = ranged(build, (wl, wl), (20,))
    found = kernels(assert_exact(network, 3 * x, "int8"), tmp_path / "optimized.onnx")
    assert found["QGemm"] == 2
    assert not {"Gemm", "Mul"} & set(found)


def test_exact_sums_are_written_alone(ranged):
    """Sums of more bits than float32 has are int32 and float64; the rest stays bytes."""
    _, network, x = ranged()
    assert any(not value.is_exact(24) for value in network.values.values())
    assert exporter.container_of(network) == "int8"
    assert set(exporter.unfused(network)) >= {"pointwise", "down", "shortcut"}
    assert_exact(network, x)
    assert exporter.unfused(round_sums(network, x)) == []


@pytest.mark.parametrize("container", ["int8", "int16", "float64"])
def test_unsigned_words_in_each_container(ranged, container):
    _, network, x = ranged(bits=(6, 8))
    network = round_sums(network, x)
    assert not all(fmt.signed for fmt in network.formats().values())
    assert_exact(network, 2 * x, container)


@pytest.mark.parametrize("fmt", [FixedPoint(8, 5, signed=False), FixedPoint(5, 2, signed=False)])
def test_an_unsigned_input_and_unsigned_weights(plain, fmt):
    model, _, x = plain(7, 4)
    for module in model.modules():
        detach(module)
    formats = {
        name: FixedPoint(7, 4, signed=bool(p.min() < 0)) for name, p in model.named_parameters()
    }
    model[0].weight.data.abs_()
    formats["0.weight"] = FixedPoint(8, 4, signed=False)
    rounds = {name: Formats(fmt, None) for name in ("0", "2", "4", "6", "8")}
    network = describe(model, x, formats, rounds)
    for container in ("int8", "int16", "float64"):
        assert_exact(network, 3 * x, container)


@pytest.mark.parametrize(("side", "copies"), [(3, 1), (5, 1), (7, 0)])
def test_three_channels_become_four_under_small_windows(side, copies):
    """The runtime's fast kernel takes multiples of 4; under 7x7, its products of matrices are faster."""
    model = nn.Sequential(nn.Conv2d(3, 8, side), nn.ReLU(), nn.Conv2d(8, 4, 1))
    x = torch.randn(8, 3, 12, 12)
    found = assert_exact(describe(marvin.calibrate(model, [x], bits=7), x), x, "int8")
    assert sum(node.output[0].endswith(".wide") for node in found.graph.node) == copies


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("kernel", "padding", "sides"),
    [
        (7, 3, (12, 16)), (6, 2, (12, 12)), (5, 2, (16, 12)), (5, 1, (12, 12)), (5, 0, (14, 14)),
        (7, 2, (12, 12)), ((7, 5), (3, 1), (12, 12)), (2, 0, (12, 12)),
    ],
)  # fmt: skip
def test_windows_with_stride_2_are_computed_over_blocks(channels, kernel, padding, sides):
    """Blocks of 2x2 pixels have channels by the dozen, or 4, which the runtime's fast kernel takes."""
    first, second = nn.Conv2d(channels, 8, kernel, 2, padding), nn.Conv2d(8, 4, 3)
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))
    x = torch.randn(8, channels, *sides)
    model(x)
    network = round_sums(describe(marvin.calibrate(model, [x], bits=6), x), x)
    found = assert_exact(network, 2 * x, "int8")
    assert {"SpaceToDepth"} <= {node.op_type for node in found.graph.node}
    first = next(node for node in found.graph.node if node.op_type == "Conv")
    assert "strides" not in {a.name for a in first.attribute}


@pytest.mark.parametrize(
    ("options", "sides"),
    [
        ({"kernel_size": 7, "stride": 2, "padding": 3}, (12, 13)),  # sides that have no blocks
        ({"kernel_size": 3, "stride": 2, "padding": 1}, (12, 12)),  # a third more products
        ({"kernel_size": 7, "stride": 1, "padding": 3}, (12, 12)),
        ({"kernel_size": 7, "stride": (2, 1), "padding": 3}, (12, 12)),
        ({"kernel_size": 5, "stride": 2, "dilation": 2}, (12, 12)),
        ({"kernel_size": 5, "stride": 2, "groups": 3}, (12, 12)),
        ({"kernel_size": 11, "stride": 2, "padding": 5}, (24, 24)),  # products of matrices are as fast
        ({"kernel_size": 1, "stride": 2, "padding": 0}, (12, 12)),
        ({"kernel_size": 6, "stride": 2, "padding": 3}, (12, 14)),  # a third more products, too
    ],
)  # fmt: skip
def test_other_windows_are_computed_over_pixels(options, sides):
    model = nn.Sequential(nn.Conv2d(3, 9, **options), nn.ReLU(), nn.Conv2d(9, 4, 1))
    x = torch.randn(8, 3, *sides)
    found = assert_exact(describe(marvin.calibrate(model, [x], bits=6), x), 2 * x, "int8")
    assert "SpaceToDepth" not in {node.op_type for node in found.graph.node}


def test_blocks_are_of_images_alone():
    first, second = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 6, 2, 2)
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    x = torch.randn(8, 3, 14, 14)
    network = round_sums(describe(marvin.calibrate(model, [x], bits=6), x), x)
    found = assert_exact(network, 2 * x, "int8")
    assert "SpaceToDepth" not in {node.op_type for node in found.graph.node}


def test_what_else_takes_the_images_takes_their_pixels():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.large, self.small = nn.Conv2d(3, 8, 6, 2, 2), nn.Conv2d(3, 8, 1, 2)

        def forward(self, x):
            return self.large(x) + self.small(x)

    x = torch.randn(8, 3, 12, 12)
    network = describe(marvin.calibrate(Two(), [x], bits=6), x)
    found = assert_exact(round_sums(network, x), 2 * x, "int8")
    assert any(node.op_type == "SpaceToDepth" for node in found.graph.node)
    assert any(node.output[0].endswith(".wide") for node in found.graph.node)


@pytest.mark.parametrize(
    ("largest", "act", "kind"),
    [(64, 8, "INT8"), (65, 8, "UINT8"), (128, 8, "UINT8"), (127, 7, "INT8"), (128, 7, "INT8")],
)
def test_weights_are_int8_where_two_products_fit_in_16_bits(largest, act, kind):
    """Inputs are unsigned, of ``act`` bits; without VNNI, kernels add two products in int16."""
    model = nn.Sequential(nn.Conv2d(32, 8, 3))
    model[0].weight.data = torch.randint(-largest, min(largest, 127) + 1, (8, 32, 3, 3)).float()
    model[0].weight.data[0] = -largest
    x = torch.randint(0, 256, (4, 32, 6, 6)).float()
    rounds = {"0": Formats(FixedPoint(act, 0, signed=False), FixedPoint(8, -14))}
    network = describe(model, x, {"0.weight": FixedPoint(8, 0)}, rounds)
    onnx_model = assert_exact(network, x)
    stored = {c.name: c.data_type for c in onnx_model.graph.initializer}
    assert stored["0.weight"] == onnx.TensorProto.DataType.Value(kind)
    fast = exporter.to_model(network, vnni=True)
    stored = {c.name: c.data_type for c in fast.graph.initializer}
    assert stored["0.weight"] == onnx.TensorProto.INT8
    if HAS_VNNI:
        assert_exact(network, x, vnni=True)


def test_an_average_of_long_sums_is_no_byte():
    """64 sums of 20 bits: float32 has each, and not their total."""
    model = nn.Sequential(nn.Conv2d(32, 1, 1, bias=False), nn.AvgPool2d(8))
    model[0].weight.data.fill_(127)
    rounds = {
        "0": Formats(FixedPoint(8, 0, signed=False), None),
        "1": Formats(None, FixedPoint(8, -12)),
    }
    x = torch.randint(0, 256, (2, 32, 8, 8)).float()
    network = describe(model, x, {"0.weight": FixedPoint(8, 0)}, rounds)
    assert not network.values["1"].is_exact(24)
    assert exporter.container_of(network) == "int8"
    assert_exact(network, x)


def of_two(kind, second, out):
    """Return a sum or a product of images at ``fl=0`` and again at ``second``, rounded at ``out``."""
    operations = (
        Input("x", (), (3, 2, 2)),
        Round("a", ("x",), FixedPoint(8, 0)),
        Round("b", ("x",), FixedPoint(8, second)),
        kind("both", ("a", "b")),
        Round("y", ("both",), FixedPoint(8, out)),
    )
    values = {op.name: first_value(op, (3, 2, 2)) for op in operations[1:3]}
    for op in operations[3:]:
        values[op.name] = value_of(op, [values[name] for name in op.inputs])
    return Network(operations, values, "trained")


def of_one(count, out):
    """Return means of images of ``count`` pixels at ``fl=0``, rounded at ``out``."""
    shape, fmt = (3, 1, count), FixedPoint(8, out)
    first = Round("a", ("x",), FixedPoint(8, 0))
    mean = AveragePool("y", ("a",), (1, count), (1, count), (0, 0), fmt)
    values = {"a": first_value(first, shape)}
    values["y"] = value_of(mean, [values["a"]])
    return Network((Input("x", (), shape), first, mean), values, "trained")


@pytest.mark.parametrize("container", ["int8", "qdq"])
@pytest.mark.parametrize(
    ("kind", "second", "out"),
    [(Add, 0, 20), (Add, 0, 25), (Add, -12, 14), (Mul, 0, 15), (Mul, 0, 20), (Add, 30, -1)],
)
def test_sums_of_steps_far_apart(kind, second, out, container):
    """ONNX Runtime's kernels turn codes beyond int32 over, and have 24 bits of a sum."""
    network = of_two(kind, second, out)
    if container == "qdq" and not exporter.qdq_is_exact(network):
        return
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-128, 128, (600, 3, 2, 2), generator=generator)
    x = x + torch.randint(-128, 128, x.shape, generator=generator) * 2.0**-second * (second > 0)
    assert_exact(network, x.float(), container)


class GivesNorm(nn.Module):
    """Gives what batch normalisation makes, which its next layer takes rounded."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6)
        self.b = nn.Conv2d(6, 4, 3)

    def forward(self, x):
        y = self.norm(self.a(x))
        return self.b(torch.relu(y)), y


@pytest.mark.parametrize("container", ["int8", "int16", "qdq", "float64"])
def test_outputs_that_are_also_rounded_are_exact(container):
    """They were taken for values of which roundings alone are asked."""
    torch.manual_seed(0)
    model, x = GivesNorm(), torch.randn(16, 3, 8, 8)
    for _ in range(3):
        model(x)
    network = describe(marvin.calibrate(model.eval(), [x], bits=6), x)
    assert not network.values["norm"].is_exact(24)
    assert not exporter.qdq_is_exact(network)
    if container == "int16":
        with pytest.raises(ExportError, match="norm: sums take 29 bits, int16 is exact up to 24"):
            exporter.to_model(network, container)
    elif container != "qdq":
        content = exporter.to_model(network, container).SerializeToString()
        session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
        got = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        for found, want in zip(got, integer.run_heads(network, x).values(), strict=True):
            torch.testing.assert_close(torch.from_numpy(found).double(), want, rtol=0, atol=0)


@pytest.mark.parametrize("container", ["int8", "qdq"])
@pytest.mark.parametrize(
    ("count", "out"), [(1, 7), (1, 8), (4, 9), (4, 10), (4, 26), (1, -31), (4, -31)]
)
def test_means_of_steps_far_apart(count, out, container):
    """ONNX Runtime's kernel for means of whole images ends the run where steps are too far apart."""
    x = torch.randint(-128, 128, (50, 3, 1, count), generator=torch.Generator().manual_seed(0))
    assert_exact(of_one(count, out), x.float(), container)


@pytest.mark.parametrize("layer", [nn.Linear(6, 5), nn.Conv2d(6, 5, 1)])
@pytest.mark.parametrize(
    ("weight", "act", "container"),
    [((8, 6), 6, "int8"), ((8, 6), 8, "int8"), ((4, 2), 16, "int16")],
)
def test_biases_finer_than_products(layer, weight, act, container):
    """ONNX Runtime rounds them behind what it takes for a layer of integers."""
    torch.manual_seed(0)
    fmt = FixedPoint(*weight)
    kind = type(layer)
    model = nn.Sequential(layer, kind(5, 2, *layer.weight.shape[2:], bias=False))
    for fl in (3 + fmt.fl, 3 + fmt.fl + 3):
        formats = {"0.weight": fmt, "1.weight": fmt, "0.bias": FixedPoint(10, fl)}
        torch.manual_seed(1)
        nn.init.uniform_(layer.weight, 1.1 * fmt.min, 1.1 * fmt.max)
        nn.init.uniform_(layer.bias, 2.0**-fl, 40 * 2.0**-fl)
        given = nearest_weights(model, formats)
        x = torch.randn(200, 6, *layer.weight.shape[2:])
        rounds = {
            "0": Formats(FixedPoint(act, 3), None),
            "1": Formats(FixedPoint(max(8, act), 8), None),
        }
        network = describe(given, x, formats, rounds)
        if container == "int16":
            assert_exact(network, x, container)
        else:
            assert exporter.container_of(network) == "int8"
            is_fine = fl == 3 + fmt.fl
            assert ("0" in exporter.unfused(network)) == (not is_fine)
        assert_exact(network, x)


@pytest.mark.parametrize(("left", "right"), [((8, 5), (8, 4)), ((6, 1), (8, 9)), ((8, -2), (3, 2))])
@pytest.mark.parametrize("out", [(8, 4), (5, 0)])
def test_sums_of_all_codes(left, right, out, tmp_path):
    """Every pair of codes: ties, saturation, steps far apart."""
    a, b = FixedPoint(*left, signed=False), FixedPoint(*right)
    operations = (
        Input("x", (), (2, 1, 1)),
        *(Round(name, ("x",), fmt) for name, fmt in (("a", a), ("b", b))),
        *(_pick(name, place) for place, name in enumerate("ab")),
        Round("a8", ("pick_a",), a),
        Round("b8", ("pick_b",), b),
        Add("sum", ("a8", "b8")),
        Round("signed", ("sum",), FixedPoint(*out)),
        Relu("relu", ("sum",)),
        Round("unsigned", ("relu",), FixedPoint(*out, signed=False)),
        Add("both", ("signed", "unsigned")),
    )
    values = {}
    for op in operations[1:]:
        is_first = op.inputs == ("x",)
        found = [values[name] for name in op.inputs if name in values]
        values[op.name] = first_value(op, (2, 1, 1)) if is_first else value_of(op, found)
    network = Network(operations, values, "trained")
    pairs = torch.cartesian_prod(
        *(torch.arange(fmt.min_code, fmt.max_code + 1) * fmt.lsb for fmt in (a, b))
    )
    model = assert_exact(network, pairs.float().reshape(-1, 2, 1, 1), "int8")
    assert kernels(model, tmp_path / "optimized.onnx")["QLinearAdd"] >= 2


def _pick(name, place):
    weight = torch.zeros(1, 2, 1, 1, dtype=torch.int64)
    weight[0, place] = 1
    fmt, same = FixedPoint(4, 0), ((1, 1), (0, 0), (1, 1), 1)
    return Conv(f"pick_{name}", (name,), weight, fmt, None, fmt, *same)


def test_an_input_may_have_any_name(make):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 2, 1)

        def forward(self, scale):
            return self.conv(scale)

    _, network, x = make(Net, (1, 4, 4), 6, 3)
    for container in ("int8", "int16", "float64"):
        assert assert_exact(network, x, container).graph.input[0].name == "scale"


def test_every_scale_is_a_power_of_two_and_versions_are_readable(digits):
    _, network, _ = digits()
    model = exporter.to_model(network)
    assert model.ir_version == 10
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 21)]
    scales = {n.input[1] for n in model.graph.node if n.op_type.endswith("QuantizeLinear")}
    values = {c.name: onnx.numpy_helper.to_array(c) for c in model.graph.initializer}
    assert scales
    for name in scales:
        mantissa, _ = np.frexp(values[name])
        assert mantissa == 0.5


@pytest.mark.parametrize(("wl", "fl"), [(8, 4), (5, 3), (18, 10)])
def test_resnet20(wl, fl):
    torch.manual_seed(0)
    model = resnet20(10, 1, 4)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.3, 2)
    optimizer = marvin.MSGD(model.named_parameters(), init_wl=wl, init_fl=fl)
    marvin.quantize_activations(model.eval(), optimizer)
    x = torch.randn(4, 1, 8, 8)
    assert_exact(describe(model, x, optimizer.formats()), x)


@pytest.mark.parametrize("container", ["int8", "int16", "float64"])
@pytest.mark.parametrize(
    "layer",
    [
        nn.MaxPool2d(3, 2, padding=1),
        nn.AvgPool2d(2, padding=1),
        nn.AvgPool2d(3, 1, padding=1),
        nn.Conv2d(4, 4, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1), groups=2),
        nn.BatchNorm2d(4),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_each_layer_in_each_container(make, layer, container):
    build = lambda: nn.Sequential(nn.Conv2d(2, 4, 1), layer)  # noqa: E731
    _, network, x = make(build, (2, 7, 6), 8, 4)
    assert_exact(network, x, container)


def test_files_appear_whole(plain, tmp_path):
    _, network, x = plain()
    file = tmp_path / "new" / "net.onnx"
    assert exporter.save(network, file) == file.stat().st_size
    got = run(onnx.load(file), x)
    torch.testing.assert_close(got.double(), integer.run(network, x), rtol=0, atol=0)
    with pytest.raises(ExportError):
        exporter.save(plain(32, 26)[1], file)
    assert [p.name for p in file.parent.iterdir()] == ["net.onnx"]
    assert onnx.load(file).graph.input[0].name == network.input.name


@pytest.mark.parametrize(
    ("wl", "fl", "container", "message"),
    [
        (10, 6, "int8", r"0\.in: int8 holds word lengths of up to 8 bits, got <10, 6>"),
        (16, 12, "int16", r"sums take \d+ bits, int16 is exact up to 24 at most.*=\"float64\""),
        (20, 14, "int16", r"int16 holds word lengths of up to 16 bits, got <20, 14>"),
        (
            32,
            26,
            None,
            r"0: sums take \d+ bits, float64 is exact up to 53 at most.*a packed file or C",
        ),
        (8, 5, "int4", "container must be one of"),
    ],
)
def test_what_would_not_be_exact_is_refused(plain, wl, fl, container, message):
    _, network, _ = plain(wl, fl)
    with pytest.raises(ExportError, match=message):
        exporter.to_model(network, container)


def test_the_earlier_names_work_and_warn(plain, tmp_path):
    _, network, _ = plain()
    want, file = exporter.to_model(network, "int16"), tmp_path / "net.onnx"
    message = "^spelling= is now container=$"
    with pytest.warns(DeprecationWarning, match=message) as caught:
        assert exporter.to_model(network, spelling="int16") == want
    with pytest.warns(DeprecationWarning, match=message) as also:
        exporter.save(network, file, spelling="int16")
    assert onnx.load(file) == want
    assert (caught[0].filename, also[0].filename) == (__file__, __file__)
    with pytest.raises(TypeError, match="container='int8' and spelling='int16'"):
        exporter.to_model(network, "int8", spelling="int16")
    for old, new in (("Spelling", "Container"), ("spelling_of", "container_of")):
        with pytest.warns(DeprecationWarning, match=rf"\.{old} is now .*\.{new}$"):
            assert getattr(exporter, old) is getattr(exporter, new)


def test_without_the_package_one_line_says_what_to_install(plain, monkeypatch):
    _, network, _ = plain()
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(ExportError, match=r'pip install "marvin-fixedpoint\[onnx\]"') as caught:
        exporter.to_model(network)
    assert "\n" not in str(caught.value)


def pooled():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("build", [pooled, None])
def test_layers_in_floats_are_those_of_the_runtime(ranged, build, rounds, tmp_path):
    _, network, x = ranged(build, (6, 6)) if build else ranged()
    network = round_sums(network, x) if rounds else network
    layers = [op.name for op in network.operations if isinstance(op, Weighted)]
    named = exporter.in_floats(network)
    found = kernels(assert_exact(network, x), tmp_path / "optimized.onnx")
    sums = found["ConvInteger"] + found["MatMulInteger"] + found["MatMulIntegerToFloat"]
    integers = found["QLinearConv"] + found["QGemm"] + sums
    assert set(named) <= set(layers)
    assert integers == len(layers) - len(named)
    if exporter.container_of(network) == "int8":
        assert found["Conv"] + found["FusedConv"] + found["Gemm"] == len(named)
    assert named == {}
    assert exporter.container_of(network) == "int8"
    assert sums == len(exporter.unfused(network))
    if build is pooled:  # an average is rounded once, so nothing is rounded before it
        assert exporter.unfused(network) == ([] if rounds else ["2"])


def test_one_long_sum_is_written_alone(tmp_path):
    model = nn.Sequential(nn.Linear(4, 2100), nn.ReLU(), nn.Linear(2100, 3))
    formats = {name: FixedPoint(8, 7) for name in ("0.weight", "2.weight")}
    model[0].weight.data.fill_(1)
    model[2].weight.data.fill_(1)
    model = nearest_weights(model, formats)
    rounds = {name: Formats(FixedPoint(8, 4, signed=False), None) for name in ("0", "2")}
    x = torch.rand(8, 4)
    network = describe(model, x, formats, rounds)
    assert exporter.in_floats(network) == {}
    assert exporter.unfused(network) == ["2"]
    found = kernels(assert_exact(network, x), tmp_path / "optimized.onnx")
    assert (found["QGemm"], found["MatMulInteger"]) == (1, 1)


class Padded(nn.Module):
    """Pads values in front of max pooling, with its sides in another order meanwhile."""

    def __init__(self, order):
        super().__init__()
        self.a, self.b, self.order = nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3), order

    def forward(self, x):
        turned = self.a(x).permute(0, *self.order)
        return self.b(F.max_pool2d(F.pad(turned, (1, 1, 0, 1)).permute(0, *self.order), 2))


@pytest.mark.parametrize("order", [(1, 2, 3), (1, 3, 2)])
@pytest.mark.parametrize("container", ["int8", "int16", "float64", "qdq"])
def test_zeros_in_front_of_max_pooling_may_be_the_maximum(container, order):
    """At every level of ONNX Runtime's optimisations, which make these zeros padding."""
    torch.manual_seed(0)
    x = torch.randn(8, 1, 8, 9)
    model = marvin.calibrate(Padded(order), [x], bits=6, weight_bits=4)
    network = describe(model, x)
    want, written = integer.run(network, x), exporter.to_model(network, container)
    for level in LEVELS:
        torch.testing.assert_close(run(written, x, level).double(), want, rtol=0, atol=0)


@pytest.mark.parametrize("container", ["int8", "int16", "float64", "qdq"])
def test_more_zeros_in_front_of_average_pooling_than_its_window_has(container):
    torch.manual_seed(0)
    x = torch.randn(8, 1, 6, 6)
    layers = [nn.Conv2d(1, 2, 1), nn.ZeroPad2d(2), nn.AvgPool2d(2), nn.Conv2d(2, 2, 1)]
    network = describe(marvin.calibrate(nn.Sequential(*layers), [x], bits=6, weight_bits=4), x)
    want, written = integer.run(network, x), exporter.to_model(network, container)
    for level in LEVELS:
        torch.testing.assert_close(run(written, x, level).double(), want, rtol=0, atol=0)
