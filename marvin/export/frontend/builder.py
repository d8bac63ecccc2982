"""A network in the making, and which value each tensor of the trace has."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, fx, nn

from fixedpoint_kernels import FixedPoint
from marvin.export.errors import ExportError, fixed_point
from marvin.export.frontend.observe import Observed
from marvin.export.graph.bounds import first_value, shape_of, value_of
from marvin.export.graph.formats import Formats, exact_format, fitting
from marvin.export.graph.nodes import Input, Network, Operation, Round, Value
from marvin.export.graph.transformers import Embedding
from marvin.rounding import Format

__all__ = ["Builder", "Make", "Memory", "Pending", "Whole"]


@dataclass(eq=False)
class _Cell:
    """The memory of a tensor.

    Args:
        value: Name of what is in it.
        views: Cells that may share it, this one included: one list for all of them.
        changed_by: The call that has written to a view of it; ``""`` if none.
        place: The dimension of the batch.
    """

    value: str
    views: list["_Cell"] = field(default_factory=list)
    changed_by: str = ""
    place: int = 0


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

    def view(self, node: fx.Node, source: fx.Node, value: str, place: int = 0) -> None:
        """Make a node a tensor that may share the memory of another; ``place`` is its batch's dimension."""
        views = self._cells[source.name].views
        cell = self._cells[node.name] = _Cell(value, views, place=place)
        views.append(cell)

    def place(self, node: fx.Node) -> int:
        """Return the dimension in which a tensor has its batch."""
        return self._cells[node.name].place

    def write(self, node: fx.Node, target: fx.Node, value: str) -> None:
        """Let a node replace what is in the memory of ``target``, and be that tensor."""
        cell = self._cells[node.name] = self._cells[target.name]
        cell.value = value
        for other in cell.views:
            if other is not cell:
                other.changed_by = node.name

    def read(self, node: fx.Node, user: str, *, in_any_order: bool = False) -> str:
        """Return the name of a node's value.

        Raises:
            ExportError: The node is a view of what was changed in place; or its batch is not first, and
                the order does matter.
        """
        cell = self._cells[node.name]
        if cell.place and not in_any_order:
            raise ExportError(
                f"{user} takes {node.name}, whose batch is dimension {cell.place}: it must leave the batch "
                "alone, so transpose it back before"
            )
        if cell.changed_by:
            raise ExportError(
                f"{user} uses {node.name}, whose memory {cell.changed_by} may have changed in "
                f"place through a view: write {cell.changed_by} out of place"
            )
        return cell.value


_WAITING = " before rounding"

Make = Callable[[str, str, FixedPoint], Operation]  # of a name, of what is taken, and of a format
Whole = Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]
"""What a call computes in float64, and how large the terms are that it adds."""


@dataclass(frozen=True)
class Pending:
    """A value that has no codes before something rounds it: the input, a mean, a function of codes.

    Or what is made of such a value without changing the order of numbers: then it is made of the
    rounded one, which is the same.

    Args:
        source: Name of what it takes: a value, or another that is pending.
        make: Makes the operation, once the format is known.
        shape: Of one sample.
        node: Of the trace, whose range gives a format where nothing else does.
        why_not: Why the export chooses no format itself; ``""`` where it does.
        fmt: What it is rounded to where nothing else rounds it; None: by its range.
    """

    source: str
    make: Make
    shape: tuple[int, ...]
    node: str
    why_not: str = ""
    fmt: FixedPoint | None = None


