"""Export a frozen model.

python -m marvin.export MODEL --to packed|onnx|qonnx|hls4ml|c --inputs FILE|--shape 1,28,28

MODEL is a file of torch.save(marvin.freeze(model), path); no code of it is run. Prints format,
bytes and verdict of each layer and writes MODEL-export/TARGET beside it, as a whole or not at all.
With --verify the files are run, and must compute what the integer reference computes.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from marvin.export import command
from marvin.export.deployed import Deployed, Options, deploy
from marvin.export.errors import ExportError
from marvin.export.frontend.load import load_frozen, load_tensor
from marvin.export.graph.formats import (
    activation_formats,
    carried_weights,
    formats_of_weights,
    nearest_weights,
    weight_formats,
)
from marvin.export.report import Trained

__all__ = ["main"]

_PROG = "python -m marvin.export"
_MADE_UP = 64  # samples


def main(argv: Sequence[str] | None = None) -> None:
    """Do what the command line asks; what the user can put right ends with one line."""
    words = sys.argv[1:] if argv is None else argv
    if _names_a_folder(words):
        instead = f"python -m train.export {shlex.join(words)}"
        sys.exit(f"{_PROG}: error: the folder of a run is exported by its trainer: write {instead}")
    given = _parser().parse_args(words)
    with command.one_line(_PROG):
        model = load_frozen(given.model, given.allow)
        samples, labels, notes = _samples(given)
        _check_taken(model, samples[:1])
        deployed, note = _deployed(model, samples, command.options(given))
        title = f"{type(model).__name__}, frozen"
        facts = given.model, title, model, samples, labels, "samples", (note, *notes)
        folder = given.model.with_name(f"{given.model.stem}-export")
        command.export(given, Trained(*facts), deployed, folder)


def _names_a_folder(words: Sequence[str]) -> bool:
    """Say whether the word that is no flag's is the name of a folder."""
    for before, word in zip(["", *words], words, strict=False):
        has_value = before.startswith("--") and "=" not in before
        is_value = has_value and before not in ("--verify", "--vnni", "--nibbles")
        if not word.startswith("-") and not is_value:
            return Path(word).is_dir()
    return False


def _parser() -> command.Parser:
    parser = command.Parser(_PROG, __doc__)
    parser.add_argument("model", type=Path, metavar="MODEL", help="file of a frozen model")
    parser.add_flags("MODEL-export/TARGET, beside MODEL")
    inputs = parser.add_mutually_exclusive_group(required=True)
    inputs.add_argument(
        "--inputs",
        type=Path,
        metavar="FILE",
        help="samples to compare, verify and calibrate on: .npy, or a tensor of torch.save",
    )
    inputs.add_argument(
        "--shape", type=_shape, metavar="1,28,28", help="of a sample: made-up ones instead"
    )
    parser.add_argument("--labels", type=Path, metavar="FILE", help="of --inputs, for accuracy")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="PACKAGE.MODULE:CLASS",
        help="import a class of your own that MODEL has; may be given again",
    )
    return parser


def _shape(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(size) for size in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        required = "sizes of one sample, such as 1,28,28"
        raise argparse.ArgumentTypeError(f"must be {required}, got {text[:60]!r}")
    return sizes


def _samples(given: argparse.Namespace) -> tuple[Tensor, Tensor | None, tuple[str, ...]]:
    """Return samples, labels if there are some, and what the report says of them."""
    if given.inputs is None:
        if given.labels is not None:
            raise ExportError("--labels must be those of --inputs, got them with --shape")
        generator = torch.Generator().manual_seed(0)
        samples = torch.randn(_MADE_UP, *given.shape, generator=generator)
        note = f"{_MADE_UP} samples are made up, normally distributed: give data with --inputs"
        return samples, None, (note,)
    samples = load_tensor(given.inputs)
    if not samples.is_floating_point() or samples.ndim < 2 or not len(samples):
        got = f"{samples.dtype} of shape {tuple(samples.shape)}"
        raise ExportError(f"{given.inputs} must hold samples as the model takes them, got {got}")
    if given.labels is None:
        return samples.float(), None, ()
    labels = load_tensor(given.labels)
    if labels.is_floating_point() or labels.shape != samples.shape[:1]:
        got = f"{labels.dtype} of shape {tuple(labels.shape)}"
        raise ExportError(f"{given.labels} must hold {len(samples)} whole numbers, got {got}")
    return samples.float(), labels.long(), ()


@torch.no_grad()
def _check_taken(model: nn.Module, sample: Tensor) -> None:
    """Refuse samples that the model does not take."""
    try:
        model(sample)
    except Exception as error:  # whatever the model's own code raises
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
        shape = tuple(sample.shape[1:])
        raise ExportError(f"the model must take samples of shape {shape}, got {reason}") from error


def _deployed(model: nn.Module, samples: Tensor, options: Options) -> tuple[Deployed, str]:
    """Return the network of a frozen model, and where the formats of its weights come from."""
    carried, formats = carried_weights(model), weight_formats(model)
    if not carried and not activation_formats(model):
        found = formats_of_weights(model, options.wl)
        note = f"formats of weights: of {options.wl} bits, the model carries none"
        return deploy(nearest_weights(model, found), found, samples, options), note
    others = ", ".join(f"{name} {fmt}" for name, fmt in formats.items() if name not in carried)
    note = "formats of weights: the model's own"
    note += f"; found from the values: {others}" if others else ""
    return deploy(model, formats, samples, options), note


if __name__ == "__main__":
    main()
