"""Look at tables: ``python -m fixedpoint_kernels.few_bit plot gelu --bits 3``.

``table`` prints borders and levels, ``plot`` draws them beside the derivative.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from fixedpoint_kernels import few_bit
from fixedpoint_kernels.few_bit.named import SHIPPED_WEIGHTS, resolve, table_of
from fixedpoint_kernels.few_bit.table import Table


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    arguments = _parser().parse_args(argv)
    try:
        name, parameters = resolve(arguments.name)
        tables = [_table(arguments, bits) for bits in arguments.bits]
        if arguments.command == "table":
            for table in tables:
                _print(table)
            return
        from fixedpoint_kernels.few_bit.plot import draw  # matplotlib takes half a second

        out = arguments.out or Path(f"few_bit-{arguments.name}.png")
        title = f"{arguments.name}: codes by {arguments.codes}, {arguments.weight} weight"
        draw(title, few_bit.function_of(name, parameters), tables).savefig(out)
    except (ValueError, OSError) as error:
        sys.exit(f"python -m fixedpoint_kernels.few_bit: error: {error}")
    for table in tables:
        print(_summary(table))
    print(out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fixedpoint_kernels.few_bit", description=(__doc__ or "").partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for command, text in (
        ("plot", "draw the derivative, the table and the error"),
        ("table", "print borders and levels"),
    ):
        one = commands.add_parser(command, help=text, description=text)
        one.add_argument("name", help="of an activation: " + ", ".join(few_bit.NAMES))
        one.add_argument("--bits", type=int, nargs="+", default=[3], help="one panel each (3)")
        one.add_argument(
            "--codes",
            choices=("value", "interval", "parity"),
            default="value",
            help="best, or as the paper's (value)",
        )
        one.add_argument("--weight", choices=SHIPPED_WEIGHTS, default="uniform")
        if command == "plot":
            one.add_argument("--out", type=Path, help="PNG, SVG or PDF (few_bit-NAME.png)")
    return parser


def _table(arguments: argparse.Namespace, bits: int) -> Table:
    if arguments.codes == "value":
        return table_of(*resolve(arguments.name), bits, arguments.weight)
    return few_bit.solve(arguments.name, bits, codes=arguments.codes, weight=arguments.weight)


def _summary(table: Table) -> str:
    bits = "1 bit" if table.bits == 1 else f"{table.bits} bits"
    levels = len(np.unique(table.codes))
    return f"{bits}: {len(table.codes)} pieces, {levels} levels, loss {table.loss:.6g}"


def _print(table: Table) -> None:
    print(_summary(table))
    print("            from          to       level")
    ends = [-np.inf, *table.borders, np.inf]
    for low, high, code in zip(ends, ends[1:], table.codes, strict=False):
        print(f"    {low:12.6f}{high:12.6f}{table.levels[code]:12.6f}")


if __name__ == "__main__":
    main()
