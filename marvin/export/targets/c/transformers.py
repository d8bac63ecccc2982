"""What transformers have, as C: rows that are normalised, softmax, products of two values, embeddings."""

from math import prod

from marvin.export.graph.transformers import Embedding, MatMul, Norm, Softmax
from marvin.export.targets.c.terms import Term
from marvin.export.targets.c.values import Stored
from marvin.export.targets.c.words import computing, literal, loop, storing
from marvin.export.targets.c.writer import Writer, results

__all__ = ["embedding", "matmul", "norm", "softmax"]

_ANY = 2**62  # quotients of integers that 63 bits hold


def matmul(writer: Writer, op: MatMul) -> list[str]:
    """Each row of the left matrix times the right one, whose rows lie side by side."""
    x, y = (writer.stored[name] for name in op.inputs)
    (left, right), shape = map(writer.source, op.inputs), writer.network.values[op.name].shape
    rows, terms, columns = shape[-2], x.shape[-1], shape[-1]
    ends = [a * b * terms for a in (x.low, x.high) for b in (y.low, y.high)]
    largest = max(-x.low, x.high, 1) * max(-y.low, y.high, 1)
    word, product = computing(op.name, largest * terms), computing(op.name, largest)
    sums = writer.needs(word, columns)
    term = Term("sum", x.fl + y.fl, (min(ends),), (max(ends),), word=word)
    return [
        f"{loop('b', prod(shape[:-2]))} {{",
        f"{loop('r', rows)} {{",
        f"const {x.word} *restrict row = {left} + (b * {rows} + r) * {terms};",
        f"const {y.word} *restrict columns = {right} + b * {terms * columns};",
        f"{loop('j', columns)} {{", f"{sums}[j] = 0;", "}",
        f"{loop('k', terms)} {{",
        f"{loop('j', columns)} {{",
        f"{sums}[j] += ({product})row[k] * columns[k * {columns} + j];",
        "}", "}",
        f"{loop('j', columns)} {{",
        f"const size_t i = (b * {rows} + r) * {columns} + j;",
        f"const {word} sum = {sums}[j];",
        *results(writer, op, term), "}", "}", "}",
    ]  # fmt: skip


def norm(writer: Writer, op: Norm) -> list[str]:
    """Each row by itself: sums, an integer root, one division for each code."""
    x, lines = writer.stored[op.inputs[0]], writer.lines
    count = writer.network.values[op.name].shape[-1]
    code = _shortened(f"(int64_t)row[k]{_scale(x, op.source_fl)}", op.shift)
    gain = lines.tables.add(f"{lines.name}_gain", op.gain.tolist())
    top = f"({count} * ({code})"
    top += f" - total) * {gain}[k] * {literal(1 << op.precision)}"
    if op.bias is not None:
        bias = lines.tables.add(f"{lines.name}_bias", op.bias.tolist())
        top += f" + {bias}[k] * root"
    minus = " - total * total" if op.is_centered else ""
    variance = f"({count} * squares{minus} + {literal(op.epsilon)})"
    point = op.fmt.fl - op.gain_fmt.fl
    divide, square_root = (lines.helpers.call(kind, "int64_t") for kind in ("divide", "root"))
    term = lines.clipped(
        Term("quotient", op.fmt.fl, (-_ANY,), (_ANY,), word="int64_t"),
        op.fmt.min_code,
        op.fmt.max_code,
    )
    return [
        f"{loop('r', x.count // count)} {{",
        f"const {x.word} *restrict row = {writer.source(op.inputs[0])} + r * {count};",
        "int64_t total = 0;", "int64_t squares = 0;",
        f"{loop('k', count)} {{",
        f"const int64_t code = {code};",
        *(["total += code;"] if op.is_centered else []),
        "squares += code * code;", "}",
        f"int64_t root = {square_root}({variance} * {literal(1 << 2 * op.precision)});",
        "root += root == 0;",
        f"{loop('k', count)} {{",
        f"const size_t i = r * {count} + k;",
        f"const int64_t quotient = {divide}(({top}){_times(point)}, root{_times(-point)});",
        *results(writer, op, term), "}", "}",
    ]  # fmt: skip


