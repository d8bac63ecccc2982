"""Which operations are computed together, in which order: a layer, and what is done to each result."""

from collections.abc import Callable
from dataclasses import dataclass, field

from marvin.export.errors import ExportError
from marvin.export.execute.arithmetic import Codes
from marvin.export.graph.functions import Clip, Mul, Table
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
    check_network,
)
from marvin.export.graph.transformers import Embedding, MatMul, Norm, Softmax
from marvin.export.graph.views import Concat, Pad, Reshape, Slice, Transpose
from marvin.export.targets.c.expand import Expand, is_by_channel
from marvin.export.targets.c.values import same_order, transposed

__all__ = ["ROWS", "Step", "input_of", "orders_of", "schedule"]

_MOVES = Concat, Expand, Pad, Slice, Transpose
ROWS = Embedding, MatMul, Norm, Softmax
"""Layers whose values lie as the network has them, row behind row."""
_HEADS = Conv, Linear, MaxPool, AveragePool, *ROWS
_POINTWISE = Add, Affine, Clip, Flatten, Mul, Relu, Reshape, Round, Table, Transpose


@dataclass(eq=False)
class Step:
    """One function of the C file.

    Args:
        operations: The first may be a layer or a pool; all others take one code at a time.
        stored: Those whose values are kept for others.
        inputs: Names of values of other steps, or of the input, that it takes.
    """

    operations: list[Operation]
    stored: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)

    @property
    def move(self) -> Operation | None:
        """What moves codes, if that is all the step does."""
        first = self.operations[0]
        return first if isinstance(first, _MOVES) else None

    @property
    def head(self) -> Operation | None:
        """The layer or pool, if there is one."""
        first = self.operations[0]
        return first if isinstance(first, _HEADS) else None


def input_of(network: Network) -> Round | Embedding:
    """Return what takes the input: a rounding, whose codes the C function takes, or an embedding.

    Raises:
        ExportError: There are several roundings with different formats, or both.
        TypeError: ``network`` is not a ``Network``.
    """
    check_network(network)
    source = network.input.name
    users = [op for op in network.operations if op.inputs == (source,)]
    takes = [op for op in users if isinstance(op, Round | Embedding)]
    formats = {op.fmt if isinstance(op, Round) else None for op in takes}
    if len(formats) != 1:
        kinds = (f"{op.name} {op.fmt if isinstance(op, Round) else 'indices'}" for op in takes)
        found = ", ".join(kinds)
        raise ExportError(f"C takes an input of one format, got {found or 'none'}")
    rows = [len(op.weight) for op in takes if isinstance(op, Embedding)]
    return takes[rows.index(min(rows))] if rows else takes[0]


def schedule(network: Network, given: set[str]) -> list[Step]:
    """Return the steps of a network, in an order in which they can be computed.

    An operation on single codes joins the step that makes its input, so that no long sum is stored.

    Args:
        network: From ``describe``.
        given: Names of values that are there before the first step.

    Raises:
        ExportError: There is an operation that C code has no word for.
    """
    steps: dict[str, Step] = {}
    for op in network.operations[1:]:
        if op.name in given:
            continue
        if type(op) not in _HEADS + _POINTWISE + _MOVES:
            raise ExportError(f"{op.name}: {type(op).__name__} cannot be written as C")
        found = _joined(network, op, steps) if isinstance(op, _POINTWISE) else None
        if found is None:
            found = Step([])
        found.operations.append(op)
        steps[op.name] = found
    ordered = _ordered(list(dict.fromkeys(steps.values())), steps)
    for step in ordered:
        own = {op.name for op in step.operations}
        step.inputs = _outside(step)
        for op in step.operations:
            users = network.users.get(op.name, [])
            if op.name in network.outputs.values() or any(user.name not in own for user in users):
                step.stored.append(op.name)
    return ordered


def _outside(step: Step) -> list[str]:
    own = {op.name for op in step.operations}
    names = [name for op in step.operations for name in op.inputs if name not in own]
    return list(dict.fromkeys(names))


def _joined(network: Network, op: Operation, steps: dict[str, Step]) -> Step | None:
    """Return the last step that makes an input of ``op`` and that no other input is made from."""
    shape = network.values[op.name].shape
    makers = [steps[name] for name in op.inputs if name in steps]
    able = [s for s in dict.fromkeys(makers) if s.move is None and _is_aligned(network, op, s)]
    if any(is_by_channel(network.values[name].shape, shape) for name in op.inputs):
        able = [s for s in able if network.values[s.operations[0].name].shape == shape]
    for step in reversed(able):
        others = [other for other in makers if other is not step]
        if not any(_needs(other, step, steps) for other in others):
            return step
    return None


def orders_of(network: Network, step: Step, first: Codes | None) -> dict[str, Codes | None]:
    """Return the order in which the values of a step's operations lie.

    Args:
        network: Of the step.
        step: What is computed; a transposition moves nothing: its codes lie in another order.
        first: Order of what the first operation gives.
    """
    found: dict[str, Codes | None] = {}
    for op in step.operations:
        own = next((found[name] for name in op.inputs if name in found), first)
        if isinstance(op, Transpose):
            own = transposed(network.values[op.inputs[0]].shape, op.order, own)
        found[op.name] = own
    return found


def _is_aligned(network: Network, op: Operation, step: Step) -> bool:
    """Say whether all that an operation takes would lie in one order, if it joined a step."""
    orders = orders_of(network, step, None)
    inside = [orders[name] for name in op.inputs if name in orders]
    outside = [
        orders[other.name]
        for other in step.operations
        if any(name in other.inputs and name not in orders for name in op.inputs)
    ]
    return all(same_order(inside[0], order) for order in inside + outside)


def _needs(step: Step, other: Step, steps: dict[str, Step]) -> bool:
    """Say whether a step can be computed only after another."""
    return other in _before(step, lambda s: [steps[n] for n in _outside(s) if n in steps])


def _before(step: Step, sources: Callable[[Step], list[Step]]) -> list[Step]:
    """Return a step and all that it is made from, itself last."""
    done: dict[Step, None] = {}
    waiting = [step]
    while waiting:
        current = waiting[-1]
        missing = [s for s in sources(current) if s not in done and s is not current]
        if missing:
            waiting += missing
        else:
            done[current] = None
            waiting.pop()
    return list(done)


def _ordered(found: list[Step], steps: dict[str, Step]) -> list[Step]:
    done: dict[Step, None] = {}
    for step in found:
        done |= dict.fromkeys(
            _before(step, lambda s: [steps[n] for n in _outside(s) if n in steps])
        )
    return list(done)
