"""Shares inputs out over targets and runs them in another process, which one of them may kill.

The other process writes the name of each input to a file before it runs.
"""

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from benchmarks.fuzz.shares import counts_of

if TYPE_CHECKING:
    from torch import Tensor

_ROOT = Path(__file__).parents[2]
_EXECUTIONS = {"cpu": "cpu", "pytorch": "reference", "interpreter": "gpu"}
_WIDTH = 80  # of the line in the file: always as long, so that nothing of an older one is left


def fuzz(total: int, seed: int, targets: Sequence[str] | None, execution: str) -> dict[str, int]:
    """Try inputs over targets; return how many of each.

    Args:
        total: Inputs; each target gets one at least.
        seed: Of the inputs.
        targets: Their names; None: all that the execution has.
        execution: ``"cpu"``, ``"pytorch"`` or ``"interpreter"``.

    Raises:
        SystemExit: One is wrong; has the line that repeats it.
        ValueError: There is no such target.
    """
    counts = counts_of(total, targets, execution)
    _run(seed, [(name, 0, count) for name, count in counts.items()], execution)
    return counts


def fuzz_one(target: str, seed: int, index: int, execution: str) -> None:
    """Try one input again.

    Raises:
        SystemExit: It is wrong.
        ValueError: There is no such target.
    """
    counts_of(1, [target], execution)
    _run(seed, [(target, index, 1)], execution)


def _run(seed: int, jobs: Sequence[tuple[str, int, int]], execution: str) -> None:
    """Run inputs in another process: targets, first index and count of each."""
    with tempfile.NamedTemporaryFile() as place:
        arguments = [str(argument) for job in jobs for argument in job]
        process = subprocess.run(
            [sys.executable, "-m", __name__, place.name, str(seed), execution, *arguments],
            cwd=_ROOT,
            check=False,
        )
        if process.returncode:
            name, _, came = Path(place.name).read_text().partition("\n")
            if process.returncode < 0:
                came = f"killed by {signal.Signals(-process.returncode).name}"
            flag = "" if execution == "cpu" else f" --{execution}"
            command = f"python -m benchmarks.soak --fuzz-one {name.strip()}{flag}"
            sys.exit(f"{command}: {came or 'ended, see above'}")


def _force(execution: str) -> None:
    """Let tensors of the CPU be computed by another execution."""
    from fixedpoint_kernels import observer, packing, rounding
    from fixedpoint_kernels.division import operators as division
    from fixedpoint_kernels.few_bit import operators as few_bit
    from fixedpoint_kernels.histogram import grid
    from fixedpoint_kernels.products import operators as products

    for module in (division, few_bit, grid, observer, packing, products, rounding):
        package = ".".join(module.__name__.split(".")[:2])
        forced = importlib.import_module(f"{package}.{execution}")
        module.__dict__["kernels_of"] = partial(_forced, module.kernels_of, forced)


def _forced(
    kernels_of: "Callable[[Tensor], ModuleType]", forced: ModuleType, x: "Tensor"
) -> ModuleType:
    return forced if x.is_cpu else kernels_of(x)


def _work(file: str, seed: int, execution: str, jobs: Sequence[tuple[str, int, int]]) -> None:
    """Run inputs in this process; end it with status 1 at the first that is wrong."""
    if execution == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    from benchmarks.fuzz.cases import run_one  # torch and the packages take a while

    _force(_EXECUTIONS[execution])
    warnings.simplefilter("error")
    if execution == "interpreter":  # sums that overflow, as they may
        warnings.filterwarnings("ignore", ".*encountered in", RuntimeWarning, "triton|numpy")
    warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
    place = os.open(file, os.O_WRONLY)
    for target, first, count in jobs:
        begin = time.monotonic()
        for index in range(first, first + count):
            os.pwrite(place, f"{target} {seed} {index}".ljust(_WIDTH).encode(), 0)
            try:
                run_one(target, seed, index)
            except Exception as error:
                message = " ".join(f"{type(error).__name__}: {error}".split())
                os.pwrite(place, b"\n" + message[:700].encode(), _WIDTH)
                sys.exit(1)
        print(f"{target}: {count} in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    _file, _seed, _execution, *_rest = sys.argv[1:]
    _jobs = zip(_rest[::3], map(int, _rest[1::3]), map(int, _rest[2::3]), strict=True)
    _work(_file, int(_seed), _execution, list(_jobs))
