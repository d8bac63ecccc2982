"""Weights whose channels have fractional lengths of their own, on integer kernels."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from fixedpoint_kernels import FixedPoint
from marvin.channels import ChannelFormat
from marvin.export import (
    ExportError,
    Formats,
    describe,
    integer,
    nearest_weights,
    round_sums,
    verify,
)
from marvin.export import onnx as exporter
from marvin.export.graph.nodes import Affine, Weighted
from marvin.export.passes.fold import fold
from train.resnet20 import resnet20

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")


def run(model, x, file=None):
    """Return what ONNX Runtime computes; write what it makes of the model to a file."""
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3  # that the file is for this processor
    if file:
        options.optimized_model_filepath = str(file)
    session = runtime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return torch.from_numpy(got).double()


def assert_exact(network, x, container=None, file=None):
    model = exporter.to_model(network, container)
    torch.testing.assert_close(run(model, x, file), integer.run(network, x), rtol=0, atol=0)
    return model


def layers(network):
    return [op for op in network.operations if isinstance(op, Weighted)]


def small():
    """Convolution, batch normalisation, linear."""
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
        nn.Linear(8 * 36, 5),
    )  # fmt: skip


@pytest.mark.parametrize("spread", [0, 3, 8, 12])
@pytest.mark.parametrize("bits", [(4, 4), (5, 7), (6, 6), (8, 8)])
def test_they_run_on_integer_kernels(channelled, bits, spread, tmp_path):
    """Strides, short-cuts, depthwise, pooling; scales of all signs; a channel of zeros."""
    model, formats, x = channelled(bits=bits, spread=spread)
    assert max(max(fmt.shifts) for fmt in formats.values()) >= spread
    network = round_sums(describe(model, x, formats), x)
    assert exporter.container_of(network) == "int8"
    for scale in (0.3, 1, 20):
        onnx_model = assert_exact(network, scale * x, "int8", tmp_path / "optimized.onnx")
    found = Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert found["QLinearConv"] == 5
    assert found["QGemm"] == 1
    assert not {"Conv", "FusedConv", "Mul", "Gemm", "MatMul"} & set(found)
    kinds = {onnx.TensorProto.DataType.Name(c.data_type) for c in onnx_model.graph.initializer}
    assert kinds <= {"INT8", "UINT8", "INT32", "FLOAT", "INT64"}


@pytest.mark.parametrize("spread", [0, 6])
def test_a_small_network_takes_bytes_alone(channelled, spread, tmp_path):
    model, formats, x = channelled(small, spread=spread)
    network = describe(model, x, formats)  # nothing is added
    assert exporter.container_of(network) == "int8"
    assert_exact(network, x, "int8", tmp_path / "optimized.onnx")
    found = {node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node}
    assert {"QLinearConv", "QGemm"} <= found <= {
        "QLinearConv", "QGemm", "QuantizeLinear", "Clip", "Gather", "Transpose", "Flatten"
    }  # fmt: skip


def test_resnet20(channelled):
    model, formats, x = channelled(lambda: resnet20(10, 1, 4), (7, 6), (1, 8, 8), spread=5)
    network = round_sums(describe(model, x, formats), x)
    assert_exact(network, 2 * x, "int8")
    assert {row.verdict for row in verify(network, x)} == {"exact"}


def test_words_are_stored_without_what_other_channels_need(channelled):
    """Of 5 bits, and two for offset or bias: as with one fractional length for all channels."""
    model, formats, x = channelled(bits=(5, 6), spread=9)
    network = round_sums(describe(model, x, formats), x)
    stored = {c.name: c for c in exporter.to_model(network, "int8").graph.initializer}
    for op in layers(network):
        assert op.weight_fmt.wl >= 5 + 9
        norm = {"conv": "bn", "depthwise": "bn1", "pointwise": "bn2", "down": "bn3",
                "shortcut": "bn4"}.get(op.name, op.name)  # fmt: skip
        codes = onnx.numpy_helper.to_array(stored[f"{norm}.weight"])
        assert codes.dtype == np.int8
        rows = np.abs(codes.astype(int)).reshape(len(codes), -1).max(1)
        assert 32 <= rows.max() <= 64
        assert rows.min() == 0  # the channel of zeros


POINTS = st.lists(st.integers(0, 20), min_size=4, max_size=4)


@settings(max_examples=60, deadline=None)
@given(shifts=POINTS, wl=st.integers(3, 8), fl=st.integers(-2, 11), seed=st.integers(0, 2**20))
@example(shifts=[0, 0, 0, 0], wl=8, fl=7, seed=0)
@example(shifts=[20, 0, 0, 0], wl=8, fl=7, seed=1)  # one much finer
@example(shifts=[20, 20, 20, 0], wl=8, fl=11, seed=2)  # one much coarser
@example(shifts=[24, 0, 1, 7], wl=8, fl=7, seed=3)  # the longest: 32 bits
def test_any_shifts(shifts, wl, fl, seed):
    """Random codes, one channel of zeros, statistics as such codes give them."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4)
    )
    x = 4 * torch.randn(32, 2, 3, 3)
    formats: dict[str, Any] = {}
    for name in ("0", "4"):
        module: Any = model[int(name)]
        fmt = formats[f"{name}.weight"] = ChannelFormat(FixedPoint(wl, fl), tuple(shifts))
        lsb = torch.tensor([fmt.channel(i).lsb for i in range(4)])
        codes = torch.randint(fmt.fmt.min_code, fmt.fmt.max_code + 1, module.weight.shape).float()
        codes[torch.randint(0, 4, ())] = 0
        module.weight.data = codes * lsb.reshape(-1, *[1] * (codes.ndim - 1))
        module.bias.data = torch.randn(4) * lsb * 2 ** (wl - 1)
    norm: Any = model[1]
    norm.momentum = None
    norm.weight.data = torch.tensor([1, -0.3, 0.7, 0.9])
    norm.bias.data = torch.randn(4) / 2
    model(x)
    rounds = {
        "0": Formats(FixedPoint(8, 4), None),
        "4": Formats(FixedPoint(6, 4, signed=False), None),
    }
    network = describe(model.eval(), x, formats, rounds)
    assert fold(network, network.operation("1"), rounds["4"].input) is not None
    assert fold(network, network.operation("4"), None) is not None
    assert_exact(network, 2 * x, "int8")
    assert_exact(network, x, "float64")
    codes = integer.run_all(network, x)
    for op in network.operations[1:]:  # no code is where none can be
        value = network.values[op.name]
        for i in range(value.channel_count if value.channels else 0):
            channel, found = value.channel(i), codes[op.name][:, i]
            assert channel.low <= found.min() <= found.max() <= channel.high
            assert not (found % 2**channel.trailing_zeros).any()
    # float32 computes what is said to be exact, whichever order it sums in
    assert not [row for row in verify(network, x) if row.is_exact and row.different]
    assert {row.verdict for row in verify(network, x) if row.kind != "affine"} == {"exact"}


