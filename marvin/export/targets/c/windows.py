"""Windows on images and sequences, and the pools that take them."""

from dataclasses import dataclass
from math import prod

from marvin.export.graph.nodes import AveragePool, Conv, MaxPool
from marvin.export.targets.c.terms import Term
from marvin.export.targets.c.values import Shape, Stored, channels_last
from marvin.export.targets.c.words import computing, literal, loop
from marvin.export.targets.c.writer import Writer, results

__all__ = ["Window", "corner", "over_pixels", "pool", "window_of"]


def over_pixels(shape: Shape, body: list[str]) -> list[str]:
    """Return the loops over the pixels of an image, or the places of a sequence, around ``body``."""
    shape = shape if len(shape) == 3 else (shape[0], 1, shape[1])
    return [
        f"{loop('y', shape[1])} {{",
        f"{loop('x', shape[2])} {{",
        f"const size_t pixel = y * {shape[2]} + x;",
        *body,
        "}",
        "}",
    ]


def corner(axis: str, stride: int) -> str:
    """Return where a window of one code begins."""
    return f"{axis} * {stride}" if stride > 1 else axis


@dataclass(frozen=True)
class Window:
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


def window_of(op: Conv | MaxPool | AveragePool, x: Stored) -> Window:
    """Return the window of a layer or a pool."""
    size = tuple(op.weight.shape[2:]) if isinstance(op, Conv) else op.kernel
    dilation = (1,) * len(size) if isinstance(op, AveragePool) else op.dilation[: len(size)]
    if len(size) == 2:
        return Window(x.shape, size, op.stride, op.padding, dilation)
    shape = x.shape[0], 1, x.shape[1]
    return Window(shape, (1, *size), (1, *op.stride), (0, *op.padding), (1, *dilation))


def pool(writer: Writer, op: MaxPool | AveragePool) -> list[str]:
    """The largest or the sum of each window, channel by channel."""
    x, shape = writer.stored[op.inputs[0]], writer.network.values[op.name].shape
    writer.order = channels_last(shape)
    at = window_of(op, x)
    channels, width, inside = shape[0], at.shape[2], at.inside()
    name, is_max = writer.source(op.inputs[0]), isinstance(op, MaxPool)
    low, high = (x.low, x.high) if is_max else _window_sums(op, x)
    word = computing(op.name, max(-low, high))
    term = Term("result", x.fl, (low,), (high,), word=word)
    if isinstance(op, AveragePool):
        term = writer.lines.rounded(term, op.fmt, op.name, prod(op.kernel))
    each = results(writer, op, term)
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
        *each, "}",
    ]  # fmt: skip
    return over_pixels(shape, body)


def _window_sums(op: MaxPool | AveragePool, x: Stored) -> tuple[int, int]:
    count = prod(op.kernel)
    return count * min(x.low, 0), count * max(x.high, 0)
