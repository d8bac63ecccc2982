"""``python -m marvin.export MODEL``: a frozen model from a file, whoever trained it."""

import dataclasses
import errno
import json
import os
import re
import shlex
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import marvin
from fixedpoint_kernels import FixedPoint, forward_save
from marvin.export import (
    ExportError,
    describe,
    integer,
    load_frozen,
    nearest_weights,
    onnx,
    packed,
    weight_formats,
)
from marvin.export.__main__ import main
from marvin.export.command import one_line
from marvin.export.frontend.load import load_tensor
from marvin.export.graph.formats import exact_format
from marvin.export.targets import write

ROOT = Path(__file__).parents[3]
# in a file of its own, as a user's would be
NETS = """
from torch import nn


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.relu(self.bn(self.conv(x)) + x)


def resnet():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), Block(4), Block(4),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 3),
    )


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(36, 3, bias=False)

    def forward(self, x, mask=None):
        return self.layer(x if mask is None else x * mask)


def mlp():
    return nn.Sequential(nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, 3))


class Counted(nn.Sequential):
    def get_extra_state(self):
        return {"steps": 5}

    def set_extra_state(self, state):
        pass


def counted():
    return Counted(nn.Linear(36, 12), nn.ReLU(), Counted(nn.Linear(12, 3)))
"""


@pytest.fixture
def nets(tmp_path, monkeypatch):
    """Return the user's module of networks, which can be imported."""
    (tmp_path / "users_nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users_nets", raising=False)
    return __import__("users_nets")


def trained(model, policy="msgd", **options):
    """Train a few steps; return model, optimizer, samples and labels."""
    torch.manual_seed(0)
    if policy == "msgd":
        optimizer = marvin.MSGD(model.named_parameters(), lr=0.05, max_wl=8, lookback=(2, 3))
    else:
        sgd = torch.optim.SGD(model.named_parameters(), lr=0.05)
        optimizer = marvin.Quantized(sgd, marvin.LossBudgetPolicy())
    marvin.quantize_activations(model, optimizer, **options)
    x, y = torch.randn(20, 1, 6, 6), torch.randint(3, (20,))
    x = x.flatten(1) if isinstance(model[0], nn.Linear) else x
    for _ in range(5):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step(loss=loss)
    return model.eval(), optimizer, x, y


@pytest.fixture
def saved(nets, tmp_path):
    """Return the path of a saved frozen network, and what is in it."""

    def do(kind="mlp", policy="msgd", **options):
        model, optimizer, x, y = trained(getattr(nets, kind)(), policy, **options)
        frozen = marvin.freeze(model)
        path = tmp_path / "net.pt"
        torch.save(frozen, path)
        np.save(tmp_path / "x.npy", x.numpy())
        torch.save(x.double(), tmp_path / "x.pt")
        torch.save(y, tmp_path / "y.pt")
        return path, frozen, model, optimizer, x

    return do


