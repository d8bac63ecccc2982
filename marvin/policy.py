"""What an optimizer asks to know each layer's format; and the policy that never changes one."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from fixedpoint_kernels import BlockFloat, FixedPoint
from fixedpoint_kernels.rounding import Rounding
from marvin.channels import ChannelFormat
from marvin.observations import Observations
from marvin.record import PlainRecord
from marvin.rounding import Format
from marvin.shards import Shard
from marvin.trace import Switch

__all__ = [
    "ActivationFormats",
    "FixedPolicy",
    "Kept",
    "Layer",
    "Measured",
    "Policy",
    "Record",
    "Step",
    "check_policy",
    "layer_tensors",
    "word_length",
]


class Record(Protocol):
    """What a policy remembers of one layer: a frozen dataclass of plain values."""

    @property
    def fmt(self) -> Format | None:
        """Format of the weight; None for float32."""
        ...


@dataclass(frozen=True)
class Kept(PlainRecord):
    """The record of a policy that remembers nothing but the format."""

    fmt: Format | None


@dataclass(frozen=True)
class ActivationFormats:
    """Formats in which a layer sees activations; None leaves them as they are.

    Args:
        inputs: Of what comes in.
        outputs: Of what goes out.
        gradients: Of the gradient that comes back to the outputs.
    """

    inputs: Format | None = None
    outputs: Format | None = None
    gradients: Format | None = None


@dataclass(frozen=True)
class Measured:
    """What a policy computed from the gradients of a step, before it is known to be finite.

    Args:
        tensors: New values of the policy's own tensors, by name, one a layer each.
        norms: 2-norms that ``Policy.on_step`` wants on the host, float64, 0-d, one a layer; may
            be empty. Where processes share a layer, each gives that of its part.
    """

    tensors: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    norms: Sequence[Tensor] = ()


@dataclass(slots=True)
class Layer:
    """A layer as a policy sees it.

    Args:
        index: Position among the optimizer's parameters; numbers the layer's noise.
        name: Of its weight.
        settings: Hyper-parameters of its parameter group.
        state: The optimizer's state of the weight: ``"master"``, the policy's own tensors, and
            the record under ``"layer"``, which the policy replaces.
        shard: What of it this process holds: ``state`` has tensors of that.
        norm: 2-norm of this step's gradient before it was normalised; None without a gradient.
        measured: The policy's own of ``Measured.norms``, of the whole layer.
    """

    index: int
    name: str
    settings: Mapping[str, Any]
    state: dict[str, Any]
    shard: Shard
    norm: float | None = None
    measured: float | None = None


@dataclass(frozen=True)
class Step:
    """What is common to all layers in a step.

    Args:
        number: Steps done, this one included.
        seed: Of the optimizer's noise.
        settings: Hyper-parameters of the first group.
        loss: As the user gave it, with the L1 penalty; None where there was none.
    """

    number: int
    seed: int
    settings: Mapping[str, Any]
    loss: float | None = None


class Policy(ABC):
    """Decides in which formats a model computes, and when they change.

    A policy is asked in this order. ``settings`` are its hyper-parameters: each parameter group
    has them and may change them. ``start`` gives a layer its first record. In each step
    ``measure`` computes on the device what the gradients tell, without changing anything; once
    the step is known to be finite, ``on_step`` takes the numbers, in one transfer with all
    others, and replaces records. ``on_epoch_end`` does the same where the user marks the end of
    an epoch. Records and tensors are in the optimizer's state, one set a layer; what is common
    to all layers is the policy's own and comes out of ``state_dict``. A policy object serves one
    optimizer.

    Weights take ``record.fmt``; ``activation_formats`` may give activations others.
    """

    tensors: ClassVar[tuple[str, ...]] = ()
    """Names of float32 tensors of the weight's shape in each layer's state, at first 0."""

    quantizes_gradients: ClassVar[bool] = False
    """Whether gradients are rounded to their layer's format where the user does not say."""

    quantizes_norms: ClassVar[bool] = True
    """Whether normalisation layers round their activations."""

    quantizes_pools: ClassVar[bool] = True
    """Whether average pooling rounds its activations, to the formats of the layer before it."""

    weight_rounding: ClassVar[Rounding] = "stochastic"
    """How masters are rounded into the model."""

    activation_rounding: ClassVar[Rounding] = "stochastic"
    """How activations are rounded in training."""

    one_dim: ClassVar[Literal["previous", "float"]] = "previous"
    """Format of parameters with fewer than two dimensions where the user does not say."""

    quantizes_input: ClassVar[bool] = False
    """Whether the model's input is rounded, each sample for itself, to the first layer's outputs'
    format."""

    takes_shards: ClassVar[bool] = True
    """Whether processes may share a layer, each with a part of its tensors."""

    owns_lr: ClassVar[bool] = False
    """Whether the policy schedules the learning rate, by ``lr_scale``, and ends the training."""

    @property
    def observations(self) -> Observations | None:
        """Where to put what layers' inputs are like in the steps that ``observes`` names.

        The inputs are rounded to nearest then, so ``activation_rounding`` must be that.
        """
        return None

    @property
    def lr_scale(self) -> float:
        """What the policy has multiplied the learning rates by so far."""
        return 1.0

    @property
    def should_stop(self) -> bool:
        """Whether the training is over as far as the policy is concerned."""
        return False

    def settings(self) -> dict[str, Any]:
        """Return hyper-parameters that a parameter group may change."""
        return {}

    def check(self, settings: Mapping[str, Any]) -> None:
        """Refuse hyper-parameters that are out of range.

        Raises:
            ValueError: With the name, what is required and what came.
        """
        self.start(settings)

    @abstractmethod
    def start(self, settings: Mapping[str, Any]) -> Record:
        """Return the record of a layer that has seen no step."""

    def activation_formats(self, record: Any) -> ActivationFormats:
        """Return the formats of a layer's activations; by default, the weight's in and out."""
        return ActivationFormats(record.fmt, record.fmt)

    def measure(self, states: Sequence[Mapping[str, Any]], grads: Sequence[Tensor]) -> Measured:
        """Look at the gradients of a group's layers, float32 and normalised where asked for.

        Args:
            states: Of the layers that have a gradient; not to be changed.
            grads: Their gradients; not to be changed, nor kept without a copy.
        """
        return Measured()

    def on_step(self, layers: Sequence[Layer], step: Step) -> list[Switch]:
        """Replace records after a step's gradients; return what switched.

        Args:
            layers: All layers, those without a gradient too, in parameter order.
            step: What is common to them.
        """
        return []

    def observes(self, step: int, settings: Mapping[str, Any]) -> bool:
        """Say whether ``observations`` should hold step ``step``, counted from 1.

        Args:
            step: Of the optimizer.
            settings: Hyper-parameters of the first group.
        """
        return False

    def on_skip(self) -> None:  # noqa: B027  most have nothing to forget
        """Forget what was observed for a step that was not finite and is left out."""

    def on_epoch_end(self, layers: Sequence[Layer], step: Step) -> list[Switch]:
        """Replace records at the end of an epoch; return what switched."""
        return []

    def load_record(self, values: Mapping[str, Any]) -> Record:
        """Return the record that ``dataclasses.asdict`` made ``values`` of."""
        return Kept(load_format(values["fmt"]))

    def state_dict(self) -> dict[str, Any]:
        """Return what is common to all layers and decides the future, as plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027  there may be none
        """Continue from what ``state_dict`` returned."""


@dataclass(eq=False)
class FixedPolicy(Policy):
    """One fixed-point format for all weights and activations, from the start to the end.

    Args:
        wl: Word length, bits, sign included.
        fl: Fractional length, bits.
        symmetric: Leave out the format's smallest code.

    Raises:
        ValueError: There is no such format.
    """

    wl: int = 8
    fl: int = 4
    symmetric: bool = False

    def __post_init__(self) -> None:
        self.check(self.settings())

    def settings(self) -> dict[str, Any]:
        """See ``Policy``."""
        return dataclasses.asdict(self)

    def start(self, settings: Mapping[str, Any]) -> Kept:
        """See ``Policy``."""
        return Kept(FixedPoint(settings["wl"], settings["fl"], settings["symmetric"]))


def check_policy(policy: object) -> None:
    """Refuse what is no policy.

    Raises:
        TypeError: It is a class, or something else.
    """
    if isinstance(policy, type):
        name = policy.__name__
        raise TypeError(f"policy must be an object, got the class {name}: write {name}()")
    if not isinstance(policy, Policy):
        raise TypeError(
            f"policy must be one such as marvin.MarvinPolicy(), got {type(policy).__name__}"
        )


def word_length(fmt: Format | None) -> int:
    """Return the bits of a number of ``fmt``; 32 for float32."""
    return 32 if fmt is None else fmt.wl


def load_format(values: Mapping[str, Any] | None) -> Format | None:
    """Return the format that ``dataclasses.asdict`` made ``values`` of."""
    if values is None:
        return None
    if "shifts" in values:
        return ChannelFormat(FixedPoint(**values["fmt"]), tuple(values["shifts"]))
    return FixedPoint(**values) if "fl" in values else BlockFloat(**values)


def layer_tensors(names: Iterable[str], master: Tensor) -> dict[str, Tensor]:
    """Return a policy's tensors of a layer that has seen no step."""
    return {name: torch.zeros_like(master) for name in names}
