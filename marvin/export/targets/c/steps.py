"""Each step as a C function: loops of a layer or a pool, and in them what is done to each result."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from marvin.export.errors import ExportError
from marvin.export.execute.arithmetic import Codes
from marvin.export.graph.functions import Clip, Table
from marvin.export.graph.nodes import (
    Add,
    Affine,
    AveragePool,
    Conv,
    Flatten,
    Linear,
    MaxPool,
    Network,
    Operation,
    Relu,
    Round,
    Weighted,
)
from marvin.export.graph.views import Concat, Reshape, Slice, Transpose
from marvin.export.targets.c.schedule import Step
from marvin.export.targets.c.terms import Lines, Term
from marvin.export.targets.c.words import Tables, computing, identifier, literal, loop, storing

__all__ = [
    "Function",
    "Stored",
    "channels_last",
    "needed_orders",
    "same_order",
    "write_move",
    "write_step",
]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A value in memory.

    Args:
        word: Its C type.
        fl: Fractional length; it may be shorter than the network's, where codes end with zeros.
        shape: Of one sample, as the network has it.
        order: Which code of the network lies at each place of the memory, int64; None where each is at its own.
        low: Smallest code.
        high: Largest code.
    """

    word: str
    fl: int
    shape: Shape
    order: Codes | None
    low: int
    high: int

    @property
    def count(self) -> int:
        """How many codes."""
        return prod(self.shape)


@dataclass
class Function:
    """A C function.

    Args:
        name: Its name.
        text: Its definition.
        inputs: Values it takes, in the order of its parameters.
        outputs: Values it stores, likewise.
        scratch: Types and counts of the memory it needs meanwhile, the last parameters.
    """

    name: str
    text: str
    inputs: list[str]
    outputs: dict[str, Stored]
    scratch: list[tuple[str, int]] = field(default_factory=list)


@dataclass
class _Writer:
    """What a step is written with."""

    network: Network
    step: Step
    stored: Mapping[str, Stored]
    lines: Lines
    nibbles: bool
    order: Codes | None = None
    terms: dict[str, Term] = field(default_factory=dict)
    outputs: dict[str, Stored] = field(default_factory=dict)
    scratch: list[tuple[str, int]] = field(default_factory=list)

    def source(self, name: str) -> str:
        """Return the parameter that has a value, in whatever order."""
        return f"x{self.step.inputs.index(name)}"


def channels_last(shape: Shape) -> Codes | None:
    """Return the order of memory in which images, and sequences, have their channels side by side."""
    codes = np.arange(prod(shape))
    order = codes.reshape(shape[0], -1).T.reshape(-1)
    return None if np.array_equal(order, codes) else order


def same_order(x: Codes | None, y: Codes | None) -> bool:
    """Say whether two values lie in memory alike."""
    return y is None if x is None else y is not None and np.array_equal(x, y)


def needed_orders(
    network: Network, step: Step, stored: Mapping[str, Stored]
) -> dict[str, Codes | None]:
    """Return the order in which a step takes each of its inputs; any for what is not named."""
    head = step.head
    if head is None:
        return dict.fromkeys(step.inputs, stored[step.inputs[0]].order)
    shape = network.values[head.name].shape
    own = None if isinstance(head, Linear) else channels_last(shape)
    found = dict.fromkeys(step.inputs, own)
    name = head.inputs[0]
    if not isinstance(head, Linear):
        return found | {name: channels_last(stored[name].shape)}
    if len(shape) == 1 and not any(name in op.inputs for op in step.operations[1:]):
        del found[name]  # its weights go in any order
    return found


def write_step(
    network: Network,
    step: Step,
    stored: Mapping[str, Stored],
    shared: tuple[str, Tables, set[str]],
    nibbles: bool,
) -> Function:
    """Return a step as a C function.

    Args:
        network: Of the step.
        step: What is computed.
        stored: Values that are there already.
        shared: Name of the function, the tables of the file, and the helpers it calls.
        nibbles: Whether weights of 4 bits are two to a byte.

    Raises:
        ExportError: It needs more than 64 bits.
    """
    name, tables, called = shared
    writer = _Writer(network, step, stored, Lines(name, tables, called, []), nibbles)
    head = step.head
    body = _each(writer) if head is None else _HEADS[type(head)](writer, head)
    parameters = [f"const {stored[n].word} *restrict x{i}" for i, n in enumerate(step.inputs)]
    outputs = enumerate(writer.outputs.values())
    parameters += [f"{value.word} *restrict y{i}" for i, value in outputs]
    parameters += [f"{word} *restrict s{i}" for i, (word, _) in enumerate(writer.scratch)]
    what = ", ".join(f"{type(op).__name__} {op.name}" for op in step.operations)
    text = f"/* {what.replace('*/', '')} */\nstatic void {name}({', '.join(parameters)})\n{{\n"
    text += "\n".join(_indented(body)) + "\n}\n"
    return Function(name, text, step.inputs, writer.outputs, writer.scratch)