def command(folder, *words):
    """Run the command in a process of its own; return what it prints."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    call = [sys.executable, "-m", "marvin.export", *words]
    done = subprocess.run(call, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(*words):
    """Return the one line with which the command ends."""
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    message = str(caught.value.code)
    assert message.startswith("python -m marvin.export: error: ")
    assert "\n" not in message
    return message


def assert_same(network, other):
    assert [op.name for op in network.operations] == [op.name for op in other.operations]
    assert network.values == other.values
    for a, b in zip(network.operations, other.operations, strict=True):
        assert type(a) is type(b)
        for field in dataclasses.fields(a):
            left, right = getattr(a, field.name), getattr(b, field.name)
            same = torch.equal(left, right) if torch.is_tensor(left) else left == right
            assert same, (a.name, field.name)


@pytest.mark.parametrize("policy", ["msgd", "budget"])
@pytest.mark.parametrize("kind", ["mlp", pytest.param("resnet", marks=pytest.mark.slow)])
def test_a_saved_frozen_model_is_exported_and_verified(saved, kind, policy, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    _, frozen, model, optimizer, x = saved(kind, policy)
    inputs = "x.npy" if kind == "mlp" else "x.pt"
    allow = ["--allow", "users_nets:Block"] if kind == "resnet" else []
    for target in ("packed", "onnx"):
        words = "net.pt", "--to", target, "--verify", "--inputs", inputs, "--labels", "y.pt", *allow
        text = command(tmp_path, *words)
        assert "formats of weights: the model's own\n" in text
        assert "formats of activations: the model's own" in text
        assert "verified: " in text
        assert "test accuracy: trained " in text
        assert "(20 samples)" in text
        assert "made up" not in text
    state = packed.load(tmp_path / "net-export/packed/network.safetensors").state_dict()
    want = frozen.state_dict()
    assert state.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0)
    network = describe(frozen, x)
    assert_same(network, describe(model, x, optimizer.formats()))
    assert_same(network, describe(model, x))
    file = str(tmp_path / "net-export/onnx/network.onnx")
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {network.input.name: x.numpy()})
    found = torch.from_numpy(got).double()
    torch.testing.assert_close(found, integer.run(network, x), rtol=0, atol=0)
    if (kind, policy) == ("mlp", "msgd"):  # of which nothing is rounded but in training's words
        torch.testing.assert_close(found, frozen(x).double(), rtol=0, atol=0)


@pytest.mark.parametrize("policy", ["msgd", "budget"])
def test_a_frozen_model_has_the_formats_of_its_weights(saved, policy):
    _, frozen, model, optimizer, _ = saved("resnet", policy)
    formats = dict(optimizer.formats())
    assert weight_formats(frozen) == weight_formats(model) == formats
    assert len({fmt.fl for fmt in formats.values()}) > 1 or policy == "msgd"


def test_formats_of_inputs_are_read_from_a_frozen_model(saved):
    _, frozen, model, _, x = saved()
    found = marvin.export.activation_formats(frozen)
    network = describe(model.eval(), x)
    assert found["0"].input == network.formats()["0.in"]


def test_formats_of_channels_are_in_a_frozen_model(nets):
    model = nets.resnet()
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.0)
    optimizer = marvin.Quantized(sgd, marvin.StaticPolicy(6, 6, per_channel=True))
    marvin.quantize_activations(model, optimizer)
    x = torch.randn(8, 1, 6, 6)
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step(loss=loss)
    model.eval()
    frozen = marvin.freeze(model)
    assert weight_formats(frozen) == dict(optimizer.formats())
    assert_same(describe(frozen, x), describe(model, x, optimizer.formats()))


@pytest.mark.parametrize(
    ("layers", "x"),
    [
        ([nn.Embedding(5, 2)], torch.arange(5)[:, None]),
        ([nn.Conv1d(2, 2, 1), nn.Conv1d(2, 2, 1)], torch.rand(5, 2, 1)),
    ],
)
def test_every_layer_may_be_left_out(layers, x):
    model, name = nn.Sequential(*layers, nn.Flatten(), nn.Linear(2, 2)), f"{len(layers) - 1}.weight"
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.0)
    optimizer = marvin.Quantized(sgd, marvin.StaticPolicy())
    marvin.quantize_activations(model, optimizer, exclude=[name[0]])
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
    left = layers[-1].weight.data
    left.copy_(torch.randint(-99, 99, left.shape) / 64)
    frozen = marvin.freeze(model.eval())
    assert weight_formats(frozen)[name] == exact_format(left)
    assert describe(frozen, x).operations
    left[0, 0] = 2.0**-40
    frozen = marvin.freeze(model)
    with pytest.raises(ExportError, match=rf"32 bits do not hold .*'{name}': FixedPoint\(16, 12"):
        describe(frozen, x)
    assert describe(nearest_weights(frozen, {name: FixedPoint(16, 12)}), x).operations


def test_a_layer_that_carries_no_format_has_the_least_exact_one(saved, tmp_path, capsys):
    path, frozen, *_ = saved(exclude=["2"])
    main([str(path), "--to", "packed", "--inputs", str(tmp_path / "x.npy"), "--verify"])
    found = weight_formats(frozen)["2.weight"]
    text = capsys.readouterr().out
    assert f"formats of weights: the model's own; found from the values: 2.weight {found}\n" in text
    written = packed.load(tmp_path / "net-export/packed/network.safetensors")
    assert written.formats["2.weight"] == found
    assert "0.weight" not in text


@pytest.mark.parametrize(
    ("values", "fmt"),
    [
        ([0.0, 0.0], FixedPoint(2, 0)),
        ([1.0], FixedPoint(2, 0)),
        ([-1.0], FixedPoint(2, 0)),
        ([-2.0, 1.0], FixedPoint(2, 0)),
        ([2.0], FixedPoint(2, -1)),
        ([-2.0, 1.5], FixedPoint(3, 1)),
        ([0.375, -3.0], FixedPoint(6, 3)),
        ([2.0**31, 0.0], FixedPoint(2, -31)),
        ([2.0**30 - 1], FixedPoint(31, 0)),
        ([-(2.0**31), 1.0], FixedPoint(32, 0)),
        ([2.0**32 * 7, 0.0], FixedPoint(5, -31)),
        ([2.0**63], None),
        ([2.0**31, 1.0], None),
        ([2.0**-32], None),
        ([0.1], None),
        ([float("inf")], None),
    ],
)
def test_the_shortest_format_that_holds_values_exactly(values, fmt):
    assert exact_format(torch.tensor(values, dtype=torch.float64)) == fmt


def test_several_targets_in_one_call(saved, tmp_path, capsys):
    path = saved()[0]
    words = str(path), "--inputs", str(tmp_path / "x.npy"), "--labels", str(tmp_path / "y.pt")
    main([*words, "--to", "packed", "--to", "onnx", "--to", "packed", "--verify"])
    said = capsys.readouterr().out
    assert "(20 samples)" in said
    assert said.count("test accuracy: trained") == 1
    assert said.count("verified: ") == 2  # a target that is named twice is written once
    for target in ("packed", "onnx"):
        facts = json.loads((tmp_path / f"net-export/{target}/export.json").read_text())
        assert facts["target"] == target
        assert "equal the integers" in facts["proof"]
    main([*words, "--to", "packed", "--verify", "--samples", "7"])
    said = capsys.readouterr().out
    assert said.count("(7 samples)") == 2
    assert "all 21 outputs of 7 samples" in said
    capsys.readouterr()
    message = refused(*words, "--to", "packed", "--to", "onnx", "--out", tmp_path / "out")
    assert not capsys.readouterr().out  # it is said before anything is computed
    assert message.endswith("--out must be of one target, got 2: packed, onnx")


def test_a_name_that_is_not_utf8_is_verified(saved, tmp_path):
    """ONNX Runtime does not take such paths."""
    _, frozen, _, _, x = saved()
    network, path = describe(frozen, x), tmp_path / os.fsdecode(b"net\xff.onnx")
    onnx.save(network, path)
    write._check_loads(path)
    (got,), _ = write._in_onnx_runtime(network, path, x)
    assert np.array_equal(got.numpy(), integer.run(network, x))


def test_a_full_disk_is_told_with_the_file(saved, tmp_path, monkeypatch):
    path, sync = saved()[0], os.fsync

    def full(handle):
        if "export.json" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    message = refused(path, "--to", "packed", "--inputs", tmp_path / "x.npy")
    assert re.search(r"No space left on device: '.*/export\.json'", message)
    assert not (tmp_path / "net-export/packed").exists()


def test_made_up_samples_are_said_to_be_so(saved, tmp_path, capsys):
    path, *_ = saved()
    out = str(tmp_path / "out")
    main([str(path), "--to", "packed", "--shape", "36", "--out", out])
    text = capsys.readouterr().out
    assert "64 samples are made up, normally distributed: give data with --inputs" in text
    assert "accuracy" not in text
    assert json.loads((tmp_path / "out/export.json").read_text())["activations"] == "trained"


def test_a_frozen_model_without_formats_is_calibrated(nets, tmp_path, capsys):
    model = nets.mlp()
    marvin.prepare(model)
    path = tmp_path / "net.pt"
    torch.save(marvin.freeze(model), path)
    main([str(path), "--to", "packed", "--shape", "36", "--wl", "7", "--verify"])
    text = capsys.readouterr().out
    assert "formats of activations: calibrated" in text
    assert "formats of weights: of 7 bits, the model carries none" in text
    written = packed.load(tmp_path / "net-export/packed/network.safetensors")
    assert {fmt.wl for name, fmt in written.formats.items() if "weight" in name} == {7}


def test_ranges_of_a_frozen_model_are_taken_again(saved, tmp_path, capsys):
    path, model, *_ = saved()
    x = 40 * torch.randn(50, 36)  # more than it was trained on
    torch.save(x, tmp_path / "x.pt")
    words = str(path), "--to", "packed", "--verify", "--inputs", str(tmp_path / "x.pt")
    found = {}
    for flags, origin in (
        ((), "the model's own"),
        (("--recalibrate", "--estimator", "max"), "calibrated"),
    ):
        main([*words, *flags, "--out", str(tmp_path / origin)])
        text = capsys.readouterr().out
        assert f"formats of activations: {origin}" in text
        assert "verified: " in text
        found[origin] = packed.load(tmp_path / origin / "network.safetensors").network
    old, new = (network.formats() for network in found.values())
    assert {name: fmt.wl for name, fmt in old.items()} == {n: f.wl for n, f in new.items()}
    first = next(iter(new))
    assert new[first].max >= x.max() - new[first].lsb > old[first].max
    fixed = marvin.calibrate(model, x.split(64), estimator="max")
    with torch.no_grad():
        torch.testing.assert_close(
            integer.run(found["calibrated"], x), fixed(x).double(), rtol=0, atol=0
        )


@pytest.mark.parametrize("target", ["packed", "c"])
def test_state_that_is_no_tensor_is_left_out_and_named(saved, capsys, target):
    path, frozen, *_ = saved("counted")
    words = [str(path), "--to", target, "--shape", "36", "--allow", "users_nets:Counted"]
    main(words)
    main([*words, "--verify"])
    text = capsys.readouterr().out
    named = "network.safetensors without _extra_state, 2._extra_state, which are no tensors, "
    assert text.count(named) == 2 * (target == "packed")
    with pytest.raises(ExportError, match=r"^_extra_state must be a tensor, got dict: leave"):
        packed.pack_state(frozen.state_dict(), weight_formats(frozen))


def test_a_class_of_the_users_is_refused_by_name_until_it_is_allowed(saved):
    path, *_ = saved("resnet")
    words = path, "--to", "packed", "--shape", "1,6,6"
    message = refused(*words)
    assert "net.pt has classes that are not torch's, users_nets.Block" in message
    assert message.endswith("add --allow users_nets:Block")
    assert isinstance(load_frozen(path, ["users_nets:Block"]), nn.Sequential)


@pytest.mark.parametrize(
    ("allow", "message"),
    [
        ("Block", "a class to allow must be package.module:Class, got 'Block'"),
        ("users_nets:None_such", "--allow users_nets:None_such must be there to be imported"),
        ("no_such_package:Block", "--allow no_such_package:Block must be there to be imported"),
    ],
)
def test_what_cannot_be_allowed_is_one_line(saved, allow, message):
    path, *_ = saved("resnet")
    assert message in refused(path, "--to", "packed", "--shape", "1,6,6", "--allow", allow)


class Hostile:
    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((None,), r"path must be that of a file, got NoneType: write torch\.save"),
        (("net.pt", "nets:Own"), r"got str: write allow=\['nets:Own'\]"),
        (("net.pt", None), r"got NoneType: write allow=\['nets:Own'\]"),
        (("net.pt", [Hostile]), rf"got <class .* in it: write allow=\['{__name__}:Hostile'\]"),
        (("net.pt", [3]), r"got 3 in it: write allow=\['nets:Own'\]"),
    ],
)
def test_what_is_no_path_and_no_list_of_names_is_refused(given, message):
    with pytest.raises(TypeError, match=message):
        load_frozen(*given)


def test_a_small_file_takes_no_large_memory(saved):
    path, *_ = saved()
    with zipfile.ZipFile(path) as records:
        content = {name: records.read(name) for name in records.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as records:
        for name, record in content.items():
            records.writestr(name, record + bytes(1 << 20))
    with pytest.raises(ExportError, match=r"BadZipFile: its \d+ bytes are said to be \d+"):
        load_frozen(path)


def test_no_code_of_a_file_is_run(saved, tmp_path):
    path, frozen, *_ = saved()
    frozen.hostile = Hostile()
    frozen.hostile.path = tmp_path / "made"
    torch.save(frozen, path)
    message = refused(path, "--to", "packed", "--shape", "36")
    assert "posix.mkdir" in message
    with pytest.raises(ExportError, match=r"posix\.mkdir"):
        load_frozen(path)
    torch.save(frozen.hostile, tmp_path / "x.pt")
    del frozen.hostile
    torch.save(frozen, path)
    assert "x.pt must be a whole file" in refused(
        path, "--to", "packed", "--inputs", tmp_path / "x.pt"
    )
    assert not (tmp_path / "made").exists()


WRITE = "write torch.save(marvin.freeze(model), path)"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda frozen, model, optimizer: model, f"got one that is not: {WRITE}"),
        (lambda frozen, model, optimizer: nn.Linear(2, 2), f"got none: {WRITE}"),
        (lambda frozen, model, optimizer: model.state_dict(), f"got OrderedDict: {WRITE}"),
        (lambda frozen, model, optimizer: {"model": 3}, f"got dict: {WRITE}"),
    ],
)
def test_what_is_not_frozen_is_refused(saved, change, message):
    path, frozen, model, optimizer, _ = saved()
    torch.save(change(frozen, model, optimizer), path)
    assert refused(path, "--to", "packed", "--shape", "36").endswith(message)


def test_a_class_of_the_script_itself_cannot_be_imported(saved, monkeypatch):
    path, frozen, *_ = saved()
    monkeypatch.setattr(Hostile, "__module__", "__main__")
    monkeypatch.setattr(Hostile, "__reduce__", object.__reduce__)
    monkeypatch.setattr(sys.modules["__main__"], "Hostile", Hostile, raising=False)
    frozen.other = Hostile()
    torch.save(frozen, path)
    message = refused(path, "--to", "packed", "--shape", "36")
    assert "has Hostile, a class of the script or notebook that wrote it" in message
    assert message.endswith("such as nets.py, and add --allow nets:Hostile")
    nets = types.ModuleType("nets")
    nets.Hostile = type("Hostile", (), {"__module__": "nets"})
    monkeypatch.setitem(sys.modules, "nets", nets)
    assert type(load_frozen(path, ["nets:Hostile"]).other) is nets.Hostile


def test_a_model_that_rounds_otherwise_than_its_state_says_is_refused(saved):
    path, frozen, *_ = saved()
    hook = next(iter(frozen[0]._forward_hooks.values()))
    hook.formats = dataclasses.replace(hook.formats, outputs=FixedPoint(3, 1))
    torch.save(frozen, path)
    message = refused(path, "--to", "packed", "--shape", "36")
    assert (
        "must hold a frozen model: it must round as its state says, got other formats at '0'"
        in (message)
    )
    frozen[0]._forward_hooks.clear()
    torch.save(frozen, path)
    assert "it must round by its formats, got no such hooks at '0'" in refused(
        path, "--to", "packed", "--shape", "36"
    )


def test_damaged_files_end_with_one_line(saved, tmp_path):
    path, *_ = saved()
    whole = path.read_bytes()
    weights = whole.index(load_frozen(path)[0].weight.numpy().tobytes())
    flipped = bytearray(whole)
    flipped[weights + 5] ^= 1
    for content in (b"", b"no model", whole[: len(whole) // 2], bytes(flipped)):
        path.write_bytes(content)
        message = refused(path, "--to", "packed", "--shape", "36")
        assert "net.pt must be a whole file of torch.save" in message or "wrong checksum" in message
    assert "net.pt must be a file, found none" in refused(
        tmp_path / "none" / "net.pt", "--to", "packed", "--shape", "36"
    )
    assert not (tmp_path / "net-export").exists()


def test_the_report_names_defaults_and_what_is_rounded(nets, tmp_path, capsys):
    x = torch.randn(64, 36)
    for model, words in ((nets.Masked(), ""), (nets.mlp(), ": biases rounded here")):
        torch.save(marvin.freeze(marvin.calibrate(model, [x])), tmp_path / "net.pt")
        flags = "--to", "packed", "--shape", "36", "--allow", "users_nets:Masked"
        main([str(tmp_path / "net.pt"), *flags])
        text = capsys.readouterr().out
        (line,) = [line for line in text.splitlines() if line.startswith("outputs differ")]
        assert line.partition(", of up to ")[2].partition(":")[2] == words.removeprefix(":")
        told = "taken at its default: mask=None; a model that is called with another computes"
        assert (told in text) == (not words)


def test_layers_that_multiply_integers_or_keep_less_are_exported(nets, tmp_path):
    model, _, x, _ = trained(nets.mlp())
    plain = describe(marvin.freeze(model), x)
    marvin.integer.convert(model)
    forward_save.convert(model, few_bit=3)
    path, classes = tmp_path / "net.pt", [type(m) for m in model.modules()]
    torch.save(marvin.freeze(model), path)
    main([str(path), "--to", "packed", "--shape", "36"])
    assert (tmp_path / "net-export/packed/network.safetensors").is_file()
    for way in (model.eval(), marvin.freeze(model), load_frozen(path)):
        network = describe(way, x)
        torch.testing.assert_close(integer.run(network, x), integer.run(plain, x), rtol=0, atol=0)
    assert [type(m) for m in model.modules()] == classes


def test_a_calibrated_model_is_not_said_to_be_trained(nets, tmp_path, capsys):
    torch.manual_seed(0)
    path = tmp_path / "net.pt"
    fixed = marvin.calibrate(nets.mlp(), [torch.randn(40, 36)])
    torch.save(marvin.freeze(fixed), path)
    main([str(path), "--to", "packed", "--shape", "36"])
    assert "frozen; formats of activations: the model's own\n" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [">f4", ">f8", "<f4"])
def test_samples_of_any_order_of_bytes(saved, tmp_path, dtype):
    saved()
    array = np.load(tmp_path / "x.npy")
    np.save(tmp_path / "other.npy", array.astype(dtype))
    found = load_tensor(tmp_path / "other.npy").float().numpy()
    np.testing.assert_array_equal(found, array, strict=True)


def test_what_is_no_array_of_numbers_is_named(tmp_path):
    np.save(tmp_path / "names.npy", np.array(["a"]))
    with pytest.raises(ExportError, match=r"a whole file of numpy.save, an array of numbers"):
        load_tensor(tmp_path / "names.npy")


@pytest.mark.parametrize("place", [0, 45])  # of what is compared, and of what ranges are taken of
def test_samples_that_are_no_numbers_are_named(saved, tmp_path, place):
    path, frozen, *_ = saved()
    x = torch.randn(50, 36)
    x[place, 3] = torch.nan
    torch.save(x, tmp_path / "x.pt")
    message = refused(path, "--to", "packed", "--inputs", tmp_path / "x.pt")
    assert message.endswith("the input must be numbers, got NaN: leave such samples out")
    with pytest.raises(ExportError, match="the input must be numbers, got NaN"):
        describe(frozen, x)


def test_samples_that_do_not_fit_are_one_line(saved, tmp_path):
    path, *_ = saved()
    np.save(tmp_path / "whole.npy", np.zeros((4, 36), np.uint8))
    np.savez(tmp_path / "some.npz", x=np.zeros((4, 36), np.float32))
    np.save(tmp_path / "code.npy", np.array([Hostile], object), allow_pickle=True)
    torch.save({"x": 3}, tmp_path / "table.pt")
    (tmp_path / "some.txt").write_text("1 2 3")
    torch.save(torch.zeros(3), tmp_path / "few.pt")
    y = torch.load(tmp_path / "y.pt")
    torch.save(y + 3 - y.max(), tmp_path / "one.pt")
    torch.save(y - 1 - y.min(), tmp_path / "less.pt")
    for words, message in (
        (["--shape", "35"], "the model must take samples of shape (35,), got RuntimeError"),
        (["--inputs", "whole.npy"], "must hold samples as the model takes them, got torch.uint8"),
        (["--inputs", "whole.npy"], "of shape (4, 36): write array.astype('float32')"),
        (
            ["--inputs", "some.npz"],
            "got a file of numpy.savez: write numpy.save('inputs.npy', array)",
        ),
        (["--inputs", "code.npy"], "code.npy must be a whole file"),
        (["--inputs", "table.pt"], "table.pt must hold a tensor, got dict"),
        (["--inputs", "none.npy"], "none.npy must be a file, found none"),
        (["--inputs", "some.txt"], "must be a whole file of numpy.save (.npy), or of torch.save"),
        (["--inputs", "x.pt", "--labels", "few.pt"], "must hold 20 whole numbers, got torch.float"),
        (["--shape", "36", "--labels", "y.pt"], "--labels must be those of --inputs"),
        (["--inputs", "x.pt", "--labels", "one.pt"], "must hold classes, 0 to 2, got 3: the first"),
        (["--inputs", "x.pt", "--labels", "less.pt"], "must hold classes, 0 to 2, got -1: the"),
    ):
        given = [tmp_path / word if "." in word else word for word in words]
        assert message in refused(path, "--to", "packed", *given)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--qdq", "--vnni"],
            "--qdq must come without --vnni and --int4, got --vnni: leave it out",
        ),
        (
            ["--qdq", "--int4"],
            "--qdq must come without --vnni and --int4, got --int4: leave it out",
        ),
        (["--out", "."], ". must be an earlier export or not there: choose another --out"),
        (["--out", "/dev/null/x"], "must be in a folder, got the file /dev/null: choose another"),
        (["--nibbles"], "--nibbles must come with --to c, got --to onnx: leave it out"),
        (["--backend", "Vivado"], "--backend must come with --to hls4ml, got --to onnx: leave it"),
        (["--reuse-factor", "2"], "--reuse-factor must come with --to hls4ml, got --to onnx"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_model_is_read(words, message):
    assert message in refused("nowhere.pt", "--to", "onnx", "--shape", "3", *words)


def test_a_link_that_leads_nowhere_is_refused_before_the_model_is_read(tmp_path):
    (tmp_path / "link").symlink_to("gone")
    words = "--to", "onnx", "--shape", "3", "--out", tmp_path / "link"
    assert "link must be an earlier export or not there" in refused("nowhere.pt", *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "1,x"], "argument --shape: must be sizes of one sample, such as 1,28,28"),
        (["--shape", "0"], "argument --shape: must be sizes of one sample"),
        (["--shape", "3", "--inputs", "x"], "argument --inputs: not allowed with argument --shape"),
        ([], "one of the arguments --inputs --shape is required"),
        (
            ["--shape", "3", "--clock", "0"],
            "argument --clock: must be nanoseconds above 0, got '0'",
        ),
    ],
)
def test_wrong_arguments_are_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["nowhere.pt", "--to", "packed", *words])
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"python -m marvin.export: error: {message}")
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["RUN", "--to", "packed"],
        ["--weights", "last", "--to", "onnx", "RUN"],
        ["--verify", "RUN", "--out=else"],
        ["--int4", "RUN", "--to", "onnx"],
    ],
)
def test_the_folder_of_a_run_is_exported_by_its_trainer(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RUN", "packed", "last"):
        (tmp_path / name).mkdir()
    assert refused(*words).endswith(f"write python -m train.export {shlex.join(words)}")


def test_importing_the_command_loads_no_trainer_and_no_extra():
    code = (
        "import sys, marvin, marvin.export.__main__; "
        "print(*{'train', 'onnx', 'onnxruntime', 'qonnx', 'hls4ml'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert found.stdout.split() == []


def test_a_model_saved_in_train_mode_is_compared_in_eval_mode(nets, tmp_path, capsys):
    """Or comparing would take statistics of the samples, and move the averages that are exported."""
    model, *_ = trained(nets.resnet())
    frozen, path = marvin.freeze(model), tmp_path / "net.pt"
    torch.save(frozen.train(), path)
    allow = "users_nets:Block"
    loaded = load_frozen(path, [allow])
    assert not any(module.training for module in loaded.modules())
    before = loaded.state_dict()
    main([str(path), "--to", "packed", "--shape", "1,6,6", "--allow", allow])
    written = packed.load(tmp_path / "net-export/packed/network.safetensors").state_dict()
    torch.testing.assert_close(written, dict(before), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.bias.data.fill_(torch.nan), "0.bias must hold finite numbers, got 12 of 12"),
        (
            lambda m: m.bias.data[:1].fill_(torch.inf),
            "0.bias must hold finite numbers, got 1 of 12",
        ),
        (
            lambda m: m.weight.data[0].fill_(torch.nan),
            "0.weight must hold finite numbers, got 36 of",
        ),
        (
            lambda m: setattr(m, "weight", nn.Parameter(m.weight.to("meta"), requires_grad=False)),
            "0.weight must have values, got a tensor on the meta device",
        ),
        (lambda m: setattr(m, "bias", None), "0 must have 2 parameters, as many as it carries"),
        (lambda m: m._buffers.pop("fixed_point"), "by in its state, got none of '0'"),
    ],
    ids=["nan", "inf", "weight", "meta", "parameter", "formats"],
)
def test_numbers_that_no_format_has_are_named(saved, change, message):
    path, frozen, *_ = saved()
    change(frozen[0])
    torch.save(frozen, path)
    assert message in refused(path, "--to", "packed", "--shape", "36")


def test_a_name_that_the_terminal_cannot_write_is_refused_with_advice():
    with pytest.raises(SystemExit) as caught, one_line("export"):
        "n\xe9t.pt".encode("ascii")
    assert caught.value.code == (
        "export: error: names must be ones that this system's encoding (ascii) can write, got "
        "'\\xe9': use ASCII letters, or set LC_ALL=C.UTF-8"
    )