@dataclass
class Builder:
    """A network in the making.

    Args:
        model: What is translated.
        weights: Formats of parameters by name.
        activations: What modules round, by name.
        scale_wl: Word length of batch normalisation's scale.
        wl: Word length of formats that training left open.
        observed: What the calls of the trace give on samples.
        memory: The value of each node of the trace.
        operations: So far.
        values: Of ``operations``, without the input.
        pending: Values that nothing has rounded yet.
        found: Formats that the export has chosen, by the name of what is rounded.
        results: The values that the model gives, by label.
        heads: Of a network whose outputs have labels, what gives their codes.
        origins: What each rounded value was before, by the name of the rounded one, where the model
            itself does not round.
    """

    model: nn.Module
    weights: Mapping[str, Format]
    activations: Mapping[str, Formats]
    scale_wl: int
    wl: int = 8
    observed: Observed = field(default_factory=Observed)
    memory: Memory = field(default_factory=Memory)
    operations: list[Operation] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    pending: dict[str, Pending] = field(default_factory=dict)
    found: dict[str, FixedPoint] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)
    heads: tuple[tuple[str, str], ...] = ()
    node: str = ""
    """Of the trace: what is being translated."""
    taken: str = ""
    """Of the trace: what it takes."""
    whole: Whole | None = None
    """What is being translated, where it is compared as one."""
    _made: dict[tuple[str, FixedPoint], str] = field(default_factory=dict)

    def begin(self, name: str, shape: tuple[int, ...]) -> None:
        """Add the input."""
        self.operations.append(Input(name, (), shape))
        why_not = (
            "takes the network's input before any layer rounds it: do that to the samples, before the network; "
            "or, where a layer takes them as they are, let a convolution of one pixel come before both"
        )
        self.pending[name] = Pending(
            "", lambda n, _, fmt: Round(n, (name,), fmt), shape, name, why_not
        )

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a value, of one sample."""
        return self.pending[name].shape if name in self.pending else self.values[name].shape

    def wait(self, name: str, pending: Pending) -> str:
        """Add a value that is made when something rounds it; return its name until then."""
        waiting = name + _WAITING
        self.pending[waiting] = pending
        return waiting

    def keep(self, name: str, source: str, make: Make) -> str:
        """Add an operation that keeps the order of numbers; it waits if what it takes does.

        Args:
            name: Of the operation.
            source: What it takes.
            make: Makes it; the format is the one that what waits is rounded to.
        """
        if source not in self.pending:
            return self.add(make(name, source, FixedPoint(8, 0)))
        before = self.pending[source]
        shape = shape_of(make(name, source, FixedPoint(8, 0)), before.shape)
        return self.wait(name, replace(before, source=source, make=make, shape=shape))

    def _realised(self, name: str, fmt: FixedPoint, hint: str) -> str:
        """Return the name of a pending value, rounded to ``fmt``."""
        key = name, fmt
        if key not in self._made:
            pending = self.pending[name]
            source = pending.source
            if source in self.pending:
                source = self._realised(source, fmt, hint)
            own = hint if name == self.operations[0].name else name.removesuffix(_WAITING)
            own = self._free(own, {op.name for op in self.operations})
            self._made[key] = self.add(pending.make(own, source, fmt))
            self.origins[self._made[key]] = name
        return self._made[key]

    def add(self, op: Operation) -> str:
        """Add an operation; return its name."""
        source = self.operations[0]
        assert isinstance(source, Input)
        if op.inputs == (source.name,) and isinstance(op, Round | Embedding):
            value = first_value(op, source.shape)
        else:
            value = value_of(op, [self.values[self.rounded(name, op.name)] for name in op.inputs])
        self.values[op.name] = value
        self.operations.append(op)
        return op.name

    def format_of(self, name: str, x: Tensor) -> Format:
        """Return the format of a layer's weight ``x``.

        Raises:
            ExportError: It has none.
        """
        if name in self.weights:
            return self.weights[name]
        reason = "its layer stayed in floats: give describe a format of it in weights"
        if exact_format(x) is None:
            reason = (
                "its layer stayed in floats, which 32 bits do not hold exactly: export the copy that "
                f"marvin.export.nearest_weights(model, {{{name!r}: FixedPoint(16, 12)}}) gives"
            )
        raise ExportError(f"{name} has no format: {reason}")

    def operation(self, name: str) -> Operation:
        """Return the operation that gives a value."""
        return next(op for op in self.operations if op.name == name)

    def rounded(self, name: str, user: str) -> str:
        """Return the name of a value's codes; what is pending gets a format by its range.

        Raises:
            ExportError: It is the input, which only a rounding can take.
        """
        if name not in self.pending:
            return name
        pending = self.pending[name]
        if pending.why_not:
            raise ExportError(f"{user} {pending.why_not}")
        fmt = pending.fmt or self.fitting(pending.node)
        made = self._realised(name, fmt, name.removesuffix(_WAITING))
        self.found[made] = fmt
        return made

    def fitting(self, node: str) -> FixedPoint:
        """Return the finest format of ``wl`` bits that holds what a node of the trace gave.

        Raises:
            ExportError: No format does, or not all was finite; the node is named.
        """
        low, high = self.observed.range_of(node)
        try:
            return fitting((low, high), self.wl, signed=low < 0)
        except ExportError as error:
            raise ExportError(f"{node}: {error} (--wl, or wl= of describe)") from error

    def unused(self, name: str) -> str:
        """Return ``name``, with a number behind it where it is taken."""
        waiting = {other.removesuffix(_WAITING) for other in self.pending}
        return self._free(name, {op.name for op in self.operations} | waiting)

    @staticmethod
    def _free(name: str, taken: set[str]) -> str:
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
        return formats.input

    def round_output(self, name: str, module: str, source: str) -> str:
        """Round what a module gives, where it does; return the value's name."""
        formats = self.activations.get(module)
        if formats is None or formats.output is None:
            return source
        return self.round(f"{name}.out", source, formats.output)

    def round(self, name: str, source: str, fmt: FixedPoint) -> str:
        """Round a value, unless that would change nothing; return the name of the result."""
        fixed_point(name, fmt)
        if source in self.pending:
            return self._realised(source, fmt, name)
        value = self.values.get(source)
        if value is not None and value.is_in(fmt):
            return source
        return self.add(Round(name, (source,), fmt))

    def end(self, heads: Mapping[str, str]) -> None:
        """Take values as the outputs, by label."""
        self.results = dict(heads)
        names = {label: self.rounded(name, "the output") for label, name in heads.items()}
        used = self.needed(names.values())
        self.operations = [op for op in self.operations if op.name in used]
        if len(names) == 1:
            self.operations.sort(key=lambda op: op.name in names.values())
        if set(names) not in ({"output"}, {"output0"}):  # a tensor, or a tuple of one
            self.heads = tuple(names.items())

    def needed(self, names: Iterable[str]) -> set[str]:
        """Return the names of all that some values depend on."""
        inputs = {op.name: op.inputs for op in self.operations}
        found, waiting = {self.operations[0].name}, list(names)
        while waiting:
            current = waiting.pop()
            if current not in found:
                found.add(current)
                waiting.extend(inputs[current])
        return found

    def network(self, origin: str, defaults: tuple[str, ...]) -> Network:
        """Return what was built; see ``Network``."""
        values = {op.name: self.values[op.name] for op in self.operations[1:]}
        chosen = {name: fmt for name, fmt in self.found.items() if name in values}
        return Network(tuple(self.operations), values, origin, self.heads, chosen, defaults)
