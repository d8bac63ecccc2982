"""Finding layers that pass codes on: convolution, batch norm, sum, ReLU and pooling in a traced model."""

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import fx, nn

from fixedpoint_kernels.fused import INPUT, MOST_TAPS, Pooled, Value
from fixedpoint_kernels.products.shapes import Window
from marvin.integer.formats import window_of
from marvin.integer.layers import CLASSES, IntegerConv2d
from marvin.integer.token_graph import TokenChain, find
from marvin.tracing import Tracer, changes_in_place

__all__ = ["Chain", "Found", "Traced", "trace"]

_ADDS = operator.add, operator.iadd, torch.add, "add", "add_"
_POOLS = F.max_pool2d, torch.max_pool2d
_RELUS = torch.relu, torch.relu_, F.relu, F.relu_, "relu", "relu_"


@dataclass
class Found:
    """A layer of a chain: a convolution, and its batch norm.

    Args:
        name: Of the convolution.
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
        values: See ``fixedpoint_kernels.fused.Value`` and ``Pooled``.
        nodes: That make the values.
        replaced: Nodes that the chain computes.
        modules: Names of the modules that it computes.
    """

    input: fx.Node
    layers: list[Found] = field(default_factory=list)
    values: list[Value | Pooled] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    replaced: list[fx.Node] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)

    @property
    def outputs(self) -> list[fx.Node]:
        """Nodes of the values that others use."""
        return [n for n, v in zip(self.nodes, self.values, strict=True) if v.is_output]


@dataclass
class Traced:
    """A module's graph, with its chains.

    Args:
        graph: Of ``torch.fx``.
        chains: Of convolutions, each of two layers, or one with batch norm, or more.
        tokens: Of linear layers, norms and attention.
        inner: Names of the modules whose ``forward`` became part of the graph.
    """

    graph: fx.Graph
    chains: list[Chain]
    tokens: list[TokenChain]
    inner: tuple[str, ...]

    @property
    def layers(self) -> list[str]:
        """Names of all layers in chains."""
        own = [layer.name for chain in self.chains for layer in chain.layers]
        return own + [name for chain in self.tokens for name in chain.layers]


