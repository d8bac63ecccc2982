"""What a model makes of another number of samples: a network does the same to each, however many come."""

from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from marvin.export.errors import ExportError
from marvin.export.frontend.builder import Builder
from marvin.export.frontend.observe import Observed, has_tensors, observe

__all__ = ["OtherCount"]

_INSTEAD = "a network does the same to each sample, however many come; write the number itself"


@dataclass(frozen=True)
class OtherCount:
    """What the calls of a trace give of another number of samples.

    Args:
        observed: Of them.
        count: How many.
    """

    observed: Observed
    count: int

    @classmethod
    def of(cls, model: nn.Module, graph: fx.Graph, sample: Tensor) -> "OtherCount":
        """Run a trace on two of the samples, or on one more than there are.

        Raises:
            ExportError: The model does not take as many.
        """
        other = sample[:2] if len(sample) > 2 else torch.cat([sample, sample[:1]])
        try:
            return cls(observe(model, graph, other), len(other))
        except ExportError as error:
            raise ExportError(f"{error}; it took {len(sample)} samples: {_INSTEAD}") from error

    def check(self, builder: Builder, node: fx.Node, *, any_sizes: bool) -> None:
        """Refuse a call that depends on the number of samples.

        Args:
            builder: Of the network; has translated the node.
            node: Of the trace.
            any_sizes: Whether the numbers that the call takes say no more than its result's shape.

        Raises:
            ExportError: It does.
        """
        first, again = builder.observed, self.observed
        shape = list(first.shapes[node.name])
        count = shape[builder.memory.place(node)]
        shape[builder.memory.place(node)] = self.count
        if again.shapes.get(node.name) != tuple(shape):
            raise ExportError(
                f"{node.name} must give shape {tuple(shape)} of {self.count} samples, as it gives "
                f"{first.shapes[node.name]} of {count}, got {again.shapes.get(node.name)}: {_INSTEAD}"
            )
        for source in _numbers(builder, node):
            if source.name in first.constants:
                same = _same(first.constants[source.name], again.constants.get(source.name))
                what = ""
            elif source.name in first.plain and not any_sizes:
                numbers = first.plain[source.name], again.plain.get(source.name)
                same = has_tensors(numbers[0]) or numbers[0] == numbers[1]
                what = f": {numbers[0]} of {count}, {numbers[1]} of {self.count}"
            else:
                continue
            if not same:
                raise ExportError(
                    f"{node.name} must take numbers that are the same for any number of samples, got "
                    f"{source.name}{what}: {_INSTEAD}"
                )


def _numbers(builder: Builder, node: fx.Node) -> list[fx.Node]:
    """Return what a call takes; of a part of several tensors, what these took, too."""
    found: list[fx.Node] = []
    for source in _indices(node):
        found.append(source)
        if has_tensors(builder.observed.plain.get(source.name)):
            found += source.all_input_nodes
    return found


def _indices(node: fx.Node) -> list[fx.Node]:
    """Return what a call takes, but where samples end: ``x[:n]`` is all of them."""
    place: object = node.args[1] if len(node.args) > 1 else None
    place = place[0] if isinstance(place, tuple) and place else place
    end = place.stop if isinstance(place, slice) else None
    return [source for source in node.all_input_nodes if source is not end]


def _same(x: Tensor, y: Tensor | None) -> bool:
    """Say whether two constants are the same for each sample that both have."""
    if y is None or x.shape == y.shape or not x.ndim or x.ndim != y.ndim:
        return y is not None and torch.equal(x, y)
    both = min(len(x), len(y))
    return torch.equal(x[:both], y[:both])
