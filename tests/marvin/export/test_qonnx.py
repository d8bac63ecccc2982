import os
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import marvin
from marvin.export import ExportError, describe, integer, qonnx, round_sums
from marvin.export.graph.nodes import MaxPool, Round
from marvin.export.passes.round_early import round_early
from train.resnet20 import resnet20

onnx = pytest.importorskip("onnx")

ROOT = Path(__file__).parents[3]
# qonnx needs onnx below 1.23, so it has an environment of its own; `make test` creates it
PYTHON = Path(os.environ.get("QONNX_PYTHON", ROOT / ".venv-qonnx/bin/python"))
needs_qonnx = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"needs qonnx in an environment of its own, {PYTHON}: make test"
)


@needs_qonnx
@pytest.mark.parametrize(("wl", "fl"), [(8, 5), (5, 3)])
def test_the_executor_gives_the_integers(digits, plain, wl, fl, tmp_path):
    for make in (digits, plain):
        _, network, x = make(wl, fl)
        assert qonnx.is_exact(network)
        file = tmp_path / "net.onnx"
        assert qonnx.save(network, file) == file.stat().st_size
        got = qonnx.execute(file, 3 * x[:2], str(PYTHON))
        torch.testing.assert_close(got.double(), integer.run(network, 3 * x[:2]), rtol=0, atol=0)


@needs_qonnx
@pytest.mark.parametrize("bits", [(6, 6), (8, 8)])
def test_unsigned_words_and_rounded_sums(ranged, bits, tmp_path):
    _, network, x = ranged(bits=bits)
    assert not qonnx.is_exact(network)  # sums of batch normalisations are long
    network = round_sums(network, x)
    assert qonnx.is_exact(network)
    qonnx.save(network, tmp_path / "net.onnx")
    got = qonnx.execute(tmp_path / "net.onnx", 2 * x[:2], str(PYTHON))
    torch.testing.assert_close(got.double(), integer.run(network, 2 * x[:2]), rtol=0, atol=0)


@needs_qonnx
def test_formats_by_channel(channelled, tmp_path):
    model, formats, x = channelled(bits=(5, 6), spread=9)
    network = round_sums(describe(model, x, formats), x)
    assert qonnx.is_exact(network)
    qonnx.save(network, tmp_path / "net.onnx")
    got = qonnx.execute(tmp_path / "net.onnx", 2 * x[:2], str(PYTHON))
    torch.testing.assert_close(got.double(), integer.run(network, 2 * x[:2]), rtol=0, atol=0)


@needs_qonnx
def test_a_failure_of_the_executor_is_told(tmp_path):
    (tmp_path / "net.onnx").write_bytes(b"no model")
    with pytest.raises(ExportError, match="qonnx could not execute"):
        qonnx.execute(tmp_path / "net.onnx", torch.zeros(1, 1), str(PYTHON))


def test_nodes_have_the_true_word_lengths(digits):
    _, network, _ = digits(6, 4)
    model = qonnx.to_model(network)
    values = {c.name: onnx.numpy_helper.to_array(c) for c in model.graph.initializer}
    quants = [node for node in model.graph.node if node.op_type == "Quant"]
    assert len(quants) == len(network.formats()) + 5  # three weights, two biases
    for node in quants:
        assert node.domain == "qonnx.custom_op.general"
        scale, zero, bits = (values[name].item() for name in node.input[1:])
        signed = {a.name: a.i for a in node.attribute}["signed"]
        assert [scale, zero, bits + (not signed)] == [2**-4, 0, 6]  # 5 where nothing is below 0
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1
    assert model.ir_version == 10


def test_formats_by_channel_are_scales(channelled):
    model, formats, x = channelled(bits=(5, 6), spread=9)
    written = qonnx.to_model(describe(model, x, formats))
    values = {c.name: onnx.numpy_helper.to_array(c) for c in written.graph.initializer}
    quants = {node.output[0]: node for node in written.graph.node}
    for name, fmt in formats.items():
        weight, scale, _, bits = (values[n] for n in quants[f"{name}.quant.value"].input)
        assert bits == 5
        assert scale.shape == (len(weight), *[1] * (weight.ndim - 1))
        assert scale.reshape(-1).tolist() == [fmt.channel(i).lsb for i in range(len(weight))]
        codes = weight / scale
        assert (codes == codes.round()).all()
        assert -16 <= codes.min() < codes.max() <= 15


