"""What the two commands of an export share: their flags, what they print and what they write.

``python -m marvin.export`` takes a frozen model, ``python -m train.export`` the folder of a run.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import torch

from marvin.export.deployed import Deployed, Options
from marvin.export.report import Trained, layer_rows, proof_lines, table, weight_line
from marvin.export.targets.hls4ml import Hardware
from marvin.export.targets.write import TARGETS, Order, Written
from marvin.files import new_folder

__all__ = ["Parser", "export", "one_line", "options"]


class Parser(argparse.ArgumentParser):
    """A parser of which a flag must be written out, and whose errors are one line.

    Args:
        prog: The command.
        description: What it does.
    """

    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument("--version", action="version", version=_version())

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        self.exit(2, f"{self.prog}: error: {message} (--help tells more)\n")

    def add_flags(self, out: str) -> None:
        """Add the flags of every export; ``out`` is what it writes by default."""
        add = self.add_argument
        add("--to", choices=sorted(TARGETS), required=True, help="what to write")
        add("--verify", action="store_true", help="run what was written, and compare")
        add("--out", type=Path, metavar="DIR", help=f"default: {out}")
        add(
            "--wl",
            type=_whole(2, 32),
            default=8,
            help="bits of formats that training left open (default: 8)",
        )
        add(
            "--scale-wl",
            type=_whole(2, 32),
            default=16,
            help="bits of batch norm's scale (default: 16)",
        )
        add(
            "--sums-wl",
            type=_whole(2, 32),
            help="bits of what is added, calibrated; ONNX needs 8 to be fast (default: exact sums)",
        )
        add(
            "--vnni",
            action="store_true",
            help="of onnx: 8-bit weights as int8, fast on processors with VNNI, wrong without",
        )
        add(
            "--int4",
            action="store_true",
            help="of onnx: weights of up to 4 bits take 4 bits each; ONNX Runtime 1.20 or later",
        )
        add(
            "--samples",
            type=_whole(0, 10**9),
            default=0,
            help="samples to verify on (default: all; of the slow qonnx and hls4ml, 8)",
        )
        add(
            "--nibbles",
            action="store_true",
            help="of c: weights of 4 bits or fewer two to a byte: less flash, more time",
        )
        add("--backend", choices=("Vitis", "Vivado"), default="Vitis", help="of hls4ml")
        add("--part", metavar="NAME", help="of hls4ml: the FPGA (default: hls4ml's)")
        add("--clock", type=float, default=5.0, metavar="NS", help="of hls4ml: period (default: 5)")
        add("--io", choices=("io_parallel", "io_stream"), default="io_parallel", help="of hls4ml")
        add("--strategy", choices=("Latency", "Resource"), default="Latency", help="of hls4ml")
        add("--reuse-factor", type=_whole(1, 10**6), default=1, metavar="N", help="of hls4ml")
        add("--python", default=sys.executable, help="interpreter with qonnx, to verify qonnx")


def _version() -> str:
    try:
        return f"marvin-fixedpoint {metadata.version('marvin-fixedpoint')}"
    except metadata.PackageNotFoundError:  # a tree that nobody installed
        return "marvin-fixedpoint, not installed"


def _whole(low: int, high: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            required = f"a whole number from {low} to {high:,}"
            raise argparse.ArgumentTypeError(f"must be {required}, got {text[:60]!r}")
        return value

    return convert


def options(given: argparse.Namespace) -> Options:
    """Return how a model becomes a network, as the command line says."""
    return Options(given.wl, given.scale_wl, given.sums_wl)


@contextlib.contextmanager
def one_line(prog: str) -> Iterator[None]:
    """End the process with one line where the block fails by what the user can put right."""
    try:
        yield
    except (ValueError, OSError) as error:
        message = " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())
        sys.exit(f"{prog}: error: {message}")


def export(given: argparse.Namespace, trained: Trained, deployed: Deployed, folder: Path) -> None:
    """Print what is exported, write it, and print what was written.

    Args:
        given: The flags of ``Parser.add_flags``.
        trained: What it was made of.
        deployed: What is exported.
        folder: Where exports are if no other is given: each in a folder of its target's name.

    Raises:
        ExportError: The target cannot have the network, or what was written computes something
            else.
        ValueError: The folder to write to is none of an export.
    """
    rows = layer_rows(deployed, trained.samples[:64])
    lines = [
        f"{trained.path}: {trained.title}; formats of activations: {deployed.network.origin}",
        *trained.notes,
        table(rows),
        weight_line(deployed),
        *proof_lines(trained, deployed, rows),
    ]
    print("\n".join(lines), flush=True)
    if given.out is None and folder.is_symlink():
        raise ValueError(f"{folder} must be a folder, got a link: choose one with --out")
    out = given.out or folder / given.to
    written = _write(given, trained, deployed, (out, rows))
    print(f"{out}: {written.what}, {written.size_bytes:,} bytes")
    print(*written.notes, sep="\n", end="\n" if written.notes else "")
    verdict = "verified" if written.is_equal else "not equal"
    print(f"{verdict}: {written.proof}" if written.proof else "not verified: add --verify")
    if written.outputs is not None and trained.labels is not None:
        accuracy, count = trained.accuracy(written.outputs), len(written.outputs)
        print(f"test accuracy of what was written: {accuracy:.2%} ({count} {trained.unit})")


def _write(
    given: argparse.Namespace, trained: Trained, deployed: Deployed, place: tuple[Path, object]
) -> Written:
    out, rows = place
    if out.exists() and not (out.is_dir() and (out / "export.json").is_file()):
        raise ValueError(f"{out} must be an earlier export or not there: choose another --out")
    count = given.samples or (8 if given.to in ("qonnx", "hls4ml") else len(trained.samples))
    samples = trained.samples[:count] if given.verify else None
    with new_folder(out) as folder:
        fpga = given.part, given.clock, given.io, given.strategy, given.reuse_factor
        hardware = Hardware(*fpga)
        flags = {
            "vnni": given.vnni,
            "nibbles": given.nibbles,
            "int4": given.int4,
            "hardware": hardware,
        }
        order = Order(deployed, folder, samples, given.backend, given.python, **flags)
        written = TARGETS[given.to](order)
        facts = {
            "run": str(trained.path),
            "target": given.to,
            "torch": torch.__version__,
            "activations": deployed.network.origin,
            "what": written.what,
            "proof": written.proof,
            "notes": written.notes,
            "layers": rows,
        }
        (folder / "export.json").write_text(json.dumps(facts, indent=2) + "\n")
    return written
