"""The examples run, with fewer steps than a user would take."""

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_int8(tmp_path, capsys):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    file = tmp_path / "digits.onnx"
    load("int8").main(steps=100, width=8, path=file)
    trained, written, verdict, ratio = capsys.readouterr().out.splitlines()
    accuracies = [float(re.findall(r"([\d.]+)%", line)[0]) for line in (trained, written)]
    assert min(accuracies) > 80  # 359 images; chance is 10
    assert abs(accuracies[0] - accuracies[1]) < 3  # batch norm and sums in fixed point
    assert verdict == "equal to the integer reference"
    assert f"{file}: {file.stat().st_size:,} bytes" in written
    assert float(re.findall(r"^[\d.]+", ratio)[0]) > 0


def test_microcontroller(tmp_path, capsys):
    if not shutil.which("cc"):
        pytest.skip("cc is not installed")
    file = tmp_path / "digits.c"
    load("microcontroller").main(steps=60, width=8, path=file)
    trained, written, verdict, takes = capsys.readouterr().out.splitlines()
    accuracies = [float(re.findall(r"([\d.]+)%", line)[0]) for line in (trained, written)]
    assert min(accuracies) > 60  # 359 images; chance is 10
    assert abs(accuracies[0] - accuracies[1]) < 4  # batch norm in fixed point
    assert verdict == "equal to the integer reference"
    tables, memory, madds = (int(x.replace(",", "")) for x in re.findall(r"[\d,]*\d", takes))
    assert madds == 8 * 9 * 64 + 16 * 8 * 9 * 16 + 16 * 16 * 9 * 16 + 64 * 10
    assert (72 + 1152 + 2304 + 640) // 2 < tables < 3000
    assert 8 * 64 < memory < 2000
