"""Roundings directly behind their ReLU, each behind one of its own, as FINN asks for; values stay."""

from dataclasses import replace

from fixedpoint_kernels import FixedPoint
from marvin.export.graph.bounds import value_of
from marvin.export.graph.functions import PASS_ON
from marvin.export.graph.nodes import Network, Operation, Relu, Round, Value

__all__ = ["round_early"]


def round_early(network: Network) -> Network:
    """Return a network with the same values, whose roundings stand directly behind their ReLU.

    What keeps the order of values, and is taken by the rounding alone, comes behind the rounding: it takes
    short codes. So does a ReLU of a rounded value. A signed format of what is never below 0 becomes the unsigned
    one with the same codes.

    Args:
        network: From ``describe``.
    """
    operations: list[Operation] = []
    values: dict[str, Value] = {}
    for op in network.operations[1:]:
        added = [op]
        if isinstance(op, Round):
            added = _rounded(network, op)
        elif isinstance(op, Relu):
            added = _behind(network, op)
        for one in added:
            known = [values[name] for name in one.inputs if name in values]
            values[one.name] = value_of(one, known) if known else network.values[one.name]
        operations += added
    needed = {*network.outputs.values()}
    for op in reversed(operations):
        needed |= {*op.inputs} if op.name in needed else set()
    operations = [network.input, *(op for op in operations if op.name in needed)]
    kept = {name: value for name, value in values.items() if name in needed}
    return replace(network, operations=tuple(operations), values=kept)


def _rounded(network: Network, op: Round) -> list[Operation]:
    """Return a rounding with its ReLU before it, and what was between them behind it."""
    (source,) = op.inputs
    if source == network.input.name:
        return [op]
    fmt = op.fmt
    if fmt.signed and fmt.wl > 2 and network.values[source].low >= 0:
        fmt = FixedPoint(fmt.wl - 1, fmt.fl, signed=False)
    between: list[Operation] = []
    before, user = network.operation(source), op.name
    while isinstance(before, PASS_ON) and _is_alone(network, before, user):
        between.insert(0, before)
        user, before = before.name, network.operation(before.inputs[0])
    if not isinstance(before, Relu):
        return [replace(op, fmt=fmt)]
    names = [f"{op.name}.{i}" for i in range(len(between))] + [op.name]
    relu = replace(before, name=f"{op.name}.relu")
    found: list[Operation] = [relu, Round(names[0], (relu.name,), fmt)]
    for taken, name, moved in zip(names, names[1:], between, strict=False):
        found.append(replace(moved, name=name, inputs=(taken,)))
    return found


def _behind(network: Network, op: Relu) -> list[Operation]:
    """Return a ReLU; that of a rounding which nothing else takes comes before it."""
    before = network.operation(op.inputs[0])
    if not isinstance(before, Round) or not _is_alone(network, before, op.name):
        return [op]
    fmt = before.fmt
    if before.inputs == (network.input.name,) or (fmt.signed and fmt.wl <= 2):
        return [op]
    fmt = FixedPoint(fmt.wl - fmt.signed, fmt.fl, signed=False)
    relu = replace(op, name=f"{op.name}.relu", inputs=before.inputs)
    return [relu, Round(op.name, (relu.name,), fmt)]


def _is_alone(network: Network, op: Operation, user: str) -> bool:
    """Say whether nothing but one operation takes a value."""
    users = [other.name for other in network.users.get(op.name, [])]
    return users == [user] and op.name not in network.outputs.values()
