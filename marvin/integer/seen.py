"""What a traced graph was made of, to notice when somebody changes it."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from operator import is_, is_not, itemgetter
from typing import Any

from torch import nn

from fixedpoint_kernels._torch_private.modules import (
    children_of,
    own_buffers,
    parameter_tables,
    table_of,
    tensor_of,
)
from fixedpoint_kernels.watch import OtherForward, has_own_forward
from marvin.integer.formats import OPTIONS, PREPACKED
from marvin.integer.graph import Traced
from marvin.integer.layers import TransposedLinear
from marvin.integer.nodes import is_known
from marvin.integer.notes import PLAIN, exact, noted
from marvin.integer.surroundings import names_of
from marvin.rounder import BUFFER

__all__ = ["Seen", "Tensors"]

_NUMBERS = (  # of torch's own modules, which chains and graphs were made of
    "stride", "padding", "dilation", "groups", "padding_mode", "kernel_size", "ceil_mode", "return_indices", "eps", "p",
    "approximate", "normalized_shape", "count_include_pad", "divisor_override", "output_size",
    "start_dim", "end_dim", "negative_slope", "size", "scale_factor", "mode", "num_features", "in_features",
    "out_features", PREPACKED, OPTIONS,
)  # fmt: skip


class Seen:
    """The modules, their classes and the tensors of a graph, numbers of its layers, and attributes and buffers that its code reads.

    Of an attribute that no code read when it was traced, such as a count of steps that a trainer puts there, only that
    it is there counts: its value is in no graph. A layer may be replaced at any time (``model.fc = nn.Linear(64, 100)``), a parameter too
    (``load_state_dict(..., assign=True)``).

    Args:
        module: That was traced.
        traced: What came of it.

    Attributes:
        inner: The modules whose ``forward`` became part of the graph, but for the first.
    """

    def __init__(self, module: nn.Module, traced: Traced) -> None:
        inner = [module.get_submodule(name) for name in traced.inner]
        self.inner = [own for own in inner if own is not module]
        parts = [*module.modules()]
        self._watched, self._classes = parts, [*map(type, parts)]
        self._tables = parameter_tables(parts)  # others where hooks came or went
        self._children = [*map(children_of, parts)]
        self._parts = [*_parts_of(self._children)]
        calls = [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]
        layers = map(module.get_submodule, dict.fromkeys(calls))
        # code may look at modules that it did not call this time, and at what was put on a layer
        held = {own: _unknown_of(own) for own in parts}
        whole = {part for own in map(module.get_submodule, calls) for part in own.modules()}
        unknown = {
            own: [n for n in names if own in whole or _may_count(own, n, traced)]
            for own, names in held.items()
        }
        unread = [(own, [n for n in held[own] if n not in unknown[own]]) for own in parts]
        self._unread = [(itemgetter(*names), vars(own)) for own, names in unread if names]
        named = [
            (own, [name for name in names if type(vars(own)[name]) in PLAIN])
            for own, names in unknown.items()
        ]
        named += [(own, _numbers_of(own)) for own in layers]
        self._ours = [own for own in parts if own is not module and "forward" in vars(own)]
        self._ours = [own for own in self._ours if not has_own_forward(own)]
        self._owners = [*map(vars, parts)]
        self._sizes = [*map(len, self._owners)]
        # one name more, for a getter of one makes no tuple
        self._getters = [(itemgetter(names[0], *names), vars(own)) for own, names in named if names]
        self._before = self._attributes()
        others = [(vars(own), n) for own, names in unknown.items() for n in names]
        self._others = [
            (own, n)
            for own, n in others
            if type(own[n]) not in PLAIN and not isinstance(own[n], OtherForward)
        ]
        self._held = [own[n] for own, n in self._others]
        self._noted = {id(own): (own, noted(own)) for own in self._held}  # many share one
        names = {str(node.target) for node in traced.graph.nodes if node.op == "get_attr"}
        owners = [(name.rpartition(".")[0], name.rpartition(".")[2]) for name in sorted(names)]
        tables = [(table_of(module.get_submodule(own), name), name) for own, name in owners]
        self._tensors = [(table, name, table[name]) for table, name in tables]
        # code may ask for their dtypes and shapes, which are in no graph
        read = [
            (own_buffers(own), name)
            for own in parts
            for name in own_buffers(own)
            if name != BUFFER and any(reads.may_have(own, name) for reads in traced.reads)
        ]
        self._buffers_read = [(table, name, noted(table[name])) for table, name in read]

    def holds(self) -> bool:
        """Say whether all of it is as it was."""
        try:
            return self._is_same()
        except (AttributeError, KeyError):  # something was deleted
            return False

    def _is_same(self) -> bool:
        parts = [*_parts_of(self._children)]
        if len(parts) != len(self._parts) or not all(map(is_, parts, self._parts)):
            return False
        if [*map(type, self._watched)] != self._classes:
            return False
        if any(map(is_not, parameter_tables(self._watched), self._tables)):
            return False
        if [*map(len, self._owners)] != self._sizes or not self._has_attributes():
            return False
        if any(map(has_own_forward, self._ours)):
            return False
        for get, own in self._unread:
            get(own)  # else it was deleted, and one of another name may be there
        held = [own[n] for own, n in self._others]
        if not all(map(is_, held, self._held)):
            return False
        if any(noted(own) != before for own, before in self._noted.values()):
            return False
        if any(noted(table.get(name)) != before for table, name, before in self._buffers_read):
            return False
        return all(table.get(name) is held for table, name, held in self._tensors)

    def _attributes(self) -> list[object]:
        return [*chain.from_iterable(get(own) for get, own in self._getters)]

    def _has_attributes(self) -> bool:
        """Say whether plain values are the same: most are the same objects."""
        now = self._attributes()
        if all(map(is_, now, self._before)):
            return True
        return [*map(exact, now)] == [*map(exact, self._before)]


def _may_count(own: nn.Module, name: str, traced: Traced) -> bool:
    """Say whether a value of a module whose code was traced may be in the graph, or in chains."""
    is_asked = name == "training" or isinstance(own, nn.BatchNorm2d)  # by those who look for chains
    return is_asked or any(reads.may_have(own, name) for reads in traced.reads)


_NOTHING = nn.Module()


class Tensors:
    """Where modules have parameters and buffers: to look for each at every call takes as long as a layer.

    Args:
        owners: Modules, and names of what they have; None has nothing.

    Attributes:
        are_known: Whether all are parameters or buffers: others may be computed from those.
    """

    def __init__(self, owners: Sequence[tuple[nn.Module | None, str]]) -> None:
        self._places = [
            (table_of(own, name), name, own) if own is not None else ({name: None}, name, _NOTHING)
            for own, name in owners
        ]
        self.are_known = all(table is not vars(own) for table, _, own in self._places)

    def now(self) -> list[Any]:
        """Return them; None where there is none."""
        return [
            table[name] if name in table else tensor_of(own, name)
            for table, name, own in self._places
        ]


def _parts_of(children: Sequence[Mapping[str, nn.Module | None]]) -> Iterator[object]:
    """Yield the children of modules, and where those of the next begin."""
    return chain.from_iterable((*own.values(), ...) for own in children)


def _numbers_of(layer: nn.Module) -> list[str]:
    """Return the names of numbers of a layer: of one that is not torch's, of all plain values."""
    if is_known(layer) or isinstance(layer, TransposedLinear):
        return [name for name in names_of(layer) if type(vars(layer)[name]) in PLAIN]
    return [name for name in _NUMBERS if name in vars(layer)]


def _unknown_of(module: nn.Module) -> list[str]:
    """Return the names of a module's attributes that its class is not known to have: all, of a class of one's own."""
    if not type(module).__module__.startswith(("torch.nn.modules", "marvin.integer.layers")):
        return names_of(module)
    return [name for name in names_of(module) if name not in _said_of(type(module))]


@cache
def _said_of(cls: type[nn.Module]) -> frozenset[str]:
    """Return names of attributes that torch's classes have."""
    found = {"in_channels", "transposed", *_NUMBERS}
    for base in cls.__mro__:
        found |= {*vars(base).get("__annotations__", ()), *vars(base).get("__constants__", ())}
    return frozenset(found)