def _indented(lines: list[str]) -> list[str]:
    """Return lines with blanks in front, by braces."""
    found, depth = [], 1
    for line in lines:
        depth -= line.startswith("}")
        found.append("    " * depth + line)
        depth += line.endswith("{")
    return found


def _results(writer: _Writer, first: Operation | None, term: Term | None) -> list[str]:
    """Return the code that makes of each result of a head what is stored.

    ``i`` is the place in memory, ``c`` the channel.
    """
    if first is not None and term is not None:
        writer.terms[first.name] = term
    for op in writer.step.operations:
        if op is not first:
            terms = [_term(writer, name) for name in op.inputs]
            writer.terms[op.name] = _POINTWISE[type(op)](writer, op, *terms)
        if op.name in writer.step.stored:
            _store(writer, op)
    return writer.lines.lines


def _term(writer: _Writer, name: str) -> Term:
    """Return a value as a variable, or as what a variable is yet to become."""
    if name not in writer.terms:
        value = writer.stored[name]
        word = computing(name, max(-value.low, value.high))
        text = f"{writer.source(name)}[i]"
        writer.terms[name] = writer.lines.new(word, text, value.fl, value.low, value.high)
    return writer.terms[name]


def _store(writer: _Writer, op: Operation) -> None:
    term = writer.lines.settle(writer.terms[op.name], op.name)
    if op.name == writer.network.output:  # its codes are those of the network
        fl = writer.network.values[op.name].fl
        if term.fl != fl:
            scaled = (1 << fl - term.fl) * max(-term.lows[0], term.highs[0])
            word = computing(op.name, scaled)
            text = f"{term.wide(word)} * {literal(1 << fl - term.fl)}"
            low, high = (end << fl - term.fl for end in (min(term.lows), max(term.highs)))
            term = writer.lines.new(word, text, fl, low, high)
    writer.terms[op.name] = term
    low, high = min(term.lows), max(term.highs)
    word = storing(low, high)
    shape = writer.network.values[op.name].shape
    value = Stored(word, term.fl, shape, writer.order, low, high)
    writer.lines.lines.append(f"y{len(writer.outputs)}[i] = ({word}){term.text};")
    writer.outputs[op.name] = value


def _round(writer: _Writer, op: Round, x: Term) -> Term:
    return writer.lines.rounded(writer.lines.settle(x, op.name), op.fmt, op.name)


def _relu(writer: _Writer, op: Relu, x: Term) -> Term:
    x = writer.lines.settle(x, op.name)
    low, high = min(x.lows), max(x.highs)
    if low >= 0:
        return x
    word = computing(op.name, max(-low, high))
    return writer.lines.new(word, f"{x.text} > 0 ? {x.narrow(word)} : 0", x.fl, 0, max(high, 0))


def _clip(writer: _Writer, op: Clip, x: Term) -> Term:
    x = writer.lines.settle(x, op.name)
    return writer.lines.clipped(
        x, *(_at(bound, op.source_fl, x.fl, up) for bound, up in ((op.low, True), (op.high, False)))
    )


def _at(code: int, fl: int, to_fl: int, up: bool) -> int:
    """Return a bound at another ``fl``, at which every code is that is within it."""
    if to_fl >= fl:
        return code << to_fl - fl
    return -(-code >> fl - to_fl) if up else code >> fl - to_fl


def _table(writer: _Writer, op: Table, x: Term) -> Term:
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


