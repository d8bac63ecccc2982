"""What a traced graph was made of, to notice when somebody changes it."""

from collections.abc import Sequence
from operator import is_, itemgetter

from torch import nn

from fixedpoint_kernels._torch_private import children_of, hooks_of, modes_and_hooks, table_of
from marvin.freezing import FrozenRounding
from marvin.hooks import OtherForward
from marvin.integer.formats import PREPACKED
from marvin.integer.graph import Traced
from marvin.integer.surroundings import PLAIN, names_of, noted

__all__ = ["Frozen", "Seen"]

_NUMBERS = (  # of torch's own modules, which chains and graphs were made of
    "stride", "padding", "dilation", "groups", "padding_mode", "kernel_size", "ceil_mode", "return_indices", "eps", "p",
    "approximate", "normalized_shape", "count_include_pad", "divisor_override", "output_size",
    "start_dim", "end_dim", "negative_slope", "size", "scale_factor", "mode", "num_features", "in_features",
    "out_features", PREPACKED,
)  # fmt: skip


class Seen:
    """The modules and tensors of a graph, numbers of its layers, and attributes its code may branch on.

    A layer may be replaced at any time (``model.fc = nn.Linear(64, 100)``), a parameter too
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
        self._children = [
            (own, tuple(own.values())) for own in map(children_of, module.modules()) if own
        ]
        calls = [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]
        layers = map(module.get_submodule, dict.fromkeys(calls))
        named = [(own, [n for n in names_of(own) if type(vars(own)[n]) in PLAIN]) for own in inner]
        named += [(own, [name for name in _NUMBERS if name in vars(own)]) for own in layers]
        self._attributes = [
            (vars(own), len(vars(own)), itemgetter(*names) if names else _nothing)
            for own, names in named
        ]
        self._before = [get(own) for own, _, get in self._attributes]
        others = [(vars(own), n) for own in inner for n in names_of(own)]
        self._others = [
            (own, n)
            for own, n in others
            if type(own[n]) not in PLAIN and not isinstance(own[n], OtherForward)
        ]
        self._noted = [noted(own[n]) for own, n in self._others]
        names = {str(node.target) for node in traced.graph.nodes if node.op == "get_attr"}
        owners = [(name.rpartition(".")[0], name.rpartition(".")[2]) for name in sorted(names)]
        tables = [(table_of(module.get_submodule(own), name), name) for own, name in owners]
        self._tensors = [(table, name, table[name]) for table, name in tables]

    def holds(self) -> bool:
        """Say whether all of it is as it was."""
        try:
            return self._is_same()
        except (AttributeError, KeyError):  # something was deleted
            return False

    def _is_same(self) -> bool:
        for own, before in self._children:
            if len(own) != len(before) or not all(map(is_, own.values(), before)):
                return False
        for (own, size, get), before in zip(self._attributes, self._before, strict=True):
            if len(own) != size or get(own) != before:
                return False
        if any(
            noted(own[n]) != before
            for (own, n), before in zip(self._others, self._noted, strict=True)
        ):
            return False
        return all(table.get(name) is held for table, name, held in self._tensors)


class Frozen:
    """Modes, hooks and formats of modules, some of them frozen, as they are now.

    Args:
        modules: All of them.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules, self._before = modules, modes_and_hooks(modules)
        self._hooks = [hook for own in modules for hook in hooks_of(own, FrozenRounding)]
        self._formats = [hook.formats for hook in self._hooks]

    def holds(self) -> bool:
        """Say whether all of it is as it was."""
        formats = (hook.formats for hook in self._hooks)
        return modes_and_hooks(self._modules) == self._before and all(
            map(is_, formats, self._formats)
        )


def _nothing(_: object) -> None:
    return None
