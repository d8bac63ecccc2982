"""What all exporters share: a network as exact operations on integers, and roundings.

A value is an array of integer codes with a binary point: ``value = code * 2**-fl``. ``Round`` and
``AveragePool`` round to a format, nearest, ties to even, and saturate; every other operation is
exact, so its codes are as wide as they must be. Records hold what is fixed; ``values`` says for
each what its codes can be.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fixedpoint_kernels import FixedPoint
from fixedpoint_kernels.formats import LONGEST_FL
from marvin.channels import ChannelFormat
from marvin.display import columns

__all__ = [
    "FLOAT32_BITS",
    "Add",
    "Affine",
    "AveragePool",
    "Channel",
    "Conv",
    "Flatten",
    "Input",
    "Linear",
    "MaxPool",
    "Network",
    "Operation",
    "Relu",
    "Round",
    "Value",
    "Weighted",
    "check_network",
]

Pair = tuple[int, ...]  # of images two numbers, of sequences one
FLOAT32_BITS = 24
"""Bits of a float32's significand."""
_INT64_BITS = 62


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation; its value has its name.

    Args:
        name: Of the module, or of the call; unique.
        inputs: Names of the values it takes.
    """

    name: str
    inputs: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Input(Operation):
    """The float32 values that come in; only ``Round`` takes them.

    Args:
        shape: Of one sample.
    """

    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Round(Operation):
    """Round to ``fmt``."""

    fmt: FixedPoint


@dataclass(frozen=True, eq=False)
class Weighted(Operation):
    """Multiplies by weights and sums.

    Args:
        weight: Codes, int64; shape ``(out, in / groups, height, width)``, of sequences
            ``(out, in / groups, length)``, or ``(out, in)``.
        weight_fmt: Of ``weight``.
        bias: Codes, int64, shape ``(out,)``, or None.
        bias_fmt: Of ``bias``; unused where there is none.
        per_channel: Of weights with an ``fl`` for each channel, these; ``weight_fmt`` is the shortest
            format that all channels share. None where there is one ``fl``.
    """

    weight: Tensor
    weight_fmt: FixedPoint
    bias: Tensor | None
    bias_fmt: FixedPoint
    per_channel: ChannelFormat | None = field(default=None, kw_only=True)

    @property
    def word(self) -> FixedPoint:
        """Format of the weights; with an ``fl`` for each channel, that of the coarsest."""
        return self.per_channel.fmt if self.per_channel else self.weight_fmt

    @property
    def trailing_zeros(self) -> tuple[int, ...]:
        """For each channel, ``k`` such that its weights are multiples of ``2**k``."""
        if self.per_channel is None:
            return (0,) * len(self.weight)
        finest = max(self.per_channel.shifts)
        return tuple(finest - shift for shift in self.per_channel.shifts)


@dataclass(frozen=True, eq=False)
class Conv(Weighted):
    """A convolution of images, or of sequences, with zeros around them."""

    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int


@dataclass(frozen=True, eq=False)
class Linear(Weighted):
    """A linear layer."""


@dataclass(frozen=True, eq=False)
class Affine(Operation):
    """``scale * x + offset`` in each channel: batch normalisation when it is used.

    Args:
        scale: Codes, int64, shape ``(channels,)``.
        scale_fmt: Of ``scale``.
        offset: Codes, int64, shape ``(channels,)``.
        offset_fmt: Of ``offset``.
    """

    scale: Tensor
    scale_fmt: FixedPoint
    offset: Tensor
    offset_fmt: FixedPoint

    def shift(self, fl: int) -> tuple[Tensor, int] | None:
        """Return ``b`` and its ``fl``, if this is ``scale * (x + b)``; 0 where the scale is 0.

        Args:
            fl: Of ``x``.

        Returns:
            Codes, int64, shape ``(channels,)``, with an ``fl`` no smaller than that of ``x``; None
            where an offset is no multiple of its scale, or int64 does not hold ``b``.
        """
        own_fl = self.offset_fmt.fl - self.scale_fmt.fl
        steps = torch.where(self.scale == 0, 1, self.scale)
        if (self.offset % steps).any():
            return None
        b = torch.where(self.scale == 0, 0, self.offset // steps)
        left = max(0, fl - own_fl)
        if int(b.abs().max()).bit_length() + left > _INT64_BITS:
            return None
        return b << left, own_fl + left

    @cached_property
    def numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        """``b``, ``scale`` and ``c`` such that this is ``(x + b) * scale + c``, float64, shape ``(channels,)``.

        ``c`` is 0 where the offset is a multiple of the scale: then ``x + b`` is as short as can be. They are
        found when the network is made, since no tracer follows how: it depends on values.
        """
        shift = self.shift(-LONGEST_FL)
        b, fl = (torch.zeros_like(self.scale), 0) if shift is None else shift
        rest = torch.where((self.scale == 0) | (shift is None), self.offset, 0)
        scale = self.scale.double() * self.scale_fmt.lsb
        return b.double() * 2.0**-fl, scale, rest.double() * self.offset_fmt.lsb


@dataclass(frozen=True, eq=False)
class Add(Operation):
    """The sum of two values, at the larger ``fl`` of both."""


@dataclass(frozen=True, eq=False)
class Relu(Operation):
    """The larger of the value and 0."""


@dataclass(frozen=True, eq=False)
class MaxPool(Operation):
    """The largest value in each window; what lies around the image is never the largest."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair


