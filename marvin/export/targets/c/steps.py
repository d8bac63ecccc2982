"""Each step as a C function."""

from collections.abc import Callable, Mapping
from math import prod

from marvin.export.execute.arithmetic import Codes
from marvin.export.graph.nodes import AveragePool, Linear, MaxPool, Network, Weighted
from marvin.export.graph.transformers import Embedding, MatMul, Norm, Softmax
from marvin.export.targets.c.layers import weighted
from marvin.export.targets.c.runtime import Helpers
from marvin.export.targets.c.schedule import ROWS, Step, orders_of
from marvin.export.targets.c.terms import Lines
from marvin.export.targets.c.transformers import embedding, matmul, norm, softmax
from marvin.export.targets.c.values import Function, Stored, channels_last, indented
from marvin.export.targets.c.windows import pool
from marvin.export.targets.c.words import Tables, comment, loop
from marvin.export.targets.c.writer import Writer, results

__all__ = ["needed_orders", "write_step"]


def needed_orders(
    network: Network, step: Step, stored: Mapping[str, Stored]
) -> dict[str, Codes | None]:
    """Return the order in which a step takes each of its inputs; any for what is not named."""
    head = step.head
    shape = network.values[step.operations[0].name].shape
    whole = [name for name in step.inputs if stored[name].count == prod(shape)]
    own = None if isinstance(head, (Linear, *ROWS)) else channels_last(shape)
    if head is None and len(whole) == len(step.inputs):
        own = stored[whole[0]].order
    orders = orders_of(network, step, own)
    found = {name: orders[op.name] for op in step.operations for name in op.inputs if name in whole}
    if head is None:
        return found
    if isinstance(head, ROWS):
        return found | dict.fromkeys(head.inputs)
    name = head.inputs[0]
    if not isinstance(head, Linear):
        return found | {name: channels_last(stored[name].shape)}
    if any(name in op.inputs for op in step.operations[1:]):
        return found | {name: None}
    found.pop(name, None)  # its weights go in any order
    return found


def write_step(
    network: Network,
    step: Step,
    stored: Mapping[str, Stored],
    shared: tuple[str, Tables, Helpers],
    nibbles: bool,
) -> Function:
    """Return a step as a C function.

    Args:
        network: Of the step.
        step: What is computed.
        stored: Values that are there already.
        shared: Name of the function, the tables of the file, and its helpers.
        nibbles: Whether weights of 4 bits are two to a byte.

    Raises:
        ExportError: It needs more than 64 bits.
    """
    name, tables, helpers = shared
    writer = Writer(network, step, stored, Lines(name, tables, helpers, []), nibbles)
    head = step.head
    body = _each(writer) if head is None else _HEADS[type(head)](writer, head)
    parameters = [f"const {stored[n].word} *restrict x{i}" for i, n in enumerate(step.inputs)]
    outputs = enumerate(writer.outputs.values())
    parameters += [f"{value.word} *restrict y{i}" for i, value in outputs]
    parameters += [f"{own.word} *restrict s{i}" for i, own in enumerate(writer.scratch)]
    what = ", ".join(f"{type(op).__name__} {op.name}" for op in step.operations)
    text = f"{comment(what)}\nstatic void {name}({', '.join(parameters)})\n{{\n"
    text += "\n".join(indented(body)) + "\n}\n"
    return Function(name, text, step.inputs, writer.outputs, writer.scratch, writer.others)


def _each(writer: Writer) -> list[str]:
    """A step without a layer: one loop over all codes."""
    count = prod(writer.network.values[writer.step.operations[0].name].shape)
    values = [writer.stored[name] for name in writer.step.inputs]
    writer.order = next(value.order for value in values if value.count == count)
    return [f"{loop('i', count)} {{", *results(writer, None, None), "}"]


_HEADS: dict[type, Callable[..., list[str]]] = {
    AveragePool: pool,
    Embedding: embedding,
    MatMul: matmul,
    Norm: norm,
    Softmax: softmax,
    MaxPool: pool,
    **dict.fromkeys(Weighted.__subclasses__(), weighted),
}
