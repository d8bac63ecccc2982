"""QDQ files: float operators between nodes that quantise."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import marvin
from benchmarks.ops.targets import MODELS
from benchmarks.qdq import network_of
from fixedpoint_kernels.products import paths
from marvin.export import ExportError, describe, integer, round_sums
from marvin.export import onnx as exporter
from marvin.export.__main__ import main
from marvin.export.graph.nodes import Weighted

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")

ROOT = Path(__file__).parents[3]
# a large package that nothing else needs, so it has an environment of its own: make .venv-openvino/installed
PYTHON = Path(os.environ.get("OPENVINO_PYTHON", ROOT / ".venv-openvino/bin/python"))
needs_openvino = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"needs OpenVINO in an environment of its own, {PYTHON}"
)
# elsewhere ONNX Runtime's integer kernels, of all levels but these, add products of 8 bits in int16
AS_WRITTEN = "ORT_DISABLE_ALL", "ORT_ENABLE_BASIC"
LEVELS = runtime.GraphOptimizationLevel.__members__


def outputs(network, x, level="ORT_ENABLE_ALL"):
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = LEVELS[level]
    content = exporter.to_model(network, "qdq").SerializeToString()
    session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return [
        torch.from_numpy(y).double() for y in session.run(None, {network.input.name: x.numpy()})
    ]


def weight_bits(network):
    return max(op.weight_fmt.wl for op in network.operations if isinstance(op, Weighted))


def assert_equal(network, x):
    assert exporter.qdq_is_exact(network)
    for level in LEVELS if paths.has_vnni() or weight_bits(network) < 8 else AS_WRITTEN:
        got = outputs(network, x, level)
        for found, want in zip(got, integer.run_heads(network, x).values(), strict=True):
            torch.testing.assert_close(found, want, rtol=0, atol=0)


@pytest.mark.parametrize("bits", [(3, 4), (6, 6), (8, 8)])
def test_onnx_runtime_computes_the_integers(ranged, bits):
    """At every level of its optimisations, which move and remove these nodes."""
    _, network, x = ranged(bits=bits)
    assert_equal(round_sums(network, x), 2 * x)


@pytest.mark.parametrize(("wl", "fl"), [(5, 3), (8, 5)])
def test_signed_words(digits, plain, wl, fl):
    for make in (digits, plain):
        _, network, x = make(wl, fl)
        assert_equal(network, 3 * x)


def test_formats_by_channel(channelled):
    model, formats, x = channelled(bits=(5, 6), spread=9)
    assert_equal(round_sums(describe(model, x, formats), x), 2 * x)


class Parts(nn.Module):
    """What ONNX Runtime moves nodes across: a mean, shapes, parts, zeros around, two outputs."""

    def __init__(self):
        super().__init__()
        self.conv, self.gate, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Linear(8, 4)
        self.again = nn.Conv2d(9, 2, 2)

    def forward(self, x):
        x = torch.relu(self.conv(x))
        x = torch.cat([x[:, ::2], x[:, 1::2]], 1) * torch.sigmoid(self.gate(x))
        around = self.again(F.pad(x, (1, 0, 0, 2, 0, 1)))
        return self.last(x.mean((2, 3))), x.flatten(2).transpose(1, 2), around


@pytest.mark.parametrize("name", ["VGG", "DenseNet"])
def test_networks_that_onnx_runtime_rewrites(name):
    """It rounds biases between codes of 6 bits, and puts nodes behind means of 8 bits."""
    x = torch.randn(32, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for bits in (6, 8):
        assert_equal(network_of(MODELS[name], x, bits), x)


@pytest.mark.parametrize("bits", [6, 8])
def test_means_shapes_and_parts(bits):
    torch.manual_seed(0)
    x = torch.randn(16, 3, 6, 6)
    network = describe(marvin.calibrate(Parts().eval(), [x], bits=bits), x)
    assert_equal(round_sums(network, x), 2 * x)


def test_nodes_are_those_that_runtimes_know(ranged):
    _, network, x = ranged(bits=(7, 8))
    model = exporter.to_model(round_sums(network, x), "qdq")
    made = {output: node for node in model.graph.node for output in node.output}
    layers = [node for node in model.graph.node if node.op_type in ("Conv", "Gemm")]
    assert len(layers) == 6
    constants = {
        tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer
    }
    for layer in layers:
        taken, *numbers = (made[name] for name in layer.input)
        while taken.op_type in ("MaxPool", "Flatten"):  # which change no code
            taken = made[taken.input[0]]
        assert taken.op_type == "DequantizeLinear"
        assert made[taken.input[0]].op_type == "QuantizeLinear"
        assert all(node.op_type == "DequantizeLinear" for node in numbers)
        weights, *bias = (constants[node.input[0]] for node in numbers)
        assert weights.dtype == np.int8
        assert all(codes.dtype == np.int32 for codes in bias)
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            assert np.frexp(constants[node.input[1]])[0] == 0.5  # a power of two
            assert constants[node.input[2]] == 0


@pytest.mark.parametrize(("bits", "kinds"), [(7, {"int8"}), (8, {"int8", "uint8"})])
def test_short_unsigned_words_are_int8(bits, kinds, ranged):
    """TensorRT has no uint8."""
    _, network, x = ranged(bits=(bits, bits))
    model = exporter.to_model(round_sums(network, x, bits), "qdq")
    found = {c.name: onnx.numpy_helper.to_array(c).dtype.name for c in model.graph.initializer}
    zeros = [node.input[2] for node in model.graph.node if node.op_type == "QuantizeLinear"]
    assert {found[name] for name in zeros} == kinds
    assert any(not fmt.signed for fmt in network.formats().values())


class Padded(nn.Module):
    """Puts zeros around what lies between two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3)

    def forward(self, x):
        return self.second(F.pad(self.first(x), (0, 1, 0, 1)))


