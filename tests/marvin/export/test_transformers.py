"""Transformers as integers: norms of rows, softmax, attention, positions, by all that computes them."""

import copy
import importlib
import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import isqrt
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
    c,
    describe,
    exact_module,
    hls4ml,
    integer,
    onnx,
    packed,
    qonnx,
    round_sums,
)
from marvin.export.execute.simulate import simulate
from marvin.export.execute.simulate_transformers import _root as torch_root
from marvin.export.execute.transformers import _root as numpy_root
from marvin.export.graph.bounds import first_value, value_of
from marvin.export.graph.nodes import Input, Network, Round, Value
from marvin.export.graph.transformers import Constant, Embedding, MatMul, Norm, Softmax
from marvin.export.targets import packed_network, safetensors
from marvin.export.targets.c import compiler
from marvin.export.targets.c.proof import prove, report
from marvin.export.targets.onnx.graph import Graph
from marvin.export.targets.onnx.transformers import Integers
from train.vit import VisionTransformer

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def reader():
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module("read_packed_transformers")
    finally:
        del sys.path[0]


def assert_all_equal(network, x, reader, path, read=2):
    """Torch in float64, the reader of the docs, ONNX Runtime and C compute the integer reference's codes."""
    import onnxruntime

    want = integer.run_heads(network, x)
    codes = integer.run_all(network, x)
    simulated = simulate(network, x, dtype=torch.float64)
    for name, value in network.values.items():
        got = simulated[name].expand(len(x), *value.shape) * 2.0**value.fl
        assert (got.numpy() == codes[name]).all(), name
        assert value.low <= codes[name].min() <= codes[name].max() <= value.high, name
    packed.save(network, path)
    loaded = packed.load(path).network
    assert loaded is not None
    for label, y in integer.run_heads(loaded, x).items():
        assert torch.equal(y, want[label])
    description, tensors = reader.load(path)
    for i, sample in enumerate(x[:read]):
        outputs = reader.run(description, tensors, sample.flatten().tolist())
        for label, y in outputs.items():
            assert [code * 2.0**-y.fl for code in y.codes] == want[label][i].flatten().tolist()
    model = onnx.to_model(network)
    assert not wrong_of_int64(model)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    found = session.run(None, {network.input.name: x.numpy()})
    for got, y in zip(found, want.values(), strict=True):
        torch.testing.assert_close(torch.from_numpy(got).double(), y, rtol=0, atol=0)
    if shutil.which("gcc"):
        for label, y in as_c(network, x, path.parent).items():
            torch.testing.assert_close(y, want[label], rtol=0, atol=0)


def wrong_of_int64(model):
    """Return operators on int64 that ONNX Runtime computes wrongly beyond 32 or 53 bits."""
    import onnx as of_the_standard

    graph = of_the_standard.shape_inference.infer_shapes(model).graph
    long = {x.name for x in graph.initializer if x.data_type == of_the_standard.TensorProto.INT64}
    for value in (*graph.input, *graph.value_info):
        if value.type.tensor_type.elem_type == of_the_standard.TensorProto.INT64:
            long.add(value.name)
    kinds = {"Clip", "Max", "Min", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "Sign"}
    return [node.name for node in graph.node if node.op_type in kinds and node.input[0] in long]


def as_c(network, x, folder):
    """Return what the C file computes; its first operation that C does not define ends it."""
    source, path = c.write(network, "net"), folder / "net.c"
    c.save(network, path)
    flags = "-O0", "-fsanitize=undefined", "-fno-sanitize-recover=all"
    compiler.compile_program("gcc", path, folder / "program", flags)
    got = compiler.run_program([str(folder / "program")], c.input_codes(network, x))
    return c.output_codes(network, source, got)


def test_the_reader_knows_every_operation(reader):
    text = Path(reader.__file__).read_text()
    assert len(text.splitlines()) <= 200
    assert "import torch" not in text
    assert "numpy" not in text
    assert reader.KINDS.keys() | {"Input"} == packed_network._KINDS.keys()


def test_the_reader_is_a_program(tmp_path):
    model, x = small_vit()
    network = describe(marvin.calibrate(model, [x]), x)
    packed.save(network, tmp_path / "net")
    sample = json.dumps(x[0].flatten().tolist())
    other, own = (
        subprocess.run(
            [sys.executable, "-S", str(DOCS / name), str(tmp_path / "net")],
            input=sample, capture_output=True, text=True, check=False,
        )
        for name in ("read_packed.py", "read_packed_transformers.py")
    )  # fmt: skip
    assert other.returncode != 0
    assert "read_packed_transformers.py knows more kinds" in other.stderr
    assert own.returncode == 0, own.stderr
    assert json.loads(own.stdout) == {"output": integer.run(network, x[:1])[0].tolist()}


def small_vit(depth=1):
    torch.manual_seed(0)
    model = VisionTransformer(classes=5, channels=1, width=8, depth=depth)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):  # as training leaves them
            nn.init.normal_(module.weight, 1, 0.3)
            nn.init.normal_(module.bias, 0, 0.3)
    return model, torch.randn(4, 1, 32, 32)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_the_vision_transformer_is_integers(bits, reader, tmp_path):
    model, x = small_vit()
    network = describe(marvin.calibrate(model, [x], bits=bits), x, wl=bits)
    assert {Norm, Softmax, MatMul, Constant} <= {type(op) for op in network.operations}
    assert_all_equal(network, x, reader, tmp_path / "net", read=1)
    if bits <= 8:
        assert onnx.container_of(network) == "int8"
        assert onnx.in_floats(network) == {}


