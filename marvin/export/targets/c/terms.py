"""One code on its way through a step: a C variable, what it can be, and what is still to be done to it.

A scale and an offset are not computed at once: those of a bias, of batch normalisation and of aligned
binary points become one product and one sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fixedpoint_kernels import FixedPoint
from marvin.export.execute.arithmetic import trailing_zeros
from marvin.export.targets.c.runtime import Helpers
from marvin.export.targets.c.words import Tables, bits_of, computing, literal

__all__ = ["Lines", "Term"]

_ALL = 512  # what divides 0


@dataclass(frozen=True)
class Term:
    """``(scale * text + offset) * 2**-fl``.

    Args:
        text: A C variable, int32 or int64.
        fl: Fractional length.
        lows: Smallest values of ``text``: one, or one for each ``index``.
        highs: Largest.
        index: C variable that ``lows``, ``highs``, ``scale`` and ``offset`` go with.
        scale: One, or one for each ``index``.
        offset: Likewise.
        word: Type of ``text``.
    """

    text: str
    fl: int
    lows: tuple[int, ...]
    highs: tuple[int, ...]
    index: str = ""
    scale: tuple[int, ...] = (1,)
    offset: tuple[int, ...] = (0,)
    word: str = "int32_t"

    def narrow(self, word: str) -> str:
        """Return ``text`` for where a type is taken; its values are known to fit."""
        return f"({word}){self.text}" if bits_of(self.word) > bits_of(word) else self.text

    def wide(self, word: str, scale: int = 1) -> str:
        """Return ``text`` times a scale, for where numbers of a type are computed, which holds the product.

        What is 0 throughout needs no scale, which might be longer than the type.
        """
        text = f"({word}){self.text}" if self.word != word else self.text
        is_scaled = scale != 1 and any((*self.lows, *self.highs))
        return f"{text} * {literal(scale)}" if is_scaled else text

    def times(self, scale: Sequence[int], fl: int, index: str = "") -> "Term":
        """Return the product with numbers of ``fl``."""
        own = [s * t for s, t in _pairs(self.scale, scale)]
        offset = [o * t for o, t in _pairs(self.offset, scale)]
        index = self._index(index, scale)
        return replace(self, fl=self.fl + fl, index=index, scale=tuple(own), offset=tuple(offset))

    def plus(self, offset: Sequence[int], fl: int, index: str = "") -> "Term":
        """Return the sum with numbers of ``fl``, at the larger fl."""
        both = max(self.fl, fl)
        left, right = 1 << both - self.fl, 1 << both - fl
        total = [o * left + p * right for o, p in _pairs(self.offset, offset)]
        scale = tuple(s * left for s in self.scale)
        index = self._index(index, offset)
        return replace(self, fl=both, index=index, scale=scale, offset=tuple(total))

    def _index(self, index: str, values: Sequence[int]) -> str:
        if len(values) == 1:
            return self.index
        assert self.index in ("", index), "what comes before a change of index is settled"
        return index

    def ranges(self) -> list[tuple[int, int]]:
        """Return the smallest and largest result of each index."""
        numbers = _pairs(self.lows, self.highs), _pairs(self.scale, self.offset)
        count = max(map(len, numbers))
        both = [pairs * count if len(pairs) == 1 else pairs for pairs in numbers]
        found = []
        for (low, high), (scale, offset) in zip(*both, strict=True):
            ends = sorted((low * scale, high * scale))
            found.append((ends[0] + offset, ends[1] + offset))
        return found


def _pairs(x: Sequence[int], y: Sequence[int]) -> list[tuple[int, int]]:
    count = max(len(x), len(y))
    left = list(x) * count if len(x) == 1 else x
    right = list(y) * count if len(y) == 1 else y
    return list(zip(left, right, strict=True))


@dataclass
class Lines:
    """The body of a loop over codes.

    Args:
        name: Of the step, in C.
        tables: Constants go there.
        helpers: Functions that are called.
        lines: Of C.
    """

    name: str
    tables: Tables
    helpers: Helpers
    lines: list[str]
    count: int = 0

    def settle(self, term: Term, where: str) -> Term:
        """Compute scale and offset; return the variable that has the result.

        Zeros at the end of all scales and offsets are left out, and ``fl`` is as much shorter.

        Raises:
            ExportError: 64 bits do not hold it; ``where`` is named.
        """
        if term.scale == (1,) and term.offset == (0,):
            return term
        numbers = [n for n in (*term.scale, *term.offset) if n]
        zeros = min((trailing_zeros(n, _ALL) for n in numbers), default=0)
        scale = _plain([s >> zeros for s in term.scale])
        offset = _plain([o >> zeros for o in term.offset])
        term = replace(term, fl=term.fl - zeros, scale=scale, offset=offset)
        ranges = term.ranges()
        low, high = min(r[0] for r in ranges), max(r[1] for r in ranges)
        if scale == (1,) and offset == (0,):
            return term
        word = computing(where, self._largest(term, low, high))
        text = term.wide(word)
        if scale != (1,):
            text += f" * {self._number('scale', scale, term.index)}"
        if offset != (0,):
            text += f" + {self._number('offset', offset, term.index)}"
        return self.new(word, text, term.fl, low, high)

    def whole(self, term: Term, where: str) -> Term:
        """Return a settled term that knows no channels: see ``settle``."""
        term = self.settle(term, where)
        return replace(term, lows=(min(term.lows),), highs=(max(term.highs),), index="")

    @staticmethod
    def _largest(term: Term, low: int, high: int) -> int:
        products = replace(term, offset=(0,)).ranges()
        ends = (abs(end) for pair in products for end in pair)
        return max(
            -low, high, *ends, *map(abs, (*term.lows, *term.highs, *term.scale, *term.offset))
        )

    def _number(self, what: str, values: tuple[int, ...], index: str) -> str:
        if len(values) == 1:
            return literal(values[0]) if values[0] >= 0 else f"({literal(values[0])})"
        return f"{self.tables.add(f'{self.name}_{what}', values)}[{index}]"

    def new(self, word: str, text: str, fl: int, low: int, high: int) -> Term:
        """Define a variable; return it."""
        self.count += 1
        name = f"v{self.count}"
        self.lines.append(f"const {word} {name} = {text};")
        return Term(name, fl, (low,), (high,), word=word)

    def rounded(self, term: Term, fmt: FixedPoint, where: str, divisor: int = 1) -> Term:
        """Round a settled term: nearest, ties to even, saturated.

        Raises:
            ExportError: 64 bits do not hold what comes before; ``where`` is named.
        """
        low, high = min(term.lows), max(term.highs)
        zeros = trailing_zeros(divisor, _ALL)
        shift, odd = term.fl + zeros - fmt.fl, divisor >> zeros
        word, text = self._quotient(term, shift, odd, where)
        ends = (_rounded(end, shift, odd) for end in (low, high))
        low, high = ends
        return self.clipped(
            Term(text, fmt.fl, (low,), (high,), word=word), fmt.min_code, fmt.max_code
        )

    def clipped(self, term: Term, least: int, most: int) -> Term:
        """Define a variable with the values of a settled term, or the bound that they are beyond."""
        low, high = min(term.lows), max(term.highs)
        word, text = term.word, term.text
        if low < least or high > most:
            word = computing("a bound", max(-low, high, -least, most))
            helper = self.helpers.call("clip", word)
            text = f"{helper}({term.narrow(word)}, {literal(least)}, {literal(most)})"
            low, high = (min(max(end, least), most) for end in (low, high))
        return self.new(word, text, term.fl, low, high)

    def _quotient(self, term: Term, shift: int, odd: int, where: str) -> tuple[str, str]:
        """Return type and text of a term times ``2**-shift`` over an odd number, rounded."""
        largest = max(-min(term.lows), max(term.highs))
        if shift <= 0 and odd == 1:
            word = computing(where, largest << -shift)
            return word, term.wide(word, 1 << -shift)
        left, divisor = 1 << max(0, -shift), odd << max(0, shift)
        if 2 * largest * left <= divisor:  # at most one half, which goes to 0
            return "int32_t", f"0 * {term.narrow('int32_t')}"
        if odd == 1:
            word = computing(where, largest + (1 << shift))
            helper = self.helpers.call("shift", word)
            return word, f"{helper}({term.narrow(word)}, {shift})"
        word = computing(where, max(2 * largest * left, 2 * divisor))
        helper = self.helpers.call("divide", word)
        product = term.narrow(word) if left == 1 else term.wide(word, left)
        return word, f"{helper}({product}, {literal(divisor)})"


def _plain(values: list[int]) -> tuple[int, ...]:
    return (values[0],) if len(set(values)) == 1 else tuple(values)


def _rounded(code: int, shift: int, odd: int) -> int:
    """Return ``code * 2**-shift / odd``: nearest, ties to even."""
    top, bottom = code << max(0, -shift), odd << max(0, shift)
    quotient, rest = divmod(top, bottom)
    return quotient + (2 * rest > bottom or (2 * rest == bottom and quotient % 2 == 1))
