"""C: one file and one header, C99, no dependency, no allocation; the same codes to the bit.

``schedule`` says what is computed together, ``steps`` writes each step as a function, ``terms`` what is
done to each result in it, ``memory`` where values lie; ``compiler`` compiles and runs what was written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from marvin.export.errors import ExportError
from marvin.export.execute import integer
from marvin.export.execute.arithmetic import Codes
from marvin.export.execute.samples import check_samples
from marvin.export.execute.transformers import embed
from marvin.export.graph.nodes import Conv, Flatten, Network, Round, Weighted, check_network
from marvin.export.graph.transformers import Constant, Embedding, MatMul
from marvin.export.graph.views import Reshape
from marvin.export.targets.c.expand import expanded
from marvin.export.targets.c.memory import Buffer, Memory, plan
from marvin.export.targets.c.moves import is_known, write_copy, write_move
from marvin.export.targets.c.rows import ROWS_END, rows_text, scratch_text
from marvin.export.targets.c.runtime import Helpers
from marvin.export.targets.c.schedule import ROWS, Step, input_of, schedule
from marvin.export.targets.c.steps import needed_orders, write_step
from marvin.export.targets.c.text import Facts, header, output_names, source
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
        outputs: What goes out, by its label.
    """

    name: str
    code: str
    header: str
    tables_bytes: int
    memory: Memory
    input: Stored
    outputs: Mapping[str, Stored]


@dataclass(frozen=True)
class Cost:
    """Multiply-adds of layers, and of products of matrices, whose words are equally long, for one sample.

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
    """Return multiply-adds by word lengths, the most first: of layers, and of products of two matrices.

    Products element by element, normalisation and pooling count 0, as in ``perfmodel``.

    Args:
        network: From ``describe``.

    Raises:
        TypeError: ``network`` is not a ``Network``.
    """
    check_network(network)
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
        elif isinstance(op, MatMul):
            x, y = (network.values[name] for name in op.inputs)
            key = y.bits - (y.low >= 0), x.bits - (x.low >= 0)
            madds, ebops = found.get(key, (0, 0))
            new = prod(network.values[op.name].shape) * x.shape[-1]
            found[key] = madds + new, ebops + new * (x.bits - 1) * (y.bits - 1)
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
            formats, or sums that 64 bits do not hold; the operation is named.
        TypeError: ``network`` is not a ``Network``.
    """
    if not (isinstance(name, str) and name.isidentifier() and name.isascii()):
        raise ExportError(f"the name of a C file must be letters, digits and _, got {name!r:.80}")
    first, tables, helpers = input_of(network), Tables(), Helpers(name)
    network = expanded(network)
    taken = _input(network, first)
    stored, places = _given(network, taken, (name, tables))
    given = set(stored)
    functions: list[Function] = []
    for step in schedule(network, given):
        functions += _functions(
            network, step, stored, (name, tables, helpers), nibbles, len(functions)
        )
    outputs, names = dict[str, Stored](), output_names(network.outputs)
    for label, value in network.outputs.items():
        outputs[label] = stored[value]
        if value in places or not is_known(stored[value]):  # or of the input, or of two outputs
            copied = write_copy(f"{name}_{len(functions)}_copy", value, stored[value], label)
            functions.append(copied)
            ((value, outputs[label]),) = copied.outputs.items()
        places[value] = names[label]
    memory, calls = _calls(name, functions, places)
    facts = Facts(name, taken, outputs, first.fmt if isinstance(first, Round) else None)
    rows: dict[str, int] = {}
    for needed in (s for function in functions for s in function.scratch if s.vectors):
        rows[needed.word] = max(needed.vectors, rows.get(needed.word, 0))
    texts = [text for text in (rows_text(name, rows), *tables.texts) if text]
    code = source(facts, texts, helpers.text(), functions, memory, calls)
    code += ROWS_END if rows else ""
    return Source(name, code, header(facts, memory), tables.size_bytes, memory, taken, outputs)


def _given(
    network: Network, taken: Stored, shared: tuple[str, Tables]
) -> tuple[dict[str, Stored], dict[str, str]]:
    """Return values that are there before the first step, and the C names of those that lie elsewhere.

    Args:
        network: From ``expanded``.
        taken: What comes in.
        shared: Prefix of all names, and the tables of the file, which get the constants.
    """
    name, tables = shared
    stored = {network.input.name: taken}
    for op in network.operations:  # the same codes by other names
        if isinstance(op, Round) and op.inputs == (network.input.name,):
            stored[op.name] = taken
        elif isinstance(op, Flatten | Reshape) and op.inputs[0] in stored:
            stored[op.name] = replace(stored[op.inputs[0]], shape=network.values[op.name].shape)
    places = dict.fromkeys(stored, "input")
    for op in network.operations:
        if isinstance(op, Constant):
            table = f"{name}_constant_{identifier(op.name)}"
            places[op.name] = tables.add(table, op.codes.reshape(-1).tolist())
            stored[op.name] = _constant(op)
    return stored, places


def _constant(op: Constant) -> Stored:
    low, high = int(op.codes.min()), int(op.codes.max())
    return Stored(storing(low, high), op.codes_fmt.fl, tuple(op.codes.shape), None, low, high)


