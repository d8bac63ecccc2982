"""Which package and module may import which, and what an import may load."""

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
            has_llvm = path.parent.name == "llvm" or path.name in ("cpu.py", "paths.py")
            assert top != "llvmlite" or has_llvm, f"{path}:{line}"


def module_of(path):
    """Return the name under which a file of the tree is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def graph_of(codes):
    """Return the modules each module imports, also in functions and for types alone, and the packages that come with them."""
    graph = {}
    for name, code in codes.items():
        found = graph[name] = set()
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names} & set(codes)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    found |= {full if full in codes else node.module} & set(codes)
        packages = {
            ".".join(own.split(".")[:n]) for own in found for n in range(1, own.count(".") + 1)
        }
        found |= {own for own in packages & set(codes) if not f"{name}.".startswith(f"{own}.")}
        found.discard(name)
    return graph


def circle_in(graph):
    """Return the modules of a circle, in the order in which they import each other; or none."""
    done, path = set(), []

    def walk(module):
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        path.append(module)
        for other in sorted(graph[module]):
            if circle := walk(other):
                return circle
        done.add(path.pop())
        return []

    return next(filter(None, map(walk, sorted(graph))), [])


def test_no_imports_go_in_a_circle():
    paths = [path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]
    graph = graph_of({module_of(path): path.read_text() for path in paths})
    assert "fixedpoint_kernels.watch" in graph["perfmodel.saving"]
    assert circle_in(graph) == []


@pytest.mark.parametrize(
    "code",
    [
        "import a.b",
        "from a import b",
        "from a.b import name",
        "def f():\n    from a import b",
        "if TYPE_CHECKING:\n    from a.b import name",
    ],
)
def test_a_circle_is_named(code):
    codes = {"a": "", "a.b": "from a import c", "a.c": "import a.d", "a.d": code}
    assert circle_in(graph_of(codes)) == ["a.b", "a.c", "a.d"]
    assert circle_in(graph_of(codes | {"a.c": ""})) == []


def test_a_circle_through_a_package_is_named():
    codes = {
        "a": "",
        "a.b": "from a.c.d import e",
        "a.c": "from a.c.f import g",
        "a.c.d": "",
        "a.c.f": "import a.b",
    }
    assert circle_in(graph_of(codes)) == ["a.b", "a.c", "a.c.f"]


@pytest.mark.parametrize("package", ["fixedpoint_kernels", "marvin"])
def test_import_is_light(package):
    heavy = {"triton", "numba", "tensorboard", "matplotlib", "qtorch"}
    code = f"import sys, {package}; print(*{heavy} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert found.stdout.split() == []


def test_a_second_import_in_one_process_says_what_to_do():
    code = """if True:
        import sys
        import fixedpoint_kernels
        for name in [n for n in sys.modules if n.partition(".")[0] == "fixedpoint_kernels"]:
            del sys.modules[name]
        import fixedpoint_kernels
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: fixedpoint_kernels must be imported once in a process")
    assert last.endswith("restart Python, or the kernel of the notebook")


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
