"""The C functions that steps call: written out only where they are called."""

__all__ = ["helpers"]

_SHIFT = """\
/* x / 2^shift to the nearest integer, ties to even; shift is 1 or more */
static inline {word} shift_{name}({word} x, int shift)
{{
    const {word} half = ({word})1 << (shift - 1);
    return (x + (half - 1) + ((x >> shift) & 1)) >> shift;
}}
"""
_DIVIDE = """\
/* x / divisor to the nearest integer, ties to even; divisor is 1 or more */
static inline {word} divide_{name}({word} x, {word} divisor)
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
static inline {word} clip_{name}({word} x, {word} low, {word} high)
{{
    return x < low ? low : x > high ? high : x;
}}
"""
_ROOT = """\
/* the largest number whose square is not larger than x, which is below 2^62 */
static inline {word} root_{name}({word} x)
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


def helpers(names: set[str]) -> str:
    """Return the definitions of functions, such as ``shift_int32``."""
    found = []
    for kind, source in _SOURCES.items():
        for name in ("int32", "int64"):
            if f"{kind}_{name}" in names:
                found.append(source.format(word=f"{name}_t", name=name))
    return "\n".join(found)
