"""Networks that people have: exported to integers that equal the model, and to files that equal those."""

import contextlib
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import marvin
from marvin.export import (
    ExportError,
    c,
    describe,
    exact_module,
    hls4ml,
    integer,
    onnx,
    packed,
    round_sums,
)
from marvin.export.execute.simulate import simulate
from marvin.export.graph.functions import Clip, Table
from marvin.export.graph.nodes import Conv, MaxPool, Relu, Round
from marvin.export.graph.views import Concat, Slice
from marvin.export.targets.c import compiler
from marvin.export.targets.hls4ml import layers


class Net(nn.Module):
    """Calls one function with its layers."""

    def __init__(self, function, **layers):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.function(self, x)


def in_fixed_point(model, shape, bits=None, wl=8, fl=5):
    """Return a model in eval mode whose layers round, and samples; MSGD's formats, or of ranges."""
    x = torch.randn(16, *shape)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None
    with torch.no_grad():
        model.train()(x)
    if bits is None:
        optimizer = marvin.MSGD(model.named_parameters(), lr=0.0, init_wl=wl, init_fl=fl)
        marvin.quantize_activations(model, optimizer)
        return model.eval(), x
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.0)
    optimizer = marvin.Quantized(sgd, marvin.StaticPolicy(*bits), one_dim="float")
    marvin.quantize_activations(model, optimizer)
    for _ in range(2):  # the first is in floats
        found = model(x)
        found = found.values() if isinstance(found, dict) else [found]
        loss = sum(y.square().mean() for y in found)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(loss=loss)
    return model.eval(), x


def run_onnx(network, x, container=None):
    runtime = pytest.importorskip("onnxruntime")
    content = onnx.to_model(network, container).SerializeToString()
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return [torch.from_numpy(y) for y in session.run(None, {network.input.name: x.numpy()})]


def assert_files_equal(network, x, container=None):
    wanted = integer.run_heads(network, x).values()
    for got, want in zip(run_onnx(network, x, container), wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=0)


def assert_packed_equal(network, x):
    again = packed.from_bytes(packed.to_bytes(packed.pack_network(network))).network
    wanted, found = integer.run_heads(network, x), integer.run_heads(again, x)
    assert list(found) == list(wanted)
    for label, want in wanted.items():
        torch.testing.assert_close(found[label], want, rtol=0, atol=0)


def assert_c_equal(network, x, folder):
    if not shutil.which("gcc"):
        return
    source = c.write(network)
    c.save(network, folder / "network")
    compiler.compile_program("gcc", folder / "network.c", folder / "network", ("-O1",))
    found = compiler.run_program([str(folder / "network")], c.input_codes(network, x))
    got = c.output_codes(network, source, found)
    for label, want in integer.run_heads(network, x).items():
        torch.testing.assert_close(got[label], want, rtol=0, atol=0)


def mlp():
    flat = nn.Flatten()
    return nn.Sequential(flat, nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 5))


def by_name():
    same = nn.Conv2d(2, 4, 3, padding="same")
    even = nn.Conv2d(4, 4, (4, 2), padding="same", dilation=(1, 3))
    valid = nn.Conv2d(4, 4, 3, padding="valid")
    return nn.Sequential(same, nn.ReLU(), even, nn.ReLU(), valid, nn.Flatten(), nn.Linear(16, 3))


def functional():
    def forward(m, x):
        x = F.max_pool2d(F.relu(m.conv(x)), 2, stride=1)
        x = F.dropout(F.avg_pool2d(x, kernel_size=(2, 1)), training=m.training)
        return m.fc(x.view(x.size(0), -1))

    return Net(forward, conv=nn.Conv2d(2, 4, 2), fc=nn.Linear(8, 3))


def means():
    def forward(m, x):
        return m.fc(torch.relu(m.conv(x)).mean((2, 3)))

    return Net(forward, conv=nn.Conv2d(2, 4, 3), fc=nn.Linear(4, 3))


