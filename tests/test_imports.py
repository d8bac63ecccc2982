"""Which package may import which, and what an import may load."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "fixedpoint_kernels": set(),
    "marvin": {"fixedpoint_kernels"},
    "perfmodel": {"fixedpoint_kernels"},
    "train": {"fixedpoint_kernels", "marvin", "perfmodel"},
}
# functions that import what a string names
IMPORTERS = {"__import__", "find_spec", "import_module", "run_module", "run_path"}
MODULE = re.compile(rf"({'|'.join(MAY_IMPORT)})(\.\w+)*\.?")


def imported(code):
    """Yield line and module of each import: statements, calls, and strings that name a module."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.Call) and name_of(node.func) in IMPORTERS:
            texts = [text_of(argument) for argument in (*node.args, *by_keyword(node))]
            yield from ((node.lineno, text.replace("/", ".")) for text in texts if text)
        elif (text := text_of(node)) and MODULE.fullmatch(text) and "." in text:
            yield node.lineno, text


def name_of(function):
    return getattr(function, "attr", getattr(function, "id", ""))


def by_keyword(call):
    return [keyword.value for keyword in call.keywords]


def text_of(node):
    """Return a string's text; of an f-string or a sum of strings, what it begins with."""
    if isinstance(node, ast.JoinedStr):
        return text_of(node.values[0]) if node.values else ""
    if isinstance(node, ast.BinOp):
        return text_of(node.left)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def upward(package):
    """Yield file, line and module of each import that points the wrong way."""
    for path in sorted((ROOT / package).rglob("*.py")):
        for line, module in imported(path.read_text()):
            top = module.partition(".")[0]
            if top in MAY_IMPORT and top not in MAY_IMPORT[package] | {package}:
                yield path.relative_to(ROOT).as_posix(), line, top


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_downwards_only(package):
    assert list((ROOT / package).rglob("*.py"))
    assert list(upward(package)) == []


@pytest.mark.parametrize(
    "code",
    [
        "import train",
        "from train.config import Config",
        "importlib.import_module('train.records')",
        "import_module(f'train.{name}')",
        "import_module(name='train.' + name)",
        "__import__('train')",
        "importlib.util.find_spec('train')",
        "runpy.run_module('train.main')",
        "runpy.run_path('train/main.py')",
        "MODULES = {'resnet20': 'train.resnet20'}",
        "NAMES = [f'train.{name}' for name in names]",
    ],
)
def test_an_import_is_seen_however_it_is_written(code):
    assert "train" in {module.partition(".")[0] for _, module in imported(code)}


@pytest.mark.parametrize("code", ["'''Used by train.'''", "folder / 'train'", "model.train(True)"])
def test_what_is_no_import_is_left_alone(code):
    assert list(imported(code)) == []


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_compilers_and_extras_have_their_places(package):
    for path in sorted((ROOT / package).rglob("*.py")):
        for line, module in imported(path.read_text()):
            top = module.partition(".")[0]
            assert top != "triton" or path.name == "gpu.py", f"{path}:{line}"
            assert top != "qtorch" or path.name == "formats.py", f"{path}:{line}"


@pytest.mark.parametrize("package", ["fixedpoint_kernels", "marvin"])
def test_import_is_light(package):
    heavy = {"triton", "numba", "tensorboard", "matplotlib", "qtorch"}
    code = f"import sys, {package}; print(*{heavy} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert found.stdout.split() == []


def test_no_circles_in_marvin():
    """Statements inside of functions and for type checkers count too."""
    paths = [p for p in (ROOT / "marvin").rglob("*.py") if "export" not in p.parts]
    names = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
        for p in paths
    }
    graph = {}
    for name, path in names.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                found |= {one if one in names else node.module for one in whole}
        graph[name] = found & set(names) - {name}
    assert len(graph) > 30
    graphlib.TopologicalSorter(graph).prepare()  # a circle raises, and is named
