"""A packed file is the whole network: other readers compute with it, and nothing else comes in."""

import copy
import dataclasses
import importlib.util
import itertools
import json
import random
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import marvin
from fixedpoint_kernels import FixedPoint
from marvin.channels import ChannelFormat
from marvin.export import ExportError, describe, integer, load_frozen, packed, round_sums
from marvin.export.graph import bounds, functions, nodes, transformers
from marvin.export.graph.nodes import Weighted
from marvin.export.targets import packed_network, safetensors

READER = Path(__file__).parents[3] / "docs/read_packed.py"


@pytest.fixture(scope="module")
def reader():
    spec = importlib.util.spec_from_file_location("read_packed", READER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_reads(reader, network, x, path):
    """The reader of the docs, and the package, compute what the integer reference computes."""
    packed.save(network, path)
    description, tensors = reader.load(path)
    found = integer.run_all(network, x)
    for i, sample in enumerate(x):
        outputs = reader.run(description, tensors, sample.flatten().tolist())
        assert outputs.keys() == network.outputs.keys()
        for label, name in network.outputs.items():
            assert outputs[label].codes == found[name][i].flatten().tolist()
            assert outputs[label].fl == network.values[name].fl
    loaded = packed.load(path).network
    assert loaded is not None
    again = integer.run_all(loaded, x)
    for name, codes in integer.run_all(network, x).items():
        assert (again[name] == codes).all(), name
    assert loaded.values == dict(network.values)
    assert loaded.origin == network.origin


@pytest.mark.parametrize(("wl", "fl"), [(2, 0), (4, 2), (8, 5), (16, 10), (24, 16)])
def test_the_reader_computes_every_output(reader, digits, plain, wl, fl, tmp_path):
    for make in (digits, plain):
        _, network, x = make(wl, fl)
        assert_reads(reader, network, x[:1], tmp_path / "net")


def test_the_reader_knows_every_branch(reader, ranged, tmp_path):
    _, network, x = ranged()
    assert_reads(reader, network, x[:1], tmp_path / "net")
    assert_reads(reader, round_sums(network, x), x[:1], tmp_path / "net")


def test_the_reader_knows_channels(reader, channelled, tmp_path):
    model, formats, x = channelled()
    network = describe(model, x, formats)
    assert any(op.per_channel for op in network.operations if isinstance(op, Weighted))
    assert_reads(reader, network, x[:1], tmp_path / "net")


class Shuffled(nn.Module):
    """What moves codes, bounds them, or looks them up; several outputs."""

    def __init__(self):
        super().__init__()
        self.conv, self.other = nn.Conv2d(2, 8, 3), nn.Conv2d(4, 4, 1)
        self.line, self.fc = nn.Conv1d(8, 4, 3, padding=2, stride=2), nn.Linear(12, 3)

    def forward(self, x):
        left, right = F.relu(self.conv(x)).chunk(2, dim=1)
        x = torch.cat([left, F.relu6(self.other(F.silu(right)))], dim=1)
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h * w)
        line = F.avg_pool1d(F.max_pool1d(F.relu(self.line(x)), 2, stride=1), 2)
        x = F.pad(x[:, 1:5, ::2], (0, 0, 1, 1))
        return {"fc": self.fc(x.flatten(1)), "line": line}


def test_the_reader_knows_what_moves_codes(reader, make, tmp_path):
    _, network, x = make(Shuffled, (2, 4, 4))
    kinds = {type(op).__name__ for op in network.operations}
    assert {"Clip", "Concat", "Pad", "Reshape", "Slice", "Table", "Transpose"} <= kinds
    assert len(network.outputs) == 2
    assert_reads(reader, network, x, tmp_path / "net")


class Squeezed(nn.Module):
    """Channels times a number each, as in squeeze and excitation."""

    def __init__(self):
        super().__init__()
        self.conv, self.gate = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        x = F.relu(self.conv(x))
        return x * F.hardsigmoid(self.gate(F.adaptive_avg_pool2d(x, 1)))


def test_the_reader_knows_products(reader, make, tmp_path):
    _, network, x = make(Squeezed, (2, 4, 4))
    assert "Mul" in {type(op).__name__ for op in network.operations}
    assert_reads(reader, network, x, tmp_path / "net")


