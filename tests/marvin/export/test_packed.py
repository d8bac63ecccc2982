import copy
import hashlib
import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch as theirs
import torch
from hypothesis import given
from hypothesis import strategies as st

from fixedpoint_kernels import FixedPoint, quantize
from marvin.export import ExportError, packed
from marvin.export.targets import safetensors


def state(wl=7, fl=5, dtype=torch.float32):
    fmt = FixedPoint(wl, fl)
    weight = torch.randn(3, 5, 2)
    return {
        "conv.weight": quantize(weight, fmt, rounding="nearest").to(dtype),
        "conv.bias": torch.randn(3),
        "bn.num_batches_tracked": torch.tensor(7),
        "empty": torch.zeros(0, 4),
    }, {"conv.weight": fmt}


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=0, atol=0)


@pytest.mark.parametrize("wl", range(2, 33))
def test_round_trip_loses_nothing(wl, tmp_path):
    values, formats = state(wl, wl - 2)
    file = tmp_path / "sub" / "net.safetensors"
    size = packed.save(packed.pack_state(values, formats, {"in": FixedPoint(8, 4)}), file)
    assert file.stat().st_size == size
    loaded = packed.load(file)
    assert_same(loaded.state_dict(), values)
    assert loaded.formats == formats
    assert loaded.activations == {"in": FixedPoint(8, 4)}
    assert [p.name for p in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("wl", [1, 5, 8, 16, 31])
def test_unsigned_words_come_back(wl):
    fmt = FixedPoint(wl, 3, signed=False)
    codes = torch.tensor([0, 1, fmt.max_code // 2, fmt.max_code])
    content = packed.to_bytes(
        packed.Packed({"w": codes}, {"w": fmt}, {"w": torch.float32}, {}, {"in": fmt})
    )
    loaded = packed.from_bytes(content)
    assert loaded.codes["w"].tolist() == codes.tolist()
    assert loaded.formats == {"w": fmt}
    assert loaded.activations == {"in": fmt}


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9), st.integers(-31, 31))
def test_codes_of_32_bits_survive(numbers, fl):
    fmt = FixedPoint(32, fl)
    codes = torch.tensor(numbers, dtype=torch.int32)
    dtypes = {"w": torch.float32}
    content = packed.to_bytes(packed.Packed({"w": codes}, {"w": fmt}, dtypes, {}, {}))
    assert torch.equal(packed.from_bytes(content).codes["w"], codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes_come_back(dtype):
    values, formats = state(6, 4, dtype)
    loaded = packed.from_bytes(packed.to_bytes(packed.pack_state(values, formats)))
    assert_same(loaded.state_dict(), values)


def test_the_library_reads_the_file(tmp_path):
    values, formats = state()
    packed.save(packed.pack_state(values, formats), tmp_path / "net")
    loaded = theirs.load_file(tmp_path / "net")
    assert_same({"conv.bias": loaded["conv.bias"]}, {"conv.bias": values["conv.bias"]})
    assert loaded["conv.weight"].shape == ((30 * 7 + 7) // 8,)
    tensors, metadata = safetensors.read(theirs.save(values, {"a": "b"}))
    assert_same(tensors, values)
    assert metadata == {"a": "b"}


def test_the_checksum_is_that_of_the_page():
    """By docs/packed.md alone: with json and hashlib, of a file of codes and of floats."""
    state = {"é": torch.ones(3, 5), "b": torch.ones(2), "n": torch.tensor(7)}
    content = packed.to_bytes(packed.pack_state(state, {"é": FixedPoint(5, 3)}))
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    table = json.loads(header.pop("__metadata__")["marvin"])
    names = {"U8": "torch.uint8", "F32": "torch.float32", "I64": "torch.int64"}
    stated, digest = table.pop("sha256"), hashlib.sha256()
    digest.update(json.dumps(table, sort_keys=True).encode())
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        digest.update(json.dumps([name, names[entry["dtype"]], entry["shape"]]).encode())
        digest.update(content[begin:end])
    assert digest.hexdigest() == stated


@pytest.mark.parametrize("name", ["a", "ab", "abcdefg", "abcdefgh"])
def test_tensors_begin_at_a_multiple_of_8(name):
    content = safetensors.write({name: torch.ones(3)}, {})
    assert int.from_bytes(content[:8], "little") % 8 == 0
    assert torch.equal(safetensors.read(content)[0][name], torch.ones(3))


def test_sizes():
    values, formats = state()
    rows = {row.name: row for row in packed.sizes(packed.pack_state(values, formats))}
    assert (rows["conv.weight"].packed_bytes, rows["conv.weight"].float_bytes) == (27, 120)
    assert (rows["conv.bias"].packed_bytes, rows["conv.bias"].fmt) == (12, None)


def test_values_between_the_numbers_are_refused():
    values, formats = state()
    values["conv.weight"][0, 0, 0] = 0.001
    with pytest.raises(ExportError, match=r"conv.weight must hold numbers of <7, 5>, got 1 of 30"):
        packed.pack_state(values, formats)
    values["conv.weight"][0, 0, 0] = torch.nan
    with pytest.raises(ExportError, match="got 1 of 30"):
        packed.pack_state(values, formats)
    with pytest.raises(ExportError, match="in the state, got other"):
        packed.pack_state(values, {"other": FixedPoint(8, 4)})
    with pytest.raises(ExportError, match="must be a floating tensor"):
        packed.pack_state(values, {"bn.num_batches_tracked": FixedPoint(8, 4)})


def content():
    torch.manual_seed(0)
    return packed.to_bytes(packed.pack_state(*state()))


def test_every_flipped_bit_is_noticed():
    whole = content()
    original = packed.from_bytes(whole)
    harmless = 0
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            got = packed.from_bytes(bytes(damaged))
        except ExportError:
            continue
        harmless += 1  # blanks of the header, of which JSON has several kinds
        assert_same(got.state_dict(), original.state_dict())
        assert got.formats == original.formats
    assert harmless <= 50


def test_every_truncation_and_any_garbage_is_noticed():
    whole, chance = content(), random.Random(0)
    for length in range(len(whole)):
        with pytest.raises(ExportError):
            packed.from_bytes(whole[:length])
    with pytest.raises(ExportError):
        packed.from_bytes(whole + b"\0")
    for _ in range(2000):
        damaged = bytearray(whole)
        for _ in range(chance.randrange(1, 20)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        if bytes(damaged) != whole:
            with pytest.raises(ExportError):
                packed.from_bytes(bytes(damaged))


def changed(change):
    """Return a file whose header is another one, with a matching checksum where there can be."""
    tensors, metadata = safetensors.read(content())
    fields = json.loads(metadata["marvin"])
    change(fields, tensors)
    return written(tensors, fields)


def written(tensors, fields):
    tensors = safetensors.in_file_order(tensors)
    fields["sha256"] = packed._digest(tensors, fields)
    return safetensors.write(tensors, {"marvin": json.dumps(fields)})


def deep(levels):
    """Return lists inside one another."""
    inner: list[Any] = []
    for _ in range(levels):
        inner = [inner]
    return inner


def weight(**values):
    return lambda fields, _: fields["fixed_point"]["conv.weight"].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f, _: f.update(version=1), "version must be 2 or 3, got 1"),
        (lambda f, _: f.update(more=2), "metadata must have"),
        (lambda f, _: f.update(activations=[]), "activations must be a table"),
        (lambda f, _: f["activations"].update(x=[8, 4]), "x must have a format"),
        (lambda f, _: f["fixed_point"].update(other={}), "other must have"),
        (weight(wl=33), "word length must be 2 to 32 bits, got wl=33"),
        (weight(wl=True), "two whole numbers, two truths, got .True"),
        (weight(fl=40), "fractional length must be -31 to 31"),
        (weight(fl="4"), "got .7, '4'"),
        (weight(symmetric=1), "two truths, got .7, 5, 1"),
        (weight(signed=0), "two truths, got .7, 5, False, 0"),
        (weight(symmetric=True, signed=False), "a symmetric format must be signed"),
        (weight(shape=[3, 5, 3]), "must take 40 bytes, got shape"),
        (weight(shape=[-3, -10]), "must have a shape of whole sizes"),
        (weight(shape=[2**40, 2]), "must take"),
        (weight(shape=[2**47, 2**47, 0]), "must have a shape of whole sizes"),
        (weight(shape=[2**47] * 5000), "must have a shape of whole sizes"),
        (weight(shape=[1] * 100_000), "must have a shape of whole sizes"),
        (weight(shape=deep(500)), "metadata must be JSON of 8 levels, got more"),
        (weight(wl=10**400), "word length must be 2 to 32 bits"),
        (weight(dtype="int8"), "must be one of"),
        (lambda _, t: t["conv.weight"].fill_(255), "must end with zero bits"),
        (lambda _, t: t.pop("conv.weight"), "conv.weight must be there as bytes, got None"),
        (lambda _, t: t.update({"conv.weight": torch.ones(27)}), "as bytes, got torch.float32"),
    ],
)
def test_each_wrong_field_is_named(change, message):
    with pytest.raises(ExportError, match=message):
        packed.from_bytes(changed(change))


def test_a_symmetric_format_has_no_smallest_code():
    def change(fields, tensors):
        fields["fixed_point"]["conv.weight"].update(symmetric=True, shape=[1])
        tensors["conv.weight"] = torch.tensor([64], dtype=torch.uint8)

    with pytest.raises(ExportError, match="must have codes from -63, got -64"):
        packed.from_bytes(changed(change))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[" * 100_000, "must be whole: .* header"),
        (b"[]", "must be whole: .* header"),
        (b'{"a":1}', "must be whole: .* integer `1`"),
        (b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":2}', "must be whole: .* `2`"),
        (
            b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
            b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
            "names in a header must be unique",
        ),
        (b'{"a":{"dtype":"OBJ","shape":[0],"data_offsets":[0,0]}}', "must be whole: .* `OBJ`"),
        (
            b'{"a":{"dtype":"C64","shape":[0],"data_offsets":[0,0]}}',
            "a must be bool, integers or floats, got torch.complex64",
        ),
        (b'{"a":{"dtype":["U8"],"shape":[0],"data_offsets":[0,0]}}', "must be whole: .* sequence"),
        (b'{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,0]}}', "must be whole: .* `-1`"),
        (b'{"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}', "must be whole: .* not fully"),
        (b'{"a":{"dtype":"U8","shape":[1e9],"data_offsets":[0,9]}}', "must be whole: .* `10000000"),
        (
            b'{"a":{"dtype":"U8","shape":[140737488355328,140737488355328,0],"data_offsets":[0,0]}}',
            "must be whole: .* overflow",
        ),
        (
            b'{"a":{"dtype":"U8","shape":[0,281474976710656],"data_offsets":[0,0]}}',
            r"a must have whole sizes, got \(0, 281474976710656\)",
        ),
        (b'{"a":' + b"[" * 900 + b"]" * 900 + b"}", "must be whole: .* recursion"),
        (
            b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"more":'
            + b"[" * 90
            + b"]" * 90
            + b"}}",
            "header must be JSON of 8 levels, got more",
        ),
        (b'{"__metadata__":{"marvin":1}}', "must be whole: .* string"),
        (b'{"__metadata__":{}}', "must have 'marvin'"),
        (b'{"__metadata__":null}', "must have 'marvin'"),
        (b'{"__metadata__":{"marvin":"[' + b"[" * 99_999 + b'"}}', "must be JSON"),
    ],
)
def test_hostile_headers(text, message):
    with pytest.raises(ExportError, match=message):
        packed.from_bytes(len(text).to_bytes(8, "little") + text)


INTEGERS = [
    0,
    1,
    -1,
    2,
    7,
    8,
    16,
    27,
    31,
    33,
    64,
    2**31,
    2**47,
    2**48,
    2**53,
    2**63,
    2**64,
    10**400,
]
OTHERS = [None, True, 1.5, float("nan"), float("inf"), "", "U8", "OBJ", "x" * 999, "\ud800", {}, []]
LISTS = [[2**47, 2**47, 0], [2**47] * 5000, [1] * 20_000, deep(5), deep(300), [0, 0], [1, 1, 27]]


def anything(chance):
    found = chance.choice(chance.choice([INTEGERS, OTHERS, LISTS, [[chance.choice(INTEGERS)]]]))
    return copy.deepcopy(found)


def places(tree, path=()):
    """Return the paths to everything inside tables and lists."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list) and len(path) < 9:
            yield from places(value, (*path, key))


def mutated(tree, chance):
    """Return a tree of JSON in which one to three places are others, or gone."""
    tree = json.loads(json.dumps(tree))
    for _ in range(chance.randrange(1, 4)):
        *path, key = chance.choice(list(places(tree)) or [("new",)])
        table = tree
        for name in path:
            table = table[name]
        if chance.random() < 0.15 and (path or key in tree):
            del table[key]
        else:
            new = chance.choice(["new", "", "__metadata__", key]) if type(table) is dict else key
            table[new] = anything(chance)
    return tree


def hostile(whole, chance):
    """Return a damaged file: of its bytes, of its header, or whole with other fields inside."""
    kind = chance.randrange(5)
    if kind == 0:
        damaged = bytearray(whole)
        for _ in range(chance.choice([1, 2, 30])):
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        return bytes(damaged)
    if kind == 1:
        first, last = sorted(chance.randrange(len(whole) + 1) for _ in range(2))
        return whole[:first] + whole[last:]
    (length,) = struct.unpack_from("<Q", whole)
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    if kind == 2:
        header = mutated(header, chance)
    else:  # with its own checksum
        tensors, metadata = safetensors.read(whole)
        fields = json.loads(metadata["marvin"])
        if kind == 3:
            fields = mutated(fields, chance)
        else:
            entry = fields["fixed_point"]["conv.weight"]
            entry[chance.choice(list(entry))] = anything(chance)
            tensors["conv.weight"] = tensors["conv.weight"][: chance.choice([0, 1, 27])]
        return written(tensors, fields)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize("cases", [2000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_no_hostile_file_raises_anything_else(cases):
    whole, chance = content(), random.Random(cases)
    read = 0
    for _ in range(cases):
        file = hostile(whole, chance)
        try:
            loaded = packed.from_bytes(file)
        except ExportError:
            continue
        read += 1
        of_model = {name for name, dtype in loaded.dtypes.items() if dtype is not None}
        assert loaded.state_dict().keys() == of_model | loaded.others.keys()
        assert loaded.dtypes.keys() == loaded.codes.keys()
        assert len(packed.sizes(loaded)) == len(loaded.codes) + len(loaded.others)
    assert read < cases / 3


def test_booleans_are_0_or_1():
    text = b'{"a":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}}'
    with pytest.raises(ExportError, match="a: booleans must be 0 or 1"):
        safetensors.read(len(text).to_bytes(8, "little") + text + b"\1\2")


def test_nothing_is_a_file_too():
    assert packed.from_bytes(packed.to_bytes(packed.pack_state({}, {}))).state_dict() == {}


def test_a_tensor_of_too_many_dimensions_is_not_written():
    with pytest.raises(ExportError, match="a must have up to 16 dimensions, got 17"):
        safetensors.write({"a": torch.zeros([1] * 17)}, {})


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "net").write_bytes(b"pickle")
    with pytest.raises(ExportError, match=r"net must be a packed network: .* too small"):
        packed.load(tmp_path / "net")


@pytest.mark.parametrize(
    "x", [torch.tensor(5).expand(1), torch.from_numpy(np.zeros(0, np.int64)), torch.tensor(True)]
)
def test_strides_of_one_number_or_none_do_not_matter(x):
    state = {"others": x}
    loaded = packed.from_bytes(packed.to_bytes(packed.pack_state(state, {}))).state_dict()
    assert loaded["others"].dtype is x.dtype
    assert torch.equal(loaded["others"], x)


def test_a_file_of_earlier_versions_is_read():
    """Written before the package ``safetensors`` wrote them: tensors in the order of the state."""
    loaded = packed.load(Path(__file__).parent / "data/packed-2.safetensors")
    assert list(loaded.state_dict()) == ["z.weight", "a.bias", "count", "flag", "empty", "also"]
    assert loaded.formats == {"z.weight": FixedPoint(7, 4)}
    assert loaded.activations == {"x.in": FixedPoint(8, 4, signed=False)}
    want = [[-1.0625, 3.9375, 0.0], [0.0625, -4.0, 2.0]]
    assert loaded.state_dict()["z.weight"].tolist() == want
    assert loaded.others["a.bias"].tolist() == [0.1015625, -3.0]
    assert loaded.others["a.bias"].dtype is torch.float16
    assert loaded.others["flag"].tolist() == [True, False]
    assert (
        packed.from_bytes(packed.to_bytes(loaded)).state_dict().keys() == loaded.state_dict().keys()
    )
