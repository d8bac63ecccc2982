"""What policies give and take: frozen records of plain values."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
from torch import Tensor

from fixedpoint_kernels import BlockFloat, FixedPoint
from fixedpoint_kernels.compact import Sum
from fixedpoint_kernels.rounding import Rounding
from marvin.channels import ChannelFormat
from marvin.policies.observer import Inputs
from marvin.policies.trace import Switch
from marvin.ranks import ALONE, Processes
from marvin.rounding import Format
from marvin.settings import Settings
from marvin.shards import Shard

__all__ = [
    "ActivationFormats",
    "Layer",
    "LayerFormat",
    "Measured",
    "PlainRecord",
    "Rules",
    "Step",
    "Update",
    "check_plain",
    "comes_back",
    "fractional_length",
    "is_frozen",
    "plain_value",
    "restored",
    "word_length",
]


class PlainRecord:
    """A record without tensors, which is on every device.

    Trainers (Lightning) that move an optimizer's state ask whatever is in it to move.
    """

    def to(self, *_: object, **__: object) -> Self:
        """Return itself."""
        return self


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
        common: Settings that are read from the first parameter group: others may not differ.
        by_process: Settings of which each of several processes may have its own.

    Raises:
        ValueError: Inputs are observed and not rounded to nearest.
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
    common: tuple[str, ...] = ()
    by_process: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.observes_inputs and self.activation_rounding != "nearest":
            raise ValueError(
                'activation_rounding must be "nearest" where inputs are observed, got '
                f"{self.activation_rounding!r}"
            )


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
        tensors: New values of the policy's own tensors, by name, one a layer each; a ``Sum`` is in
            few bytes already.
        norms: 2-norms that ``Policy.update`` wants on the host, float64, 0-d, one a layer; may
            be empty. Where processes share a layer, each gives that of its part.
    """

    tensors: Mapping[str, Sequence[Tensor | Sum]] = field(default_factory=dict)
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
    settings: Settings
    record: Any
    tensors: Mapping[str, Tensor]
    master: Tensor
    shard: Shard
    norm: float | None = None
    measured: float | None = None
    inputs: Inputs | None = None

    def but(self, **changes: object) -> Self:
        """Return a copy with other values, as ``dataclasses.replace`` does in five times the time.

        Raises:
            TypeError: One is no field.
        """
        copy = object.__new__(type(self))
        vars(copy).update(vars(self), **changes)
        if len(vars(copy)) != len(vars(self)):
            unknown = ", ".join(sorted(changes.keys() - vars(self)))
            raise TypeError(f"but() takes fields of a layer, got no field {unknown}")
        return copy


@dataclass(frozen=True)
class Step:
    """What is common to all layers in a step.

    Args:
        number: Steps done, this one included.
        seed: Of the optimizer's noise.
        settings: Hyper-parameters of the first group.
        loss: As the user gave it, with the L1 penalty; None where there was none.
        samples: How many samples went forward in this process, as ``Policy.samples`` has it.
        frozen: Layers that have formats and do not train now; their records stay.
        processes: Those that train these layers; all must take the same decisions.
    """

    number: int
    seed: int
    settings: Settings
    loss: float | None = None
    samples: int = 0
    frozen: Sequence[Layer] = ()
    processes: Processes = ALONE


@dataclass(frozen=True)
class Update:
    """What a policy makes of a step.

    Args:
        shared: What is common to all layers.
        layers: As they came, with other records and tensors, in the same order.
        switches: Changes of format, for the trace; the optimizer adds those that are left out.
    """

    shared: Any
    layers: Sequence[Layer]
    switches: Sequence[Switch] = ()


def word_length(fmt: Format | None) -> int:
    """Return the bits of a number of ``fmt``; 32 for float32."""
    return 32 if fmt is None else fmt.wl


def fractional_length(fmt: Format | None) -> int:
    """Return the fractional bits of a number of ``fmt``; 0 where each tensor has its own, or it is float32."""
    return fmt.fl if isinstance(fmt, FixedPoint | ChannelFormat) else 0


_NUMBERS = type(None), bool, int, float, str
_FORMATS = FixedPoint, BlockFloat, ChannelFormat
_OF_ACTIVATIONS = {f.name for f in dataclasses.fields(ActivationFormats)}