@pytest.mark.parametrize("wl", [4, 8, 16])
def test_a_trained_vision_transformer_is_integers(wl, reader, tmp_path):
    """Of MSGD, whose norms and positions are rounded in training: formats are the model's own."""
    model, x = small_vit()
    optimizer = marvin.MSGD(model.named_parameters(), lr=0.0, init_wl=wl, init_fl=wl // 2)
    marvin.quantize_activations(model, optimizer)
    network = describe(model.eval(), x)
    norm = network.operation("norm")
    assert isinstance(norm, Norm)
    assert norm.fmt == FixedPoint(wl, wl // 2)
    assert_all_equal(network, x, reader, tmp_path / "net", read=1)


def test_rounded_sums_of_a_transformer(reader, tmp_path):
    model, x = small_vit()
    exact = describe(marvin.calibrate(model, [x]), x)
    network = round_sums(exact, x)
    assert len(network.operations) > len(exact.operations)
    assert_all_equal(network, x, reader, tmp_path / "net", read=1)


def test_integers_are_near_the_model():
    model, x = small_vit(depth=2)
    for bits, most in ((8, 0.05), (12, 0.004), (16, 0.0006)):
        fixed = marvin.calibrate(model, [x], bits=bits)
        network = describe(fixed, x, wl=bits)
        with torch.no_grad():
            want = fixed(x).double()
        gap = (integer.run(network, x) - want).abs().max() / want.abs().max()
        assert gap < most, bits  # halves with each bit; measured 0.018, 0.0015 and 0.0002


def of_codes(op, low, high, shape, fl):
    """Return a network of one operation on codes that come in as they are."""
    bits = max(high.bit_length(), (-low).bit_length()) + 1
    fmt = FixedPoint(bits, fl)
    first = Round("in", ("x",), fmt)
    before = first_value(first, shape)
    values: dict[str, Value] = {"in": before, op.name: value_of(op, [before])}
    return Network((Input("x", (), shape), first, op), values, "calibrated")


def half_even(x: Fraction, fmt: FixedPoint) -> int:
    return min(max(round(x), fmt.min_code), fmt.max_code)


@pytest.mark.parametrize("is_centered", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("n", "wl", "shift"), [(1, 4, 0), (3, 8, 0), (7, 12, 3), (33, 16, 1)])
def test_norms_are_those_of_fractions(is_centered, has_bias, n, wl, shift, reader, tmp_path):
    """An oracle of its own: deviations and variance as fractions, the root by whole numbers."""
    generator = torch.Generator().manual_seed(n)
    gain = torch.randint(-200, 200, (n,), generator=generator)
    bias = torch.randint(-900, 900, (n,), generator=generator) if has_bias else None
    fmt, fl, precision, epsilon = FixedPoint(wl, wl - 4), 5, 6, 3 * n
    op = Norm(
        "norm", ("in",), gain=gain, gain_fmt=FixedPoint(10, 7), bias=bias, bias_fmt=FixedPoint(12, 7),
        epsilon=epsilon, shift=shift, precision=precision, source_fl=fl, fmt=fmt,
        is_centered=is_centered,
    )  # fmt: skip
    top = 2 ** (wl - 1) - 1
    network = of_codes(op, -top - 1, top, (n,), fl)
    codes = torch.randint(-top - 1, top + 1, (40, n), generator=generator)
    codes[0], codes[1] = 0, top  # nothing but epsilon is left
    codes[2] = torch.arange(n) % 2 * top
    x = codes.float() * 2.0**-fl
    found = integer.run_all(network, x)["norm"]
    for row, got in zip(codes.tolist(), found.tolist(), strict=True):
        short = [(Fraction(code, 2**shift) + Fraction(1, 2)).__floor__() for code in row]
        short = short if shift else row
        mean = Fraction(sum(short), n) if is_centered else Fraction(0)
        spread = sum((code - mean) ** 2 for code in short) / n + Fraction(epsilon, n * n)
        whole = spread * n * n * 4**precision
        assert whole.denominator == 1
        root = Fraction(max(1, isqrt(whole.numerator)), 2**precision)
        for i, code in enumerate(short):
            y = n * (code - mean) / root * Fraction(int(gain[i]), 2**7)
            y += Fraction(0 if bias is None else int(bias[i]), 2**7)
            assert got[i] == half_even(y * Fraction(2) ** fmt.fl, fmt)
    assert_all_equal(network, x, reader, tmp_path / "net", read=len(x))


def test_halves_of_norms_go_to_even():
    """1.5 and 2.5 are both 2, -0.5 is 0: rows whose root is a power of two."""
    op = Norm(
        "norm", ("in",), gain=torch.tensor([3, 5]), gain_fmt=FixedPoint(8, 1), bias=None,
        bias_fmt=FixedPoint(32, 1), epsilon=0, shift=0, precision=0, source_fl=0,
        fmt=FixedPoint(8, 0), is_centered=True,
    )  # fmt: skip
    network = of_codes(op, -128, 127, (2,), 0)
    found = integer.run_all(network, torch.tensor([[1.0, -1], [-1, 1], [7, -7]]))["norm"]
    assert found.tolist() == [[2, -2], [-2, 2], [2, -2]]


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "wl", "shift"), [(1, 1, 2, 0), (3, 5, 8, 2), (4, 4, 16, 0)]
)
def test_softmax_is_that_of_fractions(is_masked, rows, columns, wl, shift, reader, tmp_path):
    generator = torch.Generator().manual_seed(rows)
    table = (torch.exp(-torch.arange(40.0).double() / 6) * 2**16).round().long()
    mask = torch.randint(0, 2, (rows, columns), generator=generator) if is_masked else None
    if mask is not None:
        mask[:, 0] = 1
    fmt = FixedPoint(wl, wl, signed=False)
    op = Softmax("softmax", ("in",), codes=table, shift=shift, mask=mask, source_fl=4, fmt=fmt)
    network = of_codes(op, -128, 127, (2, rows, columns), 4)
    codes = torch.randint(-128, 128, (30, 2, rows, columns), generator=generator)
    codes[0] = 5
    x = codes.float() / 16
    found = integer.run_all(network, x)["softmax"]
    for i, (row, got) in enumerate(
        zip(codes.reshape(-1, columns).tolist(), found.reshape(-1, columns).tolist(), strict=True)
    ):
        seen = [1] * columns if mask is None else mask[i % rows].tolist()
        top = max(code for code, is_seen in zip(row, seen, strict=True) if is_seen)
        parts = []
        for code, is_seen in zip(row, seen, strict=True):
            place = (
                (Fraction(top - code, 2**shift) + Fraction(1, 2)).__floor__()
                if shift
                else top - code
            )
            parts.append(int(table[min(place, 39)]) if is_seen else 0)
        for part, y in zip(parts, got, strict=True):
            assert y == half_even(Fraction(part, sum(parts)) * 2**fmt.fl, fmt)
    assert_all_equal(network, x, reader, tmp_path / "net", read=len(x))