@pytest.mark.parametrize("spread", [2, 10])
@pytest.mark.parametrize(("wl", "bits_more"), [(8, 0), (5, 2)])
def test_offsets_are_as_fine_as_the_words_of_their_channel(channelled, wl, bits_more, spread):
    model, formats, x = channelled(bits=(wl, 8), spread=spread)
    network = describe(model, x, formats)
    for op in (op for op in network.operations if isinstance(op, Affine)):
        norm: Any = model.get_submodule(op.name)
        rate = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
        want = norm.bias.double() - norm.running_mean.double() * rate
        found = op.offset.double() * op.offset_fmt.lsb
        layer: Any = network.operation(op.inputs[0])
        products = network.values[layer.inputs[0]].fl + layer.weight_fmt.fl
        # half a step of b, finer than the products, or of the 32 bits of an offset; and what the
        # scale has lost
        trailing_zeros = torch.tensor(layer.trailing_zeros)
        step = rate.abs() * 2.0 ** (trailing_zeros - bits_more - products) / 2
        scale = op.scale.double() * op.scale_fmt.lsb
        lost = ((scale - rate) / rate.abs().clamp(min=1e-9)).abs() * want.abs()
        coarsest = op.scale.abs().double() * op.offset_fmt.lsb / 2
        gap = (found - want).abs()
        assert (gap <= 1.01 * torch.maximum(step, coarsest) + lost + op.offset_fmt.lsb).all()
        shift = op.shift(network.values[layer.name].fl)
        assert shift is not None
        more = shift[1] - products
        assert not (shift[0] % 2 ** (trailing_zeros - bits_more + more).clamp(min=0)).any()


@pytest.mark.parametrize("spread", [0, 7, 20])
def test_biases_are_rounded_to_the_point_of_their_channel(channelled, spread):
    model, formats, x = channelled(
        lambda: nn.Sequential(nn.Conv2d(2, 6, 3), nn.Flatten(), nn.Linear(216, 5)),
        (8, 8),
        spread=spread,
    )
    network = describe(model, x, formats)
    for op in layers(network):
        assert op.bias is not None
        fl = network.values[op.inputs[0]].fl
        own = 2.0 ** -(fl + formats[f"{op.name}.weight"].fl + np.array(op.per_channel.shifts))
        found = op.bias.numpy() * op.bias_fmt.lsb
        assert not (found % own).any()
        want = model.get_submodule(op.name).bias.detach().double().numpy()
        assert (abs(found - want) <= np.maximum(own, op.bias_fmt.lsb) / 2).all()
        assert op.bias_fmt.fl == 31 or spread < 20


