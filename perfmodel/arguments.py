"""What commands share: an error of the user is one line, and ``--version``.

Loads no torch: commands read their arguments before anything slow is imported.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from types import TracebackType
from typing import Any, NoReturn

__all__ = ["Parser", "encodable", "give_up_output", "message_of", "open_closed_output"]
__all__ += ["reader_may_leave", "real", "stop", "stop_at_interrupt", "version", "whole"]

INTERRUPTED = 130  # 128 and the number of SIGINT


class Parser(argparse.ArgumentParser):
    """A parser of which a flag must be written out, and whose errors are one line, not the usage.

    What every command reads its arguments with; from then on there is an output.
    """

    def __init__(self, prog: str, description: str = "", epilog: str = ""):
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_argument("--version", action="version", version=version())

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """See ``argparse``; ``parse_args`` calls this, too."""
        open_closed_output()
        return super().parse_known_args(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        self.exit(2, f"{self.prog}: error: {message} (--help tells more)\n")


def version() -> str:
    """Return name and version of the package; a tree that nobody installed has none."""
    try:
        return f"marvin-fixedpoint {metadata.version('marvin-fixedpoint')}"
    except metadata.PackageNotFoundError:
        return "marvin-fixedpoint, not installed"


def message_of(error: BaseException) -> str:
    """Return the message of an error as one line without control characters, whatever is in it.

    An error of the system that names no file is the output's, a log on a full disk, for example.
    """
    words = str(error)
    if isinstance(error, OSError) and error.strerror and error.filename is None:
        words = f"what is printed must go where it can be written, got: {error.strerror}"
    text = "".join(c if c.isprintable() else " " for c in words)
    return " ".join(text.split()) or type(error).__name__


def stop(message: str = "stopped") -> NoReturn:
    """End the process as after Ctrl-C: with one line, and the status that shells have for it."""
    print(f"\n{message}", file=sys.stderr)
    sys.exit(INTERRUPTED)


def stop_at_interrupt() -> None:
    """Let Ctrl-C end this process with one line from here on, also while imports take their time."""
    before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            stop()
        before(kind, error, trace)

    sys.excepthook = tell


def open_closed_output() -> None:
    """Let what is printed go nowhere where the caller has closed stdout or stderr (``2>&-``).

    Python has None there, which some code takes for a file.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, open(nowhere, "w", encoding="utf-8", closefd=False))  # noqa: SIM115


def give_up_output() -> None:
    """Let what is printed from here on go nowhere, and what waits to be: nobody reads it any more."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """End the process, with status 1 and no word, where the reader of its output has seen enough.

    ``head`` is such a reader.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        give_up_output()
        sys.exit(1)
    except OSError as error:
        if error.filename is None:  # the output's: what waits to be written would fail once more
            give_up_output()
        raise


def encodable(text: str) -> str:
    """Return a text that the output can have: in ASCII, for example, a plus-minus sign is ``+-``."""
    encoding = sys.stdout.encoding or "ascii"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        plain = text.replace("\u00b1", "+-")
        return plain.encode(encoding, "backslashreplace").decode(encoding)
    return text


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return what makes a flag's text a whole number from ``low`` on, to ``high`` if given."""
    required = f"at least {low}" if high is None else f"from {low} to {high}"

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(
                f"must be a whole number, {required}, got {text[:60]!r}"
            )
        return value

    return convert


def real(*, may_be_0: bool = False) -> Callable[[str], float]:
    """Return what makes a flag's text a finite number above 0, or 0 too."""
    required = "of at least 0" if may_be_0 else "above 0"

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf or not (value or may_be_0):
            raise argparse.ArgumentTypeError(f"must be a number {required}, got {text[:60]!r}")
        return value

    return convert