class Attending(nn.Module):
    """One layer and attention, spelled in one way or another."""

    def __init__(self, function, tokens=5, width=12):
        super().__init__()
        self.function = function
        self.qkv = nn.Linear(width, 3 * width)
        self.last = nn.Linear(width, 3)
        self.register_buffer("mask", torch.ones(tokens, tokens, dtype=torch.bool).tril(1))
        self.register_buffer(
            "added", torch.zeros(tokens, tokens).masked_fill(~self.mask, -torch.inf)
        )

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (3, -1)).transpose(1, 2) for part in (q, k, v))
        return self.last(self.function(self, q, k, v).transpose(1, 2).flatten(2))


def sdpa(**options):
    return lambda _net, q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


ATTENTIONS = {
    "plain": sdpa(),
    "causal": sdpa(is_causal=True),
    "scale": sdpa(scale=0.3),
    "mask": lambda net, q, k, v: F.scaled_dot_product_attention(q, k, v, net.mask),
    "added": lambda net, q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=net.added),
    "matmul": lambda _net, q, k, v: torch.softmax(q @ k.transpose(-2, -1) / 2, -1) @ v,
    "scaled": lambda _net, q, k, v: F.softmax(torch.matmul(0.3 * q, k.mT), dim=-1).matmul(v),
}


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_however_it_is_spelled(name, tokens, reader, tmp_path):
    torch.manual_seed(0)
    model, x = Attending(ATTENTIONS[name], tokens), 2 * torch.randn(5, tokens, 12)
    fixed = marvin.calibrate(model, [x])
    network = describe(fixed, x)
    assert sum(isinstance(op, MatMul) for op in network.operations) == 2
    assert sum(isinstance(op, Softmax) for op in network.operations) == 1
    assert_all_equal(network, x, reader, tmp_path / "net")
    with torch.no_grad():
        want = fixed(x)
    assert (integer.run(network, x) - want).abs().max() < 0.03 * want.abs().max()


class Bare(nn.Module):
    """A layer, then a function of it and of what comes in."""

    def __init__(self, function):
        super().__init__()
        self.function, self.linear = function, nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(36))

    def forward(self, x):
        return self.function(self, self.linear(x))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda _n, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), "write dropout_p=p if"),
        (lambda _n, x: F.scaled_dot_product_attention(x, x, x, x @ x.mT), "must be made of the indices"),
        (lambda _n, x: F.scaled_dot_product_attention(x, x, x, torch.ones(4, 4)), "truths or 0 and -inf"),
        (lambda _n, x: F.scaled_dot_product_attention(x, x, x, torch.zeros(4, 4) > 0), "see a column|NaN"),
        (lambda _n, x: F.softmax(x, 1), "over the last dimension"),
        (lambda n, x: x @ n.weight.view(6, 6), "of weights, use nn.Linear"),
        (lambda _n, x: x / x, "can be divided by a number"),
        (lambda _n, x: x.transpose(0, 1) + 1, "leave the batch alone|cannot be exported"),
        (lambda n, x: n.linear(x.transpose(0, 1)), "so transpose it back before"),
        (lambda _n, x: x + torch.arange(x.shape[0])[:, None, None], "the same for each sample"),
        (lambda _n, x: F.layer_norm(x, (6,)), "cannot be exported"),
    ],
)  # fmt: skip
def test_what_has_no_integers_is_named(function, message):
    torch.manual_seed(0)
    model, x = Bare(function), torch.randn(4, 4, 6)
    with pytest.raises(ExportError, match=message):
        describe(marvin.calibrate(model, [x]), x)


def test_a_norm_of_several_dimensions_is_named():
    model, x = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm((4, 6))), torch.randn(4, 4, 6)
    with pytest.raises(
        ExportError, match=r"1: must normalise the last dimension alone, got \(4, 6\)"
    ):
        describe(marvin.calibrate(model, [x]), x)


@pytest.mark.parametrize(("target", "message"), [(qonnx, "QONNX"), (hls4ml, "hls4ml")])
def test_targets_without_transformers_say_so(target, message, tmp_path):
    """And what has them."""
    model, x = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)), torch.randn(4, 6)
    network = describe(marvin.calibrate(model, [x]), x)
    with pytest.raises(ExportError, match=f"1: Norm .*{message}: export it to c, onnx or packed"):
        target.save(network, tmp_path / "net")
    text = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 3))
    ids = torch.randint(0, 9, (4, 3))
    network = describe(marvin.calibrate(text, [ids]), ids)
    with pytest.raises(ExportError, match=f"0: Embedding .*{message}: export it to c, onnx or pa"):
        target.save(network, tmp_path / "net")


@pytest.mark.skipif(not shutil.which("gcc"), reason="gcc is not installed")
@pytest.mark.parametrize("make", ["vision", "text", pytest.param("padded", marks=pytest.mark.slow)])
def test_a_transformer_is_proved_as_c(make, tmp_path):
    """By all compilers, under sanitizers, with vectors and without, and on a microcontroller."""
    model, x = {"vision": small_vit, "text": bert, "padded": padded}[make]()
    network = describe(marvin.calibrate(model, [x]), x)
    source, path = c.write(network), tmp_path / "network.c"
    c.save(network, path)
    (got,), said = prove(network, source, path, x)
    assert torch.equal(got, integer.run(network, x))
    assert "gcc" in said
    products = sum(isinstance(op, MatMul) for op in network.operations)
    assert products == 2 * (1 if make == "vision" else 2)
    madds = sum(
        int(np.prod(network.values[op.name].shape)) * network.values[op.inputs[0]].shape[-1]
        for op in network.operations
        if isinstance(op, MatMul)
    )
    layers = replace(
        network, operations=tuple(op for op in network.operations if not isinstance(op, MatMul))
    )
    assert sum(r.madds for r in c.costs(network)) - sum(r.madds for r in c.costs(layers)) == madds
    text = " ".join(report(network, source, path))
    assert f"input {x[0].numel():,} {'int8_t' if make == 'vision' else 'uint8_t'}" in text
    header = path.with_suffix(".h").read_text()
    assert ("network_encode" in header) == (make == "vision")  # of floats, not of indices


