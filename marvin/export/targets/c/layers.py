"""Convolutions and linear layers: the window as one row, times the rows of weights."""

from dataclasses import replace
from math import prod

import numpy as np

from marvin.export.errors import ExportError
from marvin.export.execute.arithmetic import Codes
from marvin.export.graph.nodes import Conv, Weighted
from marvin.export.targets.c.rows import is_row, longest, products, row_word
from marvin.export.targets.c.terms import Term
from marvin.export.targets.c.values import Scratch, Stored, channels_last
from marvin.export.targets.c.windows import corner, over_pixels, window_of
from marvin.export.targets.c.words import computing, loop, storing
from marvin.export.targets.c.writer import Writer, results

__all__ = ["weighted"]


def weighted(writer: Writer, op: Weighted) -> list[str]:
    """Write a convolution or a linear layer: the window as one row, times the rows of weights.

    Raises:
        ExportError: It is a linear layer over several dimensions; ``describe`` makes none.
    """
    x, shape = writer.stored[op.inputs[0]], writer.network.values[op.name].shape
    writer.order = channels_last(shape) if isinstance(op, Conv) else None
    if not isinstance(op, Conv) and len(shape) != 1:
        raise ExportError(f"{op.name} cannot be written as C: it takes values of shape {x.shape}")
    if isinstance(op, Conv) and op.groups > 1 and op.weight.shape[:2] == (op.groups, 1):
        return _depthwise(writer, op, x)
    codes, terms = _rows(op, x)
    lows, highs = _sums(codes, x)
    word = computing(op.name, _partial(codes, x))
    name, groups = f"{writer.lines.name}_weight", op.groups if isinstance(op, Conv) else 1
    term = _biased(op, Term("sum", x.fl + op.weight_fmt.fl, lows, highs, "c", word=word))
    if is_row(x, codes, word) and not _in_nibbles(writer, codes):
        sums = writer.needs("int32_t", len(codes))
        before, row = _gather(writer, op, x, row_word(x))
        names = name, row, sums
        dots = products(writer.lines.tables, codes, names, x, len(codes) // groups)
    else:
        before, row = _gather(writer, op, x, x.word)
        sums = writer.needs(word, len(codes))
        row = f"{row} + c / {len(codes) // groups} * {terms}" if groups > 1 else row
        is_wide = max(int(np.abs(codes).max()), 1) * max(-x.low, x.high) >= 2**31
        dots = [
            f"{loop('c', len(codes))} {{",
            f"const {x.word} *restrict row = {row};",
            f"{word} sum = 0;",
            *_dots(writer, codes, name, "int64_t" if is_wide else "int32_t"),
            f"{sums}[c] = sum;",
            "}",
        ]
    # all sums first: so compilers see two loops that they can make vectors of
    body = [
        *before, *dots,
        f"{loop('c', len(codes))} {{",
        f"const size_t i = {f'pixel * {len(codes)} + c' if isinstance(op, Conv) else 'c'};",
        f"const {word} sum = {sums}[c];", *results(writer, op, term), "}",
    ]  # fmt: skip
    return over_pixels(shape, body) if isinstance(op, Conv) else body


def _rows(op: Weighted, x: Stored) -> tuple[Codes, int]:
    """Return the weights of each output in the order of the window, and how many they are.

    With an ``fl`` for each channel, codes are without the zeros at their ends.
    """
    weight = op.weight.numpy()
    if isinstance(op, Conv):
        weight = np.moveaxis(weight, 1, -1)
    elif x.order is not None:
        weight = weight[:, x.order]
    weight = weight.reshape(len(weight), -1)
    zeros = np.array(op.trailing_zeros)[:, None]
    return weight >> zeros, weight.shape[1]


def _biased(op: Weighted, term: Term) -> Term:
    """Return sums at their ``fl``, with the bias."""
    term = term.times([1 << zeros for zeros in op.trailing_zeros], 0, "c")
    if len(set(op.trailing_zeros)) == 1:
        term = replace(term, scale=term.scale[:1], offset=term.offset[:1])
    return term if op.bias is None else term.plus(op.bias.tolist(), op.bias_fmt.fl, "c")


def _sums(codes: Codes, x: Stored) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the smallest and largest sum of each output, zeros around images included."""
    low, high = min(x.low, 0), max(x.high, 0)
    positive = np.maximum(codes, 0).sum(1).tolist()
    negative = np.minimum(codes, 0).sum(1).tolist()
    lows = tuple(p * low + n * high for p, n in zip(positive, negative, strict=True))
    highs = tuple(p * high + n * low for p, n in zip(positive, negative, strict=True))
    return lows, highs


def _partial(codes: Codes, x: Stored) -> int:
    """Return a bound of every partial sum, in any order."""
    return int(np.abs(codes).sum(1).max()) * max(-x.low, x.high, 1)


def _in_nibbles(writer: Writer, codes: Codes) -> bool:
    return writer.nibbles and codes.min() >= -8 and codes.max() < 8 and codes.shape[1] > 1


def _dots(writer: Writer, codes: Codes, name: str, word: str) -> list[str]:
    """Return the loops that add products of a row of weights to ``sum``."""
    tables, count = writer.lines.tables, codes.shape[1]
    if _in_nibbles(writer, codes):
        half = (count + 1) // 2
        low, high = codes[:, :half] & 15, np.zeros((len(codes), half), np.int64)
        high[:, : count - half] = codes[:, half:]
        both = (low | high << 4).reshape(-1)
        tables.add(name, np.where(both > 127, both - 256, both).tolist(), "int8_t")
        return [
            f"const int8_t *restrict w = {name} + c * {half};",
            f"{loop('k', half)} {{",
            f"sum += ({word})row[k] * (((w[k] & 15) ^ 8) - 8);",
            "}",
            f"{loop('k', count - half)} {{",
            f"sum += ({word})row[{half} + k] * (w[k] >> 4);",
            "}",
        ]
    values = codes.reshape(-1).tolist()
    kind = storing(min(*values, -1), max(values))  # signed: what processors multiply bytes with
    tables.add(name, values, kind)
    return [
        f"const {kind} *restrict w = {name} + c * {count};",
        f"{loop('k', count)} {{",
        f"sum += ({word})row[k] * w[k];",
        "}",
    ]


def _gather(writer: Writer, op: Weighted, x: Stored, word: str) -> tuple[list[str], str]:
    """Return the code that makes a row of all codes under the kernel, group by group, and its name."""
    name = writer.source(op.inputs[0])
    if not isinstance(op, Conv):
        return _in_place(writer, name, x, word, x.count)
    at = window_of(op, x)
    channels, _, width = at.shape
    pixel = f"(yy * {width} + xx) * {channels}"
    if at.size == (1, 1) and at.padding == (0, 0) and op.groups == 1:
        start = f"({corner('y', at.stride[0])}) * {width} + {corner('x', at.stride[1])}"
        return _in_place(writer, f"{name} + ({start}) * {channels}", x, word, channels)
    size, each = prod(at.size), channels // op.groups
    row = f"{size * each}" if word == x.word else f"ROW({size * each})"
    window = _needs_row(writer, x, word, size * each, op.groups)
    place = "k" if op.groups == 1 else f"k / {each} * {row} + k % {each}"
    inside = at.inside()
    copied = [f"{loop('k', channels)} {{", f"to[{place}] = {name}[{pixel} + k];", "}"]
    zeros = [f"{loop('k', channels)} {{", f"to[{place}] = 0;", "}"]
    body = [f"if ({inside}) {{", *copied, "} else {", *zeros, "}"] if inside else copied
    return [
        f"{word} *restrict window = {window};",
        *at.places(),
        f"{word} *restrict to = window + (ky * {at.size[1]} + kx) * {each};",
        *body, "}", "}",
    ], "window"  # fmt: skip


def _needs_row(writer: Writer, x: Stored, word: str, terms: int, groups: int = 1) -> str:
    vectors = 0 if word == x.word else longest(terms, groups)
    writer.scratch.append(Scratch(word, x.word, terms * groups, vectors))
    return f"s{len(writer.scratch) - 1}"


def _in_place(
    writer: Writer, place: str, x: Stored, word: str, terms: int
) -> tuple[list[str], str]:
    """Return the code for a row that lies in memory already; vectors take a copy of it."""
    if word == x.word:
        return [f"const {word} *restrict window = {place};"], "window"
    writer.scratch.append(Scratch(word, x.word, 0, longest(terms, 1)))
    own = f"s{len(writer.scratch) - 1}"
    return [
        "#ifdef ROWS_ARE_VECTORS",
        f"{loop('k', terms)} {{", f"{own}[k] = ({place})[k];", "}",
        f"const {word} *restrict window = {own};",
        "#else",
        f"(void){own};",
        f"const {word} *restrict window = {place};",
        "#endif",
    ], "window"  # fmt: skip


def _depthwise(writer: Writer, op: Conv, x: Stored) -> list[str]:
    """Each channel by itself: sums of all channels side by side."""
    shape = writer.network.values[op.name].shape
    codes, _ = _rows(op, x)
    lows, highs = _sums(codes, x)
    word = computing(op.name, _partial(codes, x))
    is_wide = max(int(np.abs(codes).max()), 1) * max(-x.low, x.high) >= 2**31
    values = codes.T.reshape(-1).tolist()
    kind = storing(min(*values, -1), max(values))
    name = writer.lines.tables.add(f"{writer.lines.name}_weight", values, kind)
    at = window_of(op, x)
    channels, width, inside = shape[0], at.shape[2], at.inside()
    sums = writer.needs(word, channels)
    source, product = writer.source(op.inputs[0]), "int64_t" if is_wide else "int32_t"
    term = _biased(op, Term("sum", x.fl + op.weight_fmt.fl, lows, highs, "c", word=word))
    each = results(writer, op, term)
    body = [
        f"{loop('c', channels)} {{", f"{sums}[c] = 0;", "}",
        *at.places(),
        *([f"if ({inside}) {{"] if inside else []),
        f"const {x.word} *restrict row = {source} + (yy * {width} + xx) * {channels};",
        f"const {kind} *restrict w = {name} + (ky * {at.size[1]} + kx) * {channels};",
        f"{loop('c', channels)} {{", f"{sums}[c] += ({product})row[c] * w[c];", "}",
        *(["}"] if inside else []), "}", "}",
        f"{loop('c', channels)} {{",
        f"const size_t i = pixel * {channels} + c;", f"const {word} sum = {sums}[c];",
        *each, "}",
    ]  # fmt: skip
    return over_pixels(shape, body)
