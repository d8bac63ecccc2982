"""Every public function and class says what it raises.

Launchers, references and methods of a contract may say ``See ...`` instead: see CONTRIBUTING.md.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = "fixedpoint_kernels", "marvin", "perfmodel", "train"
CHECKS = re.compile(r"_?(check|checked|refuse|require|validate)(_\w+)?")
BUGS = {"AssertionError", "NotImplementedError"}  # of ours, or of a subclass
CONSTRUCTORS = "__init__", "__new__", "__post_init__", "__init_subclass__"


class Module:
    """The functions and classes of a file, and what it imports by name."""

    def __init__(self, name, code):
        self.name, tree = name, ast.parse(code)
        self.functions, self.imports, self.classes = {}, {}, {}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                self.functions[node.name] = node
            elif isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
                for method in node.body:
                    if isinstance(method, ast.FunctionDef):
                        self.functions[f"{node.name}.{method.name}"] = method
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = node.module, alias.name


class Raises:
    """What a function raises: itself, or through a check or a private function of its file.

    A check is a function that is named so: see ``CHECKS``.
    """

    def __init__(self, modules):
        self.modules = {module.name: module for module in modules}
        self.known = {}

    def of(self, module, name):
        """Return the names of the exceptions."""
        key = module.name, name
        if key not in self.known:
            self.known[key] = set()  # ends a recursion
            self.known[key] = set(self._found(module, name))
        return self.known[key]

    def _found(self, module, name):
        owner = name.rpartition(".")[0]
        for node, caught in walk(module.functions[name]):
            if "Exception" in caught:
                continue
            if isinstance(node, ast.Raise):
                found = raised_by(node.exc, module)
            else:
                where, callee = self._resolve(module, owner, node.func)
                found = self.of(where, callee) if callee else set()
            yield from found - BUGS - caught

    def _resolve(self, module, owner, function):
        """Return module and name of a called check or private function; or no name."""
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            base, name = function.value.id, function.attr
            if base in ("self", "cls"):
                name = f"{owner}.{name}"
            elif base in module.imports:  # from package import module
                package, sub = module.imports[base]
                module = self.modules.get(f"{package}.{sub}", module)
        elif isinstance(function, ast.Name):
            name = function.id
        else:
            return module, None
        last = name.rpartition(".")[2]
        if name in module.imports and CHECKS.fullmatch(last):
            source, name = module.imports[name]
            module = self.modules.get(source, module)
        is_followed = last.startswith("_") or CHECKS.fullmatch(last)
        return module, name if is_followed and name in module.functions else None


def walk(function):
    """Yield raises and calls, each with the exceptions that are caught around it."""
    todo = [(node, frozenset()) for node in function.body]
    while todo:
        node, caught = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.Raise | ast.Call):
            yield node, caught
        inner = caught | caught_by(node)
        for field, value in ast.iter_fields(node):
            own = inner if field == "body" else caught
            children = value if isinstance(value, list) else [value]
            todo += [(child, own) for child in children if isinstance(child, ast.AST)]


def caught_by(node):
    """Return the exceptions that do not leave the body of a ``try`` or ``with``."""
    if isinstance(node, ast.With):
        is_command = any("one_line(" in ast.unparse(item) for item in node.items)
        return {"ExportError", "UserError"} if is_command else set()  # it ends the process
    if not isinstance(node, ast.Try):
        return set()
    types = [n for h in node.handlers if h.type for n in ast.walk(h.type)]
    return {getattr(n, "attr", getattr(n, "id", "")) for n in types}


def raised_by(error, module):
    """Return the exception that a ``raise`` makes, if it makes one, in a set."""
    if isinstance(error, ast.Call):
        error = error.func
    name = getattr(error, "attr", getattr(error, "id", ""))
    if name in module.functions:  # a function that words the error
        name = ast.unparse(module.functions[name].returns)
    return {name} if name[:1].isupper() else set()


def refers(node):
    """Return whether a docstring sends the reader to another."""
    return (ast.get_docstring(node) or "").startswith(("See ``", "As ``"))


def documented(node):
    """Return the exceptions of the docstring's section ``Raises:``."""
    section = re.search(
        r"^Raises:\n((?:[ \t]+.*\n|\n)*)", (ast.get_docstring(node) or "") + "\n", re.MULTILINE
    )
    heads = re.findall(r"^    ([\w., ]+):", section[1], re.MULTILINE) if section else []
    return {name.strip().rpartition(".")[2] for head in heads for name in head.split(",")}