def sequences():
    return nn.Sequential(
        nn.Conv1d(2, 6, 3, padding="same"), nn.ReLU(), nn.MaxPool1d(2, ceil_mode=True),
        nn.Conv1d(6, 6, 3, stride=2, dilation=2, padding=2, groups=3), nn.ReLU(),
        nn.AvgPool1d(2), nn.Conv1d(6, 4, 1), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def shuffled():
    """As ShuffleNet: channels in two halves, one of them worked on, then mixed."""

    def forward(m, x):
        x = F.relu(m.conv(x))
        left, right = x.chunk(2, dim=1)
        x = torch.cat([left, F.relu6(m.other(right))], dim=1)
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)
        return m.fc(torch.flatten(x[:, 1:7, ::2], 1))

    layers = {"conv": nn.Conv2d(2, 8, 3), "other": nn.Conv2d(4, 4, 1), "fc": nn.Linear(12, 3)}
    return Net(forward, **layers)


def beside():
    """Concatenates values of several binary points, one of them unrounded where ranges round."""

    def forward(m, x):
        x = F.relu(m.conv(x))
        y = torch.cat([x, m.left(x), F.relu(m.right(x))], 1)
        return m.fc(F.adaptive_max_pool2d(y, (1, 2)).flatten(1))

    one = {"conv": nn.Conv2d(2, 4, 1), "left": nn.Conv2d(4, 4, 1)}
    return Net(forward, **one, right=nn.Conv2d(4, 4, 1), fc=nn.Linear(24, 3))


def bounded():
    def forward(m, x):
        x = F.relu6(m.conv(x))
        x = F.hardtanh(m.mid(x), -0.5, 0.75)
        return m.fc(x.clamp(min=-0.25).flatten(1))

    return Net(forward, conv=nn.Conv2d(2, 4, 3), mid=nn.Conv2d(4, 4, 1), fc=nn.Linear(16, 3))


def padded():
    """A short-cut as in ResNets of CIFAR; zeros on two sides of four; bounds above 0 of what has zeros around it."""

    def forward(m, x):
        x = F.relu(m.conv(F.pad(x, (0, 1, 0, 1))))
        y = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 2), "constant", 0) + m.down(x)
        y = F.pad(m.zeros(F.relu(y)).clamp(0.25, 2.0), (2, 0))
        return m.fc(F.pad(m.last(y).mean((2, 3)), [1, 0]))

    layers = {
        "conv": nn.Conv2d(2, 4, 2),
        "down": nn.Conv2d(4, 7, 3, 2, 1),
        "last": nn.Conv2d(7, 4, 2),
    }
    return Net(forward, **layers, zeros=nn.ZeroPad2d((1, 0, 0, 1)), fc=nn.Linear(5, 3))


NETS = {
    "an MLP on images": (mlp, (2, 4, 4)),
    "a layer alone": (lambda: nn.Linear(6, 3), (6,)),
    "padding by name": (by_name, (2, 4, 4)),
    "functions": (functional, (2, 4, 4)),
    "means over positions": (means, (2, 4, 4)),
    "sequences": (sequences, (2, 16)),
    "channels shuffled": (shuffled, (2, 4, 4)),
    "values side by side": (beside, (2, 4, 4)),
    "bounds": (bounded, (2, 4, 4)),
    "zeros around": (padded, (2, 4, 4)),
}


@pytest.mark.parametrize("name", NETS)
def test_networks_are_their_models_on_every_output(name, tmp_path):
    torch.manual_seed(0)
    build, shape = NETS[name]
    model, x = in_fixed_point(build(), shape)
    network = describe(model, x)
    other = 2 * torch.randn(40, *shape)
    with torch.no_grad():
        want = model(other).double()
    torch.testing.assert_close(integer.run(network, other), want, rtol=0, atol=0)
    assert onnx.container_of(network) == "int8"
    assert_files_equal(network, other)
    assert_files_equal(network, other, "float64")
    assert_packed_equal(network, other)
    assert_c_equal(network, other, tmp_path)