def _affine(writer: _Writer, op: Affine, x: Term) -> Term:
    shape, order, index = writer.network.values[op.name].shape, np.arange(len(op.scale)), "c"
    if len(shape) == 1 and not isinstance(writer.step.head, Linear):
        order, index = order if writer.order is None else writer.order, "i"
    elif isinstance(writer.step.head, Linear | None) and len(shape) > 1:
        is_last = writer.order is not None and same_order(writer.order, channels_last(shape))
        if writer.step.head is not None or not (is_last or writer.order is None):
            raise ExportError(f"{op.name} cannot be written as C: it takes values of shape {shape}")
    head = writer.step.head
    if (
        index == "c"
        and head is not None
        and len(op.scale) != writer.network.values[head.name].shape[0]
    ):
        raise ExportError(f"{op.name} cannot be written as C: it takes values of shape {shape}")
    x = x if x.index in ("", index) else writer.lines.whole(x, op.name)
    scale, offset = op.scale.numpy()[order].tolist(), op.offset.numpy()[order].tolist()
    return x.times(scale, op.scale_fmt.fl, index).plus(offset, op.offset_fmt.fl, index)


def _add(writer: _Writer, op: Add, x: Term, y: Term) -> Term:
    lines = writer.lines
    x, y = lines.settle(x, op.name), lines.settle(y, op.name)
    fl = max(x.fl, y.fl)
    both = [(t, 1 << fl - t.fl, min(t.lows), max(t.highs)) for t in (x, y)]
    low = sum(scale * low for _, scale, low, _ in both)
    high = sum(scale * high for _, scale, _, high in both)
    largest = sum(scale * max(-low, high) for _, scale, low, high in both)
    word = computing(op.name, largest)
    texts = [t.wide(word) + ("" if s == 1 else f" * {literal(s)}") for t, s, *_ in both]
    return lines.new(word, " + ".join(texts), fl, low, high)


_POINTWISE: dict[type, Callable[..., Term]] = {
    Add: _add,
    Affine: _affine,
    Clip: _clip,
    Flatten: lambda _writer, _op, x: x,
    Relu: _relu,
    Reshape: lambda _writer, _op, x: x,
    Round: _round,
    Table: _table,
}


def _each(writer: _Writer) -> list[str]:
    """A step without a layer: one loop over all codes."""
    values = [writer.stored[name] for name in writer.step.inputs]
    writer.order, count = values[0].order, values[0].count
    body = _results(writer, None, None)
    shapes = [writer.network.values[op.name].shape for op in writer.step.operations]
    shape = next((s for s in shapes if len(s) > 1), shapes[0])
    channels = f"i / {count // shape[0]}" if writer.order is None else f"i % {shape[0]}"
    channel = [f"const size_t c = {channels};"] if any("[c]" in line for line in body) else []
    return [f"{loop('i', count)} {{", *channel, *body, "}"]


def _weighted(writer: _Writer, op: Weighted) -> list[str]:
    """A convolution or a linear layer: the window as one row, times the rows of weights."""
    x, shape = writer.stored[op.inputs[0]], writer.network.values[op.name].shape
    writer.order = channels_last(shape) if isinstance(op, Conv) else None
    if not isinstance(op, Conv) and len(x.shape) != 1:
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
        f"const {word} sum = {sums}[c];", *_results(writer, op, term), "}",
    ]  # fmt: skip
    return _over_pixels(shape, body) if before else body


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


def _dots(writer: _Writer, codes: Codes, name: str, word: str) -> list[str]:
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


def _over_pixels(shape: Shape, body: list[str]) -> list[str]:
    shape = shape if len(shape) == 3 else (shape[0], 1, shape[1])
    return [
        f"{loop('y', shape[1])} {{",
        f"{loop('x', shape[2])} {{",
        f"const size_t pixel = y * {shape[2]} + x;",
        *body,
        "}",
        "}",
    ]


def _corner(axis: str, stride: int) -> str:
    return f"{axis} * {stride}" if stride > 1 else axis


