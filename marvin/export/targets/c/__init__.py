"""C: one file and one header, C99, no dependency, no allocation; the same codes to the bit.

``schedule`` says what is computed together, ``steps`` writes each step as a function, ``terms`` what is
done to each result in it, ``memory`` where values lie; ``compiler`` compiles and runs what was written.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from fixedpoint_kernels import FixedPoint
from marvin.export.errors import ExportError
from marvin.export.execute import integer
from marvin.export.execute.arithmetic import Codes
from marvin.export.graph.nodes import Conv, Flatten, Network, Weighted
from marvin.export.graph.views import Reshape
from marvin.export.targets.c.memory import Buffer, Memory, plan
from marvin.export.targets.c.moves import write_move
from marvin.export.targets.c.runtime import helpers
from marvin.export.targets.c.schedule import Step, input_round, schedule
from marvin.export.targets.c.steps import needed_orders, write_step
from marvin.export.targets.c.text import header, source
from marvin.export.targets.c.values import Function, Stored, channels_last, same_order
from marvin.export.targets.c.words import Tables, bits_of, identifier, storing
from marvin.files import write_atomic

__all__ = ["Cost", "Source", "costs", "input_codes", "output_codes", "save", "write"]


@dataclass(frozen=True)
class Source:
    """A network as C.

    Args:
        name: Prefix of all names.
        code: Of the C file.
        header: Of the header.
        tables_bytes: Of weights and all other constants.
        memory: Of values and windows.
        input: What comes in.
        output: What goes out.
    """

    name: str
    code: str
    header: str
    tables_bytes: int
    memory: Memory
    input: Stored
    output: Stored


@dataclass(frozen=True)
class Cost:
    """Multiply-adds of layers whose words are equally long, for one sample.

    Args:
        weight_bits: Word length of the weights.
        input_bits: Of what they are multiplied with, without a sign if nothing is below 0.
        madds: How many.
        ebops: Weight bits times input bits, without signs, over all of them.
    """

    weight_bits: int
    input_bits: int
    madds: int
    ebops: int


def costs(network: Network) -> list[Cost]:
    """Return multiply-adds by word lengths, the most first."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for op in network.operations:
        if isinstance(op, Weighted):
            x, shape = network.values[op.inputs[0]], network.values[op.name].shape
            pixels = prod(shape[1:]) if isinstance(op, Conv) else 1
            signed = x.low < 0
            key = op.word.wl, x.bits - (not signed)
            madds, ebops = found.get(key, (0, 0))
            new = op.weight.numel() * pixels
            each = (op.word.wl - op.word.signed) * (x.bits - 1)
            found[key] = madds + new, ebops + new * each
    rows = [Cost(*key, *both) for key, both in found.items()]
    return sorted(rows, key=lambda row: -row.madds)


def write(network: Network, name: str = "network", *, nibbles: bool = False) -> Source:
    """Return a network as C.

    Args:
        network: From ``describe``.
        name: Prefix of all names: letters, digits and ``_``.
        nibbles: Put weights of 4 bits or fewer two to a byte: half the flash, some time.

    Raises:
        ExportError: The network has an operation that C has no word for, an input of several
            formats, or sums that 64 bits do not hold.
    """
    if not name.isidentifier() or not name.isascii():
        raise ExportError(f"the name of a C file must be letters, digits and _, got {name!r:.80}")
    first, tables, called = input_round(network), Tables(), set[str]()
    stored = {first.name: _input(network, first.fmt, first.name)}
    for op in network.operations:  # the same codes by other names
        if op.inputs == (network.input.name,):
            stored[op.name] = stored[first.name]
        elif isinstance(op, Flatten | Reshape) and op.inputs[0] in stored:
            before = stored[op.inputs[0]]
            shape = network.values[op.name].shape
            stored[op.name] = Stored(
                before.word, before.fl, shape, before.order, before.low, before.high
            )
    given = set(stored)
    if len(network.outputs) > 1:
        raise ExportError(f"C has one output, got {', '.join(network.outputs)}")
    if network.output in given:
        raise ExportError("a network must compute something to be written as C")
    functions: list[Function] = []
    for step in schedule(network, given):
        functions += _functions(
            network, step, stored, (name, tables, called), nibbles, len(functions)
        )
    memory, calls = _calls(functions, given, network.output, stored)
    output = stored[network.output]
    facts = name, stored[first.name], output, first.fmt
    code = source(facts, tables.texts, helpers(called), functions, memory, calls)
    return Source(
        name, code, header(facts, memory), tables.size_bytes, memory, stored[first.name], output
    )


def _input(network: Network, fmt: FixedPoint, name: str) -> Stored:
    shape = network.input.shape
    word = storing(fmt.min_code, fmt.max_code)
    return Stored(
        word,
        fmt.fl,
        shape,
        channels_last(shape) if len(shape) == 3 else None,
        fmt.min_code,
        fmt.max_code,
    )


