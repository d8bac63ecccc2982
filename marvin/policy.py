"""What decides formats: a frozen record of hyper-parameters, and functions from records to records."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor

from fixedpoint_kernels import BlockFloat, FixedPoint
from fixedpoint_kernels.rounding import Rounding
from marvin.channels import ChannelFormat
from marvin.observations import Inputs
from marvin.record import PlainRecord
from marvin.rounding import Format
from marvin.shards import Shard
from marvin.trace import Switch

__all__ = [
    "ActivationFormats",
    "FixedPolicy",
    "Layer",
    "LayerFormat",
    "Measured",
    "Policy",
    "Rules",
    "Step",
    "Update",
    "check_policy",
    "fields_of",
    "restored",
    "word_length",
]


@dataclass(frozen=True)
class Rules:
    """What a policy wants of the model and of the optimizer; the same for all its objects.

    Args:
        tensors: Names of float32 tensors of the weight's shape in each layer's state, at first 0.
        weight_rounding: How masters are rounded into the model.
        activation_rounding: How activations are rounded in training.
        quantizes_gradients: Whether gradients are rounded to their layer's format where the user
            does not say.
        quantizes_norms: Whether normalisation layers round their activations.
        quantizes_pools: Whether average pooling rounds its activations, to the formats of the
            layer before it.
        quantizes_input: Whether the model's input is rounded, each sample for itself, to the first
            layer's outputs' format.
        one_dim: Format of parameters with fewer than two dimensions where the user does not say.
        observes_inputs: Whether the policy wants to know what layers' inputs are like, in the
            steps that ``Policy.observes`` names. ``activation_rounding`` must be ``"nearest"``.
        takes_shards: Whether processes may share a layer, each with a part of its tensors.
        owns_lr: Whether the policy schedules the learning rate, by ``lr_scale``, and ends the
            training.
    """

    tensors: tuple[str, ...] = ()
    weight_rounding: Rounding = "stochastic"
    activation_rounding: Rounding = "stochastic"
    quantizes_gradients: bool = False
    quantizes_norms: bool = True
    quantizes_pools: bool = True
    quantizes_input: bool = False
    one_dim: Literal["previous", "float"] = "previous"
    observes_inputs: bool = False
    takes_shards: bool = True
    owns_lr: bool = False


@dataclass(frozen=True)
class LayerFormat(PlainRecord):
    """The record of a policy that remembers nothing but the format.

    Args:
        fmt: Format of the weight; None for float32.
    """

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
        norms: 2-norms that ``Policy.update`` wants on the host, float64, 0-d, one a layer; may
            be empty. Where processes share a layer, each gives that of its part.
    """

    tensors: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    norms: Sequence[Tensor] = ()


@dataclass(frozen=True)
class Layer:
    """A layer as a policy sees it.

    Args:
        index: Position among the optimizer's parameters; numbers the layer's noise.
        name: Of its weight.
        settings: Hyper-parameters of its parameter group.
        record: What the policy remembers of it; has a field ``fmt``.
        tensors: The policy's own, by name.
        master: The float32 weight.
        shard: What of it this process holds: tensors are of that.
        norm: 2-norm of this step's gradient before it was normalised; None without a gradient.
        measured: The policy's own of ``Measured.norms``, of the whole layer.
        inputs: What the layer's inputs were like in this step, if that was observed.
    """

    index: int
    name: str
    settings: Mapping[str, Any]
    record: Any
    tensors: Mapping[str, Tensor]
    master: Tensor
    shard: Shard
    norm: float | None = None
    measured: float | None = None
    inputs: Inputs | None = None


@dataclass(frozen=True)
class Step:
    """What is common to all layers in a step.

    Args:
        number: Steps done, this one included.
        seed: Of the optimizer's noise.
        settings: Hyper-parameters of the first group.
        loss: As the user gave it, with the L1 penalty; None where there was none.
        samples: How many samples went forward in this process, as ``Policy.samples`` has it.
    """

    number: int
    seed: int
    settings: Mapping[str, Any]
    loss: float | None = None
    samples: int = 0


@dataclass(frozen=True)
class Update:
    """What a policy makes of a step.

    Args:
        shared: What is common to all layers.
        layers: As they came, with other records and tensors, in the same order.
        switches: Changes of format, for the trace.
    """

    shared: Any
    layers: Sequence[Layer]
    switches: Sequence[Switch] = ()


_NOW_OF_THE_OPTIMIZER = {
    "level": "strategy",
    "lr_scale": "lr_scale",
    "should_stop": "should_stop",
    "word_length": "mean_word_length()",
}
_EARLIER = {
    "start": "init",
    "on_step": "update",
    "on_epoch_end": "end_epoch",
    "load_record": "init",
}