@pytest.mark.skipif(not shutil.which("gcc"), reason="gcc is not installed")
def test_the_c_program_refuses_what_is_no_index(tmp_path):
    model, ids = bert()
    network = describe(marvin.calibrate(model, [ids]), ids)
    c.save(network, tmp_path / "net.c")
    compiler.compile_program("gcc", tmp_path / "net.c", tmp_path / "program", ())
    codes = c.input_codes(network, ids)
    rows = len(next(op for op in network.operations if isinstance(op, Embedding)).weight)
    for wrong in (rows, -1):
        codes[1, 2] = wrong
        with pytest.raises(ExportError, match="the C program must run, got 1"):
            compiler.run_program([str(tmp_path / "program")], codes)
        with pytest.raises(ExportError, match=f"must take whole numbers from 0 to {rows - 1}"):
            c.input_codes(network, torch.from_numpy(codes).reshape(ids.shape))


def test_the_original_of_a_transformer_is_the_models_own():
    model, x = small_vit()
    with pytest.raises(ExportError, match=r"norm1: Norm is in integers alone: take torch\.onnx"):
        onnx.original(describe(marvin.calibrate(model, [x]), x))


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("is_affine", [True, False])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_norms_of_sums_of_any_size(norm, is_affine, size, reader, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), norm(9, elementwise_affine=is_affine), nn.Linear(9, 4))
    with torch.no_grad():
        model[0].weight *= size
        model[0].bias *= size
    x = torch.randn(6, 3, 7)
    fixed = marvin.calibrate(model, [x])
    network = describe(fixed, x)
    assert_all_equal(network, x, reader, tmp_path / "net")
    with torch.no_grad():
        want = fixed(x).double()
    assert (integer.run(network, x) - want).abs().max() < 0.01 * want.abs().max()


class Bert(nn.Module):
    """Indices, positions, an encoder of torch, and a linear head on the first token."""

    def __init__(self, tokens=7, width=12, heads=3, mask=None, **options):
        super().__init__()
        self.embed, self.positions = nn.Embedding(20, width), nn.Embedding(tokens, width)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.1, **options)
        norm = nn.LayerNorm(width) if options.get("norm_first") else None
        self.encoder = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
        self.head = nn.Linear(width, 4)
        self.batch_first = options.get("batch_first", False)
        self.register_buffer("mask", mask)

    def forward(self, ids):
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1]))
        x = self.encoder(x if self.batch_first else x.transpose(0, 1), self.mask)
        return self.head(x[:, 0] if self.batch_first else x[0])


def bert(tokens=7, **options):
    torch.manual_seed(0)
    model = Bert(tokens, **options)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1, 0.3)
                nn.init.normal_(module.bias, 0, 0.3)
            if isinstance(module, nn.MultiheadAttention):
                nn.init.normal_(module.in_proj_bias, 0, 0.3)
                nn.init.normal_(module.out_proj.bias, 0, 0.3)
    return model.eval(), torch.randint(0, 20, (12, tokens))


CAUSAL = nn.Transformer.generate_square_subsequent_mask(7)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("mask", [None, CAUSAL, CAUSAL < 0], ids=["none", "added", "truths"])
def test_encoders_of_torch_are_integers(batch_first, norm_first, mask, reader, tmp_path):
    activation = "gelu" if batch_first else "relu"
    options = {"batch_first": batch_first, "norm_first": norm_first, "activation": activation}
    model, ids = bert(mask=mask, **options)
    with torch.no_grad():  # the same arithmetic in the same order
        torch.testing.assert_close(marvin.spell_attention(model)(ids), model(ids))
    fixed = marvin.calibrate(model, [ids])
    network = describe(fixed, ids)
    assert network.takes_indices
    assert sum(isinstance(op, Softmax) for op in network.operations) == 2
    assert_all_equal(network, ids, reader, tmp_path / "net")
    assert onnx.container_of(network) == "int8"
    with torch.no_grad():
        want = fixed(ids)
    assert (integer.run(network, ids) - want).abs().max() < 0.06 * want.abs().max()


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 12, 16])
@pytest.mark.parametrize("tokens", [1, 3])
def test_encoders_of_any_word_length(bits, tokens, reader, tmp_path):
    model, ids = bert(tokens, batch_first=True)
    network = describe(marvin.calibrate(model, [ids], bits=bits), ids, wl=bits)
    assert_all_equal(network, ids, reader, tmp_path / "net", read=1)


@pytest.mark.parametrize("policy", ["MSGD", "ranges"])
def test_a_spelled_encoder_is_trained(policy, reader, tmp_path):
    """All that multiplies rounds in training, and the export follows it."""
    model, ids = bert(batch_first=True)
    model = marvin.spell_attention(model)
    if policy == "MSGD":
        optimizer = marvin.MSGD(model.named_parameters(), lr=0.01, init_wl=8, init_fl=5)
    else:
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = marvin.Quantized(sgd, marvin.StaticPolicy(8, 8), one_dim="float")
    marvin.quantize_activations(model, optimizer)
    before = model.encoder.layers[0].self_attn.query.weight.detach().clone()
    for _ in range(3):
        loss = model.train()(ids).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(loss=loss)
    assert not torch.equal(model.encoder.layers[0].self_attn.query.weight, before)
    network = describe(marvin.freeze(model.eval()), ids)
    assert_all_equal(network, ids, reader, tmp_path / "net")