def _functions(
    network: Network,
    step: Step,
    stored: dict[str, Stored],
    shared: tuple[str, Tables, set[str]],
    nibbles: bool,
    number: int,
) -> list[Function]:
    """Return a step as a function, behind those that put its inputs in the order it takes."""
    name, tables, called = shared
    found: list[Function] = []
    label = f"{name}_{{}}_{identifier(step.operations[0].name)}"
    if step.move is not None:
        sources = {source: stored[source] for source in step.inputs}
        shape = network.values[step.move.name].shape
        order = channels_last(shape) if len(shape) == 3 else None
        fl = max(value.fl for value in sources.values())
        fl = network.values[step.move.name].fl if step.move.name == network.output else fl
        found.append(write_move(label.format(number), step.move, sources, (shape, order, fl)))
    else:
        moved = dict(stored)
        own = {source: source for source in step.inputs}
        for source, order in needed_orders(network, step, stored).items():
            value = stored[source]
            if not same_order(value.order, order):
                text = f"{label.format(number + len(found))}_order"
                function = write_move(text, None, {source: value}, (value.shape, order, value.fl))
                found.append(function)
                own[source], moved[source] = next(iter(function.outputs.items()))
        last = write_step(
            network, step, moved, (label.format(number + len(found)), tables, called), nibbles
        )
        found.append(replace(last, inputs=[own[source] for source in step.inputs]))
    for function in found:
        stored |= function.outputs
    return found


def _calls(
    functions: Sequence[Function], given: set[str], output: str, stored: dict[str, Stored]
) -> tuple[Memory, list[str]]:
    """Return the plan of memory, and the calls of all functions."""
    buffers: dict[str, Buffer] = {}
    scratch: list[list[Buffer]] = []
    for time, function in enumerate(functions):
        for name, value in function.outputs.items():
            if name != output:
                buffers[name] = Buffer(value.word, value.count, time, time)
        for name in function.inputs:
            if name in buffers:
                buffers[name].last = time
        scratch.append([Buffer(word, count, time, time) for word, count in function.scratch])
    memory = plan([*buffers.values(), *(b for own in scratch for b in own)])

    def place(name: str) -> str:
        if name in given:
            return "input"
        return "output" if name == output else _address(buffers[name])

    calls = []
    for function, own in zip(functions, scratch, strict=True):
        places = [place(name) for name in (*function.inputs, *function.outputs)]
        calls.append(f"{function.name}({', '.join([*places, *map(_address, own)])});")
    return memory, calls


def _address(buffer: Buffer) -> str:
    bits = bits_of(buffer.word)
    at = f"memory_{bits} + {buffer.offset}"
    return f"(uint{bits}_t *)({at})" if buffer.word.startswith("u") else at


def save(network: Network, path: str | Path, *, nibbles: bool = False) -> int:
    """Write ``path`` with the suffixes ``.c`` and ``.h``; return the bytes of both.

    Args:
        network: From ``describe``.
        path: Without a suffix, or with that of one of the files; its folder is made if it is not there.
        nibbles: See ``write``.

    Raises:
        ExportError: See ``write``.
    """
    path = Path(path)
    path = path.with_suffix("") if path.suffix in (".c", ".h") else path
    written = write(network, path.name, nibbles=nibbles)
    for suffix, text in ((".c", written.code), (".h", written.header)):
        write_atomic(path.with_name(path.name + suffix), text.encode())
    return len(written.code.encode()) + len(written.header.encode())


def input_codes(network: Network, x: Tensor) -> Codes:
    """Return samples as the C function takes them: codes, images by rows, columns, channels.

    Args:
        network: From ``describe``.
        x: Samples, shape ``(n, *network.input.shape)``, float32.

    Returns:
        int64, shape ``(n, codes of a sample)``.

    Raises:
        ExportError: There is a NaN, or the network takes inputs of several formats.
    """
    codes = integer.encode_input(x, input_round(network).fmt).reshape(len(x), -1)
    order = channels_last(network.input.shape) if len(network.input.shape) == 3 else None
    return codes if order is None else codes[:, order]


def output_codes(network: Network, codes: Codes, order: Codes | None) -> Tensor:
    """Return what the C function gave as the integer reference gives it: float64 values.

    Args:
        network: From ``describe``.
        codes: Shape ``(n, codes of an output)``.
        order: ``Source.output.order``.
    """
    value = network.values[network.output]
    ordered = codes.copy()
    if order is not None:
        ordered[:, order] = codes
    lsb = 2.0**-value.fl
    return torch.from_numpy(ordered.astype("float64")).reshape(len(codes), *value.shape) * lsb
