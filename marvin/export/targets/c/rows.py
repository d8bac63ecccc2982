"""Rows of bytes times rows of weights, as processors with vectors take them, or with little memory.

The compiler chooses, by its macros, what rows are. With vectors they have 16 bits, and are as long as whole
vectors, unless the processor multiplies bytes; without, they are bytes, and no longer than they must be.
"""

from math import gcd

from marvin.export.execute.arithmetic import Codes
from marvin.export.targets.c.values import Shape, Stored
from marvin.export.targets.c.words import Tables, loop

__all__ = [
    "ROWS_END",
    "VECTOR",
    "block_of",
    "copy_of",
    "is_row",
    "longest",
    "over_block",
    "over_blocks",
    "products",
    "row_word",
    "rows_text",
    "scratch_text",
]

VECTOR = 32  # bytes: rows are as long as some of these
_SIDE = 8  # outputs at a time, at most: they share what is read of the row
_BLOCK = 8  # pixels at a time, at most: they share what is read of the weights

_TOP = """\
/* Rows of codes are multiplied with rows of weights. With vectors, rows are whole vectors, those of some pixels
 * are made before they are multiplied, and codes have 16 bits where no instruction multiplies bytes. Compile with
 * -D{upper}_SMALL for less memory. */
typedef int32_t {name}_row_sum;
#if defined({upper}_SMALL) || !(defined(__SSE2__) || defined(__ARM_NEON))
#define ROW(codes) (codes)
#define PIXELS(some) 1
typedef uint8_t {name}_row_u8;
typedef int8_t {name}_row_i8;
typedef int8_t {name}_weight_u8;
typedef int8_t {name}_weight_i8;
#define MEMORY_OR_ROWS_U8(memory) (memory)
#define MEMORY_OR_ROWS_I8(memory) (memory)
#define MEMORY_OR_ROWS_SUM(memory) (memory)
#else
#define ROWS_ARE_VECTORS
#define ROW(codes) (((codes) + {more}) / {vector} * {vector})
#define PIXELS(some) (some)
#if defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
#define ROWS_ARE_BYTES
#include <string.h>
typedef uint8_t {name}_row_u8;
typedef int8_t {name}_weight_u8;
#else
typedef int16_t {name}_row_u8;
typedef int16_t {name}_weight_u8;
#endif
typedef int16_t {name}_row_i8;
typedef int16_t {name}_weight_i8;
{arrays}
#endif
{copies}"""

_COPY = {
    "i8": """
static inline void {name}_copy_i8({name}_row_i8 *restrict to, const int8_t *restrict codes, size_t count)
{{
    for (size_t k = 0; k < count; k++) {{
        to[k] = codes[k];
    }}
}}
""",
    "u8": """
static inline void {name}_copy_u8({name}_row_u8 *restrict to, const uint8_t *restrict codes, size_t count)
{{
#ifdef ROWS_ARE_BYTES
    memcpy(to, codes, count);
#else
    for (size_t k = 0; k < count; k++) {{
        to[k] = codes[k];
    }}
#endif
}}
""",
}

ROWS_END = """
#undef ROW
#undef PIXELS
#undef ROWS_ARE_VECTORS
#undef ROWS_ARE_BYTES
#undef MEMORY_OR_ROWS_U8
#undef MEMORY_OR_ROWS_I8
#undef MEMORY_OR_ROWS_SUM
"""
"""What stands behind everything, so that other files can be compiled together with this one."""


def rows_text(name: str, counts: dict[str, int]) -> str:
    """Return the types and memory of rows.

    Args:
        name: Prefix of all names.
        counts: Most codes of rows that are needed at one time, by type; rounded up to vectors.
    """
    if not counts:
        return ""
    arrays = []
    for word, count in counts.items():
        kind = _kind(word)
        array = f"{name}_rows_{kind}"
        arrays.append(f"static {word} {array}[{count}];")
        arrays.append(f"#define MEMORY_OR_ROWS_{kind.upper()}(memory) ((void)(memory), {array})")
    kinds = {_kind(word) for word in counts}
    copies = "".join(text.format(name=name) for kind, text in _COPY.items() if kind in kinds)
    return _TOP.format(
        name=name,
        upper=name.upper(),
        more=VECTOR - 1,
        vector=VECTOR,
        arrays="\n".join(arrays),
        copies=copies,
    )