@pytest.mark.parametrize("name", NETS)
def test_files_of_range_policies_equal_the_integers(name, tmp_path):
    torch.manual_seed(0)
    build, shape = NETS[name]
    model, x = in_fixed_point(build(), shape, bits=(6, 7))
    network = round_sums(describe(model, x), x)
    other = 2 * torch.randn(40, *shape)
    assert onnx.container_of(network) == "int8"
    assert_files_equal(network, other)
    assert_c_equal(network, other, tmp_path)
    float64 = simulate(network, other, dtype=torch.float64)[network.output]
    torch.testing.assert_close(integer.run(network, other), float64, rtol=0, atol=0)


def test_even_kernels_have_no_products_but_their_own():
    model = nn.Sequential(nn.Conv2d(2, 3, 2, padding="same"), nn.Flatten())
    model, x = in_fixed_point(model, (2, 8, 8))
    (row,) = c.costs(describe(model, x))
    assert row.madds == 2 * 3 * 2 * 2 * 64


FUNCTIONS = [
    nn.ReLU6(), nn.Hardtanh(-0.3, 0.6), nn.LeakyReLU(), nn.LeakyReLU(0.25), nn.Hardswish(),
    nn.Hardsigmoid(), nn.Sigmoid(), nn.SiLU(inplace=True), nn.GELU(), nn.GELU("tanh"), nn.Tanh(),
    nn.ELU(), nn.PReLU(), nn.Mish(), nn.Softplus(),
]  # fmt: skip


def with_function(function):
    conv, pool = nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(conv, function, nn.Conv2d(4, 4, 2), function, pool, nn.Flatten())


@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
@pytest.mark.parametrize("wl", [5, 8, 14])
def test_functions_are_exact_where_training_rounds_what_they_take(function, wl):
    """Each value in exact arithmetic, rounded to what the next layer takes: no other rounding."""
    torch.manual_seed(0)
    model, x = in_fixed_point(with_function(function), (1, 6, 6), wl=wl, fl=wl - 3)
    network = describe(model, x)
    assert not network.chosen
    found = integer.run_all(network, x)
    first = next(op for op in network.operations if isinstance(op, Conv) and op.name == "2")
    taken = network.operation(first.inputs[0])
    source = network.operation(taken.inputs[0])
    z = torch.from_numpy(found[source.name]).double() * 2.0 ** -network.values[source.name].fl
    y = function.double().forward(z.clone()).detach() * 2.0 ** network.values[taken.name].fl
    function.float()
    low, high = -(2 ** (wl - 1)), 2 ** (wl - 1) - 1
    torch.testing.assert_close(
        torch.from_numpy(found[taken.name]).double(), y.round().clamp(low, high), rtol=0, atol=0
    )
    assert_files_equal(network, x)
    assert_packed_equal(network, x)
    with torch.no_grad():
        want = model(x).double()
    torch.testing.assert_close(integer.run(network, x), want, rtol=0, atol=0)


@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
def test_functions_of_unrounded_sums_take_rounded_ones(function, tmp_path):
    torch.manual_seed(0)
    model, x = in_fixed_point(with_function(function), (1, 6, 6), bits=(6, 8))
    network = describe(model, x, wl=8)
    tables = [op for op in network.operations if isinstance(op, Table)]
    rounded = {op.inputs[0] for op in tables}
    assert rounded <= set(network.chosen)
    assert all(network.chosen[name].wl == 8 for name in rounded)
    assert all(len(op.codes) <= 256 for op in tables)
    assert_files_equal(round_sums(network, x), x)
    assert_c_equal(network, x, tmp_path)
    with torch.no_grad():
        want = model(x).double()
    # a step of 8 bits of what the function takes, and one of what it gives
    gap = (integer.run(network, x) - want).abs().max()
    assert gap <= 0.03 * want.abs().max() + 2.0**-6