@pytest.mark.parametrize("container", ["int8", "int16", "float64"])
def test_every_container_is_exact(channelled, container):
    model, formats, x = channelled(bits=(5, 6), spread=4)
    network = round_sums(describe(model, x, formats), x)
    assert_exact(network, 2 * x, container)


def test_the_common_format_alone_is_exported_as_it_was(channelled):
    """Without a format by channel, nothing says that codes end with zeros."""
    model, formats, x = channelled()
    common = {name: fmt.whole() for name, fmt in formats.items()}
    network = round_sums(describe(model, x, common), x)
    assert exporter.container_of(network) != "int8"
    assert_exact(network, x)


def test_longer_words_are_no_bytes(channelled):
    model, formats, x = channelled(bits=(9, 8), spread=3)
    network = round_sums(describe(model, x, formats), x)
    with pytest.raises(
        ExportError, match=r"conv: int8 holds word lengths of up to 8 bits, got <9, \d+>"
    ):
        exporter.to_model(network, "int8")
    assert_exact(network, x, "int16")


def test_sums_that_float32_does_not_hold_are_in_the_way_of_nothing(channelled):
    model, formats, x = channelled(spread=6)
    network = describe(model, x, formats)
    assert_exact(network, x, "int8")


def test_a_bias_far_larger_than_the_weights_of_its_channel():
    """Its sums need more bits than a float32 has; those of the other channels do not."""
    torch.manual_seed(0)
    formats: dict[str, Any] = {"0.weight": ChannelFormat(FixedPoint(8, 5), (0, 20))}
    model = nn.Sequential(nn.Linear(6, 2))
    model[0].weight.data[1] *= 2.0**-18
    model[0].bias.data = torch.tensor([0.5, 1e-3])
    model, x = nearest_weights(model, formats), torch.randn(9, 6)
    rounds = {"0": Formats(FixedPoint(8, 5), None)}
    assert_exact(describe(model, x, formats, rounds), x, "int8")
    model[0].bias.data[1] = 0.7
    assert_exact(describe(model, x, formats, rounds), x, "int8")


def test_biases_finer_than_their_channel():
    """Where bytes hold the weights at the longer fl they are shifted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 2, bias=False))
    rounds = {"0": Formats(FixedPoint(6, 3), None), "1": Formats(FixedPoint(8, 3), None)}
    for fl, is_folded in ((3 + 2 + 4, True), (3 + 2 + 5, False)):
        formats: dict[str, Any] = {
            "0.weight": ChannelFormat(FixedPoint(4, 2), (0, 3)),
            "1.weight": ChannelFormat(FixedPoint(4, 2), (1, 0)),
            "0.bias": FixedPoint(12, fl),
        }
        given = nearest_weights(model, formats)
        bias: Any = given[0].bias
        bias.data = torch.tensor([2.0**-fl, 2.0 ** -(fl - 2)])
        given[0].weight.data[0] = torch.tensor([7, -8, 3, 1, 0, 5]) / 4
        x = torch.randn(9, 6)
        network = describe(given, x, formats, rounds)
        assert (fold(network, network.operation("0"), rounds["1"].input) is not None) is is_folded
        assert exporter.container_of(network) == "int8"
        if is_folded:  # of 1 and 4: an odd number, and one of a channel that has no more zeros
            assert [channel.trailing_zeros for channel in network.values["0"].channels] == [0, 1]
        assert_exact(network, x)


def test_averages_of_sums_have_the_bits_of_their_channel(channelled):
    def build():
        return nn.Sequential(
            nn.Conv2d(2, 6, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(54, 5)
        )

    model, formats, x = channelled(build, (8, 8), spread=9)
    network = describe(model, x, formats)
    assert not replace(network.values["0"], channels=()).is_exact(24)
    assert exporter.container_of(network) == "int8"
    assert_exact(network, 3 * x)
    assert {row.verdict for row in verify(network, x)} == {"exact"}
    assert {row.is_bounded for row in verify(network, x)} == {True, None}


@pytest.mark.parametrize(
    ("shifts", "message"),
    [
        ((0, 1, 2), "0.weight must have a binary point for each of 2 channels, got 3"),
        ((1, 0), "0.weight must hold numbers of each channel's format, got 1 of 2 channels"),
        ((0, 26), "word length must be 2 to 32 bits, got wl=34"),
    ],
)
def test_formats_that_are_not_those_of_the_weights_are_named(shifts, message):
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].weight.data = torch.tensor([[1, 2, 3], [1, 2, 3]]) / 64
    rounds = {"0": Formats(FixedPoint(8, 5), None)}
    formats: dict[str, Any] = {"0.weight": ChannelFormat(FixedPoint(8, 5), shifts)}
    with pytest.raises(ExportError, match=message):
        describe(model, torch.randn(2, 3), formats, rounds)
    assert describe(model, torch.randn(2, 3), {"0.weight": FixedPoint(8, 6)}, rounds)
