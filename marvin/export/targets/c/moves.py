"""Codes that go elsewhere in memory: parts, orders, zeros around, values one behind the other."""

from collections.abc import Mapping
from math import prod

import numpy as np

from marvin.export.errors import ExportError
from marvin.export.execute.arithmetic import Codes
from marvin.export.graph.nodes import Operation
from marvin.export.graph.views import Concat, Pad, Slice, Transpose
from marvin.export.targets.c.expand import Expand
from marvin.export.targets.c.values import (
    Function,
    Shape,
    Stored,
    channels_last,
    indented,
    same_order,
)
from marvin.export.targets.c.words import comment, computing, literal, loop, storing

__all__ = ["is_known", "write_copy", "write_move"]

_ZERO = -1  # the place of what is in no source


def write_move(
    name: str,
    op: Operation | None,
    sources: Mapping[str, Stored],
    result: tuple[Shape, Codes | None, int],
) -> Function:
    """Return a function that puts codes elsewhere in memory.

    Args:
        name: Of the function.
        op: ``Concat``, ``Expand``, ``Pad``, ``Slice`` or ``Transpose``; None where the order alone changes.
        sources: What it takes, by name.
        result: Shape, order and ``fl`` of what it gives.

    Raises:
        ExportError: No nested loops do it, or 64 bits do not hold it.
    """
    shape, order, fl = result
    shifts = [fl - x.fl for x in sources.values()]
    low = min(x.low << shift for x, shift in zip(sources.values(), shifts, strict=True))
    high = max(x.high << shift for x, shift in zip(sources.values(), shifts, strict=True))
    lines: list[str] = []
    if isinstance(op, Pad):
        low, high = min(low, 0), max(high, 0)
        lines = [f"{loop('k0', prod(shape))} {{", "y0[k0] = 0;", "}"]
    word = storing(low, high)
    places = _moved(op, sources).reshape(-1)
    places = places if order is None else places[order]
    ends = np.cumsum([x.count for x in sources.values()])
    own = np.where(places == _ZERO, len(ends), np.searchsorted(ends, places, "right"))
    parameters = []
    for i, (x, shift) in enumerate(zip(sources.values(), shifts, strict=True)):
        parameters.append(f"const {x.word} *restrict x{i}")
        targets = np.flatnonzero(own == i)
        if len(targets):
            first = int(ends[i]) - x.count
            scale = _scale(op.name if op else name, x, shift)
            lines += _copied(f"x{i}", places[targets] - first, targets, word, scale)
    text = comment(f"{type(op).__name__} {op.name}" if op else "order")
    text += f"\nstatic void {name}({', '.join([*parameters, f'{word} *restrict y0'])})\n{{\n"
    text += "\n".join(indented(lines)) + "\n}\n"
    label = op.name if op is not None else f"{next(iter(sources))} as {name} takes it"
    return Function(name, text, list(sources), {label: Stored(word, fl, shape, order, low, high)})


def write_copy(name: str, value: str, stored: Stored, label: str) -> Function:
    """Return a function that copies a value to the output of a label, in an order that a caller knows.

    Raises:
        ExportError: See ``write_move``.
    """
    order = stored.order if is_known(stored) else None
    copied = write_move(name, None, {value: stored}, (stored.shape, order, stored.fl))
    copied.outputs = {f"output {label}": next(iter(copied.outputs.values()))}
    return copied


def is_known(stored: Stored) -> bool:
    """Say whether a value lies as the network has it, or an image by rows, columns, channels."""
    return stored.order is None or same_order(stored.order, channels_last(stored.shape))


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
    if isinstance(op, Expand):
        return np.broadcast_to(places, op.shape)
    if isinstance(op, Pad):
        widths = [*zip(op.before, op.behind, strict=True)]
        return np.pad(places, widths, constant_values=_ZERO)
    if isinstance(op, Slice):
        return places[(*(slice(None),) * op.axis, slice(op.start, op.stop, op.step))]
    return places


def _scale(name: str, x: Stored, shift: int) -> tuple[str, str]:
    """Return what stands before and behind a code that gets ``shift`` zeros at its end."""
    if not shift or x.low == x.high == 0:
        return "", ""
    word = computing(name, max(-x.low, x.high) << shift)
    return f"({word})", f" * {literal(1 << shift)}"


def _copied(
    source: str, reads: Codes, writes: Codes, word: str, scale: tuple[str, str]
) -> list[str]:
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
    places: list[list[str]] = [[], []]
    begin, lines = both[:, 0].tolist(), []
    for depth, (count, *steps) in reversed(list(enumerate(sizes))):
        lines.append(f"{loop(f'k{depth}', count)} {{")
        for side, step in enumerate(steps):
            place = f"k{depth}"
            if step < 0:  # indices are unsigned: count from the other end
                place = f"({count - 1} - k{depth})"
                begin[side] += (count - 1) * step
            if step:
                places[side].append(f"{place} * {abs(step)}" if abs(step) != 1 else place)
    parts = zip(begin, places, strict=True)
    read, write = (" + ".join([str(at)] * (at > 0) + terms) or "0" for at, terms in parts)
    code = f"{scale[0]}{source}[{read}]{scale[1]}"
    return [*lines, f"y0[{write}] = ({word})({code});", *["}"] * len(sizes)]
