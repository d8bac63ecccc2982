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

from marvin.export.arguments import Parser

__all__ = ["main"]

_INTERRUPTED = 130  # 128 and the number of SIGINT

_PROG = "python -m marvin.export"


def main(argv: Sequence[str] | None = None) -> None:
    """Do what the command line asks; what the user can put right ends with one line."""
    words = sys.argv[1:] if argv is None else argv
    if _names_a_folder(words):
        instead = f"python -m train.export {shlex.join(words)}"
        sys.exit(f"{_PROG}: error: the folder of a run is exported by its trainer: write {instead}")
    given = _parser().parse_args(words)
    try:
        from marvin.export import frozen  # torch: not before the arguments are read

        frozen.export(given, _PROG)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(_INTERRUPTED)


_SWITCHES = "--verify", "--vnni", "--nibbles", "--int4", "--qdq", "--recalibrate"


def _names_a_folder(words: Sequence[str]) -> bool:
    """Say whether the word that is no flag's is the name of a folder."""
    for before, word in zip(["", *words], words, strict=False):
        has_value = before.startswith("--") and "=" not in before
        is_value = has_value and before not in _SWITCHES
        if not word.startswith("-") and not is_value:
            return Path(word).is_dir()
    return False


def _parser() -> Parser:
    parser = Parser(_PROG, __doc__)
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


if __name__ == "__main__":
    main()
