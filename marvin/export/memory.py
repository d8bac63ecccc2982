"""What a trace does in place: which values share memory, and what is in it now."""

import operator
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from marvin.export.errors import ExportError

__all__ = ["Memory", "Tracer"]

_IN_PLACE = (
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul",
    "iand", "ior", "ixor", "ilshift", "irshift",
)  # fmt: skip


class _Proxy(fx.Proxy):
    """A proxy that keeps ``x += y``, which torch.fx would trace as ``x = x + y``."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tracer", "node"):
            raise ExportError(f"an attribute of a value is set, {name}, which no trace can see")
        super().__setattr__(name, value)


def _keep(name: str) -> Any:
    def method(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", getattr(operator, name), (self, other), {})

    return method


for _name in _IN_PLACE:
    setattr(_Proxy, f"__{_name}__", _keep(_name))


class Tracer(fx.Tracer):
    """Traces a model, operators in place included.

    Attributes:
        called: Names of the modules that were called, those that are traced through included.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called: dict[str, None] = {"": None}

    def call_module(self, m: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Remember the name of a module that is called."""
        self.called[self.path_of_module(m)] = None
        return super().call_module(m, *args, **kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return what stands for a value while the model's code runs."""
        return _Proxy(node, self)


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
