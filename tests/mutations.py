"""Plant known faults, one at a time, and see whether the tests find them.

python -m tests.mutations [--only PATTERN] [--jobs N] [--markdown FILE] [--list]

A test that passes whatever the code does is worth nothing. ``planted_faults.toml`` lists faults:
a file, the text that is right, the text that is wrong, and the tests that must turn red. This
command copies the tree, plants each fault in the copy, and runs its tests. It ends with status 1
if a test stays green, if a fault does not even run, or if the right text is not in its file
exactly once. The tree itself is never changed.
"""

import argparse
import ast
import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[1]
FAULTS = ROOT / "tests/planted_faults.toml"
FOUND = "found"
TIMEOUT_S = 900
_SERVE = "serve"
_MADE = {"runs", "data", "dist", "build"}  # at the root: what commands make there
# a test that fails so has not seen the fault: the code did not run at all
_BROKEN = re.compile(
    r"^E +(\S*\.)?(SyntaxError|IndentationError|ImportError|ModuleNotFoundError|NameError|"
    r"UnboundLocalError|TypingError|LoweringError|UnsupportedError|CompilationError)\b",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Fault:
    """One entry of the list.

    Args:
        what: The fault in a few words.
        file: Where it is planted, from the root.
        old: The right text; is in the file once.
        new: What is planted in its place.
        tests: Node ids of pytest; each must turn red.
    """

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What one test made of one fault: ``verdict`` is ``FOUND``, or says what happened instead."""

    fault: Fault
    test: str
    verdict: str
    time_s: float


def read_faults(path: Path = FAULTS) -> list[Fault]:
    """Return the faults of a list.

    Raises:
        ValueError: An entry lacks something, or has something else.
    """
    faults = []
    for entry in tomllib.loads(path.read_text()).get("fault", []):
        if sorted(entry) != sorted(Fault.__annotations__) or not entry["tests"]:
            raise ValueError(f"a fault must have {sorted(Fault.__annotations__)}, got {entry}")
        faults.append(Fault(**{**entry, "tests": tuple(entry["tests"])}))
    return faults


def misplaced(faults: Sequence[Fault], root: Path) -> list[str]:
    """Return a line for each fault that cannot be planted in exactly one place."""
    lines = []
    for fault in faults:
        path = root / fault.file
        count = path.read_text().count(fault.old) if path.is_file() else 0
        if count != 1 or fault.old == fault.new:
            lines.append(
                f"{fault.what}: {fault.file} must have the old text once, has it {count} times"
            )
    return lines


def feeds_kernels(root: Path) -> set[Path]:
    """Return the files that Numba compiles from: those that import it, and what these import.

    Numba's cache looks at the file of the function that was called alone. A change in a function
    that was inlined, or in a constant, would be overlooked.
    """
    found: set[Path] = set()
    waiting = [
        p for p in root.rglob("*.py") if re.search(r"^\s*(import|from) numba", p.read_text(), re.M)
    ]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _imported(path, root)
    return found


def _imported(path: Path, root: Path) -> Iterator[Path]:
    """Yield the files below ``root`` that ``path`` imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for module in modules:
            place = root.joinpath(*module.split("."))
            yield from (p for p in (place.with_suffix(".py"), place / "__init__.py") if p.is_file())


class Copy:
    """A copy of the tree, in which faults are planted and taken out again."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.root = folder / "tree"
        self._kernels = folder / "kernels"  # compiled from the right code
        self._of_fault = folder / "kernels-of-fault"
        self._printed = folder / "printed.txt"
        shutil.copytree(source, self.root, ignore=lambda at, names: _left_out(source, at, names))
        for environment in source.glob(".venv*"):
            (self.root / environment.name).symlink_to(environment.resolve())
        self._feeds = feeds_kernels(self.root)
        self._planted = 0
        self._server = subprocess.Popen(
            [sys.executable, __file__, _SERVE],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, tests: Sequence[str], *, kernels: Path | None = None) -> tuple[int, str]:
        """Run tests; return pytest's status, and what it printed."""
        command = ["-q", "-p", "no:cacheprovider", "-x", *tests]
        environment = {"NUMBA_CACHE_DIR": str(kernels or self._kernels)}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps([command, environment, str(self._printed)]) + "\n")
        self._server.stdin.flush()
        status = int(self._server.stdout.readline())
        return status, self._printed.read_text(errors="replace")

    def close(self) -> None:
        """End the process that runs tests."""
        self._server.communicate()

    def look_for(self, fault: Fault) -> Iterator[Outcome]:
        """Plant a fault, run its tests one by one, and take it out."""
        path = self.root / fault.file
        text, times = path.read_text(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
        # Python and Numba know a file by size and time: no two faults may share them
        self._planted += 1
        later = times[1] + 2 * self._planted * 10**9
        kernels = self._of_fault if path in self._feeds else None
        try:
            path.write_text(text.replace(fault.old, fault.new))
            os.utime(path, ns=(later, later))
            for test in fault.tests:
                started = time.perf_counter()
                verdict = _verdict(*self.run([test], kernels=kernels))
                yield Outcome(fault, test, verdict, time.perf_counter() - started)
        finally:
            path.write_text(text)
            os.utime(path, ns=times)
            shutil.rmtree(self._of_fault, ignore_errors=True)


def _left_out(root: Path, folder: str | os.PathLike[str], names: Sequence[str]) -> set[str]:
    """Return what a copy does without: environments and caches, whose names begin with a dot."""
    hidden = {name for name in names if name.startswith(".") or name == "__pycache__"}
    return hidden | (_MADE if Path(folder) == root else set())


def _verdict(status: int, output: str) -> str:
    last = output.strip().splitlines()[-1] if output.strip() else ""
    if status == -1:
        return f"no end after {TIMEOUT_S} s"
    if status == 0:
        return "not found" if " passed" in f" {last}" else f"not run: {last}"
    if status != 1:  # 2 and above: nothing was collected, or not all of it
        return f"no verdict, status {status}: {last}"
    if broken := _BROKEN.search(output):
        return f"does not run: {broken[0][1:].strip()}"
    return FOUND


def serve() -> None:
    """Run pytest for each line that comes in, in a fork that has loaded torch already.

    A line holds pytest's arguments, what is added to the environment, and a file for what is
    printed. What comes back is the status, -1 where there was no end.
    """
    sys.path[0] = os.getcwd()
    for name in ("numpy", "torch", "pytest"):  # no fault is planted in these
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        arguments, environment, printed = json.loads(line)
        child = os.fork()
        if not child:
            _be_pytest(arguments, environment, printed)
        print(_status_of(child), flush=True)


def _be_pytest(arguments: list[str], environment: dict[str, str], printed: str) -> NoReturn:
    os.setsid()  # so that what tests start can be ended with them
    os.environ.update(environment)
    with open(printed, "wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    status = 70
    try:
        status = int(importlib.import_module("pytest").main(arguments))
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _status_of(child: int) -> int:
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def look_for_all(faults: Sequence[Fault], source: Path) -> list[Outcome]:
    """Look for faults one by one in a copy of ``source``, where all their tests are green first.

    Raises:
        RuntimeError: A test is red without any fault.
    """
    outcomes = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-"))
        copy = Copy(source, Path(folder))
        stack.callback(copy.close)
        tests = sorted({test for fault in faults for test in fault.tests})
        status, output = copy.run(tests) if tests else (0, "")
        if status:
            raise RuntimeError(f"all tests must pass before a fault is planted, got\n{output}")
        for fault in faults:
            for outcome in copy.look_for(fault):
                outcomes.append(outcome)
                print(f"{outcome.time_s:6.1f} s  {outcome.verdict:<9}  {fault.what}", flush=True)
    return outcomes


def markdown(outcomes: Sequence[Outcome]) -> str:
    """Return a table of outcomes."""
    rows = [
        f"| {o.fault.what} | `{o.fault.file}` | `{o.test}` | {o.verdict} | {o.time_s:.1f} |"
        for o in outcomes
    ]
    head = ["| fault | planted in | test | verdict | s |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Do what the command line asks; return the status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="regular expression: in fault, file or test"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="copies that work at once (default: 1)"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there, too")
    parser.add_argument("--list", action="store_true", help="show the faults, and plant none")
    parser.add_argument("--faults", type=Path, default=FAULTS, metavar="FILE", help="another list")
    given = parser.parse_args(argv)
    if given.jobs < 1:
        parser.error(f"--jobs must be 1 or more, got {given.jobs}")
    faults = [
        fault
        for fault in read_faults(given.faults)
        if re.search(given.only, " ".join([fault.what, fault.file, *fault.tests]))
    ]
    if given.list:
        print("\n".join(f"{fault.file}: {fault.what}" for fault in faults))
        return 0
    if wrong := misplaced(faults, root):
        print("\n".join(wrong), file=sys.stderr)
        return 1
    return _look(faults, root, given.jobs, given.markdown)


def _look(faults: Sequence[Fault], root: Path, jobs: int, table: Path | None) -> int:
    shares = [faults[i::jobs] for i in range(jobs)]
    try:
        with ThreadPoolExecutor(jobs) as pool:
            parts = pool.map(lambda share: look_for_all(share, root), shares)
            outcomes = [outcome for part in parts for outcome in part]
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    order = {fault: i for i, fault in enumerate(faults)}
    outcomes.sort(key=lambda outcome: order[outcome.fault])
    if table is not None:
        table.write_text(markdown(outcomes))
    missed = [outcome for outcome in outcomes if outcome.verdict != FOUND]
    for outcome in missed:
        print(f"{outcome.verdict}: {outcome.fault.what} ({outcome.fault.file}), {outcome.test}")
    print(f"{len(outcomes) - len(missed)} of {len(outcomes)} found")
    return 1 if missed or not outcomes else 0


if __name__ == "__main__":
    if sys.argv[1:] == [_SERVE]:
        serve()
    else:
        sys.exit(main())