class Numbers(nn.Module):
    """Samples that are one number each, in a product and as channels again."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc, self.last = nn.Conv2d(2, 3, 1), nn.Linear(3, 1), nn.Linear(1, 2)

    def forward(self, x):
        x = F.relu(self.conv(x))
        mean, one = x.mean((1, 2, 3)) * 0.37, self.fc(x.flatten(2).mean(2)).squeeze(-1)
        both = one * 0.37 + mean
        return {"one": one / 3, "both": both, "last": self.last(both.view(-1, 1)), "mean": mean}


def test_the_reader_knows_samples_of_one_number(reader, make, tmp_path):
    _, network, x = make(Numbers, (2, 4, 4))
    scaled = [op for op in network.operations if isinstance(op, nodes.Affine)]
    assert [network.values[op.name].shape for op in scaled] == [()] * 3
    assert_reads(reader, network, x, tmp_path / "net")
    assert_reads(reader, round_sums(network, x), x, tmp_path / "net")


def test_the_readers_know_every_operation(reader):
    found = {kind for kind, table in packed_network._KINDS.items() if table is not nodes.Input}
    own = {
        kind for kind in found if packed_network._KINDS[kind].__module__ != transformers.__name__
    }
    assert reader.KINDS.keys() == own  # the other reader's test has the others


def test_the_page_has_every_operation_and_its_fields(reader):
    page = (Path(__file__).parents[3] / "docs/packed.md").read_text()
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| `")]
    fields = {kind: row[1] for row in rows for kind in re.findall(r"`(\w+)`", row[0])}
    assert packed_network._KINDS.keys() - fields.keys() == set()
    assert reader.KINDS.keys() - fields.keys() == set()
    for kind, table in packed_network._KINDS.items():
        named = re.findall(r"`(\w+)`", fields[kind])
        own = set(packed_network._own_fields(table))
        assert set(named) - {"shape"} == own - {"shape"}, kind


def test_the_reader_takes_each_weight_once(reader):
    """A layer of 100,000 outputs takes seconds; it took minutes and more when each copied what is behind."""

    class Codes(list):
        taken = 0

        def __getitem__(self, place):
            found = super().__getitem__(place)
            self.taken += len(found) if isinstance(place, slice) else 1
            return found

    weight = Codes(range(300))
    op = {"kind": "Linear", "weight": "w", "bias": None, "shape": [100], "fl": 0}
    x = reader.Value([1, 2, 3], [3], 0)
    found = reader.weighted(op, x, {"w": (weight, [100, 3], [0] * 100)})
    assert found == [3 * i + 2 * (3 * i + 1) + 3 * (3 * i + 2) for i in range(100)]
    assert weight.taken == 300


def test_the_reader_is_a_program_of_at_most_200_lines(digits, tmp_path):
    text = READER.read_text()
    assert len(text.splitlines()) <= 200
    assert "import torch" not in text
    assert "numpy" not in text
    _, network, x = digits()
    packed.save(network, tmp_path / "net")
    command = [sys.executable, "-S", str(READER), str(tmp_path / "net")]
    sample = json.dumps(x[0].flatten().tolist())
    done = subprocess.run(command, input=sample, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"output": integer.run(network, x[:1])[0].tolist()}


def test_a_state_and_its_network_share_what_they_have_in_common(ranged, tmp_path):
    model, network, _ = ranged()
    formats = {f"{n}.weight": f for n, f in network.weight_formats().items()}
    file = packed.pack_state(model.state_dict(), formats, network.formats(), network)
    size = packed.save(file, tmp_path / "both")
    loaded = packed.load(tmp_path / "both")
    for name, x in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], x)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    # the depthwise layer's bias is a float in the state, integers in the network
    assert loaded.others["depthwise.bias"].dtype is torch.float32
    assert loaded.formats["network.depthwise.bias"].wl == 32
    alone = packed.save(packed.pack_state(model.state_dict(), formats), tmp_path / "state")
    weights = sum(row.packed_bytes for row in packed.sizes(file) if row.name in formats)
    assert size < alone + packed.save(network, tmp_path / "network") - weights


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_layer_that_is_called_several_times_has_its_weights_once(reader, per_channel, tmp_path):
    torch.manual_seed(0)
    layer, x = nn.Linear(40, 40), torch.rand(8, 40)
    model = nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), layer)
    network = describe(marvin.calibrate(model.eval(), [x], per_channel=per_channel), x)
    content = packed.to_bytes(packed.pack_network(network))
    loaded = packed.from_bytes(content)
    assert [name for name in loaded.codes if name.endswith("weight")] == ["0.weight"]
    assert packed.to_bytes(loaded) == content
    assert_reads(reader, network, x[:2], tmp_path / "net")


def test_weights_of_channels_have_their_own_word_length(channelled, tmp_path):
    model, formats, x = channelled(spread=8)
    network = describe(model, x, formats)
    file = packed.pack_state(model.state_dict(), formats, None, network)
    packed.save(file, tmp_path / "net")
    loaded = packed.load(tmp_path / "net")
    for name, values in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], values)
    fmt = loaded.formats["conv.weight"]
    assert isinstance(fmt, ChannelFormat)
    assert fmt == formats["conv.weight"]
    row = next(row for row in packed.sizes(loaded) if row.name == "conv.weight")
    assert row.packed_bytes == (loaded.codes["conv.weight"].numel() * 6 + 7) // 8
    packed.save(network, tmp_path / "alone")
    assert packed.load(tmp_path / "alone").formats["conv.weight"] == fmt


def test_formats_of_channels_must_fit():
    fmt = ChannelFormat(FixedPoint(4, 2), (0, 1, 2))
    with pytest.raises(ExportError, match="w must have 3 channels, got 2"):
        packed.pack_state({"w": torch.zeros(2, 2)}, {"w": fmt})
    with pytest.raises(ExportError, match="w must hold numbers of <4, 2>, got 1 of 6"):
        packed.pack_state({"w": torch.tensor([[0.125, 0], [0, 0], [0, 0]])}, {"w": fmt})


def test_a_code_that_its_format_lacks_is_refused(plain):
    network = plain()[1]
    (first, *_) = (op for op in network.operations if isinstance(op, Weighted))
    wrong = dataclasses.replace(first, weight=first.weight + 2**40)
    operations = tuple(wrong if op is first else op for op in network.operations)
    with pytest.raises(ExportError, match="weight must have codes of <"):
        packed.pack_network(dataclasses.replace(network, operations=operations))


def test_every_operation_is_written_by_its_fields():
    """A record with a field of a new type must get a reader of that type."""
    for kind in packed_network._KINDS.values():
        hints = typing.get_type_hints(kind)
        for name in packed_network._own_fields(kind):
            is_tensor = hints[name] in (torch.Tensor, torch.Tensor | None)
            assert is_tensor or hints[name] in packed_network._READERS, (kind, name)


def content(network):
    """Return the fields and tensors of a file."""
    tensors, metadata = safetensors.read(packed.to_bytes(packed.pack_network(network)))
    return json.loads(metadata["marvin"]), tensors


def written(fields, tensors):
    """Return a file with a checksum that is right."""
    tensors = safetensors.in_file_order(tensors)
    fields["sha256"] = packed._digest(tensors, fields)
    return safetensors.write(tensors, {"marvin": json.dumps(fields)})


def operation(of_kind, **values):
    def change(fields):
        entries = fields["network"]["operations"]
        next(op for op in entries if op["kind"] == of_kind).update(values)

    return change


def of_network(change):
    return lambda fields: change(fields["network"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.update(version=2), "metadata must have"),
        (lambda f: f.update(version=2.0), "version must be 2 or 3"),
        (lambda f: f.update(version=4), "version must be 2 or 3, got 4"),
        (lambda f: f.update(network=[]), "network must have origin and operations"),
        (of_network(lambda n: n.update(origin="x")), "must be trained or calibrated, got 'x'"),
        (of_network(lambda n: n.update(operations=[])), "must have operations, got none"),
        (of_network(lambda n: n["operations"].pop(0)), "an input must be the first"),
        (of_network(lambda n: n["operations"].append(n["operations"][0])), "must be unique"),
        (of_network(lambda n: n["operations"].append(n["operations"][-1])), "must be unique"),
        (of_network(lambda n: n["operations"].append([])), "must be a table with a name"),
        (operation("Conv", kind="Eval"), "must be one of .*, got 'Eval'"),
        (operation("Conv", kind="Weighted"), "must be one of .*, got 'Weighted'"),
        (operation("Conv", more=1), "must have .*groups"),
        (operation("Conv", inputs=["7"]), "must take values of before, got '7'"),
        (operation("Conv", inputs=[]), "must be an operation on its inputs"),
        (operation("Conv", inputs="4.in"), "must have names of inputs"),
        (operation("Conv", weight="7.scale"), "must be the name of a tensor with a format"),
        (operation("Conv", weight=None), "must be the name of a tensor with a format"),
        (operation("Conv", weight="1.scale"), "weight must have 4 dimensions, got shape"),
        (operation("Conv", stride=[0, 1]), "must be a whole number from 1, got 0"),
        (operation("Conv", stride=[1]), "stride must have a number for each side, got"),
        (operation("MaxPool", padding=[1]), "padding must have a number for each side, got"),
        (operation("Conv", stride=[True, 1]), "must be a whole number from 1, got True"),
        (operation("Conv", stride=[2, 2]), "must have shape"),
        (operation("Conv", padding=[-1, 1]), "must be a whole number from 0, got -1"),
        (operation("Conv", padding=[2**13, 2**13]), "must have 1 to 67,108,864 codes"),
        (operation("Conv", dilation=[2**30, 1]), "must be an operation on its inputs"),
        (operation("Conv", dilation=[1, 1, 1]), "dilation must have a number for each side, got"),
        (operation("Conv", groups=0), "must be a whole number from 1, got 0"),
        (operation("Conv", groups=3), "must be an operation on its inputs"),
        (operation("Conv", shape=[6, 8, 9]), r"must have shape \[6, 8, 8\]"),
        (operation("Conv", fl=99), "must have fl 10, got 99"),
        (operation("Conv", fl=True), "must have fl 10, got True"),
        (operation("Conv", bits=2), "must have .* to 1,023 bits, got 2"),
        (operation("Conv", bits="9"), "to 1,023 bits, got '9'"),
        (operation("Conv", bits=1024), "to 1,023 bits, got 1024"),
        (operation("Affine", scale="1.offset"), "must have shape|must have fl|1,023 bits"),
        (operation("Affine", scale="7.bias"), "must be an operation on its inputs"),
        (operation("Round", fmt=[8, 5, False]), "must have a format"),
        (operation("Round", fmt=8), "must have a format"),
        (operation("Round", fmt=[99, 5, False, True]), "word length must be 2 to 32"),
        (operation("Add", inputs=["3", "7"]), "must take values of before|must add values"),
        (operation("MaxPool", kernel=[9, 9]), "must be an operation on its inputs"),
        (operation("MaxPool", kernel=[2**20, 2**20]), "must be smaller"),
        (operation("Input", shape=[1, 8]), "must be an operation on its inputs|must have shape"),
        (operation("Input", shape=[1] * 40), "must be up to 16 whole numbers"),
        (operation("Input", shape=[1, 2**14, 2**14]), "must have 1 to 67,108,864 codes"),
        (
            lambda f: f["fixed_point"]["1.scale"].update(shape=[6, 1]),
            "scale must have one dimension",
        ),
        (lambda f: f["fixed_point"]["0.weight"].update(shifts=[0]), "a shift for each channel"),
        (lambda f: f["fixed_point"]["0.weight"].update(shifts=[-1] * 6), "must have shifts of 0"),
        (lambda f: f["fixed_point"]["0.weight"].update(shifts=[0, 26] * 3), "more than 32 bits|32"),
        (lambda f: f["fixed_point"]["0.bias"].update(shifts=[0] * 6), "must have one format"),
    ],
)
def test_each_wrong_field_of_a_network_is_named(change, message, digits):
    fields, tensors = content(digits()[1])
    change(fields)
    with pytest.raises(ExportError, match=message):
        packed.from_bytes(written(fields, tensors))


@pytest.mark.parametrize("what", ["numbers", "integers", "zeros"])
def test_products_that_no_float_holds_are_refused(what, digits):
    """Squares of squares: each is twice as long, and with fractional bits has its point twice as far away."""
    fields, tensors = content(digits()[1])
    entries = fields["network"]["operations"]
    last = {key: entries[-1][key] for key in ("shape", "fl", "bits")} | {"name": what}
    last |= {"inputs": [entries[-1]["name"]]}
    if what == "zeros":
        entries.append(last | {"kind": "Clip", "low": 0, "high": 0, "source_fl": last["fl"]})
    elif what == "integers":
        entries.append(last | {"kind": "Round", "fmt": [8, 0, False, True], "fl": 0})
    last = entries[-1]
    name, fl, bits = last["name"], last["fl"], last["bits"]
    for i in range(12):
        fl, bits, inputs = 2 * fl, min(2 * bits, 1023), [name, name]
        name = f"m{i}"
        more = {"kind": "Mul", "name": name, "inputs": inputs, "fl": fl, "bits": bits}
        entries.append(more | {"shape": last["shape"]})
    with pytest.raises(
        ExportError, match=r"m\d: codes must take 1023 bits at most, .*: round what"
    ):
        packed.from_bytes(written(fields, tensors))


def test_pixels_share_what_is_known_of_their_channel():
    """A small file has an image of many pixels, and may do much with it."""
    fmt, by_channel, side = FixedPoint(8, 4), ChannelFormat(FixedPoint(8, 5), (0, 2)), 5601
    weight = torch.tensor([64, 3]).view(2, 1, 1, 1)  # 16 and 3 at the fl of their own
    options = (1, 1), (2800, 2800), (1, 1), 1
    conv = nodes.Conv(
        "c", ("in",), weight, by_channel.whole(), None, fmt, *options, per_channel=by_channel
    )
    operations = [nodes.Round("in", ("x",), fmt), conv, nodes.Flatten("f", ("c",))]
    names = ["f", *(f"r{i}" for i in range(40))]
    operations += [nodes.Relu(new, (old,)) for old, new in itertools.pairwise(names)]
    values = {"in": bounds.first_value(operations[0], (1, 1, 1))}
    for op in operations[1:]:
        values[op.name] = bounds.value_of(op, [values[name] for name in op.inputs])
    network = nodes.Network((nodes.Input("x", (), (1, 1, 1)), *operations), values, "trained")
    loaded = packed.from_bytes(packed.to_bytes(packed.pack_network(network))).network
    last = loaded.values["r39"]
    assert last.shape == (2 * side * side,)
    assert max(len(value.channels) for value in loaded.values.values()) == 2
    found = [last.channel(index) for index in (0, side * side - 1, side * side, last.shape[0] - 1)]
    assert [(c.high, c.trailing_zeros) for c in found] == [(64 * 127, 2)] * 2 + [(3 * 127, 0)] * 2


def test_products_of_values_of_other_dimensions_are_refused(make):
    """With one sample they broadcast, with more they do not."""
    fields, tensors = content(make(Squeezed, (2, 4, 4))[1])
    entries = fields["network"]["operations"]
    gate, product = (next(op for op in entries if op["name"] == n) for n in ("hardsigmoid", "mul"))
    flat = {"kind": "Flatten", "name": "flat", "inputs": [gate["name"]], "shape": [4]}
    entries.insert(-1, flat | {"fl": gate["fl"], "bits": gate["bits"]})
    product["inputs"] = ["relu", "flat"]
    with pytest.raises(ExportError, match="mul must multiply values of as many dimensions"):
        packed.from_bytes(written(fields, tensors))


def _rows_for_a_linear_layer(entries, _):
    """By the flattening in front of it, which becomes a table of one row."""
    flat = next(op for op in entries.values() if op["kind"] == "Flatten")
    flat["kind"] = "Reshape"
    flat["shape"] = [1, *flat["shape"]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e, _: e["getitem"].update(axis=99), "getitem.axis must be below 3, got 99"),
        (lambda e, _: e["cat"].update(axis=99), "cat.axis must be below 3, got 99"),
        (_rows_for_a_linear_layer, "fc must take values of one dimension, got 2"),
        (
            lambda _, t: t["conv.weight"]["shape"].append(1),
            r"conv.weight must have 4 dimensions, got shape \(8, 2, 3, 3, 1\)",
        ),
        (
            lambda e, _: e["silu"].update(fmt=[4, 5, False, True]),
            "silu must have codes of <4, 5>, got 0 to 125",
        ),
    ],
)
def test_what_torch_takes_and_no_description_has_is_refused(change, message, make):
    fields, tensors = content(make(Shuffled, (2, 4, 4))[1])
    entries = {op["name"]: op for op in fields["network"]["operations"]}
    change(entries, fields["fixed_point"])
    with pytest.raises(ExportError, match=message):
        packed.from_bytes(written(fields, tensors))


def test_a_scale_for_all_channels_is_none_for_each(digits):
    network = digits()[1]
    op = network.operation("1")
    short = dataclasses.replace(op, scale=op.scale[:1], offset=op.offset[:1])
    operations = tuple(short if o is op else o for o in network.operations)
    content = packed.to_bytes(
        packed.pack_network(dataclasses.replace(network, operations=operations))
    )
    with pytest.raises(ExportError, match="1 must have 6 scales, got 1"):
        packed.from_bytes(content)


ANYTHING = [None, True, 0, 1, 2, 3, -1, 31, 2**20, 2**47, 2**63, 10**300, 1.5, "", "x", [], {}]


def mutate(tree, chance):
    """Put something else in one place of a tree of JSON, or nothing."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else range(len(tree))
        key = chance.choice(keys)
        inner = tree[key]
        if isinstance(inner, dict | list) and inner and chance.random() < 0.9:
            tree = inner
            continue
        if chance.random() < 0.1:
            del tree[key]
        else:
            tree[key] = copy.deepcopy(chance.choice([*ANYTHING, [chance.choice(ANYTHING)] * 2]))
        return


