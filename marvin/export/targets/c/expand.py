"""Products of values whose sides differ: what is repeated, and is not one number for each channel."""

from dataclasses import dataclass, replace

import torch

from marvin.export.execute.arithmetic import round_codes
from marvin.export.graph.functions import Mul
from marvin.export.graph.nodes import Network, Operation, Round
from marvin.export.graph.transformers import Constant
from marvin.export.targets.c.values import Shape

__all__ = ["Expand", "expanded", "is_by_channel"]


@dataclass(frozen=True, eq=False)
class Expand(Operation):
    """The same codes, sides of 1 repeated.

    Args:
        shape: Of one sample.
    """

    shape: Shape


def is_by_channel(shape: Shape, whole: Shape) -> bool:
    """Say whether a value has one code for each channel of a larger one."""
    return shape != whole and shape == (whole[0], *[1] * (len(whole) - 1))


def expanded(network: Network) -> Network:
    """Return a network in which the sides of factors differ only where one has a code for each channel.

    Roundings of constants are constants. Values of one number have one dimension.
    """
    operations: list[Operation] = []
    constants: dict[str, Constant] = {}
    values = {
        n: value if value.shape else replace(value, shape=(1,))
        for n, value in network.values.items()
    }
    for op in network.operations:
        if isinstance(op, Round) and (source := constants.get(op.inputs[0])):
            codes = round_codes(source.codes.numpy(), source.codes_fmt.fl, op.fmt)
            op = Constant(op.name, (), torch.from_numpy(codes.astype("int64")), op.fmt)
        if isinstance(op, Constant):
            constants[op.name] = op
        if isinstance(op, Mul):
            inputs, whole = [], values[op.name].shape
            for i, name in enumerate(op.inputs):
                shape = values[name].shape
                if shape != whole and not is_by_channel(shape, whole):
                    operations.append(Expand(f"{op.name}.factor{i}", (name,), whole))
                    values[operations[-1].name] = replace(values[name], shape=whole, channels=())
                    name = operations[-1].name
                inputs.append(name)
            op = replace(op, inputs=tuple(inputs))
        operations.append(op)
    used = {name for op in operations for name in op.inputs} | {*network.outputs.values()}
    left = tuple(op for op in operations if op.name in used or not isinstance(op, Constant))
    return replace(network, operations=left, values=values)
