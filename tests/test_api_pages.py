"""Every exported name stands on an API page, with an example that uses it; test_docs runs them."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOTS = "fixedpoint_kernels", "marvin", "marvin.export", "marvin.policies", "perfmodel"
ROOTS += "perfmodel.forward_save", "perfmodel.trace"
ENTRY = re.compile(r"^::: ([\w.]+)$|^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples_of(text):
    """Return the example of each entry: the first block behind it."""
    found, waiting = {}, []
    for entry, code in ENTRY.findall(text):
        if entry:
            waiting.append(entry)
        else:
            found |= dict.fromkeys(waiting, code)
            waiting = []
    return found | dict.fromkeys(waiting, "")


def used(code):
    """Return the names and attributes that a block reads, and those that it imports."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


EXAMPLES = {}
for _page in sorted((ROOT / "docs/api").glob("*.md")):
    EXAMPLES |= examples_of(_page.read_text())


def rooms_of(package):
    """Return a package and the modules that it exports, and that these export."""
    module = importlib.import_module(package)
    inner = [
        f"{package}.{name}" for name in module.__all__ if inspect.ismodule(getattr(module, name))
    ]
    return [package, *(room for name in inner for room in rooms_of(name))]


PACKAGES = [room for root in ROOTS for room in rooms_of(root)]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_has_an_entry(package):
    module = importlib.import_module(package)
    objects = {id(resolved(entry)) for entry in EXAMPLES}
    for rooms in ("functional", "modules"):  # of few_bit: one entry for all activations
        room = getattr(module, rooms, None)
        objects |= {id(value) for value in vars(room).values()} if room else set()
    missing = [
        name
        for name in module.__all__
        if not inspect.ismodule(getattr(module, name)) and id(getattr(module, name)) not in objects
    ]
    assert missing == []


def resolved(entry):
    """Return what an entry names."""
    found = importlib.import_module(entry.partition(".")[0])
    for name in entry.split(".")[1:]:
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("entry", EXAMPLES)
def test_an_example_uses_what_it_is_an_example_of(entry):
    assert entry.rpartition(".")[2] in used(EXAMPLES[entry])


def test_an_example_that_is_missing_is_seen():
    text = "::: a.b\n\n::: a.c\n\n```python\nb.c\n```\n\n::: a.d\n\ntext\n"
    assert examples_of(text) == {"a.b": "b.c\n", "a.c": "b.c\n", "a.d": ""}
    assert used("from a import b\nx = c.d(e)") == {"c", "d", "e"}
