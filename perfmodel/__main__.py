"""What a run or a model costs.

python -m perfmodel RUN                          a run folder: tables, and RUN/performance.png
python -m perfmodel model MODULE:NAME --input 3,32,32     a model, before it is trained
python -m perfmodel batch MODULE:NAME --input 3,32,32 --memory 1    the largest batch that trains in it
python -m perfmodel tables                       the papers' figures beside ours
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from perfmodel.arguments import (
    Parser,
    message_of,
    reader_may_leave,
    real,
    stop_at_interrupt,
    whole,
)
from perfmodel.layers import Layer
from perfmodel.run import read_run

__all__ = ["main"]

MOST_SIZE = 2**31


def main(argv: Sequence[str] | None = None) -> None:
    """Do what the command line asks; what the user can put right ends with one line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = {"model": _model, "batch": _batch, "tables": _tables}.get(
        arguments[0] if arguments else ""
    )
    try:
        with reader_may_leave():
            if command:
                command(arguments[1:])
            else:
                _run(arguments)
    except (ValueError, OSError) as error:
        sys.exit(f"python -m perfmodel: error: {message_of(error)}")


def _run(arguments: Sequence[str]) -> None:
    parser = Parser("python -m perfmodel", __doc__ or "")
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, model, batch, or tables")
    parser.add_argument("--json", action="store_true", help="print JSON, draw nothing")
    parser.add_argument("--model", help="module:function of the run's model, to check it by")
    parser.add_argument("--input", type=_shape, help="shape of one sample, with --model")
    given, rest = parser.parse_known_args(arguments)
    if rest:
        is_slip = not rest[0].startswith("-") and not given.run.exists()
        hint = f": {given.run} must be a run folder, model, batch or tables" if is_slip else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    if (given.model is None) != (given.input is None):
        parser.error("--model and --input go together")
    run = read_run(given.run, _layers(given.model, given.input) if given.model else None)
    if given.json:
        from perfmodel.summary import as_dict

        print(json.dumps(as_dict(run), indent=2))
        return
    from perfmodel.figure import save
    from perfmodel.report import report

    print(report(run))
    print(f"\nfigure {save(run)}")


def _layers(model: str, shape: tuple[int, ...]) -> list[Layer]:
    from perfmodel.layers import layers
    from perfmodel.model_report import load_model  # loads torch

    return layers(load_model(model), shape)


def _add_model(parser: Parser, *, dtype: tuple[str, str], memory: tuple[int, str]) -> None:
    """Add what is asked of a model; ``dtype``: the default, and in words; ``memory``: the default, and whose it is."""
    add = parser.add_argument
    add("model", help="module:function, or module:function(argument=value)")
    add("--input", type=_shape, required=True, help="one sample, such as 3,32,32")
    said = f"of the input, such as int64 for tokens (default: {dtype[1]})"
    add("--dtype", default=dtype[0], help=said)
    said = f"{memory[1]} (default: %(default)s)"
    add("--memory", type=real(), default=memory[0], metavar="GIB", help=said)


def _model(arguments: Sequence[str]) -> None:
    parser = Parser(
        "python -m perfmodel model",
        "What a model costs and keeps, before it is trained; all modelled.",
    )
    _add_model(parser, dtype=("", "that of the parameters"), memory=(16, "of the device"))
    parser.add_argument(
        "--copies",
        type=whole(0),
        default=4,
        help="of the parameters in training (default: %(default)s)",
    )
    parser.add_argument("--by-layer", action="store_true", help="list what each layer keeps")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    from perfmodel.model_report import Question, as_dict, facts, model_report  # loads torch

    question = Question(given.model, given.input, given.dtype, given.memory * 2**30, given.copies)
    found = facts(question)
    if given.json:
        print(json.dumps(as_dict(question, found), indent=2))
    else:
        print(model_report(question, found, by_layer=given.by_layer))


def _batch(arguments: Sequence[str]) -> None:
    from perfmodel.batch import WAYS, Trial, check_ways, largest, lines, run

    parser = Parser(
        "python -m perfmodel batch",
        "The largest batch whose training step fits into a memory: each batch tried is a step of SGD "
        "in a process of its own, on the CPU, whose largest memory the system tells.",
    )
    _add_model(parser, dtype=("float32", "float32"), memory=(2, "of the process"))
    parser.add_argument(
        "--ways",
        default=",".join(WAYS),
        help="some of these, or files of plans, with commas between (default: %(default)s)",
    )
    parser.add_argument("--batch", type=whole(1), help="look for none: what does this one take?")
    parser.add_argument(
        "--threads", type=whole(1), default=1, help="torch's (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    ways = given.ways.split(",")
    check_ways(ways)
    trial = Trial(given.model, given.input, given.dtype, "", given.batch or 0, given.threads)
    found, failed = [], []
    for one in (trial._replace(way=way) for way in ways):
        try:
            found.append(run(one) if given.batch else largest(one, given.memory * 2**30))
        except ValueError as error:  # others may suit the model, or need less
            failed.append(error)
    if not found:
        raise failed[0]
    for error in failed:
        print(f"left out: {error}", file=sys.stderr)
    if given.json:
        print(json.dumps([row._asdict() for row in found], indent=2))
    else:
        print("\n".join(lines(found)))


def _tables(arguments: Sequence[str]) -> None:
    Parser("python -m perfmodel tables", "The papers' figures beside ours.").parse_args(arguments)
    from perfmodel.tables import sections

    for number, section in enumerate(sections()):
        print("\n\n" * bool(number) + section, flush=True)


def _shape(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = (0,)
    if not all(0 < size < MOST_SIZE for size in sizes):
        message = f"must be sizes of at least 1 with commas between, got {text[:60]!r}"
        raise argparse.ArgumentTypeError(message)
    return sizes


if __name__ == "__main__":
    stop_at_interrupt()
    main()