@pytest.mark.parametrize("bits", [6, 8, 9, 12, 16])
def test_zeros_are_put_around_codes_of_any_length(bits):
    torch.manual_seed(0)
    model, x = Padded(), torch.randn(8, 1, 8, 9)
    fixed = marvin.calibrate(model, [x], bits=bits, weight_bits=4)
    assert_equal(describe(fixed, x), 2 * x)


@pytest.mark.parametrize("bits", [3, 6, 7, 12])
def test_words_of_small_numbers_are_bounded(bits):
    """ONNX Runtime takes bounds that differ by less than 2^-23 for the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    for layer in model[0], model[2]:
        layer.bias.data.mul_(1e-7)
    x = torch.randn(16, 6) * 1e-7
    network = describe(marvin.calibrate(model, [x], bits=bits, weight_bits=6), x)
    assert max(fmt.fl for fmt in network.formats().values()) > 23
    assert_equal(network, 4 * x)


def large():
    """Return a layer whose sums are longer than float32."""
    layer = nn.Linear(64, 50)
    nn.init.uniform_(layer.weight, -4, 4)
    return nn.Sequential(layer)


def test_what_it_cannot_hold_is_named(make, plain, tmp_path):
    _, network, x = plain(17, 9)
    with pytest.raises(ExportError, match="qdq holds word lengths of up to 16 bits, got <17, 9>"):
        exporter.save(network, tmp_path / "net.onnx", "qdq")
    _, network, x = make(large, (64,), 16, 13)
    assert not exporter.qdq_is_exact(network)
    (got,) = outputs(network, x)
    want = integer.run(network, x)
    assert 0 < (got - want).abs().max() < 2.0**-10 * want.abs().max()
    for other in ("vnni", "int4"):
        with pytest.raises(ExportError, match="qdq has none"):
            exporter.to_model(network, "qdq", **{other: True})
        with pytest.raises(ExportError, match="float64 has none"):
            exporter.to_model(network, **{other: True})
    assert exporter.container_of(network) != "qdq"


@pytest.mark.parametrize("wl", [8, 16])
def test_the_command_runs_it(wl, tmp_path, capsys):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = marvin.MSGD(model.named_parameters(), lr=0.0, init_wl=wl, init_fl=wl - 4)
    marvin.quantize_activations(model, optimizer)
    torch.save(marvin.freeze(model), tmp_path / "net.pt")
    main([str(tmp_path / "net.pt"), "--to", "onnx", "--qdq", "--shape", "12", "--verify"])
    text = capsys.readouterr().out
    if wl == 8:
        assert "network.onnx (QDQ): exact where a runtime computes in float32" in text
        assert "all 192 outputs of 64 samples equal the integers" in text
    else:
        assert "sums are longer than the 24 bits of float32, so it is not exact" in text
        assert "of 192 outputs differ from the integers, by " in text
        assert "\nnot exact: ONNX Runtime " in text


@needs_openvino
@pytest.mark.parametrize("wl", [6, 8])
def test_openvino_computes_the_integers_without_batch_normalisation(plain, wl, tmp_path):
    """Told to compute in float32; by default it takes bfloat16 where the processor has it."""
    _, network, x = plain(wl, wl - 3)
    exporter.save(network, tmp_path / "net.onnx", "qdq")
    np.save(tmp_path / "x.npy", (2 * x).numpy())
    script = ROOT / "benchmarks/openvino_runner.py"
    words = [
        str(PYTHON),
        str(script),
        *(str(tmp_path / name) for name in ("net.onnx", "x.npy", "y.npz")),
    ]
    subprocess.run(words, check=True, capture_output=True)
    with np.load(tmp_path / "y.npz") as found:
        got = torch.from_numpy(found["float32"]).double()
    torch.testing.assert_close(got, integer.run(network, 2 * x), rtol=0, atol=0)
