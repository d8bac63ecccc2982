"""Every export is saved by the same two words, to a str or a Path."""

import importlib
from pathlib import Path

import pytest

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
