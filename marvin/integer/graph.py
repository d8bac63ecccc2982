"""Traces of models that see what their code asks, reads and changes, with the chains that are in them."""

import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from inspect import Parameter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.immutable_collections import immutable_list
from torch.fx.proxy import TraceError

from fixedpoint_kernels._torch_private.modes import saving_hooks
from fixedpoint_kernels._torch_private.modules import table_of
from fixedpoint_kernels._torch_private.tensors import versions_of
from fixedpoint_kernels.watch import has_own_forward
from marvin.integer import chain_graph, token_graph
from marvin.integer.chain_graph import Chain
from marvin.integer.dtypes import Dtypes
from marvin.integer.formats import rounds_inputs
from marvin.integer.layers import stock_class
from marvin.integer.nodes import (
    arguments_of,
    drop_assertions,
    is_known,
    is_needed,
)
from marvin.integer.notes import Plain, is_all_noted
from marvin.integer.pools import let_windows_be_whole
from marvin.integer.scales import let_attention_scale
from marvin.integer.sizes import Assumed, Sizes, put_in
from marvin.integer.surroundings import Surroundings, names_of, tensors_of
from marvin.integer.token_chain import TokenChain
from marvin.tracing import Reads, Tracer, changes_shared

__all__ = ["NOT_TRACED", "Arguments", "Traced", "part_of", "trace"]

_PLACES = Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD
NOT_TRACED = "torch.fx cannot trace it"
"""What the reason begins with where a model's code is in the way."""
_NO_CHAINS = "no layers in it pass codes on"


@dataclass
class Traced:
    """A module's graph, with its chains.

    Args:
        graph: Of ``torch.fx``.
        chains: Of convolutions and what is behind them, each of two layers, or one with batch norm, or more.
        tokens: Of linear layers, norms and attention.
        inner: Names of the modules whose ``forward`` became part of the graph.
        assumed: Of the shapes of arguments, and of dtypes.
        reads: Of attributes, by the code that was traced, each time.
    """

    graph: fx.Graph
    chains: list[Chain]
    tokens: list[TokenChain]
    inner: tuple[str, ...]
    assumed: Assumed
    reads: tuple[Reads, ...] = ()

    @property
    def layers(self) -> list[str]:
        """Names of all layers in chains."""
        own = [layer.name for chain in self.chains for layer in chain.products]
        return own + [name for chain in self.tokens for name in chain.layers]

    @property
    def inexact(self) -> list[str]:
        """Names of those in chains whose last bits, in eval mode, are others than layers' one by one."""
        own = [layer.name for c in self.chains if not c.is_exact for layer in c.products]
        return own + [name for chain in self.tokens if not chain.is_plain for name in chain.layers]


_MODES = "gradients on or off", "autocast", "hooks for saved tensors (as checkpointing has)"


def _modes() -> tuple[object, ...]:
    hooks = saving_hooks()
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), hooks and hooks[0]


class Arguments(NamedTuple):
    """What a call brings.

    Args:
        tensors: Names of tensors, parts of ``tuples`` among them, see ``part_of``; of arguments that are not named anywhere,
            the module has defaults. None: those that it must be given.
        constants: Plain values, by name.
        tuples: Arguments that are tuples of tensors, and how many each has.
        shapes: Of tensors, by name, where a call has told them; else, where code branches on a shape,
            what is usual is assumed.
        dtypes: Of tensors, by name, where a call has told them; else, float32 is assumed.
        same: Names that have a tensor of ``tensors`` too, and its name there: one object is given twice.
    """

    tensors: Sequence[str] | None = None
    constants: Mapping[str, Plain] = MappingProxyType({})
    tuples: Mapping[str, int] = MappingProxyType({})
    shapes: Mapping[str, Sequence[int]] = MappingProxyType({})
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({})
    same: Mapping[str, str] = MappingProxyType({})


_NEEDED = Arguments()


def part_of(name: str, i: int) -> str:
    """Return the name of a tensor in an argument that is a tuple of them."""
    return f"{name}__{i}"


