"""Convolutions and linear layers: the window as one row, times the rows of weights."""

from dataclasses import replace
from math import prod

import numpy as np

from marvin.export.errors import ExportError
from marvin.export.execute.arithmetic import Codes
from marvin.export.graph.nodes import Conv, Weighted
from marvin.export.targets.c.rows import (
    block_of,
    copy_of,
    is_row,
    longest,
    over_block,
    over_blocks,
    products,
    row_word,
)
from marvin.export.targets.c.terms import Term
from marvin.export.targets.c.values import Stored, channels_last
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
        return _rows_of_bytes(writer, op, codes, term)
    before, row = _gather(writer, op, x)
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


def _rows_of_bytes(writer: Writer, op: Weighted, codes: Codes, term: Term) -> list[str]:
    """Write a layer of bytes: rows of some pixels, then all their sums, then what is done to each.

    So no loop waits for what the one before has just written, and weights are read once for some pixels.
    """
    x, shape = writer.stored[op.inputs[0]], writer.network.values[op.name].shape
    (count, terms), word, is_conv = codes.shape, row_word(writer.prefix, x), isinstance(op, Conv)
    groups, pixels = (op.groups, block_of(shape)) if isinstance(op, Conv) else (1, 0)
    place, many = _in_place(writer, op, x, "(start + p)"), max(pixels, 1)
    rows = writer.needs_rows(
        word, x.word, 0 if place else groups * terms, many * longest(terms, groups)
    )
    sums = writer.needs_rows(f"{writer.prefix}_row_sum", "int32_t", count, many * count)
    row = f"{rows} + p * {groups} * ROW({terms})" if is_conv else rows
    before = [f"{word} *restrict window = {row};"]
    if groups > 1:
        row += f" + c / {count // groups} * ROW({terms})"
    read = [f"const {word} *restrict row = {row};"]
    if place:
        before.append(f"{copy_of(word)}(window, {place}, {terms});")
        read = ["#ifdef ROWS_ARE_VECTORS", *read, "#else"]
        read += [f"const {word} *restrict row = {place};", "#endif"]
    elif isinstance(op, Conv):
        before += ["const size_t x = start + p;", *_under_kernel(writer, op, x, is_row=True)]
    before = over_block(pixels, before)
    if place:
        unused = f"(void){rows}, (void){copy_of(word)};"
        before = ["#ifdef ROWS_ARE_VECTORS", *before, "#else", unused, "#endif"]
    own = f"{sums}[p * {count} + c" if is_conv else f"{sums}[c"
    names = f"{writer.lines.name}_weight", own
    dots = products(writer.lines.tables, codes, names, (word, count // groups), (read, pixels))
    after = [
        *([f"const size_t pixel = y * {shape[-1]} + start + p;"] if is_conv else []),
        f"{loop('c', count)} {{",
        f"const size_t i = {f'pixel * {count} + c' if is_conv else 'c'};",
        f"const int32_t sum = {own}];",
        *results(writer, op, term), "}",
    ]  # fmt: skip
    body = [*before, *dots, *over_block(pixels, after)]
    return over_blocks(shape, body) if is_conv else body


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
        name = tables.add(name, np.where(both > 127, both - 256, both).tolist(), "int8_t")
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
    name = tables.add(name, values, kind)
    return [
        f"const {kind} *restrict w = {name} + c * {count};",
        f"{loop('k', count)} {{",
        f"sum += ({word})row[k] * w[k];",
        "}",
    ]


def _in_place(writer: Writer, op: Weighted, x: Stored, column: str) -> str:
    """Return where the row of a pixel lies in memory already; "" where it must be made."""
    name = writer.source(op.inputs[0])
    if not isinstance(op, Conv):
        return name
    at = window_of(op, x)
    if at.size != (1, 1) or at.padding != (0, 0) or op.groups > 1:
        return ""
    channels, _, width = at.shape
    pixel = f"({corner('y', at.stride[0])}) * {width} + {corner(column, at.stride[1])}"
    return f"{name} + ({pixel}) * {channels}"


def _gather(writer: Writer, op: Weighted, x: Stored) -> tuple[list[str], str]:
    """Return the code that makes a row of all codes under the kernel, group by group, and its name."""
    if place := _in_place(writer, op, x, "x"):
        return [f"const {x.word} *restrict window = {place};"], "window"
    assert isinstance(op, Conv), "what a linear layer takes lies in memory"
    own = writer.needs(x.word, op.groups * prod(op.weight.shape[1:]))
    return [f"{x.word} *restrict window = {own};", *_under_kernel(writer, op, x)], "window"


def _under_kernel(writer: Writer, op: Conv, x: Stored, *, is_row: bool = False) -> list[str]:
    """Return the loops that put all codes under the kernel into ``window``, a row for each group."""
    at = window_of(op, x)
    channels, _, width = at.shape
    each, terms = channels // op.groups, prod(op.weight.shape[1:])
    word, row = (row_word(writer.prefix, x), f"ROW({terms})") if is_row else (x.word, f"{terms}")
    source = f"{writer.source(op.inputs[0])} + (yy * {width} + xx) * {channels}"
    to = "to"
    if op.groups > 1:
        to, source = f"to + group * {row}", f"{source} + group * {each}"
    copied = [f"{loop('k', each)} {{", f"({to})[k] = ({source})[k];", "}"]
    if is_row:
        copied = [f"{copy_of(word)}({to}, {source}, {each});"]
    zeros = [f"{loop('k', each)} {{", f"({to})[k] = 0;", "}"]
    inside = at.inside()
    body = [f"if ({inside}) {{", *copied, "} else {", *zeros, "}"] if inside else copied
    if op.groups > 1:
        body = [f"{loop('group', op.groups)} {{", *body, "}"]
    return [
        *at.places(),
        f"{word} *restrict to = window + (ky * {at.size[1]} + kx) * {each};",
        *body, "}", "}",
    ]  # fmt: skip


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
