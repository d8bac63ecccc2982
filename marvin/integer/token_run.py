"""Running chains of a transformer as one, forward and backward; see ``fusion``."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, fx, nn

from fixedpoint_kernels import tokens
from fixedpoint_kernels._torch_private.modules import own_parameters, tensor_of
from fixedpoint_kernels.fused.stamp import Stamp
from fixedpoint_kernels.memory import are_float32
from fixedpoint_kernels.tokens import Segment
from marvin.hooks import rounders_of
from marvin.integer.autograd import Noise
from marvin.integer.chain_graph import Chain
from marvin.integer.formats import Product, choose_plain
from marvin.integer.graph_code import GraphCode
from marvin.integer.heads import Places, Turn
from marvin.integer.layers import TransposedLinear, features_of, is_linear
from marvin.integer.programs import Programs
from marvin.integer.standing import Standing
from marvin.integer.token_autograd import LinearCall, run_tokens
from marvin.integer.token_chain import Member, TokenChain
from marvin.model_formats import ModuleFormats
from marvin.rounder import Rounder

if TYPE_CHECKING:
    from fixedpoint_kernels.tokens.program import Program

__all__ = ["Call", "TokenRun", "alone", "are_plain", "put_in"]


def put_in(
    graph: fx.Graph, named: Sequence[tuple[str, TokenChain]]
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Return a graph with chains in place of their nodes, and the copies of the others.

    Args:
        graph: Of a module; the chains are of its nodes.
        named: Names under which the chains are called, and chains.
    """
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    owner = {node: own for own in named for node in own[1].replaced}

    def emit(node: fx.Node) -> fx.Node:
        if node in copies:
            return copies[node]
        if node in owner:
            name, chain = owner[node]
            call = made.call_module(name, tuple(emit(own) for own in chain.inputs))
            for k, output in enumerate(chain.outputs):
                copies[output] = made.call_function(_item, (call, k))
            for other, real in chain.same.items():
                if real in copies:
                    copies[other] = copies[real]
            return copies[node]
        for own in node.all_input_nodes:
            emit(own)
        copies[node] = made.node_copy(node, copies.__getitem__)
        return copies[node]

    for node in graph.nodes:
        if node not in owner:
            emit(node)
    return made, copies


def _item(values: tuple[Tensor, ...], k: int) -> Tensor:
    return values[k]