def silent(modules):
    """Yield each public function and class with the exceptions that it does not name."""
    raises = Raises(modules)
    for module in modules:
        for name, node in module.functions.items():
            if not any(part.startswith("_") for part in name.split(".")) and not refers(node):
                yield f"{module.name}.{name}", raises.of(module, name) - documented(node)
        for name, node in module.classes.items():
            if not name.startswith("_"):
                made = [f"{name}.{c}" for c in CONSTRUCTORS if f"{name}.{c}" in module.functions]
                found = set().union(*(raises.of(module, constructor) for constructor in made))
                yield f"{module.name}.{name}", found - documented(node)


def modules_of_the_packages():
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            yield Module(name, path.read_text())


def test_public_names_say_what_they_raise():
    found = dict(silent([*modules_of_the_packages()]))
    assert len(found) > 500
    assert {name: sorted(missing) for name, missing in found.items() if missing} == {}


@pytest.mark.parametrize(
    "code",
    [
        "def f():\n    raise ValueError('x')",
        "def f():\n    'Do.'\n    if True:\n        raise ValueError",
        "def f():\n    _other()\ndef _other():\n    raise ValueError('x')",
        "def f():\n    _other()\ndef _other():\n    _more()\ndef _more():\n    raise ValueError",
        "from a import check_x\ndef f():\n    check_x()",
        "from a import check_x as _check\ndef f():\n    _check()",
        "import a\nfrom b import a\ndef f():\n    a.check_x()",
        "class f:\n    def __init__(self):\n        raise ValueError",
        "class f:\n    def __post_init__(self):\n        self._check()\n"
        "    def _check(self):\n        raise ValueError",
        "def f():\n    try:\n        g()\n    except TypeError:\n        raise ValueError",
        "def _error() -> ValueError: ...\ndef f():\n    raise _error()",
        "def f():\n    '''Do.\n\n    Raises:\n        TypeError: Never.\n    '''\n    raise ValueError",
    ],
)
def test_an_exception_is_seen_however_it_is_raised(code):
    check = Module("b.a", "def check_x():\n    raise ValueError\n")
    elsewhere = Module("a", "from b.a import check_x\ndef check_x():\n    raise ValueError\n")
    found = dict(silent([Module("m", code), check, elsewhere]))
    assert found["m.f"] == {"ValueError"}


@pytest.mark.parametrize(
    "code",
    [
        "def f():\n    '''Do.\n\n    Raises:\n        ValueError: Always.\n    '''\n    raise ValueError",
        "def f():\n    '''Do.\n\n    Raises:\n        TypeError, ValueError: x.\n    '''\n"
        "    raise ValueError",
        "def f():\n    '''See ``g``.'''\n    raise ValueError",
        "def f():\n    try:\n        raise ValueError\n    except ValueError:\n        pass",
        "def f():\n    try:\n        raise ValueError\n    except Exception:\n        pass",
        "def f():\n    raise NotImplementedError",
        "def f():\n    def inner():\n        raise ValueError\n    return inner",
        "def f():\n    try:\n        g()\n    except OSError:\n        raise",
    ],
)
def test_what_a_caller_does_not_meet_need_not_be_said(code):
    assert dict(silent([Module("m", code)])).get("m.f", set()) == set()
