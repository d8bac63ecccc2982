"""Convolutions and linear layers: the window as one row, times the rows of weights."""

from dataclasses import replace
from math import prod

import numpy as np

from marvin.export.errors import ExportError
from marvin.export.execute.arithmetic import Codes
from marvin.export.graph.nodes import Conv, Weighted
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
    name = f"{writer.lines.name}_weight"
    is_wide = max(int(np.abs(codes).max()), 1) * max(-x.low, x.high) >= 2**31
    dots = _dots(writer, codes, name, "int64_t" if is_wide else "int32_t")
    term = _biased(op, Term("sum", x.fl + op.weight_fmt.fl, lows, highs, "c", word=word))
    before, row, place = [], writer.source(op.inputs[0]), "c"
    if isinstance(op, Conv):
        before, place = _gather(writer, op, x), f"pixel * {len(codes)} + c"
        row = f"window + c / {len(codes) // op.groups} * {terms}" if op.groups > 1 else "window"
    sums = f"s{len(writer.scratch)}"
    writer.scratch.append((word, len(codes)))
    channels = f"{loop('c', len(codes))} {{"
    # all sums first: so compilers see two loops that they can make vectors of
    body = [
        *before,
        channels, f"const {x.word} *restrict row = {row};", f"{word} sum = 0;", *dots,
        f"{sums}[c] = sum;", "}",
        channels, f"const size_t i = {place};",
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


def _dots(writer: Writer, codes: Codes, name: str, word: str) -> list[str]:
    """Return the loops that add products of a row of weights to ``sum``."""
    tables, count = writer.lines.tables, codes.shape[1]
    if writer.nibbles and codes.min() >= -8 and codes.max() < 8 and count > 1:
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


def _gather(writer: Writer, op: Conv, x: Stored) -> list[str]:
    """Return the code that makes ``window``: all codes under the kernel, group by group."""
    at = window_of(op, x)
    name, (channels, _, width) = writer.source(op.inputs[0]), at.shape
    pixel = f"(yy * {width} + xx) * {channels}"
    if at.size == (1, 1) and at.padding == (0, 0):
        start = f"({corner('y', at.stride[0])}) * {width} + {corner('x', at.stride[1])}"
        return [f"const {x.word} *restrict window = {name} + ({start}) * {channels};"]
    size, each = prod(at.size), channels // op.groups
    window = f"s{len(writer.scratch)}"
    writer.scratch.append((x.word, size * channels))
    inside = at.inside()
    read = f"{name}[at + k]" if not inside else f"is_inside ? {name}[at + k] : ({x.word})0"
    place = "k"
    if op.groups > 1:
        place = f"k / {each} * {size * each} + k % {each}"
    return [
        f"{x.word} *restrict window = {window};",
        *at.places(),
        *([f"const int is_inside = {inside};"] if inside else []),
        f"const size_t at = {f'is_inside ? {pixel} : 0' if inside else pixel};",
        f"{x.word} *restrict to = window + (ky * {at.size[1]} + kx) * {each};",
        f"{loop('k', channels)} {{",
        f"to[{place}] = {read};",
        "}",
        "}",
        "}",
    ]


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
    writer.scratch.append((word, channels))
    source, product = writer.source(op.inputs[0]), "int64_t" if is_wide else "int32_t"
    term = _biased(op, Term("sum", x.fl + op.weight_fmt.fl, lows, highs, "c", word=word))
    each = results(writer, op, term)
    body = [
        f"{loop('c', channels)} {{", "s0[c] = 0;", "}",
        *at.places(),
        *([f"if ({inside}) {{"] if inside else []),
        f"const {x.word} *restrict row = {source} + (yy * {width} + xx) * {channels};",
        f"const {kind} *restrict w = {name} + (ky * {at.size[1]} + kx) * {channels};",
        f"{loop('c', channels)} {{", f"s0[c] += ({product})row[c] * w[c];", "}",
        *(["}"] if inside else []), "}", "}",
        f"{loop('c', channels)} {{",
        f"const size_t i = pixel * {channels} + c;", f"const {word} sum = s0[c];",
        *each, "}",
    ]  # fmt: skip
    return over_pixels(shape, body)