def softmax(writer: Writer, op: Softmax) -> list[str]:
    """Each row by itself: the largest, exponentials from a table, one division for each."""
    x, lines, shape = (
        writer.stored[op.inputs[0]],
        writer.lines,
        writer.network.values[op.name].shape,
    )
    count, largest = shape[-1], int(op.codes.max())
    ends = max(-x.low, x.high) << op.source_fl - x.fl
    code = computing(op.name, 2 * ends + (1 << op.shift))
    total = computing(op.name, 2 * (count * largest << abs(op.fmt.fl)))
    table = lines.tables.add(f"{lines.name}_exponentials", op.codes.tolist())
    word = storing(0, largest)
    own = writer.needs(word, count)
    columns = [f"{writer.source(name)}[k] != 0" for name in op.inputs[1:]]
    sees = list(columns)
    if op.mask is not None:
        mask = lines.tables.add(f"{lines.name}_mask", op.mask.reshape(-1).tolist())
        sees.append(f"{mask}[r % {len(op.mask)} * {count} + k] != 0")
    seen = ([f"if ({' && '.join(sees)}) {{"], ["}"]) if sees else ([], [])
    read = f"({code})row[k]{_scale(x, op.source_fl)}"
    place, last = _shortened(f"top - {read}", op.shift), len(op.codes) - 1
    divide = lines.helpers.call("divide", total)
    high = largest << max(0, op.fmt.fl)
    term = Term("quotient", op.fmt.fl, (0,), (high,), word=total)
    term = lines.clipped(term, op.fmt.min_code, op.fmt.max_code)
    return [
        f"{loop('r', x.count // count)} {{",
        f"const {x.word} *restrict row = {writer.source(op.inputs[0])} + r * {count};",
        f"{code} top = {literal(x.low << op.source_fl - x.fl)};",
        f"{loop('k', count)} {{", *seen[0],
        f"if ({read} > top) {{", f"top = {read};", "}", *seen[1], "}",
        f"{total} total = 0;",
        f"{loop('k', count)} {{",
        *([f"{own}[k] = 0;", *seen[0]] if sees else []),
        f"const {code} place = {place};",
        f"{own}[k] = {table}[place < {last} ? place : {last}];",
        *seen[1], f"total += {own}[k];", "}",
        *(["total += total == 0;"] if columns else []),
        f"{loop('k', count)} {{",
        f"const size_t i = r * {count} + k;",
        f"const {total} quotient = "
        f"{divide}(({total}){own}[k]{_times(op.fmt.fl)}, total{_times(-op.fmt.fl)});",
        *results(writer, op, term), "}", "}",
    ]  # fmt: skip


def embedding(writer: Writer, op: Embedding) -> list[str]:
    """The row of a table for each index."""
    lines, features = writer.lines, op.weight.shape[1]
    low, high = int(op.weight.min()), int(op.weight.max())
    word = computing(op.name, max(-low, high))
    table = lines.tables.add(f"{lines.name}_weight", op.weight.reshape(-1).tolist())
    term = Term("code", op.weight_fmt.fl, (low,), (high,), word=word)
    tokens = prod(writer.network.values[op.name].shape) // features
    return [
        f"{loop('r', tokens)} {{",
        f"{loop('k', features)} {{",
        f"const size_t i = r * {features} + k;",
        f"const {word} code = {table}[(size_t){writer.source(op.inputs[0])}[r] * {features} + k];",
        *results(writer, op, term), "}", "}",
    ]  # fmt: skip


def _scale(x: Stored, fl: int) -> str:
    """Return what brings codes that lie without zeros at their ends to the network's ``fl``."""
    return _times(fl - x.fl)


def _times(shift: int) -> str:
    return f" * {literal(1 << shift)}" if shift > 0 else ""


def _shortened(code: str, shift: int) -> str:
    return f"({code} + {literal(1 << shift >> 1)}) >> {shift}" if shift else code
