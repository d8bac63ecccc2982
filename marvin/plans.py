"""What an optimizer looks up once for many steps, and how long that holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import NamedTuple

from torch import Tensor
from torch.optim.optimizer import StateDict

from fixedpoint_kernels.compact import Targets as CompactTargets
from fixedpoint_kernels.sgd import Targets
from marvin.policies.records import Layer
from marvin.rounding import Format
from marvin.shards import Shard

__all__ = ["Members", "Plans", "Rounding", "Trained"]


@dataclass(frozen=True)
class Members:
    """Some parameters of one group, and what belongs to each.

    Args:
        params: The parameters; so many are shards and masters.
        shards: What of them this process holds.
        masters: As the wrapped optimizer sees them; the parameter itself where it has none.
        layers: Places of the layers among the parameters; so many are the lists below.
        positions: Of the layers among all of the optimizer's parameters.
        states: Of the layers.
        compact: Whether the state of each parameter is compact.
    """

    params: Sequence[Tensor]
    shards: Sequence[Shard]
    masters: Sequence[Tensor]
    layers: Sequence[int]
    positions: Sequence[int]
    states: Sequence[StateDict]
    compact: Sequence[bool]


@dataclass(frozen=True)
class Rounding:
    """How to round some parameters.

    Args:
        positions: Of all of them among the optimizer's parameters.
        own: The states of all.
        masters: In which state, and under which name, each tensor of a master is.
        floats: Parameters without a format, and their states.
        rounded: The others.
        states: Of these, one each; so are the lists below.
        formats: To which they are rounded.
        offsets: Where in the whole tensors that begins.
        is_fixed: Whether no format is of another kind than ``FixedPoint``.
        targets: All of them, for moving and rounding in one pass; None where a format is of
            another kind, or a state compact.
    """

    positions: list[int]
    own: list[StateDict]
    masters: list[tuple[StateDict, str]]
    floats: list[tuple[Tensor, StateDict]]
    rounded: list[Tensor]
    states: list[StateDict]
    formats: list[Format]
    offsets: list[int]
    is_fixed: bool
    targets: Targets | None


class Trained(NamedTuple):
    """A layer that is trained: its weight, its state, and what a policy sees that stays as it is."""

    weight: Tensor
    state: StateDict
    layer: Layer


class Plans:
    """What was looked up of an optimizer's parameters and the dictionaries in its state.

    The optimizer begins anew where a parameter gets a master, where a state is loaded, and where
    it finds other dictionaries in its state: trainers put them there to move it to a device.
    ``rounding`` also ends where a format changes: whoever changes one clears it.

    Attributes:
        members: By the parameters' ids.
        rounding: By the parameters' ids.
        trained: By position among the optimizer's parameters; None before it was asked for.
        compact: What a step writes where states are compact, and how it is rounded; None before one.
    """

    def __init__(self, states: Sequence[Mapping[str, object]] = ()) -> None:
        self._states = states
        self.members: dict[tuple[int, ...], Members] = {}
        self.rounding: dict[tuple[int, ...], Rounding] = {}
        self.trained: dict[int, Trained] | None = None
        self.compact: tuple[Rounding, CompactTargets] | None = None

    def hold(self, state: Mapping[Tensor, Mapping[str, object]]) -> bool:
        """Say whether these are the dictionaries in ``state``, the very same ones."""
        return len(state) == len(self._states) and all(map(is_, state.values(), self._states))