def test_unsigned_words_have_no_sign(ranged):
    _, network, _ = ranged()
    quants = {n.output[0]: n for n in qonnx.to_model(network).graph.node if n.op_type == "Quant"}
    for name, fmt in network.formats().items():
        if f"{name}.value" in quants:
            signed = {a.name: a.i for a in quants[f"{name}.value"].attribute}["signed"]
            assert signed == fmt.signed
    assert not network.formats()["pointwise.in"].signed
    assert "pointwise.in.value" in quants


def test_what_float32_does_not_hold(plain):
    assert not qonnx.is_exact(plain(16, 12)[1])
    with pytest.raises(
        ExportError, match=r"0\.in: QONNX is float32 and holds 24 bits, got <32, 26"
    ):
        qonnx.to_model(plain(32, 26)[1])


def test_without_qonnx_one_line_says_what_to_install(plain, tmp_path):
    _, network, x = plain()
    qonnx.save(network, tmp_path / "net.onnx")
    with pytest.raises(ExportError, match=r'pip install "marvin-fixedpoint\[qonnx\]"'):
        qonnx.execute(tmp_path / "net.onnx", x)


def activations(model):
    """Yield each rounding of activations, with the node before it."""
    constants = {c.name for c in model.graph.initializer}
    makers = {output: node for node in model.graph.node for output in node.output}
    for node in model.graph.node:
        if node.op_type == "Quant" and node.input[0] not in constants:
            yield node, makers.get(node.input[0])


