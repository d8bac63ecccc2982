"""Commands read their arguments before they load torch, and have names of their own."""

import importlib.metadata
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from fixedpoint_kernels import forward_save
from fixedpoint_kernels.few_bit.activations import ENTRIES
from marvin.export import arguments
from marvin.export.targets import write
from perfmodel.arguments import Parser, open_closed_output, stop_at_interrupt
from train import commands
from train.config import ACTIVATIONS, DIVISION_METHODS

ROOT = Path(__file__).parents[2]
RUN = """
import runpy, sys
sys.argv[1:] = {words!r}
try:
    runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
except SystemExit as end:
    print("torch" in sys.modules, end.code)
"""
MEASUREMENTS = (
    *("biases", "fine_tuning", "gpu", "hgq2", "logits", "lsq", "ops.forward_save", "paired"),
    *("points", "qdq", "quantize_static", "reproduce", "run", "soak", "speed", "states"),
    *("tasks", "transformers", "welch"),
)
COMMANDS = (
    *(f"train.{name}" for name in (*commands.SCRIPTS, "export")),
    *(f"benchmarks.{name}" for name in MEASUREMENTS),
    *("marvin.export", "perfmodel"),
)


def answer(module, *words):
    """Return the last line that a command prints: whether torch was loaded, and its status."""
    code = RUN.format(words=[*words], module=module)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1], done


@pytest.mark.parametrize("module", COMMANDS)
def test_help_is_printed_before_torch_loads(module):
    last, done = answer(module, "--help")
    assert last == "False 0"
    assert f"usage: python -m {module} " in done.stdout


INTERRUPT = """
import runpy, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name in ("torch", "numpy"):
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
sys.argv[1:] = {words!r}
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "words",
    [
        *([f"train.{name}"] for name in ("alexnet", "demo", "resnet20", "vit")),
        *([f"train.{name}", "run"] for name in ("front", "plot", "table")),
        ["train.export", "run", "--to", "c"],
        ["benchmarks.lsq"],
        ["benchmarks.reproduce", "marvin"],
        ["benchmarks.tasks"],
        ["marvin.export", "net.pt", "--to", "c", "--shape", "3"],
        ["perfmodel", "model", "torch.nn:Identity", "--input", "3"],
    ],
    ids=lambda words: words[0],
)
def test_ctrl_c_is_one_line_while_imports_take_their_time(words):
    code = INTERRUPT.format(module=words[0], words=words[1:])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nstopped\n")


def test_other_errors_keep_their_traceback(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: told.append(error))
    stop_at_interrupt()
    error = ValueError("too few")
    sys.excepthook(ValueError, error, None)
    assert told == [(ValueError, error, None)]


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_closed_output_takes_what_is_printed(name, monkeypatch):
    """``2>&-``: Python has None there, which some code takes for a file."""
    monkeypatch.setattr(sys, name, None)
    Parser("train").parse_args([])
    print("to nowhere", file=getattr(sys, name), flush=True)
    assert not getattr(sys, name).isatty()


def test_an_output_that_is_there_stays():
    before = sys.stdout, sys.stderr
    open_closed_output()
    assert (sys.stdout, sys.stderr) == before


def test_a_log_on_a_full_disk_is_one_line(full):
    done = subprocess.run(
        [sys.executable, "-m", "perfmodel", "tables"],
        cwd=ROOT,
        stdout=full,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    required = "what is printed must go where it can be written, got: No space left on device"
    assert (done.returncode, done.stderr) == (1, f"python -m perfmodel: error: {required}\n")


def test_no_command_is_left_out():
    """Each module that ``python -m`` runs is a command, or is here with the reason why it is none."""
    mains = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for package in ("benchmarks", "fixedpoint_kernels", "marvin", "perfmodel", "train")
        for path in (ROOT / package).rglob("*.py")
        if '\nif __name__ == "__main__":' in path.read_text()
    }
    others = {
        "benchmarks.fuzz.driver",  # benchmarks.soak starts it
        "benchmarks.hgq2_runner",  # another interpreter runs it
        "benchmarks.openvino_runner",  # another interpreter runs it
        "fixedpoint_kernels.few_bit",  # its packages load torch before it begins
        "perfmodel.trial",  # perfmodel.batch starts it
    }
    assert mains == {*COMMANDS, *others}


def test_slips_are_answered_before_torch_loads_with_one_line_and_a_hint():
    last, done = answer("train.resnet20", "--epochs", "0")
    assert last == "False 2"
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith("got 0 (--help tells more)\n")


@pytest.mark.parametrize("module", ["train.vit", "perfmodel", "marvin.export"])
def test_version(module):
    last, done = answer(module, "--version")
    assert last.endswith(" 0")
    assert importlib.metadata.version("marvin-fixedpoint") in done.stdout


def test_targets_of_an_export_are_known_before_they_load():
    assert tuple(sorted(write.TARGETS)) == arguments.TARGETS


def test_flags_know_what_their_packages_know():
    """An activation is one that needs no argument."""
    known = {name: entry.signature.parameters.values() for name, entry in ENTRIES.items()}
    free = {name for name, all_ in known.items() if all(p.default is not p.empty for p in all_)}
    assert set(ACTIVATIONS) == free
    assert len(set(ACTIVATIONS)) == len(ACTIVATIONS)
    assert tuple(forward_save.METHODS) == DIVISION_METHODS


def test_console_commands_exist():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) == {"marvin-train", "marvin-export", "marvin-perf"}
    for place in scripts.values():
        module, name = place.split(":")
        assert callable(getattr(import_module(module), name))


@pytest.mark.parametrize(
    ("command", "words", "module", "rest"),
    [
        ("train", ["vit", "--lr", "1"], "train.vit", ["--lr", "1"]),
        ("export", ["runs/a", "--to", "onnx"], "train.export", ["runs/a", "--to", "onnx"]),
        ("export", [str(ROOT / "README.md")], "marvin.export", [str(ROOT / "README.md")]),
        ("perf", ["runs/a", "--json"], "perfmodel", ["runs/a", "--json"]),
    ],
)
def test_a_console_command_is_another_name_of_a_module(command, words, module, rest, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "argv", [f"marvin-{command}", *words])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(
        commands.runpy, "run_module", lambda name, **_: seen.append((name, sys.argv[1:]))
    )
    getattr(commands, command)()
    assert seen == [(module, rest)]


def test_a_console_command_finds_the_modules_of_the_folder_one_is_in(tmp_path, monkeypatch, capsys):
    """``python -m`` does; a console command's own path begins at the folder of commands."""
    (tmp_path / "nets_of_mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(sys, "argv", ["marvin-perf", "runs/a"])
    found = []
    monkeypatch.setattr(
        commands.runpy, "run_module", lambda *_, **__: found.append(find_spec("nets_of_mine"))
    )
    commands.perf()
    assert found[0] is not None


@pytest.mark.parametrize("words", [["resnet"], [], ["--helpp"]])
def test_a_script_that_is_none_is_one_line(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["marvin-train", *words])
    with pytest.raises(SystemExit) as caught:
        commands.train()
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
