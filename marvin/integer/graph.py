"""Finding layers that pass codes on in a traced model: convolution, batch norm, sum, activation, pooling, concatenation, linear layer."""

import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from inspect import Parameter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.immutable_collections import immutable_list
from torch.fx.proxy import TraceError

from fixedpoint_kernels._torch_private import saving_hooks, table_of, versions_of
from fixedpoint_kernels.functions import Curve
from fixedpoint_kernels.fused import INPUT, LONGEST, Joined, Pooled, Scaled, Value
from fixedpoint_kernels.products.shapes import sums_fit
from fixedpoint_kernels.watch import has_own_forward
from marvin.integer.formats import rounds_inputs, window_of
from marvin.integer.layers import IntegerConv2d, IntegerLinear, features_of, stock_class
from marvin.integer.nodes import (
    arguments_of,
    concatenation,
    curve_of,
    drop_assertions,
    flattening,
    is_known,
    is_needed,
    norm_of,
    plain,
    pooling,
    repetition,
    returned,
    zeros_around,
)
from marvin.integer.notes import Plain, is_all_noted
from marvin.integer.sizes import Assumed, Sizes
from marvin.integer.surroundings import Surroundings, names_of, tensors_of
from marvin.integer.token_graph import TokenChain, find
from marvin.tracing import Reads, Tracer, changes_shared

__all__ = ["NOT_TRACED", "Arguments", "Chain", "Found", "Traced", "part_of", "trace"]

_ADDS = operator.add, operator.iadd, torch.add, "add", "add_"
_PRODUCTS = operator.mul, operator.imul, torch.mul, "mul", "mul_"
_RELUS = torch.relu, torch.relu_, F.relu, F.relu_, "relu", "relu_"
_SIX = 6.0  # the ceiling of ReLU6
_EXACT = "hardswish", "hardsigmoid", "leaky_relu"  # curves that have the bits of PyTorch's
_PLACES = Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD
NOT_TRACED = "torch.fx cannot trace it"
"""What the reason begins with where a model's code is in the way."""
_NO_CHAINS = "no layers in it pass codes on"


@dataclass
class Found:
    """A layer of a chain: a convolution, and its batch norm; a linear layer; or batch norm alone.

    Args:
        name: Of the convolution, or of the linear layer; "": batch norm alone.
        source: Number of the value that it takes.
        norm: Name of the batch norm, or None.
    """

    name: str
    source: int
    norm: str | None = None


@dataclass
class Chain:
    """Layers that pass codes on, and what they make.

    Args:
        input: Node of what comes in.
        layers: In order of execution.
        values: See ``fixedpoint_kernels.fused.Value``, ``Pooled``, ``Scaled`` and ``Joined``.
        nodes: That make the values.
        replaced: Nodes that the chain computes.
        modules: Names of the modules that it computes.
        used: Nodes that others use, each with the number of its value, and whether that must be
            flattened first.
    """

    input: fx.Node
    layers: list[Found] = field(default_factory=list)
    values: list[Value | Pooled | Scaled | Joined] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    replaced: list[fx.Node] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    used: dict[fx.Node, tuple[int, bool]] = field(default_factory=dict)

    @property
    def products(self) -> list[Found]:
        """The layers that multiply: all but batch norm alone."""
        return [own for own in self.layers if own.name]

    def has_one_place(self, number: int) -> bool:
        """Say whether a value is known to have one place, as means of all have, and what layers make of them."""
        if number == INPUT:
            return False
        value = self.values[number]
        if isinstance(value, Value):
            first = value.values[0] if value.layer is None else self.layers[value.layer].source
            return self.has_one_place(first)
        if isinstance(value, Joined):
            return value.times == (1, 1) and self.has_one_place(value.sources[0])
        is_mean_of_all = isinstance(value, Pooled) and value.kernel is None
        return is_mean_of_all or self.has_one_place(value.source)

    @property
    def is_exact(self) -> bool:
        """Whether it is, to the bit, what its layers compute one by one in eval mode: without means and some curves."""
        curves = {value.curve.name for value in self.values if value.curve is not None}
        has_means = any(isinstance(value, Pooled) and value.is_mean for value in self.values)
        return not has_means and curves <= {*_EXACT}

    @property
    def inputs(self) -> list[fx.Node]:
        """The node of what comes in."""
        return [self.input]

    @property
    def outputs(self) -> list[fx.Node]:
        """Nodes of the values that others use."""
        return [n for n, v in zip(self.nodes, self.values, strict=True) if v.is_output]