def check_plain(what: str, record: object) -> None:
    """Refuse a record that a state would not give back as it is.

    Args:
        what: Whose record it is, for the message.
        record: Of a layer, or of all.

    Raises:
        TypeError: It is no frozen dataclass, or a field is no plain value, or not one of the constructor's.
    """
    if not dataclasses.is_dataclass(record) or isinstance(record, type):
        raise TypeError(
            f"{what} must be a dataclass, which states save by its fields, got {record!r:.60}: write "
            "@dataclass(frozen=True) above a class with fields for what it has"
        )
    if not is_frozen(record):
        raise TypeError(
            f"{what} must be frozen, for a changed one is told from the one before, got {type(record).__name__}: write "
            "@dataclass(frozen=True) above the class, and give another by layer.but(record=...) or dataclasses.replace"
        )
    if computed := [f.name for f in dataclasses.fields(record) if not f.init]:
        raise TypeError(
            f"{what} must have fields that its constructor takes, for a state's are made by it, got "
            f"{', '.join(computed)} with init=False: write a property for what follows from other "
            "fields, and leave init=False out for others"
        )
    for name in (f.name for f in dataclasses.fields(record)):
        if not _is_saved(value := getattr(record, name)):
            raise TypeError(
                f"{what} must have numbers, strings, None, formats, ActivationFormats, tuples of these, "
                "or dictionaries from strings to numbers in its fields, for states save no others, got "
                f"{name}={value!r:.60}: write tuple(...) of a list, .item() of a tensor or of NumPy's "
                "numbers, and fields of the record's own for those of another dataclass"
            )


def is_frozen(value: object) -> bool:
    """Say whether an object is of a frozen dataclass, or of none."""
    params = getattr(value, "__dataclass_params__", None)
    return params is None or params.frozen


def _is_saved(value: object) -> bool:
    """Say whether ``restored_value`` makes the same value of what a state has of it."""
    if type(value) is tuple:
        return all(map(_is_saved, value))
    if type(value) is ActivationFormats:
        return all(map(_is_saved, vars(value).values()))
    if type(value) is dict:
        is_plain = all(type(k) is str and type(v) in _NUMBERS for k, v in value.items())
        return is_plain and not _is_format(value)
    return type(value) in _NUMBERS + _FORMATS


def comes_back(value: object) -> bool:
    """Say whether a state gives a hyper-parameter back as it is: lists come as tuples, some dictionaries as formats."""
    if isinstance(value, list | tuple):
        return isinstance(value, tuple) and all(map(comes_back, value))
    if isinstance(value, np.generic):  # torch.load takes none unless told
        return False
    return not isinstance(value, Mapping) or not _is_format(value)


def _is_format(values: Mapping[str, object]) -> bool:
    return bool({"fmt", "fl", "wl"} & values.keys()) or values.keys() == _OF_ACTIVATIONS


def restored(record: Any, values: Mapping[str, Any] | None) -> Any:
    """Return a record as ``record``, with the values that ``dataclasses.asdict`` made of another.

    Args:
        record: Of the same class; what ``values`` lacks stays.
        values: Plain values: formats are dictionaries, sequences may be lists.
    """
    if record is None or values is None:
        return None
    names = [f.name for f in dataclasses.fields(record) if f.name in values]
    return dataclasses.replace(record, **{name: restored_value(values[name]) for name in names})


def plain_value(value: object) -> object:
    """Return a value as ``dataclasses.asdict`` makes it of one in a record, formats as dictionaries."""
    if type(value) is tuple:
        return tuple(map(plain_value, value))
    is_format = isinstance(value, (*_FORMATS, ActivationFormats))
    return dataclasses.asdict(value) if is_format else value


def restored_value(value: object) -> Any:
    """Return a value of a record from what ``dataclasses.asdict`` made of it.

    Raises:
        TypeError: It is a format that lacks a number.
    """
    if isinstance(value, list | tuple):
        return tuple(map(restored_value, value))
    if not isinstance(value, Mapping) or not _is_format(value):
        return value  # a plain one, a policy's own table among them
    if value.keys() == _OF_ACTIVATIONS:
        return ActivationFormats(**{name: restored_value(fmt) for name, fmt in value.items()})
    if "shifts" in value:
        return ChannelFormat(FixedPoint(**value["fmt"]), tuple(value["shifts"]))
    return FixedPoint(**value) if "fl" in value else BlockFloat(**value)
