"""Chains of what transformers are made of: their members, what comes in and what leaves."""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from fixedpoint_kernels.tokens import Curve, Odds
from marvin.integer.heads import HeadNorm, Heads, Piece, Turned

__all__ = ["Member", "RowNorm", "TokenChain"]


class RowNorm(NamedTuple):
    """Normalisation of rows of features.

    Args:
        features: How many.
        eps: Added to the variance, or to the mean square.
        centred: Whether the mean is taken off first: layer norm; else it is RMS norm.
        offset: Added to the weight.
    """

    features: int
    eps: float
    centred: bool
    offset: float = 0.0


@dataclass(frozen=True)
class Member:
    """What makes one value of a chain.

    Args:
        node: That has the value.
        kind: ``"linear"``, ``"norm"``, ``"curve"``, ``"relu"``, ``"dropout"``, ``"add"``, ``"multiply"``,
            ``"cut"``, ``"rotary"`` or ``"attention"``.
        sources: Nodes of the values that it takes.
        module: Name, where it is one.
        heads: Of attention.
        turned: Of a rotary position embedding.
        odds: Of dropout.
        curve: What an activation function is.
        norm: What a norm is.
        head_norm: Of a norm of heads.
        piece: Of a cut.
    """

    node: fx.Node
    kind: str
    sources: tuple[fx.Node, ...]
    module: str = ""
    heads: Heads | None = None
    turned: Turned | None = None
    odds: Odds | None = None
    curve: Curve | None = None
    norm: RowNorm | None = None
    head_norm: HeadNorm | None = None
    piece: Piece | None = None

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """All that it replaces."""
        moves = self.moves
        return (self.node,) if moves is None else moves.nodes

    @property
    def moves(self) -> Heads | Turned | HeadNorm | Piece | None:
        """What knows where heads lie, or a piece."""
        return self.heads or self.turned or self.head_norm or self.piece

    @property
    def has_heads(self) -> bool:
        """Whether its node has heads as a dimension."""
        return self.turned is not None or self.head_norm is not None

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of its module's parameters that chains take."""
        if self.kind == "linear" or (self.norm is not None and self.norm.centred):
            return "weight", "bias"
        return () if self.norm is None else ("weight",)


@dataclass
class TokenChain:
    """Members in order, and what comes in and leaves.

    Args:
        members: Each makes a value.
        inputs: Nodes of what comes in; ``tables`` are the last of them.
        tables: Cosines and sines of rotary position embeddings.
        outputs: Nodes of the values that others use.
        same: Nodes that pass a value on unchanged, and the node that made it.
        modules: Names of the modules that the chain computes, linear layers among them.
    """

    members: list[Member]
    inputs: list[fx.Node] = field(default_factory=list)
    tables: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    same: dict[fx.Node, fx.Node] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)

    @property
    def layers(self) -> list[str]:
        """Names of the linear layers."""
        return [member.module for member in self.members if member.kind == "linear"]

    @property
    def is_plain(self) -> bool:
        """Whether it has linear layers, sums, ReLU and dropout alone."""
        kinds = "linear", "add", "relu", "dropout"
        return all(member.kind in kinds for member in self.members)

    @property
    def apart(self) -> list[Member]:
        """Members whose heads take their shape from a value that is not the chain's, or leave it as a dimension."""
        known = {*self.inputs, *(member.node for member in self.members)}
        leaving = {*self.outputs}
        return [
            own
            for own in self.members
            if own.moves
            and (not own.moves.bases <= known or (own.has_heads and own.node in leaving))
        ]

    @property
    def replaced(self) -> set[fx.Node]:
        """Nodes that the chain computes; sizes and heads that others take too are computed for these once more."""
        found = {node for member in self.members for node in member.nodes} | set(self.same)
        views = [n for own in self.members if own.head_norm for n in own.head_norm.nodes[:-1]]
        views += [n for own in self.members if own.turned for n in own.turned.nodes[:-1]]
        views += [n for own in self.members if own.piece for n in own.piece.nodes[:-1]]
        views += [n for own in self.members if own.heads for n in own.heads.before]
        for node in reversed(views):  # users come later
            if any(user not in found for user in node.users):
                found.discard(node)
        return found