@dataclass
class Traced:
    """A module's graph, with its chains.

    Args:
        graph: Of ``torch.fx``.
        chains: Of convolutions and what is behind them, each of two layers, or one with batch norm, or more.
        tokens: Of linear layers, norms and attention.
        inner: Names of the modules whose ``forward`` became part of the graph.
        assumed: Of the shapes of arguments.
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
        same: Names that have a tensor of ``tensors`` too, and its name there: one object is given twice.
    """

    tensors: Sequence[str] | None = None
    constants: Mapping[str, Plain] = MappingProxyType({})
    tuples: Mapping[str, int] = MappingProxyType({})
    shapes: Mapping[str, Sequence[int]] = MappingProxyType({})
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
        self.sizes = Sizes(module, given.shapes)
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

    def iter(self, obj: Any) -> Iterator[Any]:
        """Yield each size of a shape."""
        length = self.length(obj)
        return super().iter(obj) if length is None else (obj[i] for i in range(length))

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Answer a comparison of sizes."""
        truth = self.sizes.truth(obj.node)
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
        changed = before.restore()
        with surroundings.watched(), _mode(is_inference=infers, goes_back=True):
            again = tracers[1].trace(module)
    except Exception as error:  # whatever a model's own code raises on a tracer's proxies
        return f"{NOT_TRACED}: {str(error).partition(chr(10))[0]}"
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
    tracers[0].sizes.put_in(graph)
    if any(changes_shared(node, module) for node in graph.nodes):
        return "it changes a value in place that is used again"
    for name in changed:
        _count(graph, name)
    found = _chains(module, graph, left, infers)
    if not any(found):
        return _NO_CHAINS
    return Traced(graph, *found, _inner(graph, tracers[0]), tracers[0].sizes.assumed, reads)


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
    module: nn.Module, tracers: Sequence[Tracer], changed: Sequence[str], reads: Sequence[Reads]
) -> str:
    """Say what else a module's code did that no graph does, but for what it draws and changes; "": nothing."""
    if any(own.are_kept() for own in tracers):
        return "its forward keeps values elsewhere, outside of its attributes"
    if name := _hidden(module, reads):
        return f"its forward reads {name}, of which not all that may change can be seen"
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


def _chains(
    module: nn.Module, graph: fx.Graph, left: Collection[str], infers: bool
) -> tuple[list[Chain], list[TokenChain]]:
    """Return the chains of a graph."""
    alone = {n for n in graph.nodes if n.op == "call_module" and n.target in left}
    alone |= {n for n in graph.nodes if _has_forward(n, module)}
    alone |= set(graph.nodes) - _needed(graph)
    if infers:
        exact = _Search(module, graph, alone, infers=True, is_exact=True).chains()
        others = _Search(module, graph, alone, infers=True).chains()
        chains = max(exact, others, key=lambda chains: _joined(module, chains))
        alone |= {n for chain in chains for n in chain.replaced}
        return chains, find(module, graph, alone, infers=True)
    tokens = find(module, graph, alone)
    # linear layers among norms, GELU and attention stay there
    others = {n for own in tokens if not own.is_plain for n in own.replaced}
    chains = _Search(module, graph, alone | others).chains()
    return chains, find(module, graph, alone | {n for c in chains for n in c.replaced})


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

    def restore(self) -> list[str]:
        """Give tensors their places and values back; return the names of those that were changed."""
        now = [table_of(*place).get(place[1]) for place in self._places]
        rows = zip(now, self._tensors, self._versions, versions_of(self._tensors), strict=True)
        found = [i for i, (own, x, old, new) in enumerate(rows) if own is not x or old != new]
        with torch.no_grad():
            for i in found:
                self._tensors[i].copy_(self._copies[i])
                setattr(*self._places[i], self._tensors[i])
        self._versions = versions_of(self._tensors)
        return [self._names[i] for i in found]


def _counts_batches(module: nn.Module, name: str) -> bool:
    """Say whether a buffer is the count of a batch norm that does not compute with it."""
    owner, _, own = name.rpartition(".")
    norm = module.get_submodule(owner)
    known = isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
    return known and own == "num_batches_tracked" and norm.momentum is not None


