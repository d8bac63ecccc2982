"""Finding what transformers are made of in a traced model: linear layers, norms, attention, sums.

Nodes that pass values on to each other become one chain. No chain holds a way out and back in: a node
that takes what others made of a chain's values belongs to a later chain.
"""

import operator
from collections.abc import Collection, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from fixedpoint_kernels._torch_private.modules import tensor_of
from fixedpoint_kernels.forward_save.known import known
from fixedpoint_kernels.products.shapes import sums_fit
from fixedpoint_kernels.tokens import Odds
from marvin.integer.heads import HeadNorm, Heads, Piece, Turned
from marvin.integer.layers import features_of, is_linear
from marvin.integer.nodes import (
    asks_dtype,
    asks_shape,
    casts,
    computes,
    curve_of,
    is_rms_norm,
    plain,
    returned,
)
from marvin.integer.token_chain import Member, RowNorm, TokenChain

__all__ = ["find"]

_ADDS = operator.add, operator.iadd, torch.add, "add", "add_"
_PRODUCTS = operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_"
_RELUS = torch.relu, torch.relu_, F.relu, F.relu_, "relu", "relu_"
_VIEWS = (
    "view", "reshape", "unflatten", "flatten", "permute", "transpose", "chunk", "split", "unbind",
    "contiguous", "movedim", "swapaxes", "squeeze", "unsqueeze", "tensor_split", "expand",
)  # fmt: skip
_FUNCTIONS = (
    *(getattr(torch, name) for name in _VIEWS if hasattr(torch, name)),
    operator.getitem, operator.floordiv, operator.mul, operator.add, operator.sub, operator.truediv,
    int,
)  # fmt: skip
_TURNS = (  # with sums and products
    operator.neg, torch.neg, torch.sub, torch.cat, torch.stack, "neg", "sub",
)  # fmt: skip
_CUTS = (
    "chunk", "split", "tensor_split", "unbind", "unflatten", torch.chunk, torch.split, torch.tensor_split,
    torch.unbind, torch.unflatten, operator.getitem,
)  # fmt: skip
_ATTENTION = F.scaled_dot_product_attention


def find(
    module: nn.Module, graph: fx.Graph, others: Collection[fx.Node] = (), *, infers: bool = False
) -> list[TokenChain]:
    """Return the chains of a traced module: of two values or more, one of a linear layer.

    Args:
        module: That was traced.
        graph: Of it.
        others: Nodes that belong to chains of convolutions.
        infers: Whether the module is in eval mode, where dropout passes on what comes in.
    """
    return _Search(module, graph, others, infers).chains()