def test_tables_of_16_bits_are_those_of_the_function_in_float64():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.SiLU(), nn.Conv2d(2, 2, 1), nn.Flatten())
    model, x = in_fixed_point(model, (1, 6, 6), wl=16, fl=12)
    network = describe(model, x)
    (table,) = (op for op in network.operations if isinstance(op, Table))
    assert len(table.codes) > 2**15
    assert_files_equal(network, x)


def test_bounds_go_through_roundings():
    """ReLU6 behind sums that nothing rounds is the clip of the integer kernel that rounds them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU6(), nn.Conv2d(4, 2, 3))
    nn.init.constant_(model[1].weight, 5.0)
    model, x = in_fixed_point(model, (1, 6, 6), bits=(6, 8))
    network = describe(model, x)
    (clip,) = (op for op in network.operations if isinstance(op, Clip))
    assert clip.high * 2.0**-clip.source_fl == 6
    assert onnx.container_of(network) == "int8"
    assert onnx.in_floats(network) == {}
    other = 3 * torch.randn(30, 1, 6, 6)
    assert (integer.run_all(network, other)[clip.name] == clip.high).any()
    assert_files_equal(network, other)


def heads(kind):
    def forward(m, x):
        x = F.relu(m.conv(x)).flatten(1)
        found = {"first": m.fc(x), "second": x}
        return found if kind is dict else kind(found.values())

    return Net(forward, conv=nn.Conv2d(1, 2, 3), fc=nn.Linear(8, 3))


@pytest.mark.parametrize("kind", [dict, tuple, list])
def test_several_heads(kind):
    torch.manual_seed(0)
    model, x = in_fixed_point(heads(kind), (1, 4, 4))
    network = describe(model, x)
    labels = ["first", "second"] if kind is dict else ["output0", "output1"]
    with torch.no_grad():
        wanted = model(x)
    wanted = list(wanted.values()) if kind is dict else wanted
    found = integer.run_heads(network, x)
    assert list(found) == labels
    for got, want in zip(found.values(), wanted, strict=True):
        torch.testing.assert_close(got, want.double(), rtol=0, atol=0)
    assert_files_equal(network, x)
    assert_packed_equal(network, x)
    assert [value.name for value in onnx.to_model(network).graph.output] == labels
    with pytest.raises(ExportError, match=f"outputs {', '.join(labels)}: take integer.run_heads"):
        integer.run(network, x)


@pytest.mark.parametrize("container", ["int8", "int16", "float64", "qdq"])
def test_labels_are_the_names_of_outputs(container, tmp_path):
    """Those that values inside have too; behind that of the argument stands a number."""

    def forward(m, x):
        h = F.relu(m.fc(x))
        named = {"boxes": m.boxes(h).sigmoid(), "cls": m.cls(h).softmax(-1)}
        return named | {"shape": h, "x": m.fc(x)}

    layers = {"fc": nn.Linear(8, 6), "boxes": nn.Linear(6, 4), "cls": nn.Linear(6, 3)}
    torch.manual_seed(0)
    network = describe(*(found := in_fixed_point(Net(forward, **layers), (8,))))
    assert list(network.outputs) == ["boxes", "cls", "shape", "x"]
    model = onnx.to_model(network, container)
    assert [value.name for value in model.graph.output] == ["boxes", "cls", "shape", "x#2"]
    assert_files_equal(network, found[1], container)
    assert_c_equal(network, found[1], tmp_path)


@pytest.mark.parametrize("kind", [dict, tuple, None])
def test_one_output_of_a_dictionary_keeps_its_label(kind, tmp_path):
    def forward(m, x):
        y = m.fc(x)
        return y if kind is None else (y,) if kind is tuple else {"logits": y}

    torch.manual_seed(0)
    model, x = in_fixed_point(Net(forward, fc=nn.Linear(8, 3)), (8,))
    network = describe(model, x)
    label, name = ("logits", "logits") if kind is dict else ("output", "fc.out.float")
    assert list(network.outputs) == [label]
    assert [value.name for value in onnx.to_model(network).graph.output] == [name]
    own = "output_logits" if kind is dict else "output"
    assert f" *{own});" in c.write(network).header
    found = exact_module(network)(x)
    found = found[label] if kind is dict else found
    torch.testing.assert_close(found, integer.run(network, x), rtol=0, atol=0)
    assert_files_equal(network, x)
    assert_packed_equal(network, x)
    assert_c_equal(network, x, tmp_path)


def test_what_comes_before_the_first_layer_is_rounded_as_the_layer_does(tmp_path):
    """Order-keeping operations on the input work on its codes."""

    def forward(m, x):
        x = F.max_pool2d(F.relu(x), 2)
        return m.fc(x.transpose(1, 2)[:, 1].flatten(1)) + m.other(x.flatten(1))

    torch.manual_seed(0)
    model = Net(forward, fc=nn.Linear(6, 3), other=nn.Linear(18, 3))
    model, x = in_fixed_point(model, (2, 6, 6))
    network = describe(model, x)
    kinds = [type(op) for op in network.operations]
    assert kinds.index(Round) < kinds.index(Relu) < kinds.index(MaxPool) < kinds.index(Slice)
    with torch.no_grad():
        want = model(x).double()
    torch.testing.assert_close(integer.run(network, x), want, rtol=0, atol=0)
    assert_files_equal(network, x)
    assert_c_equal(network, x, tmp_path)


def test_a_concatenation_aligns_its_values():
    """Against values that are computed one by one, at fractional lengths that differ."""
    torch.manual_seed(0)
    model, x = in_fixed_point(beside(), (2, 4, 4), bits=(4, 6))
    network = describe(model, x)
    (cat,) = (op for op in network.operations if isinstance(op, Concat))
    fls = [network.values[name].fl for name in cat.inputs]
    assert len(set(fls)) > 1
    found = integer.run_all(network, x)
    parts = [found[n].astype(float) * 2.0**-fl for n, fl in zip(cat.inputs, fls, strict=True)]
    want = torch.cat([torch.from_numpy(part) for part in parts], 1)
    got = torch.from_numpy(found[cat.name]).double() * 2.0 ** -network.values[cat.name].fl
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("build", [shuffled, sequences, lambda: with_function(nn.SiLU())])
def test_hls4ml_names_what_it_has_not(build):
    torch.manual_seed(0)
    shape = {shuffled: (2, 4, 4), sequences: (2, 16)}.get(build, (1, 6, 6))
    model, x = in_fixed_point(build(), shape)
    network = describe(model, x)
    refused = []
    for op in network.operations[1:]:
        with contextlib.suppress(ExportError):
            layers.check(op)
            continue
        refused.append(type(op))
    assert refused
    first = next(op for op in network.operations if type(op) is refused[0])
    with pytest.raises(ExportError, match=f"{first.name}: .* not written for hls4ml: "):
        layers.check(first)


def test_bounds_of_tables_and_concatenations_hold():
    torch.manual_seed(0)
    nets = (
        in_fixed_point(beside(), (2, 4, 4)),
        in_fixed_point(with_function(nn.Hardswish()), (1, 6, 6)),
    )
    for model, x in nets:
        network = describe(model, x)
        for name, codes in integer.run_all(network, 9 * torch.randn(50, *x.shape[1:])).items():
            value = network.values[name]
            assert value.low <= codes.min()
            assert codes.max() <= value.high
            assert math.prod(codes.shape[1:]) == math.prod(value.shape)


def test_linear_layers_over_positions():
    """Of vectors, of rows of them, and of images of them, as the model computes."""

    def forward(m, x):
        return F.relu(m.second(F.relu(m.first(x)).transpose(1, 2)))[:, :, 1:]

    torch.manual_seed(0)
    model = Net(forward, first=nn.Linear(5, 6), second=nn.Linear(6, 4))
    model, x = in_fixed_point(model, (3, 2, 5))
    network = describe(model, x)
    with torch.no_grad():
        want = model(x).double()
    torch.testing.assert_close(integer.run(network, x), want, rtol=0, atol=0)
    assert_files_equal(network, x)
    assert_packed_equal(network, x)


def test_what_hls4ml_is_asked_for_is_checked(tmp_path):
    for wrong, message in (
        ({"io": "stream"}, "io must be one of io_parallel, io_stream, got 'stream'"),
        ({"strategy": "latency"}, "strategy must be one of Latency, Resource"),
        ({"reuse_factor": 0}, "reuse_factor a whole number of at least 1, got 5.0 and 0"),
        ({"reuse_factor": 1.5}, "reuse_factor a whole number of at least 1, got 5.0 and 1.5"),
        ({"clock_ns": 0.0}, "clock_ns must be a number above 0"),
        ({"clock_ns": "5"}, "clock_ns must be a number above 0 .*, got '5' and 1"),
        ({"clock_ns": float("inf")}, "clock_ns must be a number above 0"),
        ({"part": 3}, "part must be the name of one, or None, got 3"),
    ):
        with pytest.raises(ExportError, match=message):
            hls4ml.Hardware(**wrong)
    torch.manual_seed(0)
    model, x = in_fixed_point(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1)), (1, 4, 4))
    network = describe(model, x)
    with pytest.raises(ExportError, match="0: io_stream does not pad"):
        hls4ml.write(network, tmp_path, "Vitis", hls4ml.Hardware(io="io_stream"))


def _doubled(x):
    columns = torch.cat([x[..., None]] * 2, -1).flatten(-2)
    return torch.cat([columns[..., None, :]] * 2, -2).flatten(-3, -2)


def _shuffled(x):
    parts = x.view(-1, 1, 2, 2, 4, 4).permute(0, 1, 4, 2, 5, 3)
    return parts.flatten(4).flatten(2, 3)


def _gated(x):
    left, right = x.chunk(2, 1)
    return left * torch.sigmoid(right)


INSTEAD = {  # what refusals say to write, and what it is written for
    "neg": (lambda x: x * -1, torch.neg),
    "abs": (lambda x: torch.relu(x) + torch.relu(x * -1), torch.abs),
    "pow": (lambda x: x * x, torch.square),
    "sum": (lambda x: x.mean((2, 3)) * 16, lambda x: x.sum((2, 3))),
    "max": (lambda x: F.adaptive_max_pool2d(x, 1).flatten(1), lambda x: x.amax((2, 3))),
    "interpolate": (_doubled, lambda x: F.interpolate(x, scale_factor=2)),
    "PixelShuffle": (_shuffled, lambda x: F.pixel_shuffle(x, 2)),
    "GLU": (_gated, lambda x: F.glu(x, 1)),
    "stack": (lambda x: torch.cat([x[:, None], x[:, None]], 1), lambda x: torch.stack([x, x], 1)),
}


@pytest.mark.parametrize("name", INSTEAD)
def test_what_a_refusal_says_to_write_is_the_same_and_is_exported(name):
    torch.manual_seed(0)
    written, meant = INSTEAD[name]
    conv, x = nn.Conv2d(3, 4, 3, padding=1), torch.randn(8, 3, 4, 4)
    torch.testing.assert_close(written(conv(x)), meant(conv(x)))
    with pytest.raises(ExportError, match="cannot be exported"):
        describe(marvin.calibrate(Net(lambda m, x: meant(m.conv(x)), conv=conv), [x]), x)
    fixed = marvin.calibrate(Net(lambda m, x: written(m.conv(x)), conv=conv), [x])
    assert_files_equal(describe(fixed, x), x)