class TokenRun(nn.Module):
    """One chain of a module, as a module of the traced graph.

    Args:
        module: Whose graph it is.
        chain: Of its nodes.
        is_hooked: Says whether a module has hooks of others.
    """

    def __init__(
        self, module: nn.Module, chain: TokenChain, is_hooked: Callable[[nn.Module], bool]
    ) -> None:
        super().__init__()
        self.chain, self._is_hooked = chain, is_hooked
        # in tuples, so that they are not this module's own
        self.own = tuple(
            module.get_submodule(member.module) if member.module else None
            for member in chain.members
        )
        self.layers = tuple(own for own in self.own if own is not None and is_linear(own))
        others = map(module.get_submodule, chain.modules)
        self.others = tuple(own for own in others if not is_linear(own))
        pairs = [*zip(chain.members, self.own, strict=True)]
        self._norms = tuple((m.norm.features, own) for m, own in pairs if m.norm and own)
        self.owners = tuple(
            (own, name) if own is not None and name in member.parameters else None
            for member, own in pairs
            for name in ("weight", "bias")
        )
        norms = [(2 * i, m.norm) for i, m in enumerate(chain.members) if m.norm]
        self._offsets = [(i, norm.offset) for i, norm in norms if norm.offset]
        self._plain = GraphCode(alone(chain), module, {})
        self.rounders: tuple[Rounder, ...] = ()
        self._formats: list[ModuleFormats] = []
        self._products: list[tuple[Product, bool]] | None = None
        self._segments: dict[tuple[object, ...], _Described | None] = {}
        self._programs: Programs[Program] = Programs()
        self._standing = Standing((*self.layers, *self.others))

    def ready(self) -> bool:
        """Say whether the chain can run fused now, if what comes in has the shapes that it must."""
        if tokens.path() is None:
            return False
        if self._standing.holds() and self._rounds_to_nearest() and self.are_plain():
            return True
        return self._standing.found(self._fits() and self.are_plain())

    def are_plain(self) -> bool:
        """Say whether all parameters are plain, and of the shapes that they had when the model was traced."""
        weights = [(features, tensor_of(own, "weight")) for features, own in self._norms]
        fits = all(weight is None or weight.shape == (features,) for features, weight in weights)
        return fits and are_plain(*self.layers, *self.others)

    def _rounds_to_nearest(self) -> bool:
        return all(own.state.rounding == "nearest" for own in self.rounders)

    def _fits(self) -> bool:
        """Look at each module, and say whether hooks, modes and formats are those that chains take."""
        self.rounders = tuple(r for layer in self.layers for r in rounders_of(layer))
        if len(self.rounders) != len(self.layers) or not self._rounds_to_nearest():
            return False
        if any(not own.training or self._is_hooked(own) for own in (*self.layers, *self.others)):
            return False
        if any(rounder.formats(own).rounds for own in self.others for rounder in rounders_of(own)):
            return False
        pairs = zip(self.rounders, self.layers, strict=True)
        return self._knows([rounder.formats(layer) for rounder, layer in pairs])

    def _knows(self, formats: list[ModuleFormats]) -> bool:
        """Choose products by these formats, and say whether they fit."""
        if len(formats) != len(self._formats) or any(
            a is not b for a, b in zip(formats, self._formats, strict=True)
        ):
            self._formats, self._products, self._segments = formats, self._chosen(formats), {}
        return self._products is not None

    def _chosen(self, formats: list[ModuleFormats]) -> list[tuple[Product, bool]] | None:
        found = []
        for layer, own in zip(self.layers, formats, strict=True):
            product = choose_plain(layer, own)
            if product is None or (product.is_transposed and product.shifts):
                return None  # the second: fractional lengths by feature
            found.append((product, own.ste == "clip"))
        return found

    def forward(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Return what leaves the chain."""
        found = self._taken(xs)
        if found is None:
            return self._plain(*xs)
        segment, values, parameters = found
        before = [rounder.state.gradients for rounder in self.rounders]
        noise = [Noise(*rounder.state.noise_of_gradients()) for rounder in self.rounders]
        call = Call(self._programs)
        calls = self._shown(self.calls(noise))
        outputs = run_tokens(call, segment, calls, values, parameters)
        if call.met_nan:
            for rounder, drawn in zip(self.rounders, before, strict=True):
                rounder.state.gradients = drawn  # layers draw again
            return self._plain(*xs)
        for rounder in self.rounders:
            rounder.state.waiting.discard(rounder.name)
            rounder.count(len(xs[0]))
        self._count(segment, values, call)
        return outputs

    def calls(self, noise: Sequence[Noise]) -> list[LinearCall]:
        """Return what each linear layer has in a call with this noise."""
        chosen = self._products or ()
        return [LinearCall(own, p.shifts) for own, (p, _) in zip(noise, chosen, strict=True)]

    def _shown(self, calls: list[LinearCall]) -> list[LinearCall]:
        """Return calls that show what layers see to policies that ask."""
        if all(own.observer is None for own in self.rounders):
            return calls
        sees = [own.observer and own.observer.see for own in self.rounders]
        return [own._replace(see=see) for own, see in zip(calls, sees, strict=True)]

    def parameters_in_order(self) -> list[Tensor | None]:
        """Return weight or scale, and bias or shift, of each member."""
        found = [None if owner is None else tensor_of(*owner) for owner in self.owners]
        for i, offset in self._offsets:
            if (weight := found[i]) is not None:
                found[i] = weight + offset
        return found

    def _taken(self, xs: Sequence[Tensor]) -> "_Taken | None":
        """Return what is computed from what comes in, and all that it takes; None where that cannot be fused."""
        count = len(xs) - len(self.chain.tables)
        values, tables = xs[:count], xs[count:]
        found = self._described_for(values, tables)
        if found is None:
            return None
        parameters = self.parameters_in_order()
        for i, turn in found.turns:
            turned = self.chain.members[i].turned
            assert turned is not None
            shape = values[0].shape[1], turn.operation.turned
            shape = (len(values[0]), *shape) if turn.operation.by_sample else shape
            own = [tables[self.chain.tables.index(table)] for table in turned.tables]
            own = [x.detach().reshape(shape).contiguous() for x in own]
            parameters[2 * i : 2 * i + 2] = reversed(own) if turn.is_swapped else own
        return _Taken(found.segment, values, parameters)

    def _described_for(self, xs: Sequence[Tensor], tables: Sequence[Tensor]) -> "_Described | None":
        """Return what is computed for values and tables of these shapes; None where it cannot be fused."""
        for x in (*xs, *tables):
            if type(x) not in (Tensor, nn.Parameter) or x.dtype is not torch.float32:
                return None
            if x.device.type != "cpu" or x.dim() < 2 or not x.numel():
                return None
        if any(x.shape[:-1] != xs[0].shape[:-1] for x in xs):
            return None
        if any(table.requires_grad for table in tables):
            return None
        has_heads = any(member.moves is not None for member in self.chain.members)
        count = xs[0].shape[:-1].numel() // len(xs[0])
        if has_heads and xs[0].dim() != 3:
            return None
        widths = tuple(x.shape[-1] for x in xs)
        # two samples tell as much as many, but where tables may have as many
        batch = len(xs[0]) if tables else min(len(xs[0]), 2)
        key = count, batch, *widths, *(table.shape for table in tables)
        try:
            return self._segments[key]
        except KeyError:  # not asked before: other threads may clear all meanwhile
            shapes = zip(self.chain.tables, (table.shape for table in tables), strict=True)
            found = self._described(widths, batch, count, dict(shapes))
        if len(self._segments) >= 64:
            self._segments.clear()
        self._segments[key] = found
        return found

    def _described(
        self,
        inputs: tuple[int, ...],
        batch: int,
        count: int,
        tables: Mapping[fx.Node, Sequence[int]],
    ) -> "_Described | None":
        """Return the segment of ``count`` tokens; None where the features do not fit."""
        places = Places(batch, count)
        for i, (node, width) in enumerate(zip(self.chain.inputs, inputs, strict=False)):
            places.add(node, i, width)  # tables, behind these, have no number
        widths, found, turns = list(inputs), [], []
        chosen = iter(self._products or ())
        for member, own in zip(self.chain.members, self.own, strict=True):
            turn, layout = None, None
            if member.turned is not None:
                turn = member.turned.turn(places, tables, batch)
                operation = turn and turn.operation
            elif (moves := member.heads or member.piece) is not None:
                operation = moves.operation(places)
            else:
                sources = [places.values[node].number for node in member.sources]
                operation = _operation(member, own, chosen, widths, sources)
            if member.head_norm is not None:
                layout = member.head_norm.layout(places)
                operation = layout and operation
            if operation is None:
                return None
            if turn is not None:
                turns.append((len(found), turn))
                layout = turn.layout
            found.append(operation)
            width = tokens.width_of(operation, widths)
            same = [node for node, real in self.chain.same.items() if real is member.node]
            for node in (member.node, *same):
                places.add(node, len(widths), width, layout)
            widths.append(width)
        outputs = tuple(places.values[node].number for node in self.chain.outputs)
        try:
            return _Described(Segment(inputs, tuple(found), outputs), turns)
        except ValueError:  # features that are no multiples of 16, or too few or too many
            return None

    def _count(self, segment: Segment, xs: Sequence[Tensor], call: "Call") -> None:
        """Count what was clamped."""
        rounders, rows = iter(self.rounders), xs[0].shape[:-1].numel()
        for operation, clamped in zip(segment.operations, call.clamped, strict=True):
            if not isinstance(operation, tokens.Linear):
                continue
            rounder, source = next(rounders), operation.source
            if operation.clip and (source >= len(xs) or xs[source].requires_grad):
                rounder.tally.add(clamped, rows * operation.shape[1])


class _Described(NamedTuple):
    """What a chain computes for some shapes, and which of its operations are rotary position embeddings."""

    segment: Segment
    turns: list[tuple[int, Turn]]


class _Taken(NamedTuple):
    """What is computed in a call, the values that come in, and two parameters of each operation."""

    segment: Segment
    values: Sequence[Tensor]
    parameters: list[Tensor | None]


class Call:
    """One call of a chain: what each operation clamped, and whether a linear layer met NaN, for which there is no code.

    Args:
        programs: Of the chain.
        stamp: Of weights that may stay laid out between calls.
    """

    def __init__(self, programs: "Programs[Program]", stamp: Stamp | None = None) -> None:
        self.programs, self.stamp, self.met_nan = programs, stamp, False
        self.clamped: list[int] = []

    def note(
        self, segment: Segment, xs: Sequence[Tensor], counts: Sequence[tuple[int, int]]
    ) -> None:
        """Take the counts."""
        self.clamped = [clamped for clamped, _ in counts]
        self.met_nan = any(nans for _, nans in counts)


def _operation(
    member: Member,
    own: nn.Module | None,
    chosen: Iterator[tuple[Product, bool]],
    widths: Sequence[int],
    sources: Sequence[int],
) -> tokens.Operation | None:
    """Return what a member does to values of these features; None where they do not fit."""
    if member.kind == "linear":
        product, clip = next(chosen)
        rest = product.weight_fmt, features_of(own), clip
        lies = product.is_transposed, bool(product.shifts)
        return tokens.Linear(sources[0], product.inputs, *rest, *lies)
    if member.norm is not None:
        features, eps, centred, _ = member.norm
        if member.head_norm is not None:
            return tokens.Norm(sources[0], eps, centred, features)
        return tokens.Norm(sources[0], eps, centred) if features == widths[sources[0]] else None
    if member.odds is not None:
        return tokens.Dropout(sources[0], member.odds)
    if member.curve is not None:
        return tokens.Curved(sources[0], member.curve)
    if member.kind == "relu":
        return tokens.Relu(sources[0])
    return (tokens.Add if member.kind == "add" else tokens.Multiply)(*sources)


def alone(chain: TokenChain | Chain) -> fx.Graph:
    """Return the chain's nodes as a graph of their own."""
    graph, copies = fx.Graph(), {}
    for i, node in enumerate(chain.inputs):
        copies[node] = graph.placeholder(f"x{i}")
    needed, waiting = {*chain.inputs}, [*chain.outputs]
    while waiting:
        if (node := waiting.pop()) not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    inside = needed | {*chain.replaced}
    for node in chain.inputs[0].graph.nodes:
        if node in inside and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in chain.outputs))
    return graph


def are_plain(*modules: nn.Module) -> bool:
    """Say whether all parameters of modules are plain, and of the shapes that their numbers say."""
    found: list[Tensor] = []
    shapes: list[Sequence[int]] = []
    for own in modules:
        for name, p in own_parameters(own):
            found.append(p)
            shapes.append(_shape_of(own, name) or p.shape)
    return are_float32(found, shapes) and all(map(Tensor.is_contiguous, found))


def _shape_of(own: nn.Module, name: str) -> tuple[int, ...] | None:
    """Return the shape of a parameter that a module's numbers say; None where they say none."""
    if name not in ("weight", "bias"):
        return None
    if isinstance(own, TransposedLinear):
        outputs, inputs = features_of(own)
        return (inputs, outputs) if name == "weight" else (outputs,)
    if isinstance(own, nn.Linear):
        return (own.out_features, own.in_features) if name == "weight" else (own.out_features,)
    return getattr(own, "normalized_shape", None)
