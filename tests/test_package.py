"""The wheel holds the four packages and the files they read, and works where it is installed."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"fixedpoint_kernels", "marvin", "perfmodel", "train"}
DATA = {
    "fixedpoint_kernels/few_bit/tables.npz",
    "fixedpoint_kernels/llvm/README.md",
    "train/digits.npz",
    "train/digits.md",
    *(f"{package}/py.typed" for package in PACKAGES),  # so type checkers read the hints
}
SMOKE = """
import torch, fixedpoint_kernels, marvin, perfmodel, train.resnet20
assert "{site}" in fixedpoint_kernels.__file__
model = train.resnet20.resnet20(width=4)
optimizer = marvin.MSGD(model.named_parameters())
y = fixedpoint_kernels.few_bit.gelu(model(torch.randn(2, 3, 32, 32)), bits=3)
y.sum().backward()
optimizer.step(loss=1.0)
print(perfmodel.layers(model, (3, 32, 32))[0].madds)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    hatch = pytest.importorskip("hatchling.builders.wheel")
    built = hatch.WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("dist")))
    return Path(next(built))


def test_what_the_wheel_holds(wheel):
    with zipfile.ZipFile(wheel) as files:
        names = {name for name in files.namelist() if ".dist-info/" not in name}
        license_text = [name for name in files.namelist() if name.endswith("LICENSE")]
    assert {name.split("/")[0] for name in names} == PACKAGES
    assert {name for name in names if not name.endswith(".py")} == DATA
    assert license_text


@pytest.mark.slow
def test_the_wheel_works_where_it_is_installed(wheel, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as files:
        files.extractall(site)  # what an installer does with a wheel of pure Python
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SMOKE.format(site=site)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