class Policy(ABC):
    """Decides in which formats a model computes, and when they change.

    A policy is a frozen dataclass: its fields are its hyper-parameters. It remembers nothing. What
    it knows of a layer is a frozen *record*, a dataclass of plain values with a field ``fmt``, the
    weight's format; what is common to all layers is one more, the *shared* record. The optimizer
    keeps both, saves them with the fields, and hands them in. So a policy may serve many
    optimizers, and a training that is resumed has the fields that it was started with.

    It is asked in this order. ``init_shared`` and ``init`` give the first records. In each step
    ``measure`` computes on the device what the gradients tell, without changing anything; once
    the step is known to be finite, ``update`` gets the numbers, in one transfer with all others,
    and returns new records. ``end_epoch`` does the same where the user marks the end of an epoch.

    ``settings`` are the hyper-parameters that ``settings()`` names: each parameter group has them
    and may change them. Weights take ``record.fmt``; ``activation_formats`` may give activations
    others. ``rules`` says what the policy wants beside formats.
    """

    rules: ClassVar[Rules] = Rules()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if earlier := sorted(set(_EARLIER) & set(vars(cls))):
            now = ", ".join(f"{name} is now {_EARLIER[name]}" for name in earlier)
            raise TypeError(f"a policy is pure functions from records to records: {now}")

    def __getattr__(self, name: str) -> Any:
        if name in _NOW_OF_THE_OPTIMIZER:
            now = _NOW_OF_THE_OPTIMIZER[name]
            raise AttributeError(f"a policy remembers nothing: read optimizer.{now} instead")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def settings(self) -> dict[str, Any]:
        """Return the hyper-parameters that a parameter group may change: by default, the fields."""
        return fields_of(self)

    def check(self, settings: Mapping[str, Any]) -> None:
        """Refuse hyper-parameters that are out of range.

        Raises:
            ValueError: With the name, what is required and what came.
        """
        self.init(settings, self.init_shared())

    def init_shared(self) -> Any:
        """Return what is common to all layers before the first step: a frozen record, or None."""
        return None

    def load_shared(self, values: Mapping[str, Any] | None) -> Any:
        """Return the shared record of a state, which ``dataclasses.asdict`` made ``values`` of.

        Raises:
            ValueError: It is none of this policy's.
        """
        return restored(self.init_shared(), values)

    @abstractmethod
    def init(self, settings: Mapping[str, Any], shared: Any) -> Any:
        """Return the record of a layer that has seen no step."""

    def activation_formats(self, record: Any) -> ActivationFormats:
        """Return the formats of a layer's activations; by default, the weight's in and out."""
        return ActivationFormats(record.fmt, record.fmt)

    def measure(
        self, shared: Any, tensors: Sequence[Mapping[str, Tensor]], grads: Sequence[Tensor]
    ) -> Measured:
        """Look at the gradients of a group's layers, float32 and normalised where asked for.

        Args:
            shared: What is common to all layers.
            tensors: ``rules.tensors`` of the layers that have a gradient; not to be changed.
            grads: Their gradients; not to be changed, nor kept without a copy.
        """
        return Measured()

    def samples(self, settings: Mapping[str, Any], counted: int) -> int:
        """Return how many samples of a step this process saw.

        Args:
            settings: Hyper-parameters of the first group.
            counted: What ``marvin.quantize_activations`` counted; 0 without it.
        """
        return counted

    def observes(self, step: int, settings: Mapping[str, Any]) -> bool:
        """Say whether to observe what layers' inputs are like in a step.

        Args:
            step: Of the optimizer, counted from 1.
            settings: Hyper-parameters of the first group.
        """
        return False

    def update(self, shared: Any, layers: Sequence[Layer], step: Step) -> Update:
        """Return new records after a step's gradients.

        Args:
            shared: What is common to the layers.
            layers: All layers that are trained, those without a gradient too, in parameter order.
            step: What is common to them in this step.
        """
        return Update(shared, layers)

    def end_epoch(self, shared: Any, layers: Sequence[Layer], step: Step) -> Update:
        """Return new records at the end of an epoch."""
        return Update(shared, layers)

    def lr_scale_at(self, shared: Any) -> float:
        """Return what the learning rates are to be multiplied by, all in all."""
        return 1.0

    def should_stop_at(self, shared: Any) -> bool:
        """Say whether the training is over as far as the policy is concerned."""
        return False


@dataclass(frozen=True)
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

    def init(self, settings: Mapping[str, Any], shared: None) -> LayerFormat:
        """See ``Policy``."""
        return LayerFormat(FixedPoint(settings["wl"], settings["fl"], settings["symmetric"]))


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


def fields_of(policy: Policy) -> dict[str, Any]:
    """Return a policy's fields: its hyper-parameters, all of them."""
    if not dataclasses.is_dataclass(policy):
        return {}
    return {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)}


def word_length(fmt: Format | None) -> int:
    """Return the bits of a number of ``fmt``; 32 for float32."""
    return 32 if fmt is None else fmt.wl


def restored(record: Any, values: Mapping[str, Any] | None) -> Any:
    """Return a record as ``record``, with the values that ``dataclasses.asdict`` made of another.

    Args:
        record: Of the same class; what ``values`` lacks stays.
        values: Plain values: formats are dictionaries, sequences may be lists.
    """
    if record is None or values is None:
        return None
    names = [f.name for f in dataclasses.fields(record) if f.name in values]
    return dataclasses.replace(record, **{name: _value(values[name]) for name in names})


def _value(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(value)
    if not isinstance(value, Mapping):
        return value
    if "shifts" in value:
        return ChannelFormat(FixedPoint(**value["fmt"]), tuple(value["shifts"]))
    return FixedPoint(**value) if "fl" in value else BlockFloat(**value)