def test_no_hostile_network_raises_anything_else(digits, ranged):
    chance = random.Random(0)
    for _, network, x in (digits(), ranged()):
        fields, tensors = content(network)
        names = [op["name"] for op in fields["network"]["operations"]]
        read = 0
        for _ in range(150):
            changed = copy.deepcopy(fields)
            for _ in range(chance.randrange(1, 3)):
                mutate(changed["network"], chance)
            if chance.random() < 0.3:
                operations = changed["network"].get("operations")
                op = chance.choice(operations) if isinstance(operations, list) else None
                if isinstance(op, dict):
                    op["inputs"] = [chance.choice(names) for _ in range(chance.randrange(3))]
            try:
                loaded = packed.from_bytes(written(changed, dict(tensors))).network
            except ExportError:
                continue
            read += 1
            if loaded is not None and x.shape[1:] == loaded.input.shape:
                integer.run(loaded, x[:1])
        assert read < 50


def test_a_table_of_the_largest_code_alone_is_stored():
    """That of an unsigned format of 31 bits takes 32 with a sign."""
    fmt = FixedPoint(31, 29, signed=False)
    table = functions.Table("t", ("x",), torch.tensor([fmt.max_code]), 0, 0, fmt, "Tanh")
    assert packed_network._short(table, "codes", table.codes)[1] == FixedPoint(32, 0)


def test_the_reader_says_what_it_takes(reader, tmp_path):
    x = torch.randn(4, 8)
    network = describe(marvin.calibrate(nn.Linear(8, 3), [x]), x)
    packed.save(network, tmp_path / "net")
    with pytest.raises(AssertionError, match="one flat list of 8 numbers"):
        reader.run(*reader.load(tmp_path / "net"), x[:1].tolist())
    with pytest.raises(AssertionError, match="one flat list of 8 numbers"):
        reader.run(*reader.load(tmp_path / "net"), x[:2].flatten().tolist())
    with pytest.raises(
        ExportError, match=r"safetensors: marvin\.export\.packed\.load reads packed"
    ):
        load_frozen(tmp_path / "net")
    for path in (READER, READER.with_name("read_packed_transformers.py")):
        done = subprocess.run(
            [sys.executable, "-S", str(path)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert f"python {path.name} network.safetensors < sample.json" in done.stderr