@dataclass(frozen=True)
class _Window:
    """A window on an image; a sequence is an image of one row."""

    shape: Shape
    size: Shape
    stride: Shape
    padding: Shape
    dilation: Shape

    def inside(self) -> str:
        """Return the condition under which a place of the window is in the image; "" if it always is."""
        found = []
        numbers = self.shape[1:], self.size, self.stride, self.padding, self.dilation
        for axis, side, k, s, p, d in zip("yx", *numbers, strict=True):
            last = ((side + 2 * p - (k - 1) * d - 1) // s) * s + (k - 1) * d - p
            if p or last >= side:
                found.append(f"{axis}{axis} < {side}")
        return " && ".join(found)

    def places(self) -> list[str]:
        """Return the loops over a window; what is left of the image or above it is a very large number."""
        lines = []
        numbers = self.size, self.stride, self.padding, self.dilation
        for axis, side, s, p, d in zip("yx", *numbers, strict=True):
            step = f"k{axis} * {d}" if d > 1 else f"k{axis}"
            start = f"{axis} * {s}" if s > 1 else axis
            minus = f" - {p}" if p else ""
            place = f"const size_t {axis}{axis} = {start} + {step}{minus};"
            lines += [f"{loop(f'k{axis}', side)} {{", place]
        return lines


def _window(op: Conv | MaxPool | AveragePool, x: Stored) -> _Window:
    size = tuple(op.weight.shape[2:]) if isinstance(op, Conv) else op.kernel
    dilation = (1,) * len(size) if isinstance(op, AveragePool) else op.dilation[: len(size)]
    if len(size) == 2:
        return _Window(x.shape, size, op.stride, op.padding, dilation)
    shape = x.shape[0], 1, x.shape[1]
    return _Window(shape, (1, *size), (1, *op.stride), (0, *op.padding), (1, *dilation))


def _gather(writer: _Writer, op: Conv, x: Stored) -> list[str]:
    """Return the code that makes ``window``: all codes under the kernel, group by group."""
    at = _window(op, x)
    name, (channels, _, width) = writer.source(op.inputs[0]), at.shape
    pixel = f"(yy * {width} + xx) * {channels}"
    if at.size == (1, 1) and at.padding == (0, 0):
        corner = f"({_corner('y', at.stride[0])}) * {width} + {_corner('x', at.stride[1])}"
        return [f"const {x.word} *restrict window = {name} + ({corner}) * {channels};"]
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


def _depthwise(writer: _Writer, op: Conv, x: Stored) -> list[str]:
    """Each channel by itself: sums of all channels side by side."""
    shape = writer.network.values[op.name].shape
    codes, _ = _rows(op, x)
    lows, highs = _sums(codes, x)
    word = computing(op.name, _partial(codes, x))
    is_wide = max(int(np.abs(codes).max()), 1) * max(-x.low, x.high) >= 2**31
    values = codes.T.reshape(-1).tolist()
    kind = storing(min(*values, -1), max(values))
    name = writer.lines.tables.add(f"{writer.lines.name}_weight", values, kind)
    at = _window(op, x)
    channels, width, inside = shape[0], at.shape[2], at.inside()
    writer.scratch.append((word, channels))
    source, product = writer.source(op.inputs[0]), "int64_t" if is_wide else "int32_t"
    term = _biased(op, Term("sum", x.fl + op.weight_fmt.fl, lows, highs, "c", word=word))
    results = _results(writer, op, term)
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
        *results, "}",
    ]  # fmt: skip
    return _over_pixels(shape, body)


def _pool(writer: _Writer, op: MaxPool | AveragePool) -> list[str]:
    """The largest or the sum of each window, channel by channel."""
    x, shape = writer.stored[op.inputs[0]], writer.network.values[op.name].shape
    writer.order = channels_last(shape)
    at = _window(op, x)
    channels, width, inside = shape[0], at.shape[2], at.inside()
    name, is_max = writer.source(op.inputs[0]), isinstance(op, MaxPool)
    low, high = (x.low, x.high) if is_max else _window_sums(op, x)
    word = computing(op.name, max(-low, high))
    term = Term("result", x.fl, (low,), (high,), word=word)
    if isinstance(op, AveragePool):
        term = writer.lines.rounded(term, op.fmt, op.name, prod(op.kernel))
    results = _results(writer, op, term)
    read = f"{name}[(yy * {width} + xx) * {channels} + c]"
    take = f"if ({read} > result) {{" if is_max else f"result += {read};"
    body = [
        f"{loop('c', channels)} {{",
        f"const size_t i = pixel * {channels} + c;",
        f"{word} result = {literal(low) if is_max else 0};",
        *at.places(),
        *([f"if ({inside}) {{"] if inside else []),
        *([take, f"result = {read};", "}"] if is_max else [take]),
        *(["}"] if inside else []), "}", "}",
        *results, "}",
    ]  # fmt: skip
    return _over_pixels(shape, body)


def _window_sums(op: MaxPool | AveragePool, x: Stored) -> tuple[int, int]:
    count = prod(op.kernel)
    return count * min(x.low, 0), count * max(x.high, 0)