class _Tracer(Tracer):
    """Traces a call of a module.

    Args:
        module: The module.
        given: What the call brings.
        ignored: Of ``_MODES``, what code may have of its own.
    """

    def __init__(self, module: nn.Module, given: Arguments, ignored: Collection[str] = ()) -> None:
        super().__init__()
        self._ignored = ignored
        self.sizes, self.dtypes = Sizes(module, given.shapes), Dtypes(module, given.dtypes)
        self._given = given

    def trace(
        self,
        root: nn.Module | Callable[..., object],
        concrete_args: dict[str, object] | None = None,
    ) -> fx.Graph:
        """Trace a module, and note what of autograd its code must leave as it is: no graph has such things."""
        self._modes = _modes()
        return super().trace(root, concrete_args)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a node, if what runs it runs as the rest."""
        for name, before, now in zip(_MODES, self._modes, _modes(), strict=True):
            if before is not now and name not in self._ignored:
                raise TraceError(f"a part of it has {name} of its own")
        return super().create_node(*args, **kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Look into modules of one's own and containers only, and not into those that round what they take, are known, or have a ``forward`` set on the object."""
        is_whole = stock_class(m) is not None or rounds_inputs(m) or is_known(m)
        is_whole = is_whole or has_own_forward(m)
        return is_whole or super().is_leaf_module(m, module_qualified_name)

    def is_known_layer(self, m: nn.Module) -> bool:
        """Say whether a module is an activation function or a norm of others that chains know."""
        return is_known(m)

    def call_module(self, m: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a module without its hooks: chains do not run where there are any, and hooks may keep what they see."""
        forward, inputs, options = args
        if self.is_here():  # not read here: what is in that of a leaf is in no graph

            def forward(*xs: object, **named: object) -> object:
                return m.forward(*xs, **named)

        return super().call_module(m, forward, inputs, options)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """Return what calls the module with its arguments."""
        found: dict[str, Any] = {
            n: self.create_proxy("placeholder", n, (), {}) for n in self._given.tensors or ()
        }
        found |= {n: found[own] for n, own in self._given.same.items()}
        found |= self._given.constants
        for name, count in self._given.tuples.items():
            found[name] = tuple(found.pop(part_of(name, i)) for i in range(count))
        places: list[Any] = []
        for own in arguments_of(self.root):
            if own.name not in found or own.kind not in _PLACES:
                break
            places.append(found.pop(own.name))
        return lambda root: root_fn(root, *places, **found), [self.root]

    def create_arg(self, a: Any) -> Any:
        """Return what stands for a value; a record, or a dictionary of a class of its own, as transformers return, is made anew."""
        if not isinstance(a, dict) or type(a) is dict:
            if not self._is_of_its_fields(a):
                raise TraceError(f"it makes a {type(a).__name__}, which no graph can make anew")
            return super().create_arg(a)
        if type(a) is OrderedDict:
            return self.create_proxy("call_function", OrderedDict, ([*a.items()],), {}).node
        found = {f.name: getattr(a, f.name) for f in fields(a)} if is_dataclass(a) else {}
        held = {name: own for name, own in found.items() if own is not None}
        if a.keys() != held.keys() or any(a[name] is not own for name, own in held.items()):
            raise TraceError(f"it makes a {type(a).__name__}, which no graph can make anew")
        return self.create_proxy("call_function", type(a), (), found).node

    def _is_of_its_fields(self, a: Any) -> bool:
        """Say whether a record or a tuple is what its class makes of its fields, and nothing else, and a list is plain; others are."""
        kind, count = type(a), len(self.graph.nodes)
        if isinstance(a, list):
            return kind in (list, immutable_list)
        is_record = is_dataclass(a) and not isinstance(a, type)
        if hasattr(kind, "__post_init__") or not (is_record or isinstance(a, tuple)):
            return not is_record
        try:
            if not isinstance(a, tuple):
                again, is_same = kind(**{own.name: getattr(a, own.name) for own in fields(a)}), True
            else:
                again = kind(*a) if hasattr(a, "_fields") else kind(a)
                is_same = len(a) == len(again) and all(map(operator.is_, a, again))
        except Exception:  # whatever a class of somebody's own raises
            return False
        before, after = _held(a), _held(again)
        is_same &= type(again) is kind and before.keys() == after.keys()
        is_same &= len(self.graph.nodes) == count
        return is_same and all(own is after[name] for name, own in before.items())

    def length(self, obj: fx.Proxy) -> int | None:
        """Return how many sizes a shape has."""
        return self.sizes.length(obj.node)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Answer a comparison of sizes, or of dtypes."""
        truth = self.sizes.truth(obj.node)
        if truth is None:
            truth = self.dtypes.truth(obj.node)
        return super().to_bool(obj) if truth is None else truth


def _held(record: object) -> dict[str, object]:
    """Return the attributes of an object, and its fields."""
    found = dict(getattr(record, "__dict__", {}))
    names = [own.name for own in fields(record)] if is_dataclass(record) else []
    return found | {name: getattr(record, name) for name in names}


def trace(
    module: nn.Module,
    left: Collection[str] = (),
    *,
    infers: bool = False,
    given: Arguments = _NEEDED,
) -> Traced | str:
    """Return a module's graph and chains, or why there are none.

    Args:
        module: To be traced.
        left: Names of layers that belong to no chain.
        infers: Whether nothing goes backward: in eval mode. Chains of convolutions are then to the
            bit what their layers compute one by one, without means and some curves, unless these
            join more convolutions.
        given: What the call brings.
    """
    arguments = arguments_of(module)
    if any(own.kind is own.VAR_POSITIONAL for own in arguments):
        return "it takes any number of arguments"
    if given.tensors is None:
        given = given._replace(tensors=[own.name for own in arguments if is_needed(own)])
    # nothing goes backward with gradients on or off, and in inference mode: code must not ask which it is
    tracers = [_Tracer(module, given), _Tracer(module, given, _MODES[:1] if infers else ())]
    before, surroundings = _Before(module), Surroundings(module)
    try:
        with surroundings.watched(), _mode(is_inference=False, goes_back=not infers):
            graph = tracers[0].trace(module)
        changed = before.changed()
        before.restore()
        with surroundings.watched(), _mode(is_inference=infers, goes_back=True):
            again = tracers[1].trace(module)
    except Exception as error:  # whatever a model's own code raises on a tracer's proxies
        return surroundings.refused or f"{NOT_TRACED}: {str(error).partition(chr(10))[0]}"
    finally:
        before.restore()
        reason = surroundings.restore()
    reads = tuple(own.reads for own in tracers)
    if reason := reason or _why_not(module, tracers, changed, reads):
        return reason
    if str(graph) != str(again):
        if infers:
            return "its forward does other things at each call, or asks whether gradients or inference mode are on"
        return "its forward does other things at each call"
    drop_assertions(graph)
    let_attention_scale(graph)
    let_windows_be_whole(graph)
    sizes, dtypes = tracers[0].sizes, tracers[0].dtypes
    put_in(graph, sizes.answers | dtypes.answers)
    if any(changes_shared(node, module) for node in graph.nodes):
        return "it changes a value in place that is used again"
    for name, times in changed.items():
        _count(graph, name, times)
    found = _chains(module, graph, left, infers)
    if not any(found):
        return _NO_CHAINS
    assumed = replace(sizes.assumed, dtypes=dtypes.assumed)
    return Traced(graph, *found, _inner(graph, tracers[0]), assumed, reads)


@contextmanager
def _mode(*, is_inference: bool, goes_back: bool) -> Iterator[None]:
    """Set what code may ask torch for, whoever calls: in inference mode or not, gradients on or off, no autocast."""
    with (
        torch.inference_mode(is_inference),
        torch.set_grad_enabled(goes_back),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def _why_not(
    module: nn.Module, tracers: Sequence[Tracer], changed: Collection[str], reads: Sequence[Reads]
) -> str:
    """Say what else a module's code did that no graph does, or may not do, but for what it draws and changes; "": nothing."""
    if any(own.are_kept() for own in tracers):
        return "its forward keeps values elsewhere, outside of its attributes"
    if name := _hidden(module, reads):
        return f"its forward reads {name}, of which not all that may change can be seen"
    if name := _may_be_none(module, tracers[0].graph):
        return f"it computes with more than the first value that {name} returns: others may be None"
    others = [name for name in changed if not _counts_batches(module, name)]
    return f"its forward changes a buffer or another tensor, {others[0]}" if others else ""


def _hidden(module: nn.Module, reads: Sequence[Reads]) -> str:
    """Name an attribute that code has read and in which something may change unseen; "": there is none."""
    for name, own in module.named_modules():
        for key in names_of(own):
            is_read = any(some.may_have(own, key) for some in reads)
            if is_read and not is_all_noted(vars(own)[key]):
                return f"{name}.{key}".lstrip(".")
    return ""


def _may_be_none(module: nn.Module, graph: fx.Graph) -> str:
    """Name a module that is called as a whole and whose second value, or a later one, is computed with; "": there is none.

    It may be None: code that asks "is None" was answered for a value.
    """
    places = {n: (n, 0) for n in graph.nodes if n.op == "call_module" and not _is_torchs(n, module)}
    for node in graph.nodes:
        if node.target is not operator.getitem or node.args[0] not in places:
            continue
        (call, first), item = places[node.args[0]], node.args[1]
        if isinstance(item, slice):
            places[node] = call, first + (item.start or 0)
        elif isinstance(item, int) and first + item and any(map(_computes, node.users)):
            return str(call.target)
    return ""


def _is_torchs(node: fx.Node, module: nn.Module) -> bool:
    """Say whether a node calls a module of torch's, or one that we know: they return tensors, but for attention."""
    own = module.get_submodule(str(node.target))
    is_ours = stock_class(own) is not None or is_known(own)
    is_torchs = type(own).__module__.startswith("torch.nn.")
    return is_ours or (is_torchs and not isinstance(own, nn.MultiheadAttention))


def _computes(node: fx.Node) -> bool:
    """Say whether a node does more than to hand on what it takes."""
    return node.op != "output" and not isinstance(node.target, type)


def _chains(
    module: nn.Module, graph: fx.Graph, left: Collection[str], infers: bool
) -> tuple[list[Chain], list[TokenChain]]:
    """Return the chains of a graph."""
    alone = {n for n in graph.nodes if n.op == "call_module" and n.target in left}
    alone |= {n for n in graph.nodes if _has_forward(n, module)}
    alone |= set(graph.nodes) - _needed(graph)
    if infers:
        exact = chain_graph.find(module, graph, alone, infers=True, is_exact=True)
        others = chain_graph.find(module, graph, alone, infers=True)
        chains = max(exact, others, key=lambda chains: _joined(module, chains))
        alone |= {n for chain in chains for n in chain.replaced}
        return chains, token_graph.find(module, graph, alone, infers=True)
    tokens = token_graph.find(module, graph, alone)
    # linear layers among norms, GELU and attention stay there
    others = {n for own in tokens if not own.is_plain for n in own.replaced}
    chains = chain_graph.find(module, graph, alone | others)
    return chains, token_graph.find(module, graph, alone | {n for c in chains for n in c.replaced})


def _has_forward(node: fx.Node, module: nn.Module) -> bool:
    """Say whether a node calls a module whose ``forward`` somebody set on the object."""
    return node.op == "call_module" and "forward" in vars(module.get_submodule(str(node.target)))


def _joined(module: nn.Module, chains: list[Chain]) -> int:
    """Count the places where codes pass from convolution to convolution."""
    layers = [module.get_submodule(own.name) for chain in chains for own in chain.products]
    return sum(isinstance(own, nn.Conv2d) for own in layers) - len(chains)


def _inner(graph: fx.Graph, tracer: _Tracer) -> tuple[str, ...]:
    """Return the names of the modules whose code became part of the graph."""
    leaves = {str(node.target) for node in graph.nodes if node.op == "call_module"}
    return tuple(name for name in tracer.called if name not in leaves)


def _needed(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes of which the output is made."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in found:
            found |= {node, *node.all_input_nodes}
    return found


class _Before:
    """The tensors of a module that are no parameters, as they are now: tracing its code may write to them."""

    def __init__(self, module: nn.Module) -> None:
        found = tensors_of(module)
        owners = (name.rpartition(".") for name in found)
        self._places = [(module.get_submodule(owner), own) for owner, _, own in owners]
        self._names, self._tensors = [*found], [*found.values()]
        self._copies = [x.clone() for x in self._tensors]
        self._versions = versions_of(self._tensors)

    def changed(self) -> dict[str, int]:
        """Return the names of tensors that were changed, and how often one was added to each."""
        return {self._names[i]: _added(own, self._copies[i]) for i, own in self._changed().items()}

    def restore(self) -> None:
        """Give tensors their places and values back."""
        with torch.no_grad():
            for i in self._changed():
                self._tensors[i].copy_(self._copies[i])
                setattr(*self._places[i], self._tensors[i])
        self._versions = versions_of(self._tensors)

    def _changed(self) -> dict[int, object]:
        """Return what is in the places of tensors that were changed, by their numbers."""
        now = [table_of(*place).get(place[1]) for place in self._places]
        rows = zip(now, self._tensors, self._versions, versions_of(self._tensors), strict=True)
        return {i: own for i, (own, x, old, new) in enumerate(rows) if own is not x or old != new}


def _added(now: object, before: Tensor) -> int:
    """Return how often one was added to a count; 0 to what is none."""
    if not isinstance(now, Tensor) or before.is_floating_point():
        return 0
    return int(now - before) if now.shape == before.shape == () else 0


def _counts_batches(module: nn.Module, name: str) -> bool:
    """Say whether a buffer is the count of a batch norm that does not compute with it."""
    owner, _, own = name.rpartition(".")
    norm = module.get_submodule(owner)
    known = isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
    return known and own == "num_batches_tracked" and norm.momentum is not None


def _count(graph: fx.Graph, name: str, times: int) -> None:
    """Let a graph add 1 to a buffer, as often as the code did that was traced."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for _ in range(times):
        with graph.inserting_before(first):
            graph.call_method("add_", (graph.get_attr(name), 1))
