"""The two files: what stands before and behind the steps."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fixedpoint_kernels import FixedPoint
from marvin.export.targets.c.memory import Memory
from marvin.export.targets.c.values import Function, Stored
from marvin.export.targets.c.words import identifier

__all__ = ["Facts", "header", "output_names", "source"]


@dataclass(frozen=True)
class Facts:
    """What a caller of the C function knows.

    Args:
        name: Prefix of all names.
        input: What comes in.
        outputs: What goes out, by its label.
        fmt: Of what comes in; None where these are indices.
    """

    name: str
    input: Stored
    outputs: Mapping[str, Stored]
    fmt: FixedPoint | None


def output_names(labels: Iterable[str]) -> dict[str, str]:
    """Return the names of outputs' parameters by label: ``output``, with the label behind it where it has one.

    They differ in capital letters too, of which macros are made.
    """
    labels = list(labels)
    if labels == ["output"]:
        return {"output": "output"}
    names = [f"output_{identifier(label)}" for label in labels]
    while len({name.upper() for name in names}) < len(names):
        capitals = [name.upper() for name in names]
        names = [
            name if capitals.count(own) == 1 else f"{name}_{capitals[:i].count(own)}"
            for i, (name, own) in enumerate(zip(names, capitals, strict=True))
        ]
    return dict(zip(labels, names, strict=True))


_HEADER = """\
/* A network in integers, written by marvin-fixedpoint. C99, no dependency, no allocation.
 *
 * {name}_run computes one sample. {input_order}
 * A code is worth 2^-FL. {encoding}
 * It keeps {memory} bytes of memory between calls, so it is not for two threads at a time. */
#ifndef {upper}_H
#define {upper}_H

#include <stdint.h>

#define {upper}_INPUTS {inputs}
#define {upper}_INPUT_FL ({input_fl})
#define {upper}_INPUT_MIN ({input_min})
#define {upper}_INPUT_MAX {input_max}
{defines}

typedef {input_word} {name}_input;
{typedefs}

#ifdef __cplusplus
extern "C" {{
#endif

/* input: {upper}_INPUTS codes, {counts} */
void {name}_run({parameters});

{encode}#ifdef __cplusplus
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
void {name}_run({parameters})
{{
{calls}
}}

{encode}#ifdef {upper}_MAIN
#include <stdio.h>

int main(void)
{{
    static {name}_input input[{upper}_INPUTS];
{arrays}
    size_t count = 0;
    long code;
    while (scanf("%ld", &code) == 1) {{
        if (code < {upper}_INPUT_MIN || code > {upper}_INPUT_MAX) {{
            return 1;
        }}
        input[count++] = ({name}_input)code;
        if (count == {upper}_INPUTS) {{
            {name}_run(input, {names});
{prints}
            putchar('\\n');
            count = 0;
        }}
    }}
    return count != 0 || !feof(stdin);
}}
#endif
"""

_ENCODE = """\
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
"""

_PRINT = """\
            for (size_t i = 0; i < {count}; i++) {{
                printf("%lld ", (long long){own}[i]);
            }}"""


_ENCODE_DECLARED = """\
/* nearest code of each number, ties to even, saturated; NaN becomes the smallest */
void {name}_encode(const float *numbers, {name}_input *codes);

"""
_CODES = "{name}_encode makes codes of floats."
_INDICES = "What comes in are indices of rows, which nothing checks."


def header(facts: Facts, memory: Memory) -> str:
    """Return the header."""
    name, x, fmt = facts.name, facts.input, facts.fmt
    orders = {"Images come in": [x], "Images go out": facts.outputs.values()}
    order = " ".join(
        f"{what} by rows, columns, channels."
        for what, values in orders.items()
        if any(value.order is not None for value in values)
    )
    defines, typedefs, counts = [], [], []
    for own, y in _outputs(facts).items():
        count = _count(facts, own)
        defines += [
            f"#define {count} {y.count}",
            f"#define {f'{name}_{own}'.upper()}_FL ({y.fl})",
        ]
        typedefs.append(f"typedef {y.word} {name}_{own};")
        counts.append(f"{own}: {count} codes")
    return _HEADER.format(
        name=name,
        upper=name.upper(),
        input_order=order or "Codes are in the order of the network.",
        memory=f"{memory.size_bytes:,}",
        inputs=x.count,
        input_fl=x.fl,
        input_min=x.low,
        input_max=x.high,
        encoding=_CODES.format(name=name) if fmt else _INDICES,
        encode=_ENCODE_DECLARED.format(name=name) if fmt else "",
        input_word=x.word,
        defines="\n".join(defines),
        typedefs="\n".join(typedefs),
        counts=", ".join(counts),
        parameters=_parameters(facts),
    )


def _outputs(facts: Facts) -> dict[str, Stored]:
    names = output_names(facts.outputs)
    return {names[label]: y for label, y in facts.outputs.items()}


def _count(facts: Facts, own: str) -> str:
    return f"{facts.name}_{own.replace('output', 'outputs', 1)}".upper()


def _parameters(facts: Facts) -> str:
    name = facts.name
    outputs = (f"{name}_{own} *{own}" for own in _outputs(facts))
    return ", ".join([f"const {name}_input *input", *outputs])


def source(
    facts: Facts,
    tables: Sequence[str],
    helpers: str,
    functions: Sequence[Function],
    memory: Memory,
    calls: Sequence[str],
) -> str:
    """Return the C file."""
    name, fmt, outputs = facts.name, facts.fmt, _outputs(facts)
    prints = [_PRINT.format(own=own, count=_count(facts, own)) for i, own in enumerate(outputs)]
    arrays = [f"static int{bits}_t {name}_memory_{bits}[{n}];" for bits, n in memory.counts.items()]
    parts = [
        _TOP.format(name=name, upper=name.upper()),
        "\n".join(tables),
        "\n".join(arrays),
        helpers,
        "\n".join(function.text for function in functions),
        _RUN.format(
            name=name,
            upper=name.upper(),
            calls="\n".join(f"    {call}" for call in calls),
            parameters=_parameters(facts),
            arrays="\n".join(
                f"    static {name}_{own} {own}[{_count(facts, own)}];" for own in outputs
            ),
            names=", ".join(outputs),
            prints="\n".join(prints),
            encode="" if fmt is None else _encode(name, fmt),
        ),
    ]
    return "\n".join(part for part in parts if part)


def _encode(name: str, fmt: FixedPoint) -> str:
    return _ENCODE.format(
        name=name,
        inputs=f"{name.upper()}_INPUTS",
        scale=float(fmt.scale),
        low=fmt.min_code,
        high=fmt.max_code,
        # a float32 has each number of 24 bits; of longer words, what is below 2^n is the largest or less
        end=fmt.max_code + (fmt.max_code >= 2**24),
    )