@pytest.mark.parametrize("options", [{}, {"kdim": 5, "vdim": 7}, {"bias": False}])
@pytest.mark.parametrize("batch_first", [True, False])
def test_spelled_attention_is_that_of_torch(options, batch_first):
    torch.manual_seed(0)
    given = nn.MultiheadAttention(8, 2, batch_first=batch_first, **options).eval()
    spelled = marvin.spell_attention(given)
    x, k, v = (torch.randn(3, 3, size) for size in (8, given.kdim, given.vdim))
    causal = CAUSAL[:3, :3]
    padding = torch.tensor([[False, False, True]] * 3)
    each = (torch.rand(6, 3, 3) < 0.5) & ~torch.eye(3, dtype=torch.bool)
    for mask in (None, causal, causal < 0, each):
        for pad in (None, padding):
            for average in (True, False):
                own = {"attn_mask": mask, "average_attn_weights": average}
                own["key_padding_mask"] = None if mask is each else pad  # rows would see nothing
                if mask is causal and pad is not None:
                    added = torch.zeros(3, 3).masked_fill(pad, -torch.inf)
                    own["key_padding_mask"] = added
                torch.testing.assert_close(spelled(x, k, v, **own), given(x, k, v, **own))
    own = {"attn_mask": causal, "is_causal": True, "need_weights": False}
    torch.testing.assert_close(spelled(x, k, v, **own), given(x, k, v, **own))


def test_spelling_leaves_the_model_alone_and_names_what_it_cannot(tmp_path):
    model, ids = bert()
    keys = list(model.state_dict())
    spelled = marvin.spell_attention(model.train())
    assert list(model.state_dict()) == keys
    assert spelled.training
    assert marvin.spell_attention(spelled).state_dict().keys() == spelled.state_dict().keys()
    shared = nn.ModuleList([layer := nn.MultiheadAttention(4, 1), layer])
    assert len({*marvin.spell_attention(shared).children()}) == 1
    for option in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(ValueError, match="add_bias_kv=False and add_zero_attn=False"):
            marvin.spell_attention(nn.MultiheadAttention(4, 1, **{option: True}))
    with pytest.raises(TypeError, match="spell_attention"):
        marvin.spell_attention(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="three dimensions, got shape"):
        spelled.encoder.layers[0].self_attn(*[torch.ones(2, 12)] * 3)
    optimizer = marvin.MSGD(model.named_parameters(), lr=0.01)
    marvin.quantize_activations(model, optimizer)
    with pytest.raises(ValueError, match=r"before marvin\.quantize_activations"):
        marvin.spell_attention(model)
    with pytest.raises(ExportError, match=r"call marvin\.spell_attention"):
        describe(model.eval(), ids)


class Padded(Bert):
    """Has a padding mask that depends on what comes in."""

    def forward(self, ids):
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.head(self.encoder(x, self.mask, src_key_padding_mask=ids == 0)[:, 0])


def padded(**options):
    """Return an encoder with padding, and indices: of no padding, of some, of nothing else."""
    model, ids = bert(batch_first=True, **options)
    new = Padded(batch_first=True, **options).eval()
    new.load_state_dict(model.state_dict())
    ids[ids == 0] = 1
    ids[0], ids[1, 3:], ids[2, 0], ids[3, ::2] = 0, 0, 0, 0
    return new, ids


@pytest.mark.parametrize("mask", [None, CAUSAL, CAUSAL < 0], ids=["none", "added", "truths"])
def test_padding_is_integers(mask, reader, tmp_path):
    model, ids = padded(mask=mask)
    fixed = marvin.calibrate(model, [ids])
    network = describe(fixed, ids)
    assert_all_equal(network, ids, reader, tmp_path / "net", read=4)
    assert onnx.container_of(network) == "int8"
    masks = [op.inputs[1:] for op in network.operations if isinstance(op, Softmax)]
    assert len(masks) == 2
    assert len({*masks}) == 1  # one mask for all layers
    with torch.no_grad():
        want = fixed(ids)
    assert (integer.run(network, ids) - want).abs().max() < 0.06 * want.abs().max()


def test_what_is_padding_changes_nothing(tmp_path):
    """The table and the positions of padding may hold anything."""
    model, ids = padded()
    network = describe(marvin.calibrate(model, [ids]), ids)
    changed = copy.deepcopy(network)
    codes = {op.name: op for op in changed.operations}
    codes["embed"].weight[0] = 0  # of the padding
    some = ids[(ids != 0).all(1) | (ids[:, 3:] == 0).all(1) & (ids[:, 0] != 0)]
    assert (some == 0).any()
    assert (
        integer.run_all(network, some)["embed"] != integer.run_all(changed, some)["embed"]
    ).any()
    assert torch.equal(integer.run(network, some), integer.run(changed, some))


class Masked(nn.Module):
    """Attention by hand, with a mask of the indices."""

    def __init__(self, function, **options):
        super().__init__()
        self.function, self.embed = function, nn.Embedding(9, 12, **options)
        self.first, self.last = nn.Linear(12, 12), nn.Linear(12, 3)
        self.register_buffer("seen", torch.ones(5, 5, dtype=torch.bool).tril(1))

    def forward(self, ids):
        x = self.first(self.embed(ids))
        return self.last(self.function(self, ids, x))


def heads(x):
    return x.unflatten(-1, (3, -1)).transpose(1, 2)


def attended(mask):
    """Return what attends by three heads, with a mask ``(n, 1, 1, tokens)`` of the indices."""

    def function(net, ids, x):
        y = F.scaled_dot_product_attention(*[heads(x)] * 3, attn_mask=mask(net, ids))
        return y.transpose(1, 2).flatten(2)

    return function


