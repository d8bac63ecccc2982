"""Export a model: see ``main``."""

import shlex
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Say what to write for the folder of a run."""
    words = sys.argv[1:] if argv is None else argv
    sys.exit(
        "python -m marvin.export: error: the folder of a run is exported by its trainer: write "
        f"python -m train.export {shlex.join(words)}"
    )


if __name__ == "__main__":
    main()
