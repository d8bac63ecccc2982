"""Kill, starve and damage training runs, and check that nothing is lost.

    python -m benchmarks.soak --kills 50 --damages 300

A run is killed (SIGKILL) at random instants, half of the time while a checkpoint is being
written, and resumed each time; it must end as a run that was never stopped, bit for bit. Then a
run that may write no more (as on a full disk), and damaged checkpoints: each must be refused with
one line that names the file, or be whole. Ends with status 1 at the first that is not.

    python -m benchmarks.soak --fuzz 1000000

Made-up inputs for all that computes, compared with an oracle that shares no code with the packages
(``benchmarks/fuzz``). Ends with status 1 at the first wrong one, with the line that repeats it.
"""

from perfmodel.arguments import Parser, stop_at_interrupt, whole

PARSER = Parser("python -m benchmarks.soak", (__doc__ or "").partition("\n")[0])
PARSER.add_argument("--kills", type=whole(0), default=50)
PARSER.add_argument("--damages", type=whole(0), default=300, help="of a checkpoint, three kinds")
PARSER.add_argument("--full-disks", type=whole(0), default=3, help="of different sizes")
PARSER.add_argument("--seed", type=whole(0), default=0)
PARSER.add_argument("--fuzz", type=whole(1), metavar="N", help="inputs, instead of the above")
PARSER.add_argument(
    "--fuzz-one", nargs=3, metavar=("TARGET", "SEED", "INDEX"), help="repeat one input"
)
PARSER.add_argument("--targets", nargs="+", help="of --fuzz; default: all")
WHICH = PARSER.add_mutually_exclusive_group()
WHICH.add_argument("--interpreter", action="store_true", help="Triton's, for CPU tensors")
WHICH.add_argument("--pytorch", action="store_true", help="plain PyTorch, for CPU tensors")

if __name__ == "__main__":  # --help and slips are answered before torch loads
    stop_at_interrupt()
    PARSER.parse_args()

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.fuzz.driver import fuzz, fuzz_one
from train.errors import UserError
from train.records import RunFolder

ROOT = Path(__file__).parent.parent
FLAGS = """--dataset digits --width 4 --limit 120 --batch-size 8 --epochs 3 --lr 0.02
--checkpoint-steps 2 --lookback 5 9 --device cpu"""
SAME = "metrics.csv", "trace.csv", "layers.csv", "result.json"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    arguments = PARSER.parse_args(argv)
    if arguments.fuzz is not None or arguments.fuzz_one:
        try:
            run_fuzz(arguments)
        except ValueError as error:
            PARSER.exit(2, f"{PARSER.prog}: {error}\n")
        return
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        begin = time.monotonic()
        code, errors = finish(start(folder / "whole"))
        if code:
            sys.exit(f"the run that is not stopped failed: {errors}")
        whole_s = time.monotonic() - begin
        counts = kill(folder, whole_s, arguments.kills, chance)
        counts |= starve(folder, arguments.full_disks, chance)
        counts |= damage(folder / "whole", arguments.damages, chance)
    print(json.dumps({"seed": arguments.seed, **counts}, indent=2))


def run_fuzz(arguments: argparse.Namespace) -> None:
    """Try made-up inputs and print how many, or end the process at one that is wrong."""
    execution = "interpreter" if arguments.interpreter else "cpu"
    execution = "pytorch" if arguments.pytorch else execution
    if arguments.fuzz_one:
        target, seed, index = arguments.fuzz_one
        fuzz_one(target, int(seed), int(index), execution)
        return
    begin = time.monotonic()
    counts = fuzz(arguments.fuzz, arguments.seed, arguments.targets, execution)
    took = {"execution": execution, "time_s": round(time.monotonic() - begin)}
    print(json.dumps({"seed": arguments.seed, **took, "inputs": counts}, indent=2))