MASKS = {
    "index": lambda _n, ids: (ids != 0)[:, None, None],
    "unsqueezed": lambda _n, ids: ids.ne(0).unsqueeze(1).unsqueeze(2),
    "viewed": lambda _n, ids: (ids > 0).view(-1, 1, 1, 5),
    "not": lambda _n, ids: (~(ids == 0))[:, None, None],
    "or": lambda _n, ids: (~((ids == 0) | ids.ge(7)))[:, None, None],
    "and": lambda _n, ids: (torch.ne(ids, 0) & torch.logical_not(ids == 7))[:, None, None, :],
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_indices_however_they_are_spelled(name, reader, tmp_path):
    torch.manual_seed(0)
    model, ids = Masked(attended(MASKS[name])).eval(), torch.randint(0, 9, (30, 5))
    ids[0] = 0
    fixed = marvin.calibrate(model, [ids])
    network = describe(fixed, ids)
    assert_all_equal(network, ids, reader, tmp_path / "net")
    (mask,) = (op.inputs[1] for op in network.operations if isinstance(op, Softmax))
    want = MASKS[name](model, ids).long()
    assert torch.equal(torch.from_numpy(integer.run_all(network, ids)[mask]), want)


@pytest.mark.parametrize(
    "function",
    [
        lambda _n, ids, x: F.scaled_dot_product_attention(x, x, x, (ids != 0)[:, None]),
        lambda _n, ids, x: (x * (ids != 0)[..., None]).mean(
            1
        ),  # of tokens that are none of padding
    ],
)
def test_masks_without_heads(function, reader, tmp_path):
    torch.manual_seed(0)
    ids = torch.randint(0, 9, (30, 5))
    network = describe(marvin.calibrate(Masked(function).eval(), [ids]), ids)
    assert_all_equal(network, ids, reader, tmp_path / "net")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (attended(lambda _n, ids: (ids != 0)[:, None, :, None]), "the same for all heads and rows"),
        (attended(lambda n, ids: (ids != 0)[:, None, None] & n.seen), "must be made of the indices"),
        (attended(lambda _n, ids: ~(ids != 0)[:, None, None] & (ids != 0)), "must be made of the ind"),
        (lambda _n, ids, x: F.scaled_dot_product_attention(x, x, x, x @ x.mT > 0), "must be made of the indices"),
    ],
)  # fmt: skip
def test_masks_that_have_no_integers_are_named(function, message):
    torch.manual_seed(0)
    ids = torch.randint(0, 9, (5, 5))
    with pytest.raises(ExportError, match=message):
        describe(marvin.calibrate(Masked(function).eval(), [ids]), ids)


class WithMask(nn.Module):
    """Takes padding beside the indices."""

    def __init__(self):
        super().__init__()
        self.inner = Masked(attended(lambda _n, _ids: None))

    def forward(self, ids, padding):
        return self.inner(ids * padding)


def test_a_mask_that_comes_in_is_named():
    model, ids = WithMask().eval(), torch.randint(0, 9, (5, 5))
    marvin.quantize_activations(model, marvin.MSGD(model.named_parameters(), lr=0.1))
    with pytest.raises(ExportError, match=r"one input, .* another: padding; .* ids == 0"):
        describe(model, ids)


