"""Packages load their names when they are first used; each name is what it was when all were loaded."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = "marvin", "marvin.export"


def promised(package):
    """Yield the names that a package imports for type checkers, with the module each is from."""
    tree = ast.parse(ROOT.joinpath(*package.split("."), "__init__.py").read_text())
    (block,) = [n for n in tree.body if isinstance(n, ast.If)]
    for node in block.body:
        yield from ((alias.name, node.module) for alias in node.names)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_name_is_what_type_checkers_are_told(package):
    module, found = importlib.import_module(package), dict(promised(package))
    assert set(module.__all__) <= set(found)
    assert set(found) <= set(dir(module))
    for name, home in found.items():
        told = {}
        exec(f"from {home} import {name} as wanted", told)
        assert getattr(module, name) is told["wanted"], name


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import marvin; marvin.MGSD", "AttributeError: module 'marvin' has no attribute 'MGSD'"),
        ("from marvin import MGSD", "ImportError: cannot import name 'MGSD' from 'marvin'"),
        ("import marvin; marvin._x", "AttributeError: module 'marvin' has no attribute '_x'"),
        ("import marvin; getattr(marvin, 'a.b')", "AttributeError: module 'marvin' has"),
        ("import marvin.export as e; e.onyx", "AttributeError: module 'marvin.export' has"),
        ("from marvin.export.onnx import sav", "ImportError: cannot import name 'sav'"),
    ],
)
def test_a_misspelt_name_is_told_plainly(code, error):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines()[-1].startswith(error)


def test_modules_are_attributes_and_nothing_loads_before_it_is_used():
    code = (
        "import sys, marvin, marvin.export; print('torch' in sys.modules); "
        "print(marvin.policies.Rules.__name__, marvin.optimizer.MSGD is marvin.MSGD); "
        "from marvin.export.onnx import save; "
        "print(save is marvin.export.onnx.save, marvin.export.network.Network.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout.split() == b"False Rules True True Network".split()
