"""Every export is saved by the same two words, to a str or a Path."""

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn

import marvin
import marvin.export
from marvin.export import packed


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize(
    ("module", "needs"),
    [
        ("packed", "torch"),
        ("c", "torch"),
        ("onnx", "onnx"),
        ("qonnx", "onnx"),
        ("hls4ml", "hls4ml"),
    ],
)
def test_a_network_is_saved(digits, module, needs, kind, tmp_path):
    pytest.importorskip(needs)
    _, network, _ = digits()
    exporter = importlib.import_module(f"marvin.export.{module}")
    path = tmp_path / "new" / "network"
    size = exporter.save(network, kind(path))
    files = [file for file in path.parent.rglob("*") if file.is_file()]
    assert size == sum(file.stat().st_size for file in files) > 1000


@pytest.mark.parametrize(
    "call",
    [
        lambda model, path: marvin.export.packed.save(model, path),
        lambda model, path: marvin.export.c.save(model, path),
        lambda model, path: marvin.export.onnx.save(model, path),
        lambda model, path: marvin.export.qonnx.save(model, path),
        lambda model, path: marvin.export.hls4ml.save(model, path),
        lambda model, _: marvin.export.integer.run(model, torch.ones(2, 4)),
        lambda model, _: marvin.export.verify(model, torch.ones(2, 4)),
        lambda model, _: marvin.export.round_sums(model, torch.ones(2, 4)),
        lambda model, _: marvin.export.exact_module(model),
    ],
    ids=["packed", "c", "onnx", "qonnx", "hls4ml", "run", "verify", "round_sums", "exact_module"],
)
def test_the_network_of_a_model_is_asked_for(call, tmp_path):
    with pytest.raises(TypeError, match=r"got Linear: write network = describe\(model, samples\)"):
        call(nn.Linear(4, 3), tmp_path / "network")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("net", "shape"),
    [(nn.Conv2d(1, 2, 3), (1, 8, 8)), (nn.Conv1d(3, 2, 3), (3, 8)), (nn.Linear(4, 3), (4,))],
    ids=["Conv2d", "Conv1d", "Linear"],
)
def test_one_sample_does_not_pass_for_a_batch(net, shape):
    """Torch's layers take both; the channels of an image would be samples, and the file wrong."""
    sample = torch.randn(shape)
    fixed = marvin.calibrate(nn.Sequential(net, nn.ReLU()), [sample[None]])
    assert marvin.export.describe(fixed, sample[None]).input.shape == shape
    with pytest.raises(marvin.export.ExportError, match=r"counts samples, so write x\[None\]"):
        marvin.export.describe(fixed, sample)
    with pytest.raises(TypeError, match="samples must be a tensor, one batch, got list"):
        marvin.export.describe(fixed, [sample])


@pytest.mark.parametrize("kind", [str, Path])
def test_a_packed_network_has_all_numbers_of_the_network(digits, kind, tmp_path):
    _, network, _ = digits()
    packed.save(network, kind(tmp_path / "net"))
    loaded = packed.load(kind(tmp_path / "net"))
    names = ["weight", "bias", "scale", "offset"]
    want = {
        f"{op.name}.{name}": (getattr(op, name), getattr(op, f"{name}_fmt"))
        for op in network.operations
        for name in names
        if getattr(op, name, None) is not None
    }
    assert loaded.codes.keys() == want.keys()
    assert {name.rpartition(".")[2] for name in want} == set(names)
    for name, (codes, fmt) in want.items():
        assert loaded.codes[name].tolist() == codes.tolist()
        assert loaded.formats[name] == fmt
    assert loaded.activations == network.formats()


def test_modules_keep_their_paths():
    """Whoever writes ``marvin.export.onnx.save`` needs to know of no rooms."""
    for name, own in {
        "c": "write",
        "hls4ml": "write",
        "integer": "run",
        "network": "Conv",
        "onnx": "original",
        "packed": "load",
        "qonnx": "execute",
        "simulate": "simulate",
    }.items():
        module = importlib.import_module(f"marvin.export.{name}")
        assert getattr(module, own) is getattr(getattr(marvin.export, name), own)
    for name in marvin.export.__all__:
        assert hasattr(marvin.export, name)
