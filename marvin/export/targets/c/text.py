"""The two files: what stands before and behind the steps."""

from collections.abc import Sequence

from fixedpoint_kernels import FixedPoint
from marvin.export.targets.c.memory import Memory
from marvin.export.targets.c.values import Function, Stored

__all__ = ["Facts", "header", "source"]

Facts = tuple[str, Stored, Stored, FixedPoint]  # name, input, output, format of the input

_HEADER = """\
/* A network in integers, written by marvin-fixedpoint. C99, no dependency, no allocation.
 *
 * {name}_run computes one sample. {input_order}
 * A code is worth 2^-FL. {name}_encode makes codes of floats.
 * It keeps {memory} bytes of memory between calls, so it is not for two threads at a time. */
#ifndef {upper}_H
#define {upper}_H

#include <stdint.h>

#define {upper}_INPUTS {inputs}
#define {upper}_INPUT_FL ({input_fl})
#define {upper}_INPUT_MIN ({input_min})
#define {upper}_INPUT_MAX {input_max}
#define {upper}_OUTPUTS {outputs}
#define {upper}_OUTPUT_FL ({output_fl})

typedef {input_word} {name}_input;
typedef {output_word} {name}_output;

#ifdef __cplusplus
extern "C" {{
#endif

/* input: {upper}_INPUTS codes, output: {upper}_OUTPUTS codes */
void {name}_run(const {name}_input *input, {name}_output *output);

/* nearest code of each number, ties to even, saturated; NaN becomes the smallest */
void {name}_encode(const float *numbers, {name}_input *codes);

#ifdef __cplusplus
}}
#endif

#endif
"""

_TOP = """\
/* See {name}.h. Compile with -D{upper}_MAIN for a program that reads codes of samples and prints those
 * that come out, one sample a line. */
#include "{name}.h"

#include <stddef.h>

/* numbers are shifted to the right as signed ones, as every compiler for these processors does */
typedef char {name}_shifts_are_arithmetic[(-3 >> 1) == -2 ? 1 : -1];
"""

_RUN = """\
void {name}_run(const {name}_input *input, {name}_output *output)
{{
{calls}
}}

void {name}_encode(const float *numbers, {name}_input *codes)
{{
    for (size_t i = 0; i < {inputs}; i++) {{
        const float x = numbers[i] * {scale}F;
        if (!(x > {low}.0F)) {{
            codes[i] = ({name}_input)({low});
        }} else if (x >= {end}.0F) {{
            codes[i] = {high};
        }} else {{
            int32_t code = (int32_t)x; /* towards 0 */
            const float rest = x - (float)code;
            const int is_odd = (code & 1) != 0;
            if (rest > 0.5F || (rest >= 0.5F && is_odd)) {{
                code += 1;
            }} else if (rest < -0.5F || (rest <= -0.5F && is_odd)) {{
                code -= 1;
            }}
            codes[i] = ({name}_input)code;
        }}
    }}
}}

#ifdef {upper}_MAIN
#include <stdio.h>

int main(void)
{{
    static {name}_input input[{upper}_INPUTS];
    static {name}_output output[{upper}_OUTPUTS];
    size_t count = 0;
    long code;
    while (scanf("%ld", &code) == 1) {{
        input[count++] = ({name}_input)code;
        if (count == {upper}_INPUTS) {{
            {name}_run(input, output);
            for (size_t i = 0; i < {upper}_OUTPUTS; i++) {{
                printf("%lld%c", (long long)output[i], i + 1 < {upper}_OUTPUTS ? ' ' : '\\n');
            }}
            count = 0;
        }}
    }}
    return count != 0 || !feof(stdin);
}}
#endif
"""


def header(facts: Facts, memory: Memory) -> str:
    """Return the header."""
    name, x, y, fmt = facts
    orders = {"Images come in": x.order, "Images go out": y.order}
    order = " ".join(
        f"{what} by rows, columns, channels." for what, order in orders.items() if order is not None
    )
    return _HEADER.format(
        name=name,
        upper=name.upper(),
        input_order=order or "Codes are in the order of the network.",
        memory=f"{memory.size_bytes:,}",
        inputs=x.count,
        input_fl=x.fl,
        input_min=fmt.min_code,
        input_max=fmt.max_code,
        outputs=y.count,
        output_fl=y.fl,
        input_word=x.word,
        output_word=y.word,
    )


def source(
    facts: Facts,
    tables: Sequence[str],
    called: str,
    functions: Sequence[Function],
    memory: Memory,
    calls: Sequence[str],
) -> str:
    """Return the C file."""
    name, _x, _, fmt = facts
    arrays = [f"static int{bits}_t memory_{bits}[{n}];" for bits, n in memory.counts.items()]
    parts = [
        _TOP.format(name=name, upper=name.upper()),
        "\n".join(tables),
        "\n".join(arrays),
        called,
        "\n".join(function.text for function in functions),
        _RUN.format(
            name=name,
            upper=name.upper(),
            calls="\n".join(f"    {call}" for call in calls),
            inputs=f"{name.upper()}_INPUTS",
            scale=float(fmt.scale),
            low=fmt.min_code,
            high=fmt.max_code,
            # a float32 has each number of 24 bits; of longer words, what is below 2^n is the largest or less
            end=fmt.max_code + (fmt.max_code >= 2**24),
        ),
    ]
    return "\n".join(part for part in parts if part)
