import numpy as np
import pytest
import torch
from torch import nn

import marvin
from marvin.export import ExportError, describe, integer
from marvin.export import onnx as exporter
from train.resnet20 import resnet20

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")


def run(model, x, name=None):
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return torch.from_numpy(got)


def assert_exact(network, x, spelling=None):
    model = exporter.to_model(network, spelling)
    want = integer.run(network, x)
    torch.testing.assert_close(run(model, x).double(), want, rtol=0, atol=0)
    return model


@pytest.mark.parametrize(
    ("wl", "fl", "spelling"),
    [(4, 2, "int8"), (7, 5, "int8"), (8, 5, "int8"), (8, 3, "int8"), (20, 14, "float64")],
)
def test_outputs_equal_the_integer_reference(digits, plain, wl, fl, spelling):
    for make in (digits, plain):
        _, network, x = make(wl, fl)
        assert exporter.spelling_of(network) == spelling
        for scale in (0.1, 1, 30):  # the last saturates
            assert_exact(network, x * scale)


@pytest.mark.parametrize("spelling", ["int16", "float64"])
@pytest.mark.parametrize(("wl", "fl"), [(8, 5), (9, 6), (10, 7)])
def test_the_longer_spellings_are_exact_too(plain, wl, fl, spelling):
    _, network, x = plain(wl, fl)
    assert_exact(network, x, spelling)


def test_integer_containers_of_short_words(plain):
    _, network, x = plain(6, 4)
    model = assert_exact(network, x)
    kinds = {onnx.TensorProto.DataType.Name(c.data_type) for c in model.graph.initializer}
    assert {"INT8", "UINT8", "INT32", "FLOAT"} == kinds  # weights, activations, biases, scales
    clips = [node for node in model.graph.node if node.op_type == "Clip"]
    assert all(node.input[0].endswith(".codes") for node in clips)  # on integers
    assert "Relu" not in {node.op_type for node in model.graph.node}
    _, network, x = plain(8, 5)
    weights = {c.name: c.data_type for c in exporter.to_model(network).graph.initializer}
    assert weights["0.weight"] == onnx.TensorProto.UINT8  # portable, see the module


def test_short_scales_of_batch_norm_make_integer_convolutions(digits):
    _, network, x = digits(8, 5, scale_wl=8)
    model = assert_exact(network, 2 * x)
    kinds = [node.op_type for node in model.graph.node]
    assert "Mul" not in kinds
    assert kinds.count("Conv") == 4


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


@pytest.mark.parametrize("spelling", ["int8", "int16", "float64"])
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
def test_each_layer_in_each_spelling(make, layer, spelling):
    build = lambda: nn.Sequential(nn.Conv2d(2, 4, 1), layer)  # noqa: E731
    _, network, x = make(build, (2, 7, 6), 8, 4)
    assert_exact(network, x, spelling)


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
    ("wl", "fl", "spelling", "message"),
    [
        (10, 6, "int8", r"0\.in: int8 holds words of 8 bits, got <10, 6>"),
        (16, 12, "int16", r"sums take \d+ bits, int16 is exact up to 24 at most"),
        (20, 14, "int16", r"int16 holds words of 16 bits, got <20, 14>"),
        (32, 26, None, r"0: sums take \d+ bits, float64 is exact up to 53 at most"),
        (8, 5, "int4", "spelling must be one of"),
    ],
)
def test_what_would_not_be_exact_is_refused(plain, wl, fl, spelling, message):
    _, network, _ = plain(wl, fl)
    with pytest.raises(ExportError, match=message):
        exporter.to_model(network, spelling)


def test_without_the_package_one_line_says_what_to_install(plain, monkeypatch):
    _, network, _ = plain()
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(ExportError, match=r'pip install "marvin-fixedpoint\[onnx\]"') as caught:
        exporter.to_model(network)
    assert "\n" not in str(caught.value)
