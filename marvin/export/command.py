"""What the two commands of an export share: what they print and what they write.

``python -m marvin.export`` takes a frozen model, ``python -m train.export`` the folder of a run.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from marvin.export.deployed import Deployed, Options
from marvin.export.report import Trained, layer_rows, proof_lines, table, weight_line
from marvin.export.targets.hls4ml import Hardware
from marvin.export.targets.write import TARGETS, Order, Written
from marvin.files import new_folder

__all__ = ["export", "one_line", "options"]


def options(given: argparse.Namespace) -> Options:
    """Return how a model becomes a network, as the command line says."""
    return Options(given.wl, given.scale_wl, given.sums_wl, given.recalibrate, given.estimator)


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
        given: The flags of ``arguments.Parser``.
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
            "qdq": given.qdq,
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