class _Search:
    """Finds members, then which belong together."""

    def __init__(
        self, module: nn.Module, graph: fx.Graph, others: Collection[fx.Node], infers: bool
    ) -> None:
        self.module, self.graph, self.others, self.infers = module, graph, others, infers
        self.same: dict[fx.Node, fx.Node] = {}  # nodes that pass on what another has
        self.members: dict[fx.Node, Member] = {}
        self.of_layers: dict[fx.Node, bool] = {}  # see _is_of_layer
        self.norms: dict[nn.Module, RowNorm | None] = {}
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        # what goes on from there is another chain, so that autograd adds up its gradient
        self.ends = set() if infers else returned(graph, module)

    def chains(self) -> list[TokenChain]:
        for node in (n for n in self.graph.nodes if n not in self.others):
            if self._is_same(node):
                self.same[node] = self._real(node.all_input_nodes[0])
                continue
            member = self._member(node)
            if member is not None:
                self.members[node] = member
        while True:
            self._drop()
            groups: dict[fx.Node, list[Member]] = {}
            roots = self._roots()
            for node, member in self.members.items():
                groups.setdefault(roots[node], []).append(member)
            chains = [self._chain(group) for group in groups.values()]
            if not (apart := [own for chain in chains for own in chain.apart]):
                return [chain for chain in chains if chain.layers and len(chain.members) > 1]
            self.members = {n: own for n, own in self.members.items() if own not in apart}

    def _real(self, node: fx.Node) -> fx.Node:
        return self.same.get(node, node)

    def _of(self, node: fx.Node) -> nn.Module | None:
        return self.module.get_submodule(str(node.target)) if node.op == "call_module" else None

    def _kind(self, node: fx.Node) -> str:
        """Return what a module is to a chain, but for curves; "" if a node calls none."""
        own = self._of(node)
        if own is None:
            return ""
        if is_linear(own):
            features = features_of(own)
            return "" if any(n % 16 for n in features) or not sums_fit(features) else "linear"
        norm = self._norm(own)
        if norm is not None:
            return "" if norm.features % 16 else "norm"
        return "relu" if type(own) is nn.ReLU else ""

    def _norm(self, own: nn.Module) -> RowNorm | None:
        if own not in self.norms:  # code of other packages runs to tell
            self.norms[own] = _row_norm(own)
        return self.norms[own]

    def _is_same(self, node: fx.Node) -> bool:
        if type(self._of(node)) is nn.Identity:
            return plain(node)
        p = self._dropout(node)
        return p == 0 or (p is not None and self.infers and node.op == "call_module")

    def _dropout(self, node: fx.Node) -> float | None:
        """Return with what probability a node makes 0 of a number, in training; None where it is something else."""
        own = self._of(node)
        if type(own) is nn.Dropout:
            return float(own.p) if plain(node) else None
        if node.target is not F.dropout:
            return None
        names = "input", "p", "training", "inplace"
        given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        p, training = given.get("p", 0.5), given.get("training", True)
        if not isinstance(p, int | float) or not isinstance(training, bool):
            return None
        return float(p) if training else 0.0

    def _member(self, node: fx.Node) -> Member | None:
        if node.target is _ATTENTION:
            heads = self._heads(node)
            if heads is None:
                return None
            sources = dict.fromkeys(map(self._source, heads.wanted))
            return Member(heads.nodes[-1], "attention", tuple(sources), heads=heads)
        inputs = node.all_input_nodes
        p = self._dropout(node)
        if p is not None:
            source = self._real(inputs[0])
            name = str(node.target) if node.op == "call_module" else ""
            odds = Odds(p) if 0 < p < 1 else None
            return Member(node, "dropout", (source,), name, odds=odds) if odds else None
        for own in inputs:
            self._cut(self._real(own))
        name, curve = str(node.target), curve_of(node, self.module)
        own = self._of(node)
        if curve is not None:
            source = (self._real(inputs[0]),)
            return Member(node, "curve", source, name if own else "", curve=curve)
        if own is not None:
            kind = self._kind(node) if len(inputs) == 1 and plain(node) else ""
            norm = self._norm(own) if kind == "norm" else None
            heads = None if norm is None else self._head_norm(node, norm)
            source = (self._real(inputs[0]) if heads is None else heads.layer,) if kind else ()
            return Member(node, kind, source, name, norm=norm, head_norm=heads) if kind else None
        if node.target in _RELUS and len(inputs) == 1 and plain(node):
            return Member(node, "relu", (self._real(inputs[0]),))
        kind = "add" if node.target in _ADDS else "multiply" if node.target in _PRODUCTS else ""
        pair = tuple(self._real(own) for own in node.args if isinstance(own, fx.Node))
        is_pair = len(pair) == len(node.args) == 2 and not node.kwargs
        return Member(node, kind, pair) if kind and is_pair else None

    def _cut(self, node: fx.Node) -> None:
        """Make a member of a node that has some features of another."""
        before: dict[fx.Node, None] = {}
        if node in self.members or node.target is not operator.getitem:
            return
        value, may_cut = node, self._gather(node, before)
        while value in before and may_cut:
            may_cut = value.target in _CUTS and _may_leave_tokens(value)
            value = value.all_input_nodes[0]
        if before and may_cut and value in self.members:
            piece = Piece(value, self._in_order(before))
            self.members[node] = Member(node, "cut", (value,), piece=piece)

    def _heads(self, node: fx.Node) -> Heads | None:
        names = "query", "key", "value", "attn_mask", "dropout_p", "is_causal"
        given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        causal, scale = given.get("is_causal", False), given.get("scale")
        p = given.get("dropout_p", 0.0)
        if given.get("attn_mask") is not None or not isinstance(p, int | float) or not 0 <= p < 1:
            return None
        shares = given.get("enable_gqa", False)
        if not isinstance(shares, bool) or not isinstance(causal, bool):
            return None
        if scale is not None and not isinstance(scale, int | float):
            return None
        wanted = [given.get(name) for name in names[:3]]
        before: dict[fx.Node, None] = {}
        for own in wanted:
            if not isinstance(own, fx.Node) or not self._gather(own, before):
                return None
        after = self._after(node, before)
        first = self._in_order(before)
        q, k, v = (own for own in wanted if isinstance(own, fx.Node))
        return Heads(node, (q, k, v), first, after, causal, scale, Odds(p) if p else None, shares)

    def _head_norm(self, node: fx.Node, norm: RowNorm) -> HeadNorm | None:
        """Return what is known of a norm of each head that a linear layer makes, or that is turned; None where it is none."""
        (first,) = node.all_input_nodes
        before: dict[fx.Node, None] = {}
        if not self._turn(first):
            before[first] = None
            views = _is_view(first) and [self._gather(n, before) for n in first.all_input_nodes]
            if not views or not all(views):
                return None
        layer = self._source(first)
        own = self._of(layer)
        if own is not None and (not is_linear(own) or features_of(own)[0] == norm.features):
            return None
        if layer not in self.members:
            return None
        return HeadNorm(layer, norm.features, (*self._in_order(before), node))

    def _in_order(self, nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
        return tuple(sorted(nodes, key=self.order.__getitem__))

    def _source(self, node: fx.Node) -> fx.Node:
        """Return the member that made what a node is a part of, or what came in, or a parameter."""
        while node.op in ("call_function", "call_method") and not self._is_rotary(node):
            node = node.all_input_nodes[0]
        return node

    def _is_rotary(self, node: fx.Node) -> bool:
        return node in self.members and self.members[node].turned is not None

    def _turn(self, node: fx.Node) -> bool:
        """Say whether a node turns heads by their position; it is a member then, and what it is made of is none."""
        if self._is_rotary(node):
            return True
        inner: dict[fx.Node, None] = {}
        ends: dict[fx.Node, None] = {}
        if node.target not in (*_ADDS, *_TURNS) or not self._trail(node, inner, ends, ()):
            return False
        tables = _tables(n for n in ends if n not in self.members)
        inner, ends = {}, {}
        if not self._trail(node, inner, ends, tables):
            return False
        layers = [n for n in ends if n in self.members]
        if len(layers) != 1 or len(tables) != 2:
            return False
        order = self._in_order(inner)
        turned = Turned(layers[0], (tables[0], tables[1]), order)
        for own in order:
            self.members.pop(own, None)
        self.members[node] = Member(node, "rotary", (layers[0],), turned=turned)
        return True

    def _trail(
        self,
        node: fx.Node,
        inner: dict[fx.Node, None],
        ends: dict[fx.Node, None],
        tables: Collection[fx.Node],
    ) -> bool:
        """Gather what a node is made of, up to layers and tables; say whether it may turn heads.

        Args:
            node: The node.
            inner: Gets nodes that compute.
            ends: Gets layers and tables.
            tables: What ends there; nothing: all that no layer makes.
        """
        if node in inner:
            return True
        inputs = node.all_input_nodes
        if asks_shape(node) or asks_dtype(node):
            inner[node] = None
            return self._is_base(inputs[0]) or self._trail(inputs[0], inner, ends, tables)
        member = self.members.get(node)
        is_table = node in tables if tables else not (self._is_of_layer(node) or _is_number(node))
        if is_table or (member is not None and member.kind in ("linear", "norm")):
            ends[node] = None
            return True
        if not _is_view(node) and node.target not in (*_ADDS, *_PRODUCTS, *_TURNS):
            return False
        inner[node] = None
        return all(self._trail(own, inner, ends, tables) for own in inputs)

    def _is_of_layer(self, node: fx.Node) -> bool:
        """Say whether a node depends on what a linear layer makes, other than on its shape."""
        if not self.of_layers:
            for own in self.graph.nodes:
                is_layer = self._kind(own) == "linear"
                is_behind = any(self.of_layers[n] for n in own.all_input_nodes)
                self.of_layers[own] = is_layer or (is_behind and not asks_shape(own))
        return self.of_layers[node]

    def _after(self, call: fx.Node, before: dict[fx.Node, None]) -> tuple[fx.Node, ...]:
        """Return the nodes that put heads side by side, the value last; others that these take go to ``before``."""
        last, found = call, []
        while True:
            asked = _asked(last)
            users = [n for n in last.users if n not in asked]
            inner = {*asked, *users}
            if len(users) != 1 or not _is_view(users[0]) or users[0].all_input_nodes[0] is not last:
                return tuple(found)
            if any(user not in inner for node in asked for user in node.users):
                return tuple(found)
            others = [
                n for own in inner for n in own.all_input_nodes if n not in inner and n is not last
            ]
            more = {**before}
            if not all(self._gather(n, more) for n in others):
                return tuple(found)
            before |= more
            found += [*asked, users[0]]
            last = users[0]

    def _gather(self, node: fx.Node, found: dict[fx.Node, None]) -> bool:
        """Gather nodes that change shapes, up to layers; say whether there are no others."""
        if node in found or self._turn(node) or self._is_base(node):
            return True
        is_shape = asks_shape(node) or asks_dtype(node)
        if not (_is_view(node) or is_shape):
            return False
        found[node] = None
        return all(self._gather(n, found) for n in node.all_input_nodes)

    def _is_base(self, node: fx.Node) -> bool:
        """Say whether a node may have a value of a chain."""
        member = self.members.get(node)
        return (member is not None and member.piece is None) or any(
            self._kind(user) in ("linear", "norm") for user in node.users if user not in self.others
        )

    def _drop(self) -> None:
        """Leave out sums of what is not known to have one shape, and attention of unknown layers."""
        while True:
            bad = [node for node, member in self.members.items() if not self._holds(member)]
            if not bad:
                return
            for node in bad:
                del self.members[node]

    def _holds(self, member: Member) -> bool:
        inside = [source for source in member.sources if source in self.members]
        if member.moves is not None:
            kinds = {self.members[source].kind for source in inside}
            known = all(n in self.members or self._is_taken(n) for n in member.moves.bases)
            if member.piece is not None:
                return bool(inside) and known and self._is_used(member)
            is_whole = len(inside) == len(member.sources) and kinds <= {"linear", "norm", "rotary"}
            return is_whole and known and (member.heads is not None or self._only_attends(member))
        if member.kind in ("linear", "norm"):
            return True
        if member.kind not in ("add", "multiply"):
            return len(inside) == 1
        outside = [source for source in member.sources if source not in self.members]
        if member.kind == "multiply" and any(own.op == "placeholder" for own in outside):
            return False  # a factor is often of fewer dimensions
        return bool(inside) and all(map(self._is_taken, outside))

    def _is_used(self, member: Member) -> bool:
        """Say whether a member that moves nothing takes a value."""
        users = (self.members.get(user) for user in member.node.users)
        return any(user is not None and user.moves is None for user in users)

    def _only_attends(self, member: Member) -> bool:
        """Say whether heads alone are taken of a value, and others take its shape at most: its node has them as a dimension."""
        others = (own for own in self.members.values() if own.moves)
        attending = {n for own in others for n in own.nodes}
        return all(user in attending for user in member.node.users)

    def _is_taken(self, node: fx.Node) -> bool:
        """Say whether a layer or a norm takes a node, too: it is of tokens, then."""
        if node.op == "placeholder":
            return True  # shapes are looked at in each call
        takers = (self.members.get(user) for user in node.users)
        return any(m is not None and m.kind in ("linear", "norm") for m in takers)

    def _roots(self) -> dict[fx.Node, fx.Node]:
        """Return for each member's node one that stands for its chain."""
        levels: dict[fx.Node, int] = {}
        ends = {self._real(n) for n in self.ends}
        owner = {node: key for key, m in self.members.items() for node in m.nodes}
        for node in self.graph.nodes:
            own = self.members.get(owner[node]) if node in owner else None
            nodes = own.nodes if own is not None else (node,)
            taken = {n for inner in nodes for n in inner.all_input_nodes} - set(nodes)
            passes = own is not None or node in self.same
            levels[node] = max(
                (levels.get(n, 0) + (n in owner and (not passes or n in ends)) for n in taken),
                default=0,
            )
            if node in self.same and self._real(node) in owner:
                owner[node] = owner[self._real(node)]
        roots = {node: node for node in self.members}

        def root(node: fx.Node) -> fx.Node:
            while roots[node] is not node:
                node = roots[node]
            return node

        takers: dict[tuple[fx.Node, int], fx.Node] = {}
        for node, member in self.members.items():
            level = max(levels[n] for n in member.nodes)
            for source in member.sources:
                key = source, level
                near = takers.setdefault(key, node)
                roots[root(node)] = root(near)
                if source in self.members and self._level(source, levels) == level:
                    roots[root(node)] = root(source)
        return {node: root(node) for node in self.members}

    def _level(self, node: fx.Node, levels: dict[fx.Node, int]) -> int:
        return max(levels[n] for n in self.members[node].nodes)

    def _chain(self, members: list[Member]) -> TokenChain:
        members = sorted(members, key=lambda member: self.order[member.node])
        chain = TokenChain(members)
        made = {member.node for member in members}
        chain.same = {n: real for n, real in self.same.items() if real in made}
        chain.inputs = list(dict.fromkeys(s for m in members for s in m.sources if s not in made))
        turned = [own.turned for own in members if own.turned]
        chain.tables = list(dict.fromkeys(table for own in turned for table in own.tables))
        chain.inputs += chain.tables
        inside = chain.replaced
        for member in members:
            aliases = [member.node, *(n for n, real in chain.same.items() if real is member.node)]
            if any(user not in inside for node in aliases for user in node.users):
                chain.outputs.append(member.node)
        chain.modules = [member.module for member in members if member.module]
        chain.modules += [str(n.target) for n in chain.same if n.op == "call_module"]
        return chain


def _row_norm(own: nn.Module) -> RowNorm | None:
    if isinstance(own, nn.LayerNorm | nn.RMSNorm) and type(own) in (nn.LayerNorm, nn.RMSNorm):
        is_row = len(own.normalized_shape) == 1
        eps = torch.finfo(torch.float32).eps if own.eps is None else own.eps
        norm = RowNorm(own.normalized_shape[0], eps, type(own) is nn.LayerNorm)
        return norm if is_row else None
    found = known(own)
    if found is None or not is_rms_norm(found) or is_parametrized(own):
        return None
    weight = tensor_of(own, "weight")
    if weight is None or weight.dim() != 1:
        return None
    eps = getattr(own, found.eps, None)
    if not isinstance(eps, int | float):
        return None
    scale, features = weight.detach() + found.offset, len(weight)

    def normalised(x: Tensor) -> Tensor:
        return F.rms_norm(x, (features,), scale, eps)

    norm = RowNorm(features, float(eps), False, found.offset)
    return norm if computes(own, normalised, features) else None


def _is_view(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _VIEWS or casts(node)
    scales = any(isinstance(own, float) for own in node.args)
    return node.op == "call_function" and node.target in _FUNCTIONS and not scales


def _may_leave_tokens(node: fx.Node) -> bool:
    """Say whether a view may take features side by side of all tokens, as far as its arguments tell."""
    if node.target in (
        "chunk",
        "split",
        "tensor_split",
        torch.chunk,
        torch.split,
        torch.tensor_split,
    ):
        given = dict(enumerate(node.args)) | dict(node.kwargs)
        return given.get("dim", given.get(2, 0)) in (-1, 2)
    if node.target is not operator.getitem:
        return True
    at = node.args[1]
    if not isinstance(at, tuple):
        return not isinstance(at, slice)  # the number of a piece
    *others, last = at
    return (
        all(own in (slice(None), Ellipsis) for own in others)
        and (Ellipsis in others or len(others) == 2)
        and isinstance(last, slice)
        and last.step in (None, 1)
    )


def _tables(ends: Iterable[fx.Node]) -> list[fx.Node]:
    """Return nodes of which others are views, or that are no views of the same; all are tensors of no layer."""
    found: list[fx.Node] = []
    for node in ends:
        own = _views_of(node)
        for i, other in enumerate(found):
            common = [n for n in _views_of(other) if n in own]
            if common:
                found[i] = common[0]
                break
        else:
            found.append(node)
    return found


def _views_of(node: fx.Node) -> list[fx.Node]:
    """Return a node, what it is a view of, what that is a view of, and so on."""
    found = [node]
    while _is_view(found[-1]) and found[-1].all_input_nodes:
        found.append(found[-1].all_input_nodes[0])
    return found


def _is_number(node: fx.Node) -> bool:
    """Say whether a node is a size, or computed from sizes alone."""
    if asks_shape(node):
        return True
    inputs = node.all_input_nodes
    return bool(inputs) and node.target in _FUNCTIONS and all(map(_is_number, inputs))


def _asked(node: fx.Node) -> dict[fx.Node, None]:
    """Return nodes that have the shape of another, and its sizes, in order."""
    found: dict[fx.Node, None] = {}
    for own in node.graph.nodes:
        is_part = own.target is operator.getitem and own.args[0] in found
        if is_part or (asks_shape(own) and own.args[0] is node):
            found[own] = None
    return found
