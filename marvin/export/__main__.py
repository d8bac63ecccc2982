"""Export a training run.

python -m marvin.export RUN --to packed|onnx|qonnx|hls4ml [--verify] [--out DIR]

Prints format, bytes and verdict of each layer and writes RUN/export/TARGET, as a whole or not at
all. With --verify the files are run, and must compute what the integer reference computes.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from marvin.export.report import layer_rows, proof_lines, table, weight_line
from marvin.export.run import Deployed, Options, Run, deploy, open_run
from marvin.export.targets import TARGETS, Order, Ways, Written
from marvin.files import new_folder

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Do what the command line asks; what the user can put right ends with one line."""
    given = _parser().parse_args(argv)
    try:
        _export(given)
    except (ValueError, OSError) as error:
        message = " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())
        sys.exit(f"python -m marvin.export: error: {message}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help tells more)\n")


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


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m marvin.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder of train")
    parser.add_argument("--to", choices=sorted(TARGETS), required=True, help="what to write")
    parser.add_argument("--verify", action="store_true", help="run what was written, and compare")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: RUN/export/TARGET")
    parser.add_argument(
        "--weights",
        choices=("nearest", "last"),
        default="nearest",
        help="masters rounded to nearest, or the last stochastic draw (default: nearest)",
    )
    parser.add_argument(
        "--wl",
        type=_whole(2, 32),
        default=8,
        help="bits of formats that training left open (default: 8)",
    )
    parser.add_argument(
        "--scale-wl",
        type=_whole(2, 32),
        default=16,
        help="bits of batch norm's scale (default: 16)",
    )
    parser.add_argument(
        "--sums-wl",
        type=_whole(2, 32),
        help="bits of what is added, calibrated; ONNX needs 8 to be fast (default: exact sums)",
    )
    parser.add_argument(
        "--vnni",
        action="store_true",
        help="of onnx: 8-bit weights as int8, fast on processors with VNNI, wrong without",
    )
    parser.add_argument(
        "--samples",
        type=_whole(0, 10**9),
        default=0,
        help="test images to verify on (default: all; of the slow qonnx and hls4ml, 8)",
    )
    parser.add_argument("--backend", choices=("Vitis", "Vivado"), default="Vitis", help="of hls4ml")
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter with qonnx, to verify qonnx"
    )
    parser.add_argument(
        "--data-dir", help="folder of data sets, where it has moved or is to be made"
    )
    return parser


def _export(given: argparse.Namespace) -> None:
    run = open_run(given.run, given.data_dir)
    options = Options(given.wl, given.scale_wl, given.weights, given.sums_wl)
    deployed = deploy(run, options)
    rows = layer_rows(deployed, run.test[:64])
    lines = [
        f"{run.path}: {run.title}; formats of activations: {deployed.network.origin}",
        table(rows),
        weight_line(deployed),
        *proof_lines(run, deployed, rows),
    ]
    print("\n".join(lines), flush=True)
    out = given.out or _own_folder(run.path) / given.to
    written = _write(given, run, deployed, (out, rows))
    print(f"{out}: {written.what}, {written.size_bytes:,} bytes")
    verdict = "verified" if written.is_equal else "not equal"
    print(f"{verdict}: {written.proof}" if written.proof else "not verified: add --verify")
    if written.outputs is not None:
        count = len(written.outputs)
        right = int((written.outputs.argmax(1) == run.labels[:count]).sum())
        print(f"test accuracy of what was written: {right / count:.2%} ({count} images)")


def _own_folder(run: Path) -> Path:
    """Return where a run's exports are, which must be in the run's folder."""
    folder = run / "export"
    if folder.is_symlink():
        raise ValueError(f"{folder} must be a folder of the run, got a link: choose one with --out")
    return folder


def _write(
    given: argparse.Namespace, run: Run, deployed: Deployed, place: tuple[Path, Any]
) -> Written:
    out, rows = place
    if out.exists() and not (out.is_dir() and (out / "export.json").is_file()):
        raise ValueError(f"{out} must be an earlier export or not there: choose another --out")
    count = given.samples or (8 if given.to in ("qonnx", "hls4ml") else len(run.test))
    samples = run.test[:count] if given.verify else None
    with new_folder(out) as folder:
        ways = Ways(given.backend, given.python, given.vnni)
        written = TARGETS[given.to](Order(deployed, folder, samples, ways))
        facts = {
            "run": str(run.path),
            "target": given.to,
            "torch": torch.__version__,
            "activations": deployed.network.origin,
            "what": written.what,
            "proof": written.proof,
            "layers": rows,
        }
        (folder / "export.json").write_text(json.dumps(facts, indent=2) + "\n")
    return written


if __name__ == "__main__":
    main()