def _input(network: Network, first: Round | Embedding) -> Stored:
    shape = network.input.shape
    if isinstance(first, Embedding):
        high = len(first.weight) - 1
        return Stored(storing(0, high), 0, shape, None, 0, high)
    fmt, low, high = first.fmt, first.fmt.min_code, first.fmt.max_code
    order = channels_last(shape) if len(shape) == 3 else None
    return Stored(storing(low, high), fmt.fl, shape, order, low, high)


def _functions(
    network: Network,
    step: Step,
    stored: dict[str, Stored],
    shared: tuple[str, Tables, Helpers],
    nibbles: bool,
    number: int,
) -> list[Function]:
    """Return a step as a function, behind those that put its inputs in the order it takes."""
    name, tables, helpers = shared
    found: list[Function] = []
    label = f"{name}_{{}}_{identifier(step.operations[0].name)}"
    if step.move is not None:
        sources = {source: stored[source] for source in step.inputs}
        shape = network.values[step.move.name].shape
        users = network.users.get(step.move.name, [])
        is_image = len(shape) == 3 and not any(isinstance(user, ROWS) for user in users)
        order = channels_last(shape) if is_image else None
        fl = max(value.fl for value in sources.values())
        if step.move.name in network.outputs.values():
            fl = network.values[step.move.name].fl
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
            network, step, moved, (label.format(number + len(found)), tables, helpers), nibbles
        )
        found.append(replace(last, inputs=[own[source] for source in step.inputs]))
    for function in found:
        stored |= function.outputs | {n: own for n, (_, own) in function.others.items()}
    return found


def _calls(
    prefix: str, functions: Sequence[Function], places: Mapping[str, str]
) -> tuple[Memory, list[str]]:
    """Return the plan of memory, and the calls of all functions.

    Args:
        prefix: Of all names.
        functions: In their order.
        places: Of values that lie elsewhere: the parameter that has them.
    """
    buffers: dict[str, Buffer] = {}
    others = {name: of for f in functions for name, (of, _) in f.others.items()}
    scratch: list[list[Buffer]] = []
    for time, function in enumerate(functions):
        for name, value in function.outputs.items():
            if name not in places:
                buffers[name] = Buffer(value.word, value.count, time, time)
        function.inputs = [others.get(name, name) for name in function.inputs]
        for name in function.inputs:
            if name in buffers:
                buffers[name].last = time
        scratch.append([Buffer(s.stored, s.count, time, time) for s in function.scratch])
    memory = plan([*buffers.values(), *(b for own in scratch for b in own if b.count)])
    calls = []
    for function, own in zip(functions, scratch, strict=True):
        names = *function.inputs, *function.outputs
        found = [places[n] if n in places else _address(prefix, buffers[n]) for n in names]
        for needed, buffer in zip(function.scratch, own, strict=True):
            address = _address(prefix, buffer) if needed.count else "NULL"
            found.append(scratch_text(needed.word, address) if needed.vectors else address)
        calls.append(f"{function.name}({', '.join(found)});")
    return memory, calls


def _address(prefix: str, buffer: Buffer) -> str:
    bits = bits_of(buffer.word)
    at = f"{prefix}_memory_{bits} + {buffer.offset}"
    return f"(uint{bits}_t *)({at})" if buffer.word.startswith("u") else at


def save(network: Network, path: str | Path, *, nibbles: bool = False) -> int:
    """Write ``path`` with the suffixes ``.c`` and ``.h``; return the bytes of both.

    Args:
        network: From ``describe``.
        path: Without a suffix, or with that of one of the files; its folder is made if it is not there.
        nibbles: See ``write``.

    Raises:
        ExportError: See ``write``.
        TypeError: ``network`` is not a ``Network``.
    """
    check_network(network)
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
        ExportError: There is a NaN, a number that is no index of an embedding, or the network takes inputs
            of several formats; or ``x`` has another shape.
        TypeError: ``network`` is not a ``Network``, or ``x`` is not a tensor.
    """
    first = input_of(network)
    check_samples(network, x)
    if isinstance(first, Embedding):
        embed(first, x)  # refuses what is no index
        return x.detach().cpu().long().numpy().reshape(len(x), -1)
    codes = integer.encode_input(x, first.fmt).reshape(len(x), -1)
    order = channels_last(network.input.shape) if len(network.input.shape) == 3 else None
    return codes if order is None else codes[:, order]


def output_codes(network: Network, source: Source, codes: Codes) -> dict[str, Tensor]:
    """Return what the C program printed as the integer reference gives it: float64 values by label.

    Args:
        network: From ``describe``.
        source: From ``write``.
        codes: Shape ``(n, codes of all outputs)``.
    """
    found, first = {}, 0
    for label, name in network.outputs.items():
        value, stored = network.values[name], source.outputs[label]
        own = codes[:, first : first + stored.count]
        ordered = own.copy()
        if stored.order is not None:
            ordered[:, stored.order] = own
        tensor = torch.from_numpy(ordered.astype("float64")).reshape(len(codes), *value.shape)
        found[label] = tensor * 2.0**-value.fl
        first += stored.count
    return found
