"""Files of ``torch.save`` take no memory by what they say, whichever function reads them."""

import collections
import io
import pickle
import tracemalloc
import zipfile

import pytest
import torch
from torch import nn

import marvin
from fixedpoint_kernels import FixedPoint
from marvin.export import ExportError, load_frozen
from marvin.export.frontend.load import load_tensor
from marvin.saved_file import check_calls, check_records

BEGIN, END = b"\x80\x02", b"."
MANY = 10**8


class Own:
    """Of the user: made by a call."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return Own, (self.value,)


def name(path):
    module, _, own = path.rpartition(".")
    return f"c{module}\n{own}\n".encode()


def value(x):
    return pickle.dumps(x, 2)[2:-1]


def call(path, *args):
    return name(path) + b"(" + b"".join(args) + b"tR"


def new(path, state, *args):
    return name(path) + b"(" + b"".join(args) + b"t\x81" + state + b"b"


def floats(key="0", sizes=(1,), strides=(1,)):
    storage = value("storage") + name("torch.FloatStorage") + value(key) + value("cpu") + value(1)
    layout = value(0) + value(sizes) + value(strides) + b"\x89" + call("collections.OrderedDict")
    return call("torch._utils._rebuild_tensor_v2", b"(" + storage + b"tQ", layout)


def written(content, file=None):
    file = io.BytesIO() if file is None else file
    with zipfile.ZipFile(file, "w") as records:
        records.writestr("x/data.pkl", BEGIN + content + END)
        records.writestr("x/version", b"3\n")
        records.writestr("x/data/0", bytes(4))
    return file


LINEAR, LSTM = "torch.nn.modules.linear.Linear", "torch.nn.modules.rnn.LSTM"
RECURRENT = {"num_layers": MANY, "_all_weights": [[0]], "bidirectional": False, "bias": False}
HOSTILE = {
    "a layer": (call(LINEAR, value(MANY), value(MANY)), f"it calls {LINEAR}"),
    "a layer remembered": (
        name(LINEAR) + b"q\x01" + b"0h\x01(" + value(MANY) * 2 + b"tR",
        f"it calls {LINEAR}",
    ),
    "a layer of ours": (
        call("marvin.attention.Attention", value(MANY)),
        r"it calls marvin.attention.Attention",
    ),
    "a layer, by what rebuilds tensors": (
        call(
            "torch._tensor._rebuild_from_type_v2",
            name(LINEAR) + name(LINEAR) + b"(" + value(MANY) * 2 + b"t" + value({}),
        ),
        f"it calls {LINEAR}",
    ),
    "bytes": (call("__builtin__.bytearray", value(MANY)), "it calls builtins.bytearray"),
    "bytes, by their new name": (call("builtins.bytearray", value(MANY)), "builtins.bytearray"),
    "bytes, made empty": (new("builtins.bytearray", value({}), value(MANY)), "NEWOBJ"),
    "a tensor": (call("torch.FloatTensor", value(MANY)), r"it calls torch.FloatTensor"),
    "a tensor, made empty": (new("torch.FloatTensor", value({}), value(MANY)), "NEWOBJ"),
    "a storage": (call("torch.storage.UntypedStorage", value(MANY)), "UntypedStorage"),
    "a tensor, changed": (floats() + b"(" + floats() + b"t" + b"b", "it changes a tensor"),
    "a tensor, cast": (
        call("torch._utils._rebuild_device_tensor_from_cpu_tensor", floats("0", (MANY,), (0,))),
        "it calls torch._utils._rebuild_device_tensor_from_cpu_tensor",
    ),
    "rows": (call("__builtin__.set", floats("0", (MANY,), (0,))), "not iterable"),
    "sizes": (call("torch.Size", floats("0", (MANY,), (0,))), "not iterable"),
    "text": (call("_codecs.encode", value("0"), value("hex_codec")), "it encodes as hex_codec"),
    "a memo": (value(0) + b"r\xff\xff\xff\x0f", "bytes tell of 268435455 values"),
    "layers of a network": (new(LSTM, value(RECURRENT)), f"bytes tell of {MANY} layers"),
    "layers, by a tensor": (
        new(LSTM, b"}" + value("num_layers") + floats() + b"s"),
        "layers",
    ),
    "layers, by pairs": (new(LSTM, value([*RECURRENT.items()])), "it fills a layer from a list"),
}


@pytest.mark.parametrize(("content", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_no_memory_is_taken_that_a_file_does_not_fill(content, message, tmp_path):
    with pytest.raises(Exception, match=message) as caught:
        check_calls(written(content))
    assert type(caught.value) in (pickle.UnpicklingError, TypeError)
    written(content, tmp_path / "x.pt")
    tracemalloc.start()
    for load in (load_frozen, load_tensor):
        with pytest.raises(ExportError, match=r"x\.pt must be a whole file"):
            load(tmp_path / "x.pt")
    assert tracemalloc.get_traced_memory()[1] < MANY / 10
    tracemalloc.stop()


ORDERED = collections.OrderedDict(a=torch.ones(2))
ORDERED.note = 3
WHOLE = [
    {"a": (1, 2.0, None, True, "text", b"bytes", [1 << 200], {3}, 1j)},
    {"counts": collections.Counter("aab"), "ordered": ORDERED},
    [torch.float32, torch.Size([2]), torch.device("cpu"), torch.strided],
    [torch.ones(3, dtype=dtype) for dtype in (torch.int8, torch.bfloat16, torch.uint16)],
    [torch.ones(3, dtype=torch.float8_e4m3fn), torch.ones(0), torch.ones(2, 3).mT],
    nn.Parameter(torch.ones(2), requires_grad=False),
    nn.Linear(2, 2).state_dict(),
]


@pytest.mark.parametrize("content", WHOLE, ids=range(len(WHOLE)))
def test_what_torch_saves_is_taken(content):
    file = io.BytesIO()
    torch.save(content, file)
    check_records(file)
    check_calls(file)


def test_a_parameter_with_attributes_is_taken():
    parameter, file = nn.Parameter(torch.ones(2)), io.BytesIO()
    parameter.note = 3
    torch.save(parameter, file)
    check_calls(file)


def test_frozen_models_of_many_layers_are_taken(tmp_path):
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8)
    own = nn.ModuleDict({"lstm": nn.LSTM(4, 4, 2), "embedding": nn.Embedding(3, 2)})
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)
    model = nn.Sequential(*layers, nn.Unflatten(1, (1, 8)), encoder)
    model = marvin.freeze(marvin.calibrate(model, [torch.randn(4, 3, 8, 8)]))
    model[0].more, model.fmt = own, FixedPoint(8, 3)
    torch.save(model, tmp_path / "x.pt")
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(load_frozen(tmp_path / "x.pt")(x), model(x))


def test_what_the_user_allows_may_be_called(tmp_path):
    model = marvin.freeze(marvin.calibrate(nn.Sequential(nn.Linear(2, 2)), [torch.ones(1, 2)]))
    model.own = Own(3)
    torch.save(model, tmp_path / "x.pt")
    with pytest.raises(ExportError, match="--allow"):
        load_frozen(tmp_path / "x.pt")
    assert load_frozen(tmp_path / "x.pt", [f"{__name__}:Own"]).own.value == 3


def test_the_record_that_torch_takes_is_read():
    """Of two files of one name, by small letters or not, and of two folders."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as records:
        hostile, _ = HOSTILE["a layer"]
        records.writestr("x/DATA.pkl", BEGIN + hostile + END)
        records.writestr("y/data.pkl", BEGIN + value(3) + END)
        records.writestr("x/version", b"3\n")
    with pytest.raises(pickle.UnpicklingError, match="it calls"):
        check_calls(file)


def test_files_of_before_have_no_checksums(tmp_path):
    path = tmp_path / "x.pt"
    torch.save(torch.ones(3), path, _use_new_zipfile_serialization=False)
    with path.open("ab") as file, zipfile.ZipFile(file, "a") as records:
        records.writestr("x", b"")
    with pytest.raises(ExportError, match="it does not begin as a zip file"):
        load_tensor(path)
