"""The console commands: ``marvin-train``, ``marvin-export`` and ``marvin-perf``.

Each is another name of ``python -m``; what it runs reads its arguments before it loads torch.
"""

import runpy
import sys
from pathlib import Path

from perfmodel.arguments import Parser

__all__ = ["export", "perf", "train"]

SCRIPTS = "resnet20", "alexnet", "vit", "demo", "table", "front", "plot"


def train() -> None:
    """Run the script of ``train`` that the first word names, with the other words."""
    parser = Parser(
        "marvin-train",
        "Train a network in fixed point, or look at runs: marvin-train resnet20 --help.\n"
        "Without a console command: python -m train.resnet20.",
    )
    parser.add_argument("script", choices=SCRIPTS, metavar="SCRIPT", help=", ".join(SCRIPTS))
    script = parser.parse_args(sys.argv[1:2]).script
    _run(f"train.{script}", sys.argv[2:])


def export() -> None:
    """Export a run folder (``train.export``) or the file of a frozen model (``marvin.export``)."""
    parser = Parser(
        "marvin-export",
        "Export what was trained; flags come behind the first word:\n"
        "marvin-export RUN --to onnx      a run folder, see python -m train.export --help\n"
        "marvin-export MODEL --to onnx    a frozen model, see python -m marvin.export --help",
    )
    parser.add_argument("path", type=Path, metavar="RUN|MODEL", help="run folder, or a file")
    path = parser.parse_args(sys.argv[1:2]).path
    _run("marvin.export" if path.is_file() else "train.export", sys.argv[1:])


def perf() -> None:
    """Run ``perfmodel``."""
    _run("perfmodel", sys.argv[1:])


def _run(module: str, words: list[str]) -> None:
    sys.argv[1:] = words
    if not sys.flags.safe_path:  # modules of the folder one is in, as ``python -m`` finds them
        sys.path.insert(0, str(Path.cwd()))
    runpy.run_module(module, run_name="__main__", alter_sys=True)