def write_move(
    name: str,
    op: Operation | None,
    sources: Mapping[str, Stored],
    result: tuple[Shape, Codes | None, int],
) -> Function:
    """Return a function that puts codes elsewhere in memory.

    Args:
        name: Of the function.
        op: ``Concat``, ``Slice`` or ``Transpose``; None where the order alone changes.
        sources: What it takes, by name.
        result: Shape, order and ``fl`` of what it gives.

    Raises:
        ExportError: No nested loops do it.
    """
    shape, order, fl = result
    shifts = [fl - x.fl for x in sources.values()]
    low = min(x.low << shift for x, shift in zip(sources.values(), shifts, strict=True))
    high = max(x.high << shift for x, shift in zip(sources.values(), shifts, strict=True))
    word = storing(low, high)
    places = _moved(op, sources).reshape(-1)
    places = places if order is None else places[order]
    lines: list[str] = []
    ends = np.cumsum([x.count for x in sources.values()])
    own = np.searchsorted(ends, places, "right")
    parameters = []
    for i, (x, shift) in enumerate(zip(sources.values(), shifts, strict=True)):
        parameters.append(f"const {x.word} *restrict x{i}")
        targets = np.flatnonzero(own == i)
        if len(targets):
            first = int(ends[i]) - x.count
            lines += _copied(i, places[targets] - first, targets, word, shift)
    text = f"/* {type(op).__name__ if op else 'order'} {(op.name if op else '').replace('*/', '')} */\n"
    text += f"static void {name}({', '.join([*parameters, f'{word} *restrict y0'])})\n{{\n"
    text += "\n".join(_indented(lines)) + "\n}\n"
    label = op.name if op is not None else f"{next(iter(sources))} as {name} takes it"
    return Function(name, text, list(sources), {label: Stored(word, fl, shape, order, low, high)})


def _moved(op: Operation | None, sources: Mapping[str, Stored]) -> Codes:
    """Return, for each code of the result, its place in the memory of all sources one behind the other."""
    found: dict[str, Codes] = {}
    first = 0
    for name, x in sources.items():
        places = np.empty(x.count, np.int64)
        places[np.arange(x.count) if x.order is None else x.order] = np.arange(x.count) + first
        found[name] = places.reshape(x.shape)
        first += x.count
    if isinstance(op, Concat):
        return np.concatenate([found[name] for name in op.inputs], op.axis)
    (places,) = found.values()
    if isinstance(op, Transpose):
        return places.transpose(op.order)
    if isinstance(op, Slice):
        return places[(*(slice(None),) * op.axis, slice(op.start, op.stop, op.step))]
    return places


def _copied(index: int, reads: Codes, writes: Codes, word: str, shift: int) -> list[str]:
    """Return nested loops that read and write places which go up by equal steps."""
    sizes: list[tuple[int, int, int]] = []
    both = np.stack([reads, writes])
    while both.shape[1] > 1:
        steps = np.diff(both)
        same = (steps == steps[:, :1]).all(0)
        count = both.shape[1] if same.all() else int(np.argmin(same)) + 1
        rows = both[:, : both.shape[1] // count * count].reshape(2, -1, count)
        is_whole = rows.shape[1] * count == both.shape[1]
        is_whole = is_whole and (np.diff(rows) == steps[:, :1, None]).all()
        if not is_whole:
            raise ExportError("an order of memory that no loops have cannot be written as C")
        sizes.append((count, *steps[:, 0].tolist()))
        both = rows[:, :, 0]
    places = [[str(first)] if first else [] for first in both[:, 0].tolist()]
    lines = []
    for depth, (count, *steps) in reversed(list(enumerate(sizes))):
        lines.append(f"{loop(f'k{depth}', count)} {{")
        for terms, step in zip(places, steps, strict=True):
            terms.append(f"k{depth} * {step}" if step != 1 else f"k{depth}")
    read, write = (" + ".join(terms) or "0" for terms in places)
    scale = f" * {literal(1 << shift)}" if shift else ""
    return [*lines, f"y0[{write}] = ({word})(x{index}[{read}]{scale});", *["}"] * len(sizes)]


_HEADS: dict[type, Callable[..., list[str]]] = {
    AveragePool: _pool,
    MaxPool: _pool,
    **dict.fromkeys(Weighted.__subclasses__(), _weighted),
}
