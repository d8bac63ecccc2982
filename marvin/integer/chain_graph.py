"""Finding layers that pass codes on in a traced model: convolution, batch norm, sum, activation, pooling, concatenation, linear layer."""

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import fx, nn

from fixedpoint_kernels.functions import Curve
from fixedpoint_kernels.fused import INPUT, LONGEST, Joined, Pooled, Scaled, Value
from fixedpoint_kernels.products.shapes import sums_fit
from marvin.integer.formats import window_of
from marvin.integer.layers import IntegerConv2d, IntegerLinear, features_of
from marvin.integer.nodes import (
    concatenation,
    curve_of,
    flattening,
    norm_of,
    norms_out_of_order,
    plain,
    repetition,
    returned,
    zeros_around,
)
from marvin.integer.pools import pooling

__all__ = ["Chain", "Found", "find"]

_ADDS = operator.add, operator.iadd, torch.add, "add", "add_"
_PRODUCTS = operator.mul, operator.imul, torch.mul, "mul", "mul_"
_RELUS = torch.relu, torch.relu_, F.relu, F.relu_, "relu", "relu_"
_SIX = 6.0  # the ceiling of ReLU6
_EXACT = "hardswish", "hardsigmoid", "leaky_relu"  # curves that have the bits of PyTorch's


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
        """Whether it is, to the bit, what its layers compute one by one in eval mode: without means, some curves and ``slices``."""
        curves = {value.curve.name for value in self.values if value.curve is not None}
        has_means = any(isinstance(value, Pooled) and value.is_mean for value in self.values)
        return not has_means and curves <= {*_EXACT} and not self.slices

    @property
    def slices(self) -> list[fx.Node]:
        """Slices that others or batch norm use: what goes by strides has other last bits where they are no views."""
        taken = [own.source for own in self.layers if not own.name and own.source != INPUT]
        nodes = [self.nodes[number] for number in [*taken, *(own for own, _ in self.used.values())]]
        return [node for node in nodes if node.target is operator.getitem]

    @property
    def inputs(self) -> list[fx.Node]:
        """The node of what comes in."""
        return [self.input]

    @property
    def outputs(self) -> list[fx.Node]:
        """Nodes of the values that others use."""
        return [n for n, v in zip(self.nodes, self.values, strict=True) if v.is_output]


def find(
    module: nn.Module,
    graph: fx.Graph,
    others: Collection[fx.Node] = (),
    *,
    infers: bool = False,
    is_exact: bool = False,
) -> list[Chain]:
    """Return the chains of a traced module: of two layers, or one with batch norm, or more.

    Args:
        module: That was traced.
        graph: Of it.
        others: Nodes that belong to no chain, or to chains of another kind.
        infers: Whether the module is in eval mode.
        is_exact: Whether chains have the bits that layers have one by one; in eval mode.
    """
    chains = _Search(module, graph, others, infers=infers, is_exact=is_exact).chains()
    slices = {node for chain in chains for node in chain.slices}
    if not (is_exact and slices):
        return chains
    return find(module, graph, {*others, *slices}, infers=infers, is_exact=True)


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
        others: Collection[fx.Node],
        *,
        infers: bool,
        is_exact: bool,
    ) -> None:
        self.module, self.graph, self.others = module, graph, others
        self.infers, self.is_exact = infers, is_exact
        # what goes on from there is another chain, so that autograd adds up its gradient
        self.ends = set() if infers else returned(graph, module)
        self.out_of_order = set() if infers else norms_out_of_order(graph, module)
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
            return _sums_fit(own) and self._layer(node, source, str(node.target))
        if isinstance(own, IntegerLinear):
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
        chain = self.known[node].chain
        # the chain counts batches itself
        chain.replaced[-1:] = [*self._count(name), *tensors, node]
        chain.modules.append(name)
        return True

    def _count(self, name: str) -> list[fx.Node]:
        """Return the nodes that count one batch of a batch norm, and that no chain has taken yet."""
        count, taken = f"{name}.num_batches_tracked", {n for c in self.found for n in c.replaced}
        of_norm = [n for n in self.graph.nodes if n.op == "get_attr" and n.target == count]
        left = [n for n in of_norm if n not in taken]
        return [left[0], *left[0].users] if left else []

    def _norm(self, node: fx.Node, source: fx.Node, name: str | None = None) -> bool:
        name, term = name or str(node.target), self._alone(source)
        if self.module.get_submodule(name) in self.out_of_order:
            return False
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
