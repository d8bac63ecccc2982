"""A network in the making, and which value each tensor of the trace has."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx, nn

from fixedpoint_kernels import FixedPoint
from marvin.export.errors import ExportError, fixed_point
from marvin.export.graph.bounds import first_value, value_of
from marvin.export.graph.formats import Formats
from marvin.export.graph.nodes import Input, Network, Operation, Round, Value
from marvin.rounding import Format

__all__ = ["Builder", "Memory"]


@dataclass(eq=False)
class _Cell:
    """The memory of a tensor.

    Args:
        value: Name of what is in it.
        views: Cells that may share it, this one included: one list for all of them.
        changed_by: The call that has written to a view of it; ``""`` if none.
    """

    value: str
    views: list["_Cell"] = field(default_factory=list)
    changed_by: str = ""


class Memory:
    """Which value each node of a trace has now.

    An operation in place changes what all nodes see that are the same tensor. What it makes of
    a view is not followed: such a node can be read no more.
    """

    def __init__(self) -> None:
        self._cells: dict[str, _Cell] = {}

    def __contains__(self, node: fx.Node) -> bool:
        return node.name in self._cells

    def new(self, node: fx.Node, value: str) -> None:
        """Give a node memory of its own."""
        cell = self._cells[node.name] = _Cell(value)
        cell.views.append(cell)

    def same(self, node: fx.Node, source: fx.Node) -> None:
        """Make a node the same tensor as another."""
        self._cells[node.name] = self._cells[source.name]

    def view(self, node: fx.Node, source: fx.Node, value: str) -> None:
        """Make a node a tensor that may share the memory of another."""
        views = self._cells[source.name].views
        cell = self._cells[node.name] = _Cell(value, views)
        views.append(cell)

    def write(self, node: fx.Node, target: fx.Node, value: str) -> None:
        """Let a node replace what is in the memory of ``target``, and be that tensor."""
        cell = self._cells[node.name] = self._cells[target.name]
        cell.value = value
        for other in cell.views:
            if other is not cell:
                other.changed_by = node.name

    def read(self, node: fx.Node, user: str) -> str:
        """Return the name of a node's value.

        Raises:
            ExportError: The node is a view of what was changed in place.
        """
        cell = self._cells[node.name]
        if cell.changed_by:
            raise ExportError(
                f"{user} uses {node.name}, whose memory {cell.changed_by} may have changed in "
                f"place through a view: write {cell.changed_by} out of place"
            )
        return cell.value


@dataclass
class Builder:
    """A network in the making.

    Args:
        model: What is translated.
        weights: Formats of parameters by name.
        activations: What modules round, by name.
        scale_wl: Word length of batch normalisation's scale.
        memory: The value of each node of the trace.
        operations: So far.
        values: Of ``operations``, without the input.
    """

    model: nn.Module
    weights: Mapping[str, Format]
    activations: Mapping[str, Formats]
    scale_wl: int
    memory: Memory = field(default_factory=Memory)
    operations: list[Operation] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)

    def begin(self, name: str, shape: tuple[int, ...]) -> None:
        """Add the input."""
        self.operations.append(Input(name, (), shape))

    def add(self, op: Operation) -> str:
        """Add an operation; return its name."""
        source = self.operations[0]
        assert isinstance(source, Input)
        if op.inputs == (source.name,) and isinstance(op, Round):
            value = first_value(op, source.shape)
        else:
            value = value_of(op, [self.values[self.rounded(name, op.name)] for name in op.inputs])
        self.values[op.name] = value
        self.operations.append(op)
        return op.name

    def operation(self, name: str) -> Operation:
        """Return the operation that gives a value."""
        return next(op for op in self.operations if op.name == name)

    def rounded(self, name: str, user: str) -> str:
        """Return ``name``, unless it is the input, which only a rounding can take.

        Raises:
            ExportError: It is the input.
        """
        if name not in self.values:
            raise ExportError(f"{user} takes the network's input before any layer rounds it")
        return name

    def unused(self, name: str) -> str:
        """Return ``name``, with a number behind it where it is taken."""
        taken = {op.name for op in self.operations}
        names = (name, *(f"{name}.{i}" for i in range(2, len(taken) + 3)))
        return next(n for n in names if n not in taken)

    def round_input(self, name: str, module: str, source: str) -> str:
        """Round what a module takes, where it does; return the value's name."""
        fmt = self.input_format(module, source)
        if fmt is None:
            return self.rounded(source, module)
        return self.round(f"{name}.in", source, fmt)

    def input_format(self, module: str, source: str) -> FixedPoint | None:
        """Return what a module rounds a value to that it takes; None where it does not."""
        formats = self.activations.get(module)
        if formats is None or formats.input is None:
            return None
        value = self.values.get(source)
        is_short = value is not None and value.bits <= formats.input.wl
        return None if formats.is_calibrated and is_short else formats.input

    def round_output(self, name: str, module: str, source: str) -> str:
        """Round what a module gives, where it does; return the value's name."""
        formats = self.activations.get(module)
        if formats is None or formats.output is None:
            return source
        return self.round(f"{name}.out", source, formats.output)

    def round(self, name: str, source: str, fmt: FixedPoint) -> str:
        """Round a value, unless that would change nothing; return the name of the result."""
        fixed_point(name, fmt)
        value = self.values.get(source)
        if value is not None and value.fl <= fmt.fl:
            shift = fmt.fl - value.fl
            if fmt.min_code <= value.low << shift and value.high << shift <= fmt.max_code:
                return source
        return self.add(Round(name, (source,), fmt))

    def end(self, name: str) -> None:
        """Take ``name`` as the output."""
        used = self.needed(self.rounded(name, "the output"))
        self.operations = [op for op in self.operations if op.name in used]
        self.operations.sort(key=lambda op: op.name == name)

    def needed(self, name: str) -> set[str]:
        """Return the names of all that a value depends on."""
        inputs = {op.name: op.inputs for op in self.operations}
        found, waiting = {self.operations[0].name}, [name]
        while waiting:
            current = waiting.pop()
            if current not in found:
                found.add(current)
                waiting.extend(inputs[current])
        return found

    def network(self, origin: str) -> Network:
        """Return what was built."""
        values = {op.name: self.values[op.name] for op in self.operations[1:]}
        return Network(tuple(self.operations), values, origin)
