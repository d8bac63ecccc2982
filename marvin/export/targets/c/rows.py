"""Rows of bytes times rows of weights, as processors with vectors take them, or with little memory.

The compiler chooses, by its macros, what rows are. With vectors they have 16 bits, and are as long as whole
vectors, unless the processor multiplies bytes; without, they are bytes, and no longer than they must be.
"""

from marvin.export.execute.arithmetic import Codes
from marvin.export.targets.c.values import Stored
from marvin.export.targets.c.words import Tables, loop

__all__ = ["VECTOR", "is_row", "longest", "products", "row_word", "rows_text", "scratch_text"]

VECTOR = 32  # bytes: rows are as long as some of these
_SIDE = 4  # outputs at a time: they share what is read of the row

_TOP = """\
/* Rows of codes are multiplied with rows of weights. With vectors, rows are whole vectors, and codes have 16
 * bits where no instruction multiplies bytes. Compile with -D{upper}_SMALL for less memory. */
#if defined({upper}_SMALL) || !(defined(__SSE2__) || defined(__ARM_NEON))
#define ROW(codes) (codes)
typedef uint8_t row_u8;
typedef int8_t row_i8;
typedef int8_t weight_u8;
typedef int8_t weight_i8;
#define MEMORY_OR_ROWS_U8(memory) (memory)
#define MEMORY_OR_ROWS_I8(memory) (memory)
#else
#define ROWS_ARE_VECTORS
#define ROW(codes) (((codes) + {more}) / {vector} * {vector})
#if defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
typedef uint8_t row_u8;
typedef int8_t weight_u8;
#else
typedef int16_t row_u8;
typedef int16_t weight_u8;
#endif
typedef int16_t row_i8;
typedef int16_t weight_i8;
{arrays}
#endif
"""


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
        kind = word.removeprefix("row_")
        arrays.append(f"static {word} rows_{kind}[{count}];")
        arrays.append(
            f"#define MEMORY_OR_ROWS_{kind.upper()}(memory) ((void)(memory), rows_{kind})"
        )
    return _TOP.format(upper=name.upper(), more=VECTOR - 1, vector=VECTOR, arrays="\n".join(arrays))


def scratch_text(word: str, memory: str) -> str:
    """Return the argument for memory of rows: in the memory of all, or of their own."""
    return f"MEMORY_OR_ROWS_{word.removeprefix('row_').upper()}({memory})"


def row_word(x: Stored) -> str:
    """Return the type of rows of a value's codes."""
    return "row_u8" if x.word == "uint8_t" else "row_i8"


def is_row(x: Stored, codes: Codes, word: str) -> bool:
    """Say whether a layer multiplies rows of bytes, with sums of 32 bits."""
    is_short = codes.min() >= -128 and codes.max() < 128
    return is_short and x.word in ("uint8_t", "int8_t") and word == "int32_t"


def products(
    tables: Tables, codes: Codes, names: tuple[str, str, str], x: Stored, each: int
) -> list[str]:
    """Return the loops that give sums of products, and define the weights.

    Args:
        tables: For the weights.
        codes: Weights, shape ``(outputs, codes of a row)``.
        names: Of the weights, of the rows of codes, and of the sums.
        x: What comes in.
        each: Outputs that share a row: rows of groups lie one behind the other.
    """
    name, rows, sums = names
    count, terms = codes.shape
    kind = row_word(x).replace("row", "weight")
    tables.add_rows(name, codes.tolist(), kind)
    side = _SIDE if each % _SIDE == 0 else 1
    own = range(side)
    row = rows if each == count else f"{rows} + c / {each} * ROW({terms})"
    return [
        f"for (size_t c = 0; c < {count}; c += {side}) {{",
        f"const {row_word(x)} *restrict row = {row};",
        *(f"const {kind} *restrict w{i} = {name}[c{f' + {i}' if i else ''}];" for i in own),
        "int32_t " + ", ".join(f"sum{i} = 0" for i in own) + ";",
        f"{loop('k', f'ROW({terms})')} {{",
        *(f"sum{i} += (int32_t)row[k] * w{i}[k];" for i in own),
        "}",
        *(f"{sums}[c{f' + {i}' if i else ''}] = sum{i};" for i in own),
        "}",
    ]  # fmt: skip


def longest(terms: int, groups: int) -> int:
    """Return how many codes rows have with vectors."""
    return groups * -(-terms // VECTOR) * VECTOR