class _Tracer(Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Look into modules of one's own and containers only."""
        return type(m) in CLASSES.values() or super().is_leaf_module(m, module_qualified_name)


def trace(module: nn.Module) -> Traced | str:
    """Return a module's graph and chains, or why there are none."""
    tracers = _Tracer(), _Tracer()
    try:
        graph, again = (tracer.trace(module) for tracer in tracers)
    except Exception as error:  # whatever a model's own code raises on a tracer's proxies
        return f"torch.fx cannot trace it: {str(error).partition(chr(10))[0]}"
    if str(graph) != str(again):
        return "its forward does other things at each call"
    if sum(node.op == "placeholder" for node in graph.nodes) != 1:
        return "it takes more than one argument"
    if any(
        changes_in_place(n, module) and len(n.all_input_nodes[0].users) > 1 for n in graph.nodes
    ):
        return "it changes a value in place that is used again"
    chains = _Search(module, graph).chains()
    tokens = find(module, graph)
    if not chains and not tokens:
        return "no layers in it pass codes on"
    leaves = {str(node.target) for node in graph.nodes if node.op == "call_module"}
    return Traced(
        graph, chains, tokens, tuple(name for name in tracers[0].called if name not in leaves)
    )


@dataclass
class _Sum:
    """What is not a value yet: a layer, and what is added to it."""

    chain: Chain
    layer: int
    other_layer: int | None = None
    other_value: int | None = None


@dataclass
class _Made:
    """A value of a chain."""

    chain: Chain
    number: int


class _Search:
    """Walks through a graph in order; each node becomes part of a chain, or ends some."""

    _SAME: ClassVar = (nn.Identity,)

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        self.module, self.graph = module, graph
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
        return [c for c in self.found if len(c.layers) > 1 or c.layers[0].norm]

    def _take(self, node: fx.Node) -> bool:
        """Make a node part of a chain, if it can be."""
        pooling = _pooling(node, self.module)
        if pooling is not None:
            return self._pool(node, pooling)
        if len(node.all_input_nodes) == 1 and not _plain(node):
            return False
        if node.op == "call_module":
            return bool(node.all_input_nodes) and self._take_module(node, node.all_input_nodes[0])
        if node.target in _RELUS:
            return self._relu(node, node.all_input_nodes[0])
        if node.target in _ADDS and len(node.args) == 2 and not node.kwargs:
            return self._add(node)
        return False

    def _take_module(self, node: fx.Node, source: fx.Node) -> bool:
        own = self.module.get_submodule(str(node.target))
        if type(own) is IntegerConv2d and not isinstance(window_of(own), str):
            self._convolution(node, source)
            return True
        if type(own) is nn.BatchNorm2d:
            return self._norm(node, source)
        if type(own) is nn.ReLU:
            return self._relu(node, source)
        if type(own) in self._SAME and source in self.known:
            self._join(node, self.known[source])
            return True
        return False

    def _convolution(self, node: fx.Node, source: fx.Node) -> None:
        made = self._settle(source)
        if made is None:
            chain = next((c for c in self.found if c.input is source), None)
            if chain is None:
                chain = Chain(source)
                self.found.append(chain)
            number = INPUT
        else:
            chain, number = made.chain, made.number
        chain.layers.append(Found(str(node.target), number))
        self._join(node, _Sum(chain, len(chain.layers) - 1))

    def _norm(self, node: fx.Node, source: fx.Node) -> bool:
        term = self.known.get(source)
        if not isinstance(term, _Sum) or len(source.users) > 1 or not _is_layer(term):
            return False
        layer = term.chain.layers[term.layer]
        if layer.norm is not None or self.module.get_submodule(layer.name).bias is not None:
            return False
        layer.norm = str(node.target)
        self._join(node, term)
        return True

    def _relu(self, node: fx.Node, source: fx.Node) -> bool:
        term = self.known.get(source)
        if not isinstance(term, _Sum) or len(source.users) > 1:
            return False
        self._join(node, self._made(term, node, relu=True))
        return True

    def _pool(self, node: fx.Node, pooling: nn.MaxPool2d) -> bool:
        made = self._settle(node.all_input_nodes[0])
        if made is None:
            return False
        pairs = pooling.kernel_size, pooling.stride or pooling.kernel_size, pooling.padding
        kernel, stride, padding = map(_pair, pairs)
        made.chain.values.append(Pooled(made.number, kernel, Window(stride, padding)))
        made.chain.nodes.append(node)
        self._join(node, _Made(made.chain, len(made.chain.values) - 1))
        return True

    def _add(self, node: fx.Node) -> bool:
        if len(node.all_input_nodes) != 2:
            return False
        terms = [self.known.get(source) for source in node.all_input_nodes]
        for source, term in zip(node.all_input_nodes, terms, strict=True):
            if isinstance(term, _Sum) and (len(source.users) > 1 or not _is_layer(term)):
                self._settle(source)
        a, b = (self.known.get(source) for source in node.all_input_nodes)
        if isinstance(b, _Sum) and not isinstance(a, _Sum):
            a, b = b, a
        if isinstance(a, _Sum) and a.chain.input in node.all_input_nodes:
            b = _Made(a.chain, INPUT)
        if not isinstance(a, _Sum) or b is None or a.chain is not b.chain:
            return False
        more = {"other_layer": b.layer} if isinstance(b, _Sum) else {"other_value": b.number}
        self._join(node, replace(a, **more))
        return True

    def _join(self, node: fx.Node, part: _Sum | _Made) -> None:
        self.known[node] = part
        part.chain.replaced.append(node)
        if node.op == "call_module":
            part.chain.modules.append(str(node.target))

    def _settle(self, node: fx.Node) -> _Made | None:
        """Make a value of what a node has, if it is part of a chain."""
        part = self.known.get(node)
        if isinstance(part, _Sum):
            part = self.known[node] = self._made(part, node, relu=False)
        return part

    def _made(self, part: _Sum, node: fx.Node, *, relu: bool) -> _Made:
        chain = part.chain
        chain.values.append(Value(part.layer, part.other_layer, part.other_value, relu))
        chain.nodes.append(node)
        return _Made(chain, len(chain.values) - 1)

    def _mark_outputs(self, chain: Chain) -> None:
        inside = set(chain.replaced)
        for i, value in enumerate(chain.values):
            aliases = [n for n, part in self.known.items() if part == _Made(chain, i)]
            used = any(user not in inside for node in aliases for user in node.users)
            chain.values[i] = replace(value, is_output=used)


def _pooling(node: fx.Node, module: nn.Module) -> nn.MaxPool2d | None:
    """Return what a node pools, if chains can."""
    if len(node.all_input_nodes) != 1:
        return None
    if node.op == "call_module":
        own = module.get_submodule(str(node.target))
    elif node.target in _POOLS:
        options = {name: value for name, value in node.kwargs.items() if name != "input"}
        if any(isinstance(value, fx.Node) for value in (*node.args[1:], *options.values())):
            return None
        own = nn.MaxPool2d(*node.args[1:], **options)  # pyright: ignore[reportArgumentType]
    else:
        return None
    if type(own) is not nn.MaxPool2d or own.ceil_mode or own.return_indices:
        return None
    fits = _pair(own.dilation) == (1, 1) and math.prod(_pair(own.kernel_size)) <= MOST_TAPS
    return own if fits else None


def _pair(number: int | tuple[int, int]) -> tuple[int, int]:
    return (number, number) if isinstance(number, int) else (number[0], number[1])


def _is_layer(part: _Sum) -> bool:
    return part.other_layer is None and part.other_value is None


def _plain(node: fx.Node) -> bool:
    """Say whether a call has nothing but its input, and perhaps ``inplace``."""
    keywords: dict[str, Any] = dict(node.kwargs)
    keywords.pop("inplace", None)
    keywords.pop("input", None)
    return len(node.args) <= 1 and not keywords


def names_in(chains: list[Chain]) -> Iterator[str]:
    """Yield the names of all layers in chains."""
    for chain in chains:
        for layer in chain.layers:
            yield layer.name