def scratch_text(word: str, memory: str) -> str:
    """Return the argument for memory of rows: in the memory of all, or of their own."""
    return f"MEMORY_OR_ROWS_{_kind(word).upper()}({memory})"


def _kind(word: str) -> str:
    """Return ``u8``, ``i8`` or ``sum`` of the type of a row."""
    return word.rpartition("_")[2]


def row_word(prefix: str, x: Stored) -> str:
    """Return the type of rows of a value's codes, by the prefix of all names."""
    return f"{prefix}_row_{'u8' if x.word == 'uint8_t' else 'i8'}"


def copy_of(word: str) -> str:
    """Return the function that makes rows of a type of a value's codes."""
    return _sibling(word, "copy")


def _sibling(word: str, what: str) -> str:
    """Return a name that goes with the type of a row."""
    prefix, _, kind = word.rpartition("_row_")
    return f"{prefix}_{what}_{kind}"


def is_row(x: Stored, codes: Codes, word: str) -> bool:
    """Say whether a layer multiplies rows of bytes, with sums of 32 bits."""
    is_short = codes.min() >= -128 and codes.max() < 128
    return is_short and x.word in ("uint8_t", "int8_t") and word == "int32_t"


def products(
    tables: Tables,
    codes: Codes,
    names: tuple[str, str],
    given: tuple[str, int],
    rows: tuple[list[str], int],
) -> list[str]:
    """Return the loops that give sums of products, and define the weights.

    Args:
        tables: For the weights.
        codes: Weights, shape ``(outputs, codes of a row)``.
        names: Of the weights, and of the sum of output ``c``, without its last bracket.
        given: Type of the row, and how many outputs share a row.
        rows: The code that defines ``row``, and how many pixels have one: see ``over_block``.
    """
    (name, sums), (word, each), (row, pixels) = names, given, rows
    count, terms = codes.shape
    kind = _sibling(word, "weight")
    name = tables.add_rows(name, codes.tolist(), kind)
    own = range(gcd(_SIDE, each))
    dots = [
        *row,
        "int32_t " + ", ".join(f"sum{i} = 0" for i in own) + ";",
        f"{loop('k', f'ROW({terms})')} {{",
        *(f"sum{i} += (int32_t)row[k] * w{i}[k];" for i in own),
        "}",
        *(f"{sums}{f' + {i}' if i else ''}] = sum{i};" for i in own),
    ]
    return [
        f"for (size_t c = 0; c < {count}; c += {len(own)}) {{",
        *(f"const {kind} *restrict w{i} = {name}[c{f' + {i}' if i else ''}];" for i in own),
        *over_block(pixels, dots),
        "}",
    ]


def block_of(shape: Shape) -> int:
    """Return how many pixels of a row of an image have their windows made at a time."""
    width = shape[-1]
    return -(-width // -(-width // _BLOCK))


def over_block(pixels: int, body: list[str]) -> list[str]:
    """Return the loop over the pixels of a block around ``body``; none for 0."""
    return [f"{loop('p', f'PIXELS({pixels})')} {{", *body, "}"] if pixels else body


def over_blocks(shape: Shape, body: list[str]) -> list[str]:
    """Return the loops over blocks of pixels, each from ``start`` on, around ``body``.

    The last block of a row may begin within the one before: these pixels are computed twice.
    """
    height, width = shape[1:] if len(shape) == 3 else (1, shape[1])
    pixels = f"PIXELS({block_of(shape)})"
    is_whole = width % block_of(shape) == 0
    first, last = "start" if is_whole else "next", f"{width} - {pixels}"
    return [
        f"{loop('y', height)} {{",
        f"for (size_t {first} = 0; {first} < {width}; {first} += {pixels}) {{",
        *([] if is_whole else [f"const size_t start = next < {last} ? next : {last};"]),
        *body,
        "}",
        "}",
    ]


def longest(terms: int, groups: int) -> int:
    """Return how many codes rows have with vectors."""
    return groups * -(-terms // VECTOR) * VECTOR