def _count(graph: fx.Graph, name: str) -> None:
    """Let a graph add 1 to a buffer, as the code did that was traced."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        graph.call_method("add_", (graph.get_attr(name), 1))


@dataclass
class _Sum:
    """What is not a value yet: a layer, or a value, and what is added to it; flat, it has features, not places."""

    chain: Chain
    layer: int | None
    is_flat: bool = False
    other_layer: int | None = None
    other_value: int | None = None
    value: int | None = None


@dataclass
class _Made:
    """A value of a chain; flat, as (images, features)."""

    chain: Chain
    number: int
    is_flat: bool = False


class _Search:
    """Walks through a graph in order; each node becomes part of a chain, or ends some."""

    def __init__(
        self,
        module: nn.Module,
        graph: fx.Graph,
        others: set[fx.Node],
        *,
        infers: bool = False,
        is_exact: bool = False,
    ) -> None:
        self.module, self.graph, self.others = module, graph, others
        self.infers, self.is_exact = infers, is_exact
        # what goes on from there is another chain, so that autograd adds up its gradient
        self.ends = set() if infers else returned(graph, module)
        self.known: dict[fx.Node, _Sum | _Made] = {}
        self.found: list[Chain] = []

    def chains(self) -> list[Chain]:
        """Return the chains that are worth it."""
        for node in self.graph.nodes:
            if not self._take(node):
                for source in node.all_input_nodes:
                    self._settle(source)
        for chain in self.found:
            self._mark_outputs(chain)
        found = [chain for chain in self.found if chain.products]
        return [c for c in found if len(c.layers) > 1 or c.layers[0].norm]

    def _take(self, node: fx.Node) -> bool:
        """Make a node part of a chain, if it can be."""
        if node in self.others:
            return False
        if node.target is F.batch_norm:
            return self._traced_norm(node)
        pooled, flat = pooling(node, self.module), flattening(node, self.module)
        if (curve := curve_of(node, self.module)) is not None:
            is_known = not self.is_exact or curve.name in _EXACT
            return is_known and self._curve(node, node.all_input_nodes[0], curve)
        if pooled is not None:
            return not (self.is_exact and pooled.is_mean) and self._pool(node, pooled)
        if flat is not None:
            return self._flatten(flat)
        if (joined := concatenation(node)) is not None:
            return self._concatenate(node, joined)
        return self._take_other(node)

    def _take_other(self, node: fx.Node) -> bool:
        if (times := repetition(node, self.module)) is not None:
            return self._concatenate(node, node.all_input_nodes, times)
        if (zeros := zeros_around(node)) is not None:
            return self._concatenate(node, node.all_input_nodes, zeros=zeros)
        if len(node.all_input_nodes) == 1 and not plain(node):
            return False
        if node.op == "call_module":
            return bool(node.all_input_nodes) and self._take_module(node, node.all_input_nodes[0])
        if node.target in _RELUS or node.target is F.relu6:
            ceiling = _SIX if node.target is F.relu6 else None
            return self._relu(node, node.all_input_nodes[0], ceiling)
        return self._take_pair(node)

    def _take_pair(self, node: fx.Node) -> bool:
        if len(node.args) != 2 or len(node.all_input_nodes) != 2 or node.kwargs:
            return False
        if node.target in _PRODUCTS:
            return self._scale(node, *node.all_input_nodes)
        return node.target in _ADDS and self._add(node)

    def _take_module(self, node: fx.Node, source: fx.Node) -> bool:
        own = self.module.get_submodule(str(node.target))
        if type(own) is IntegerConv2d and not isinstance(window_of(own), str):
            return _sums_fit(own) and self._convolution(node, source)
        if type(own) is IntegerLinear:
            return self._linear(node, source, own)
        if type(own) is nn.BatchNorm2d:
            return self._norm(node, source)
        if type(own) in (nn.ReLU, nn.ReLU6):
            return self._relu(node, source, _SIX if type(own) is nn.ReLU6 else None)
        is_same = type(own) is nn.Identity
        is_same |= type(own) is nn.Dropout and (own.p == 0 or self.infers)
        part = self._part(source) if is_same else None
        if part is not None and len(source.users) > 1:
            part = self._settle(source)
        if part is not None:
            self._join(node, part)
        return part is not None

    def _convolution(self, node: fx.Node, source: fx.Node) -> bool:
        return self._layer(node, source, str(node.target))

    def _layer(self, node: fx.Node, source: fx.Node, name: str, norm: str | None = None) -> bool:
        """Take a layer, which begins a chain where its source is in none."""
        made = self._settle(source)
        if made is not None and made.is_flat:
            return False
        if made is None:
            chain = next((c for c in self.found if c.input is source), None)
            if chain is None:
                chain = Chain(source)
                self.found.append(chain)
            made = _Made(chain, INPUT)
        made.chain.layers.append(Found(name, made.number, norm))
        self._join(node, _Sum(made.chain, len(made.chain.layers) - 1))
        return True

    def _linear(self, node: fx.Node, source: fx.Node, own: nn.Linear) -> bool:
        """Take a linear layer behind a chain of convolutions."""
        made = self._settle(source)
        if made is None or not made.is_flat or not sums_fit(features_of(own), longest=LONGEST):
            return False
        made.chain.layers.append(Found(str(node.target), made.number))
        self._join(node, _Sum(made.chain, len(made.chain.layers) - 1, is_flat=True))
        return True

    def _flatten(self, nodes: tuple[fx.Node, ...]) -> bool:
        made = self._settle(nodes[-1].all_input_nodes[0])
        if made is None or (self.infers and not made.chain.has_one_place(made.number)):
            return False  # without a region of its own, a large weight is read too often
        made.chain.replaced += nodes[:-1]
        self._join(nodes[-1], replace(made, is_flat=True))
        return True

    def _traced_norm(self, node: fx.Node) -> bool:
        """Take the batch norm of a class of somebody's own, which calls the function with its tensors."""
        found = norm_of(node, self.module)
        if found is None:
            return False
        name, tensors = found
        if not self._norm(node, node.all_input_nodes[0], name):
            return False
        chain, count = self.known[node].chain, f"{name}.num_batches_tracked"
        counts = [own for own in self.graph.nodes if own.op == "get_attr" and own.target == count]
        counts += [user for own in counts for user in own.users]
        chain.replaced[-1:] = [*counts, *tensors, node]  # the chain counts batches itself
        chain.modules.append(name)
        return True

    def _norm(self, node: fx.Node, source: fx.Node, name: str | None = None) -> bool:
        name, term = name or str(node.target), self._alone(source)
        if term is not None and not term.is_flat and term.layer is not None:
            layer = term.chain.layers[term.layer]
            if layer.norm is None and self.module.get_submodule(layer.name).bias is None:
                layer.norm = name
                self._join(node, term)
                return True
        if source.op == "placeholder" and not self.infers:
            return False  # bfloat16 of raw data may lose what batch norm looks for: 290 +- 1 kelvin
        return self._layer(node, source, "", name)

    def _relu(self, node: fx.Node, source: fx.Node, ceiling: float | None) -> bool:
        term = self.known.get(source)
        if not isinstance(term, _Sum) or len(source.users) > 1:
            return False
        self._join(node, self._made(term, node, relu=True, ceiling=ceiling))
        return True

    def _curve(self, node: fx.Node, source: fx.Node, curve: Curve) -> bool:
        term = self._alone(source)
        if term is not None:
            self._join(node, self._made(term, node, curve=curve))
        return term is not None

    def _alone(self, source: fx.Node) -> _Sum | None:
        """Return what a layer makes, if nothing was added and one node uses it."""
        term = self.known.get(source)
        if not isinstance(term, _Sum) or len(source.users) > 1 or not _is_layer(term):
            return None
        return term

    def _scale(self, node: fx.Node, *sources: fx.Node) -> bool:
        """Take the product of a value, which one layer makes, and of a gate that nothing else takes."""
        a, b = map(self._settle, sources)
        if a is None or b is None or a.chain is not b.chain:
            return False
        chain, gates = a.chain, [a.chain.has_one_place(part.number) for part in (a, b)]
        if gates not in ([True, False], [False, True]):
            return False
        (gate, of_gate), (source, _) = (a, sources[0]), (b, sources[1])
        if gates[1]:
            (gate, of_gate), source = (b, sources[1]), a
        value = INPUT if source.number == INPUT else chain.values[source.number]
        if not isinstance(value, Value) or len(value.layers) != 1 or value.values:
            return False
        others = [own.source for own in chain.values if isinstance(own, Scaled)]
        if len(of_gate.users) > 1 or gate.is_flat or source.number in others:
            return False
        chain.values.append(Scaled(source.number, gate.number))
        chain.nodes.append(node)
        self._join(node, _Made(chain, len(chain.values) - 1))
        return True

    def _pool(self, node: fx.Node, pooled: Pooled) -> bool:
        made = self._settle(node.all_input_nodes[0])
        if made is None or made.is_flat:
            return False
        made.chain.values.append(replace(pooled, source=made.number))
        made.chain.nodes.append(node)
        self._join(node, _Made(made.chain, len(made.chain.values) - 1, pooled.is_flat))
        return True

    def _concatenate(
        self,
        node: fx.Node,
        sources: Sequence[fx.Node],
        times: tuple[int, int] = (1, 1),
        zeros: tuple[int, int] = (0, 0),
    ) -> bool:
        """Take values of one chain side by side, or one whose places are repeated, or that gets channels of zeros."""
        found = [own for own in map(self._settle, sources) if own is not None]
        if not found:
            return False
        chain = found[0].chain
        made = [_Made(chain, INPUT) if own is chain.input else self._part(own) for own in sources]
        numbers = [
            own.number
            for own in made
            if isinstance(own, _Made) and own.chain is chain and not own.is_flat
        ]
        if len({*numbers}) < len(sources):
            return False
        chain.values.append(Joined(tuple(numbers), times, zeros=zeros))
        chain.nodes.append(node)
        self._join(node, _Made(chain, len(chain.values) - 1))
        return True

    def _add(self, node: fx.Node) -> bool:
        terms = [self._part(source) for source in node.all_input_nodes]
        for source, term in zip(node.all_input_nodes, terms, strict=True):
            if isinstance(term, _Sum) and (len(source.users) > 1 or not _is_layer(term)):
                self._settle(source)
        a, b = (self._part(source) for source in node.all_input_nodes)
        if isinstance(b, _Sum) and not isinstance(a, _Sum):
            a, b = b, a
        a, b = (b, a) if a is None else (a, b)
        if a is not None and a.chain.input in node.all_input_nodes:
            b = _Made(a.chain, INPUT)
        if a is None or b is None or a.chain is not b.chain or a.is_flat != b.is_flat:
            return False
        if isinstance(a, _Made):
            assert isinstance(b, _Made)
            one_place = [a.chain.has_one_place(part.number) for part in (a, b)]
            if a.number == b.number or len(set(one_place)) > 1:
                return False
            a = _Sum(a.chain, None, a.is_flat, value=a.number)
        more = {"other_layer": b.layer} if isinstance(b, _Sum) else {"other_value": b.number}
        self._join(node, replace(a, **more))
        return True

    def _join(self, node: fx.Node, part: _Sum | _Made) -> None:
        self.known[node] = part
        part.chain.replaced.append(node)
        if node.op == "call_module":
            part.chain.modules.append(str(node.target))

    def _settle(self, node: fx.Node) -> _Made | None:
        """Make a value of what a node has, if it is part of a chain; return it, if the chain may go on from there."""
        part = self.known.get(node)
        if isinstance(part, _Sum):
            part = self.known[node] = self._made(part, node)
        return None if node in self.ends else part

    def _part(self, node: fx.Node) -> _Sum | _Made | None:
        """Return what a node has, if it is part of a chain that may go on from there."""
        return None if node in self.ends else self.known.get(node)

    def _made(
        self,
        part: _Sum,
        node: fx.Node,
        *,
        relu: bool = False,
        ceiling: float | None = None,
        curve: Curve | None = None,
    ) -> _Made:
        chain = part.chain
        flat, terms = part.is_flat, (part.layer, part.other_layer, part.other_value)
        rest = relu, ceiling, curve
        chain.values.append(Value(*terms, *rest, is_flat=flat, value=part.value))
        chain.nodes.append(node)
        return _Made(chain, len(chain.values) - 1, flat)

    def _mark_outputs(self, chain: Chain) -> None:
        inside = set(chain.replaced)
        for node, part in self.known.items():
            if not isinstance(part, _Made) or part.chain is not chain:
                continue
            if any(user not in inside for user in node.users):
                value = chain.values[part.number]
                chain.values[part.number] = replace(value, is_output=True)
                chain.used[node] = part.number, part.is_flat and not value.is_flat


def _sums_fit(own: nn.Conv2d) -> bool:
    shape = own.out_channels, own.in_channels // own.groups, *own.weight.shape[2:]
    return sums_fit(shape, own.groups, LONGEST)


def _is_layer(part: _Sum) -> bool:
    others = part.other_layer, part.other_value, part.value
    return all(other is None for other in others)
