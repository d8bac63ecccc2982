"""The C functions that steps call: written out only where they are called."""

from dataclasses import dataclass, field

__all__ = ["Helpers"]

_SHIFT = """\
/* x / 2^shift to the nearest integer, ties to even; shift is 1 or more */
static inline {word} {name}({word} x, int shift)
{{
    const {word} half = ({word})1 << (shift - 1);
    return (x + (half - 1) + ((x >> shift) & 1)) >> shift;
}}
"""
_DIVIDE = """\
/* x / divisor to the nearest integer, ties to even; divisor is 1 or more */
static inline {word} {name}({word} x, {word} divisor)
{{
    {word} quotient = x / divisor;
    {word} rest = x % divisor;
    if (rest < 0) {{
        rest += divisor;
        quotient -= 1;
    }}
    rest *= 2;
    return quotient + (rest > divisor || (rest == divisor && (quotient & 1) != 0));
}}
"""
_CLIP = """\
static inline {word} {name}({word} x, {word} low, {word} high)
{{
    return x < low ? low : x > high ? high : x;
}}
"""
_ROOT = """\
/* the largest number whose square is not larger than x, which is below 2^62 */
static inline {word} {name}({word} x)
{{
    {word} root = 0;
    for ({word} bit = ({word})1 << 30; bit != 0; bit >>= 1) {{
        const {word} next = root + bit;
        if (next * next <= x) {{
            root = next;
        }}
    }}
    return root;
}}
"""
_SOURCES = {"shift": _SHIFT, "divide": _DIVIDE, "clip": _CLIP, "root": _ROOT}


@dataclass(frozen=True)
class Helpers:
    """The functions that steps of a file call.

    Args:
        prefix: Of all names of the file.
        called: Kind and type of each function that is called.
    """

    prefix: str
    called: set[tuple[str, str]] = field(default_factory=set)

    def call(self, kind: str, word: str) -> str:
        """Return the name of a function, such as that of ``"shift"`` for ``"int32_t"``: the file has it from now on."""
        self.called.add((kind, word))
        return f"{self.prefix}_{kind}_{word.removesuffix('_t')}"

    def text(self) -> str:
        """Return the definitions of what is called."""
        found = []
        for kind, source in _SOURCES.items():
            for word in ("int32_t", "int64_t"):
                if (kind, word) in self.called:
                    found.append(source.format(word=word, name=self.call(kind, word)))
        return "\n".join(found)
