"""The flags of an export; reading them loads no torch."""

import argparse
import math
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NoReturn

__all__ = ["TARGETS", "Parser", "flags_of_others"]

TARGETS = "c", "hls4ml", "onnx", "packed", "qonnx"
_FLAGS = {  # that one target reads
    "c": ("nibbles",),
    "hls4ml": ("backend", "part", "clock", "io", "strategy", "reuse_factor"),
    "onnx": ("vnni", "int4", "qdq"),
    "qonnx": ("python",),
}


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
        add(
            "--to",
            choices=TARGETS,
            required=True,
            action="append",
            help="what to write; may be given several times",
        )
        add("--verify", action="store_true", help="run what was written, and compare")
        add("--out", type=Path, metavar="DIR", help=f"default: {out}")
        add(
            "--wl",
            type=_whole(2, 32),
            default=8,
            help="bits of formats that training left open (default: 8)",
        )
        add(
            "--recalibrate",
            action="store_true",
            help="take the ranges of what the model rounds again, in eval mode",
        )
        add(
            "--estimator",
            choices=("noise", "max", "percentile"),
            default="noise",
            help="of ranges that are calibrated: least noise, nothing saturates, or one in 10,000 may",
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
            "--qdq",
            action="store_true",
            help="of onnx: float operators between QuantizeLinear and DequantizeLinear, for OpenVINO and TensorRT",
        )
        add(
            "--samples",
            type=_whole(0, 10**9),
            default=0,
            help="samples to compare and verify on (default: all; verified on 8 of the slow qonnx and hls4ml)",
        )
        add(
            "--nibbles",
            action="store_true",
            help="of c: weights of 4 bits or fewer two to a byte: less flash, more time",
        )
        add("--backend", choices=("Vitis", "Vivado"), default="Vitis", help="of hls4ml")
        add("--part", metavar="NAME", help="of hls4ml: the FPGA (default: hls4ml's)")
        add(
            "--clock",
            type=_period,
            default=5.0,
            metavar="NS",
            help="of hls4ml: period (default: 5)",
        )
        add("--io", choices=("io_parallel", "io_stream"), default="io_parallel", help="of hls4ml")
        add("--strategy", choices=("Latency", "Resource"), default="Latency", help="of hls4ml")
        add("--reuse-factor", type=_whole(1, 10**6), default=1, metavar="N", help="of hls4ml")
        add("--python", default=sys.executable, help="interpreter with qonnx, to verify qonnx")


def flags_of_others(given: argparse.Namespace) -> dict[str, str]:
    """Return flags that none of the targets reads, each with the target that does."""
    parser = Parser("", None)
    parser.add_flags("")
    return {
        f"--{name.replace('_', '-')}": target
        for target, names in _FLAGS.items()
        for name in names
        if target not in given.to and getattr(given, name) != parser.get_default(name)
    }


def _version() -> str:
    try:
        return f"marvin-fixedpoint {metadata.version('marvin-fixedpoint')}"
    except metadata.PackageNotFoundError:  # a tree that nobody installed
        return "marvin-fixedpoint, not installed"


def _period(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be nanoseconds above 0, got {text[:60]!r}")
    return value


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
