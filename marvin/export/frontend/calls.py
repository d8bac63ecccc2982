"""Functions and methods that no layer stands for: sums, shapes, orders, parts, means."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from marvin.export.errors import ExportError
from marvin.export.frontend.builder import Builder
from marvin.export.frontend.layers import average, reshape
from marvin.export.graph.functions import Mul
from marvin.export.graph.nodes import Add, Flatten
from marvin.export.graph.views import Concat, Slice, Transpose

__all__ = ["CALLS", "Call"]

_PRIMES = 2, 3, 5, 7, 11, 13


@dataclass(frozen=True)
class Call:
    """One call of a function or a method.

    Args:
        builder: Of the network.
        node: Of the trace.
        name: Of the operation.
        args: With plain values in place of the nodes that gave them.
        kwargs: Likewise.
        nodes: The tensors of the network that it takes.
    """

    builder: Builder
    node: fx.Node
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    nodes: tuple[fx.Node, ...]

    @classmethod
    def of(cls, builder: Builder, node: fx.Node) -> "Call":
        """Return a node's call."""
        nodes: list[fx.Node] = []

        def resolved(given: fx.Node) -> Any:
            if given.name in builder.observed.plain:
                plain = builder.observed.plain[given.name]
                if not _has_tensors(plain):
                    return plain
                map_arg((given.args, given.kwargs), resolved)
                return given
            nodes.append(given)
            return given

        args, kwargs = map_arg((node.args, node.kwargs), resolved)
        return cls(builder, node, builder.unused(node.name), args, kwargs, tuple(nodes))

    def refusal(self, instead: str = "") -> ExportError:
        """Return what says that this call cannot be exported, and what to write instead."""
        target = self.node.target
        text = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        arguments = ", ".join(map(str, self.node.args))
        return ExportError(f"{self.node.name}: {text}({arguments}) cannot be exported{instead}")

    def value(self, node: Any) -> str:
        """Return the value that a node stands for.

        Raises:
            ExportError: It stands for none, or what it stands for was changed through a view.
        """
        if not isinstance(node, fx.Node) or node not in self.builder.memory:
            raise ExportError(f"{self.name} must be called with a value of the network, got {node}")
        return self.builder.memory.read(node, self.name)

    def codes(self, node: Any) -> str:
        """Return the value that a node stands for, which gets codes if it has none.

        Raises:
            ExportError: As ``value``; or it is the input, which nothing has rounded.
        """
        return self.builder.rounded(self.value(node), self.name)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result, of one sample.

        Raises:
            ExportError: The batch is no dimension of its own.
        """
        shape = self.builder.observed.shapes[self.node.name]
        batch = self.builder.observed.shapes[self.builder.operations[0].name][0]
        if not shape or shape[0] != batch:
            raise self.refusal(": it must leave the batch alone")
        return shape[1:]

    def replay(self, values: Sequence[Tensor]) -> Tensor:
        """Return what the call gives of tensors in place of ``nodes``."""
        given = {node: x.clone() for node, x in zip(self.nodes, values, strict=True)}

        def resolved(node: fx.Node) -> Any:
            if node in given:
                return given[node]
            plain = self.builder.observed.plain[node.name]
            return called(node) if _has_tensors(plain) else plain

        def called(node: fx.Node) -> Any:
            args, kwargs = map_arg((node.args, node.kwargs), resolved)
            if isinstance(node.target, str):
                return getattr(args[0], node.target)(*args[1:], **kwargs)
            return node.target(*args, **kwargs)

        return called(self.node)


def _has_tensors(plain: object) -> bool:
    if isinstance(plain, tuple | list):
        return any(isinstance(x, Tensor) or _has_tensors(x) for x in plain)
    return isinstance(plain, Tensor)


def _add(builder: Builder, call: Call) -> str:
    if len(call.args) != 2 or len(call.nodes) != 2 or call.kwargs:
        raise call.refusal()
    sources = tuple(call.codes(node) for node in call.args)
    shapes = {builder.shape(name) for name in sources}
    if len(shapes) > 1:
        raise call.refusal(f": both must have one shape, got {' and '.join(map(str, shapes))}")
    result = builder.add(Add(call.name, sources))
    if call.node.target in (operator.iadd, "add_"):
        builder.memory.write(call.node, call.args[0], result)
    else:
        builder.memory.new(call.node, result)
    return result


def _mul(builder: Builder, call: Call) -> str:
    if len(call.args) != 2 or len(call.nodes) != 2 or call.kwargs:
        raise call.refusal(": two values of the network can be multiplied")
    sources = call.codes(call.args[0]), call.codes(call.args[1])
    if len(builder.shape(sources[0])) != len(builder.shape(sources[1])):
        raise call.refusal(": both must have as many dimensions")
    result = builder.add(Mul(call.name, sources))
    if call.node.target in (operator.imul, "mul_"):
        builder.memory.write(call.node, call.args[0], result)
    else:
        builder.memory.new(call.node, result)
    return result


def _reshape(builder: Builder, call: Call) -> str:
    source, shape = call.value(call.args[0]), call.shape
    if shape == builder.shape(source):
        result = source
    elif len(shape) == 1:
        result = builder.keep(call.name, source, lambda n, x, _fmt: Flatten(n, (x,)))
    else:
        result = reshape(builder, call.name, source, shape)
    builder.memory.view(call.node, call.args[0], result)
    return result


def _clone(builder: Builder, call: Call) -> str:
    result = call.value(call.args[0])
    builder.memory.new(call.node, result)
    return result


def _transpose(builder: Builder, call: Call) -> str:
    source = call.value(call.args[0])
    dims = len(builder.shape(source)) + 1
    sizes = _PRIMES[:dims]  # which tell where each dimension goes
    moved = Call.replay(call, [torch.empty(sizes)]).shape
    order = tuple(sizes.index(size) for size in moved)
    if order[0] != 0:
        raise call.refusal(": it must leave the batch alone")
    result = _moved(builder, call.name, source, tuple(i - 1 for i in order[1:]))
    builder.memory.view(call.node, call.args[0], result)
    return result


def _moved(builder: Builder, name: str, source: str, order: tuple[int, ...]) -> str:
    if order == tuple(range(len(order))):
        return source
    return builder.keep(name, source, lambda n, x, _fmt: Transpose(n, (x,), order))


def _concat(builder: Builder, call: Call) -> str:
    arguments = dict(zip(("tensors", "dim"), call.args, strict=False)) | call.kwargs
    dim = arguments.get("dim", arguments.get("axis", 0))
    sources = tuple(call.codes(node) for node in arguments["tensors"])
    axis = dim % (len(builder.shape(sources[0])) + 1) - 1
    if axis < 0:
        raise call.refusal(": it must leave the batch alone, give dim=1 or more")
    result = builder.add(Concat(call.name, sources, axis))
    builder.memory.new(call.node, result)
    return result


def _item(builder: Builder, call: Call) -> str:
    """Add a part of a tensor: one of several, or by indices."""
    of = call.args[0]
    whole = of
    if of not in builder.memory:  # one of the tensors of chunk, split or unbind
        whole = of.args[0]
    source = call.value(whole)
    # the indices of each element of one sample say which part it is
    shape = builder.shape(source)
    numbers = torch.arange(_product(shape)).reshape(1, *shape)
    try:
        batch = builder.observed.shapes[builder.operations[0].name][0]
        part = call.replay([numbers.expand(batch, *shape)])
    except (IndexError, RuntimeError) as error:
        raise call.refusal() from error
    if part.ndim == 0 or len(part) != batch or not torch.equal(part, part[:1].expand_as(part)):
        raise call.refusal(": it must leave the batch alone")
    result = _slices(builder, call, source, part[0])
    builder.memory.view(call.node, whole, result)
    return result


def _slices(builder: Builder, call: Call, source: str, part: Tensor) -> str:
    """Add the slices that give a part, whose elements are numbered as those of the source."""
    shape = builder.shape(source)
    places = torch.unravel_index(part.reshape(-1), shape)
    result = source
    for axis, taken in enumerate(places):
        found = taken.unique()  # in order
        step = int(found[1] - found[0]) if len(found) > 1 else 1
        start, stop = int(found[0]), int(found[-1]) + 1
        if not torch.equal(found, torch.arange(start, stop, step)):
            raise call.refusal(": indices must be a slice")
        if (start, stop, step) != (0, shape[axis], 1):
            what = axis, start, stop, step
            name = call.name if result == source else builder.unused(f"{call.name}.part")
            result = builder.keep(name, result, lambda n, x, _f, what=what: Slice(n, (x,), *what))
    sizes = tuple(len(taken.unique()) for taken in places)
    grid = torch.arange(_product(shape)).reshape(shape)
    for axis, taken in enumerate(places):
        grid = grid.index_select(axis, taken.unique())
    if not torch.equal(grid.reshape(-1), part.reshape(-1)):
        raise call.refusal(": indices must be slices in order")
    if tuple(part.shape) != sizes:
        name = call.name if result == source else builder.unused(f"{call.name}.shaped")
        result = reshape(builder, name, result, tuple(part.shape))
    return result


def _product(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _mean(builder: Builder, call: Call) -> str:
    """Add a mean over some dimensions: moved behind the others, then averaged in one window."""
    arguments = dict(zip(("input", "dim", "keepdim"), call.args, strict=False)) | call.kwargs
    source, dims = call.codes(call.args[0]), arguments.get("dim")
    if arguments.get("dtype") is not None or dims is None:
        raise call.refusal(": give the dimensions, without the batch, and no dtype")
    shape = builder.shape(source)
    chosen = [dims] if isinstance(dims, int) else list(dims)
    axes = sorted(d % (len(shape) + 1) - 1 for d in chosen)
    kept = [axis for axis in range(len(shape)) if axis not in axes]
    if not axes or axes[0] < 0:
        raise call.refusal(": it must leave the batch alone")
    result = _moved(builder, builder.unused(f"{call.name}.moved"), source, (*kept, *axes))
    sizes = [shape[axis] for axis in axes]
    sides = tuple(sizes) if len(sizes) <= 2 else (_product(sizes),)
    images = (_product([shape[axis] for axis in kept]), *sides)
    if builder.shape(result) != images:
        result = reshape(builder, builder.unused(f"{call.name}.images"), result, images)
    window = sides, sides, (0,) * len(sides)
    result = average(builder, call.name, result, window, call.node.name)
    result = reshape(builder, builder.unused(f"{call.name}.shaped"), result, call.shape)
    builder.memory.new(call.node, result)
    return result


_HANDLERS: list[tuple[Sequence[object], Callable[[Builder, Call], str]]] = [
    ((operator.add, operator.iadd, torch.add, "add", "add_"), _add),
    ((operator.mul, operator.imul, torch.mul, "mul", "mul_"), _mul),
    (("view", "reshape", "flatten", "unsqueeze", "squeeze", "unflatten", "contiguous"), _reshape),
    ((torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze), _reshape),
    (("clone", torch.clone), _clone),
    (("transpose", "permute", "swapaxes", "movedim"), _transpose),
    ((torch.transpose, torch.permute, torch.swapaxes, torch.movedim), _transpose),
    ((torch.cat, torch.concat, torch.concatenate), _concat),
    ((operator.getitem,), _item),
    (("mean", torch.mean), _mean),
]
CALLS = {target: handler for targets, handler in _HANDLERS for target in targets}
