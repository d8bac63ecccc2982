"""One call of a trace: what it takes, and what it gives of other tensors."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Argument, map_arg

from marvin.export.errors import ExportError
from marvin.export.frontend.builder import Builder
from marvin.export.frontend.instead import of_call
from marvin.export.frontend.observe import has_tensors
from marvin.export.frontend.transformers import constant

__all__ = ["Call", "by_place"]


@dataclass(frozen=True)
class Call:
    """One call of a function or a method.

    Args:
        builder: Of the network.
        node: Of the trace.
        name: Of the operation.
        args: With plain values in place of the nodes that gave them; the tensors of torch's functions are
            here, if they were given by name, too.
        kwargs: Likewise.
        nodes: The tensors of the network that it takes; in ``args``, constants are tensors.
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
            if given.name in builder.observed.constants:
                return builder.observed.constants[given.name]
            if given.name in builder.observed.plain:
                plain = builder.observed.plain[given.name]
                if not has_tensors(plain):
                    return plain
                map_arg((given.args, given.kwargs), resolved)
                return given
            nodes.append(given)
            return given

        args, kwargs = map_arg(by_place(node), resolved)
        return cls(builder, node, builder.unused(node.name), args, kwargs, tuple(nodes))

    def refusal(self, instead: str = "") -> ExportError:
        """Return what says that this call cannot be exported, and what to write instead: ``": "`` and a text."""
        target = self.node.target
        text = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        arguments = ", ".join(map(str, self.node.args))
        rest = instead or f": {of_call(text)}"
        inside = [name for name, _ in self.node.meta.get("nn_module_stack", {}).values()]
        place = f" in {inside[-1]}" if inside else ""
        return ExportError(f"{self.node.name}: {text}({arguments}){place} cannot be exported{rest}")

    def value(self, node: Any, *, in_any_order: bool = False) -> str:
        """Return the value that a node stands for.

        Raises:
            ExportError: It stands for none, or what it stands for was changed through a view.
        """
        if not isinstance(node, fx.Node) or node not in self.builder.memory:
            is_constant = isinstance(node, Tensor)
            got = f"a constant of shape {tuple(node.shape)}" if is_constant else str(node)
            raise ExportError(f"{self.name} must be called with a value of the network, got {got}")
        return self.builder.memory.read(node, self.name, in_any_order=in_any_order)

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
        """Return what the call gives of tensors in place of ``nodes``, which have their batch first.

        It takes copies with the strides of these tensors: PyTorch's functions may differ in the last bit
        between a part of a tensor and a contiguous copy of it.
        """
        memory, constants = self.builder.memory, self.builder.observed.constants
        given = {}
        for node, x in zip(self.nodes, values, strict=True):
            place = memory.place(node) if node in memory else 0
            given[node] = deepcopy(x.detach().movedim(0, place))

        def resolved(node: fx.Node) -> Any:
            if node in given:
                return given[node]
            if node.name in constants:
                return constants[node.name].clone()
            plain = self.builder.observed.plain[node.name]
            return called(node) if has_tensors(plain) else plain

        def called(node: fx.Node) -> Any:
            args, kwargs = map_arg((node.args, node.kwargs), resolved)
            if isinstance(node.target, str):
                return getattr(args[0], node.target)(*args[1:], **kwargs)
            return node.target(*args, **kwargs)

        return called(self.node)

    def whole(self, values: Sequence[Tensor]) -> Tensor:
        """Return what the call gives, with its batch first; else as ``replay``."""
        return self.replay(values).movedim(self.builder.memory.place(self.node), 0)

    def of_sample(self, x: Tensor, like: tuple[int, ...]) -> Tensor:
        """Return a constant for one sample of a value, float64, of its shape.

        Raises:
            ExportError: It is not the same for each sample, or larger than the value.
        """
        batch = self.builder.observed.shapes[self.builder.operations[0].name][0]
        try:
            whole = x.double().expand(batch, *like)
        except RuntimeError as error:
            raise self.refusal(f": a constant must have the shape {like} of a sample") from error
        if not torch.equal(whole, whole[:1].expand_as(whole)):
            raise self.refusal(": a constant must be the same for each sample")
        return whole[0].detach().cpu()

    def constant(self, x: Tensor, like: tuple[int, ...]) -> str:
        """Add a constant of the shape of one sample of a value; return its name.

        Raises:
            ExportError: As ``of_sample``.
        """
        name = self.builder.unused(f"{self.name}.constant")
        return constant(self.builder, name, self.of_sample(x, like))


_NAMES = ("input", "self"), ("other", "mat2")  # of what torch's functions take first, and second


def by_place(node: fx.Node) -> tuple[tuple[Argument, ...], dict[str, Argument]]:
    """Return the arguments of a function's or a method's node, with its tensors by place."""
    args, left = node.args, dict(node.kwargs)
    for place, names in enumerate(_NAMES):
        name = next((n for n in names if n in left), None)
        if name is not None and len(args) == place:
            args = (*args, left.pop(name))
    return args, left