@dataclass(frozen=True, eq=False)
class AveragePool(Operation):
    """The mean of each window, zeros around the image included, rounded once to ``fmt``."""

    kernel: Pair
    stride: Pair
    padding: Pair
    fmt: FixedPoint


@dataclass(frozen=True, eq=False)
class Flatten(Operation):
    """All dimensions of a sample as one."""


@dataclass(frozen=True)
class Channel:
    """What the codes of one channel can be: see ``Value``.

    Args:
        low: Smallest code.
        high: Largest code.
        magnitude: Bound of every code and of every partial sum.
        trailing_zeros: All of these are multiples of ``2**trailing_zeros``.
    """

    low: int
    high: int
    magnitude: int
    trailing_zeros: int = 0


@dataclass(frozen=True)
class Value:
    """What an operation's codes can be, whatever the input.

    Args:
        shape: Of one sample.
        fl: Fractional length: a code is worth ``2**-fl``.
        low: Smallest code.
        high: Largest code.
        magnitude: Bound of every code and of every partial sum that leads to it, in any order.
        terms: Products summed for one code; 1 where nothing is summed.
        channels: Of the first dimension, where weights have an ``fl`` for each channel; of a
            flattened image, whose pixels share them, as many as the image has. Else nothing is known of them.
    """

    shape: tuple[int, ...]
    fl: int
    low: int
    high: int
    magnitude: int
    terms: int = 1
    channels: tuple[Channel, ...] = ()

    @property
    def bits(self) -> int:
        """Length of a two's complement word that holds every code."""
        return 1 + max(self.high.bit_length(), (~self.low).bit_length() if self.low < 0 else 0)

    @property
    def significand(self) -> int:
        """Bound of every code and partial sum, without zeros at the end that a channel shares."""
        return max((c.magnitude >> c.trailing_zeros for c in self.channels), default=self.magnitude)

    @property
    def channel_count(self) -> int:
        """Size of the first dimension; 1 where a sample is one number."""
        return self.shape[0] if self.shape else 1

    def channel(self, index: int) -> Channel:
        """Return what the codes of one channel can be."""
        if self.channels:
            return self.channels[index * len(self.channels) // self.channel_count]
        return Channel(self.low, self.high, self.magnitude)

    def is_in(self, fmt: FixedPoint) -> bool:
        """Say whether a format has every code, so that rounding to it changes nothing."""
        left = fmt.fl - self.fl
        if left < 0:
            return False
        return fmt.min_code <= self.low << left and self.high << left <= fmt.max_code

    def is_exact(self, significand_bits: int) -> bool:
        """Say whether floats with so many significant bits compute these codes without error."""
        return self.significand <= 2**significand_bits


@dataclass(frozen=True, eq=False)
class Network:
    """A network that can be exported.

    Args:
        operations: In an order in which they can be computed; the first is the input, the last
            gives the output.
        values: Of each operation but the input.
        origin: Where the formats of activations come from: ``"trained"`` or ``"calibrated"``.
        heads: Label and value of each output of a model that has several, or one in a dictionary;
            empty where it has one without a label.
        chosen: Formats that neither training nor calibration decided, but the range of samples.
        defaults: Arguments of the model's ``forward`` that were taken at their defaults: ``"mask=None"``.
    """

    operations: tuple[Operation, ...]
    values: Mapping[str, Value]
    origin: str
    heads: tuple[tuple[str, str], ...] = ()
    chosen: Mapping[str, FixedPoint] = field(default_factory=dict)
    defaults: tuple[str, ...] = ()

    def __repr__(self) -> str:
        words, rows = self.words(), []
        for op in self.operations[1:]:
            value, fmt = self.values[op.name], words.get(op.name, "")
            rows.append((op.name, type(op).__name__, str(fmt), str(value.bits), str(value.shape)))
        head = f"{len(rows)} operations on samples of shape {self.input.shape}"
        table = columns(("name", "operation", "format", "bits of a code", "shape"), rows)
        return f"{head}, formats {self.origin}\n{table}"

    @property
    def input(self) -> Input:
        """What comes in."""
        first = self.operations[0]
        assert isinstance(first, Input)
        return first

    @property
    def takes_indices(self) -> bool:
        """Whether what comes in are whole numbers that choose rows of a table."""
        return all(hasattr(op, "weight") for op in self.users.get(self.input.name, []))

    @property
    def output(self) -> str:
        """The name of what comes out; of several heads, of the first."""
        return next(iter(self.outputs.values()))

    @property
    def outputs(self) -> dict[str, str]:
        """The name of the value of each head, by its label; without one, this is ``"output"``."""
        return dict(self.heads) or {"output": self.operations[-1].name}

    @cached_property
    def users(self) -> dict[str, list[Operation]]:
        """The operations that take a value, by its name; no key where none does."""
        found: dict[str, list[Operation]] = {}
        for op in self.operations:
            for name in op.inputs:
                found.setdefault(name, []).append(op)
        return found

    @cached_property
    def _by_name(self) -> dict[str, Operation]:
        return {op.name: op for op in self.operations}

    def operation(self, name: str) -> Operation:
        """Return the operation that gives a value.

        Raises:
            KeyError: No operation does.
        """
        if name not in self._by_name:
            known = ", ".join(self._by_name)
            raise KeyError(
                f"name must be that of an operation, got {name!r}; there are {known:.200}"
            )
        return self._by_name[name]

    def formats(self) -> dict[str, FixedPoint]:
        """Return the format of each rounding, by its name; tables and averages round too."""
        found = ((op.name, getattr(op, "fmt", None)) for op in self.operations)
        return {name: fmt for name, fmt in found if isinstance(fmt, FixedPoint)}

    def weight_formats(self) -> dict[str, FixedPoint]:
        """Return the format of each layer's weights, by the layer's name."""
        return {op.name: op.weight_fmt for op in self.operations if isinstance(op, Weighted)}

    def words(self) -> dict[str, FixedPoint]:
        """Return the format of each rounding, and the ``word`` of each layer's weights."""
        layers = (op for op in self.operations if isinstance(op, Weighted))
        return self.formats() | {op.name: op.word for op in layers}


def check_network(network: object) -> None:
    """Refuse what is no network where one is exported or run.

    Raises:
        TypeError: It is not a ``Network``, but the model, say.
    """
    if not isinstance(network, Network):
        raise TypeError(
            f"a network must come first, got {type(network).__name__}: write "
            "network = describe(model, samples)"
        )