def start(run: Path, limit_bytes: int | None = None) -> subprocess.Popen[str]:
    """Start a small run, which resumes where there is one."""
    resume = ["--resume"] if (run / "config.json").exists() else []
    command = [sys.executable, "-m", "train.resnet20", "--run", str(run), *FLAGS.split()]

    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))

    return subprocess.Popen(
        [*command, *resume],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the status of a run at its end, and what it wrote to standard error."""
    _, errors = process.communicate()
    return process.returncode, errors


def kill(folder: Path, whole_s: float, kills: int, chance: random.Random) -> dict[str, int]:
    """Kill and resume until there were so many kills and the last run has ended."""
    counts = Counter[str]()
    while counts["kills"] < kills:
        run = folder / f"killed{counts['runs that ended equal']}"
        ended = False
        while not ended:
            process = start(run)
            in_write = chance.random() < 0.5
            if counts["kills"] < kills:
                wait(process, run, in_write, chance.uniform(0, whole_s))
                process.kill()
            code, errors = finish(process)
            ended = code == 0
            if not ended:
                if code != -signal.SIGKILL:
                    sys.exit(f"a resumed run failed: {errors}")
                counts["kills"] += 1
                counts["kills with a file half written"] += bool(half_written(run))
        check_same(run, folder / "whole")
        counts["runs that ended equal"] += 1
    return dict(counts)


def wait(process: subprocess.Popen[str], run: Path, in_write: bool, seconds: float) -> None:
    """Wait a while, and then for a file that is half written if ``in_write``."""
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.001)
    while in_write and process.poll() is None and not half_written(run):
        pass


def half_written(run: Path) -> list[Path]:
    """Return the temporary files that a kill left, or that are being written."""
    return list(run.glob(".*.tmp"))


def check_same(run: Path, whole: Path) -> None:
    """End the process unless two runs have the same bits."""
    for name in SAME:
        if (run / name).read_bytes() != (whole / name).read_bytes():
            sys.exit(f"{name} differs from that of the run that was never stopped")
    mine, theirs = RunFolder(run).load_checkpoint(), RunFolder(whole).load_checkpoint()
    if not is_same(mine, theirs):
        sys.exit("the last checkpoint differs from that of the run that was never stopped")


def is_same(a: Any, b: Any) -> bool:
    """Say whether two states are equal, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(is_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(is_same, a, b))
    return repr(a) == repr(b)  # NaN too


def starve(folder: Path, disks: int, chance: random.Random) -> dict[str, int]:
    """Forbid files above sizes below a checkpoint's, then resume without the limit."""
    full = (folder / "whole/checkpoint.pt").stat().st_size
    limits = [full // 2, full - 1, 1000, *(chance.randrange(1000, full) for _ in range(disks))]
    limits = limits[:disks]
    for i, limit_bytes in enumerate(limits):
        run = folder / f"starved{i}"
        code, errors = finish(start(run, limit_bytes=limit_bytes))
        if code != 1 or "File too large" not in errors:
            sys.exit(f"a run that may not write must say so, got {code}: {errors}")
        if half_written(run):
            sys.exit("a run that may not write left a file half written")
        code, errors = finish(start(run))
        if code:
            sys.exit(f"a run that could not write did not go on: {errors}")
        check_same(run, folder / "whole")
    return {"disks full": len(limits)}


def damage(whole: Path, damages: int, chance: random.Random) -> dict[str, int]:
    """Load checkpoints that are cut, have a bit flipped, or are something else."""
    content = (whole / "checkpoint.pt").read_bytes()
    state = RunFolder(whole).load_checkpoint()
    kinds: list[Callable[[], bytes]] = [
        lambda: content[: chance.randrange(len(content))],
        lambda: flipped(content, chance.randrange(8 * len(content))),
        lambda: chance.randbytes(chance.randrange(1000)),
    ]
    counts = Counter[str]({"damaged checkpoints": damages})
    run = RunFolder(whole.parent / "damaged")
    shutil.copytree(whole, run.path)
    for i in range(damages):
        run.checkpoint.write_bytes(kinds[i % len(kinds)]())
        try:
            loaded = run.load_checkpoint()
        except UserError as error:
            if str(run.checkpoint) not in str(error):
                sys.exit(f"the message must name the file, got {error}")
            counts["of these refused by name"] += 1
            continue
        if not is_same(loaded, state):
            sys.exit("a damaged checkpoint was loaded as if it were whole")
        counts["of these whole, the bit being of no value's"] += 1
    return dict(counts)


def flipped(content: bytes, bit: int) -> bytes:
    """Return ``content`` with one bit flipped."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


if __name__ == "__main__":
    main()