def pooled():
    """Rounds behind pools and shapes, behind two users of a ReLU, and before one."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1), nn.ReLU(),
        nn.AvgPool2d(2), nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["digits", "plain", "branches", "pooled", "resnet20"])
def test_nodes_are_what_finn_takes(kind, digits, plain, ranged):
    """Its ``ConvertQONNXtoFINN`` refuses others: a sign behind ReLU, none elsewhere, zero points, two users."""
    found = {
        "digits": lambda: digits(6, 4),
        "plain": lambda: plain(6, 4),
        "branches": lambda: ranged(bits=(4, 5)),
        "pooled": lambda: ranged(pooled, (4, 5)),
        "resnet20": lambda: ranged(lambda: resnet20(10, 2, 2), (4, 5)),
    }
    _, network, x = found[kind]()
    for one in (network, round_sums(network, x)):
        model = qonnx.to_model(one)
        users = Counter(name for node in model.graph.node for name in node.input)
        values = {c.name: onnx.numpy_helper.to_array(c) for c in model.graph.initializer}
        seen = set()
        for node, before in activations(model):
            signed, narrow = (
                {a.name: a.i for a in node.attribute}[n] for n in ("signed", "narrow")
            )
            is_behind_relu = before is not None and before.op_type == "Relu"
            assert signed == (not is_behind_relu), node.name
            assert not (is_behind_relu and narrow)
            assert not is_behind_relu or users[before.output[0]] == 1  # FINN takes the ReLU away
            seen.add(signed)
        assert 0 in seen
        for node in model.graph.node:
            if node.op_type == "Quant":
                assert values[node.input[2]].item() == 0
                assert values[node.input[3]].item() in range(2, 25)
                if node.input[0] in values:
                    assert users[node.output[0]] == 1


@pytest.mark.parametrize("kind", ["digits", "plain", "branches", "pooled"])
@pytest.mark.parametrize("bits", [3, 6])
def test_values_stay_where_roundings_move(kind, bits, digits, plain, ranged):
    found = {
        "digits": lambda: digits(bits, bits - 2),
        "plain": lambda: plain(bits, bits - 2),
        "branches": lambda: ranged(bits=(bits, bits)),
        "pooled": lambda: ranged(pooled, (bits, bits)),
    }
    _, network, x = found[kind]()
    early = round_early(network)
    want, got = integer.run_all(network, 3 * x), integer.run_all(early, 3 * x)
    for name in early.values.keys() & network.values.keys():
        shift = early.values[name].fl - network.values[name].fl
        assert (got[name] * 2.0**-shift == want[name]).all(), name
        value = early.values[name]
        assert value.low <= got[name].min() <= got[name].max() <= value.high
    assert next(iter(early.outputs.values())) in network.values
    if kind == "pooled":
        pool = next(op for op in early.operations if isinstance(op, MaxPool))
        assert isinstance(early.operation(pool.inputs[0]), Round)


_PASSES = """
import sys
import numpy as np
from qonnx.core.modelwrapper import ModelWrapper
from qonnx.core.onnx_exec import execute_onnx
from qonnx.transformation.channels_last import (
    ConvertToChannelsLastAndClean, InsertChannelsLastDomainsAndTrafos, MoveTransposePastFork
)
from qonnx.transformation.extract_conv_bias import ExtractBiasFromConv
from qonnx.transformation.gemm_to_matmul import GemmToMatMul
from qonnx.transformation.infer_datatypes import InferDataTypes
from qonnx.util.cleanup import cleanup_model
model = cleanup_model(ModelWrapper(sys.argv[1]))
last = model.transform(InsertChannelsLastDomainsAndTrafos()).transform(MoveTransposePastFork())
last = last.transform(ConvertToChannelsLastAndClean())
assert "channels_last" in " ".join(node.domain for node in last.graph.node)
apart = model.transform(ExtractBiasFromConv()).transform(GemmToMatMul()).transform(InferDataTypes())
kinds = [node.op_type for node in apart.graph.node]
assert all(len(node.input) == 2 for node in apart.graph.node if node.op_type == "Conv")
assert "Gemm" not in kinds and "MatMul" in kinds
def run(model, x):
    name, = (value.name for value in model.graph.input)
    result, = execute_onnx(model, {name: x}).values()
    return result
samples = np.load(sys.argv[2])
found = [np.concatenate([run(m, x[None]) for x in samples]) for m in (model, last, apart)]
np.savez(sys.argv[3], *found)
"""


class Forked(nn.Module):
    """A sum of two branches, one of them without a layer; as many channels as rows and columns."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Linear(216, 10)

    def forward(self, x):
        x = self.first(x).relu()
        return self.head((x + self.second(x).relu()).flatten(1))


@needs_qonnx
@pytest.mark.parametrize("kind", ["digits", "mean of 36", "branches"])
def test_cleanup_and_channels_last_leave_the_integers(digits, make, kind, tmp_path):
    """The passes that FINN begins with, forks first; biases with formats of their own leave their layers."""

    def averaged():
        conv, head = nn.Conv2d(1, 6, 3, padding=1), nn.Linear(6, 10)
        return nn.Sequential(conv, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)

    if kind == "digits":
        _, network, x = digits(8, 5)
    elif kind == "branches":
        torch.manual_seed(0)
        x = torch.randn(5, 1, 6, 6)
        network = describe(marvin.freeze(marvin.calibrate(Forked().eval(), [x], bits=8)), x)
    else:
        _, network, x = make(averaged, (1, 6, 6))
    qonnx.save(network, tmp_path / "net.onnx")
    np.save(tmp_path / "x.npy", (2 * x[:2]).numpy())
    words = [tmp_path / name for name in ("net.onnx", "x.npy", "y.npz")]
    subprocess.run([str(PYTHON), "-c", _PASSES, *map(str, words)], check=True, capture_output=True)
    with np.load(tmp_path / "y.npz") as found:
        assert len(found.files) == 3
        for name in found.files:
            got = torch.from_numpy(found[name]).double()
            torch.testing.assert_close(got, integer.run(network, 2 * x[:2]), rtol=0, atol=0)
