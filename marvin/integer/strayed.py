"""Weights that somebody moved far from the numbers of their format: a batch norm was folded into them, say."""

from collections.abc import Iterable
from typing import cast
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from fixedpoint_kernels import FixedPoint
from fixedpoint_kernels._torch_private.modes import is_watched
from fixedpoint_kernels._torch_private.modules import table_of
from fixedpoint_kernels._torch_private.tensors import versions_of
from fixedpoint_kernels.memory import PLAIN
from marvin.channels import ChannelFormat
from marvin.integer.formats import carried, choose
from marvin.marks import on_host
from marvin.rounding import round_one
from marvin.warned import warn_user

__all__ = ["Strayed", "look_at"]

_MUCH = 0.05
"""Of a weight's norm: averages of rounded weights, of 8 bits, are nearer to its format."""
_OTHER = torch.empty(0, device="meta")  # in the place of weights of other classes
_NAMED: WeakSet[nn.Module] = WeakSet()  # layers that a warning has named


class Strayed:
    """Looks whether converted layers multiply what their weights are, each time somebody wrote to one.

    Args:
        layers: With integer products, in eval mode.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        tables = ((own, table_of(own, "weight")) for own in layers)
        own = [
            pair for pair in tables if pair[1] is not vars(pair[0])
        ]  # other weights are computed
        # weak ones: _ALONE would keep for ever what its values lead to
        self._layers, self._tables = [ref(layer) for layer, _ in own], [table for _, table in own]
        self._before: list[tuple[int, int]] = [(-1, 0)] * len(self._layers)

    def look(self) -> None:
        """Warn once of each layer whose weight counts as another."""
        found = [own.get("weight") for own in self._tables]  # since computed: none
        if is_watched():
            return
        if not {*map(type, found)} <= PLAIN:
            found = [weight if type(weight) in PLAIN else _OTHER for weight in found]
        weights = cast("list[Tensor]", found)
        now = list(zip(versions_of(weights), map(Tensor.data_ptr, weights), strict=True))
        if now == self._before:
            return
        rows = zip(self._layers, weights, now, self._before, strict=True)
        changed = [
            (layer, weight, product)
            for known, weight, own, before in rows
            if own != before and not weight.is_meta
            if (layer := known()) is not None and layer not in _NAMED
            if not isinstance(product := choose(layer, carried(layer)[0]), str)
        ]
        self._before = now
        shares = on_host([_moved(weight, product.weight) for _, weight, product in changed])
        for (layer, weight, _), share in zip(changed, shares, strict=True):
            if share > _MUCH:
                _NAMED.add(layer)
                size = " x ".join(map(str, weight.shape))
                warn_user(
                    f"weights must be numbers of their format, got others in a converted {type(layer).__name__} "
                    f"of {size}: they count as the nearest ones, which moves them by {share:.0%} of their norm. "
                    "Call marvin.integer.revert(model) before a batch norm is folded into them, or before "
                    "other code computes them"
                )


@torch.no_grad()
def _moved(weight: Tensor, fmt: FixedPoint | ChannelFormat) -> Tensor:
    """Return by which part of its norm a weight moves when it is rounded."""
    own = weight.float()
    moved = vector_norm(round_one(own, fmt, rounding="nearest") - own)
    return moved / vector_norm(own).clamp_min(torch.finfo(torch.float32).tiny)


def look_at(layer: nn.Module) -> None:
    """Look at one layer, which runs alone; see ``Strayed``."""
    found = _ALONE.get(layer)
    if found is None:
        found = _ALONE[layer] = Strayed([layer])
    found.look()


_ALONE: WeakKeyDictionary[nn.Module, Strayed] = WeakKeyDictionary()
