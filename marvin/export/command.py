"""What the two commands of an export share: what they print and what they write.

``python -m marvin.export`` takes a frozen model, ``python -m train.export`` the folder of a run.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from marvin.export.arguments import flags_of_others
from marvin.export.deployed import Deployed, Options
from marvin.export.errors import NO_MEMORY, ExportError
from marvin.export.execute import integer
from marvin.export.report import Trained, layer_rows, proof_lines, size_line, table
from marvin.export.targets.hls4ml import Hardware
from marvin.export.targets.write import TARGETS, Order, Written
from marvin.files import new_folder, write_atomic

__all__ = ["export", "one_line", "options"]


def options(given: argparse.Namespace, folder: Path) -> Options:
    """Return how a model becomes a network, as the command line says; refuse at once what cannot be written.

    Args:
        given: The flags of ``arguments.Parser``.
        folder: See ``export``.

    Raises:
        ValueError: One folder is to take several targets, or is none of an export, or cannot be there; or flags
            exclude each other, or are of other targets.
    """
    targets = list(dict.fromkeys(given.to))
    if given.out is not None and len(targets) > 1:
        raise ValueError(f"--out must be of one target, got {len(targets)}: {', '.join(targets)}")
    for flag, target in flags_of_others(given).items():
        got = ", ".join(targets)
        raise ValueError(f"{flag} must come with --to {target}, got --to {got}: leave it out")
    if given.qdq and (given.vnni or given.int4):
        flag = "--vnni" if given.vnni else "--int4"
        raise ValueError(f"--qdq must come without --vnni and --int4, got {flag}: leave it out")
    if given.out is None and folder.is_symlink():
        raise ValueError(f"{folder} must be a folder, got a link: choose one with --out")
    for out in [given.out] if given.out is not None else [folder / target for target in targets]:
        if (out.is_symlink() or out.exists()) and not (
            out.is_dir() and (out / "export.json").is_file()
        ):
            raise ValueError(f"{out} must be an earlier export or not there: choose another --out")
        above = next(path for path in out.absolute().parents if path.exists())
        if not above.is_dir():
            raise ValueError(
                f"{out} must be in a folder, got the file {above}: choose another --out"
            )
    return Options(given.wl, given.scale_wl, given.sums_wl, given.recalibrate, given.estimator)


@contextlib.contextmanager
def one_line(prog: str) -> Iterator[None]:
    """End the process with one line where the block fails by what the user can put right."""
    try:
        yield
    except UnicodeEncodeError as error:
        got = ascii(error.object[error.start : error.end])
        required = f"names must be ones that this system's encoding ({error.encoding}) can write"
        sys.exit(f"{prog}: error: {required}, got {got}: use ASCII letters, or set LC_ALL=C.UTF-8")
    except (ValueError, OSError, *NO_MEMORY) as error:
        text = str(error) or type(error).__name__
        message = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        sys.exit(f"{prog}: error: {message}")


def export(given: argparse.Namespace, trained: Trained, deployed: Deployed, folder: Path) -> None:
    """Print what is exported, write it, and print what was written.

    Args:
        given: The flags of ``arguments.Parser``.
        trained: What it was made of.
        deployed: What is exported.
        folder: Where exports are if no other is given: each in a folder of its target's name.

    Raises:
        ExportError: A target cannot have the network, or what was written computes something
            else; targets before it are written.
    """
    if given.samples:
        trained = dataclasses.replace(trained, samples=trained.samples[: given.samples])
    rows = layer_rows(deployed, trained.samples[:64])
    reference = integer.run_heads(deployed.network, trained.samples)
    origin = deployed.network.origin
    origin = trained.carried if origin == "trained" else origin
    lines = [
        f"{trained.path}: {trained.title}; formats of activations: {origin}",
        *trained.notes,
        table(rows),
        size_line(deployed),
        *proof_lines(trained, deployed, rows, reference),
    ]
    _say(*lines)
    for target in dict.fromkeys(given.to):
        out = given.out or folder / target
        _tell(trained, out, _write(given, target, trained, deployed, (out, rows, reference)))


def _tell(trained: Trained, out: Path, written: Written) -> None:
    lines = [f"{out}: {written.what}, {written.size_bytes:,} bytes", *written.notes]
    verdict = "verified" if written.is_exact else "not exact"
    lines.append(f"{verdict}: {written.proof}" if written.proof else "not verified: add --verify")
    if written.outputs is not None and trained.labels is not None:
        accuracy, count = trained.accuracy(written.outputs), len(written.outputs)
        lines.append(f"test accuracy of what was written: {accuracy:.2%} ({count} {trained.unit})")
    _say(*lines)


def _say(*lines: str) -> None:
    """Print lines; where nobody reads them any more, the export goes on without a word.

    Raises:
        ExportError: They cannot be written: the disk of a log is full, for example.
    """
    try:
        print(*lines, sep="\n", flush=True)
    except OSError as error:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            required = "what is printed must go where it can be written"
            raise ExportError(f"{required}, got: {error.strerror}") from error


def _write(
    given: argparse.Namespace,
    target: str,
    trained: Trained,
    deployed: Deployed,
    place: tuple[Path, object, Mapping[str, Tensor]],
) -> Written:
    out, rows, reference = place
    count = given.samples or (8 if target in ("qonnx", "hls4ml") else len(trained.samples))
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
        wanted = {label: y[:count] for label, y in reference.items()}
        order = Order(deployed, folder, samples, wanted, given.backend, given.python, **flags)
        written = TARGETS[target](order)
        facts = {
            "run": str(trained.path),
            "target": target,
            "torch": torch.__version__,
            "activations": deployed.network.origin,
            "what": written.what,
            "proof": written.proof,
            "notes": written.notes,
            "layers": rows,
        }
        write_atomic(folder / "export.json", json.dumps(facts, indent=2) + "\n")
    return written
