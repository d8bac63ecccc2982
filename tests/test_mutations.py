"""The list of planted faults is up to date, and the command that plants them sees."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from fixedpoint_kernels.products import paths

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("mutations", ROOT / "tests/mutations.py")
assert spec is not None
assert spec.loader is not None
mutations = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = mutations
spec.loader.exec_module(mutations)

TREE = {
    "double.py": "def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n",
    "inner.py": "from numba import njit\n\nSTEP = 3\n\n\n@njit\ndef up(x):\n    return x + STEP\n",
    "outer.py": """
from numba import njit

from inner import up


@njit(cache=True)
def twice_up(x):
    return up(up(x))
""",
    "tests/test_it.py": """
from double import double


def test_double():
    assert double(3) == 6


def test_kernel():
    from outer import twice_up

    assert twice_up(1) == 7


def test_sleeps():
    import pytest

    pytest.skip("nothing to see")
""",
}
FAULT = """
[[fault]]
what = "{what}"
file = "{file}"
old = '{old}'
new = '{new}'
tests = ["tests/test_it.py::{test}"]
"""


@pytest.fixture
def tree(tmp_path):
    for name, text in TREE.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "source"


def look_for(tree, *entries, options=()):
    """Return the command's status and table; each entry is fault, file, old, new and test."""
    keys = "what", "file", "old", "new", "test"
    faults = tree.parent / "faults.toml"
    faults.write_text("".join(FAULT.format(**dict(zip(keys, e, strict=True))) for e in entries))
    table = tree.parent / "table.md"
    status = mutations.main(["--faults", str(faults), "--markdown", str(table), *options], tree)
    return status, table.read_text() if table.exists() else ""


def test_every_fault_can_be_planted():
    faults = mutations.read_faults()
    assert len({fault.what for fault in faults}) == len(faults) >= 60
    assert mutations.misplaced(faults, ROOT) == []


def test_tests_that_are_named_exist_on_every_processor_with_own_kernels():
    elsewhere = [name for name in paths.OWN if name != "avx2"]
    named = [test for fault in mutations.read_faults() for test in fault.tests]
    assert [test for test in named if any(path in test for path in elsewhere)] == []


@pytest.mark.slow
def test_every_test_that_is_named_exists():
    names = sorted({test for fault in mutations.read_faults() for test in fault.tests})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *names]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-2000:]


ENTRIES = {
    # what is planted, and what must come of it
    ("twice is thrice", "double.py", "2 * x", "3 * x", "test_double"): "found",
    ("x + x is 2 * x", "double.py", "2 * x", "x + x", "test_double"): "not found",
    # of one size, and in what is inlined: numba's cache would give the kernel of before
    ("up goes down", "inner.py", "x + STEP", "x - STEP", "test_kernel"): "found",
    ("a + b is b + a", "inner.py", "x + STEP", "STEP + x", "test_kernel"): "not found",
    ("steps of 4", "inner.py", "STEP = 3", "STEP = 4", "test_kernel"): "found",
    # these prove nothing
    ("syntax", "double.py", "2 * x", "2 *", "test_double"): "no verdict, status",
    ("name", "double.py", "2 * x", "2 * y", "test_double"): "does not run: NameError",
    ("kernel", "inner.py", "x + STEP", "x + STOP", "test_kernel"): "does not run: ",
    ("skipped", "double.py", "2 * x", "3 * x", "test_sleeps"): "not run: 1 skipped",
}


@pytest.mark.slow
def test_faults_are_found_and_what_is_none_is_not(tree, capsys):
    status, table = look_for(tree, *ENTRIES, options=["--jobs", "2"])
    assert status == 1
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    for row, (entry, verdict) in zip(rows, ENTRIES.items(), strict=True):
        assert row[0] == entry[0]
        assert row[3].startswith(verdict), row
    printed = capsys.readouterr().out
    assert "not found: x + x is 2 * x (double.py), tests/test_it.py::test_double" in printed
    assert printed.endswith("3 of 9 found\n")
    assert all((tree / name).read_text() == text for name, text in TREE.items())


def test_all_found_is_status_0(tree):
    fault = next(entry for entry, verdict in ENTRIES.items() if verdict == "found")
    status, table = look_for(tree, fault)
    assert status == 0
    assert "| twice is thrice | `double.py` | `tests/test_it.py::test_double` | found |" in table


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (("gone", "double.py", "4 * x", "3 * x", "test_double"), "has it 0 times"),
        (("twice", "double.py", "return", "raise", "test_double"), "has it 2 times"),
        (("no file", "triple.py", "2 * x", "3 * x", "test_double"), "has it 0 times"),
        (("red", "double.py", "x / 2", "x / 3", "test_gone"), "all tests must pass before"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_list_that_is_out_of_date_is_refused(tree, capsys, entry, message):
    status, table = look_for(tree, entry)
    assert (status, table) == (1, "")
    assert message in capsys.readouterr().err


def test_some_are_chosen_and_listed(tree, capsys):
    entries = [(what, "double.py", "2 * x", "3 * x", "test_double") for what in ("one", "two")]
    status, _ = look_for(tree, *entries, options=["--only", "tw.$|^two", "--list"])
    assert status == 0
    assert capsys.readouterr().out == "double.py: two\n"


def test_an_entry_that_lacks_something_is_refused(tmp_path):
    path = tmp_path / "faults.toml"
    path.write_text('[[fault]]\nwhat = "nothing"\n')
    with pytest.raises(ValueError, match="a fault must have"):
        mutations.read_faults(path)
