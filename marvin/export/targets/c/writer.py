"""What is done to each result of a step, in the loop that makes it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from marvin.export.execute.arithmetic import Codes
from marvin.export.graph.functions import Clip, Mul, Table
from marvin.export.graph.nodes import (
    Add,
    Affine,
    Flatten,
    Network,
    Operation,
    Relu,
    Round,
)
from marvin.export.graph.views import Reshape, Transpose
from marvin.export.targets.c.schedule import ROWS, Step, orders_of
from marvin.export.targets.c.terms import Lines, Term
from marvin.export.targets.c.values import Scratch, Shape, Stored, channels_last, same_order
from marvin.export.targets.c.words import computing, identifier, literal, storing

__all__ = ["Writer", "results"]


@dataclass
class Writer:
    """What a step is written with."""

    network: Network
    step: Step
    stored: Mapping[str, Stored]
    lines: Lines
    nibbles: bool
    order: Codes | None = None
    terms: dict[str, Term] = field(default_factory=dict)
    outputs: dict[str, Stored] = field(default_factory=dict)
    scratch: list[Scratch] = field(default_factory=list)
    others: dict[str, tuple[str, Stored]] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """Of all names of the file."""
        return self.lines.helpers.prefix

    def needs(self, word: str, count: int) -> str:
        """Return the parameter for memory of some integers."""
        return self.needs_rows(word, word, count, 0)

    def needs_rows(self, word: str, stored: str, count: int, vectors: int) -> str:
        """Return the parameter for rows: see ``Scratch``."""
        self.scratch.append(Scratch(word, stored, count, vectors))
        return f"s{len(self.scratch) - 1}"

    def source(self, name: str) -> str:
        """Return the parameter that has a value, in whatever order."""
        return f"x{self.step.inputs.index(name)}"


def results(writer: Writer, first: Operation | None, term: Term | None) -> list[str]:
    """Return the code that makes of each result of a head what is stored.

    ``i`` is the place in memory, ``c`` the channel.
    """
    if first is not None and term is not None:
        writer.terms[first.name] = term
    orders = orders_of(writer.network, writer.step, writer.order)
    for op in writer.step.operations:
        writer.order = orders[op.name]
        if op is not first:
            terms = [_term(writer, op, name) for name in op.inputs]
            writer.terms[op.name] = _POINTWISE[type(op)](writer, op, *terms)
        if op.name in writer.step.stored:
            _store(writer, op)
    return writer.lines.lines


def _term(writer: Writer, op: Operation, name: str) -> Term:
    """Return a value as a variable, or as what a variable is yet to become."""
    if name not in writer.terms:
        value, shape = writer.stored[name], writer.network.values[op.name].shape
        word = computing(name, max(-value.low, value.high))
        place = "i" if value.count == prod(shape) else _by_channel(writer, shape)[0]
        text = f"{writer.source(name)}[{place}]"
        writer.terms[name] = writer.lines.new(word, text, value.fl, value.low, value.high)
    return writer.terms[name]


def _store(writer: Writer, op: Operation) -> None:
    term = writer.lines.settle(writer.terms[op.name], op.name)
    outputs = writer.network.outputs.values()
    shape = writer.network.values[op.name].shape
    same = [n for n in writer.outputs if writer.terms[n] == term and n not in outputs]
    if same and op.name not in outputs:
        stored = replace(writer.outputs[same[0]], shape=shape, order=writer.order)
        writer.others[op.name] = same[0], stored
        writer.terms[op.name] = term
        return
    if op.name in outputs:  # its codes are those of the network
        fl = writer.network.values[op.name].fl
        if term.fl != fl:
            low, high = (end << fl - term.fl for end in (min(term.lows), max(term.highs)))
            word = computing(op.name, max(-low, high))
            term = writer.lines.new(word, term.wide(word, 1 << fl - term.fl), fl, low, high)
    writer.terms[op.name] = term
    low, high = min(term.lows), max(term.highs)
    word = storing(low, high)
    value = Stored(word, term.fl, shape, writer.order, low, high)
    writer.lines.lines.append(f"y{len(writer.outputs)}[i] = ({word}){term.text};")
    writer.outputs[op.name] = value


def _round(writer: Writer, op: Round, x: Term) -> Term:
    return writer.lines.rounded(writer.lines.settle(x, op.name), op.fmt, op.name)


def _relu(writer: Writer, op: Relu, x: Term) -> Term:
    x = writer.lines.settle(x, op.name)
    low, high = min(x.lows), max(x.highs)
    if low >= 0:
        return x
    word = computing(op.name, max(-low, high))
    return writer.lines.new(word, f"{x.text} > 0 ? {x.narrow(word)} : 0", x.fl, 0, max(high, 0))


def _clip(writer: Writer, op: Clip, x: Term) -> Term:
    x = writer.lines.settle(x, op.name)
    shift = x.fl - op.source_fl
    if shift >= 0:
        return writer.lines.clipped(x, op.low << shift, op.high << shift)
    if op.low % (1 << -shift) or op.high % (1 << -shift):  # what is beyond becomes a number between
        low, high = min(x.lows) << -shift, max(x.highs) << -shift
        word = computing(op.name, max(-low, high))
        text = x.wide(word, 1 << -shift)
        x, shift = writer.lines.new(word, text, op.source_fl, low, high), 0
    return writer.lines.clipped(x, op.low >> -shift, op.high >> -shift)


def _table(writer: Writer, op: Table, x: Term) -> Term:
    lines = writer.lines
    x = lines.settle(x, op.name)
    low, codes = op.low, op.codes.tolist()
    if x.fl < op.source_fl:  # the source ends with zeros: of the table, every so many
        step = 1 << op.source_fl - x.fl
        first = -low % step
        low, codes = (low + first) // step, codes[first::step]
    name = lines.tables.add(f"{lines.name}_{identifier(op.name)}", codes)
    text = f"{name}[{x.text} - {literal(low) if low >= 0 else f'({literal(low)})'}]"
    return lines.new("int32_t", text, op.fmt.fl, min(codes), max(codes))


def _affine(writer: Writer, op: Affine, x: Term) -> Term:
    index, order = _by_channel(writer, writer.network.values[op.name].shape)
    x = x if x.index in ("", index) else writer.lines.whole(x, op.name)
    scale, offset = (numbers.numpy()[order].tolist() for numbers in (op.scale, op.offset))
    return x.times(scale, op.scale_fmt.fl, index).plus(offset, op.offset_fmt.fl, index)


def _by_channel(writer: Writer, shape: Shape) -> tuple[str, Codes]:
    """Return where numbers of channels are read, and which of them lie there.

    They lie as they are where the place in memory says the channel, else once for each code.
    """
    head, rest, order = writer.step.head, prod(shape[1:]), np.arange(shape[0])
    is_last = same_order(writer.order, channels_last(shape))
    is_own = (
        head is not None
        and not isinstance(head, ROWS)
        and writer.network.values[head.name].shape == shape
    )
    if is_own and is_last:
        return "c", order
    if writer.order is None:
        return "i" if rest == 1 else f"i / {rest}", order
    if is_last:
        return f"i % {shape[0]}", order
    return "i", writer.order // rest


def _add(writer: Writer, op: Add, x: Term, y: Term) -> Term:
    lines = writer.lines
    x, y = lines.settle(x, op.name), lines.settle(y, op.name)
    fl = max(x.fl, y.fl)
    both = [(t, 1 << fl - t.fl, min(t.lows), max(t.highs)) for t in (x, y)]
    low = sum(scale * low for _, scale, low, _ in both)
    high = sum(scale * high for _, scale, _, high in both)
    largest = sum(scale * max(-low, high) for _, scale, low, high in both)
    word = computing(op.name, largest)
    text = " + ".join(t.wide(word, scale) for t, scale, *_ in both)
    return lines.new(word, text, fl, low, high)


def _mul(writer: Writer, op: Mul, x: Term, y: Term) -> Term:
    lines = writer.lines
    x, y = lines.settle(x, op.name), lines.settle(y, op.name)
    ends = [a * b for a in (min(x.lows), max(x.highs)) for b in (min(y.lows), max(y.highs))]
    numbers = (*ends, *x.lows, *x.highs, *y.lows, *y.highs)
    word = computing(op.name, max(map(abs, numbers)))
    text = f"{x.wide(word)} * {y.wide(word)}"
    return lines.new(word, text, x.fl + y.fl, min(ends), max(ends))


_POINTWISE: dict[type, Callable[..., Term]] = {
    Add: _add,
    Affine: _affine,
    Clip: _clip,
    Flatten: lambda _writer, _op, x: x,
    Mul: _mul,
    Relu: _relu,
    Reshape: lambda _writer, _op, x: x,
    Round: _round,
    Table: _table,
    Transpose: lambda _writer, _op, x: x,
}
