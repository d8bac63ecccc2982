"""A bar is shown in a terminal and in a notebook, and not in a log file."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# what tqdm looks at to know that it is in a notebook: a kernel's modules, and widgets to draw with
NOTEBOOK = """
import sys, types
ipython = types.ModuleType("IPython")
ipython.get_ipython = lambda: object()
display = types.ModuleType("IPython.display")
display.display = print
widgets = types.ModuleType("ipywidgets")
widgets.FloatProgress = widgets.HBox = widgets.HTML = object
kernel = types.ModuleType("ipykernel.zmqshell")
for module in (ipython, display, widgets, kernel):
    sys.modules[module.__name__] = module
"""


@pytest.mark.parametrize(
    ("before", "hidden"), [("", "None"), (NOTEBOOK, "False")], ids=["terminal", "notebook"]
)
def test_a_notebook_has_bars(before, hidden):
    """tqdm takes a notebook's output, which is no terminal, for a log file."""
    code = before + "from train.bars import HIDDEN; print(HIDDEN)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == hidden
    assert done.stderr == ""


def test_bars_come_from_one_place():
    for path in (ROOT / "train").glob("*.py"):
        if path.name != "bars.py":
            assert "from tqdm" not in path.read_text(), path.name
