"""C's types, numbers, names and tables, as text."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, count

from marvin.export.errors import ExportError

__all__ = [
    "Tables",
    "bits_of",
    "comment",
    "computing",
    "identifier",
    "literal",
    "loop",
    "size_of",
    "storing",
]

_STORED = (("int8_t", 8), ("int16_t", 16), ("int32_t", 32), ("int64_t", 64))
_LINE = 96


def storing(low: int, high: int) -> str:
    """Return the shortest type that holds all numbers of a range; unsigned where none is below 0.

    Raises:
        ExportError: None does.
    """
    for name, bits in _STORED:
        if low >= 0 and high < 2**bits and bits <= 16:
            return f"u{name}"
        if -(2 ** (bits - 1)) <= low and high < 2 ** (bits - 1):
            return name
    raise ExportError(f"int64 holds no numbers from {low} to {high}")


def computing(name: str, largest: int) -> str:
    """Return the type to compute in with numbers up to a magnitude: int32 or int64.

    Raises:
        ExportError: Neither is long enough.
    """
    if largest < 2**31:
        return "int32_t"
    if largest < 2**63:
        return "int64_t"
    raise ExportError(
        f"{name} needs sums of {largest.bit_length() + 1} bits, C has 64: shorter words, or a "
        "shorter --scale-wl"
    )


def size_of(word: str) -> int:
    """Return the bytes of a type."""
    return bits_of(word) // 8


def bits_of(word: str) -> int:
    """Return the bits of a type."""
    return int(re.sub(r"\D", "", word))


def literal(value: int) -> str:
    """Return a number as it stands in code."""
    if abs(value) >= 2**31:
        return f"INT64_C({value})"
    return str(value)


def identifier(name: str) -> str:
    """Return a name without what C does not allow in one."""
    return re.sub(r"\W", "_", name, flags=re.ASCII).strip("_") or "value"


def comment(text: str) -> str:
    """Return a comment. Texts of a network, which may come from a file of others, can neither end it nor begin one."""
    plain = re.sub(r"[^ -~]|[*/\\]", "_", text)
    return f"/* {plain} */"


def loop(variable: str, count: int | str) -> str:
    """Return the head of a loop."""
    return f"for (size_t {variable} = 0; {variable} < {count}; {variable}++)"


@dataclass
class Tables:
    """Constant arrays, each once: a layer that is called twice has its weights in one place.

    Args:
        texts: The definitions.
        size_bytes: Of all of them.
        names: Of all of them.
        known: Their names, by type, size and numbers.
    """

    texts: list[str] = field(default_factory=list)
    size_bytes: int = 0
    names: set[str] = field(default_factory=set)
    known: dict[tuple[str, str, str], str] = field(default_factory=dict)

    def add(self, name: str, values: Sequence[int], word: str | None = None) -> str:
        """Define an array of the shortest type that holds it, or of a given one.

        Returns:
            Its name, with a number behind it where another array has the one that is given; that of
            an array that is the same.
        """
        word = word or storing(min(values), max(values))
        size_bytes = len(values) * size_of(word)
        return self._define(name, (word, f"[{len(values)}]", _numbers(values)), size_bytes)

    def add_rows(self, name: str, rows: Sequence[Sequence[int]], word: str) -> str:
        """Define rows of weights of a type of the file, a byte each where memory is short; see ``rows``.

        Returns:
            Their name: see ``add``.
        """
        body = "\n".join(f"    {{\n{_numbers(row)}\n    }}," for row in rows)
        size = f"[{len(rows)}][ROW({len(rows[0])})]"
        return self._define(name, (word, size, body), len(rows) * len(rows[0]))

    def _define(self, name: str, what: tuple[str, str, str], size_bytes: int) -> str:
        """Define an array of a type, a size and numbers, once; return the name it has."""
        if what not in self.known:
            self.known[what] = self._free(name)
            word, size, body = what
            text = f"static const {word} {self.known[what]}{size} = {{\n{body}\n}};\n"
            self.texts.append(text)
            self.size_bytes += size_bytes
        return self.known[what]

    def _free(self, name: str) -> str:
        """Return a name that no array has yet, and take it."""
        others = (f"{name}_{number}" for number in count(2))
        found = next(own for own in chain([name], others) if own not in self.names)
        self.names.add(found)
        return found


def _numbers(values: Sequence[int]) -> str:
    lines, line = [], "   "
    for text in (f" {value}," for value in values):
        if len(line) + len(text) > _LINE:
            lines.append(line)
            line = "   "
        line += text
    return "\n".join([*lines, line])
