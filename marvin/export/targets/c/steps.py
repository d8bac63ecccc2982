"""Each step as a C function."""

from collections.abc import Callable, Mapping

from marvin.export.execute.arithmetic import Codes
from marvin.export.graph.nodes import AveragePool, Linear, MaxPool, Network, Weighted
from marvin.export.targets.c.layers import weighted
from marvin.export.targets.c.schedule import Step
from marvin.export.targets.c.terms import Lines
from marvin.export.targets.c.values import Function, Stored, channels_last, indented
from marvin.export.targets.c.windows import pool
from marvin.export.targets.c.words import Tables, loop
from marvin.export.targets.c.writer import Writer, results

__all__ = ["needed_orders", "write_step"]


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
    writer = Writer(network, step, stored, Lines(name, tables, called, []), nibbles)
    head = step.head
    body = _each(writer) if head is None else _HEADS[type(head)](writer, head)
    parameters = [f"const {stored[n].word} *restrict x{i}" for i, n in enumerate(step.inputs)]
    outputs = enumerate(writer.outputs.values())
    parameters += [f"{value.word} *restrict y{i}" for i, value in outputs]
    parameters += [f"{word} *restrict s{i}" for i, (word, _) in enumerate(writer.scratch)]
    what = ", ".join(f"{type(op).__name__} {op.name}" for op in step.operations)
    text = f"/* {what.replace('*/', '')} */\nstatic void {name}({', '.join(parameters)})\n{{\n"
    text += "\n".join(indented(body)) + "\n}\n"
    return Function(name, text, step.inputs, writer.outputs, writer.scratch)


def _each(writer: Writer) -> list[str]:
    """A step without a layer: one loop over all codes."""
    values = [writer.stored[name] for name in writer.step.inputs]
    writer.order, count = values[0].order, values[0].count
    body = results(writer, None, None)
    shapes = [writer.network.values[op.name].shape for op in writer.step.operations]
    shape = next((s for s in shapes if len(s) > 1), shapes[0])
    channels = f"i / {count // shape[0]}" if writer.order is None else f"i % {shape[0]}"
    channel = [f"const size_t c = {channels};"] if any("[c]" in line for line in body) else []
    return [f"{loop('i', count)} {{", *channel, *body, "}"]


_HEADS: dict[type, Callable[..., list[str]]] = {
    AveragePool: pool,
    MaxPool: pool,
    **dict.fromkeys(Weighted.__subclasses__(), weighted),
}
