"""Numbers and tables for people."""

from collections.abc import Sequence

__all__ = ["binary", "metric", "of_tokens", "table"]

BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
METRIC = ("", "k", "M", "G", "T", "P")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns: the first one to the left, numbers to the right."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    lines = []
    for line in (header, *rows):
        first, *rest = zip(line, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def of_tokens(message: str) -> str:
    """Return what to add to a message where an embedding refuses floats; ``""`` for other messages."""
    is_refusal = "'indices'" in message and "Long" in message
    return "; tokens are of torch.int64 (--dtype int64)" if is_refusal else ""


def binary(size_bytes: float) -> str:
    """Return bytes in the largest unit that leaves a number of at least 1."""
    return _scaled(size_bytes, 1024, BINARY)


def metric(count: float) -> str:
    """Return a count with a decimal prefix, such as ``40.8 M``."""
    return _scaled(count, 1000, METRIC).rstrip()


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    power = 0
    while value >= base and power < len(units) - 1:
        value, power = value / base, power + 1
    digits = 0 if not power else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {units[power]}"
