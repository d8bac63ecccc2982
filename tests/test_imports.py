"""Which package may import which, and what an import may load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "fixedpoint_kernels": set(),
    "marvin": {"fixedpoint_kernels"},
    "perfmodel": set(),
    "train": {"fixedpoint_kernels", "marvin", "perfmodel"},
}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_downwards_only(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        for line, module in imported(path):
            top = module.partition(".")[0]
            assert top not in MAY_IMPORT or top in MAY_IMPORT[package] | {package}, f"{path}:{line}"
            assert top != "triton" or path.name == "gpu.py", f"{path}:{line}"
            assert top != "qtorch" or path.name == "formats.py", f"{path}:{line}"


@pytest.mark.parametrize("package", ["fixedpoint_kernels", "marvin"])
def test_import_is_light(package):
    heavy = {"triton", "numba", "tensorboard", "matplotlib", "qtorch"}
    code = f"import sys, {package}; print(*{heavy} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert found.stdout.split() == []