@pytest.mark.parametrize("is_masked", [False, True])
def test_softmax_of_columns_is_that_of_fractions(is_masked, reader, tmp_path):
    """Of rows that see some columns, and of rows that see none."""
    generator = torch.Generator().manual_seed(0)
    table = (torch.exp(-torch.arange(40.0).double() / 6) * 2**16).round().long()
    fmt, shown = FixedPoint(8, 8, signed=False), torch.tensor([0, 1, 1, 0, 1])
    mask = torch.tensor([[1, 0, 0, 1, 0], [1, 1, 0, 1, 1]]) if is_masked else None
    first = Round("in", ("x",), FixedPoint(8, 4))
    columns = Constant("seen", (), shown.view(1, 1, 5), FixedPoint(2, 0))
    own = {"codes": table, "shift": 1, "mask": mask, "source_fl": 4, "fmt": fmt}
    op = Softmax("softmax", ("in", "seen"), **own)
    values = {"in": first_value(first, (3, 2, 5)), "seen": value_of(columns, [])}
    values["softmax"] = value_of(op, list(values.values()))
    network = Network((Input("x", (), (3, 2, 5)), first, columns, op), values, "calibrated")
    codes = torch.randint(-128, 128, (20, 3, 2, 5), generator=generator)
    found = integer.run_all(network, codes / 16)["softmax"].reshape(-1, 5)
    for i, (row, got) in enumerate(zip(codes.reshape(-1, 5).tolist(), found.tolist(), strict=True)):
        seen = shown if mask is None else shown * mask[i % 2]
        top = max((code for code, s in zip(row, seen, strict=True) if s), default=0)
        parts = [
            int(table[min((top - code + 1) // 2, 39)]) if s else 0
            for code, s in zip(row, seen, strict=True)
        ]
        total = sum(parts) or 1
        assert got == [half_even(Fraction(part, total) * 256, fmt) for part in parts]
    assert (found.reshape(-1, 2, 5)[:, 0].sum(-1) == 0).all() == is_masked
    assert_all_equal(network, codes / 16, reader, tmp_path / "net", read=3)


@pytest.mark.parametrize(
    "seen",
    [
        Value((1, 1, 4), 0, 0, 1, 1), Value((5,), 0, 0, 1, 1), Value((1, 2, 5), 0, 0, 1, 1),
        Value((1, 1, 5), 1, 0, 1, 1), Value((1, 1, 5), 0, -1, 0, 1), Value((1, 1, 5), 0, 0, 2, 2),
    ],
)  # fmt: skip
def test_columns_are_seen_by_0_and_1(seen):
    table, fmt = torch.tensor([9, 3, 0]), FixedPoint(8, 8, signed=False)
    op = Softmax("softmax", ("in", "s"), codes=table, shift=0, mask=None, source_fl=0, fmt=fmt)
    x = Value((3, 2, 5), 0, -8, 7, 8)
    value_of(op, [x, Value((1, 1, 5), 0, 0, 1, 1)])
    with pytest.raises(
        ValueError, match=r"softmax must see columns by 0 and 1 of shape \(1, 1, 5\)"
    ):
        value_of(op, [x, seen])


def test_causal_attention_stays_causal_with_padding():
    torch.manual_seed(0)
    given = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    spelled, x = marvin.spell_attention(given), torch.randn(3, 5, 8)
    padding = torch.tensor([[False] * 4 + [True]] * 3)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    want = given(x, x, x, key_padding_mask=padding, attn_mask=causal)
    torch.testing.assert_close(spelled(x, x, x, padding, is_causal=True), want)


class Decoding(nn.Module):
    """A decoder's layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, x)


class Weighed(nn.Module):
    """Takes the weights of attention, or leaves them."""

    def __init__(self, takes):
        super().__init__()
        self.attention, self.takes = nn.MultiheadAttention(6, 2, batch_first=True), takes

    def forward(self, x):
        y, weights = self.attention(x, x, x)
        return weights @ y if self.takes else y


def test_what_encoders_ask_for_that_has_no_integers_is_named(reader, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(5, 4, 6)
    with pytest.raises(
        ExportError, match="called with a value of the network, got attention_weights"
    ):
        describe(marvin.calibrate(Weighed(True), [x]), x)
    network = describe(marvin.calibrate(Weighed(False), [x]), x)
    assert_all_equal(network, x, reader, tmp_path / "net")
    layer = nn.TransformerDecoderLayer(6, 2, 8, batch_first=True).eval()
    decoder = marvin.calibrate(Decoding(layer), [x])
    with pytest.raises(
        ExportError, match=r"layer: TransformerDecoderLayer .* decoders have no integ"
    ):
        describe(decoder, x)


def test_indices_are_those_of_rows(tmp_path):
    model, ids = bert()
    network = describe(marvin.calibrate(model, [ids]), ids)
    for wrong in (-1, 20, 0.5):
        samples = ids.double()
        samples[1, 2] = wrong
        with pytest.raises(ExportError, match=r"embed must take whole numbers from 0 to 19, got"):
            integer.run(network, samples)
    limited = nn.Sequential(nn.Embedding(20, 4, max_norm=1.0), nn.Linear(4, 2))
    with pytest.raises(ExportError, match=r"0: an embedding must have max_norm=None"):
        describe(marvin.calibrate(limited, [ids]), ids)


def test_exact_modules_are_the_integers(tmp_path):
    model, ids = bert()
    network = describe(marvin.calibrate(model, [ids]), ids)
    exact = exact_module(network)
    want = integer.run(network, ids)
    assert torch.equal(exact(ids), want)
    assert torch.equal(copy.deepcopy(exact)(ids), want)
    torch.save(exact, tmp_path / "exact.pt")
    assert torch.equal(torch.load(tmp_path / "exact.pt", weights_only=False)(ids), want)
    wide = nn.Sequential(nn.Linear(40, 3))
    x = torch.randn(4, 40)
    long = describe(marvin.calibrate(wide, [x], bits=32), x)
    with pytest.raises(ExportError, match=r"take 53 bits at most, .*: choose shorter formats"):
        exact_module(long)


def test_exact_modules_with_batch_norm_are_traced():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)
    model, x = nn.Sequential(*layers).eval(), torch.randn(4, 1, 4, 4)
    network = describe(marvin.calibrate(model, [x]), x)
    exact = exact_module(network)
    made = (
        torch.export.export(exact, (x,)).module(),
        torch.jit.trace(exact, (x,)),
        torch.compile(exact, fullgraph=True, backend="eager"),
    )
    for module in made:
        assert torch.equal(module(2 * x), integer.run(network, 2 * x))


def test_exact_modules_refuse_what_the_integers_refuse():
    """Of a table -1 would be the last row; and NaN would be no place in the table of GELU."""
    ids = torch.randint(0, 9, (4, 3))
    text = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 3))
    network = describe(marvin.calibrate(text, [ids]), ids)
    wrong = [ids - 9, ids + 0.5, ids + 9, ids / torch.zeros(4, 3), ids[:, :2], ids[0], ids.tolist()]
    x = torch.randn(4, 5)
    for last in nn.ReLU(), nn.GELU():
        numbers = describe(marvin.calibrate(nn.Sequential(nn.Linear(5, 3), last), [x]), x)
        bad = x.index_fill(0, torch.tensor([2]), torch.nan)
        for given, samples in [(network, w) for w in wrong] + [(numbers, bad), (numbers, x[:, :1])]:
            for compute in (exact_module(given), partial(integer.run, given)):
                with pytest.raises((ExportError, TypeError), match=r"must (take|be|have)"):
                    compute(samples)
        exact = exact_module(numbers)
        assert torch.equal(torch.export.export(exact, (x,)).module()(x), exact(x))
        assert torch.equal(torch.jit.trace(exact, (x,))(x), exact(x))
        assert exact(x.to("meta")).shape == (4, 3)
    assert torch.equal(exact_module(network)(ids.float()), integer.run(network, ids))


def test_a_frozen_encoder_leaves_by_the_command(tmp_path, capsys):
    from marvin.export.__main__ import main

    model = nn.Sequential(
        nn.Embedding(20, 8),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1),
        nn.Flatten(),
        nn.Linear(40, 3),
    ).eval()
    ids = torch.randint(0, 20, (12, 5))
    torch.save(marvin.freeze(marvin.calibrate(model, [ids])), tmp_path / "net.pt")
    np.save(tmp_path / "ids.npy", ids.numpy())
    np.save(tmp_path / "labels.npy", torch.randint(0, 3, (12,)).numpy())
    given = [str(tmp_path / "net.pt"), "--inputs", str(tmp_path / "ids.npy"), "--verify"]
    given += ["--labels", str(tmp_path / "labels.npy")]
    for target in ("packed", "onnx"):
        main([*given, "--to", target])
        said = capsys.readouterr().out
        assert "equal" in said
        assert (
            "in floats in training, in integers here: norms of rows 1.layers.0.norm1, 1.lay" in said
        )
        assert "; softmax scaled_dot_product_attention.softmax\n" in said
        assert "scaled_dot_product_attention.softmax unsigned <8, 8>" in said  # formats left open
    with pytest.raises(SystemExit, match="give indices with --inputs"):
        main([str(tmp_path / "net.pt"), "--to", "onnx", "--shape", "5"])


def test_describing_leaves_no_tensor_in_the_model():
    model, ids = bert(mask=CAUSAL < 0)
    fixed = marvin.calibrate(model, [ids])
    before = set(vars(fixed))
    describe(fixed, ids)
    assert set(vars(fixed)) == before


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_epsilon_is_that_of_the_model(norm):
    """Rows that hardly differ: epsilon is most of what is under the root, and codes are shortened."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 400, bias=False), norm(400, eps=0.5), nn.Linear(400, 4))
    x = torch.randn(6, 300)
    fixed = marvin.calibrate(model, [x], bits=8, weight_bits=16)
    network = describe(fixed, x, wl=10)
    op = next(op for op in network.operations if isinstance(op, Norm))
    assert op.shift
    with torch.no_grad():
        want = fixed[1](fixed[0](x)).double()
    got = integer.run_all(network, x)[op.name] * op.fmt.lsb
    want = want.clamp(op.fmt.min, op.fmt.max)
    assert abs(torch.from_numpy(got) - want).max() <= op.fmt.lsb * 0.75  # half, and a little


def by_onnx_runtime(compute, x):
    """Return what ONNX Runtime makes of nodes on int64; ``compute`` adds them and returns their result."""
    import onnxruntime

    graph = Graph("x")
    result = compute(Integers(graph, "rows", np.float64), "x")
    helper, types = graph.onnx.helper, graph.onnx.TensorProto
    given = helper.make_tensor_value_info("x", types.INT64, x.shape)
    ends = [given], [graph.onnx.ValueInfoProto(name=result)]
    parts = graph.nodes, "rows", *ends, [*graph._constants.values()]
    opsets = [helper.make_opsetid("", 21)]
    model = helper.make_model(helper.make_graph(*parts), opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, {"x": x})[0]


def test_roots_of_long_numbers():
    """Numbers of up to 62 bits, next to squares: float64 has 53."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(2**28, 2**31 - 1, (400,), generator=generator)
    for off in (-1, 0, 1):
        squares = codes**2 + off
        want = [isqrt(square) for square in squares.tolist()]
        assert numpy_root(squares.numpy()).tolist() == want
        assert torch_root(squares).tolist() == want
        assert by_onnx_runtime(Integers.root, squares.numpy()).tolist() == want


@pytest.mark.parametrize("bits", [20, 31, 32, 33, 34, 40, 54, 58])
def test_rows_of_long_numbers_in_onnx_runtime(bits):
    """Its own maxima and bounds of int64 compare 32 bits, its own sums have the 53 of float64."""
    x = np.random.default_rng(0).integers(-(2**bits), 2**bits, (200, 11))
    for low, high in ((0, 2047), (-(2**31), 2**31 - 1)):
        got = by_onnx_runtime(lambda rows, x: rows.within(x, low, high, np.float64), x)  # noqa: B023
        assert (got == x.clip(low, high)).all()
    got = by_onnx_runtime(lambda rows, x: rows.total(x, 11), x)
    assert (got == x.sum(-1, keepdims=True)).all()
    sums = np.abs(x) * (x > 0)
    assert (by_onnx_runtime(Integers.at_least_1, sums) == np.where(sums == 0, 1, sums)).all()


@pytest.mark.parametrize(("features", "size"), [(16, 1e4), (256, 1.0)])
def test_scores_that_int32_does_not_hold(features, size):
    import onnxruntime

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(features, 10), nn.BatchNorm1d(10), nn.Softmax(-1))
    x = torch.randn(300, features)
    model(x)
    network = describe(marvin.calibrate(model.eval(), [x]), x)
    source = network.operation(network.outputs["output"]).inputs[0]
    assert network.values[source].high >= 2**31
    want = integer.run(network, x * size)
    for container in (None, "float64"):
        content = onnx.to_model(network, container).SerializeToString()
        session = onnxruntime.InferenceSession(content)
        found = session.run(None, {network.input.name: (x * size).numpy()})[0]
        torch.testing.assert_close(torch.from_numpy(found).double(), want, rtol=0, atol=0)


class Classified(nn.Module):
    """A vision transformer with a token for the class, and positions as a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 8, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(0.5 * torch.randn(1, 17, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder, self.head = (
            nn.TransformerEncoder(layer, 1, enable_nested_tensor=False),
            nn.Linear(8, 3),
        )

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.encoder(x)[:, 0])


def test_tokens_for_the_class(reader, tmp_path):
    torch.manual_seed(0)
    model, x = Classified().eval(), torch.randn(5, 1, 32, 32)
    fixed = marvin.calibrate(model, [x])
    exact = describe(fixed, x)
    for network in (exact, round_sums(exact, x)):
        assert_all_equal(network, x, reader, tmp_path / "net", read=1)
        assert_all_equal(network, x[:1], reader, tmp_path / "net", read=1)
    with torch.no_grad():
        want = fixed(x)
    assert (integer.run(exact, x) - want).abs().max() < 0.05 * want.abs().max()


def test_no_hostile_transformer_raises_anything_else():
    """Whatever stands in a file in the place of a number, loading names it, or the network computes."""
    model, ids = bert(3, mask=CAUSAL[:3, :3])
    network = describe(marvin.calibrate(model, [ids]), ids)
    tensors, metadata = safetensors.read(packed.to_bytes(packed.pack_network(network)))
    content, chance = json.loads(metadata["marvin"]), random.Random(0)
    whole = [
        None,
        True,
        0,
        1,
        2,
        3,
        -1,
        31,
        63,
        64,
        2**20,
        2**47,
        2**63,
        10**300,
        1.5,
        "",
        "x",
        [],
        {},
    ]
    own = [
        (op, name)
        for op in content["network"]["operations"]
        if op["kind"] in ("Constant", "Embedding", "MatMul", "Norm", "Softmax")
        for name in op
        if name not in ("kind", "name")
    ]
    refused = 0
    for _ in range(200):
        op, name = chance.choice(own)
        before = op[name]
        others = [op[name] for op, name in own]
        op[name] = chance.choice([*whole, *others])
        try:
            found = packed.from_bytes(written(content, tensors))
            assert found.network is not None
            integer.run(found.network, ids)
        except ExportError:
            refused += 1
        op[name] = before
    assert refused > 100


def written(fields, tensors):
    """Return a file with a checksum that is right."""
    tensors = safetensors.in_file_order(tensors)
    fields["sha256"] = packed._digest(tensors, fields)
    return safetensors.write(tensors, {"marvin": json.dumps(fields)})
